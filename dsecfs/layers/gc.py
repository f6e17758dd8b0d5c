"""Collection: tombstones for what nothing leads to, deletion after the grace.

Owns tombstones, the collector's side of verdicts and the lock of a run. The protocol, and
why nothing that is reachable is ever deleted: docs/gc-protocol.md. What must hold: only one
run at a time deletes; a run that dies at any point leaves a store in which everything that
is reachable is there; what is about to be deleted is marked against once more first.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dsecfs.errors import Busy, NotFound
from dsecfs.layers.catalog import TRASH_S
from dsecfs.layers.digest import sha256
from dsecfs.layers.leases import DELETE, KEEP, MAX_PUBLISH_S, MAX_TTL_S, tombstone_key, verdict_key
from dsecfs.layers.reach import Reached, reach, trace_env
from dsecfs.store.base import ObjectInfo, Store, lease_prefix

GRACE_S = 48 * 3600
"""Seconds from the tombstone to deletion. More than MAX_PUBLISH_S, see the protocol."""
TRACE_S = 30 * 86400
"""Seconds for which a trace of an unknown environment (a composition of the moment) is kept."""
RUN_S = 4 * 3600
"""Longest run that may delete, in seconds, by its own clock; its lock lapses after twice that."""

COLLECTED = ("heads/", "layouts/", "objects/", "envs/", "imports/", "traces/")
"""Prefixes of what is collected when nothing leads to it."""

_LOCK = "gc/runs/"
_CLOCK = "gc/clock/"

Progress = Callable[[str], None]


class Kept(NamedTuple):
    """Why an object stays."""

    key: str
    size: int
    why: str


@dataclass
class GcReport:
    """What a run did, or would do (`dry_run`). Sizes in bytes."""

    dry_run: bool
    kept: list[Kept] = field(default_factory=list)
    tombstoned: list[ObjectInfo] = field(default_factory=list)
    waiting: list[ObjectInfo] = field(default_factory=list)
    """Have a tombstone that is younger than the grace."""
    deleted: list[ObjectInfo] = field(default_factory=list)
    revived: list[str] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    """(key, why it should be there): damage that collection found and cannot mend."""
    housekeeping: int = 0
    """Lapsed leases, old trash, left-over tombstones and verdicts removed."""


@dataclass(frozen=True)
class StoreStats:
    """Objects and bytes by the first part of their key."""

    objects: dict[str, int]
    bytes: dict[str, int]


def store_clock(store: Store) -> float:
    """The store's time: what it stamps on an object that is written now."""
    key = f"{_CLOCK}{secrets.token_hex(12)}"
    store.put_if_absent(key, b"")
    try:
        return store.stat(key).mtime
    finally:
        store.delete(key)


def collect(
    store: Store,
    *,
    dry_run: bool = False,
    grace_s: float = GRACE_S,
    progress: Progress = lambda step: None,
) -> GcReport:
    """One run. Raises Busy if another one is under way, and what reading the store raises.

    `grace_s` below the default is only safe when nobody publishes.
    """
    report = GcReport(dry_run)
    if dry_run:
        _run(store, report, grace_s, progress, may_delete=lambda: None)
        return report
    started = _now()
    lock = _lock(store)

    def may_delete() -> None:
        if _now() - started > RUN_S:
            raise Busy(
                f"collection ran for more than {RUN_S // 3600} hours and stopped",
                hint="run dsec store gc again; it goes on where it was",
            )

    try:
        _run(store, report, grace_s, progress, may_delete)
    finally:
        store.delete(lock)
    return report


def _run(
    store: Store,
    report: GcReport,
    grace_s: float,
    progress: Progress,
    may_delete: Callable[[], None],
) -> None:
    now = store_clock(store)
    progress("marking what refs, channels and leases lead to")
    found = reach(store, now)
    report.missing = found.missing
    tombstones = {info.key.removeprefix("tombstones/"): info for info in store.list("tombstones/")}
    due: list[ObjectInfo] = []
    there: set[str] = set()
    progress("looking at every object")
    for info in _collectable(store):
        there.add(info.key)
        why = _why(info, found, now, grace_s)
        stone = tombstones.pop(info.key, None)
        if why is not None:
            report.kept.append(Kept(info.key, info.size, why))
            if stone is not None:
                _revive(store, info.key, report)
        elif stone is None:
            report.tombstoned.append(info)
            if not report.dry_run:
                store.put_if_absent(tombstone_key(info.key), b"")
        elif stone.mtime + grace_s > now:
            report.waiting.append(info)
        else:
            due.append(info)
    # Published since the mark is not missing; what was listed is not either.
    report.missing += [(k, why) for k, why in found.why.items() if k not in there]
    if due:
        progress("marking again before anything is deleted")
        again = reach(store, store_clock(store))
        for info in due:
            if info.key in again.why:
                _revive(store, info.key, report)
            else:
                may_delete()
                _delete(store, info, report)
    for key in tombstones:
        # The object is gone: an earlier run died after deleting it.
        report.housekeeping += 1
        if not report.dry_run:
            may_delete()
            _bury(store, key)
    _housekeeping(store, now, report)


