"""A published layer read straight from its store, without a node, a cache or a mount.

For commands that look at layers (diff, export, verify). What must hold: every byte that is
handed out was checked against its chunk's digest; memory is bounded by CACHED and READ_AT_ONCE.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from dsecfs.errors import Corrupt
from dsecfs.layers.codec import decompress
from dsecfs.layers.digest import DIGEST_LEN, Digest
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.head import LayerHead, decode_head
from dsecfs.layers.layout import ZERO, Layout
from dsecfs.layers.local import MAX_HEAD
from dsecfs.layers.reach import read_newest_layout
from dsecfs.layers.tree import Inode
from dsecfs.store.base import Priority, Store, head_key, object_key

READ_AT_ONCE = 4 << 20
"""Stored bytes of one range read."""
CACHED = 64 << 20
"""Uncompressed bytes that are kept."""
PIECE = 1 << 20


def read_head(store: Store, layer: Digest) -> LayerHead:
    """A layer's head, verified. NotFound, Corrupt, FormatError, store errors."""
    return decode_head(store.get(head_key(layer), max_size=MAX_HEAD), layer)


class Part(NamedTuple):
    """Bytes of a file that lie in one chunk."""

    logical: int
    length: int
    blob: int
    chunk: int
    digest: bytes | None
    """The chunk's, if the part is all of it."""
    within: int
    """Where it begins in the chunk."""


class LayerContent:
    """The tree and the data of one layer. Not for several threads at a time."""

    def __init__(self, store: Store, layer: Digest) -> None:
        self._store = store
        self.head = read_head(store, layer)
        with ErofsImage(self.head.erofs, f"metadata of layer {layer[:12]}") as image:
            self.root = image.load_tree()
        self._layouts: dict[int, Layout] = {}
        self._chunks: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._kept = 0

    def layout(self, blob: int) -> Layout:
        """Where the chunks of blob number `blob` lie. NotFound, FormatError."""
        if blob not in self._layouts:
            ref = self.head.manifest.blobs[blob]
            self._layouts[blob] = read_newest_layout(self._store, ref)[1]
        return self._layouts[blob]

    def chunk_digest(self, blob: int, chunk: int) -> bytes:
        return self.head.chunk_digests[blob][chunk * DIGEST_LEN : (chunk + 1) * DIGEST_LEN]

    def chunk_length(self, blob: int, chunk: int) -> int:
        ref = self.head.manifest.blobs[blob]
        return min(ref.chunk_size, ref.size - chunk * ref.chunk_size)

    def unpack(self, blob: int, chunk: int, stored: bytes | memoryview, codec: int) -> bytes:
        """The bytes of a chunk from what the store has of it. Corrupt if they are not it."""
        length = self.chunk_length(blob, chunk)
        raw = decompress(stored, codec, length)
        if raw is None or hashlib.sha256(raw).digest() != self.chunk_digest(blob, chunk):
            name = self.head.manifest.blobs[blob].digest
            raise Corrupt(
                f"layer {self.head.digest[:12]}: chunk {chunk} of blob {name[:12]} is damaged "
                "in the store",
                hint="publish it again (an image: import --no-reuse)",
            )
        return raw

    def chunk(self, blob: int, chunk: int) -> bytes:
        """The bytes of a chunk, verified; its neighbours in the store are read along."""
        key = (blob, chunk)
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return self._chunks[key]
        layout = self.layout(blob)
        first = layout.places[chunk]
        if first.codec == ZERO:
            return self.unpack(blob, chunk, b"", ZERO)
        run = [chunk]
        end = first.offset + first.stored
        while (following := run[-1] + 1) < len(layout.places):
            place = layout.places[following]
            if (
                place.codec == ZERO
                or (place.object, place.offset) != (first.object, end)
                or end + place.stored > first.offset + READ_AT_ONCE
                or (blob, following) in self._chunks
            ):
                break
            run.append(following)
            end += place.stored
        data = memoryview(
            self._store.get_range(
                object_key(layout.objects[first.object]),
                first.offset,
                end - first.offset,
                priority=Priority.BACKGROUND,
            )
        )
        for number in run:
            place = layout.places[number]
            at = place.offset - first.offset
            try:
                raw = self.unpack(blob, number, data[at : at + place.stored], place.codec)
            except Corrupt:
                if number == chunk:
                    raise
                break  # it was not asked for; whoever asks gets the error
            self._keep((blob, number), raw)
        return self._chunks[key]

    def _keep(self, key: tuple[int, int], raw: bytes) -> None:
        self._chunks[key] = raw
        self._kept += len(raw)
        while self._kept > CACHED and len(self._chunks) > 1:
            oldest = next(iter(self._chunks))
            if oldest == key:
                break
            self._kept -= len(self._chunks.pop(oldest))

    def pieces(self, inode: Inode) -> Iterator[bytes]:
        """The content of a regular file, in order, holes as zeros."""
        at = 0
        for part in self.parts(inode):
            yield from _zeros(part.logical - at)
            yield self.part(part)
            at = part.logical + part.length
        yield from _zeros(inode.size - at)

    def part(self, part: Part) -> bytes:
        return self.chunk(part.blob, part.chunk)[part.within : part.within + part.length]

    def parts(self, inode: Inode) -> list[Part]:
        """What a regular file consists of; holes are left out."""
        found: list[Part] = []
        for extent in inode.extents:
            size = self.head.manifest.blobs[extent.blob].chunk_size
            done = 0
            while done < extent.length:
                number, within = divmod(extent.physical + done, size)
                length = min(size - within, extent.length - done)
                whole = length == self.chunk_length(extent.blob, number)
                digest = self.chunk_digest(extent.blob, number) if whole else None
                at = extent.logical + done
                found.append(Part(at, length, extent.blob, number, digest, within))
                done += length
        return found


def same_content(a: LayerContent, one: Inode, b: LayerContent, other: Inode) -> bool:
    """Whether two regular files, in two layers or in one, have the same bytes.

    Whole chunks are compared by digest; only the rest is read.
    """
    if one.size != other.size:
        return False
    left, right = a.parts(one), b.parts(other)
    if [p[:2] for p in left] == [p[:2] for p in right]:
        return all(
            x.digest == y.digest
            if x.digest and y.digest
            else a.part(x) == b.part(y)
            for x, y in zip(left, right, strict=True)
        )
    return _hash(a.pieces(one)) == _hash(b.pieces(other))


def _hash(pieces: Iterator[bytes]) -> bytes:
    h = hashlib.sha256()
    for piece in pieces:
        h.update(piece)
    return h.digest()


def _zeros(count: int) -> Iterator[bytes]:
    while count > 0:
        yield bytes(min(count, PIECE))
        count -= PIECE
