"""Looking after bytes that lie on the disk: two chores (housekeeping.py).

`scrub`: blobs that EROFS reads without us (pinned by layer mounts) are hashed once in an
interval, because nobody else would see it when the disk changes them. `verify`: what an earlier
boot left is hashed when there is nothing else to do, so that blobs that are here whole can be
used directly again.

What must hold: neither takes more than its rate of the disk; damage in a blob in direct use is
told before it is mended in place, never punched; what cannot be mended is said and counted,
and tried again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

from dsecfs.cache.blob import stored_states
from dsecfs.cache.blobfiles import ABSENT, OLD, VALID
from dsecfs.cache.chunkcache import CachedBlob, ChunkCache
from dsecfs.cache.evict import cached_blobs
from dsecfs.errors import CacheError, DeadlineExceeded, DsecfsError
from dsecfs.layers.digest import Digest
from dsecfs.nodedirs import NodeDirs, age_s
from dsecfs.store.base import Priority

log = logging.getLogger(__name__)

LOOK_S = 60.0
"""Pause between looks at what is used directly."""
HEAL_S = 150.0
"""Longest time for fetching one batch anew; the store's own deadline is shorter."""
HEAL_AGAIN_S = 600.0
"""Pause after damage that could not be mended."""
VERIFY_AFTER_S = 20.0
"""A process that has just begun has other things to do."""
VERIFY_AGAIN_S = 3600.0
BUSY_S = 60.0
"""Longest wait for a moment in which nothing is being fetched: a floor, not a starvation."""
_BATCH = 16
_POLL_S = 0.05

Damage = Callable[[Digest], object]
"""Told that a blob in direct use was found damaged, before it is mended."""


def scrub(
    cache: ChunkCache,
    used_directly: Callable[[], Iterable[Digest]],
    *,
    interval_s: float,
    rate: float,
    on_damage: Damage,
    look_s: float = LOOK_S,
) -> Iterator[float]:
    """Chore: watch the blobs that `used_directly` names. `rate` in bytes per second.

    Every `look_s` their words are looked at (a disk that lost data shows there); every
    `interval_s` their bytes are.
    """
    failed: dict[Digest, float] = {}
    while True:
        blobs = list(used_directly())
        failed = {blob: until for blob, until in failed.items() if blob in blobs}
        for blob in blobs:
            yield 0.0
            states = stored_states(cache.dirs, blob)
            if states is None or failed.get(blob, 0.0) > time.monotonic():
                continue
            wrong = [chunk for chunk, state in enumerate(states) if state != VALID]
            if wrong or is_due(cache.dirs, blob, interval_s):
                scrubbing = _scrub_blob(cache, blob, wrong, rate, on_damage)
                if not (yield from scrubbing):
                    failed[blob] = time.monotonic() + HEAL_AGAIN_S
        yield look_s


def is_due(dirs: NodeDirs, blob: Digest, interval_s: float) -> bool:
    """Whether a blob in direct use was last hashed more than `interval_s` ago. A mount begins
    with a blob of which every chunk was verified."""
    ages = []
    place = dirs.blob(blob)
    with contextlib.suppress(FileNotFoundError):
        ages.append(age_s((place / "scrubbed").stat()))
    with contextlib.suppress(FileNotFoundError):
        # The oldest: younger mounts are of the same bytes.
        ages.append(max(map(_age, (place / "pins").iterdir()), default=0.0))
    return min(ages, default=0.0) >= interval_s


def _age(path: Path) -> float:
    try:
        return age_s(path.stat())
    except FileNotFoundError:
        return 0.0


