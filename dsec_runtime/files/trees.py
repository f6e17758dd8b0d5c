"""Trees in a sandbox: walking, removing, copying. Called in a child.

What must hold: no symlink is followed; every directory is entered through the descriptor of the one
above it and is looked at when it is open; at most MAX_DEPTH descriptors are open and a directory's
names are never all in memory.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from dsec_runtime.files import wire
from dsec_runtime.files.calls import rename_noreplace
from dsec_runtime.files.paths import Refusal
from dsec_runtime.files.writing import keep, write_all
from dsecfs.kernel.syscalls import RESOLVE_NO_MAGICLINKS, openat2

MAX_DEPTH = 400
"""Levels of a tree; a child may have 2048 descriptors, and copying needs three a level."""
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
"""include/uapi/linux/openat2.h"""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
_NAMES = 4096
"""Names of a directory that is being removed, at a time."""
_PIECE = 1 << 20

FILE, ENTER, LEAVE = "file", "enter", "leave"


def open_below(root: int, path: bytes) -> int:
    """The directory `path` below the directory `root`, no symlink on the way. OSError."""
    resolve = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
    return openat2(root, path or b".", _DIRECTORY, resolve=resolve)


@contextlib.contextmanager
def about(entry: bytes) -> Iterator[None]:
    """Errors of the system are about this entry of a tree."""
    try:
        yield
    except OSError as e:
        if not hasattr(e, "entry"):
            e.entry = entry  # type: ignore[attr-defined]
        raise


@dataclass(slots=True)
class Step:
    """Where a walk is."""

    event: str
    """FILE: anything but a directory. ENTER and LEAVE: a directory, before and after what is in
    it."""
    above: int
    """The directory it is in."""
    name: bytes
    path: bytes
    """From the top of the walk."""
    found: os.stat_result
    fd: int = -1
    """Of the directory, for ENTER and LEAVE."""
    skip: bool = False
    """Set it at ENTER, and what is in it is left out."""


@dataclass(slots=True)
class _Level:
    fd: int
    entries: Iterator[os.DirEntry[str]]
    step: Step | None
    """What it was entered by; None for the top."""


def walk(top: int, *, denied_too: bool = True) -> Iterator[Step]:
    """Everything below the directory `top`, which stays the caller's. What vanishes meanwhile is
    left out, and so are, without `denied_too`, directories that the user may not read.
    Refusal (DEEP); OSError with `entry`."""
    levels = [_Level(top, os.scandir(top), None)]
    try:
        while levels:
            level = levels[-1]
            below = level.step.path + b"/" if level.step else b""
            found = next(level.entries, None)
            if found is None:
                levels.pop()
                if level.step is not None:
                    level.step.event = LEAVE
                    yield level.step
                    os.close(level.fd)
                continue
            name = os.fsencode(found.name)
            try:
                with about(below + name):
                    step = _look(level.fd, name, below + name)
            except PermissionError:
                if denied_too:
                    raise
                continue
            if step is None:
                continue
            yield step
            if step.event == FILE:
                continue
            if step.skip:
                step.event = LEAVE
                yield step
                os.close(step.fd)
                continue
            if len(levels) >= MAX_DEPTH:
                os.close(step.fd)
                raise Refusal(wire.DEEP, step.path[:200])
            with about(step.path):
                levels.append(_Level(step.fd, os.scandir(step.fd), step))
    finally:
        for level in levels[1:]:
            with contextlib.suppress(OSError):
                os.close(level.fd)


def _look(above: int, name: bytes, path: bytes) -> Step | None:
    """None if it is gone or changes while we look."""
    try:
        found = os.stat(name, dir_fd=above, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            return Step(FILE, above, name, path, found)
        fd = os.open(name, _DIRECTORY | os.O_CLOEXEC, dir_fd=above)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    return Step(ENTER, above, name, path, os.fstat(fd), fd)


# -- removing --------------------------------------------------------------------------


@dataclass(slots=True)
class _Doomed:
    above: int
    name: bytes
    fd: int
    names: list[bytes]


def remove(above: int, name: bytes) -> int:
    """Remove the directory `name` in `above` with all below it. How many entries were removed.

    Somebody who makes files as fast as we remove them is stopped by the operation's deadline.
    Refusal (DEEP); OSError.
    """
    count = 0
    levels = [_open_doomed(above, name)]
    try:
        while levels:
            level = levels[-1]
            if not level.names:
                level.names = _some_names(level.fd)
            if not level.names:
                try:
                    os.rmdir(level.name, dir_fd=level.above)
                except OSError as e:
                    if e.errno == errno.ENOTEMPTY:
                        continue
                    raise
                count += 1
                levels.pop()
                os.close(level.fd)
                continue
            child = level.names.pop()
            with about(child):
                try:
                    os.unlink(child, dir_fd=level.fd)
                    count += 1
                except FileNotFoundError:
                    pass
                except (IsADirectoryError, PermissionError):
                    # EPERM is what some file systems say for directories: opening tells.
                    if len(levels) >= MAX_DEPTH:
                        raise Refusal(wire.DEEP) from None
                    levels.append(_open_doomed(level.fd, child))
    finally:
        for level in levels:
            os.close(level.fd)
    return count


def _open_doomed(above: int, name: bytes) -> _Doomed:
    try:
        fd = os.open(name, _DIRECTORY | os.O_CLOEXEC, dir_fd=above)
    except NotADirectoryError:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM)) from None
    return _Doomed(above, name, fd, [])


def _some_names(fd: int) -> list[bytes]:
    with os.scandir(fd) as entries:
        return [os.fsencode(entry.name) for entry in itertools.islice(entries, _NAMES)]


# -- copying ---------------------------------------------------------------------------


def move_by_copy(
    from_fd: int, from_name: bytes, to_fd: int, to_name: bytes, *, replace: bool
) -> None:
    """What mv(1) does when rename(2) cannot: copy to a name beside the target, rename, remove.

    The target appears at once and whole. Owners, modes and times are kept or it is an error
    (Refusal OWNER); hard links become files of their own; only files, directories and symlinks.
    """
    part = b".dsec-%s.part" % secrets.token_hex(8).encode()
    is_tree = stat.S_ISDIR(os.stat(from_name, dir_fd=from_fd, follow_symlinks=False).st_mode)
    try:
        if is_tree:
            _copy_tree(from_fd, from_name, to_fd, part)
        else:
            found = os.stat(from_name, dir_fd=from_fd, follow_symlinks=False)
            _copy_one(from_fd, from_name, found, to_fd, part)
        if replace:
            os.rename(part, to_name, src_dir_fd=to_fd, dst_dir_fd=to_fd)
        else:
            rename_noreplace(to_fd, part, to_fd, to_name)
    except BaseException:
        # What went wrong first is what counts.
        with contextlib.suppress(OSError, Refusal):
            if is_tree:
                remove(to_fd, part)
            else:
                os.unlink(part, dir_fd=to_fd)
        raise
    if is_tree:
        remove(from_fd, from_name)
    else:
        os.unlink(from_name, dir_fd=from_fd)


def _copy_tree(from_fd: int, from_name: bytes, to_fd: int, to_name: bytes) -> None:
    os.mkdir(to_name, 0o700, dir_fd=to_fd)
    source = os.open(from_name, _DIRECTORY | os.O_CLOEXEC, dir_fd=from_fd)
    target = os.open(to_name, _DIRECTORY | os.O_CLOEXEC, dir_fd=to_fd)
    into = [target]
    try:
        top = os.fstat(target)
        for step in walk(source):
            with about(step.path):
                if step.event == FILE:
                    _copy_one(step.above, step.name, step.found, into[-1], step.name)
                elif step.event == ENTER:
                    if (step.found.st_dev, step.found.st_ino) == (top.st_dev, top.st_ino):
                        # The target is a mount below the source.
                        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                    os.mkdir(step.name, 0o700, dir_fd=into[-1])
                    into.append(os.open(step.name, _DIRECTORY | os.O_CLOEXEC, dir_fd=into[-1]))
                else:
                    _finish(into[-1], step.found)
                    os.close(into.pop())
        _finish(target, os.fstat(source))
    finally:
        os.close(source)
        for fd in into:
            os.close(fd)


def _copy_one(from_fd: int, name: bytes, found: os.stat_result, to_fd: int, to_name: bytes) -> None:
    if stat.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(name, dir_fd=from_fd), to_name, dir_fd=to_fd)
        made = os.stat(to_name, dir_fd=to_fd, follow_symlinks=False)
        if made.st_uid != found.st_uid:
            raise Refusal(wire.OWNER)
        return
    if not stat.S_ISREG(found.st_mode):
        raise Refusal(wire.NOT_REGULAR)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    source = os.open(name, flags, dir_fd=from_fd)
    try:
        now = os.fstat(source)
        if not stat.S_ISREG(now.st_mode):
            raise Refusal(wire.CHANGED)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(to_name, flags, 0o600, dir_fd=to_fd)
        try:
            left = now.st_size
            # Not what it grows by: a file could grow as fast as it is copied.
            while left and (data := os.read(source, min(left, _PIECE))):
                write_all(target, data)
                left -= len(data)
            _finish(target, now)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _finish(target: int, found: os.stat_result) -> None:
    keep(target, found, stat.S_IMODE(found.st_mode))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
