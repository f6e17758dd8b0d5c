"""Makes an EROFS metadata image of a tree. Same tree and devices, same bytes.

The image, from its start:

    block 0…   1024 zero bytes, superblock, device table
    …          inodes with their attributes and inline data, the root's first
    …          shared attributes, from a block border
    …          blocks of directories (and of long symlinks) that are not inline

docs/formats-erofs.md has it byte by byte. What must hold: an inode (and inline data)
never crosses a block; the root lies in the first 2 MiB (its nid has 16 bits); nothing of a
file's data is in here.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from dsecfs.errors import BadInput
from dsecfs.layers.erofs import format as f
from dsecfs.layers.erofs.format import Device
from dsecfs.layers.erofs.nodes import Node, collect
from dsecfs.layers.erofs.xattrs import plan_xattrs
from dsecfs.layers.tree import Inode

_SECOND = 1_000_000_000

__all__ = ["Device", "write_erofs"]


def write_erofs(root: Inode, devices: Sequence[Device], *, uuid_salt: bytes = b"") -> bytes:
    """The EROFS metadata image of the tree `root`, whose extents' `blob` index `devices`.

    A whole number of blocks. It mounts with one `device=` per device in order, or, followed
    by the devices' bytes, as one flat file. The superblock's UUID is made from the sha256 of
    the image and `uuid_salt`: images that differ have different ones, as overlayfs needs.
    Raises BadInput that names the path for anything that cannot be stored exactly.
    """
    _check_devices(devices)
    nodes = collect(root, devices)
    shared = plan_xattrs(nodes)
    build_time = _choose_build_time(nodes)
    for node in nodes:
        if node.inode.children is not None:
            _split_directory(node)
    end = _place(nodes, f.round_up(f.DEVICE_TABLE + len(devices) * f.DEVICE.size, f.SLOT))
    shared_at = f.round_up(end, f.BLOCK)
    data_at = shared_at + f.round_up(len(shared), f.BLOCK)
    size = _place_data(nodes, data_at)
    if size > f.MAX_IMAGE:
        raise BadInput(
            f"the tree needs {size} bytes of metadata, more than {f.MAX_IMAGE}",
            hint="split it into several layers",
        )
    whole = size + sum(length for _, length in devices)
    if whole // f.BLOCK >= f.NULL_BLOCK:
        raise BadInput(
            f"metadata and blobs have {whole} bytes together, more than 32-bit addresses of "
            f"blocks of {f.BLOCK} bytes reach",
            hint="split the tree into several layers",
        )
    table = b""
    mapped = size
    for tag, length in devices:
        table += f.DEVICE.pack(tag, length // f.BLOCK, mapped // f.BLOCK)
        mapped += length

    image = bytearray(size)
    for ino, node in enumerate(nodes, 1):
        _emit(image, node, ino)
    image[shared_at : shared_at + len(shared)] = shared
    image[f.DEVICE_TABLE : f.DEVICE_TABLE + len(table)] = table
    f.SUPER.pack_into(
        image,
        f.SUPER_OFFSET,
        f.MAGIC,
        0,
        f.COMPAT_SB_CHKSUM | f.COMPAT_MTIME,
        f.BLOCK_BITS,
        0,
        nodes[0].pos // f.SLOT,
        len(nodes),
        build_time // _SECOND & 0xFFFF_FFFF_FFFF_FFFF,
        build_time % _SECOND,
        size // f.BLOCK,
        0,
        shared_at // f.BLOCK if shared else 0,
        bytes(16),
        b"dsec",
        f.INCOMPAT_CHUNKED_FILE | f.INCOMPAT_DEVICE_TABLE,
        0,
        len(devices),
        f.DEVICE_TABLE // f.DEVICE.size,
        0,
        0,
        0,
        0,
        0,
    )
    image[f.UUID_AT : f.UUID_AT + 16] = _uuid(image, uuid_salt)
    image[f.CHECKSUM_AT : f.CHECKSUM_AT + 4] = f.superblock_checksum(image).to_bytes(4, "little")
    return bytes(image)


def _check_devices(devices: Sequence[Device]) -> None:
    if len(devices) > f.MAX_DEVICES:
        raise BadInput(f"an image has at most {f.MAX_DEVICES} devices, not {len(devices)}")
    for tag, size in devices:
        if not 1 <= len(tag) <= f.TAG_MAX or b"\0" in tag:
            raise BadInput(f"device tag {tag[:80]!r} must have 1 to {f.TAG_MAX} bytes")
        if size <= 0 or size % f.BLOCK:
            raise BadInput(f"device {tag!r}: size {size} is no positive multiple of {f.BLOCK}")


def _choose_build_time(nodes: list[Node]) -> int:
    """Decide which inodes are compact; the mtime_ns that they have and the image gets.

    The compact form has no time of its own, so the most frequent one of all inodes that fit
    it otherwise wins, the earliest of equals.
    """
    small = []
    times: Counter[int] = Counter()
    for node in nodes:
        inode = node.inode
        if (
            inode.uid <= 0xFFFF
            and inode.gid <= 0xFFFF
            and node.nlink <= 0xFFFF
            and node.size <= 0xFFFFFFFF
        ):
            small.append(node)
            times[inode.mtime_ns] += 1
    if not times:
        return 0
    chosen = min(times, key=lambda t: (-times[t], t))
    for node in small:
        node.compact = node.inode.mtime_ns == chosen
    return chosen


def _split_directory(node: Node) -> None:
    """Decide which of a directory's entries lie in which of its blocks."""
    counts = []
    count = used = 0
    for name in node.names:
        need = f.DIRENT.size + len(name)
        if used + need > f.BLOCK:
            counts.append(count)
            count = used = 0
        count += 1
        used += need
    counts.append(count)
    node.layout = f.FLAT_INLINE
    node.blocks = counts
    node.tail_len = used
    node.size = (len(counts) - 1) * f.BLOCK + used


