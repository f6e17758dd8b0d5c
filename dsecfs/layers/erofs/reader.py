"""Looks into an EROFS metadata image, lazily: what is not asked for is not read.

An image may be damaged or hostile. What must hold:
- every access is checked against the image's length first; what is wrong raises FormatError;
- the work of one call is bounded by the image's size, and so is a whole pass (whole.py);
- an extent that is returned lies inside its blob.

Only what the writer makes is understood, and what mkfs.erofs makes with `--blobdev` alike:
file data in extra devices, by chunk indexes; directories and symlinks in the image.
An image is immutable and so is an open `ErofsImage`; it may be used by several threads.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from dsecfs.errors import BadInput, FormatError, NotFound
from dsecfs.layers.erofs import format as f
from dsecfs.layers.erofs import whole
from dsecfs.layers.erofs.format import DeviceSlot
from dsecfs.layers.tree import NAME_MAX, Extent, Inode

__all__ = ["DeviceSlot", "ErofsImage", "InodeInfo"]

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_KNOWN_INCOMPAT = f.INCOMPAT_ZERO_PADDING | f.INCOMPAT_CHUNKED_FILE | f.INCOMPAT_DEVICE_TABLE


class InodeInfo(NamedTuple):
    """A decoded inode: what stat(2) wants, then where its parts lie in the image."""

    nid: int
    """The inode number that the kernel's mount shows."""
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    """Of a regular file its length, of a symlink its target's; else what the image takes."""
    mtime_ns: int
    rdev: int
    layout: int
    info: int
    """i_u of the inode: address of data, chunk format or device number."""
    xattrs_at: int
    body_at: int
    """Where attributes end and inline data or chunk indexes begin."""

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_whiteout(self) -> bool:
        """As `tree.Inode.is_whiteout`."""
        return stat.S_ISCHR(self.mode) and self.rdev == 0


class _Block(NamedTuple):
    """One block of a directory: where it lies in the image, its bytes, its entries."""

    at: int
    length: int
    entries: int


