"""What the cache has done: counters of this process, and the node's totals over all.

Owns data/cache.stats: a header, then slots of 64-bit counters. A process owns one slot
through an OFD lock that the kernel drops when it dies; the next process goes on counting
in a slot without an owner, so nothing needs to be reset or folded, and a kill -9 loses
nothing. Totals are the sum over all slots. With every slot taken a process counts in
memory only.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Mapping

from dsecfs.nodedirs import NodeDirs

COUNTERS = (
    "hits",  # reads answered from the cache at once
    "misses",  # reads that had to wait for a chunk
    "bytes_served",  # bytes returned to readers
    "chunks_fetched",  # verified chunks that came from the store
    "bytes_fetched",  # stored (compressed) bytes asked of the store
    "bytes_filled",  # uncompressed bytes of these chunks
    "requests",  # range reads sent to the store
    "prefetched",  # chunks fetched before a reader asked
    "verified",  # chunks of an earlier boot that were hashed again and were right
    "evictions",  # chunks evicted
    "bytes_evicted",  # disk bytes that gave back
    "corrupt_store",  # chunks from the store that failed their digest
    "corrupt_cache",  # chunks on the local disk that failed their digest
    "retries",  # second attempts at a chunk
    "waits",  # chunks that another process was fetching
    "wait_timeouts",  # such waits that were given up
    "read_through",  # chunks served without being cached (no space, no lock)
    "deadlines",  # reads that ended in DeadlineExceeded
    "errors",  # chunks that ended in an error
    "layouts",  # layouts fetched
    "disk_errors",  # times the disk lost bytes it had taken, so a blob was verified again
    "scrubbed",  # chunks in direct use that the scrubber hashed
    "unhealed",  # chunks in direct use that were damaged and could not be fetched again
    "forgotten",  # layers and blobs of which everything was removed from this node
)
"""Names of all counters, in the order of a slot. Append only."""

_INDEX = {name: i for i, name in enumerate(COUNTERS)}
_MAGIC = b"DSECSTAT"
_VERSION = 1
_HEADER = struct.Struct("<8sI52x")
_SLOTS = 64
_WIDTH = 32
_SIZE = _HEADER.size + _SLOTS * _WIDTH * 8
_FLOCK = struct.Struct("hh4xqqi4x")


class Stats:
    """Counters of one process. Thread-safe; opens its file at the first count."""

    def __init__(self, dirs: NodeDirs) -> None:
        self._dirs = dirs
        self._lock = threading.Lock()
        self._own = [0] * len(COUNTERS)
        self._slot: memoryview | None = None
        self._release: weakref.finalize[[int], Stats] | None = None
        self._pid = 0

    def add(self, name: str, count: int = 1) -> None:
        """Count `name` up."""
        i = _INDEX[name]
        with self._lock:
            if self._pid != os.getpid():
                self._claim()
            self._own[i] += count
            if self._slot is not None:
                self._slot[i] += count

    def hit(self, size: int) -> None:
        """One read of `size` bytes that was answered at once."""
        with self._lock:
            if self._pid != os.getpid():
                self._claim()
            self._own[0] += 1
            self._own[2] += size
            if self._slot is not None:
                self._slot[0] += 1
                self._slot[2] += size

    def snapshot(self) -> dict[str, int]:
        """The counters of this process."""
        with self._lock:
            return dict(zip(COUNTERS, self._own, strict=True))

    def close(self) -> None:
        """Give the slot to the next process. Later counts stay in memory."""
        with self._lock:
            self._pid = os.getpid()
            self._let_go()

    def _let_go(self) -> None:
        self._slot = None
        if self._release is not None:
            self._release()
            self._release = None

    def _claim(self) -> None:
        """Take a slot nobody owns. After a fork the child takes one of its own."""
        self._pid = os.getpid()
        self._let_go()
        # Counting must not fail a read: without a file the counters stay in memory.
        with contextlib.suppress(OSError):
            fd = os.open(
                self._dirs.data / "cache.stats",
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
                0o600,
            )
            slot = None
            try:
                slot = _take_slot(fd)
            finally:
                if slot is None:
                    os.close(fd)
            if slot is not None:
                self._release = weakref.finalize(self, os.close, fd)
                mapped = memoryview(mmap.mmap(fd, _SIZE))
                start = _HEADER.size + slot * _WIDTH * 8
                self._slot = mapped[start : start + _WIDTH * 8].cast("Q")


def _take_slot(fd: int) -> int | None:
    """Number of a slot that is ours from now on, or None if there is none to be had."""
    header = os.pread(fd, _HEADER.size, 0)
    if header[:12] != _HEADER.pack(_MAGIC, _VERSION)[:12]:
        if header.strip(b"\0"):
            return None  # a newer format: leave it alone
        os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION), 0)
    os.posix_fallocate(fd, 0, _SIZE)
    for slot in range(_SLOTS):
        with contextlib.suppress(BlockingIOError, PermissionError):
            # The lock byte lies behind the file: it names a slot, it guards no bytes.
            request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _SIZE + slot, 1, 0)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
            return slot
    return None


def read_totals(dirs: NodeDirs) -> dict[str, int]:
    """The sum of all counters ever counted on this node; zeros if there are none yet."""
    totals = [0] * len(COUNTERS)
    try:
        data = (dirs.data / "cache.stats").read_bytes()
    except FileNotFoundError:
        data = b""
    if len(data) >= _SIZE and data[:12] == _HEADER.pack(_MAGIC, _VERSION)[:12]:
        for slot in range(_SLOTS):
            values = struct.unpack_from(
                f"<{len(COUNTERS)}Q", data, _HEADER.size + slot * _WIDTH * 8
            )
            totals = [a + b for a, b in zip(totals, values, strict=True)]
    return dict(zip(COUNTERS, totals, strict=True))


def amplification(counters: Mapping[str, int]) -> float:
    """Uncompressed bytes brought in per byte served; 0.0 before anything was served."""
    return counters["bytes_filled"] / counters["bytes_served"] if counters["bytes_served"] else 0.0
