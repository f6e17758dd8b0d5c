"""System calls that Python has no function for, one typed wrapper each.

Owns nothing but the translation. What must hold:
- a call that fails raises MountError (Busy for EBUSY) with what was tried, the kernel's
  errno, and, for the calls that configure a file system, the kernel's own message log;
- every file descriptor made here is close-on-exec and belongs to the caller;
- paths may be relative to a descriptor, so that nothing has to be resolved twice.

Numbers and structures: include/uapi/linux/{mount,openat2,fs,sched}.h and
include/uapi/asm-generic/unistd.h of Linux 6.12. Calls from 424 on have the same number on
every architecture; older ones go through libc.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from dsecfs.errors import Busy, MountError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_PIDFD_SEND_SIGNAL = 424
_OPEN_TREE = 428
_MOVE_MOUNT = 429
_FSOPEN = 430
_FSCONFIG = 431
_FSMOUNT = 432
_PIDFD_OPEN = 434
_OPENAT2 = 437
_MOUNT_SETATTR = 442

AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_AT_SYMLINK_NOFOLLOW = 0x100

_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1
_OPEN_TREE_CLONE = 1
_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 0x04
_MOVE_MOUNT_T_EMPTY_PATH = 0x40

_SET_FLAG, _SET_STRING, _SET_FD, _CMD_CREATE = 0, 1, 5, 6
"""enum fsconfig_command."""

MOUNT_ATTR_RDONLY = 0x01
MOUNT_ATTR_NOSUID = 0x02
MOUNT_ATTR_NODEV = 0x04
MOUNT_ATTR_NOEXEC = 0x08
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_IDMAP = 0x100000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18

MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

CLONE_VM = 0x100
CLONE_FS = 0x200
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
"""Flags of sync_file_range(2)."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""Flags of fallocate(2)."""
_FICLONE = 0x40049409
"""linux/fs.h: share all blocks of another file."""
_NO_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS)


def failed(what: str, code: int, words: str = "", hint: str = "") -> MountError | Busy:
    """The error for `what` that failed with errno `code`; `words` are the kernel's."""
    said = f": {words}" if words else ""
    message = f"{what}: {os.strerror(code)}{said}"
    if code == errno.EBUSY:
        return Busy(message, hint=hint or "end what uses it")
    if code == errno.EPERM and os.geteuid() != 0 and not hint:
        hint = "run it as root"
    return MountError(message, hint=hint, errno=code)


def _call(what: str, number: int, *args: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *args)
    if result < 0:
        raise failed(what, ctypes.get_errno())
    return result


def _path(path: str | bytes | Path) -> bytes:
    return os.fsencode(path)


# -- configuring and making a file system --------------------------------------------------


class FsContext:
    """A file system that is being configured (fsopen(2)); close it, or use it in `with`."""

    def __init__(self, fstype: str, what: str) -> None:
        """`what` is how error messages call it, e.g. "mount EROFS /x/y.erofs"."""
        self.what = what
        try:
            self._fd = _call(what, _FSOPEN, fstype.encode(), _FSOPEN_CLOEXEC)
        except MountError as e:
            if e.errno == errno.ENODEV:
                raise MountError(
                    f"{what}: this kernel has no {fstype}",
                    hint=f"load the module {fstype} or use another mode (dsec doctor)",
                    errno=e.errno,
                ) from None
            raise

    def _config(self, command: int, key: str | None, value: object, aux: int, shown: str) -> None:
        name = None if key is None else key.encode()
        if _libc.syscall(ctypes.c_long(_FSCONFIG), self._fd, command, name, value, aux) < 0:
            code = ctypes.get_errno()
            raise failed(f"{self.what}{shown}", code, self._words())

    def set(self, key: str, value: str | bytes | Path) -> None:
        """Give the option `key` a string value."""
        raw = os.fsencode(value)
        self._config(_SET_STRING, key, raw, 0, f": {key}={os.fsdecode(raw)}")

    def set_fd(self, key: str, fd: int) -> None:
        """Give the option `key` an open file."""
        self._config(_SET_FD, key, None, fd, f": {key}=<descriptor>")

    def flag(self, key: str) -> None:
        self._config(_SET_FLAG, key, None, 0, f": {key}")

    def mount(self, attributes: int = 0) -> int:
        """Make the file system and return a descriptor of a mount of it, attached nowhere."""
        self._config(_CMD_CREATE, None, None, 0, "")
        result: int = _libc.syscall(ctypes.c_long(_FSMOUNT), self._fd, _FSMOUNT_CLOEXEC, attributes)
        if result < 0:
            code = ctypes.get_errno()
            raise failed(self.what, code, self._words())
        return result

    def _words(self) -> str:
        """What the kernel logged about this context: "e erofs: ..." lines without the level."""
        lines: list[str] = []
        for _ in range(16):
            try:
                line = os.read(self._fd, 4096)
            except OSError:
                break
            text = line.decode(errors="replace").strip()
            lines.append(text[2:] if text[:2] in ("e ", "w ", "i ") else text)
        return "; ".join(lines)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def open_tree(path: str | bytes | Path, *, at: int = AT_FDCWD, recursive: bool = False) -> int:
    """A private copy of the mount at `path`, attached nowhere (open_tree(2), OPEN_TREE_CLONE)."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_SYMLINK_NOFOLLOW
    flags |= _AT_RECURSIVE if recursive else 0
    if not path:
        flags |= _AT_EMPTY_PATH
    return _call(f"clone mount {os.fsdecode(path)}", _OPEN_TREE, at, _path(path), flags)


def move_mount(fd: int, target: str | bytes | Path, *, at: int = AT_FDCWD) -> None:
    """Attach the mount `fd` to `target`; an empty `target` is the directory `at` itself."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | (0 if target else _MOVE_MOUNT_T_EMPTY_PATH)
    _call(f"attach mount to {os.fsdecode(target)}", _MOVE_MOUNT, fd, b"", at, _path(target), flags)


