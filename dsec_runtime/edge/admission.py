"""Admission: what fits on this node. The last word on every create.

Requests count, not limits: memory_request_mb and cpu_request of all live sandboxes together stay
below what the machine has, times an overcommit factor. Pressure (PSI) is the brake: when tasks
stall for memory, what would fit on paper is refused all the same. What must hold: a reservation
is made before anything else of a sandbox and given back once, however it ends; what does not fit
is refused at once, with what would fit and when to come back.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from dsec_runtime.edge.model import SandboxSpec
from dsec_runtime.errors import Refused

PRESSURE = Path("/proc/pressure/memory")
_SOME = re.compile(r"^some avg10=([0-9.]+)", re.M)
_RECENT = 32


@dataclass(frozen=True, slots=True)
class Capacity:
    """What may be given out on this node."""

    memory_mb: int
    cpus: float
    sandboxes: int
    min_free_disk_mb: int = 1024
    """Kept free on the disk of the data directory."""
    max_pressure: float = 40.0
    """Percent of the last 10 s in which some task waited for memory (PSI some avg10)."""

    @staticmethod
    def here(*, memory: float = 1.0, cpu: float = 1.0, sandboxes: int = 4096) -> Capacity:
        """This machine's, times the overcommit factors."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
        count = len(os.sched_getaffinity(0))
        return Capacity(int(total * memory), count * cpu, sandboxes)


class Admission:
    """Keeps the account. Used from the event loop only."""

    def __init__(self, capacity: Capacity, disk: Path) -> None:
        self.capacity = capacity
        self.cordoned = ""
        """Why nothing new is taken; "" when it is."""
        self._disk = disk
        self._taken: dict[str, tuple[int, float]] = {}
        self._releases: deque[float] = deque(maxlen=_RECENT)

    @property
    def memory_mb(self) -> int:
        """Requests of memory that are given out."""
        return sum(memory for memory, _ in self._taken.values())

    @property
    def cpus(self) -> float:
        return sum(cpus for _, cpus in self._taken.values())

    @property
    def count(self) -> int:
        return len(self._taken)

    def reserve(self, sandbox: str, spec: SandboxSpec) -> None:
        """Count a sandbox in. Refused, with the reason, when it does not fit."""
        capacity = self.capacity
        if self.cordoned:
            raise self._refused(f"the node is cordoned ({self.cordoned})", "use another node")
        memory, cpus = spec.memory_counted_mb, spec.cpu_request
        free = capacity.memory_mb - self.memory_mb
        if memory > free:
            raise self._refused(
                f"{memory} MiB requested, largest free {max(0, free)} MiB",
                "lower memory_request_mb",
            )
        if cpus > capacity.cpus - self.cpus + 1e-9:
            raise self._refused(
                f"{cpus:g} CPUs requested, free {max(0.0, capacity.cpus - self.cpus):.2f}",
                "lower cpu_request",
            )
        if self.count >= capacity.sandboxes:
            raise self._refused(f"{self.count} sandboxes are on the node, its limit", "stop some")
        free_disk = self.free_disk_mb()
        if free_disk < capacity.min_free_disk_mb:
            raise self._refused(
                f"{free_disk} MiB are free on the node's disk, "
                f"{capacity.min_free_disk_mb} are kept",
                "dsec cache clear gives back what can be fetched again",
            )
        pressure = memory_pressure()
        if pressure > capacity.max_pressure:
            raise self._refused(f"tasks wait for memory {pressure:.0f} % of the time", "wait")
        self._taken[sandbox] = (memory, cpus)

    def adopt(self, sandbox: str, spec: SandboxSpec) -> None:
        """Count in what is there already, whether it fits or not."""
        self._taken[sandbox] = (spec.memory_counted_mb, spec.cpu_request)

    def release(self, sandbox: str) -> None:
        """Nothing happens for a sandbox that is not counted (any more)."""
        if self._taken.pop(sandbox, None) is not None:
            self._releases.append(time.monotonic())

    def free_disk_mb(self) -> int:
        found = os.statvfs(self._disk)
        return found.f_bavail * found.f_frsize >> 20

    def retry_after_s(self) -> float:
        """When something will probably be free: from the pace at which sandboxes ended lately."""
        if len(self._releases) < 2:
            return 30.0
        span = time.monotonic() - self._releases[0]
        return min(300.0, max(1.0, span / len(self._releases)))

    def _refused(self, what: str, then: str) -> Refused:
        after = self.retry_after_s()
        return Refused(
            f"refused: {what}",
            hint=f"retry in ~{after:.0f} s, {then}, or see: dsec node status",
            retry_after_s=after,
        )


def memory_pressure() -> float:
    """PSI (Documentation/accounting/psi.rst): percent; 0 where the kernel does not tell."""
    with contextlib.suppress(OSError):
        if found := _SOME.search(PRESSURE.read_text()):
            return float(found[1])
    return 0.0
