"""Control groups of a running sandbox: freeze, give memory back, count.

Version 2 has one group with everything; in version 1 and hybrids the controllers are apart.
Sources: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/{memory,freezer-subsystem,pids}.rst.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsec_runtime.bundle import control_groups
from dsec_runtime.cgroups import BASE, places
from dsec_runtime.errors import CannotFreeze, SandboxLost

_MIB = 1 << 20
_STEP = 64 * _MIB
"""Bytes asked of memory.reclaim at a time."""
RECLAIM_S = 30.0
"""Longest time that giving memory back may take."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a group uses."""

    memory: int
    memory_peak: int | None
    cpu_s: float
    pids: int


class Group:
    """The group of one sandbox, `name` relative to the mounts of control groups."""

    def __init__(self, name: str) -> None:
        self._name = name.lstrip("/")
        self._v2 = control_groups() == "v2"

    def place(self, controller: str) -> Path:
        return BASE / self._name if self._v2 else BASE / controller / self._name

    def prepare(self) -> None:
        """After the sandbox was made: groups below it get the CPUs and memory nodes it has."""
        with contextlib.suppress(FileNotFoundError):
            (self.place("cpuset") / "cgroup.clone_children").write_text("1")

    def make_inner(self, inner: str) -> None:
        """A group below it for one command, in every hierarchy. SandboxLost when it is gone."""
        for place in places(self._name):
            try:
                (place / inner).mkdir(exist_ok=True)
            except OSError as e:
                raise SandboxLost(f"control group {self._name}/{inner}: {e.strerror}") from None

    # -- freezing ----------------------------------------------------------------------

    def freeze(self, what: str, deadline_s: float) -> None:
        """CannotFreeze, and thawed again, if a task does not stop in time."""
        try:
            self._set_frozen(True)
        except OSError as e:
            raise SandboxLost(f"pause {what}: {e}") from None
        end = time.monotonic() + deadline_s
        pause = 0.0005
        while not self.is_frozen():
            if time.monotonic() > end:
                self.thaw()
                raise CannotFreeze(
                    f"pause {what}: a task did not stop within {deadline_s:g} s; it runs on",
                    hint="it waits for a file system or a device; try again later",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def thaw(self) -> None:
        with contextlib.suppress(OSError):  # it is gone, and so is whatever was frozen
            self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        if self._v2:
            (self.place("") / "cgroup.freeze").write_text("1" if frozen else "0")
        else:
            state = "FROZEN" if frozen else "THAWED"
            (self.place("freezer") / "freezer.state").write_text(state)

    def is_frozen(self) -> bool:
        """All tasks stand still."""
        with contextlib.suppress(OSError):
            if self._v2:
                return "frozen 1" in (self.place("") / "cgroup.events").read_text()
            return (self.place("freezer") / "freezer.state").read_text().strip() == "FROZEN"
        return False

    # -- memory ------------------------------------------------------------------------

    def reclaim(self) -> int:
        """Ask the kernel to take back what it can. Bytes that became free."""
        before = self.usage().memory
        end = time.monotonic() + RECLAIM_S
        with contextlib.suppress(OSError):  # EAGAIN: nothing more can be taken
            if self._v2:
                while time.monotonic() < end:
                    (self.place("") / "memory.reclaim").write_text(str(_STEP))
            else:
                (self.place("memory") / "memory.force_empty").write_text("0")
        return max(0, before - self.usage().memory)

    # -- counting ----------------------------------------------------------------------

    def usage(self) -> Usage:
        """Zeros for what cannot be read."""
        if self._v2:
            place = self.place("")
            cpu = _table(place / "cpu.stat").get("usage_usec", 0) / 1e6
            peak = _number(place / "memory.peak")
            memory = _number(place / "memory.current") or 0
            return Usage(memory, peak, cpu, _number(place / "pids.current") or 0)
        memory = _number(self.place("memory") / "memory.usage_in_bytes") or 0
        peak = _number(self.place("memory") / "memory.max_usage_in_bytes")
        cpu = (_number(self.place("cpuacct") / "cpuacct.usage") or 0) / 1e9
        return Usage(memory, peak, cpu, _number(self.place("pids") / "pids.current") or 0)

    def counters(self, inner: str) -> Mapping[str, tuple[Path, str]]:
        """What tells that a command in the group `inner` of this one hit a limit. In version 1
        each group counts its own; in version 2 the counts of memory are in this one, those of
        pids where the process is (before Linux 6.11) or here."""
        if self._v2:
            place = self.place("")
            return {
                "memory": (place / "memory.events", "oom_kill"),
                "pids": (place / "pids.events", "max"),
                "pids.inner": (place / inner / "pids.events", "max"),
            }
        return {
            "memory": (self.place("memory") / inner / "memory.oom_control", "oom_kill"),
            "pids": (self.place("pids") / inner / "pids.events", "max"),
            "pids.all": (self.place("pids") / "pids.events", "max"),
        }


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _table(path: Path) -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, number = line.partition(" ")
            found[name] = int(number)
    return found
