"""A FUSE session as libfuse has it: mounted, INIT answered, no request read yet.

libfuse keeps the state of a session in the memory of the process that mounts; forks of it
can serve the session, nobody else. What must hold: the mounting process reads no request
but INIT. Its empty handlers would answer ENOSYS, which the kernel remembers for ever; and
the first read would make a pipe that all forks then share.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsecfs.errors import MountError
from dsecfs.fuse.config import FsConfig
from dsecfs.fuse.mountpoint import check_mountable, unmount

FUSE_NOTIFY_RESEND = 7
"""include/uapi/linux/fuse.h, since 7.40 (Linux 6.9): ask unanswered requests again."""
_OUT_HEADER = struct.Struct("=IiQ")
"""struct fuse_out_header: len, error (the code of a notification), unique (0)."""

INIT_LIMIT_S = 20.0


@dataclass
class Session:
    """A mounted FUSE connection whose INIT is answered."""

    fuse_fd: int
    shell: Any


def resend(fuse_fd: int) -> bool:
    """Have the kernel ask all unanswered requests again. False if it does not know how."""
    try:
        os.write(fuse_fd, _OUT_HEADER.pack(_OUT_HEADER.size, FUSE_NOTIFY_RESEND, 0))
    except OSError as e:
        if e.errno == errno.EINVAL:
            return False
        if e.errno not in (errno.ENOTCONN, errno.ENODEV, errno.ECONNABORTED):
            raise
    return True


def mount(config: FsConfig) -> Session:
    """Mount and answer INIT in this process. MountError says what the kernel said."""
    check_mountable()
    import pyfuse3
    import trio

    class Shell(pyfuse3.Operations):
        """What pyfuse3 calls. A worker puts its own handlers over these (worker.serve)."""

        enable_writeback_cache = False
        enable_acl = True
        supports_dot_lookup = False
        until_init: trio.CancelScope | None = None

        def init(self) -> None:
            # Called while INIT is answered. The cancelled loop raises at its next wait,
            # before it could read a second request.
            if self.until_init is not None:
                self.until_init.cancel()

    options = {"default_permissions", "ro", f"fsname=dsec:{config.tree or 'node'}", "subtype=dsec"}
    if config.allow_other:
        options.add("allow_other")
    if os.geteuid() == 0:
        options |= {"suid", "dev"}
    shell = Shell()
    others = _fuse_descriptors()
    try:
        pyfuse3.init(shell, config.mountpoint, options)
    except RuntimeError as e:
        raise MountError(
            f"mount FUSE at {config.mountpoint}: {e}",
            hint="see the log; without root, allow_other needs user_allow_other in /etc/fuse.conf",
        ) from None

    async def answer_init() -> bool:
        with trio.move_on_after(INIT_LIMIT_S) as limit, trio.CancelScope() as shell.until_init:
            await pyfuse3.main(1, 1)
        return not limit.cancelled_caught

    answered = trio.run(answer_init)
    shell.until_init = None
    try:
        (fuse_fd,) = _fuse_descriptors() - others
    except ValueError:
        raise MountError(
            f"mount FUSE at {config.mountpoint}: cannot tell its descriptor from others",
            hint="start one mount per process",
        ) from None
    if not answered:
        unmount(Path(config.mountpoint), detach=True)
        raise MountError(f"mount FUSE at {config.mountpoint}: no INIT in {INIT_LIMIT_S:.0f} s")
    os.set_inheritable(fuse_fd, False)
    return Session(fuse_fd, shell)


def _fuse_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                found.add(int(name))
        except FileNotFoundError:
            pass
    return found
