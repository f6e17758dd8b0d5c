"""Opening files below a directory and nowhere else.

What must hold: no symbolic link, "..", absolute name or magic link leads outside `root`,
not even when somebody swaps a directory for a link while we walk. The kernel decides
(openat2(2), Linux 5.6); where it has no such call, or a seccomp filter hides it, every
component is opened by itself with O_NOFOLLOW.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# include/uapi/asm-generic/unistd.h and include/uapi/linux/openat2.h
_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_HOW = struct.Struct("=QQQ")
_RESOLVE = _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH

_libc = ctypes.CDLL(None, use_errno=True)
_have_openat2 = True


def open_beneath(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open `path` below the directory descriptor `root`. Raises OSError; ELOOP for a link."""
    global _have_openat2
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    if _have_openat2:
        how = _HOW.pack(flags, mode, _RESOLVE)
        for _ in range(16):
            fd: int = _libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, len(how))
            if fd >= 0:
                return fd
            code = ctypes.get_errno()
            # EAGAIN: a rename elsewhere raced with the walk; the manual says to repeat.
            if code not in (errno.EAGAIN, errno.EINTR):
                break
        if code not in (errno.ENOSYS, errno.EPERM):
            raise OSError(code, os.strerror(code), path)
        if code == errno.ENOSYS:
            _have_openat2 = False
    return _walk(root, path, flags, mode)


def _walk(root: int, path: str, flags: int, mode: int) -> int:
    *parents, last = path.split("/")
    at = root
    try:
        for name in parents:
            child = os.open(
                name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at
            )
            if at != root:
                os.close(at)
            at = child
        return os.open(last, flags, mode, dir_fd=at)
    finally:
        if at != root:
            os.close(at)
