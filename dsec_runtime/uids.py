"""Ranges of user ids: every sandbox has one of its own, so sandboxes cannot touch each other.

    run/uids/<start>    claim of the process that uses the range

What must hold: a range is given out to one process at a time (its claim is made with
O_EXCL); it is free again when that process released it, or when `recover` finds the process
dead and no sandbox left that uses it. Ranges are tried in random order: a range just freed
is unlikely to be the next. In FUSE mode the lowest free one is taken, because the kernel
caches the files of a range for the next that has it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from dsecfs.errors import Busy, Conflict
from dsecfs.kernel.namespaces import IdRange
from dsecfs.locks import Claim
from dsecfs.nodedirs import NodeDirs

RANGE = 65536
"""Ids in a sandbox: 0..65535, as in images."""
FIRST = 1 << 29
"""First id of the first range. Above what useradd's subuids and systemd-nspawn use by default."""
COUNT = 8192
"""Ranges on a node. FIRST + COUNT * RANGE is 2^30: below 2^31, which some tools mistake."""
_RANDOM_TRIES = 32


@dataclass(frozen=True, slots=True)
class UidRange:
    """A range this process holds."""

    ids: IdRange
    claim: Claim

    def release(self) -> None:
        self.claim.release()


class UidRanges:
    """The ranges of a node. Safe to use from several threads and processes."""

    def __init__(
        self, dirs: NodeDirs, *, first: int = FIRST, count: int = COUNT, lowest: bool = False
    ) -> None:
        self._place = dirs.uids
        self._first = first
        self._count = count
        self._random_tries = 0 if lowest else _RANDOM_TRIES

    def acquire(self) -> UidRange:
        """A free range. Busy if all are taken."""
        self._place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(self._random_tries):
            found = self._try(int.from_bytes(os.urandom(4), "little") % self._count)
            if found is not None:
                return found
        taken = set(os.listdir(self._place))
        for number in range(self._count):
            if str(self._start(number)) not in taken:
                found = self._try(number)
                if found is not None:
                    return found
        raise Busy(
            f"user ids: all {self._count} ranges are taken",
            hint="end sandboxes, or configure more ranges",
        )

    def _start(self, number: int) -> int:
        return self._first + number * RANGE

    def _try(self, number: int) -> UidRange | None:
        start = self._start(number)
        with contextlib.suppress(Conflict):
            claim = Claim.make(self._place / str(start), {"pid": os.getpid()})
            return UidRange(IdRange(start, RANGE), claim)
        return None

    def recover(self, in_use: Collection[int]) -> list[int]:
        """Free ranges of dead processes, but for the starts `in_use`. Returns what it freed."""
        freed = []
        for path in self._claims():
            start = int(path.name)
            if start in in_use:
                continue
            claim = Claim.take(path)
            if claim is not None:
                claim.release()
                freed.append(start)
        return freed

    def free(self, start: int) -> None:
        """Free a range whose holder is gone. Nothing happens if it is free, or held."""
        claim = Claim.take(self._place / str(start))
        if claim is not None:
            claim.release()

    def taken(self) -> list[int]:
        """Starts of the ranges that are given out."""
        return sorted(int(path.name) for path in self._claims())

    def _claims(self) -> list[Path]:
        try:
            return [self._place / name for name in os.listdir(self._place) if name.isdigit()]
        except FileNotFoundError:
            return []
