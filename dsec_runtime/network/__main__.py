"""`python -m dsec_runtime.network DATA RUN [READY]`: the gate's process. READY is a descriptor that
gets a byte when it answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import logging.handlers
import os
import signal
import socket
import sys
from pathlib import Path

from dsec_runtime.bundle import control_groups
from dsec_runtime.network.gate import GateServer
from dsec_runtime.network.start import ANOTHER, LOG
from dsecfs.locks import try_lock_file
from dsecfs.nodedirs import NodeDirs

CGROUP = "dsec/gate"
_CONTROLLERS = ("memory", "pids", "cpu,cpuacct", "cpu", "freezer", "systemd", "unified")
_LOG_BYTES = 4 << 20


def main() -> None:
    data, run = (Path(text) for text in sys.argv[1:3])
    ready = int(sys.argv[3]) if len(sys.argv) > 3 else None
    dirs = NodeDirs(data, run)
    lock = try_lock_file(dirs.run / "gate.lock")
    if lock is None:
        sys.exit(ANOTHER)
    handler = logging.handlers.RotatingFileHandler(
        dirs.run / LOG, maxBytes=_LOG_BYTES, backupCount=1
    )
    logging.basicConfig(
        format="%(asctime)s gate[%(process)d] %(message)s", level=logging.INFO, handlers=[handler]
    )
    _move_to_cgroup()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    dirs.gate.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    listener.bind(str(dirs.gate))
    os.umask(before)
    listener.listen(128)
    if ready is not None:
        os.write(ready, b"1")
        os.close(ready)
    asyncio.run(_serve(dirs.gate, listener))


async def _serve(path: Path, listener: socket.socket) -> None:
    await GateServer(path).serve(listener)


def _move_to_cgroup() -> None:
    """Leave the caller's control group, which may be a service that ends; best effort."""
    base = Path("/sys/fs/cgroup")
    version_2 = control_groups() == "v2"
    for place in [base] if version_2 else [base / name for name in _CONTROLLERS]:
        if place.is_dir():
            with contextlib.suppress(OSError):
                (place / CGROUP).mkdir(parents=True, exist_ok=True)
                (place / CGROUP / "cgroup.procs").write_text(str(os.getpid()))


if __name__ == "__main__":
    main()
