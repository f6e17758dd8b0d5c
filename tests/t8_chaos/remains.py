"""What there is of a node on a machine: files, mounts, loop devices, processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


def below(place: Path, skip: Path) -> Iterator[Path]:
    for path in place.iterdir() if place.is_dir() else ():
        yield path
        if path != skip and path.is_dir() and not path.is_symlink():
            yield from below(path, skip)


def mounts_of(top: Path, space: Path | None = None) -> list[str]:
    enter = [] if space is None else ["nsenter", f"--mount={space}"]
    done = subprocess.run(
        [*enter, "cat", "/proc/self/mountinfo"], capture_output=True, check=True, timeout=20
    )
    lines = os.fsdecode(done.stdout).splitlines()
    found = [line.split(" ")[4] + " " + line.partition(" - ")[2] for line in lines]
    kinds = () if space is None else ("erofs", "overlay")
    return sorted(s for s in found if str(top) in s or s.split(" ")[1] in kinds)


def loops_of(top: Path) -> list[str]:
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if (backing := path.read_text().strip()).startswith(str(top)):
                found.append(backing)
    return sorted(found)


def processes_of(text: str) -> list[str]:
    """Command lines that name the node's directory: runs, crun and what it starts."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if text in line:
                found.append(line)
    return found