def _place(nodes: list[Node], start: int) -> int:
    """Give every inode its position; the end of the last one.

    Inline data must lie in one block, so an inode moves up to where that holds; where it
    can hold nowhere, the data gets a block of its own.
    """
    pos = start
    for node in nodes:
        size = f.COMPACT.size if node.compact else f.EXTENDED.size
        node.head = size + len(node.xattrs)
        room = f.BLOCK - pos % f.BLOCK
        if room < size:
            pos += room
        if node.layout == f.FLAT_INLINE:
            length = node.tail_len
            at = _inline_position(pos, node.head, length)
            if at is None:
                node.layout = f.FLAT_PLAIN
                node.pos = pos
                pos += f.round_up(node.head, f.SLOT)
            else:
                node.pos = at
                pos = f.round_up(at + node.head + length, f.SLOT)
        else:
            node.pos = pos
            end = node.head
            if node.tail_len:
                end = f.round_up(end, f.CHUNK_INDEX.size) + node.tail_len
            pos = f.round_up(pos + end, f.SLOT)
    return pos


def _inline_position(pos: int, head: int, length: int) -> int | None:
    """The first position from `pos` at which the `length` bytes of inline data behind `head`
    bytes do not cross a block; None if there is no such position.

    Moving up puts the data less than a slot behind a block border, and the inode, whose
    attributes are longer than that rest, before the border: it crosses nothing either.
    """
    offset = (pos + head) % f.BLOCK
    if offset + length <= f.BLOCK:
        return pos
    pos += f.round_up(f.BLOCK - offset, f.SLOT)
    return pos if (pos + head) % f.BLOCK + length <= f.BLOCK else None


def _place_data(nodes: list[Node], start: int) -> int:
    """Give data that is not inline its blocks, from `start` on; the end of the image."""
    block = start // f.BLOCK
    for node in nodes:
        count = max(len(node.blocks) - 1, 0)
        if node.layout == f.FLAT_PLAIN and node.tail_len:
            count += 1
        if count:
            node.start = block
            block += count
    return block * f.BLOCK


def _emit(image: bytearray, node: Node, ino: int) -> None:
    """Write one inode with its attributes and data into the image."""
    inode = node.inode
    tail = node.tail
    info = node.info
    if inode.children is not None:
        blocks = _directory_blocks(node)
        tail = blocks.pop()
        for i, block in enumerate(blocks):
            at = (node.start + i) * f.BLOCK
            image[at : at + len(block)] = block
        if node.layout == f.FLAT_PLAIN:
            at = (node.start + len(blocks)) * f.BLOCK
            image[at : at + len(tail)] = tail
    elif node.layout == f.FLAT_PLAIN and tail:
        at = node.start * f.BLOCK
        image[at : at + len(tail)] = tail
    if node.start >= 0:
        info = node.start
    icount = (len(node.xattrs) - f.XATTR_HEADER.size) // 4 + 1 if node.xattrs else 0
    pos = node.pos
    if node.compact:
        f.COMPACT.pack_into(
            image, pos, node.layout << 1, icount, inode.mode, node.nlink, node.size, info,
            ino & 0xFFFFFFFF, inode.uid, inode.gid,
        )  # fmt: skip
    else:
        f.EXTENDED.pack_into(
            image, pos, 1 | node.layout << 1, icount, inode.mode, 0, node.size, info,
            ino & 0xFFFFFFFF, inode.uid, inode.gid, inode.mtime_ns // _SECOND,
            inode.mtime_ns % _SECOND, node.nlink,
        )  # fmt: skip
    at = pos + node.head
    if node.xattrs:
        image[at - len(node.xattrs) : at] = node.xattrs
    if node.layout != f.FLAT_PLAIN:
        if node.layout == f.CHUNK_BASED:
            at = f.round_up(at, f.CHUNK_INDEX.size)
        image[at : at + len(tail)] = tail


def _directory_blocks(node: Node) -> list[bytes]:
    """A directory's encoded blocks; all but the last are full blocks."""
    out = []
    first = 0
    pack = f.DIRENT.pack
    for count in node.blocks:
        names = node.names[first : first + count]
        offset = count * f.DIRENT.size
        parts = []
        for name, target in zip(names, node.nodes[first : first + count], strict=True):
            parts.append(pack(target.pos // f.SLOT, offset, target.ftype, 0))
            offset += len(name)
        parts.extend(names)
        first += count
        out.append(b"".join(parts))
    for i in range(len(out) - 1):
        out[i] = out[i].ljust(f.BLOCK, b"\0")
    return out


def _uuid(image: bytearray, salt: bytes) -> bytes:
    """A UUID of version 8 (RFC 9562: made by its own rule), so never zero, from the content."""
    h = hashlib.sha256(b"dsec-erofs-uuid-v1\0")
    h.update(len(salt).to_bytes(8, "little") + salt)
    h.update(image)
    uuid = bytearray(h.digest()[:16])
    uuid[6] = uuid[6] & 0x0F | 0x80
    uuid[8] = uuid[8] & 0x3F | 0x80
    return bytes(uuid)
