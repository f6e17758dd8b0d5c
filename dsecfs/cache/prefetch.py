"""Fetching a list of chunks in a given order, with a bounded number under way.

Owns `PrefetchHandle`. What must hold: memory is bounded by the window, not by the list; a
failed chunk is counted and does not stop the others; the order given is the order of
asking, and neighbours in a stored object become large range reads because a whole window
is queued at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dsecfs.cache.blobfiles import VALID
from dsecfs.cache.fetch import Blob, Fetch
from dsecfs.cache.fetcher import Fetcher
from dsecfs.errors import BadInput, DsecfsError
from dsecfs.store.base import Priority

WINDOW = 512
"""Chunks asked for at a time."""


class Progress(NamedTuple):
    """How far a prefetch is, in chunks. `done` counts those that were there already."""

    total: int
    done: int
    failed: int
    fetched_bytes: int
    """Uncompressed bytes of chunks that were brought in or verified."""


class PrefetchHandle:
    """A running prefetch. It goes on by itself; the handle may be dropped."""

    def __init__(
        self, fetcher: Fetcher, plan: Sequence[tuple[Blob, Sequence[int]]], priority: Priority
    ) -> None:
        for blob, chunks in plan:
            if chunks and not (min(chunks) >= 0 and max(chunks) < blob.chunk_count):
                raise BadInput(f"prefetch of {blob}: a chunk beyond its {blob.chunk_count}")
        self._fetcher = fetcher
        self._priority = priority
        self._rest: Iterator[tuple[Blob, int]] = (
            (blob, chunk) for blob, chunks in plan for chunk in chunks
        )
        self._changed = threading.Condition()
        self._feeding = False
        self._cancelled = False
        self._exhausted = False
        self._under_way: dict[Blob, set[int]] = {}
        self._pending = 0
        self._total = sum(len(chunks) for _, chunks in plan)
        self._done = 0
        self._failed = 0
        self._bytes = 0
        self.error: DsecfsError | None = None
        """The first error of a chunk."""
        self._feed()

    def progress(self) -> Progress:
        """Where it stands now."""
        with self._changed:
            return Progress(self._total, self._done, self._failed, self._bytes)

    def wait(self, timeout_s: float) -> bool:
        """Whether all chunks were dealt with (or it was cancelled) within `timeout_s`."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while not self._finished():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def cancel(self) -> None:
        """Ask for nothing more. Range reads under way end by themselves."""
        with self._changed:
            self._cancelled = True
            under_way = {blob: list(chunks) for blob, chunks in self._under_way.items()}
            self._under_way.clear()
            self._pending = 0
            self._changed.notify_all()
        for blob, chunks in under_way.items():
            self._fetcher.drop(blob, chunks, self._listener)

    def _finished(self) -> bool:
        return self._cancelled or (self._exhausted and not self._pending)

    def _listener(self, fetch: Fetch, data: bytes | None, error: DsecfsError | None) -> None:
        with self._changed:
            if fetch.chunk not in self._under_way.get(fetch.blob, ()):
                return
            self._under_way[fetch.blob].discard(fetch.chunk)
            self._pending -= 1
            if error is not None:
                self._failed += 1
                self.error = self.error or error
            else:
                self._done += 1
                self._bytes += len(data or b"")
            feed = self._pending <= WINDOW // 2
            if self._finished():
                self._changed.notify_all()
        if feed:
            self._feed()

    def _feed(self) -> None:
        """Ask for more. One thread at a time; the others' completions are seen by its loop."""
        with self._changed:
            if self._feeding:
                return
            self._feeding = True
        try:
            while asks := self._next():
                self._fetcher.want(asks, self._priority, self._listener)
        except DsecfsError as e:  # the cache was closed
            with self._changed:
                self.error = self.error or e
                self._cancelled = True
        finally:
            with self._changed:
                self._feeding = False
                self._changed.notify_all()

    def _next(self) -> list[tuple[Blob, list[int]]]:
        """The next asks, neighbours in the list with one blob together; empty: enough for now."""
        asks: list[tuple[Blob, list[int]]] = []
        with self._changed:
            if self._pending > WINDOW // 2 or self._cancelled:
                return []
            while self._pending < WINDOW:
                blob, chunk = next(self._rest, (None, 0))
                if blob is None:
                    self._exhausted = True
                    break
                under_way = self._under_way.setdefault(blob, set())
                if blob.files.state(chunk) == VALID or chunk in under_way:
                    self._done += 1
                    continue
                under_way.add(chunk)
                self._pending += 1
                if asks and asks[-1][0] is blob:
                    asks[-1][1].append(chunk)
                else:
                    asks.append((blob, [chunk]))
        return asks
