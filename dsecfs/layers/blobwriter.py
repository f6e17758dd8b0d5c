"""File data in, a blob out: addresses, deduplication, chunks, compression, packed objects.

Owns the way from bytes to a blob of one layer, as a stream. What must hold:
- same files in the same order, same blob: neither the codec nor threads nor the size of
  objects enters an address or a digest;
- every file starts at a multiple of BLOCK, files longer than SMALL on a chunk border, so
  that equal large files are made of equal chunks, wherever they lie;
- equal files have one extent, equal chunks one place, chunks of zeros none;
- memory is bounded, whatever the length of files: the queue of chunks, one object that
  fills, and `uploads` objects on their way.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from dsecfs.errors import BadInput, FormatError
from dsecfs.layers.codec import Buffer, Codec, compress
from dsecfs.layers.digest import (
    DEFAULT_CHUNK_SIZE,
    DIGEST_LEN,
    MAX_BLOB_SIZE,
    Digest,
    blob_digest,
    check_chunk_size,
    sha256,
)
from dsecfs.layers.layout import ZERO, Layout, Place
from dsecfs.layers.manifest import BlobRef
from dsecfs.layers.sources.base import PIECE, ByteStream, Segment
from dsecfs.layers.tree import BLOCK, Extent
from dsecfs.store.base import object_key

SMALL = 4 << 20
"""Files up to this many bytes are read whole before they are placed, to find equal ones."""

DEFAULT_OBJECT_SIZE = 32 << 20
"""Bytes of a packed object: large, since 3FS and S3 are slow at small ones."""

MAX_REMEMBERED = 1 << 20
"""Files remembered for deduplication (some 200 bytes each); later ones are only stored."""

_QUEUE = 8 << 20
"""Bytes of chunks that wait for a worker or for their place."""


class ContentStore(Protocol):
    """The part of a store that a blob needs."""

    def put_content(self, key: str, data: bytes | memoryview) -> None:
        """Store content-addressed bytes; idempotent."""


@dataclass(frozen=True, slots=True)
class BlobResult:
    """A blob whose objects are all in the store, or a known one (then without a layout)."""

    ref: BlobRef
    chunk_digests: bytes
    """32-byte digests back to back."""
    layout: Layout | None = None
    stored: int = 0
    """Bytes of the objects that hold it."""


class _Packed(NamedTuple):
    digest: bytes
    codec: int
    stored: Buffer


class _Large(NamedTuple):
    """A file longer than SMALL that was placed before."""

    chunk: int
    whole: int
    tail: bytes
    extents: tuple[Extent, ...]


class BlobWriter:
    """A `DataSink` that makes one blob. Use as a context manager; `finish` gives the result.

    `chunk_size` is part of the blob's identity (BadInput unless a power of two from 4 KiB
    to 16 MiB). `workers` threads hash and compress, `uploads` threads put objects of at
    most `object_size` bytes. `blob` is the number that extents carry.
    """

    def __init__(
        self,
        store: ContentStore,
        *,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        codec: Codec = "lz4",
        workers: int = 2,
        object_size: int = DEFAULT_OBJECT_SIZE,
        uploads: int = 2,
        blob: int = 0,
    ) -> None:
        check_chunk_size(chunk_size)
        self._chunk_size = chunk_size
        self._blob = blob
        self._packer = _Packer(codec, chunk_size)
        self._pool = ThreadPoolExecutor(workers, "pack")
        self._queue: deque[Future[_Packed]] = deque()
        self._queue_limit = max(workers + 1, _QUEUE // chunk_size)
        self._objects = _Objects(store, max(object_size, chunk_size), uploads)
        self._open = bytearray()
        self._sealed = 0
        self._digests = bytearray()
        self._places: list[Place] = []
        self._known: dict[bytes, Place] = {}
        self._small: dict[bytes, tuple[Extent, ...]] = {}
        self._large: dict[tuple[int, tuple[Segment, ...]], list[_Large]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def add(self, stream: ByteStream, size: int) -> tuple[Extent, ...]:
        """`size` > 0 bytes from `stream` are a file's whole content."""
        return self.add_sparse(stream, size, (Segment(0, size),))

    def add_sparse(
        self, stream: ByteStream, size: int, segments: Sequence[Segment]
    ) -> tuple[Extent, ...]:
        """`stream` gives the data of `segments` back to back; the file has `size` bytes."""
        length = sum(s.length for s in segments)
        if self._position + self._chunk_size + length > MAX_BLOB_SIZE:
            raise BadInput(
                f"the layer has more than {MAX_BLOB_SIZE} bytes of data",
                hint="split it into several layers",
            )
        if length <= SMALL:
            return self._add_small(stream, size, segments, length)
        return self._add_large(stream, size, tuple(segments), length)

    def finish(self) -> BlobResult | None:
        """Wait until everything is in the store. None if no file had data."""
        size = self._position
        if not size:
            self.abort()
            return None
        if self._open:
            self._seal(self._open)
        self._drain(0)
        self._pool.shutdown()
        objects = self._objects.finish()
        digests = bytes(self._digests)
        digest = blob_digest(size, self._chunk_size, digests)
        return BlobResult(
            BlobRef(digest, size, self._chunk_size),
            digests,
            Layout(digest, tuple(objects), tuple(self._places)),
            self._objects.stored,
        )

    def abort(self) -> None:
        """Stop the threads. Objects that were put already are garbage, nothing refers to them."""
        self._pool.shutdown(cancel_futures=True)
        self._objects.abort()

    @property
    def _position(self) -> int:
        return self._sealed * self._chunk_size + len(self._open)

    def _extents(self, start: int, segments: Sequence[Segment]) -> tuple[Extent, ...]:
        extents = []
        for offset, length in segments:
            extents.append(Extent(offset, self._blob, start, length))
            start += length
        return tuple(extents)

    def _add_small(
        self, stream: ByteStream, size: int, segments: Sequence[Segment], length: int
    ) -> tuple[Extent, ...]:
        data = _read_exactly(stream, length)
        content = hashlib.sha256(struct.pack("<QQ", size, len(segments)))
        for segment in segments:
            content.update(struct.pack("<QQ", *segment))
        content.update(data)
        key = content.digest()
        extents = self._small.get(key)
        if extents is None:
            extents = self._extents(self._position, segments)
            self._append(data)
            self._pad(BLOCK)
            if len(self._small) < MAX_REMEMBERED:
                self._small[key] = extents
        return extents

    def _add_large(
        self, stream: ByteStream, size: int, segments: tuple[Segment, ...], length: int
    ) -> tuple[Extent, ...]:
        sealed, rest = self._sealed, bytes(self._open)
        self._pad(self._chunk_size)
        first = self._sealed
        start = self._position
        left = length
        while left:
            piece = stream.read(min(left, PIECE))
            _check_piece(piece, left)
            self._append(piece)
            left -= len(piece)
        whole, tail = divmod(length, self._chunk_size)
        tail_digest = hashlib.sha256(self._open).digest() if tail else b""
        earlier = self._large.setdefault((size, segments), [])
        if earlier:
            self._drain(0)
            mine = self._digests_of(first, whole)
            for other in earlier:
                if other.tail == tail_digest and self._digests_of(other.chunk, whole) == mine:
                    # All its chunks lie there already: take its addresses back.
                    self._sealed, self._open = sealed, bytearray(rest)
                    del self._digests[sealed * DIGEST_LEN :]
                    del self._places[sealed:]
                    return other.extents
        extents = self._extents(start, segments)
        earlier.append(_Large(first, whole, tail_digest, extents))
        self._pad(BLOCK)
        return extents

    def _digests_of(self, chunk: int, count: int) -> bytearray:
        return self._digests[chunk * DIGEST_LEN : (chunk + count) * DIGEST_LEN]

    def _append(self, data: bytes) -> None:
        size = self._chunk_size
        view = memoryview(data)
        at = 0
        while at < len(data):
            if not self._open and len(data) - at >= size:
                self._seal(view[at : at + size])
                at += size
                continue
            room = size - len(self._open)
            self._open += view[at : at + room]
            at += room
            if len(self._open) == size:
                self._seal(self._open)

    def _pad(self, border: int) -> None:
        self._open += bytes(-len(self._open) % border)
        if len(self._open) == self._chunk_size:
            self._seal(self._open)

    def _seal(self, chunk: Buffer) -> None:
        if chunk is self._open:
            self._open = bytearray()
        self._sealed += 1
        self._queue.append(self._pool.submit(self._packer.pack, chunk))
        self._drain(self._queue_limit)

    def _drain(self, limit: int) -> None:
        """Give chunks their places, in order, until at most `limit` wait."""
        while len(self._queue) > limit:
            digest, codec, stored = self._queue.popleft().result()
            place = self._known.get(digest)
            if place is None:
                if codec == ZERO:
                    place = Place(0, 0, 0, ZERO)
                else:
                    place = Place(*self._objects.append(stored), len(stored), codec)
                self._known[digest] = place
            self._digests += digest
            self._places.append(place)


