"""A control group of its own for the node's file system.

What is started in a session, a batch job or a service is in its control group and is killed,
frozen and limited with it. A daemon that everybody on the node uses must not be. What must
hold: only groups of ours are made and entered, never changed or left to be found full; where it
is not possible the process stays where it is, and says so.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from dsecfs.kernel.mountinfo import mounts_here

ENDING_S = 1.0
"""Longest wait for processes that have let go of everything else."""


def hierarchies() -> list[Path]:
    """Where control groups are mounted: one place in version 2, several in version 1."""
    found: dict[str, Path] = {}
    for mount in mounts_here():
        if mount.fstype in ("cgroup", "cgroup2"):
            found.setdefault(mount.device, mount.point)
    return list(found.values())


def enter(group: str) -> list[str]:
    """Move the calling process into `group` ("/dsec/fs") in every hierarchy, made if missing.

    Returns what went wrong, one line for each hierarchy where the process stays. Descriptors,
    threads and later children go along.
    """
    failed = []
    for top in hierarchies():
        place = top / group.lstrip("/")
        try:
            for part in reversed([place, *place.parents][: len(Path(group).parts) - 1]):
                if not part.exists():
                    part.mkdir(exist_ok=True)
                    _inherit(part)
            (place / "cgroup.procs").write_text("0")
        except OSError as e:
            failed.append(f"{place}: {e.strerror}")
    return failed


def _inherit(place: Path) -> None:
    """Version 1: a new cpuset has no processors and takes no process until it is given some."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (place / "tasks").exists() and (place / name).exists():
            (place / name).write_text((place.parent / name).read_text())


def leave_behind(group: str) -> None:
    """Remove `group` where nobody is in it."""
    deadline = time.monotonic() + ENDING_S
    for top in hierarchies() if group.strip("/") else ():
        place = top / group.lstrip("/")
        while not _removed(place) and time.monotonic() < deadline:
            time.sleep(0.005)


def _removed(place: Path) -> bool:
    """False if only processes are in it that are just ending: those are not listed any more."""
    try:
        place.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        with contextlib.suppress(OSError):
            return bool((place / "cgroup.procs").read_text())
    return True
