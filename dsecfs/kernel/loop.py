"""Loop devices: for kernels whose EROFS mounts block devices only, and for disks with a limit.

What must hold: a device is *autoclear*: it goes away by itself when the last user (our
descriptor, then the mount) lets go, so a crash leaves none behind.

Numbers: include/uapi/linux/loop.h (LOOP_CONFIGURE is in Linux 5.8 and later).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from dsecfs.errors import MountError, Unsupported
from dsecfs.kernel.syscalls import closing

_LOOP_GET_STATUS64 = 0x4C05
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_READ_ONLY, _AUTOCLEAR, _DIRECT_IO = 1, 4, 16

_INFO = struct.Struct("=5Q4I64s64s32s2Q")
"""struct loop_info64."""
_CONFIG = struct.Struct(f"=2I{_INFO.size}s8Q")
"""struct loop_config."""

BLOCK_SIZE = 4096
"""Images and blobs are multiples of it, and direct I/O works on 4K disks."""
_TRIES = 64


def _config(backing: int, name: str, flags: int) -> bytes:
    shown = os.fsencode(name)[-63:]
    info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, shown, b"", b"", 0, 0)
    return _CONFIG.pack(backing, BLOCK_SIZE, info, *([0] * 8))


def attach_loop(path: Path, *, direct_io: bool, writable: bool = False) -> int:
    """A descriptor of a loop device over the file `path`, read-only unless `writable`. Closing
    it frees the device unless something else has it open (a mount).

    MountError; Unsupported where there is no loop driver.
    """
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        raise Unsupported(
            f"loop device for {path}: cannot open /dev/loop-control: {e.strerror}",
            hint="load the module loop, as root",
        ) from None
    with closing(control):
        try:
            backing = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as e:
            raise MountError(f"loop device for {path}: {e.strerror}", errno=e.errno or 0) from None
        with closing(backing):
            for _ in range(_TRIES):
                device = _try(control, backing, path, direct_io, writable)
                if device is not None:
                    return device
    raise MountError(
        f"loop device for {path}: {_TRIES} free devices were taken by others first",
        hint="try again",
    )


def _try(control: int, backing: int, path: Path, direct_io: bool, writable: bool) -> int | None:
    """One attempt; None if somebody else took the device first."""
    flags = _AUTOCLEAR | (0 if writable else _READ_ONLY)
    access = os.O_RDWR if writable else os.O_RDONLY
    device = -1
    try:
        number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
        device = os.open(f"/dev/loop{number}", access | os.O_CLOEXEC)
        try:
            wanted = flags | (_DIRECT_IO if direct_io else 0)
            fcntl.ioctl(device, _LOOP_CONFIGURE, _config(backing, str(path), wanted))
        except OSError as e:
            # The file system of the backing file may not do direct I/O.
            if e.errno != errno.EINVAL or not direct_io:
                raise
            fcntl.ioctl(device, _LOOP_CONFIGURE, _config(backing, str(path), flags))
    except OSError as e:
        if device >= 0:
            os.close(device)
        if e.errno in (errno.EBUSY, errno.ENXIO):
            return None
        raise MountError(f"loop device for {path}: {e.strerror}", errno=e.errno or 0) from None
    return device


def find_loop(path: Path) -> int | None:
    """A read-only descriptor of the loop device over the file `path`; None if there is none.

    While it is open the device stays that of this file. OSError for `path` itself.
    """
    wanted = os.stat(path)
    tail = f"/{path.parent.name}/{path.name}"
    for known in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if not known.read_text().rstrip("\n").endswith(tail):
                continue
            device = os.open(f"/dev/{known.parts[3]}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # it went away
        # What the device is over says only the device: it may be another's by now.
        info = bytearray(_INFO.size)
        try:
            fcntl.ioctl(device, _LOOP_GET_STATUS64, info)
            where, inode, *_ = _INFO.unpack(info)
            if (where, inode) == (wanted.st_dev, wanted.st_ino):
                return device
        except OSError as e:
            if e.errno != errno.ENXIO:  # no file any more
                os.close(device)
                raise
        os.close(device)
    return None
