"""Mounting EROFS images: from files, or through loop devices on kernels that mount no files.

What must hold: an image comes from outside, so its mounts are always read-only, nosuid and
nodev: neither its device nodes nor its setuid bits mean anything on the host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from dsecfs.errors import MountError
from dsecfs.kernel.loop import attach_loop
from dsecfs.kernel.probe import Mode
from dsecfs.kernel.syscalls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    FsContext,
    move_mount,
)

READ_AHEAD_KIB = 128
"""Of mounts whose bytes come on demand: what is read ahead is fetched from the store, too.
Programs that start read small pieces here and there; with 1024, `import numpy, pandas` made
144 MB of its 70."""
LOCAL_READ_AHEAD_KIB = 1024
"""Of mounts that read files of this node: twice as fast as 128; 4096 is unstable."""

LAYER_ATTRIBUTES = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV

_FS_IOC_GETFSSYSFSPATH = (2 << 30) | (129 << 16) | (0x15 << 8) | 1
"""_IOR(0x15, 1, struct fs_sysfs_path) in include/uapi/linux/fs.h, Linux 6.9."""


def erofs_mount(
    meta: Path,
    devices: Sequence[Path],
    *,
    mode: Mode = "kernel",
    directio: bool = True,
    read_ahead_kib: int = READ_AHEAD_KIB,
) -> int:
    """A descriptor of a new mount of the image `meta`, attached nowhere.

    `devices` are the files of its blobs, in the order of its device table. With `directio`
    they are read around the page cache, so that bytes are cached once (in EROFS); a device
    whose file system cannot do that makes the mount fail, and it is made without.
    `read_ahead_kib` 0 turns read-ahead off (for recording what is read).
    MountError with the kernel's words.
    """
    if mode == "fuse":
        raise MountError(f"mount EROFS {meta}: the portable mode has no kernel mounts")
    with _opened(meta, devices, mode, directio) as (source, *others):
        try:
            fd = _mount(meta, source, others, directio=directio and mode == "kernel")
        except MountError as e:
            if not directio or mode != "kernel" or e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fd = _mount(meta, source, others, directio=False)
    set_read_ahead(fd, read_ahead_kib)
    return fd


def mount_erofs(
    meta: Path,
    devices: Sequence[Path],
    target: Path,
    *,
    mode: Mode = "kernel",
    directio: bool = True,
    read_ahead_kib: int = READ_AHEAD_KIB,
) -> None:
    """`erofs_mount`, attached to the directory `target`."""
    fd = erofs_mount(meta, devices, mode=mode, directio=directio, read_ahead_kib=read_ahead_kib)
    try:
        move_mount(fd, target)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened(
    meta: Path, devices: Sequence[Path], mode: Literal["kernel", "loop"], directio: bool
) -> Iterator[list[int]]:
    """Descriptors of image and devices (or of loop devices over them), closed at the end.

    The kernel is given /proc/self/fd/N: it opens exactly these files, in whichever mount
    namespace the mount is made.
    """
    with contextlib.ExitStack() as stack:
        fds: list[int] = []
        for path in (meta, *devices):
            try:
                if mode == "loop":
                    fds.append(attach_loop(path, direct_io=directio and path is not meta))
                else:
                    fds.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
            except OSError as e:
                raise MountError(
                    f"mount EROFS {meta}: {path}: {e.strerror}",
                    hint="start the FUSE daemon" if path is not meta else "fetch the layer again",
                    errno=e.errno or 0,
                ) from None
            stack.callback(os.close, fds[-1])
        yield fds


def _mount(meta: Path, source: int, devices: Sequence[int], *, directio: bool) -> int:
    with FsContext("erofs", f"mount EROFS {meta}") as fs:
        fs.flag("ro")
        fs.set("source", f"/proc/self/fd/{source}")
        for device in devices:
            fs.set("device", f"/proc/self/fd/{device}")
        if directio:
            fs.flag("directio")
        return fs.mount(LAYER_ATTRIBUTES)


def _backing_device(fd: int) -> str:
    """The name in /sys/class/bdi of what the file system of `fd` reads from."""
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    try:
        # "erofs/erofs-12" for a file-backed mount, "erofs/loop3" for a block device.
        raw = fcntl.ioctl(directory, _FS_IOC_GETFSSYSFSPATH, bytes(129))
        name = raw[1 : 1 + raw[0]].decode().rpartition("/")[2]
        if name.startswith("erofs-"):
            return name
    except OSError as e:
        if e.errno not in (errno.ENOTTY, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(directory)
    device = os.fstat(fd).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def _read_ahead_file(fd: int) -> Path:
    return Path("/sys/class/bdi", _backing_device(fd), "read_ahead_kb")


def set_read_ahead(fd: int, kib: int) -> bool:
    """Set the read-ahead of the whole file system of mount `fd`; False if the kernel has no
    knob for it (then its default of 128 KiB stays)."""
    try:
        _read_ahead_file(fd).write_text(str(kib))
    except OSError:
        return False
    return True


def get_read_ahead(fd: int) -> int | None:
    """Read-ahead of the file system of mount `fd` in KiB; None if it is not shown."""
    try:
        return int(_read_ahead_file(fd).read_text())
    except (OSError, ValueError):
        return None
