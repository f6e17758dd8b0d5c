"""Trees for tests: made from directories, compared with directories, and drawn by hypothesis.

`Blob` is a file of test data in the shape that layers use (files start on a block, zeros up
to the next). `describe` turns a tree into plain values, so two trees can be compared with
`==`; `differences` compares a tree with what the kernel shows in a directory.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dsecfs.layers.tree import BLOCK, Extent, Inode, directory, walk

OPAQUE = b"trusted.overlay.opaque"


class Blob:
    """A growing file of data, block by block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        path.touch()

    def append(self, data: bytes) -> int:
        """Add `data` at the next block and return where it lies."""
        at = self.size
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(data.ljust(-(-len(data) // BLOCK) * BLOCK, b"\0"))
            self.size = file.tell()
        return at


def blob_of_blocks(path: Path, blocks: int) -> Blob:
    """A blob whose every 16 bytes say where they lie, so that no two ranges look alike."""
    blob = Blob(path)
    words = blocks * BLOCK // 16
    blob.append(
        b"".join(struct.pack("<QQ", i, i * 0x9E3779B97F4A7C15 % 2**64) for i in range(words))
    )
    return blob


def file_of(blob: Blob, data: bytes, index: int = 0, mode: int = 0o644, **fields: Any) -> Inode:
    """A regular file with `data` appended to `blob`, which is number `index` of the tree."""
    extents = (Extent(0, index, blob.append(data), len(data)),) if data else ()
    return Inode(stat.S_IFREG | mode, size=len(data), extents=extents, **fields)


def symlink_to(target: bytes, **fields: Any) -> Inode:
    return Inode(stat.S_IFLNK | 0o777, target=target, **fields)


def tree_from_directory(path: Path, blob: Blob) -> Inode:
    """The tree under `path` as the kernel shows it, holes as holes, data copied to `blob`."""
    links: dict[tuple[int, int], Inode] = {}

    def load(here: bytes) -> Inode:
        info = os.lstat(here)
        key = (info.st_dev, info.st_ino)
        if key in links:
            return links[key]
        inode = Inode(
            info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, xattrs=read_xattrs(here)
        )
        inode.opaque = inode.xattrs.pop(OPAQUE, b"") == b"y"
        if stat.S_ISDIR(info.st_mode):
            inode.children = {name: load(here + b"/" + name) for name in os.listdir(here)}
            return inode
        if stat.S_ISLNK(info.st_mode):
            inode.target = os.readlink(here)
        elif stat.S_ISREG(info.st_mode):
            inode.size = info.st_size
            inode.extents = tuple(_copy_data(here, info.st_size, blob))
        elif stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
            inode.rdev = info.st_rdev
        links[key] = inode
        return inode

    return load(os.fsencode(path))


def _copy_data(path: bytes, size: int, blob: Blob) -> Iterator[Extent]:
    with open(path, "rb", buffering=0) as file:
        at = 0
        while at < size:
            try:
                begin = os.lseek(file.fileno(), at, os.SEEK_DATA) // BLOCK * BLOCK
            except OSError:
                return
            at = min(-(-os.lseek(file.fileno(), begin, os.SEEK_HOLE) // BLOCK) * BLOCK, size)
            data = os.pread(file.fileno(), at - begin, begin)
            assert len(data) == at - begin
            yield Extent(begin, 0, blob.append(data), len(data))


def read_xattrs(path: bytes) -> dict[bytes, bytes]:
    """All attributes of a path itself (not of what a symlink points at)."""
    return {
        os.fsencode(name): os.getxattr(path, name, follow_symlinks=False)
        for name in os.listxattr(path, follow_symlinks=False)
    }


def contents(inode: Inode, blobs: Sequence[Path]) -> bytes:
    """What a regular file reads as."""
    data = bytearray(inode.size)
    for logical, blob, physical, length in inode.extents:
        with blobs[blob].open("rb") as file:
            file.seek(physical)
            data[logical : logical + length] = file.read(length)
    return bytes(data)


def describe(root: Inode) -> dict[bytes, tuple[Any, ...]]:
    """Path -> everything the model knows; hard links by the first of their paths."""
    first: dict[int, bytes] = {}
    out: dict[bytes, tuple[Any, ...]] = {}
    for path, inode in walk(root):
        first.setdefault(id(inode), path)
        out[path] = (
            stat.filemode(inode.mode), inode.mode, inode.uid, inode.gid, inode.mtime_ns,
            inode.rdev if stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode) else 0,
            inode.size if inode.is_reg else 0, inode.target, sorted(inode.xattrs.items()),
            merged(inode.extents), inode.opaque, first[id(inode)],
        )  # fmt: skip
    return out


def merged(extents: Sequence[Extent]) -> tuple[Extent, ...]:
    """The same map with neighbours joined, sorted."""
    out: list[Extent] = []
    for extent in sorted(extents):
        if out:
            last = out[-1]
            if (last.logical + last.length, last.blob, last.physical + last.length) == extent[:3]:
                out[-1] = last._replace(length=last.length + extent.length)
                continue
        out.append(extent)
    return tuple(out)


def differences(
    root: Inode, path: Path, blobs: Sequence[Path], *, opaque_marks: bool = True, links: bool = True
) -> list[str]:
    """How what the kernel shows under `path` differs from `root`; empty if it does not.

    `opaque_marks`: opaque directories show overlayfs's attribute. `links`: compare link
    counts, and that names of one inode (and no others) share an inode number.
    """
    out: list[str] = []
    inos: dict[int, int] = {}
    numbers: dict[int, int] = {}
    counts: dict[int, int] = {}
    for _, inode in walk(root):
        if inode.children is None:
            counts[id(inode)] = counts.get(id(inode), 0) + 1
        else:
            counts[id(inode)] = 2 + sum(child.is_dir for child in inode.children.values())
    base = os.fsencode(path)
    for name, inode in walk(root):
        here = base + b"/" + name if name else base
        try:
            info = os.lstat(here)
        except OSError as e:
            out.append(f"{name!r}: {e}")
            continue

        def check(what: str, found: object, wanted: object, name: bytes = name) -> None:
            if found != wanted:
                out.append(f"{name!r}: {what}: found {found!r:.200}, wanted {wanted!r:.200}")

        check("mode", oct(info.st_mode), oct(inode.mode))
        check("owner", (info.st_uid, info.st_gid), (inode.uid, inode.gid))
        check("mtime", info.st_mtime_ns, inode.mtime_ns)
        if links:
            check("links", info.st_nlink, counts[id(inode)])
            check("inode number", inos.setdefault(id(inode), info.st_ino), info.st_ino)
            check("inode", numbers.setdefault(info.st_ino, id(inode)), id(inode))
        if stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode):
            check("rdev", info.st_rdev, inode.rdev)
        if inode.is_reg:
            check("size", info.st_size, inode.size)
            if inode.size <= 1 << 26:
                check("data", Path(os.fsdecode(here)).read_bytes(), contents(inode, blobs))
        if inode.is_symlink:
            check("size", info.st_size, len(inode.target))
            check("target", os.readlink(here), inode.target)
        if inode.children is not None:
            check("names", sorted(os.listdir(here)), sorted(inode.children))
        wanted = dict(inode.xattrs)
        if inode.opaque and opaque_marks:
            wanted[OPAQUE] = b"y"
        check("attributes", sorted(read_xattrs(here).items()), sorted(wanted.items()))
    return out


# What hypothesis draws


def acl(*users: int) -> bytes:
    """A valid POSIX ACL as an attribute: owner, named users, group, mask, others.

    Layout: version 2, then (tag, permissions, id) (include/uapi/linux/posix_acl_xattr.h).
    """
    none = 0xFFFFFFFF
    entries = [(1, 7, none), *((2, 5, user) for user in sorted(users)), (4, 5, none)]
    entries += [(16, 7, none), (32, 1, none)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NAME_BYTES = bytes(b for b in range(1, 256) if b != 0x2F)
names = st.one_of(
    st.sampled_from(
        [b"a", b"b", b"-", b"!x", b".a", b"...", b"..a", b".-", b"~", b"\xff", b"\xe9"]
    ),
    st.binary(min_size=1, max_size=12).map(lambda raw: bytes(NAME_BYTES[b % 254] for b in raw)),
    st.integers(0, 254).map(lambda i: bytes([NAME_BYTES[i % 254]]) * 255),
).filter(lambda name: name not in (b".", b".."))

ids = st.one_of(st.sampled_from([0, 1000, 0xFFFF, 0x10000, 0xFFFFFFFE]), st.integers(0, 2**32 - 2))
times = st.one_of(
    st.sampled_from([0, 1_700_000_000_000_000_000, 1_700_000_000_000_000_001, -1, -(10**9)]),
    st.integers(-(2**63) * 10**9, (2**63 - 1) * 10**9 + 999_999_999),
    st.integers(0, 2**33 * 10**9),
)
devices = st.builds(os.makedev, st.integers(0, 0xFFF), st.integers(0, 0xFFFFF))

_values = st.one_of(st.sampled_from([b"", b"v", b"x" * 40]), st.binary(max_size=60))
_common = st.dictionaries(
    st.one_of(
        st.sampled_from(
            [b"trusted.t", b"trusted.same", b"security.s", b"trusted.overlay.overlay.x"]
        ),
        st.binary(min_size=1, max_size=8).map(
            lambda raw: b"trusted." + bytes(NAME_BYTES[b % 254] for b in raw)
        ),
    ),
    _values,
    max_size=4,
)
_user = st.dictionaries(st.sampled_from([b"user.u", b"user.same", b"user." + b"n" * 250]), _values)
_acls = st.sampled_from([{}, {}, {b"system.posix_acl_access": acl(1, 70000)}])
_default_acls = st.sampled_from([{}, {b"system.posix_acl_default": acl(5)}])


@st.composite
def _files(draw: st.DrawFn, blob_blocks: Sequence[int]) -> Inode:
    """A regular file with up to four extents, anywhere in the blobs, and holes."""
    extents: list[Extent] = []
    at = 0
    for _ in range(draw(st.integers(0, 4))):
        at += draw(st.sampled_from([0, 0, 1, 2, 8, 17])) * BLOCK
        blob = draw(st.integers(0, len(blob_blocks) - 1))
        first = draw(st.integers(0, blob_blocks[blob] - 1))
        count = draw(st.integers(1, min(20, blob_blocks[blob] - first)))
        extents.append(Extent(at, blob, first * BLOCK, count * BLOCK))
        at += count * BLOCK
    cut = draw(st.sampled_from([0, 1, 100, BLOCK - 1])) if extents else 0
    if cut:
        at -= cut
        extents[-1] = extents[-1]._replace(length=extents[-1].length - cut)
    else:
        # A hole at the end; huge only without data (its map would be too fine).
        sizes = [0, 1, 5000] if extents else [0, 0, 1, 5000, 2**32, 2**43 + 5]
        at += draw(st.sampled_from(sizes))
    return Inode(stat.S_IFREG, size=at, extents=tuple(extents))


@st.composite
def trees(draw: st.DrawFn, blob_blocks: Sequence[int] = (40, 9), max_inodes: int = 25) -> Inode:
    """A tree of every kind of inode over blobs of so many blocks (`blob_of_blocks`).

    Only what the kernel can show again is drawn: `user.` attributes on files and
    directories alone, valid ACLs.
    """

    def dress(inode: Inode, plain: bool) -> Inode:
        inode.mode |= draw(st.sampled_from([0o644, 0o755, 0o4755, 0o1777, 0])) & 0o7777
        inode.uid, inode.gid = draw(ids), draw(ids)
        inode.mtime_ns = draw(times)
        inode.xattrs = dict(draw(_common))
        if plain:
            inode.xattrs |= draw(_user) | draw(_acls)
        return inode

    root = dress(directory(0), True)
    directories = [root]
    links: list[Inode] = []
    for _ in range(draw(st.integers(0, max_inodes))):
        parent = draw(st.sampled_from(directories))
        assert parent.children is not None
        kind = draw(st.sampled_from("fffddlscbpwh"))
        if kind == "h" and links:
            inode = draw(st.sampled_from(links))
        elif kind == "d":
            inode = dress(directory(0), True)
            inode.opaque = draw(st.booleans())
            inode.xattrs |= draw(_default_acls)
        elif kind == "l":
            inode = Inode(stat.S_IFLNK, target=draw(names) * draw(st.sampled_from([1, 1, 10])))
            inode.target = inode.target[: draw(st.sampled_from([5, 4095, 4095]))]
            dress(inode, False)
        elif kind == "w":
            inode = dress(Inode(stat.S_IFCHR), False)
        elif kind in "scbp":
            types = {"s": stat.S_IFSOCK, "c": stat.S_IFCHR, "b": stat.S_IFBLK, "p": stat.S_IFIFO}
            inode = Inode(types[kind], rdev=draw(devices) if kind in "cb" else 0)
            dress(inode, False)
        else:
            inode = dress(draw(_files(blob_blocks)), True)
        name = draw(names)
        if name not in parent.children:
            parent.children[name] = inode
            if inode.children is not None:
                directories.append(inode)
            elif not inode.is_whiteout:
                links.append(inode)
    return root