def _collectable(store: Store) -> Iterator[ObjectInfo]:
    for prefix in COLLECTED:
        yield from store.list(prefix)


def _why(info: ObjectInfo, found: Reached, now: float, grace_s: float) -> str | None:
    """Why an object stays, None if nothing speaks for it."""
    why = found.why.get(info.key)
    if why is not None:
        return why
    if info.mtime + grace_s > now:
        return "younger than the grace"
    if info.key.startswith("traces/"):
        env = found.compositions.get(trace_env(info.key))
        if env is not None:
            return f"trace of an environment that is kept: {env}"
        if info.mtime + TRACE_S > now:
            return "a recent trace"
    return None


def _delete(store: Store, info: ObjectInfo, report: GcReport) -> None:
    """Delete one object whose grace is over, unless a publisher revived it."""
    if report.dry_run:
        report.deleted.append(info)
        return
    verdict = verdict_key(info.key)
    if not store.put_if_absent(verdict, DELETE):
        try:
            if store.get(verdict, max_size=64) == KEEP:
                _revive(store, info.key, report)
                return
        except NotFound:
            # Another collector has just finished this key; the next run looks again.
            return
    store.delete(info.key)
    _bury(store, info.key)
    report.deleted.append(info)


def _revive(store: Store, key: str, report: GcReport) -> None:
    """Take a tombstone away from an object that stays."""
    report.revived.append(key)
    if report.dry_run:
        return
    # A verdict "delete" here is from a run that died; nobody else may delete now, so it is
    # taken back. A publisher that waits for it then finds the object in its place.
    store.put_if_absent(verdict_key(key), KEEP)
    _bury(store, key)


def _bury(store: Store, key: str) -> None:
    """Tombstone first, verdict last: a publisher that waits looks at the verdict."""
    store.delete(tombstone_key(key))
    store.delete(verdict_key(key))


def _housekeeping(store: Store, now: float, report: GcReport) -> None:
    """Remove what only took part in the protocol and does so no more."""
    old: list[str] = []
    for info in store.list("trash/"):
        if info.mtime + TRASH_S + GRACE_S <= now:
            old.append(info.key)
    for info in store.list(lease_prefix()):
        # No lease lives longer than MAX_TTL_S without a newer record.
        if info.mtime + MAX_TTL_S + MAX_PUBLISH_S <= now:
            old.append(info.key)
    for info in store.list("verdicts/"):
        # A verdict without a tombstone: a publisher's, written as the tombstone went.
        if info.mtime + GRACE_S <= now and not _exists(
            store, tombstone_key(info.key.removeprefix("verdicts/"))
        ):
            old.append(info.key)
    for info in store.list(_CLOCK):
        if info.mtime + MAX_PUBLISH_S <= now:
            old.append(info.key)
    report.housekeeping += len(old)
    if not report.dry_run:
        for key in old:
            store.delete(key)


def _exists(store: Store, key: str) -> bool:
    try:
        store.stat(key)
    except NotFound:
        return False
    return True


def _lock(store: Store) -> str:
    """Become the one run that may delete; the key to remove at its end. Raises Busy."""
    now = store_clock(store)
    last = 0
    for info in store.list(_LOCK):
        tail = info.key.removeprefix(_LOCK)
        if not tail.isdigit():
            continue
        last = max(last, int(tail))
        if info.mtime + 2 * RUN_S > now:
            raise Busy(
                "another collection of this store is under way",
                hint=f"wait; if it died, its lock lapses {2 * RUN_S // 3600} h after it began",
            )
        # Lapsed. Its number stays taken below, so two that see this still race for one key.
    key = f"{_LOCK}{last + 1:08d}"
    if not store.put_if_absent(key, sha256(secrets.token_bytes(16)).encode()):
        raise Busy("another collection of this store has just begun", hint="wait for it")
    for info in store.list(_LOCK):
        if info.key < key:
            store.delete(info.key)
    return key


def _now() -> float:
    """Seconds that also pass while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def stats(store: Store) -> StoreStats:
    """Count everything in a store."""
    objects: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for info in store.list(""):
        kind = info.key.partition("/")[0]
        objects[kind] += 1
        size[kind] += info.size
    return StoreStats(dict(objects), dict(size))
