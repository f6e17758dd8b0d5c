"""Keeping the cache within its size: oldest chunk use first, pins respected.

Owns the decision what leaves. One process of the node evicts at a time (a lock on
data/evict.lock that dies with its holder), from the high to the low watermark. A chunk
leaves in three steps under its lock: its word is cleared, then its data is punched, then
the lock goes; docs/cache-protocol.md says why a reader never sees the hole.

Memory is bounded: ages are counted in a histogram, in two passes (coarse, then exact to
the second), never listed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsecfs.cache.blob import open_files_locked, pins, read_chunk_list, setup_lock
from dsecfs.cache.blobfiles import ABSENT, STATE, BlobFiles
from dsecfs.cache.stats import Stats
from dsecfs.errors import (
    BadInput,
    Busy,
    CacheError,
    DsecfsError,
    FormatError,
    NotFound,
    TooNew,
)
from dsecfs.layers.digest import Digest, parse_digest
from dsecfs.nodedirs import NodeDirs

log = logging.getLogger(__name__)

_COARSE = 64
"""Seconds in a bucket of the first pass."""
_ROUNDS = 4
"""Passes over the node in one eviction: estimates miss holes, locked and sparse chunks."""
_RUN = 16
"""Most chunks cleared and punched at a time."""
_NO_SPACE_S = 1.0
"""Pause of caching after the disk refused a write, so as not to try at every chunk."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large the cache may become, in bytes of disk."""

    max_bytes: int
    high: float
    """Eviction starts above this share of `max_bytes` …"""
    low: float
    """… and stops below this one."""
    min_free: int
    """Bytes to leave free on the disk, for the others that live there."""

    def __post_init__(self) -> None:
        if self.max_bytes <= 0 or self.min_free < 0 or not 0 < self.low <= self.high <= 1:
            raise BadInput(
                f"cache limits make no sense: {self}",
                hint="expected max_bytes > 0 and 0 < low <= high <= 1",
            )


@dataclass(frozen=True, slots=True)
class Cleared:
    """What `clear` did."""

    chunks: int
    bytes: int
    pinned: int
    """Blobs that were left alone because they are pinned."""


def cached_blobs(dirs: NodeDirs) -> Iterator[Digest]:
    """Blobs that have a directory in the cache; strange names are passed over."""
    try:
        names = os.listdir(dirs.blobs)
    except FileNotFoundError:
        return
    for name in names:
        with contextlib.suppress(BadInput):
            if parse_digest(name) == name:
                yield Digest(name)


def disk_use(dirs: NodeDirs) -> int:
    """Bytes of disk that the data of all blobs takes."""
    total = 0
    for blob in cached_blobs(dirs):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            total += os.stat(dirs.blob(blob) / "data", follow_symlinks=False).st_blocks * 512
    return total


