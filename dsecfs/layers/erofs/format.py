"""The EROFS on-disk format: constants and structures, as far as we write or read it.

Source of every number here: Linux, fs/erofs/erofs_fs.h (dual-licensed GPL-2.0-only or
Apache-2.0) and, for what the kernel makes of them, fs/erofs/{super,inode,data,dir,xattr}.c.
Facts only; docs/formats-erofs.md has them as tables. Everything is little endian.
"""

from __future__ import annotations

import functools
import stat
import struct
from typing import NamedTuple

BLOCK = 4096
BLOCK_BITS = 12
SLOT = 32
"""A nid counts these from the start of the metadata area (our meta_blkaddr is 0)."""

SUPER_OFFSET = 1024
MAGIC = 0xE0F5E1E2

SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
"""magic, checksum, feature_compat, blkszbits, sb_extslots, root_nid, inos, build_time,
build_time_nsec, blocks, meta_blkaddr, xattr_blkaddr, uuid, volume_name, feature_incompat,
available_compr_algs, extra_devices, devt_slotoff, dirblkbits, xattr_prefix_count,
xattr_prefix_start, packed_nid, xattr_filter_reserved: 128 bytes at SUPER_OFFSET."""
CHECKSUM_AT = SUPER_OFFSET + 4
UUID_AT = SUPER_OFFSET + 48

COMPAT_SB_CHKSUM = 0x1
COMPAT_MTIME = 0x2
INCOMPAT_ZERO_PADDING = 0x1
"""Only about compressed data: harmless where there is none (mkfs.erofs may set it)."""
INCOMPAT_CHUNKED_FILE = 0x4
INCOMPAT_DEVICE_TABLE = 0x8

DEVICE = struct.Struct("<64sII56x")
"""tag, blocks, mapped_blkaddr."""
DEVICE_TABLE = SUPER_OFFSET + SUPER.size
MAX_DEVICES = 4096
"""Of 65535: so that the device table leaves the root inode in the first 2 MiB."""
TAG_MAX = 64

COMPACT = struct.Struct("<HHHHI4xIIHH4x")
"""i_format, i_xattr_icount, i_mode, i_nlink, i_size, i_u, i_ino, i_uid, i_gid: 32 bytes.
Its mtime is the superblock's build_time."""
EXTENDED = struct.Struct("<HHHHQIIIIqII16x")
"""i_format, i_xattr_icount, i_mode, reserved, i_size, i_u, i_ino, i_uid, i_gid, i_mtime,
i_mtime_nsec, i_nlink: 64 bytes. i_mtime is declared unsigned, but the kernel stores it in
a time64_t: times before 1970 come out right, so we read and write it as signed."""

FLAT_PLAIN = 0
FLAT_INLINE = 2
CHUNK_BASED = 4

CHUNK_INDEXES = 0x20
CHUNK_BITS_MASK = 0x1F
CHUNK_INDEX = struct.Struct("<HHI")
"""advise (0), device_id (0 is the image itself, n is device n - 1), blkaddr."""
NULL_BLOCK = 0xFFFFFFFF
"""A chunk at this address is a hole."""

DIRENT = struct.Struct("<QHBB")
"""nid, nameoff from the start of the block, file_type, reserved."""

XATTR_HEADER = struct.Struct("<IB7x")
"""h_name_filter (unused, 0), h_shared_count; shared ids (u32) and inline entries follow."""
XATTR_ENTRY = struct.Struct("<BBH")
"""e_name_len, e_name_index, e_value_size; name and value follow, padded to 4 bytes."""
XATTR_BODY_MAX = XATTR_HEADER.size + 4 * (0xFFFF - 1)
XATTR_SHARED_MAX = 0xFF
XATTR_VALUE_MAX = 0xFFFF
"""One byte less than Linux's XATTR_SIZE_MAX: e_value_size is a u16."""

XATTR_PREFIXES = (
    (b"user.", 1),
    (b"trusted.", 4),
    (b"security.", 6),
)
"""Prefixes that are replaced by an index."""
XATTR_WHOLE = ((b"system.posix_acl_access", 2), (b"system.posix_acl_default", 3))
"""Names that are an index with nothing behind it."""
_PREFIX_OF = {index: prefix for prefix, index in (*XATTR_PREFIXES, *XATTR_WHOLE)}

