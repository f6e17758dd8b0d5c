"""The node's chunk cache as its users see it: open a blob, read it, prefetch, pin, clear.

What must hold (design §9.1): a read is right, or a DsecfsError within its deadline; never
zeros, never short. Several processes may use one cache directory at the same time.

    cache = ChunkCache(dirs, lambda: open_store(url), max_bytes=100 << 30)
    blob = cache.open(digest)                     # its chunk list must be on this node
    data = blob.read_nowait(offset, size)         # None: not at hand
    data = await blob.aread(offset, size)         # from a trio task
    data = blob.read(offset, size)                # from a thread
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dsecfs.cache.blob import open_files, pin, read_chunk_list, unpin
from dsecfs.cache.blobfiles import OLD, STATE, VALID, BlobFiles
from dsecfs.cache.evict import Cleared, Evictor, Limits, disk_use
from dsecfs.cache.fetch import Blob, Fetch
from dsecfs.cache.fetcher import LOCK_WAIT_S, Fetcher
from dsecfs.cache.prefetch import PrefetchHandle
from dsecfs.cache.readahead import ReadAhead
from dsecfs.cache.stats import Stats
from dsecfs.errors import BadInput, CacheError, DeadlineExceeded, DsecfsError
from dsecfs.layers.digest import Digest
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import Priority, Store

if TYPE_CHECKING:
    import trio

Data = bytes | bytearray

_MAX_QUEUED = 2048
"""Read-ahead adds nothing while so many prefetches are queued."""
_MAX_OPEN_CHUNKS = 1 << 20
"""Chunks of all blobs that stay open (256 GiB): their digests and places take 52 bytes each."""
_RETRY_VOLATILE_S = 10.0
"""How long a blob that could not be set up on disk stays so before it is tried again."""
_LOCAL_READERS = 8
"""Threads of one event loop that read chunks which are on disk but not in memory."""


class _Request:
    """What one reader waits for: some chunks of one blob."""

    def __init__(self, chunks: list[int], notify: Callable[[], None]) -> None:
        self.chunks = chunks
        self.data: dict[int, bytes] = {}
        self.error: DsecfsError | None = None
        self._left = len(chunks)
        self._lock = threading.Lock()
        self._notify = notify

    def listener(self, fetch: Fetch, data: bytes | None, error: DsecfsError | None) -> None:
        with self._lock:
            self._left -= 1
            if data is not None:
                self.data[fetch.chunk] = data
            ready = self._left == 0 or (error is not None and self.error is None)
            self.error = self.error or error
        if ready:
            self._notify()


class Contents(NamedTuple):
    """What of a blob is on this node, in chunks."""

    total: int
    valid: int
    """Verified in this boot."""
    old: int
    """Verified in an earlier boot; hashed again at first use."""


class CachedBlob(Blob):
    """One blob, read through the cache. From `ChunkCache.open`; safe in several threads.

    Reads behave as pread(2) on a file of `size` bytes: they are clipped at the end.
    """

    def __init__(
        self,
        digest: Digest,
        chunk_size: int,
        size: int,
        digests: bytes,
        files: BlobFiles,
        fetcher: Fetcher,
        stats: Stats,
        *,
        deadline_s: float,
        read_ahead: int,
    ) -> None:
        super().__init__(digest, size, chunk_size, digests, files)
        self.opened = self.last_used = time.monotonic()
        self._fetcher = fetcher
        self._stats = stats
        self._deadline_s = deadline_s
        self._ahead = ReadAhead(self.chunk_count, read_ahead // chunk_size)

    # -- reading ---------------------------------------------------------------------

    def read_nowait(self, offset: int, size: int) -> Data | None:
        """The bytes if they are in memory and verified, else None. Never waits."""
        size = self._clip(offset, size)
        if size == 0:
            return b""
        try:
            data = self.files.read_valid(offset, size, nowait=True)
        except OSError:
            return None  # the slow way finds out, and heals
        if data is not None:
            self._served_here(offset, size)
        return data

    def read(
        self,
        offset: int,
        size: int,
        *,
        priority: Priority = Priority.FOREGROUND,
        deadline_s: float | None = None,
    ) -> Data:
        """The bytes, fetched if need be. Blocks at most `deadline_s` (the cache's default).

        Raises DeadlineExceeded, Corrupt, NotFound, StoreError, CacheError.
        """
        size = self._clip(offset, size)
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + deadline_s
        have: dict[int, bytes] = {}
        while size:
            got = self._assemble(offset, size, have, nowait=False)
            assert got is not None  # only with nowait
            if not isinstance(got, list):
                return self._served(offset, size, got, waited=bool(have))
            done = threading.Event()
            request = _Request(got, done.set)
            self._fetcher.want([(self, got)], priority, request.listener)
            try:
                if priority == Priority.FOREGROUND:
                    self._run_ahead(self._ahead.missed(*self._chunks(offset, size)))
                if not done.wait(max(0.0, end - time.monotonic())):
                    raise self._too_late(offset, size, deadline_s)
            finally:
                self._fetcher.drop(self, request.chunks, request.listener)
            if request.error is not None:
                raise request.error
            have.update(request.data)
        return b""

    async def aread(self, offset: int, size: int, *, deadline_s: float | None = None) -> Data:
        """`read` for a trio task. No thread is held while it waits for the store.

        A checkpoint only if it has to wait. Cancellation leaves nothing behind: the fetch
        goes on if somebody else wants it.
        """
        import trio

        size = self._clip(offset, size)
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        have: dict[int, bytes] = {}
        with trio.move_on_after(deadline_s):
            while size:
                got = self._assemble(offset, size, have, nowait=True)
                if got is None:
                    got = await trio.to_thread.run_sync(
                        lambda: self._assemble(offset, size, have, nowait=False),
                        abandon_on_cancel=True,
                        limiter=_local_limiter(),
                    )
                if not isinstance(got, list):
                    assert got is not None
                    return self._served(offset, size, got, waited=bool(have))
                event = trio.Event()
                token = trio.lowlevel.current_trio_token()
                request = _Request(got, functools.partial(_wake, token, event))
                self._fetcher.want([(self, got)], Priority.FOREGROUND, request.listener)
                try:
                    self._run_ahead(self._ahead.missed(*self._chunks(offset, size)))
                    await event.wait()
                finally:
                    self._fetcher.drop(self, request.chunks, request.listener)
                if request.error is not None:
                    raise request.error
                have.update(request.data)
            return b""
        raise self._too_late(offset, size, deadline_s)

    def _clip(self, offset: int, size: int) -> int:
        if offset < 0 or size < 0:
            raise BadInput(f"{self}: cannot read {size} bytes at {offset}")
        return max(0, min(size, self.size - offset))

    def _chunks(self, offset: int, size: int) -> tuple[int, int]:
        return offset // self.chunk_size, (offset + size - 1) // self.chunk_size

    def _assemble(
        self, offset: int, size: int, have: dict[int, bytes], *, nowait: bool
    ) -> Data | list[int] | None:
        """The bytes; or the chunks that must be fetched first; or None: the disk is needed.

        `have` holds chunks that were delivered to this read: it needs no luck with eviction.
        """
        first, last = self._chunks(offset, size)
        if not have:
            return self._from_files(offset, size, nowait=nowait)
        missing = [c for c in self.files.missing(first, last) if c not in have]
        if missing:
            return missing
        if first == last and size == len(have[first]):
            return have[first]
        out = bytearray(size)
        view = memoryview(out)
        at = offset
        while at < offset + size:
            chunk = at // self.chunk_size
            stop = min((chunk + 1) * self.chunk_size, offset + size)
            piece: Data | list[int] | None
            if chunk in have:
                base = chunk * self.chunk_size
                piece = have[chunk][at - base : stop - base]
            else:
                piece = self._from_files(at, stop - at, nowait=nowait)
                if piece is None or isinstance(piece, list):
                    return piece
            view[at - offset : stop - offset] = piece
            at = stop
        return out

    def _from_files(self, offset: int, size: int, *, nowait: bool) -> Data | list[int] | None:
        try:
            data = self.files.read_valid(offset, size, nowait=nowait)
        except OSError:
            data = None
        if data is not None:
            return data
        first, last = self._chunks(offset, size)
        missing = self.files.missing(first, last)
        if missing:
            return missing
        # All is said to be there. Not in memory; or changed while it was read; or the disk
        # fails or the file is short: then a fetch of each chunk looks closer, and heals.
        return None if nowait else list(range(first, last + 1))

    def _served(self, offset: int, size: int, data: Data, *, waited: bool) -> Data:
        if not waited:
            self._served_here(offset, size)
            return data
        self._stats.add("misses")
        self._stats.add("bytes_served", size)
        self.files.touch(*self._chunks(offset, size))
        return data

    def _served_here(self, offset: int, size: int) -> None:
        first, last = self._chunks(offset, size)
        self._stats.hit(size)
        self.files.touch(first, last)
        triggers = self._ahead.triggers
        if triggers and not triggers.keys().isdisjoint(range(first, last + 1)):
            self._run_ahead(self._ahead.hit(first, last))

    def _run_ahead(self, chunks: range) -> None:
        if chunks and self._fetcher.queued() < _MAX_QUEUED:
            state = self.files.state
            absent = [c for c in chunks if state(c) != VALID]
            # It is only advice: after `close` what is here is served all the same.
            with contextlib.suppress(CacheError):
                self._fetcher.want([(self, absent)], Priority.PREFETCH, _nobody)

    def _too_late(self, offset: int, size: int, deadline_s: float) -> DeadlineExceeded:
        self._stats.add("deadlines")
        return DeadlineExceeded(
            f"{self}: {size} bytes at {offset} did not arrive within {deadline_s:g} s",
            hint="check the store",
        )

    # -- the whole blob --------------------------------------------------------------

    def contents(self) -> Contents:
        """How much of the blob is here. Costs a pass over its words."""
        states = [w & STATE for w in self.files.words]
        return Contents(self.chunk_count, states.count(VALID), states.count(OLD))

    def complete(self) -> bool:
        """Every chunk is here and was verified in this boot. Pin first, then ask."""
        return not self.files.volatile and not self.files.missing(0, self.chunk_count - 1)

    def prefetch(
        self, chunks: Sequence[int], *, priority: Priority = Priority.PREFETCH
    ) -> PrefetchHandle:
        """Bring `chunks` in, in this order."""
        return PrefetchHandle(self._fetcher, [(self, chunks)], priority)

    def verify_all(self, *, deadline_s: float) -> bool:
        """Hash what an earlier boot left, replace what is damaged, make the data durable.

        True: the blob is `complete`. DeadlineExceeded; CacheError if the disk lost data.
        """
        end = time.monotonic() + deadline_s
        old = [i for i, w in enumerate(self.files.words) if w & STATE == OLD]
        handle = self.prefetch(old, priority=Priority.BACKGROUND)
        if not handle.wait(end - time.monotonic()):
            handle.cancel()
            raise DeadlineExceeded(f"{self}: not verified within {deadline_s:g} s")
        if self.files.volatile:
            return False
        if not self._fetcher.keeper.sync(self):
            raise CacheError(
                f"{self}: the disk lost data of the cache",
                hint="check the disk; every chunk is verified again before it is used",
            )
        return self.complete()

    def is_damaged(self, chunk: int) -> bool:
        """Hash a chunk that is here. True: it was damaged, and is to be hashed or fetched
        before it is used the next time. OSError: the disk cannot read it."""
        self._stats.add("scrubbed")
        data = self.files.read_valid(
            chunk * self.chunk_size, self.files.length(chunk), nowait=False, once=True
        )
        if data is None or self.matches(chunk, data):
            return False
        self.files.demote(chunk)
        return True

    def refresh_layout(self) -> None:
        """Take the newest layout of the store (after `optimize`). Blocks; store errors."""
        self._fetcher.places(self, newer_than=self._fetcher.places(self))

    def hot_chunks(self) -> list[int]:
        """Chunks in order of first use, as the layout has them; may be empty. Blocks; may
        ask the store."""
        return self._fetcher.places(self).hot.tolist()


class ChunkCache:
    """The cache of a node, as one process uses it.

    Making one starts no thread and opens no store: that happens at the first miss. It must
    not be carried across a fork once it was used.
    """

    def __init__(
        self,
        dirs: NodeDirs,
        store: Store | Callable[[], Store],
        *,
        max_bytes: int,
        high: float = 0.95,
        low: float = 0.85,
        min_free: int = 256 << 20,
        threads: int = 32,
        deadline_s: float = 30.0,
        read_ahead: int = 32 << 20,
        open_blobs: int = 64,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        """`max_bytes`, `min_free` and `read_ahead` in bytes; `high` and `low` are shares of
        `max_bytes`; up to `open_blobs` stay open when nobody uses them (`close_idle`). A store
        that is given as a function is opened at need and closed by `close`."""
        self.dirs = dirs
        self.stats = Stats(dirs)
        self._deadline_s = deadline_s
        self._read_ahead = read_ahead
        self._open_blobs = open_blobs
        self._lock = threading.Lock()
        self._pid = 0
        self._blobs: OrderedDict[Digest, CachedBlob] = OrderedDict()
        self._open_chunks = 0
        self._evictor = Evictor(
            dirs, Limits(max_bytes, high, low, min_free), self.stats, self._in_background
        )
        self._fetcher = Fetcher(
            dirs, store, self.stats, self._evictor, threads=threads, lock_wait_s=lock_wait_s
        )

    def open(self, blob: Digest, *, keep: bool = True) -> CachedBlob:
        """The blob, ready to be read. Reads its chunk list from this node and verifies it.

        `keep` False: it need not stay open for the next one. Raises NotFound (no chunk list
        here), FormatError, Busy, CacheError.
        """
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._forget_open()
            found = self._blobs.get(blob)
            if found is not None and not (
                found.files.volatile and time.monotonic() - found.opened > _RETRY_VOLATILE_S
            ):
                self._blobs.move_to_end(blob)
                found.last_used = time.monotonic()
                return found
            listed = read_chunk_list(self.dirs, blob)
            opened = CachedBlob(
                blob,
                listed.chunk_size,
                listed.size,
                listed.digests,
                open_files(self.dirs, blob, listed.size, listed.chunk_size),
                self._fetcher,
                self.stats,
                deadline_s=self._deadline_s,
                read_ahead=self._read_ahead,
            )
            if keep:
                if found is not None:
                    self._open_chunks -= found.chunk_count
                self._blobs[blob] = opened
                self._blobs.move_to_end(blob)
                self._open_chunks += opened.chunk_count
            while len(self._blobs) > 1 and (
                len(self._blobs) > self._open_blobs or self._open_chunks > _MAX_OPEN_CHUNKS
            ):
                # Who still holds it goes on using it; its files close with the last of them.
                _, oldest = self._blobs.popitem(last=False)
                self._open_chunks -= oldest.chunk_count
            return opened

    def close_idle(self, idle_s: float) -> int:
        """Close blobs that nobody has opened for `idle_s` seconds; how many. Who still holds
        one goes on using it."""
        before = time.monotonic() - idle_s
        with self._lock:
            idle = [digest for digest, blob in self._blobs.items() if blob.last_used <= before]
            for digest in idle:
                self._open_chunks -= self._blobs.pop(digest).chunk_count
        return len(idle)

    def busy(self) -> bool:
        """Whether chunks are on their way."""
        return self._fetcher.busy()

    def prefetch(
        self,
        plan: Sequence[tuple[Digest, Sequence[int]]],
        *,
        priority: Priority = Priority.PREFETCH,
    ) -> PrefetchHandle:
        """Bring chunks of several blobs in, in this order. Raises what `open` raises."""
        return PrefetchHandle(
            self._fetcher, [(self.open(blob), chunks) for blob, chunks in plan], priority
        )

    def store(self) -> Store:
        """The store that chunks come from, opened at first need. `close` closes it."""
        return self._fetcher.store()

    def pin(self, blob: Digest, name: str) -> None:
        """Keep what is here of `blob` until `unpin` with the same name. Busy, CacheError."""
        pin(self.dirs, blob, name)

    def unpin(self, blob: Digest, name: str) -> None:
        """Let go of a pin. No error if there is none."""
        unpin(self.dirs, blob, name)

    def clear(self, blob: Digest | None = None) -> Cleared:
        """Evict everything (of one blob) that is neither pinned nor in use."""
        return self._evictor.clear(blob)

    def evict(self) -> int:
        """Look at the size now, and evict if it is over the mark. Bytes given back."""
        return self._evictor.run()

    def disk_use(self) -> int:
        """Bytes of disk the cached data takes."""
        return disk_use(self.dirs)

    def close(self) -> None:
        """End the threads; fetches under way fail. Open blobs still serve what they have."""
        self._fetcher.close()
        self.stats.close()
        with self._lock:
            self._forget_open()

    def _forget_open(self) -> None:
        self._blobs.clear()
        self._open_chunks = 0

    def _in_background(self, work: Callable[[], None]) -> None:
        self._fetcher.local.submit(Priority.BACKGROUND, work)


def _nobody(fetch: Fetch, data: bytes | None, error: DsecfsError | None) -> None:
    """The listener of read-ahead: who needs the chunk asks for it himself."""


def _wake(token: trio.lowlevel.TrioToken, event: trio.Event) -> None:
    import trio

    try:
        token.run_sync_soon(event.set)
    except trio.RunFinishedError:
        return  # the reader is gone with its event loop


_limiters: dict[int, trio.CapacityLimiter] = {}


def _local_limiter() -> trio.CapacityLimiter:
    """One limiter per process: reads from a slow disk must not use up all threads."""
    import trio

    pid = os.getpid()
    if pid not in _limiters:
        _limiters.clear()
        _limiters[pid] = trio.CapacityLimiter(_LOCAL_READERS)
    return _limiters[pid]