class Evictor:
    """Watches the size for one process, and evicts for the whole node when it is exceeded."""

    def __init__(
        self,
        dirs: NodeDirs,
        limits: Limits,
        stats: Stats,
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        self._dirs = dirs
        self._limits = limits
        self._stats = stats
        self._submit = submit
        self._lock = threading.Lock()
        self._known = -1
        """Disk use when it was last measured; -1: never."""
        self._since = 0
        """Bytes this process has written since."""
        self._scheduled = False
        self._paused_until = 0.0
        # Others write too: measure again after each percent.
        self._step = max(1, min(limits.max_bytes // 100, 64 << 20))

    # -- what the fetcher asks (fetcher.Room) ---------------------------------------------

    def available(self) -> bool:
        """Whether another chunk may be written: never above `max_bytes`, whatever happens."""
        with self._lock:
            if time.monotonic() < self._paused_until:
                return False
            measured = self._known >= 0
        if not measured:
            self._measure()
        with self._lock:
            if self._known + self._since < self._limits.max_bytes:
                return True
        self._schedule()
        return False

    def filled(self, size: int) -> None:
        """`size` bytes were written; starts an eviction when it is time."""
        with self._lock:
            self._since += size
            due = self._since >= self._step
        if due:
            self._schedule()

    def no_space(self) -> None:
        """The disk is full: make room, and do not write for a moment."""
        with self._lock:
            self._paused_until = time.monotonic() + _NO_SPACE_S
        self._schedule()

    def _schedule(self) -> None:
        with self._lock:
            if self._scheduled:
                return
            self._scheduled = True
        try:
            self._submit(self._background)
        except CacheError:  # closing
            self._scheduled = False

    def _background(self) -> None:
        try:
            self.run()
        except (OSError, DsecfsError) as e:
            log.warning("eviction failed, will be tried again: %s", e)
        finally:
            with self._lock:
                self._scheduled = False

    def _measure(self) -> int:
        use = disk_use(self._dirs)
        with self._lock:
            self._known, self._since = use, 0
        return use

    # -- evicting ----------------------------------------------------------------------

    def run(self) -> int:
        """Measure, and evict if the high watermark is passed. Returns bytes given back.

        Does nothing when another process of the node is at it.
        """
        use = self._measure()
        limit = self._effective_limit(use)
        if use <= limit * self._limits.high:
            return 0
        with self._node_lock() as locked:
            if not locked:
                return 0
            freed = self._evict(int(limit * self._limits.low))
        self._measure()
        return freed

    def _effective_limit(self, use: int) -> int:
        """`max_bytes`, or less where the disk has less to give."""
        disk = os.statvfs(self._dirs.data)
        return min(
            self._limits.max_bytes, use + disk.f_bavail * disk.f_frsize - self._limits.min_free
        )

    @contextlib.contextmanager
    def _node_lock(self) -> Iterator[bool]:
        fd = os.open(self._dirs.data / "evict.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)

    def _evict(self, target: int) -> int:
        freed = 0
        for blob in cached_blobs(self._dirs):
            freed += self._reclaim(blob)
        for _ in range(_ROUNDS):
            need = disk_use(self._dirs) - target
            if need <= 0:
                break
            cutoff = self._cutoff(need)
            if cutoff is None:
                break
            # Everything older than the cutoff goes, then of that second what is needed.
            before = freed
            for last in (cutoff - 1, cutoff):
                for blob in cached_blobs(self._dirs):
                    if freed - before >= need:
                        break
                    room = need - (freed - before)
                    with self._victim(blob) as files:
                        if files is not None:
                            freed += self._drop_until(files, last, room)[1]
            if freed == before:
                break
        return freed

    def _cutoff(self, need: int) -> int | None:
        """The second of last use up to which chunks must go to free `need` bytes.

        None when nothing may go.
        """
        coarse: Counter[int] = Counter()
        for used, size in self._ages():
            coarse.update(
                {bucket: n * size for bucket, n in Counter(t // _COARSE for t in used).items()}
            )
        bucket = _reach(coarse, need)
        if bucket is None:
            return None
        need -= sum(size for b, size in coarse.items() if b < bucket)
        fine: Counter[int] = Counter()
        for used, size in self._ages():
            fine.update(
                {t: n * size for t, n in Counter(t for t in used if t // _COARSE == bucket).items()}
            )
        return _reach(fine, need)

    def _ages(self) -> Iterator[tuple[list[int], int]]:
        """Per evictable blob: last uses of its chunks that are there, and the chunk size."""
        for blob in cached_blobs(self._dirs):
            with self._victim(blob) as files:
                if files is not None:
                    there = (w & STATE for w in files.words)
                    yield list(itertools.compress(files.used.tolist(), there)), files.chunk_size

    @contextlib.contextmanager
    def _victim(self, blob: Digest) -> Iterator[BlobFiles | None]:
        """The files of a blob that may be evicted from, its set-up lock held; else None."""
        files: BlobFiles | None = None
        with contextlib.ExitStack() as stack:
            try:
                path = self._dirs.blob(blob)
                if (path / "data").exists():
                    stack.enter_context(setup_lock(path, 1.0))
                    if not pins(self._dirs, blob):
                        listed = read_chunk_list(self._dirs, blob)
                        files = open_files_locked(path, blob, listed.size, listed.chunk_size)
            except (OSError, Busy, CacheError) as e:
                log.info("blob %s is passed over: %s", blob[:12], e)
            except TooNew as e:
                log.info("blob %s is passed over: %s", blob[:12], e)
            except (FormatError, NotFound) as e:
                # Nobody can open this blob any more: its space goes back as a whole. Who
                # has it open keeps the pair of files he has.
                log.warning("blob %s cannot be used and loses its data: %s", blob[:12], e)
                for name in ("present", "data"):
                    (self._dirs.blob(blob) / name).unlink(missing_ok=True)
            yield files

    def _drop_until(self, files: BlobFiles, last: int, need: int) -> tuple[int, int]:
        """Evict chunks last used at second `last` or before, until `need` bytes are free.

        Returns chunks and bytes.
        """
        if not files.can_punch():
            raise CacheError(
                f"{files.what}: its file system cannot punch holes, so nothing can be evicted",
                hint="put the cache on ext4, xfs, btrfs or tmpfs",
            )
        used = files.used.tolist()
        words = files.words.tolist()
        old = [i for i, w in enumerate(words) if w & STATE != ABSENT and used[i] <= last]
        start = files.allocated()
        chunks = 0
        for first, count in _runs(old):
            chunks += self._drop(files, first, count)
            if start - files.allocated() >= need:
                break
        freed = start - files.allocated()
        self._stats.add("evictions", chunks)
        self._stats.add("bytes_evicted", max(freed, 0))
        return chunks, freed

    def _drop(self, files: BlobFiles, first: int, count: int) -> int:
        """Evict one run of chunks; those that are locked stay. Returns how many went."""
        if not files.lock(first, count):
            return (
                sum(self._drop(files, c, 1) for c in range(first, first + count))
                if count > 1
                else 0
            )
        try:
            files.clear(first, count)
            files.punch(first, count)
        finally:
            files.unlock(first, count)
        return count

    def _reclaim(self, blob: Digest) -> int:
        """Give back space of chunks that are not there: a process died between writing the
        data and the word, or between clearing the word and punching."""
        with self._victim(blob) as files:
            if files is None:
                return 0
            size = files.chunk_size
            start = files.allocated()
            there = sum(1 for w in files.words if w & STATE)
            if start <= (there + 1) * size:
                return 0
            for begin, end in list(files.extents()):
                for chunk in range(begin // size, -(-end // size)):
                    if files.state(chunk) == ABSENT and files.lock(chunk):
                        try:
                            if files.state(chunk) == ABSENT:
                                files.punch(chunk)
                        finally:
                            files.unlock(chunk)
            return start - files.allocated()

    def clear(self, blob: Digest | None = None) -> Cleared:
        """Evict everything (of one blob) that is neither pinned nor in use."""
        chunks = freed = pinned = 0
        for one in [blob] if blob is not None else list(cached_blobs(self._dirs)):
            if pins(self._dirs, one):
                pinned += 1
                continue
            freed += self._reclaim(one)
            with self._victim(one) as files:
                if files is not None:
                    n, size = self._drop_until(files, 1 << 32, 1 << 62)
                    chunks, freed = chunks + n, freed + size
        self._measure()
        return Cleared(chunks, freed, pinned)


def _reach(sizes: Counter[int], need: int) -> int | None:
    """The smallest key at which the running sum of sizes reaches `need`; the largest if none."""
    total = 0
    key = None
    for key in sorted(sizes):
        total += sizes[key]
        if total >= need:
            break
    return key


def _runs(chunks: list[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of runs of neighbours in an ascending list, at most _RUN long."""
    i = 0
    while i < len(chunks):
        j = i + 1
        while j < len(chunks) and j - i < _RUN and chunks[j] == chunks[i] + j - i:
            j += 1
        yield chunks[i], j - i
        i = j
