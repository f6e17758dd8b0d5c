"""A data sink in memory, and trees as plain values to compare."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Sequence
from typing import Any

from dsecfs.layers.sources.base import ByteStream, Segment
from dsecfs.layers.tree import BLOCK, Extent, Inode, walk


class MemorySink:
    """Blob number 0, as one bytearray. Checks what the protocol promises to a sink."""

    def __init__(self, blob: int = 0) -> None:
        self.data = bytearray()
        self.blob = blob

    def add(self, stream: ByteStream, size: int) -> tuple[Extent, ...]:
        assert size > 0
        return self.add_sparse(stream, size, [Segment(0, size)])

    def add_sparse(
        self, stream: ByteStream, size: int, segments: Sequence[Segment]
    ) -> tuple[Extent, ...]:
        extents = []
        end = -1
        for offset, length in segments:
            assert offset % BLOCK == 0 and length > 0 and offset > end
            end = offset + length
            assert end <= size and (length % BLOCK == 0 or end == size)
            start = len(self.data)
            left = length
            while left:
                piece = stream.read(min(left, 1 << 20))
                assert 0 < len(piece) <= left
                self.data += piece
                left -= len(piece)
            self.data += bytes(-len(self.data) % BLOCK)
            extents.append(Extent(offset, self.blob, start, length))
        return tuple(extents)

    def content(self, inode: Inode) -> bytes:
        out = bytearray(inode.size)
        for logical, blob, physical, length in inode.extents:
            assert blob == self.blob
            out[logical : logical + length] = self.data[physical : physical + length]
        return bytes(out)


def listing(root: Inode, sink: MemorySink) -> dict[bytes, tuple[Any, ...]]:
    """Every path as a comparable value; hard links by the first path of their inode."""
    out: dict[bytes, tuple[Any, ...]] = {}
    first: dict[Inode, bytes] = {}
    for path, inode in walk(root):
        out[path] = (
            stat.filemode(inode.mode),
            inode.uid,
            inode.gid,
            inode.mtime_ns,
            inode.rdev,
            inode.target,
            tuple(sorted(inode.xattrs.items())),
            hashlib.sha256(sink.content(inode)).hexdigest() if inode.is_reg else "",
            first.setdefault(inode, path),
            inode.opaque,
        )
    return out