OPAQUE = b"trusted.overlay.opaque"
OPAQUE_VALUE = b"y"
_OVERLAY = (b"trusted.overlay.", b"user.overlay.")
_ESCAPED = tuple(prefix + b"overlay." for prefix in _OVERLAY)

SYMLINK_MAX = 4095
"""Linux PATH_MAX without its NUL: the kernel cannot follow a longer target."""
PATH_LIMIT = 16 * 1024
"""Longest path in bytes in a tree (4 times PATH_MAX). Bounds the work of a walk."""
SIZE_MAX = (1 << 63) - 1
MAX_IMAGE = 4 << 30
"""Most bytes of one metadata image; heads hold no more (layers/head.py, MAX_EROFS)."""

FT_OF = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
"""Linux FT_* by file type bits (include/linux/fs_types.h)."""
TYPE_OF = {ft: kind for kind, ft in FT_OF.items()}


class Device(NamedTuple):
    """A blob as an extra device of an image."""

    tag: bytes
    """Up to 64 bytes; a blob's digest in hex fills it exactly."""
    size: int
    """Bytes; a positive multiple of BLOCK."""


class DeviceSlot(NamedTuple):
    """A device as an image has it."""

    tag: bytes
    size: int
    mapped: int
    """Byte address of the device in a flat file [image | blob 0 | blob 1 …]."""


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def encode_rdev(rdev: int) -> int | None:
    """The kernel's new_encode_dev (include/linux/kdev_t.h): 12-bit major, 20-bit minor.

    `rdev` as os.makedev gives it. None if it does not fit.
    """
    major = (rdev >> 8 & 0xFFF) | (rdev >> 32 & 0xFFFFF000)
    minor = (rdev & 0xFF) | (rdev >> 12 & 0xFFFFFF00)
    if rdev < 0 or rdev >> 64 or major > 0xFFF or minor > 0xFFFFF:
        return None
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def decode_rdev(value: int) -> int:
    """An i_u.rdev as os.makedev's number (glibc's layout)."""
    major = value >> 8 & 0xFFF
    minor = (value & 0xFF) | (value >> 12 & 0xFFF00)
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def split_xattr_name(name: bytes) -> tuple[int, bytes] | None:
    """(name index, rest) of a full attribute name; None if EROFS has no way to say it."""
    for whole, index in XATTR_WHOLE:
        if name == whole:
            return index, b""
    for prefix, index in XATTR_PREFIXES:
        if name.startswith(prefix) and len(name) > len(prefix):
            return index, name[len(prefix) :]
    return None


def join_xattr_name(index: int, rest: bytes) -> bytes | None:
    """The full name; None for an index we do not know or a rest that cannot be."""
    prefix = _PREFIX_OF.get(index)
    if prefix is None or prefix.endswith(b".") != bool(rest) or b"\0" in rest:
        return None
    return prefix + rest


def is_overlay_mark(name: bytes) -> bool:
    """Whether overlayfs would obey this attribute of a lower layer.

    `trusted.overlay.overlay.x` is overlayfs's own escape of `trusted.overlay.x` and is
    shown, not obeyed (Documentation/filesystems/overlayfs.rst, "Nesting overlayfs mounts").
    """
    return name.startswith(_OVERLAY) and not name.startswith(_ESCAPED)


def overlay_shows(name: bytes) -> bytes:
    """What overlayfs calls an attribute of a lower layer: without its escape.

    Our overlays are mounted without `userxattr`, so `user.overlay.overlay.x` is no escape.
    """
    trusted, escaped = _OVERLAY[0], _ESCAPED[0]
    return trusted + name[len(escaped) :] if name.startswith(escaped) else name


@functools.cache
def _crc32c_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


def superblock_checksum(first_block: bytes | bytearray | memoryview) -> int:
    """The checksum of an image: crc32c (Castagnoli) from the superblock to the end of its
    block with the checksum field as zero, start value ~0, result not inverted.
    """
    table = _crc32c_table()
    data = bytearray(first_block[SUPER_OFFSET:BLOCK])
    data[4:8] = bytes(4)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc
