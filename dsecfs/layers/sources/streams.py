"""Streams around streams: counted, verified, read ahead in a thread.

What must hold: each passes on exactly the bytes below it, in order, and every error in its
place; a thread ends with its stream; no wait is without a limit.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable

from dsecfs.errors import Corrupt, DeadlineExceeded
from dsecfs.layers.digest import Digest
from dsecfs.layers.sources.base import PIECE, ByteStream

Progress = Callable[[int], None]
"""Called with the number of bytes just read from the source, from any thread."""


class Verified:
    """A stream that must turn out to have `digest` (and `size`) at its end."""

    def __init__(
        self,
        raw: ByteStream,
        digest: Digest,
        what: str,
        size: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._raw = raw
        self._digest = digest
        self._size = size
        self._what = what
        self._progress = progress
        self._hash = hashlib.sha256()
        self._count = 0
        self._done = False

    def read(self, n: int, /) -> bytes:
        """As the stream below; raises Corrupt at its end, or when it is too long."""
        data = self._raw.read(n)
        if data:
            self._hash.update(data)
            self._count += len(data)
            if self._progress is not None:
                self._progress(len(data))
            if self._size is not None and self._count > self._size:
                raise Corrupt(f"{self._what}: longer than the {self._size} bytes of its manifest")
        elif not self._done:
            if self._size is not None and self._count != self._size:
                raise Corrupt(
                    f"{self._what}: {self._count} bytes, its manifest says {self._size}",
                    hint="get the image again",
                )
            if self._hash.hexdigest() != self._digest:
                raise Corrupt(
                    f"{self._what}: content has sha256:{self._hash.hexdigest()}, "
                    f"expected sha256:{self._digest}",
                    hint="get the image again",
                )
            self._done = True
        return data


class ReadAhead:
    """Reads a stream in a thread, so that inflating and hashing overlap with their use.

    Holds at most `depth` pieces. Errors of the stream come out of `read` in their place.
    """

    def __init__(self, raw: ByteStream, *, depth: int = 8, timeout_s: float = 600.0) -> None:
        self._raw = raw
        self._queue: queue.Queue[bytes | BaseException] = queue.Queue(depth)
        self._timeout_s = timeout_s
        self._stop = threading.Event()
        self._piece = b""
        self._pos = 0
        self._end: bytes | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        item: bytes | BaseException = b"-"
        while item and not isinstance(item, BaseException):
            try:
                item = self._raw.read(PIECE)
            except BaseException as e:
                item = e
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if self._stop.is_set():
                return

    def read(self, n: int, /) -> bytes:
        if self._pos >= len(self._piece):
            if self._end is None:
                try:
                    item = self._queue.get(timeout=self._timeout_s)
                except queue.Empty:
                    raise DeadlineExceeded(f"no data within {self._timeout_s:g} s") from None
                if isinstance(item, BaseException) or not item:
                    self._end = item
                else:
                    self._piece, self._pos = item, 0
            if self._end is not None:
                if isinstance(self._end, BaseException):
                    raise self._end
                return b""
        if not self._pos and n >= len(self._piece):
            self._pos = len(self._piece)
            return self._piece
        data = self._piece[self._pos : self._pos + n]
        self._pos += len(data)
        return data

    def close(self) -> None:
        """Stop the thread. The raw stream must not be closed before."""
        self._stop.set()
        self._thread.join(self._timeout_s)


class Counting:
    """A stream that tells `progress` what is read from it."""

    def __init__(self, raw: ByteStream, progress: Progress) -> None:
        self._raw = raw
        self._progress = progress

    def read(self, n: int, /) -> bytes:
        data = self._raw.read(n)
        self._progress(len(data))
        return data


def drain(stream: ByteStream) -> None:
    """Read to the end: what checks stand there (CRC, digest) are made."""
    while stream.read(PIECE):
        pass
