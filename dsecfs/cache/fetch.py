"""What is fetched: a blob as the fetcher sees it, and one chunk on its way."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Protocol

from dsecfs.cache.blobfiles import BlobFiles
from dsecfs.cache.layouts import Places
from dsecfs.errors import CacheError, DsecfsError
from dsecfs.layers.digest import DIGEST_LEN, Digest
from dsecfs.layers.layout import Place
from dsecfs.store.base import Priority

Listener = Callable[["Fetch", bytes | None, DsecfsError | None], None]
"""Called once, from any thread, with the verified bytes or the error; must not block."""


class Room(Protocol):
    """What the fetcher asks of eviction."""

    def available(self) -> bool:
        """Whether another chunk may be written."""

    def filled(self, size: int) -> None:
        """`size` bytes were written."""

    def no_space(self) -> None:
        """The disk refused a write."""


class Blob:
    """What is needed to fetch chunks of one blob."""

    def __init__(
        self, digest: Digest, size: int, chunk_size: int, digests: bytes, files: BlobFiles
    ) -> None:
        self.digest = digest
        self.size = size
        self.chunk_size = chunk_size
        self.chunk_count = files.count
        self.files = files
        self._digests = digests
        self.inflight: dict[int, Fetch] = {}
        """Fetches by chunk. Guarded by the fetcher's mutex, as the next one is."""
        self.unplaced: list[Fetch] = []
        """Fetches that wait for the layout."""
        self.places: Places | None = None
        self.layout_lock = threading.Lock()

    def chunk_digest(self, chunk: int) -> bytes:
        return self._digests[chunk * DIGEST_LEN : (chunk + 1) * DIGEST_LEN]

    def matches(self, chunk: int, data: bytes | bytearray) -> bool:
        """Whether `data` is that chunk."""
        if len(data) != self.files.length(chunk):
            return False
        return hashlib.sha256(data).digest() == self.chunk_digest(chunk)

    def __str__(self) -> str:
        return f"blob {self.digest[:12]}"


WAITING, RUNNING, DONE = range(3)

FIRST_PAUSE_S = 0.001
"""First pause between looks at a chunk that another process is fetching; it doubles."""


class Fetch:
    """One chunk on its way. Fields are guarded by the fetcher's mutex."""

    __slots__ = (
        "alone",
        "blob",
        "chunk",
        "listeners",
        "locked",
        "lockless",
        "owner",
        "parked_at",
        "pause",
        "place",
        "places",
        "priority",
        "state",
        "tries",
    )

    def __init__(self, blob: Blob, chunk: int, priority: Priority) -> None:
        self.blob = blob
        self.chunk = chunk
        self.priority = priority
        self.state = WAITING
        self.owner = 0
        """The thread that has it while it is RUNNING."""
        self.listeners: list[Listener] = []
        self.places: Places | None = None
        """The layout `place` is from."""
        self.place: Place | None = None
        self.tries = 0
        self.alone = False
        """Not to be merged with neighbours: a merged read failed."""
        self.locked = False
        self.lockless = False
        """The lock could not be had in time: serve it, do not cache it."""
        self.parked_at = 0.0
        self.pause = FIRST_PAUSE_S


def follows(before: Fetch, fetch: Fetch) -> bool:
    """Whether `fetch` starts where `before` ends, or is the very same stored bytes."""
    a, b = before.place, fetch.place
    assert a is not None and b is not None
    return b.offset in (a.offset, a.offset + a.stored)


def closed() -> CacheError:
    return CacheError("the cache was closed while a chunk was on its way")


def bug(what: str) -> CacheError:
    """For waiters, when something escaped that should not have; the thread's trace has more."""
    return CacheError(f"{what}: ended by an unexpected error", hint="see the log, and report it")
