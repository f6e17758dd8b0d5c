"""Start a gate where none runs, and end one (blocking)."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from dsec_runtime.errors import GateError
from dsec_runtime.keeper.protocol import Unpacker, pack
from dsecfs.locks import locked_file
from dsecfs.nodedirs import NodeDirs

START_S = 20.0
"""Longest wait for a gate to answer."""
ANOTHER = 75
"""Exit code of a gate that finds another one (EX_TEMPFAIL of sysexits.h)."""
LOG = "gate.log"
_OUTPUT = "gate.out"
"""What the interpreter says when it cannot start the gate; made anew by every start."""


def ask(dirs: NodeDirs, op: str, *, timeout_s: float = 5.0) -> dict[str, object] | None:
    """Ask the gate one thing; None if there is none that answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(dirs.gate))
            sock.sendall(pack({"n": 1, "op": op}))
            unpacker = Unpacker()
            while piece := sock.recv(1 << 16):
                for value, _ in unpacker.feed(piece):
                    return value
        except OSError:
            return None
    return None


def ensure_gate(dirs: NodeDirs) -> None:
    """A gate runs when this returns. GateError if none can be started."""
    if ask(dirs, "ping") is not None:
        return
    dirs.create()
    with locked_file(dirs.run / "gate.start", "start the gate", wait_s=START_S):
        deadline = time.monotonic() + START_S
        hint = f"see {dirs.run / LOG} and {dirs.run / _OUTPUT}"
        while ask(dirs, "ping", timeout_s=1.0) is None:
            if time.monotonic() > deadline:
                raise GateError(f"gate: does not answer on {dirs.gate}", hint=hint)
            code = _spawn(dirs)
            if code not in (None, ANOTHER):
                raise GateError(f"gate: ended at its start with exit code {code}", hint=hint)
            # One that has the lock may be about to answer, or to end.


def _spawn(dirs: NodeDirs) -> int | None:
    """The exit code of one that ended at once."""
    root = str(Path(__file__).resolve().parents[2])
    read, write = os.pipe2(os.O_CLOEXEC)
    with contextlib.closing(os.fdopen(read, "rb")), (dirs.run / _OUTPUT).open("wb") as output:
        try:
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "dsec_runtime.network",
                    str(dirs.data.absolute()),
                    str(dirs.run.absolute()),
                    str(write),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": root},
                pass_fds=[write],
                start_new_session=True,
            )
        finally:
            os.close(write)
        ready, _, _ = select.select([read], [], [], START_S)
        if not ready or not os.read(read, 1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(1.0)
    return None


def end_gate(dirs: NodeDirs) -> None:
    """End it: sandboxes are cut off. Nothing happens if none runs."""
    ask(dirs, "quit")
