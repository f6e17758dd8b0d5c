"""Putting verified chunks on the disk, and learning whether the disk kept them.

What must hold: only who holds a chunk's lock writes it; a chunk that cannot be kept (no room,
no lock, a disk that refuses) is an ordinary event and is counted, never an error of a read.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import threading

from dsecfs.cache.blobfiles import Damaged
from dsecfs.cache.fetch import Blob, Fetch, Room
from dsecfs.cache.pool import Pool, Work
from dsecfs.cache.stats import Stats
from dsecfs.errors import CacheError
from dsecfs.store.base import Priority

log = logging.getLogger(__name__)

SYNC_S = 20.0
"""A blob that was written to is synced after this time, to learn whether the disk kept it."""

_MAX_UNSYNCED = 32
_REPAIRS = 100
"""Attempts to restore a file that was cut short, 50 ms apart."""


class Keeper:
    """Writes for one process; its follow-up work runs in `pool`."""

    def __init__(self, pool: Pool, stats: Stats, room: Room) -> None:
        self._pool = pool
        self._stats = stats
        self._room = room
        self._mutex = threading.Lock()
        self._unsynced: set[Blob] = set()

    def keep(self, fetch: Fetch, data: bytes, *, zeros: bool) -> None:
        """Into the data file, if the chunk is locked and there is room."""
        if fetch.locked and (zeros or self._room.available()):
            try:
                fetch.blob.files.fill(fetch.chunk, data, zeros=zeros)
            except Damaged:
                log.warning("%s: its file was cut short; everything is fetched again", fetch.blob)
                self._follow_up(0.01, functools.partial(self._repair, fetch.blob, _REPAIRS))
            except OSError as e:
                if e.errno in (errno.ENOSPC, errno.EDQUOT):
                    self._room.no_space()
                else:
                    log.warning("%s: cannot write the cache: %s", fetch.blob, e.strerror)
            else:
                self._room.filled(0 if zeros else len(data))
                self._sync_later(fetch.blob)
                return
        self._stats.add("read_through")

    def sync(self, blob: Blob) -> bool:
        """Make a blob's data durable. If the disk lost some of it, all is verified again:
        the kernel drops pages that it could not write, and the file then reads as zeros."""
        with self._mutex:
            self._unsynced.discard(blob)
        try:
            blob.files.sync()
        except OSError as e:
            log.warning("%s: the disk lost data of the cache, all is verified again: %s", blob, e)
            self._stats.add("disk_errors")
            blob.files.demote(0, blob.chunk_count)
            return False
        return True

    def close(self) -> None:
        """Let go of blobs that would be synced later; their pool does no more."""
        with self._mutex:
            self._unsynced.clear()

    def _sync_later(self, blob: Blob) -> None:
        with self._mutex:
            if blob in self._unsynced:
                return
            # Each keeps its blob open: not many of them.
            delay = SYNC_S if len(self._unsynced) < _MAX_UNSYNCED else 0.0
            self._unsynced.add(blob)
        self._follow_up(delay, functools.partial(self.sync, blob))

    def _repair(self, blob: Blob, attempts: int) -> None:
        if not blob.files.repair() and attempts:
            self._follow_up(0.05, functools.partial(self._repair, blob, attempts - 1))

    def _follow_up(self, delay_s: float, work: Work) -> None:
        """Something for later that nobody waits for: not done when the cache is closing."""
        with contextlib.suppress(CacheError):
            self._pool.submit_later(delay_s, Priority.BACKGROUND, work)