def mount_setattr(
    fd: int, set_: int = 0, *, clear: int = 0, userns: int = 0, recursive: bool = False
) -> None:
    """Change attributes of the mount `fd` (mount_setattr(2)); `userns` for MOUNT_ATTR_IDMAP."""
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    attributes = struct.pack("=QQQQ", set_, clear, 0, userns)
    _call("set mount attributes", _MOUNT_SETATTR, fd, b"", flags, attributes, len(attributes))


def idmap_mount(fd: int, userns: int) -> None:
    """Shift owners on the unattached mount `fd` by the mapping of the user namespace."""
    try:
        mount_setattr(fd, MOUNT_ATTR_IDMAP, userns=userns)
    except MountError as e:
        if e.errno == errno.EINVAL:
            raise MountError(
                "shift owners of a mount: this file system cannot be id-mapped",
                hint="EROFS can from Linux 5.19, tmpfs from 6.3; FUSE without its help cannot",
                errno=e.errno,
            ) from None
        raise


def mount(
    source: str | bytes | Path, target: str | bytes | Path, fstype: str, flags: int, data: str = ""
) -> None:
    """mount(2)."""
    if _libc.mount(
        _path(source), _path(target), fstype.encode(), ctypes.c_ulong(flags), data.encode()
    ):
        raise failed(
            f"mount {fstype or os.fsdecode(source)} on {os.fsdecode(target)}", ctypes.get_errno()
        )


def umount(target: str | bytes | Path, *, detach: bool = False) -> bool:
    """umount2(2), never through a symlink. False if nothing is mounted there; Busy."""
    flags = UMOUNT_NOFOLLOW | (MNT_DETACH if detach else 0)
    if _libc.umount2(_path(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOENT):
        return False
    hint = "end what has files open in it or works there" if code == errno.EBUSY else ""
    raise failed(f"unmount {os.fsdecode(target)}", code, hint=hint)


# -- opening without being led astray ------------------------------------------------------


def openat2(at: int, path: str | bytes, flags: int, *, resolve: int, mode: int = 0) -> int:
    """openat2(2). OSError, since a missing or strange path is an answer and no failure."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)
    result: int = _libc.syscall(
        ctypes.c_long(_OPENAT2), at, os.fsencode(path), how, ctypes.c_size_t(len(how))
    )
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fsdecode(path))
    return result


def open_in_root(root: int, path: str | bytes, flags: int = os.O_PATH) -> int:
    """Open `path` as if the directory `root` were `/`: symlinks and `..` cannot leave it."""
    return openat2(root, path, flags, resolve=RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)


# -- data of files -------------------------------------------------------------------------


def sync_pages(fd: int) -> None:
    """Write a file's dirty pages to its file system, without waiting for the disk's cache
    (sync_file_range(2)). A store through a mapping after that changes the file's times."""
    flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER
    if _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(flags)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def sync_filesystem(fd: int) -> None:
    """Write all of the file system in which `fd` is (syncfs(2)). OSError."""
    if _libc.syncfs(fd):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Give back the blocks of a range, which then reads as zeros (fallocate(2)). False where the
    file system cannot."""
    mode = _PUNCH_HOLE | _KEEP_SIZE
    return not _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))


def share_blocks(source: int, target: int) -> bool:
    """Make `target` have the content of `source` without copying (ioctl_ficlone(2)). False where
    the file system cannot, or the two are on different ones; else OSError."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as e:
        if e.errno in _NO_CLONE:
            return False
        raise
    return True


# -- namespaces and processes --------------------------------------------------------------


def unshare(flags: int) -> None:
    """unshare(2), for the calling thread."""
    if _libc.unshare(flags):
        raise failed("leave a namespace", ctypes.get_errno())


def setns(fd: int, kind: int) -> None:
    """setns(2), for the calling thread; `kind` is one of CLONE_NEW*."""
    if _libc.setns(fd, kind):
        raise failed("enter a namespace", ctypes.get_errno())


def pidfd_open(pid: int) -> int | None:
    """A descriptor of the process, or None if there is none any more."""
    try:
        return _call(f"watch process {pid}", _PIDFD_OPEN, pid, 0)
    except MountError as e:
        if e.errno == errno.ESRCH:
            return None
        raise


def pidfd_send_signal(pidfd: int, number: signal.Signals) -> bool:
    """Send a signal to exactly that process. False if it is gone."""
    try:
        _call("signal a process", _PIDFD_SEND_SIGNAL, pidfd, int(number), None, 0)
    except MountError as e:
        if e.errno == errno.ESRCH:
            return False
        raise
    return True


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close `fd` at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)
