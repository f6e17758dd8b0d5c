"""How chunks are compressed: the codecs of a layout (layout.py has their numbers).

What must hold: memory is bounded by the chunk's length whatever stored bytes say; which
codec was used never enters an identity; nothing is stored longer than it is.
"""

from __future__ import annotations

import threading
from typing import Literal

import lz4.block
import zstandard

from dsecfs.layers.layout import LZ4, RAW, ZERO, ZSTD

Codec = Literal["lz4", "zstd", "raw"]
"""What a publisher may ask for."""

Buffer = bytes | bytearray | memoryview

_ZSTD_LEVEL = 3
_local = threading.local()


def compress(chunk: Buffer, codec: Codec) -> tuple[int, Buffer]:
    """(codec number, stored bytes) of a chunk that is not all zeros; from any thread.

    RAW, and the chunk itself, where it does not shrink.
    """
    stored: Buffer = chunk
    number = RAW
    if codec == "lz4":
        stored, number = lz4.block.compress(chunk, store_size=False), LZ4
    elif codec == "zstd":
        stored, number = _zstd().compress(chunk), ZSTD
    return (number, stored) if len(stored) < len(chunk) else (RAW, chunk)


def decompress(stored: Buffer, codec: int, length: int) -> bytes | None:
    """The `length` bytes of a chunk of which the store has `stored`; None if it is not one."""
    try:
        if codec == ZERO:
            return bytes(length)
        if codec == RAW:
            return bytes(stored) if len(stored) == length else None
        if codec == LZ4:
            data: bytes = lz4.block.decompress(stored, uncompressed_size=length)
        elif codec == ZSTD:
            # A frame that states no size could ask for a window of any size.
            if zstandard.frame_content_size(stored) != length:
                return None
            data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=length)
        else:
            return None
    except (lz4.block.LZ4BlockError, zstandard.ZstdError):
        return None
    return data if len(data) == length else None


def _zstd() -> zstandard.ZstdCompressor:
    """A compressor of this thread; one cannot be shared."""
    found: zstandard.ZstdCompressor | None = getattr(_local, "zstd", None)
    if found is None:
        found = _local.zstd = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    return found