def _scrub_blob(
    cache: ChunkCache, digest: Digest, wrong: Sequence[int], rate: float, on_damage: Damage
) -> Generator[float, None, bool]:
    """Hash all of a blob, after mending chunks that are known to be `wrong`. Returns whether
    it is all right in the end."""
    blob = cache.open(digest, keep=False)
    right = True
    if wrong:
        log.warning("%s: %d chunks in direct use are not verified any more", blob, len(wrong))
        on_damage(digest)
        for at in range(0, len(wrong), _BATCH):
            right &= yield from _mend(cache, blob, wrong[at : at + _BATCH])
            yield _BATCH * blob.chunk_size / rate
    for chunk in range(blob.chunk_count):
        try:
            damaged = blob.is_damaged(chunk)
        except OSError as e:
            log.error("%s, chunk %d: cannot read the cache: %s", blob, chunk, e.strerror)
            blob.files.demote(chunk)
            damaged = True
        if damaged:
            on_damage(digest)
            right &= yield from _mend(cache, blob, [chunk])
        yield blob.files.length(chunk) / rate
    if right:
        (cache.dirs.blob(digest) / "scrubbed").touch(mode=0o600)
        os.utime(cache.dirs.blob(digest) / "scrubbed")
    return right


def _mend(
    cache: ChunkCache, blob: CachedBlob, chunks: Sequence[int]
) -> Generator[float, None, bool]:
    """Hash chunks that are not VALID and fetch what is damaged. Returns whether all are."""
    try:
        yield from _bring(blob, chunks)
    except DsecfsError as e:
        left = [chunk for chunk in chunks if blob.files.state(chunk) != VALID]
        cache.stats.add("unhealed", len(left))
        log.error(
            "%s: %d chunks are damaged and cannot be fetched again; whoever has mounted it "
            "may read wrong bytes: %s", blob, len(left), e,
        )  # fmt: skip
        return False
    return True


def _bring(blob: CachedBlob, chunks: Sequence[int]) -> Iterator[float]:
    """Have chunks verified or fetched. Raises the first error."""
    end = time.monotonic() + HEAL_S
    handle = blob.prefetch(chunks, priority=Priority.BACKGROUND)
    try:
        while not handle.wait(0):
            if time.monotonic() > end:
                raise DeadlineExceeded(f"{blob}: not verified within {HEAL_S:g} s")
            yield _POLL_S
    finally:
        handle.cancel()
    if handle.error is not None:
        raise handle.error
    if any(blob.files.state(chunk) != VALID for chunk in chunks):
        raise CacheError(f"{blob}: the cache did not take it", hint="free space on its disk")


def verify(cache: ChunkCache, *, rate: float, after_s: float = VERIFY_AFTER_S) -> Iterator[float]:
    """Chore: hash blobs that an earlier boot left whole. `rate` in bytes per second."""
    yield after_s
    while True:
        for blob in left_whole(cache.dirs):
            yield 0.0
            states = stored_states(cache.dirs, blob)
            if states is None or ABSENT in states or OLD not in states:
                continue
            try:
                yield from _verify_blob(cache, blob, rate)
            except DsecfsError as e:
                log.info("blob %s is verified later: %s", blob[:12], e)
        yield VERIFY_AGAIN_S


def left_whole(dirs: NodeDirs) -> list[Digest]:
    """Blobs that are here whole and to be verified, those used last first."""
    found: list[tuple[float, Digest]] = []
    for blob in cached_blobs(dirs):
        states = stored_states(dirs, blob)
        if states is not None and OLD in states and ABSENT not in states:
            with contextlib.suppress(FileNotFoundError):
                found.append(((dirs.blob(blob) / "used").stat().st_mtime, blob))
    return [blob for _, blob in sorted(found, reverse=True)]


def _verify_blob(cache: ChunkCache, digest: Digest, rate: float) -> Iterator[float]:
    blob = cache.open(digest, keep=False)
    states = stored_states(cache.dirs, digest) or b""
    old = [chunk for chunk, state in enumerate(states) if state == OLD]
    for at in range(0, len(old), _BATCH):
        end = time.monotonic() + BUSY_S
        while cache.busy() and time.monotonic() < end:
            yield 20 * _POLL_S
        yield from _bring(blob, old[at : at + _BATCH])
        yield _BATCH * blob.chunk_size / rate
    # Nothing is left to hash; what the disk has is made durable.
    blob.verify_all(deadline_s=HEAL_S)
