"""/dev/null for what runs in containers.

crun gives what it gets as standard streams to the container's root (fchown). So each gets a device
file of its own, on a tmpfs that is mounted nowhere: the host's /dev/null stays the host's, and two
sandboxes share nothing. A pipe without a writer will not do: programs look whether their input is
a pipe, and read it.
"""

from __future__ import annotations

import os
import stat

from dsecfs.kernel.syscalls import FsContext


class NullDevice:
    """Makes them. Use it from one thread."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def open(self) -> int:
        """A descriptor of a new one. MountError."""
        if self._fd is None:
            with FsContext("tmpfs", "mount a tmpfs for a null device") as fs:
                fs.set("source", "dsec-null")
                fs.set("size", "64k")
                self._fd = fs.mount(0)
        name = "null"
        os.mknod(name, stat.S_IFCHR | 0o666, os.makedev(1, 3), dir_fd=self._fd)
        try:
            return os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=self._fd)
        finally:
            os.unlink(name, dir_fd=self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
