"""Blobs for cache tests: packed chunk by chunk, with every codec, into a real store."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lz4.block
import zstandard

from dsecfs.cache import write_chunk_list
from dsecfs.layers.digest import Digest, blob_digest, sha256
from dsecfs.layers.layout import LZ4, RAW, ZERO, ZSTD, Layout, Place, encode_layout
from dsecfs.layers.manifest import BlobRef
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import Store, layout_key, object_key

CHUNK = 16384
"""Chunk size of most tests: small, so that a small blob has many."""


@dataclass(frozen=True)
class Packed:
    """A blob in a store, and the bytes it must read as."""

    ref: BlobRef
    content: bytes
    digests: bytes
    layout: Layout

    @property
    def digest(self) -> Digest:
        return self.ref.digest

    def register(self, dirs: NodeDirs) -> Digest:
        """Make the blob known on a node."""
        write_chunk_list(dirs, self.ref, self.digests)
        return self.digest


def content(chunks: int, *, chunk_size: int = CHUNK, seed: int = 0, tail: int = 0) -> bytes:
    """Bytes that no two chunks share, without a zero byte, half of them compressible;
    `tail` > 0: the length of the last chunk."""
    rng = random.Random(seed)
    out = bytearray()
    for i in range(chunks):
        noise = bytes(1 + b % 255 for b in rng.randbytes(chunk_size))
        if i % 2:
            noise = noise[: chunk_size // 8] * 8
        out += noise
    return bytes(out[: len(out) - chunk_size + tail] if tail else out)


def pack(
    store: Store,
    data: bytes,
    *,
    chunk_size: int = CHUNK,
    codecs: Sequence[int] = (LZ4, RAW, ZSTD),
    per_object: int = 1 << 30,
    spoil: Callable[[int, bytes], bytes] = lambda chunk, stored: stored,
    sequence: int = 1,
) -> Packed:
    """Publish `data`. `spoil` may change the stored bytes of a chunk (damage in the store)."""
    chunks = [data[i : i + chunk_size] for i in range(0, len(data), chunk_size)]
    digests = b"".join(hashlib.sha256(c).digest() for c in chunks)
    objects: list[Digest] = []
    places: list[Place] = []
    current = bytearray()

    def flush() -> None:
        if current:
            objects.append(sha256(bytes(current)))
            store.put_content(object_key(objects[-1]), bytes(current))
            current.clear()

    for i, chunk in enumerate(chunks):
        codec = codecs[i % len(codecs)]
        if not any(chunk):
            places.append(Place(0, 0, 0, ZERO))
            continue
        stored = chunk
        if codec == LZ4:
            stored = lz4.block.compress(chunk, store_size=False)
        elif codec == ZSTD:
            stored = zstandard.ZstdCompressor().compress(chunk)
        if len(stored) >= len(chunk):
            stored, codec = chunk, RAW
        stored = spoil(i, stored)
        if len(current) + len(stored) > per_object:
            flush()
        places.append(Place(len(objects), len(current), len(stored), codec))
        current += stored
    flush()
    digest = blob_digest(len(data), chunk_size, digests)
    layout = Layout(digest, tuple(objects), tuple(places))
    store.put_if_absent(layout_key(digest, sequence), encode_layout(layout))
    return Packed(BlobRef(digest, len(data), chunk_size), data, digests, layout)
