"""From a path of a caller to a directory's descriptor and a name in it.

What must hold: every path is resolved by the kernel from the descriptor of the sandbox's root, with
RESOLVE_IN_ROOT and without magic links; what is changed is named by one component in an open
directory, so that nothing is followed between the check and the change.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsec_runtime.files import wire
from dsecfs.kernel.syscalls import closing, open_in_root

MAX_LINKS = 40
"""Symlinks in a row, as in the kernel (path_resolution(7))."""
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char-device",
    stat.S_IFBLK: "block-device",
}


class Refusal(Exception):
    """The operation ends with a reason of `wire`."""

    def __init__(self, reason: str, entry: bytes | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.entry = entry


class Place:
    """Where paths start: the root, and a directory for relative ones."""

    def __init__(self, root: int, cwd: str) -> None:
        self.root = root
        self._cwd = os.fsencode(cwd)

    def absolute(self, path: str) -> bytes:
        raw = os.fsencode(path)
        return raw if raw.startswith(b"/") else self._cwd.rstrip(b"/") + b"/" + raw

    def open(self, path: bytes, flags: int) -> int:
        return open_in_root(self.root, path, flags)

    def open_directory(self, path: bytes) -> int:
        """For reading. NotADirectoryError."""
        return self.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)

    @contextmanager
    def parent(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """The directory in which the last component of `path` is, and that component.

        Refusal when it is none that can be made, moved or removed: "/", ".", "..".
        """
        above, name = split(path)
        with closing(self.open(above, os.O_PATH | os.O_DIRECTORY)) as fd:
            yield fd, name

    def follow(self, path: bytes) -> bytes:
        """`path`, or what it leads to while its last component is a symlink. What it leads to
        need not exist. The result is still a path: nothing relies on it being the same later."""
        for _ in range(MAX_LINKS):
            above, name = split(path)
            with closing(self.open(above, os.O_PATH | os.O_DIRECTORY)) as fd:
                try:
                    target = os.readlink(name, dir_fd=fd)
                except FileNotFoundError:
                    return path
                except OSError as e:
                    if e.errno == errno.EINVAL:  # no symlink
                        return path
                    raise
            path = target if target.startswith(b"/") else above + b"/" + target
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def make_directories(self, path: bytes, mode: int) -> None:
        """Make `path` and what is missing above it; nothing happens to what is there."""
        try:
            os.close(self.open(path, os.O_PATH | os.O_DIRECTORY))
            return
        except FileNotFoundError:
            pass
        at = b"/"
        for part in path.split(b"/"):
            if part in (b"", b"."):
                continue
            at = at + b"/" + part
            if part != b"..":
                with self.parent(at) as (fd, name):
                    try:
                        os.mkdir(name, mode, dir_fd=fd)
                    except FileExistsError:
                        pass
        os.close(self.open(path, os.O_PATH | os.O_DIRECTORY))


def split(path: bytes) -> tuple[bytes, bytes]:
    """The path of the directory and the last component. Refusal if that is not a name."""
    above, _, name = path.rstrip(b"/").rpartition(b"/")
    if name in (b"", b".", b".."):
        raise Refusal(wire.BAD_NAME)
    return above or b"/", name


def kind_of(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "unknown")


def entry(found: os.stat_result, path: bytes, target: bytes | None = None) -> dict[str, Any]:
    """What is told of a file."""
    return {
        "path": os.fsdecode(path),
        "type": kind_of(found.st_mode),
        "size": found.st_size,
        "mode": stat.S_IMODE(found.st_mode),
        "uid": found.st_uid,
        "gid": found.st_gid,
        "mtime": found.st_mtime_ns / 1e9,
        "links": found.st_nlink,
        "inode": found.st_ino,
        "target": None if target is None else os.fsdecode(target),
    }


def read_link(name: bytes, fd: int) -> bytes | None:
    """The target of a symlink; None if it has become something else."""
    try:
        return os.readlink(name, dir_fd=fd)
    except OSError:
        return None


def open_regular(place: Place, path: bytes) -> int:
    """For reading. Refusal of what is no regular file; opening one that is none has effects (a
    fifo lets its writers go on), so it is looked at first, and again when it is open."""
    with closing(place.open(path, os.O_PATH)) as seen:
        _check_regular(os.fstat(seen).st_mode)
    fd = place.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_regular(os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_regular(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise Refusal(wire.NOT_REGULAR)
