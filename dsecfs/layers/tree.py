"""A file tree in memory: what sources produce, merge combines and the EROFS writer writes.

Owns the one in-memory shape of a tree. What must hold:
- an `Inode` that stands under several names is a hard link (same object, not a copy);
- whiteouts and opaque marks are fields, never file names or xattrs: sources turn `.wh.`
  entries and overlay marks into them, the EROFS codec turns them into what overlayfs
  reads (character device 0:0, `trusted.overlay.opaque=y`) and back;
- names are raw bytes without `/` and NUL, 1..255 long, never `.` or `..`;
- data lies elsewhere: an extent points into a blob's uncompressed address space.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK = 4096
"""EROFS block size in bytes; files start on a block in their blob."""

NAME_MAX = 255
"""Longest name in bytes (Linux NAME_MAX, EROFS_NAME_LEN)."""


class Extent(NamedTuple):
    """`length` bytes of a file at `logical` lie in blob number `blob` at `physical`.

    `logical` and `physical` are multiples of BLOCK. Only a file's last extent may have
    a `length` that is no multiple of BLOCK. Ranges without an extent are holes.
    `blob` indexes the list of blobs that goes with the tree, from 0.
    """

    logical: int
    blob: int
    physical: int
    length: int


@dataclass(slots=True, eq=False)
class Inode:
    """One file of any type. Equality is identity: that is what makes hard links."""

    mode: int
    """File type and permission bits, as st_mode."""
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    """Nanoseconds since 1970, may be negative; seconds must fit 64 bits signed."""
    rdev: int = 0
    """Device number for character and block devices, as os.makedev gives it."""
    size: int = 0
    """Length in bytes of a regular file; 0 for others (a symlink's is len(target))."""
    target: bytes = b""
    """A symlink's target."""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    """Full names (b"user.x"); never overlay marks of ours."""
    extents: tuple[Extent, ...] = ()
    children: dict[bytes, Inode] | None = None
    """Entries of a directory (None for everything else). `.` and `..` are implied."""
    opaque: bool = False
    """A directory that hides what lower layers have under the same path."""

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_reg(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def is_whiteout(self) -> bool:
        """A character device 0:0 hides the name in lower layers (overlayfs's rule)."""
        return stat.S_ISCHR(self.mode) and self.rdev == 0


def directory(mode: int = 0o755, *, uid: int = 0, gid: int = 0, mtime_ns: int = 0) -> Inode:
    """A new empty directory with permission bits `mode`."""
    return Inode(stat.S_IFDIR | (mode & 0o7777), uid, gid, mtime_ns, children={})


def whiteout() -> Inode:
    """A new whiteout."""
    return Inode(stat.S_IFCHR)


def walk(root: Inode) -> Iterator[tuple[bytes, Inode]]:
    """Every (path, inode) below and including `root`, parents first, names sorted.

    The root's path is b""; others have no leading slash. A hard link is yielded once
    for each of its names. Iterative, so depth is not limited by Python's stack.
    """
    stack: list[tuple[bytes, Inode]] = [(b"", root)]
    while stack:
        path, inode = stack.pop()
        yield path, inode
        if inode.children is not None:
            prefix = path + b"/" if path else b""
            stack.extend(
                (prefix + name, inode.children[name])
                for name in sorted(inode.children, reverse=True)
            )
