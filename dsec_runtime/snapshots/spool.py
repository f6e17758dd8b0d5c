"""Bytes of files set aside on the node's disk, until they are published.

What must hold: the file has no name, so whatever kills us leaves nothing; it never takes more
than `limit` bytes at a time, whatever a sandbox does to its files meanwhile; a full disk is
NodeFull, and what was set aside is given back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsec_runtime.errors import NodeFull, SnapshotFailed
from dsecfs.kernel.syscalls import punch_hole
from dsecfs.layers.sources.base import PIECE, ByteStream, DataSink, Segment
from dsecfs.layers.tree import BLOCK, Extent

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Kept:
    """The data of one file in a spool, its segments back to back."""

    offset: int
    length: int
    size: int
    """Of the file."""
    segments: tuple[Segment, ...]
    """Where the file has data; empty: everywhere."""


class Spool:
    """A sink that keeps what it gets. Close it."""

    def __init__(self, place: Path, limit: int) -> None:
        """`limit` in bytes. NodeFull, OSError."""
        self._fd = _nameless(place)
        self._limit = limit
        self._end = 0
        self._used = 0
        self.last: Kept | None = None
        """What `add` or `add_sparse` kept last."""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- the sink

    def add(self, stream: ByteStream, size: int) -> tuple[Extent, ...]:
        self.last = self._keep(stream, size, size, ())
        return ()

    def add_sparse(
        self, stream: ByteStream, size: int, segments: Sequence[Segment]
    ) -> tuple[Extent, ...]:
        length = sum(s.length for s in segments)
        self.last = self._keep(stream, length, size, tuple(segments))
        return ()

    def _keep(
        self, stream: ByteStream, length: int, size: int, segments: tuple[Segment, ...]
    ) -> Kept:
        start, taken = self._end, _rounded(length)
        if self._used + taken > self._limit:
            raise SnapshotFailed(
                f"snapshot: more than {self._limit} bytes to set aside",
                hint="its files change faster than they are copied; pause it first",
            )
        # Counted before it is written: what fails in between was written in part.
        self._end, self._used = start + taken, self._used + taken
        try:
            at = start
            while at < start + length:
                data = stream.read(min(PIECE, start + length - at))
                self._write(data, at)
                at += len(data)
        except BaseException:
            self._give_back(start, taken)
            raise
        return Kept(start, length, size, segments)

    def _write(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            try:
                count = os.pwrite(self._fd, view, at)
            except OSError as e:
                if e.errno in _FULL:
                    raise NodeFull(
                        "snapshot: the node's disk is full",
                        hint="dsec cache clear gives back what can be fetched again",
                    ) from None
                raise SnapshotFailed(f"snapshot: set bytes aside: {e.strerror}") from None
            view, at = view[count:], at + count

    def drop(self, kept: Kept) -> None:
        """It is not needed any more."""
        self._give_back(kept.offset, _rounded(kept.length))

    def _give_back(self, start: int, taken: int) -> None:
        if taken and punch_hole(self._fd, start, taken):
            self._used -= taken

    # -- and its content

    def start_of(self, kept: Kept, most: int) -> bytes:
        """The first bytes of the data."""
        return self._read(kept.offset, min(most, kept.length))

    def pour(self, kept: Kept, sink: DataSink) -> tuple[Extent, ...]:
        """Give the file to another sink; its extents there."""
        if not kept.length:
            return ()
        stream = _Reading(self, kept.offset, kept.length)
        if kept.segments:
            return sink.add_sparse(stream, kept.size, kept.segments)
        return sink.add(stream, kept.size)

    def _read(self, at: int, count: int) -> bytes:
        data = os.pread(self._fd, count, at)
        if count and not data:
            raise SnapshotFailed("snapshot: bytes that were set aside are gone")
        return data


class _Reading:
    """A range of a spool as a stream."""

    def __init__(self, spool: Spool, at: int, length: int) -> None:
        self._spool = spool
        self._at = at
        self._left = length

    def read(self, n: int, /) -> bytes:
        if not self._left:
            return b""
        data = self._spool._read(self._at, min(n, self._left))
        self._at += len(data)
        self._left -= len(data)
        return data


def _rounded(length: int) -> int:
    """Whole blocks: only these can be given back."""
    return -(-length // BLOCK) * BLOCK


def _nameless(place: Path) -> int:
    """A file in the directory `place` that is gone when it is closed."""
    try:
        return os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno in _FULL:
            raise NodeFull("snapshot: the node's disk is full") from None
        if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    # A file system that cannot: for a moment it has a name.
    fd, name = tempfile.mkstemp(prefix=".snapshot-", dir=place)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    return fd
