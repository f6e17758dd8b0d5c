"""The layout: where each chunk of a blob lies in the store.

A layout is replaceable: a store keeps `layouts/<blob>/<sequence>` and the highest sequence
counts. A wrong layout is harmless, because chunk digests decide what enters the cache.

Byte layout (little endian): 64-byte header, then a zstd frame of the body.

    0   8   magic "DSECLAYT"
    8   u32 version (1)
    12  u32 number of objects
    16  u64 number of chunks
    24  u64 number of hot chunks
    32  32  blob digest
    body:
      objects   32 bytes each: the sha256 the object is named by
      chunks    20 bytes each: u32 object, u64 offset, u32 stored length, u8 codec, 3 zero
      hot       u32 each: chunk numbers in order of first use (written by optimize)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import zstandard

from dsecfs.errors import FormatError, TooNew
from dsecfs.layers.digest import Digest

MAGIC = b"DSECLAYT"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQ32s")
_CHUNK = struct.Struct("<IQIB3x")
_MAX_CHUNKS = 1 << 28
_MAX_OBJECT = 1 << 53
"""More bytes than any store takes in an object; ends of ranges stay far below 64 bits."""

RAW, LZ4, ZSTD, ZERO = 0, 1, 2, 3
"""Codecs of a stored chunk: as it is; an LZ4 block without size; one zstd frame; a chunk
of zeros that is not stored at all."""


class Place(NamedTuple):
    """Where one chunk lies. `object` indexes Layout.objects; unused for ZERO."""

    object: int
    offset: int
    stored: int
    codec: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of all chunks of one blob, plus the order in which hot ones are used."""

    blob: Digest
    objects: tuple[Digest, ...]
    places: tuple[Place, ...]
    hot: tuple[int, ...] = ()


def encode_layout(layout: Layout) -> bytes:
    """The bytes to store."""
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        len(layout.objects),
        len(layout.places),
        len(layout.hot),
        bytes.fromhex(layout.blob),
    )
    body = b"".join(
        (
            *(bytes.fromhex(d) for d in layout.objects),
            *(_CHUNK.pack(*p) for p in layout.places),
            struct.pack(f"<{len(layout.hot)}I", *layout.hot),
        )
    )
    return header + zstandard.ZstdCompressor(level=3).compress(body)


def decode_layout(data: bytes, blob: Digest, chunks: int, chunk_size: int) -> Layout:
    """Parse and check a layout of `blob`, which has `chunks` chunks.

    Raises FormatError or TooNew. Bounds every allocation by `chunks`.
    """
    what = f"layout of blob {blob[:12]}"
    if len(data) < _HEADER.size:
        raise FormatError(f"{what}: truncated: {len(data)} bytes")
    magic, version, objects, count, hot, named = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FormatError(f"{what}: not a layout (bad magic)")
    if version > VERSION:
        raise TooNew(
            f"{what}: version {version} is newer than this program knows ({VERSION})",
            hint="upgrade dsec",
        )
    if named.hex() != blob or count != chunks or count > _MAX_CHUNKS:
        raise FormatError(f"{what}: belongs to another blob ({count} chunks, expected {chunks})")
    if objects > 2 * count or hot > count:
        raise FormatError(f"{what}: claims {objects} objects and {hot} hot chunks")
    size = objects * 32 + count * _CHUNK.size + hot * 4
    try:
        # max_output_size is ignored when the frame itself states a size.
        if zstandard.frame_content_size(data[_HEADER.size :]) not in (size, -1):
            raise FormatError(f"{what}: does not hold the {size} bytes its header promises")
        body = zstandard.ZstdDecompressor().decompress(data[_HEADER.size :], max_output_size=size)
    except zstandard.ZstdError as e:
        raise FormatError(f"{what}: does not decompress: {e}") from None
    if len(body) != size:
        raise FormatError(f"{what}: has {len(body)} bytes, expected {size}")
    names = tuple(Digest(body[i * 32 : i * 32 + 32].hex()) for i in range(objects))
    middle = body[objects * 32 : objects * 32 + count * _CHUNK.size]
    places = tuple(map(Place._make, _CHUNK.iter_unpack(middle)))
    # An incompressible chunk is stored raw, so nothing is ever longer than a chunk.
    for i, p in enumerate(places):
        if p.codec > ZERO or (
            p.codec != ZERO
            and (
                p.object >= objects
                or not 0 < p.stored <= chunk_size
                or p.offset > _MAX_OBJECT - p.stored
            )
        ):
            raise FormatError(f"{what}: chunk {i} has an impossible place {tuple(p)}")
    order = struct.unpack(f"<{hot}I", body[size - hot * 4 :])
    if any(i >= count for i in order):
        raise FormatError(f"{what}: a hot chunk does not exist")
    return Layout(blob, names, places, order)
