"""Passes over a whole image: every path, the tree in memory, which bytes of blobs are used.

What must hold: a pass ends. Directories are entered once, paths are bounded, and all that a
pass decodes may not be more than the image holds: a well-formed image has no two inodes in
the same bytes, so only a hostile one can exceed that.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsecfs.errors import FormatError
from dsecfs.layers.erofs import format as f
from dsecfs.layers.tree import Extent, Inode

if TYPE_CHECKING:
    from dsecfs.layers.erofs.reader import ErofsImage, InodeInfo


class _Budget:
    """How much one pass may still decode."""

    def __init__(self, image: ErofsImage) -> None:
        self._name = image.name
        self._left = image.block_count * f.BLOCK

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise FormatError(f"{self._name}: its inodes share bytes, which no writer does")


def scan(image: ErofsImage) -> Iterator[tuple[bytes, bytes, int, InodeInfo]]:
    """Every (path of the parent with a final slash, name, nid of the parent, inode).

    Parents first, names sorted. The root comes first with empty names.
    """
    budget = _Budget(image)
    root = image.stat(image.root_nid)
    seen = {root.nid}
    stack = [(b"", b"", root.nid, root)]
    while stack:
        step = stack.pop()
        yield step
        before, name, _, info = step
        if not stat.S_ISDIR(info.mode):
            continue
        budget.take(info.size)
        path = before + name + b"/" if name else b""
        below = []
        for name, nid, kind in image.entries(info.nid):
            child = image.stat(nid)
            if len(path) + len(name) > f.PATH_LIMIT:
                raise FormatError(f"{image.name}: a path is longer than {f.PATH_LIMIT} bytes")
            if stat.S_IFMT(child.mode) != kind:
                raise FormatError(
                    f"{image.name}: {name!r} is not of the type that its directory "
                    f"{info.nid} says"
                )
            if kind == stat.S_IFDIR:
                if nid in seen:
                    raise FormatError(
                        f"{image.name}: directory {name!r} in directory {info.nid} has a "
                        f"second parent or is part of a loop"
                    )
                seen.add(nid)
            below.append((path, name, info.nid, child))
        below.reverse()
        stack.extend(below)


def load_tree(image: ErofsImage) -> Inode:
    """The whole tree in memory; names of one inode give the same object."""
    budget = _Budget(image)
    shared: dict[int, tuple[bytes, bytes]] = {}

    def shared_entry(number: int) -> tuple[bytes, bytes]:
        entry = shared.get(number)
        if entry is None:
            entry = shared[number] = image.shared_xattr(number)
            budget.take(f.XATTR_ENTRY.size + len(entry[1]))
        return entry

    def load(info: InodeInfo) -> Inode:
        budget.take(info.body_at - info.xattrs_at)
        xattrs, opaque = image.xattrs_of(info, shared_entry)
        inode = Inode(
            info.mode, info.uid, info.gid, info.mtime_ns, info.rdev, xattrs=xattrs, opaque=opaque
        )
        kind = stat.S_IFMT(info.mode)
        if kind == stat.S_IFDIR:
            inode.children = {}
        elif kind == stat.S_IFLNK:
            budget.take(info.size)
            inode.target = image.target_of(info)
        elif kind == stat.S_IFREG and info.size:
            budget.take(image.indexes_of(info)[1] * f.CHUNK_INDEX.size)
            inode.size = info.size
            inode.extents = image.extents_of(info)
        return inode

    made: dict[int, Inode] = {}
    for _, name, parent, info in scan(image):
        inode = made.get(info.nid)
        if inode is None:
            inode = made[info.nid] = load(info)
        if name:
            entries = made[parent].children
            assert entries is not None
            entries[name] = inode
    return made[image.root_nid]


def referenced_ranges(image: ErofsImage) -> list[list[tuple[int, int]]]:
    """Per device: (physical, length) of all whole blocks that files have, sorted, merged."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in image.devices]
    for _, extents in data_files(image):
        for _, blob, physical, length in extents:
            pieces[blob].append((physical, physical + f.round_up(length, f.BLOCK)))
    return [_merge(ranges) for ranges in pieces]


def data_files(image: ErofsImage) -> Iterator[tuple[bytes, tuple[Extent, ...]]]:
    """(first path, extents) of every regular file that has a size; hard links once."""
    budget = _Budget(image)
    done: set[int] = set()
    for parent, name, _, info in scan(image):
        if not stat.S_ISREG(info.mode) or not info.size or info.nid in done:
            continue
        done.add(info.nid)
        budget.take(image.indexes_of(info)[1] * f.CHUNK_INDEX.size)
        yield parent + name, image.extents_of(info)


def _merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(begin, end) in any order, overlapping or not, to (begin, length), sorted, apart."""
    ranges.sort()
    merged: list[tuple[int, int]] = []
    for begin, end in ranges:
        if merged and begin <= merged[-1][0] + merged[-1][1]:
            first, length = merged[-1]
            merged[-1] = (first, max(length, end - first))
        else:
            merged.append((begin, end - begin))
    return merged
