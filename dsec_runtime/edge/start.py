"""Start the edge in the background, and end it (blocking). Owns run/edge.log and who appends to it.

    run/edge.log        what the edge says; run/edge.log.1 what earlier ones said
    run/edge.start      held while somebody starts one

What must hold: when `start_edge` returns, the edge answers, or nothing of it runs and the error
has its last words; `stop_edge` ends exactly the process that listens on the node's socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from dsec_runtime.edge.client import EdgeClient
from dsec_runtime.errors import NoEdge, SandboxError
from dsecfs.errors import DeadlineExceeded
from dsecfs.locks import locked_file
from dsecfs.nodedirs import NodeDirs

START_S = 120.0
"""Longest wait for an edge to answer. It adopts what is there first."""
STOP_S = 30.0
"""Longest wait for its end: requests get 5 s (service.LINGER_S), calls into backends go on."""
MAX_LOG = 16 << 20
"""Bytes of the log at which a start begins a new one."""


def log_path(dirs: NodeDirs) -> Path:
    return dirs.run / "edge.log"


def edge_pid(dirs: NodeDirs) -> int | None:
    """The process that listens on the node's socket; None if there is none."""
    try:
        return EdgeClient(path=dirs.edge).peer_pid()
    except NoEdge:
        return None


def start_edge(dirs: NodeDirs, options: Iterable[tuple[str, str]] = ()) -> bool:
    """An edge answers when this returns; whether it was started now.

    `options` are settings of the command line. SandboxError with the end of its log when it does
    not start.
    """
    dirs.create()
    with locked_file(dirs.run / "edge.start", "start the edge", wait_s=START_S):
        if edge_pid(dirs) is not None:
            return False
        _spawn(dirs, [f"{name}={value}" for name, value in options])
        return True


def _spawn(dirs: NodeDirs, words: list[str]) -> None:
    path = log_path(dirs)
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > MAX_LOG:
            path.rename(path.with_name(f"{path.name}.1"))
    root = str(Path(__file__).resolve().parents[2])
    read, write = os.pipe2(os.O_CLOEXEC)
    with open(read, "rb", buffering=0) as ready, path.open("ab") as log:
        path.chmod(0o600)
        before = log.tell()
        try:
            child = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "dsec_runtime.edge"),
                    *("--ready", str(write), "--", *words),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Settings may have paths that are relative to where they were given.
                env={**os.environ, "PYTHONPATH": root},
                pass_fds=[write],
                start_new_session=True,
            )
        finally:
            os.close(write)
        found, _, _ = select.select([ready], [], [], START_S)
        if found and ready.read(1):
            return
        _end(child)
    said = last_line(path, before)
    late = "" if found else f"no answer within {START_S:g} s; "
    raise SandboxError(
        f"edge: did not start: {late}{said or f'exit code {child.returncode}'}",
        hint=f"{path} has more",
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """It failed, and is about to end; or it hangs."""
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(STOP_S)


def last_line(path: Path, after: int = 0) -> str:
    """The last line of a log that was written from byte `after` on, without date and process."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(after, end - 65536))
        lines = file.read().decode(errors="replace").split("\n")
        words = next((line for line in reversed(lines) if line.strip()), "")
        return words.partition(" ERROR ")[2].removeprefix("ended: ") or words.strip()
    return ""


def stop_edge(dirs: NodeDirs, *, force: bool = False) -> int | None:
    """End the edge; its process id, None if none ran. Sandboxes go on.

    DeadlineExceeded if it does not end in time; with `force` it is killed instead of asked.
    """
    pid = edge_pid(dirs)
    if pid is None:
        return None
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return pid
    with open(process, "rb", buffering=0):
        # The process that listened a moment ago: not one that has its number by now.
        if edge_pid(dirs) != pid:
            return pid
        number = signal.SIGKILL if force else signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        deadline = time.monotonic() + STOP_S
        while not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"edge (process {pid}): still runs {STOP_S:g} s after it was asked to end",
                    hint="dsec node stop --force kills it; sandboxes live on",
                )
    return pid