class _Packer:
    """Hashes and compresses one chunk at a time, in any thread."""

    def __init__(self, codec: Codec, chunk_size: int) -> None:
        self._codec = codec
        self._zeros = hashlib.sha256(bytes(chunk_size)).digest()
        self._chunk_size = chunk_size

    def pack(self, chunk: Buffer) -> _Packed:
        digest = hashlib.sha256(chunk).digest()
        full = len(chunk) == self._chunk_size
        if digest == self._zeros if full else not any(chunk):
            return _Packed(digest, ZERO, b"")
        return _Packed(digest, *compress(chunk, self._codec))


class _Objects:
    """Packs stored chunks back to back into objects and puts them, a few at a time."""

    def __init__(self, store: ContentStore, object_size: int, uploads: int) -> None:
        self._store = store
        self._size = object_size
        self._pool = ThreadPoolExecutor(uploads, "upload")
        self._uploads: deque[Future[Digest]] = deque()
        self._limit = uploads
        self._current: mmap.mmap | None = None
        self._length = 0
        self._names: list[Digest] = []
        self.stored = 0

    def append(self, stored: Buffer) -> tuple[int, int]:
        """(object number, offset) of what was appended."""
        if self._length + len(stored) > self._size:
            self._flush()
        if self._current is None:
            # Memory of its own, which the system gets back at once: between other things on the
            # heap, buffers of this size would leave holes that add up to some 100 MB.
            self._current = mmap.mmap(-1, self._size)
        offset = self._length
        self._length += len(stored)
        self._current[offset : self._length] = stored
        return len(self._names) + len(self._uploads), offset

    def finish(self) -> list[Digest]:
        if self._length:
            self._flush()
        self._collect(0)
        self._pool.shutdown()
        return self._names

    def abort(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _flush(self) -> None:
        self._collect(self._limit - 1)
        assert self._current is not None
        full = memoryview(self._current)[: self._length]
        self._current = None
        self.stored += self._length
        self._length = 0
        self._uploads.append(self._pool.submit(self._put, full))

    def _collect(self, limit: int) -> None:
        # The store limits every wait, so an upload ends.
        while len(self._uploads) > limit:
            self._names.append(self._uploads.popleft().result())

    def _put(self, data: memoryview) -> Digest:
        digest = sha256(data)
        self._store.put_content(object_key(digest), data)
        return digest


def _check_piece(piece: bytes, left: int) -> None:
    if not 0 < len(piece) <= left:
        raise FormatError(f"a file's data ended {left} bytes early" if not piece
                          else f"a file's data came {len(piece) - left} bytes too long")


def _read_exactly(stream: ByteStream, length: int) -> bytes:
    piece = stream.read(length) if length else b""
    if len(piece) == length:
        return piece
    pieces = []
    left = length
    while True:
        _check_piece(piece, left)
        pieces.append(piece)
        left -= len(piece)
        if not left:
            return b"".join(pieces)
        piece = stream.read(left)
