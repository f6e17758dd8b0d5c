"""Start a keeper where none runs, and end one (blocking)."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from dsec_runtime.errors import KeeperError
from dsec_runtime.keeper.protocol import Unpacker, pack
from dsecfs.locks import locked_file
from dsecfs.nodedirs import NodeDirs

START_S = 20.0
"""Longest wait for a keeper to answer."""
LOG = "keeper.log"


def ask(dirs: NodeDirs, op: str, *, timeout_s: float = 5.0) -> dict[str, object] | None:
    """Ask the keeper one thing; None if there is none that answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(dirs.keeper))
            sock.sendall(pack({"n": 1, "op": op}))
            unpacker = Unpacker()
            while piece := sock.recv(1 << 16):
                for value, _ in unpacker.feed(piece):
                    return value
        except OSError:
            return None
    return None


def ensure_keeper(dirs: NodeDirs) -> None:
    """A keeper runs when this returns. KeeperError if none can be started."""
    if ask(dirs, "ping") is not None:
        return
    dirs.create()
    with locked_file(dirs.run / "keeper.start", "start the keeper", wait_s=START_S):
        deadline = time.monotonic() + START_S
        while ask(dirs, "ping", timeout_s=1.0) is None:
            if time.monotonic() > deadline:
                raise KeeperError(
                    f"keeper: does not answer on {dirs.keeper}", hint=f"see {dirs.run / LOG}"
                )
            _spawn(dirs)


def _spawn(dirs: NodeDirs) -> None:
    root = str(Path(__file__).resolve().parents[2])
    read, write = os.pipe2(os.O_CLOEXEC)
    with contextlib.closing(os.fdopen(read, "rb")), (dirs.run / LOG).open("ab") as log:
        try:
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "dsec_runtime.keeper",
                    str(dirs.data.absolute()),
                    str(dirs.run.absolute()),
                    str(write),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": root},
                pass_fds=[write],
                start_new_session=True,
            )
        finally:
            os.close(write)
        ready, _, _ = select.select([read], [], [], START_S)
        if not ready or not os.read(read, 1):
            # Another one has the lock, or it failed: it is asked again, or its log has why.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)


def end_keeper(dirs: NodeDirs) -> None:
    """End it with everything it holds. Nothing happens if none runs."""
    ask(dirs, "quit")
