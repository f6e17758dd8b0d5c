"""Which mounts a process sees (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_ESCAPE = re.compile(rb"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mount."""

    mount_id: int
    device: str
    """major:minor, as in st_dev and /sys/class/bdi."""
    point: Path
    options: str
    """Options of the mount itself (ro, nodev, relatime)."""
    fstype: str


def _unescape(field: bytes) -> bytes:
    """Space, tab, newline and backslash are written as octal."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field)


def parse(text: bytes) -> list[Mount]:
    """The mounts in a mountinfo file, parents before children as the kernel lists them."""
    mounts = []
    for line in text.splitlines():
        left, _, right = line.partition(b" - ")
        fields = left.split(b" ")
        if len(fields) < 6 or not right:
            continue
        mounts.append(
            Mount(
                int(fields[0]),
                fields[2].decode(),
                Path(os.fsdecode(_unescape(fields[4]))),
                fields[5].decode(),
                right.split(b" ", 1)[0].decode(),
            )
        )
    return mounts


def mounts_here() -> list[Mount]:
    """The mounts of the calling thread's mount namespace."""
    return parse(Path("/proc/thread-self/mountinfo").read_bytes())


def mount_at(point: Path, mounts: list[Mount] | None = None) -> Mount | None:
    """The topmost mount exactly at `point` (no symlink is followed in its last component)."""
    wanted = Path(os.path.realpath(point.parent), point.name)
    found = None
    for mount in mounts_here() if mounts is None else mounts:
        if mount.point == wanted:
            found = mount
    return found
