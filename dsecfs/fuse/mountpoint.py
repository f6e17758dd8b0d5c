"""A FUSE mount point seen from outside: is it there, tune it, take it down, clean up a dead one.

Nothing here touches the mounted files: a `stat` of a mount whose daemon is stuck hangs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from dsecfs.errors import Busy, MountError, Unsupported
from dsecfs.kernel.mountinfo import mount_at
from dsecfs.kernel.syscalls import mount, umount

MAX_BACKGROUND = 256
"""Read-ahead requests the kernel keeps in flight per mount (its default is 12)."""

FUSERMOUNT_S = 20
_FSTYPE = "fuse.dsec"
"""In the mount table, from the option subtype= (session.py)."""


def fuse_device(mountpoint: Path) -> str | None:
    """`major:minor` of our FUSE mount at `mountpoint`, None if there is none, or another's."""
    found = mount_at(mountpoint)
    return None if found is None or found.fstype != _FSTYPE else found.device


def check_mountable() -> None:
    """Raise Unsupported, with what to do, if this process cannot mount FUSE at all."""
    if not os.path.exists("/dev/fuse"):
        raise Unsupported("mount FUSE: no /dev/fuse", hint="load the kernel module: modprobe fuse")
    if os.geteuid() == 0:
        return
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Unsupported(
            "mount FUSE: this user may not open /dev/fuse", hint="as root: chmod 0666 /dev/fuse"
        )
    if shutil.which("fusermount3") is None:
        raise Unsupported("mount FUSE: no fusermount3", hint="as root: apt-get install fuse3")


def unmount(mountpoint: Path, *, detach: bool = False) -> None:
    """Take the mount away. Busy if files on it are in use.

    With `detach` it leaves the name space now and goes on serving who uses it (umount -l).
    No error if nothing is mounted there.
    """
    if os.geteuid() == 0:
        umount(mountpoint, detach=detach)
    elif fuse_device(mountpoint) is not None:
        _fusermount(mountpoint, detach)


def _fusermount(path: Path, lazy: bool) -> None:
    program = shutil.which("fusermount3") or shutil.which("fusermount")
    if program is None:
        raise MountError(
            f"unmount {path}: neither root nor fusermount3", hint="apt-get install fuse3"
        )
    try:
        done = subprocess.run(
            [program, "-u", *(["-z"] if lazy else []), "--", str(path)],
            check=False,
            capture_output=True,
            timeout=FUSERMOUNT_S,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise MountError(f"unmount {path}: fusermount3 did not end in {FUSERMOUNT_S} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().replace("\n", "; ")
        if "busy" in said:
            raise Busy(f"unmount {path}: files on it are in use", hint="close them or drain")
        raise MountError(f"unmount {path}: {said or 'fusermount3 failed'}")


def recover_stale(mountpoint: Path) -> bool:
    """Take away our mounts at `mountpoint` that nobody serves; whether there was one.

    The caller holds the daemon's lock: then nobody who could serve them is alive.
    """
    found = False
    for _ in range(16):
        if fuse_device(mountpoint) is None:
            return found
        found = True
        unmount(mountpoint, detach=True)
    raise MountError(
        f"mount point {mountpoint}: still covered after 16 unmounts",
        hint="see /proc/self/mountinfo for who mounts there",
    )


def tune(mountpoint: Path, scratch: Path, read_ahead_kib: int) -> list[str]:
    """Set read-ahead, and let more requests be in flight. Returns what could not be set
    (without root: all).

    The knobs are in fusectl, which is often not mounted; it is mounted for a moment on a
    private directory below `scratch`. The caller holds the daemon's lock.
    """
    for old in scratch.glob("fusectl.*"):  # its maker was killed
        umount(old, detach=True)
        old.rmdir()
    device = fuse_device(mountpoint)
    knobs = {
        "max_background": MAX_BACKGROUND,
        "congestion_threshold": MAX_BACKGROUND * 3 // 4,
    }
    if device is None or os.geteuid() != 0:
        return [*knobs, "read_ahead_kb"]
    failed: list[str] = []
    place = Path(tempfile.mkdtemp(prefix="fusectl.", dir=scratch))
    try:
        mount("fusectl", place, "fusectl", 0)
    except MountError:
        failed.extend(knobs)
    else:
        minor = device.partition(":")[2]
        for name, value in knobs.items():
            _write(place / minor / name, value, failed)
        umount(place, detach=True)
    place.rmdir()
    _write(Path(f"/sys/class/bdi/{device}/read_ahead_kb"), read_ahead_kib, failed)
    return failed


def _write(path: Path, value: int, failed: list[str]) -> None:
    try:
        path.write_text(str(value))
    except OSError:
        failed.append(path.name)
