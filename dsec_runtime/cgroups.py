"""A sandbox's control groups: where they are, whether its limits were hit, how they go.

    <parent>/<id>        the sandbox's; recovery kills and removes it, whatever is in it
    <parent>/<id>/box    what crun gets where limits are watched

crun removes its group when the container ends, and the kernel's counts with it. What must hold:
limits are watched in the group above, so the answer is there afterwards.

    version 2    the group above counts what happens below: memory.events; pids.events from
                 Linux 6.11 on
    version 1    it does not. A limit on memory is set on the group above, and the kernel tells
                 a descriptor of ours when it is hit; refused processes are not known

Watching is best effort, limits are not: what cannot be watched is left to crun to set.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from dsec_runtime.bundle import Limits, control_groups, counts_swap
from dsec_runtime.errors import SandboxError
from dsecfs.errors import MountError
from dsecfs.kernel.syscalls import closing, pidfd_open, pidfd_send_signal

BASE = Path("/sys/fs/cgroup")
END_S = 10.0
"""Longest wait for killed processes to be gone."""

_BATCH = 64
"""Processes that are killed at a time; a descriptor of each is open then."""
_MOST = 4096
"""Processes that get a signal other than SIGKILL."""

Limit = Literal["memory", "pids"]


class LimitWatch:
    """Watches the limits of one sandbox, from before crun starts. Close it in the end."""

    def __init__(self, cgroup: str, limits: Limits) -> None:
        self.group = cgroup
        """What crun gets as its group."""
        self.limits = limits
        """What crun has to set."""
        self._above = BASE / cgroup.lstrip("/")
        self._event: int | None = None
        if control_groups() == "v2":
            self.group = f"{cgroup}/box"
        elif limits.memory is not None:
            with contextlib.suppress(OSError):
                place = BASE / "memory" / cgroup.lstrip("/")
                self._event = _limit_memory(place, limits.memory)
                self.group = f"{cgroup}/box"
                self.limits = replace(limits, memory=None)

    def hit(self) -> frozenset[Limit]:
        """Limits because of which the kernel ended ("memory") or refused ("pids") processes."""
        found: set[Limit] = set()
        if self._event is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
                found.add("memory")
        if _count(self._above / "memory.events", "oom_kill"):
            found.add("memory")
        if _count(self._above / "pids.events", "max"):
            found.add("pids")
        return frozenset(found)

    def close(self) -> None:
        if self._event is not None:
            os.close(self._event)
            self._event = None


def _limit_memory(place: Path, limit: int) -> int:
    """Version 1: make the group with its limit, and a descriptor that counts its being hit."""
    place.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # always on from Linux 5.11
        (place / "memory.use_hierarchy").write_text("1")
    (place / "memory.limit_in_bytes").write_text(str(limit))
    if counts_swap():
        (place / "memory.memsw.limit_in_bytes").write_text(str(limit))
    event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        control = os.open(place / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        with closing(control):
            (place / "cgroup.event_control").write_text(f"{event} {control}")
    except BaseException:
        os.close(event)
        raise
    return event


def _count(events: Path, wanted: str) -> int:
    """A counter in an events file of version 2; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError):
        for line in events.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == wanted:
                return int(value)
    return 0


# -- removing ------------------------------------------------------------------------------


def places(cgroup: str) -> list[Path]:
    """Where a control group is: one place in version 2, one per controller in version 1."""
    name = cgroup.lstrip("/")
    found = (f"{base}/{name}" for base in _hierarchies())
    return [Path(place) for place in found if os.path.isdir(place)]


@functools.cache
def _hierarchies() -> list[str]:
    """Where control groups are mounted. That does not change."""
    if control_groups() == "v2":
        return [str(BASE)]
    with contextlib.suppress(FileNotFoundError), os.scandir(BASE) as entries:
        return [e.path for e in entries if e.is_dir(follow_symlinks=False)]
    return []


def kill(cgroup: str) -> None:
    """Send SIGKILL to everything in a control group, and let it die if it is frozen."""
    for place in places(cgroup):
        for inner in [*_below(place), place]:
            _kill_in(inner)


def send(cgroup: str, number: signal.Signals) -> None:
    """Send a signal to everything in a control group, once."""
    for place in places(cgroup):
        for inner in [*_below(place), place]:
            with contextlib.suppress(OSError, MountError):
                _kill_processes(inner, _processes(inner)[:_MOST], number)
        return  # every hierarchy has the same processes


def discard(cgroup: str) -> None:
    """Remove a control group if nothing is in it."""
    for place in places(cgroup):
        for inner in [*_below(place), place]:
            with contextlib.suppress(OSError):
                inner.rmdir()


def _kill_in(group: Path) -> None:
    """Of one group alone. crun freezes it first, and one that is killed then leaves it frozen;
    in version 1 the frozen do not even die of SIGKILL."""
    # MountError is what our system calls raise: too many open files; `remove` tries again.
    with contextlib.suppress(OSError, MountError):
        pids = _processes(group)
        for at in range(0, len(pids), _BATCH):
            _kill_processes(group, pids[at : at + _BATCH])
    for name, thaw in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        if (group / name).exists():
            with contextlib.suppress(OSError):
                (group / name).write_text(thaw)


def _processes(group: Path) -> list[int]:
    """Process ids; without the 0 that stands for processes of other pid namespaces (kill(2)
    would take it for our own group)."""
    return [pid for line in (group / "cgroup.procs").read_text().split() if (pid := int(line))]


def _kill_processes(
    group: Path, pids: Sequence[int], number: signal.Signals = signal.SIGKILL
) -> None:
    """An id may be another process's by now, but not any more once a descriptor of it is open."""
    with contextlib.ExitStack() as stack:
        held = {}
        for pid in pids:
            fd = pidfd_open(pid)
            if fd is not None:
                stack.callback(os.close, fd)
                held[pid] = fd
        for pid in set(_processes(group)) & set(held):
            pidfd_send_signal(held[pid], number)


def remove(cgroup: str) -> None:
    """Kill what is in a control group and remove it. SandboxError if it does not go."""
    deadline = time.monotonic() + END_S
    pause = 0.001
    while found := places(cgroup):
        for place in found:
            for inner in [*_below(place), place]:
                _kill_in(inner)
                with contextlib.suppress(OSError):
                    inner.rmdir()
        if not any(place.exists() for place in found):
            return
        if time.monotonic() > deadline:
            raise SandboxError(
                f"control group {cgroup}: still has processes {END_S:g} s after SIGKILL",
                hint="they wait for a file system or a device; dsec doctor shows them",
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _below(place: Path) -> Iterator[Path]:
    """Control groups inside one, the innermost first."""
    for path, names, _ in os.walk(place, topdown=False):
        yield from (Path(path, name) for name in names)
