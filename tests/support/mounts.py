"""EROFS mounts for tests, by the kernel's own calls, always undone again."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

_libc = ctypes.CDLL(None, use_errno=True)
# System call numbers are the same on every architecture from here on
# (include/uapi/asm-generic/unistd.h).
_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 429, 430, 431, 432
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_EMPTY_PATH = 4
_AT_FDCWD = -100
_MNT_DETACH = 2


def _call(number: int, *args: object) -> int:
    result: int = _libc.syscall(number, *args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def mount_erofs(
    image: Path, target: Path, devices: Sequence[Path] = (), flags: Sequence[str] = ()
) -> None:
    """Mount a file as EROFS with extra device files. OSError with the kernel's last words."""
    fs = _call(_FSOPEN, b"erofs", 1)
    try:
        try:
            _call(_FSCONFIG, fs, _SET_STRING, b"source", os.fsencode(image), 0)
            for device in devices:
                _call(_FSCONFIG, fs, _SET_STRING, b"device", os.fsencode(device), 0)
            for flag in flags:
                _call(_FSCONFIG, fs, _SET_FLAG, flag.encode(), None, 0)
            _call(_FSCONFIG, fs, _CREATE, None, None, 0)
            mount = _call(_FSMOUNT, fs, 1, 0)
        except OSError as e:
            words = b""
            with contextlib.suppress(OSError):
                words = os.read(fs, 4096)
            raise OSError(e.errno, f"{e.strerror}: {words.decode(errors='replace')}") from None
    finally:
        os.close(fs)
    try:
        _call(_MOVE_MOUNT, mount, b"", _AT_FDCWD, os.fsencode(target), _EMPTY_PATH)
    finally:
        os.close(mount)


@contextlib.contextmanager
def mounted(
    image: Path, devices: Sequence[Path] = (), flags: Sequence[str] = ()
) -> Iterator[Path]:
    """A temporary mount point with the image; unmounted and removed whatever happens."""
    target = Path(tempfile.mkdtemp(prefix="erofs-"))
    try:
        mount_erofs(image, target, devices, flags)
        try:
            yield target
        finally:
            if _libc.umount2(os.fsencode(target), _MNT_DETACH):
                raise OSError(ctypes.get_errno(), f"cannot unmount {target}")
    finally:
        target.rmdir()


@functools.cache
def why_no_erofs() -> str:
    """What is missing for file-backed EROFS mounts here; "" if nothing is."""
    if os.geteuid() != 0:
        return "mounting EROFS needs root"
    names = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    if "erofs" not in names:
        return "this kernel has no EROFS (CONFIG_EROFS_FS)"
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release < (6, 12):
        return f"kernel {os.uname().release} mounts no files (EROFS needs 6.12 for that)"
    return ""


def _missing_tools() -> str:
    tools = ("fsck.erofs", "mkfs.erofs", "dump.erofs")
    missing = [name for name in tools if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed (Debian: erofs-utils)" if missing else ""


needs_erofs_utils = pytest.mark.skipif(
    bool(_missing_tools()), reason=_missing_tools() or "erofs-utils is there"
)
needs_erofs = pytest.mark.skipif(bool(why_no_erofs()), reason=why_no_erofs() or "mounts work")