class ErofsImage:
    """An open image. Use `ErofsImage.open(path)` for a file, the constructor for bytes."""

    root_nid: int
    inode_count: int
    """As the superblock has it; only for statfs."""
    block_count: int
    """Blocks of the image itself, without its devices."""
    uuid: bytes
    devices: tuple[DeviceSlot, ...]

    def __init__(self, data: bytes | bytearray | mmap.mmap, name: str = "EROFS image") -> None:
        """Check the superblock and the device table of `data`; nothing else is read.

        `name` is what messages call the image. Raises FormatError.
        """
        self.name = name
        self._data = data
        if len(data) < f.BLOCK:
            raise self._bad(f"truncated: {len(data)} bytes")
        (
            magic, checksum, compat, block_bits, ext_slots, self.root_nid, self.inode_count,
            build_s, build_ns, self.block_count, meta_block, xattr_block, self.uuid, _,
            incompat, compression, devices, table_slot, dir_bits, _, _, _, _,
        ) = f.SUPER.unpack_from(data, f.SUPER_OFFSET)  # fmt: skip
        if magic != f.MAGIC:
            raise self._bad("not an EROFS image (bad magic)")
        if block_bits != f.BLOCK_BITS or dir_bits or ext_slots or compression:
            raise self._bad("its block size or superblock extension is not supported")
        if incompat & ~_KNOWN_INCOMPAT:
            raise self._bad(f"uses features that are not supported ({incompat:#x})")
        if compat & f.COMPAT_SB_CHKSUM and f.superblock_checksum(data[: f.BLOCK]) != checksum:
            raise self._bad("its superblock has another checksum")
        self._end = self.block_count * f.BLOCK
        if self._end > len(data) or not self.block_count:
            raise self._bad(f"truncated: {len(data)} bytes of {self.block_count} blocks")
        if build_ns >= 1_000_000_000:
            raise self._bad("its build time is not a time")
        self._build_time_ns = _signed(build_s) * 1_000_000_000 + build_ns
        self._meta = meta_block * f.BLOCK
        self._xattrs = xattr_block * f.BLOCK
        self.devices = self._read_devices(table_slot, devices) if devices else ()
        self._referenced: list[list[tuple[int, int]]] | None = None
        if not stat.S_ISDIR(self.stat(self.root_nid).mode):
            raise self._bad("its root is not a directory")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map the file `path`. Raises FormatError, or NotFound if there is no such file.

        The file must not shrink while it is open (the kernel would end the process):
        images are written once under a name that then never changes.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < f.BLOCK:
                    raise FormatError(f"EROFS image {path}: truncated: {size} bytes")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise NotFound(f"EROFS image {path} does not exist") from None
        try:
            return cls(data, f"EROFS image {path}")
        except BaseException:
            data.close()
            raise

    def close(self) -> None:
        """Unmap the file. The image is not used afterwards."""
        if isinstance(self._data, mmap.mmap):
            self._data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # One inode

    def stat(self, nid: int) -> InodeInfo:
        """Decode inode `nid`. Raises FormatError if there can be none or it is damaged."""
        at = self._meta + nid * f.SLOT
        if nid < 0 or at + f.COMPACT.size > self._end:
            raise self._bad(f"inode {nid} lies outside of it")
        data = self._data
        fmt = _U16.unpack_from(data, at)[0]
        if fmt & 1:
            if at + f.EXTENDED.size > self._end:
                raise self._bad(f"inode {nid} lies outside of it")
            (
                _, icount, mode, reserved, size, info, _, uid, gid, seconds, nanos, nlink,
            ) = f.EXTENDED.unpack_from(data, at)  # fmt: skip
            mtime_ns = seconds * 1_000_000_000 + nanos
            xattrs_at = at + f.EXTENDED.size
        else:
            (
                _, icount, mode, nlink, size, info, _, uid, gid,
            ) = f.COMPACT.unpack_from(data, at)  # fmt: skip
            nanos = reserved = 0
            mtime_ns = self._build_time_ns
            xattrs_at = at + f.COMPACT.size
        body_at = xattrs_at
        if icount:
            body_at += f.XATTR_HEADER.size + 4 * (icount - 1)
        layout = fmt >> 1
        kind = stat.S_IFMT(mode)
        if (
            layout not in (f.FLAT_PLAIN, f.FLAT_INLINE, f.CHUNK_BASED)
            or kind not in f.FT_OF
            or reserved
            or not nlink
            or nanos >= 1_000_000_000
            or size > f.SIZE_MAX
            or body_at > self._end
        ):
            raise self._bad(f"inode {nid} is damaged")
        rdev = f.decode_rdev(info) if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0
        return InodeInfo(
            nid, mode, uid, gid, nlink, size, mtime_ns, rdev, layout, info, xattrs_at, body_at
        )

    def readlink(self, nid: int) -> bytes:
        """The target of symlink `nid`. BadInput if it is not one."""
        return self.target_of(self.stat(nid))

    def xattrs(self, nid: int) -> dict[bytes, bytes]:
        """Full name to value. The opaque mark is not among them: see `is_opaque`."""
        return self.xattrs_of(self.stat(nid))[0]

    def is_opaque(self, nid: int) -> bool:
        """Whether a directory hides what lower layers have under its path."""
        return self.xattrs_of(self.stat(nid))[1]

    def extents(self, nid: int) -> tuple[Extent, ...]:
        """Where a regular file's data lies, sorted; gaps are holes. BadInput if it is none.

        Neighbouring chunks are merged. An extent that ends in the file's last block ends
        with the file.
        """
        return self.extents_of(self.stat(nid))

    # Directories

    def lookup(self, nid: int, name: bytes) -> int | None:
        """The nid of `name` in directory `nid`, None if there is none. Binary search.

        BadInput if `nid` is not a directory.
        """
        found = self._find(self._directory(nid), name)
        if found is None:
            return None
        _, block, i = found
        target: int = _U64.unpack_from(self._data, block.at + i * f.DIRENT.size)[0]
        return target

    def entries(self, nid: int, start: int = 0) -> Iterator[tuple[bytes, int, int]]:
        """(name, nid, file type bits as in st_mode) of a directory, sorted, without `.`
        and `..`; the first `start` of them are left out.

        So `start` is how many a caller has had so far: a position that is stable for ever.
        BadInput if `nid` is not a directory, FormatError when a damaged entry is reached.
        """
        info = self._directory(nid)
        skip = start
        if start:
            # `.` and `..` have their place in the order too: step over those passed already.
            for dot in (b".", b".."):
                skip += self._position(info, dot) <= skip
        last = b""
        for number in range(-(-info.size // f.BLOCK)):
            block = self._block(info, number)
            for i in range(skip, block.entries):
                entry, _, ftype, _ = f.DIRENT.unpack_from(self._data, block.at + i * f.DIRENT.size)
                name = self._name(block, i)
                kind = f.TYPE_OF.get(ftype)
                if kind is None or b"/" in name or b"\0" in name or name <= last:
                    raise self._bad(f"entry {i} in block {number} of directory {nid} is damaged")
                last = name
                if name != b"." and name != b"..":
                    yield name, entry, kind
            skip = max(skip - block.entries, 0)

    def resolve(self, path: bytes) -> int:
        """The nid of `path` from the root. Symlinks are not followed.

        Leading, trailing and double slashes and `.` do not matter; `..` is BadInput.
        Raises NotFound for a missing name, or one below something that is no directory.
        """
        nid = self.root_nid
        for name in path.split(b"/"):
            if name in (b"", b"."):
                continue
            if name == b"..":
                raise BadInput(f"{path[:200]!r}: a path in an image cannot go up")
            found = None
            if stat.S_ISDIR(self.stat(nid).mode):
                found = self.lookup(nid, name)
            if found is None:
                raise NotFound(f"{self.name}: no {path[:200]!r}")
            nid = found
        return nid

    # The whole tree

    def walk(self) -> Iterator[tuple[bytes, InodeInfo]]:
        """Every (path, inode) below and including the root, in the order of `tree.walk`.

        Raises FormatError for a directory with two parents (or a cycle), a path that is too
        long, or more entries than the image has room for.
        """
        for parent, name, _, info in whole.scan(self):
            yield parent + name, info

    def data_files(self) -> Iterator[tuple[bytes, tuple[Extent, ...]]]:
        """(path, extents) of every regular file that has a size, hard links once, by their
        first path. Raises FormatError as `walk` does, and where inodes share bytes."""
        return whole.data_files(self)

    def load_tree(self) -> Inode:
        """The whole tree in memory. Names of one inode give the same object.

        Raises FormatError as `walk` does, and for anything an inode should not have.
        """
        return whole.load_tree(self)

    def referenced_ranges(self, device: int) -> list[tuple[int, int]]:
        """(physical, length) in whole blocks of everything that files have in blob `device`
        (from 0): sorted, merged. All other bytes of the blob are nobody's and must read as
        zeros in a flat device. The first call walks the tree; the result is kept.
        """
        if self._referenced is None:
            self._referenced = whole.referenced_ranges(self)
        return self._referenced[device]

    # Flat files: [metadata | blob | blob …]

    def carries(self, device: int) -> bool:
        """Whether the bytes of blob `device` (from 0) follow the metadata in the same file."""
        slot = self.devices[device]
        return slot.mapped >= self._end and slot.mapped + slot.size <= len(self._data)

    def carried(self, device: int, offset: int, size: int) -> bytes:
        """Bytes of a blob that the file `carries`; short only at the blob's end."""
        slot = self.devices[device]
        at = slot.mapped + min(max(offset, 0), slot.size)
        return bytes(self._data[at : min(at + size, slot.mapped + slot.size)])

    # Parts, also for whole.py: the same on an inode that is decoded already

    def _bad(self, why: str) -> FormatError:
        return FormatError(f"{self.name}: {why}")

    def _read_devices(self, slot: int, count: int) -> tuple[DeviceSlot, ...]:
        at = slot * f.DEVICE.size
        if not at or at + count * f.DEVICE.size > self._end:
            raise self._bad("its device table lies outside of it")
        out = []
        for i in range(count):
            tag, blocks, mapped = f.DEVICE.unpack_from(self._data, at + i * f.DEVICE.size)
            out.append(DeviceSlot(tag.rstrip(b"\0"), blocks * f.BLOCK, mapped * f.BLOCK))
        return tuple(out)

    def target_of(self, info: InodeInfo) -> bytes:
        """`readlink` of a decoded inode."""
        if not stat.S_ISLNK(info.mode):
            raise BadInput(f"{self.name}: inode {info.nid} is not a symlink")
        if not 1 <= info.size <= f.SYMLINK_MAX:
            raise self._bad(f"symlink {info.nid} has a target of {info.size} bytes")
        at = self._data_at(info, 0, info.size)
        target = bytes(self._data[at : at + info.size])
        if b"\0" in target:
            raise self._bad(f"symlink {info.nid} has a NUL in its target")
        return target

    def _data_at(self, info: InodeInfo, block: int, length: int) -> int:
        """Where the `length` bytes of one block of flat data lie in the image; checked."""
        if info.layout == f.FLAT_INLINE and (block + 1) * f.BLOCK >= info.size:
            at = info.body_at
            crosses = at % f.BLOCK + length > f.BLOCK
        elif info.layout == f.CHUNK_BASED:
            raise self._bad(f"inode {info.nid} has a layout that does not go with its type")
        else:
            at = (info.info + block) * f.BLOCK
            crosses = False
        if crosses or at + length > self._end:
            raise self._bad(f"data of inode {info.nid} lies outside of it")
        return at

    def _directory(self, nid: int) -> InodeInfo:
        info = self.stat(nid)
        if not stat.S_ISDIR(info.mode):
            raise BadInput(f"{self.name}: inode {nid} is not a directory")
        if info.size > self._end:
            raise self._bad(f"directory {nid} is larger than the image")
        return info

    def _block(self, info: InodeInfo, number: int) -> _Block:
        """One block of a directory."""
        length = min(f.BLOCK, info.size - number * f.BLOCK)
        at = self._data_at(info, number, length)
        first: int = 0
        if length > f.DIRENT.size:
            (first,) = _U16.unpack_from(self._data, at + 8)
        if first < f.DIRENT.size or first % f.DIRENT.size or first >= length:
            raise self._bad(f"block {number} of directory {info.nid} is damaged")
        return _Block(at, length, first // f.DIRENT.size)

    def _name(self, block: _Block, i: int) -> bytes:
        """The name of entry `i` of a block."""
        at, length, count = block
        data = self._data
        begin: int = _U16.unpack_from(data, at + i * 12 + 8)[0]
        if i + 1 < count:
            end: int = _U16.unpack_from(data, at + i * 12 + 20)[0]
            name = data[at + begin : at + end] if end <= length else b""
        else:
            # The last name ends with the block or at a NUL.
            name = data[at + begin : at + min(begin + NAME_MAX + 1, length)].partition(b"\0")[0]
        if not 1 <= len(name) <= NAME_MAX or begin < count * 12:
            raise self._bad(f"a directory entry at byte {at + i * 12} is damaged")
        return bytes(name)

    def _position(self, info: InodeInfo, name: bytes) -> int:
        """The number of entries before `name` in a directory; as if at its end without one."""
        found = self._find(info, name)
        if found is None:
            return sys.maxsize
        number, _, i = found
        return i + sum(self._block(info, before).entries for before in range(number))

    def _find(self, info: InodeInfo, name: bytes) -> tuple[int, _Block, int] | None:
        """(number of the block, block, number in it) of `name` in a directory."""
        low, high = 0, -(-info.size // f.BLOCK) - 1
        number, block = -1, None
        while low <= high:
            middle = (low + high) // 2
            candidate = self._block(info, middle)
            if self._name(candidate, 0) <= name:
                number, block = middle, candidate
                low = middle + 1
            else:
                high = middle - 1
        if block is None:
            return None
        low, high = 0, block.entries - 1
        while low <= high:
            middle = (low + high) // 2
            here = self._name(block, middle)
            if here == name:
                return number, block, middle
            if here < name:
                low = middle + 1
            else:
                high = middle - 1
        return None

    def _entry(self, at: int, end: int) -> tuple[bytes, bytes, int]:
        """(name, value, end) of the attribute entry at `at`, which may go up to `end`."""
        if at + f.XATTR_ENTRY.size > end:
            raise self._bad(f"an attribute at {at} lies outside of its inode")
        name_len, index, value_len = f.XATTR_ENTRY.unpack_from(self._data, at)
        at += f.XATTR_ENTRY.size
        stop = at + name_len + value_len
        if stop > end:
            raise self._bad(f"an attribute at {at} lies outside of its inode")
        name = f.join_xattr_name(index, bytes(self._data[at : at + name_len]))
        if name is None:
            raise self._bad(f"an attribute at {at} has a name of unknown kind")
        return name, bytes(self._data[at + name_len : stop]), f.round_up(stop, 4)

    def shared_xattr(self, number: int) -> tuple[bytes, bytes]:
        """(name, value) of entry `number` of the shared area."""
        name, value, _ = self._entry(self._xattrs + 4 * number, self._end)
        return name, value

    def xattrs_of(
        self,
        info: InodeInfo,
        shared_xattr: Callable[[int], tuple[bytes, bytes]] | None = None,
    ) -> tuple[dict[bytes, bytes], bool]:
        """(attributes, opaque) of a decoded inode. `shared_xattr` may remember entries."""
        at, end = info.xattrs_at, info.body_at
        if at == end:
            return {}, False
        _, count = f.XATTR_HEADER.unpack_from(self._data, at)
        at += f.XATTR_HEADER.size
        if at + 4 * count > end:
            raise self._bad(f"attributes of inode {info.nid} are damaged")
        found: list[tuple[bytes, bytes]] = []
        for i in range(count):
            number = _U32.unpack_from(self._data, at + 4 * i)[0]
            found.append((shared_xattr or self.shared_xattr)(number))
        at += 4 * count
        while at < end:
            name, value, at = self._entry(at, end)
            found.append((name, value))
        opaque = False
        out: dict[bytes, bytes] = {}
        for name, value in found:
            if name == f.OPAQUE and value == f.OPAQUE_VALUE and stat.S_ISDIR(info.mode):
                opaque = True
            elif name in out or f.is_overlay_mark(name):
                raise self._bad(f"inode {info.nid} must not have attribute {name[:80]!r}")
            else:
                out[name] = value
        return out, opaque

    def extents_of(
        self, info: InodeInfo, begin: int = 0, end: int = f.SIZE_MAX
    ) -> tuple[Extent, ...]:
        """`extents` of a decoded inode; of the chunks that hold bytes `begin` to `end` alone,
        for no more work than these chunks."""
        if not stat.S_ISREG(info.mode):
            raise BadInput(f"{self.name}: inode {info.nid} is not a regular file")
        if not info.size:
            return ()
        at, count, bits = self.indexes_of(info)
        pieces: list[list[int]] = []  # [logical, device, physical, length] in bytes
        chunk_size = f.BLOCK << bits
        first, stop = begin // chunk_size, min(-(-end // chunk_size), count)
        logical = first * chunk_size
        wanted = self._data[at + 8 * first : at + 8 * max(first, stop)]
        for advise, device, block in f.CHUNK_INDEX.iter_unpack(wanted):
            if block != f.NULL_BLOCK:
                length = min(chunk_size, info.size - logical)
                physical = block * f.BLOCK
                if (
                    advise
                    or not 1 <= device <= len(self.devices)
                    or physical + f.round_up(length, f.BLOCK) > self.devices[device - 1].size
                ):
                    raise self._bad(f"data of inode {info.nid} lies outside of its blobs")
                last = pieces[-1] if pieces else None
                if (
                    last is not None
                    and last[1] == device
                    and last[0] + last[3] == logical
                    and last[2] + last[3] == physical
                ):
                    last[3] += length
                else:
                    pieces.append([logical, device, physical, length])
            logical += chunk_size
        return tuple(Extent(lo, device - 1, ph, n) for lo, device, ph, n in pieces)

    def indexes_of(self, info: InodeInfo) -> tuple[int, int, int]:
        """(position, number of chunk indexes, chunk bits over BLOCK) of a regular file."""
        bits = info.info & f.CHUNK_BITS_MASK
        if info.layout != f.CHUNK_BASED or info.info & ~f.CHUNK_BITS_MASK != f.CHUNK_INDEXES:
            raise self._bad(f"inode {info.nid} has its data in a way that is not supported")
        count = -(-info.size // (f.BLOCK << bits))
        at = f.round_up(info.body_at, f.CHUNK_INDEX.size)
        if at + count * f.CHUNK_INDEX.size > self._end:
            raise self._bad(f"chunk indexes of inode {info.nid} lie outside of it")
        return at, count, bits


def _signed(value: int) -> int:
    """A u64 as the signed number of the same bits."""
    return value - (1 << 64) if value >> 63 else value
