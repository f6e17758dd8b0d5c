"""Getting missing chunks: one fetch per chunk at a time, verified, stored, handed to waiters.

Owns the table of fetches in flight and the two pools of threads: one that waits for the
store, one for local work (hashing chunks of an earlier boot, waiting for other processes,
eviction), so that a store that hangs never delays what is already on this node.

What must hold:
- bytes reach a waiter or the data file only after their sha256 was checked;
- a waiter gets the verified bytes themselves, so it makes progress however fast eviction is;
- every fetch ends: with bytes or with an error, whatever is raised on the way;
- a chunk's lock is held from before its word is looked at until after its word is written,
  and let go before its fetch leaves the table (two fetches of one process would share it).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from dsecfs.cache.blobfiles import ABSENT, OLD
from dsecfs.cache.fetch import (
    DONE,
    RUNNING,
    WAITING,
    Blob,
    Fetch,
    Listener,
    Room,
    bug,
    closed,
    follows,
)
from dsecfs.cache.keep import Keeper
from dsecfs.cache.layouts import Places, local_layout, newest_layout
from dsecfs.cache.pool import Pool
from dsecfs.cache.stats import Stats
from dsecfs.errors import CacheError, Corrupt, DsecfsError, NotFound, ShortRead
from dsecfs.layers.codec import decompress
from dsecfs.layers.digest import Digest
from dsecfs.layers.layout import ZERO
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import Priority, Store, object_key

log = logging.getLogger(__name__)

MAX_RANGE = 4 << 20
"""Most stored bytes of one range read (design §4)."""

LOCK_WAIT_S = 10.0
"""After this long a chunk that another process holds is fetched without being cached."""

_MAX_PAUSE_S = 0.032
"""Longest pause between looks at a chunk that another process is fetching."""


class Fetcher:
    """All fetching of one process. No thread exists before the first `want`."""

    def __init__(
        self,
        dirs: NodeDirs,
        store: Store | Callable[[], Store],
        stats: Stats,
        room: Room,
        *,
        threads: int,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        self._dirs = dirs
        self._open_store = store if callable(store) else None
        self._store: Store | None = None if callable(store) else store
        self._store_lock = threading.Lock()
        self._stats = stats
        self._lock_wait_s = lock_wait_s
        self._mutex = threading.Lock()
        self._pid = 0
        """The process that used it first; a child of its has none of the threads."""
        self._closed = False
        self._fetches: set[Fetch] = set()
        """All that have not ended."""
        self._starts: dict[tuple[Digest, int], list[Fetch]] = {}
        """Queued fetches by (object, offset): what a batch is extended with."""
        self._remote = Pool("dsec-fetch", threads, shared=max(1, threads // 4))
        self.local = Pool("dsec-cache", 4, shared=2)
        self.keeper = Keeper(self.local, stats, room)

    # -- asking ------------------------------------------------------------------------

    def want(
        self, asks: Sequence[tuple[Blob, Iterable[int]]], priority: Priority, listener: Listener
    ) -> None:
        """Get chunks of blobs; `listener` is called once for each. What is asked for together
        is merged into large range reads. Joins fetches under way, and makes them more urgent
        if need be. CacheError after `close` or a fork."""
        self._check_process()
        for blob, _ in asks:
            blob.files.check_process()
        new: list[Fetch] = []
        raised: list[Fetch] = []
        with self._mutex:
            if self._closed:
                raise closed()
            for blob, chunks in asks:
                for chunk in chunks:
                    fetch = blob.inflight.get(chunk)
                    if fetch is None:
                        fetch = blob.inflight[chunk] = Fetch(blob, chunk, priority)
                        self._fetches.add(fetch)
                        new.append(fetch)
                    elif priority < fetch.priority:
                        fetch.priority = priority
                        if fetch.state == WAITING:
                            raised.append(fetch)
                    fetch.listeners.append(listener)
        self._route(new + raised, priority)

    def _check_process(self) -> None:
        """Before any lock is taken: a thread that is not in this child may have held it."""
        if not self._pid:
            self._pid = os.getpid()
        elif self._pid != os.getpid():
            raise CacheError("the cache was used before a fork", hint="make a new one after it")

    def drop(self, blob: Blob, chunks: Iterable[int], listener: Listener) -> None:
        """Take a listener back. A queued fetch that nobody wants any more is not done."""
        with self._mutex:
            for chunk in chunks:
                fetch = blob.inflight.get(chunk)
                if fetch is not None and listener in fetch.listeners:
                    fetch.listeners.remove(listener)

    def busy(self) -> bool:
        """Whether anything is being fetched or waits for it."""
        return bool(self._fetches)

    def queued(self) -> int:
        """How many prefetches wait for their turn (a bound for read-ahead)."""
        return self._remote.waiting(Priority.PREFETCH)

    def store(self) -> Store:
        """The store, opened at first need (its client library starts threads)."""
        with self._store_lock:
            if self._store is None:
                assert self._open_store is not None
                self._store = self._open_store()
            return self._store

    def close(self) -> None:
        """End the threads, tell who waits, and close a store that this object opened.

        A thread that is stuck in the store keeps its chunk and its lock until it comes back.
        """
        with self._mutex:
            self._closed = True
        self.local.close()
        self._remote.close()
        self.keeper.close()
        with self._mutex:
            left = list(self._fetches)
        self._fail_waiting(left, closed())
        for fetch in left:
            with self._mutex:
                listeners, fetch.listeners = fetch.listeners, []
            for listener in listeners:
                listener(fetch, None, closed())
        with self._store_lock:
            if self._store is not None and self._open_store is not None:
                self._store.close()

    # -- where a fetch goes next ---------------------------------------------------------

    def _route(self, fetches: list[Fetch], priority: Priority) -> None:
        """Send WAITING fetches to the pool that can take the next step."""
        here: list[Fetch] = []
        placed: list[Fetch] = []
        loading: set[Blob] = set()
        with self._mutex:
            for fetch in fetches:
                blob = fetch.blob
                if fetch.state != WAITING:
                    continue
                if not fetch.lockless and blob.files.state(fetch.chunk) != ABSENT:
                    here.append(fetch)
                elif blob.places is None:
                    blob.unplaced.append(fetch)
                    loading.add(blob)
                else:
                    self._place(fetch)
                    placed.append(fetch)
        try:
            self.local.submit(priority, *(functools.partial(self._run_local, f) for f in here))
            self._remote.submit(
                priority,
                *(functools.partial(self._load_layout, b) for b in loading),
                *(functools.partial(self._run_remote, f) for f in placed),
            )
        except CacheError as e:
            self._fail_waiting(fetches, e)

    def _place(self, fetch: Fetch) -> None:
        """Look the chunk up in the layout and enter it in the index. Mutex held."""
        places = fetch.blob.places
        assert places is not None
        if fetch.place is not None:
            self._unindex(fetch)
        fetch.places = places
        fetch.place = places[fetch.chunk]
        if fetch.place.codec != ZERO and not fetch.alone:
            key = (places.objects[fetch.place.object], fetch.place.offset)
            self._starts.setdefault(key, []).append(fetch)

    def _unindex(self, fetch: Fetch) -> None:
        if fetch.places is None or fetch.place is None or fetch.place.codec == ZERO:
            return
        key = (fetch.places.objects[fetch.place.object], fetch.place.offset)
        entry = self._starts.get(key, [])
        if fetch in entry:
            entry.remove(fetch)
            if not entry:
                del self._starts[key]

    def _load_layout(self, blob: Blob) -> None:
        """Find the blob's layout, then send on what waited for it."""
        error: DsecfsError | None = bug(f"loading the layout of {blob}")
        try:
            self.places(blob)
            error = None
        except DsecfsError as e:
            error = e
        finally:
            with self._mutex:
                waiting = list(dict.fromkeys(blob.unplaced))
                blob.unplaced.clear()
            if error is not None:
                self._fail_waiting(waiting, error)
        if error is None:
            for priority in Priority:
                self._route([f for f in waiting if f.priority == priority], priority)

    def places(self, blob: Blob, *, newer_than: Places | None = None) -> Places:
        """The layout of `blob`; from the store if there is none here, or to replace
        `newer_than`. Blocks; raises what `newest_layout` raises."""
        with blob.layout_lock:
            if blob.places is None or (newer_than is not None and blob.places is newer_than):
                found = None
                if newer_than is None:
                    found = local_layout(self._dirs, blob.digest, blob.chunk_count, blob.chunk_size)
                if found is None:
                    found = newest_layout(
                        self._dirs, self.store(), blob.digest, blob.chunk_count, blob.chunk_size
                    )
                    self._stats.add("layouts")
                blob.places = found
            return blob.places

    # -- local steps ---------------------------------------------------------------------

    def _run_local(self, fetch: Fetch) -> None:
        """Serve a chunk that is here: VALID at once, OLD after hashing it."""
        if not self._take_waiting(fetch):
            return
        with self._ending([fetch]):
            if fetch.lockless or self._lock([fetch]):
                data = None if fetch.lockless else self._serve_here(fetch)
                if data is not None:
                    self._finish(fetch, data, None)
                else:
                    self._again(fetch)

    def _serve_here(self, fetch: Fetch) -> bytes | None:
        """The bytes of a locked chunk if they are on disk and right; else it is ABSENT."""
        blob, chunk, files = fetch.blob, fetch.chunk, fetch.blob.files
        state = files.state(chunk)
        if state == ABSENT:
            return None
        try:
            data = files.read_unchecked(chunk)
        except OSError as e:
            log.warning("%s, chunk %d: cannot read the cache: %s", blob, chunk, e.strerror)
            data = b""
        if blob.matches(chunk, data):
            if state == OLD:
                files.confirm(chunk)
                files.touch(chunk, chunk)
                self._stats.add("verified")
            return data
        log.warning("%s, chunk %d: damaged in the cache, fetched again", blob, chunk)
        self._stats.add("corrupt_cache")
        files.clear(chunk)
        return None

    def _lock(self, fetches: list[Fetch]) -> list[Fetch]:
        """Lock the chunks of `fetches` (of RUNNING state); park those that somebody else has.

        Runs of neighbouring chunks take one system call.
        """
        got: list[Fetch] = []
        i = 0
        while i < len(fetches):
            fetch = fetches[i]
            files = fetch.blob.files
            if fetch.lockless or files.volatile:
                got.append(fetch)
                i += 1
                continue
            j = i + 1
            while (
                j < len(fetches)
                and fetches[j].blob is fetch.blob
                and fetches[j].chunk == fetch.chunk + j - i
                and not fetches[j].lockless
            ):
                j += 1
            if not files.lock(fetch.chunk, j - i):
                j = i + 1
                if not files.lock(fetch.chunk):
                    self._park(fetch)
                    i = j
                    continue
            for k in range(i, j):
                fetches[k].locked = True
                got.append(fetches[k])
            i = j
        return got

    def _park(self, fetch: Fetch) -> None:
        """Another process works on this chunk: look again soon, but not for ever."""
        now = time.monotonic()
        if not fetch.parked_at:
            fetch.parked_at = now
            self._stats.add("waits")
        if now - fetch.parked_at > self._lock_wait_s:
            self._stats.add("wait_timeouts")
            log.warning("%s, chunk %d: held too long, read through", fetch.blob, fetch.chunk)
            fetch.lockless = True
            self._again(fetch)
            return
        pause, fetch.pause = fetch.pause, min(2 * fetch.pause, _MAX_PAUSE_S)
        with self._mutex:
            fetch.state = WAITING
        self.local.submit_later(pause, fetch.priority, functools.partial(self._unpark, fetch))

    def _unpark(self, fetch: Fetch) -> None:
        if not self._take_waiting(fetch):
            return  # queued twice, and somebody is at it
        blob = fetch.blob
        with self._ending([fetch]):
            data = None
            with contextlib.suppress(OSError):  # then the next step finds out, and heals
                data = blob.files.read_valid(
                    fetch.chunk * blob.chunk_size, blob.files.length(fetch.chunk), nowait=False
                )
            if data is not None:
                self._finish(fetch, bytes(data), None)
            else:
                self._again(fetch)

    def _again(self, fetch: Fetch) -> None:
        """Let go of the chunk and start over with what its word says now."""
        self._release(fetch)
        with self._mutex:
            fetch.state = WAITING
        self._route([fetch], fetch.priority)

    def _release(self, fetch: Fetch) -> None:
        if fetch.locked:
            fetch.locked = False
            fetch.blob.files.unlock(fetch.chunk)

    # -- remote steps --------------------------------------------------------------------

    def _run_remote(self, fetch: Fetch) -> None:
        batch = self._gather(fetch)
        with self._ending(batch):
            runs: list[list[Fetch]] = []
            for f in self._lock(batch):
                # Another process, or this one, may have brought it in the meantime.
                if f.locked and (data := self._serve_here(f)) is not None:
                    self._finish(f, data, None)
                elif f.place is not None and f.place.codec == ZERO:
                    self._arrived(f, bytes(f.blob.files.length(f.chunk)))
                elif runs and follows(runs[-1][-1], f):
                    runs[-1].append(f)
                else:
                    runs.append([f])
            for run in runs:
                self._fetch_run(run)

    @contextlib.contextmanager
    def _ending(self, batch: list[Fetch]) -> Iterator[None]:
        """Whatever is raised, fetches this thread has taken and not passed on end here."""
        me = threading.get_ident()
        error: DsecfsError = bug("fetching a chunk")
        try:
            yield
        except DsecfsError as e:
            error = e
        except OSError as e:
            error = CacheError(f"{batch[0].blob}: cannot use the cache: {e.strerror}")
        finally:
            for fetch in batch:
                if fetch.state == RUNNING and fetch.owner == me:
                    self._finish(fetch, None, error)

    def _gather(self, first: Fetch) -> list[Fetch]:
        """Take `first`, and queued fetches of its class that continue it in the object."""
        with self._mutex:
            if first.state != WAITING or first.place is None or first.places is None:
                return []
            batch = [first]
            self._take(first)
            if not first.listeners:
                self._forget(first)
                return []
            if first.alone or first.place.codec == ZERO:
                return batch
            name = first.places.objects[first.place.object]
            at = start = first.place.offset
            end = start + first.place.stored
            while True:
                for fetch in list(self._starts.get((name, at), ())):
                    assert fetch.place is not None
                    last = at + fetch.place.stored
                    if (
                        fetch.state == WAITING
                        and fetch.priority == first.priority
                        and last - start <= MAX_RANGE
                    ):
                        self._take(fetch)
                        if not fetch.listeners:
                            self._forget(fetch)
                            continue
                        batch.append(fetch)
                        end = max(end, last)
                if at == end:
                    return batch
                at = end

    def _take(self, fetch: Fetch) -> None:
        """Mutex held."""
        self._unindex(fetch)
        fetch.state = RUNNING
        fetch.owner = threading.get_ident()

    def _take_waiting(self, fetch: Fetch) -> bool:
        """Take a fetch unless somebody else has; only who took it may finish it."""
        with self._mutex:
            if fetch.state != WAITING:
                return False
            self._take(fetch)
            return True

    def _fail_waiting(self, fetches: Iterable[Fetch], error: DsecfsError) -> None:
        for fetch in fetches:
            if self._take_waiting(fetch):
                self._finish(fetch, None, error)

    def _forget(self, fetch: Fetch) -> None:
        fetch.state = DONE
        self._fetches.discard(fetch)
        if fetch.blob.inflight.get(fetch.chunk) is fetch:
            del fetch.blob.inflight[fetch.chunk]

    def _fetch_run(self, run: list[Fetch]) -> None:
        """One range read for fetches that lie back to back in one object."""
        first = run[0]
        assert first.place is not None and first.places is not None
        name = first.places.objects[first.place.object]
        start = first.place.offset
        end = max(f.place.offset + f.place.stored for f in run if f.place is not None)
        self._stats.add("requests")
        try:
            stored = memoryview(
                self.store().get_range(
                    object_key(name), start, end - start, priority=first.priority
                )
            )
        except (NotFound, ShortRead) as e:
            for f in run:
                self._retry(f, e)
            return
        except DsecfsError as e:
            for f in run:
                self._finish(f, None, e)
            return
        self._stats.add("bytes_fetched", end - start)
        for f in run:
            assert f.place is not None
            at = f.place.offset - start
            piece = stored[at : at + f.place.stored]
            data = decompress(piece, f.place.codec, f.blob.files.length(f.chunk))
            if data is None:
                self._bad(f)
            else:
                self._arrived(f, data)

    def _arrived(self, fetch: Fetch, data: bytes) -> None:
        """Check, store and hand on what the store gave for a chunk."""
        if not fetch.blob.matches(fetch.chunk, data):
            self._bad(fetch)
            return
        place = fetch.place
        self.keeper.keep(fetch, data, zeros=place is not None and place.codec == ZERO)
        self._stats.add("chunks_fetched")
        self._stats.add("bytes_filled", len(data))
        if fetch.priority != Priority.FOREGROUND:
            self._stats.add("prefetched")
        self._finish(fetch, data, None)

    def _bad(self, fetch: Fetch) -> None:
        self._stats.add("corrupt_store")
        assert fetch.place is not None and fetch.places is not None
        where = "a chunk of zeros"
        if fetch.place.codec != ZERO:
            name = fetch.places.objects[fetch.place.object][:12]
            where = f"object {name} at {fetch.place.offset}+{fetch.place.stored}"
        error = Corrupt(
            f"{fetch.blob}, chunk {fetch.chunk}: {where} has another digest",
            hint="the store is damaged: verify the layer and publish it again",
        )
        log.warning("%s", error)
        self._retry(fetch, error)

    def _retry(self, fetch: Fetch, error: DsecfsError) -> None:
        """Once more, alone, with the newest layout of the store; then `error` is final."""
        fetch.tries += 1
        if fetch.tries > 1:
            self._finish(fetch, None, error)
            return
        self._stats.add("retries")
        fetch.alone = True
        try:
            self.places(fetch.blob, newer_than=fetch.places)
        except DsecfsError as e:
            self._finish(fetch, None, e)
            return
        self._again(fetch)

    def _finish(self, fetch: Fetch, data: bytes | None, error: DsecfsError | None) -> None:
        self._release(fetch)
        with self._mutex:
            if fetch.state == DONE:
                return
            self._unindex(fetch)
            self._forget(fetch)
            listeners, fetch.listeners = fetch.listeners, []
        if error is not None:
            self._stats.add("errors")
        for listener in listeners:
            listener(fetch, data, error)
