"""`python -m dsec_runtime.keeper DATA RUN [READY]`: the process. READY is a descriptor that gets
a byte when it answers."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from dsec_runtime.bundle import control_groups
from dsec_runtime.keeper.holder import Shared, keep
from dsecfs.kernel.namespaces import enter_namespace
from dsecfs.locks import try_lock_file
from dsecfs.nodedirs import NodeDirs

CGROUP = "dsec/keeper"
OPEN_FILES = 1 << 20
_CONTROLLERS = ("memory", "pids", "cpu,cpuacct", "cpu", "freezer", "systemd", "unified")


def main() -> None:
    data, run = (Path(text) for text in sys.argv[1:3])
    ready = int(sys.argv[3]) if len(sys.argv) > 3 else None
    logging.basicConfig(format="%(asctime)s keeper[%(process)d] %(message)s", level=logging.INFO)
    dirs = NodeDirs(data, run)
    lock = try_lock_file(dirs.run / "keeper.lock")
    if lock is None:
        sys.exit("another keeper runs")
    _move_to_cgroup()
    if dirs.namespace.exists():
        enter_namespace(dirs.namespace)
    _raise_limits()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    place = dirs.run / "keeper"
    place.mkdir(mode=0o700, exist_ok=True)
    for left in place.iterdir():
        left.unlink()
    dirs.keeper.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(dirs.keeper))
    dirs.keeper.chmod(0o600)
    listener.listen(128)
    if ready is not None:
        os.write(ready, b"1")
        os.close(ready)
    keep(Shared(place, listener))
    dirs.keeper.unlink(missing_ok=True)


def _raise_limits() -> None:
    """Commands get limits of their own, and crun sets them when it cannot raise any more. Files:
    four descriptors per command that runs are ours."""
    for name in (n for n in dir(resource) if n.startswith("RLIMIT_")):
        kind = getattr(resource, name)
        soft, hard = resource.getrlimit(kind)
        with contextlib.suppress(OSError, ValueError):
            if kind == resource.RLIMIT_NOFILE:
                resource.setrlimit(kind, (max(soft, OPEN_FILES), max(hard, OPEN_FILES)))
            else:
                resource.setrlimit(kind, (soft, resource.RLIM_INFINITY))


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
