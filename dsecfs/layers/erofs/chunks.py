"""How a regular file's extents become chunk indexes.

A chunk-based inode has one chunk size (a power of two of blocks) and one 8-byte index per
chunk: device and block address, or a hole. The address need not be aligned to the chunk, so
a contiguous file of any size takes ONE index; a file with several extents or holes takes the
largest chunk size that divides all borders inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsecfs.errors import BadInput
from dsecfs.layers.erofs import format as f
from dsecfs.layers.tree import Extent

MAX_INDEXES = 1 << 22
"""Most indexes of one file (32 MiB of metadata; 16 GiB at the finest grain)."""

_HOLE = f.CHUNK_INDEX.pack(0, 0, f.NULL_BLOCK)


def plan_chunks(
    size: int,
    extents: Sequence[Extent],
    devices: Sequence[f.Device],
    bad: Callable[[str, str], BadInput],
) -> tuple[int, bytes]:
    """(chunk info, index bytes) of a file of `size` > 0 bytes.

    Bytes of an extent's last block behind its `length` are part of the file if the file
    goes on there: blobs are zero up to the next block. Raises what `bad(why, hint)`
    makes for extents that overlap, leave the file or the blob, or are not aligned.
    """
    pieces = _merge(size, extents, devices, bad)
    blocks = -(-size // f.BLOCK)
    borders = 0
    for first, _, _, count in pieces:
        borders |= first
        if first + count < blocks:
            borders |= first + count
    bits = (borders & -borders).bit_length() - 1 if borders else (blocks - 1).bit_length()
    bits = min(bits, f.CHUNK_BITS_MASK)
    info = f.CHUNK_INDEXES | bits
    if len(pieces) == 1 and blocks <= 1 << bits:
        _, device, address, _ = pieces[0]
        return info, f.CHUNK_INDEX.pack(0, device, address)
    chunks = -(-blocks // (1 << bits))
    if chunks > MAX_INDEXES:
        raise bad(
            f"{len(pieces)} pieces of data at a grain of {f.BLOCK << bits} bytes in a file of "
            f"{size} bytes need {chunks} indexes, more than {MAX_INDEXES}",
            "store the file with fewer or larger holes",
        )
    table = bytearray(_HOLE * chunks)
    for first, device, address, count in pieces:
        chunk = first >> bits
        for offset in range(0, count, 1 << bits):
            f.CHUNK_INDEX.pack_into(table, chunk * 8, 0, device, address + offset)
            chunk += 1
    return info, bytes(table)


def _merge(
    size: int,
    extents: Sequence[Extent],
    devices: Sequence[f.Device],
    bad: Callable[[str, str], BadInput],
) -> list[tuple[int, int, int, int]]:
    """Checked pieces (first block in the file, device id, first block there, blocks), sorted;
    neighbours that are also neighbours in the blob are one."""
    pieces: list[tuple[int, int, int, int]] = []
    ordered = extents if len(extents) < 2 else sorted(extents)
    end = 0
    for i, (logical, blob, physical, length) in enumerate(ordered):
        last = i == len(ordered) - 1
        if (
            length <= 0
            or (logical | physical) % f.BLOCK
            or (length % f.BLOCK and not last)
            or logical < end
            or physical < 0
            or logical + length > size
        ):
            raise bad(
                f"extent {tuple(ordered[i])} overlaps, is not aligned or leaves the file "
                f"of {size} bytes",
                "",
            )
        end = logical + length
        count = -(-length // f.BLOCK)
        if not 0 <= blob < len(devices) or physical + count * f.BLOCK > devices[blob].size:
            raise bad(f"extent {tuple(ordered[i])} lies outside of the layer's blobs", "")
        piece = (logical // f.BLOCK, blob + 1, physical // f.BLOCK, count)
        if pieces:
            first, device, address, before = pieces[-1]
            if (first + before, device, address + before) == piece[:3]:
                pieces[-1] = (first, device, address, before + count)
                continue
        pieces.append(piece)
    return pieces
