"""Reads layers back from a store, byte by byte as docs/formats.md says, for comparison."""

from __future__ import annotations

import hashlib
from typing import Any

import lz4.block
import zstandard

from dsecfs.layers.digest import Digest
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.head import LayerHead, decode_head
from dsecfs.layers.layout import LZ4, RAW, ZERO, ZSTD, Layout, decode_layout
from dsecfs.layers.manifest import BlobRef
from dsecfs.store.base import Store, head_key, layout_prefix, object_key
from tests.t3_layers.memsink import MemorySink, listing


def read_layout(store: Store, blob: BlobRef) -> Layout:
    *_, last = store.list(layout_prefix(blob.digest))
    return decode_layout(store.get(last.key), blob.digest, blob.chunks, blob.chunk_size)


def read_blob(
    store: Store, blob: BlobRef, chunk_digests: bytes, layout: Layout | None = None
) -> bytes:
    """All bytes of a blob; every object and chunk must have its digest."""
    layout = layout or read_layout(store, blob)
    objects = {}
    for name in layout.objects:
        data = store.get(object_key(name))
        assert hashlib.sha256(data).hexdigest() == name
        objects[name] = data
    out = bytearray()
    for i, place in enumerate(layout.places):
        length = min(blob.chunk_size, blob.size - len(out))
        if place.codec == ZERO:
            chunk = bytes(length)
        else:
            stored = objects[layout.objects[place.object]][place.offset :][: place.stored]
            assert len(stored) == place.stored <= length
            if place.codec == RAW:
                chunk = stored
            elif place.codec == LZ4:
                chunk = lz4.block.decompress(stored, uncompressed_size=length)
            else:
                assert place.codec == ZSTD
                chunk = zstandard.ZstdDecompressor().decompress(stored)
        assert len(chunk) == length
        assert hashlib.sha256(chunk).digest() == chunk_digests[i * 32 : i * 32 + 32]
        out += chunk
    assert len(out) == blob.size
    return bytes(out)


def read_head(store: Store, layer: Digest) -> LayerHead:
    return decode_head(store.get(head_key(layer)), layer)


def layer_listing(store: Store, layer: Digest) -> dict[bytes, tuple[Any, ...]]:
    """A stored layer as a comparable value, as `memsink.listing` gives it for a tree."""
    head = read_head(store, layer)
    with ErofsImage(head.erofs) as image:
        root = image.load_tree()
    blobs = [
        read_blob(store, ref, digests)
        for ref, digests in zip(head.manifest.blobs, head.chunk_digests, strict=True)
    ]
    return listing(root, _Blobs(blobs))


class _Blobs(MemorySink):
    """Several blobs in the place of one sink."""

    def __init__(self, blobs: list[bytes]) -> None:
        super().__init__()
        self._blobs = blobs

    def content(self, inode: Any) -> bytes:
        out = bytearray(inode.size)
        for logical, blob, physical, length in inode.extents:
            out[logical : logical + length] = self._blobs[blob][physical : physical + length]
        return bytes(out)
