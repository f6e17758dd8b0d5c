"""What differs between two trees: files added, removed, changed, and in which respect."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import NamedTuple

from dsecfs.layers.content import LayerContent, same_content
from dsecfs.layers.tree import Inode


class Change(NamedTuple):
    """One path that is not the same on both sides."""

    path: bytes
    what: str
    """added, removed or changed."""
    aspects: tuple[str, ...]
    """Of a changed one: type, content, target, device, mode, owner, mtime, xattrs, opaque."""
    old_size: int
    new_size: int


def diff_layers(old: LayerContent, new: LayerContent, *, times: bool = False) -> Iterator[Change]:
    """Changes from `old` to `new`, by path. `times` also tells of modification times.

    The layers are compared as they are: whiteouts are entries, hard links are files. Reads
    the store only where sizes are equal and chunks do not settle it. Raises what reading
    raises.
    """
    stack: list[tuple[bytes, Inode | None, Inode | None]] = [(b"", old.root, new.root)]
    while stack:
        path, a, b = stack.pop()
        if a is not None and b is not None:
            aspects = tuple(_aspects(old, a, new, b, times))
            if aspects:
                yield Change(path, "changed", aspects, a.size, b.size)
        elif a is not None:
            yield Change(path, "removed", (), a.size, 0)
        elif b is not None:
            yield Change(path, "added", (), 0, b.size)
        left = (a.children if a is not None else None) or {}
        right = (b.children if b is not None else None) or {}
        prefix = path + b"/" if path else b""
        stack.extend(
            (prefix + name, left.get(name), right.get(name))
            for name in sorted(left.keys() | right.keys(), reverse=True)
        )


def _aspects(
    old: LayerContent, a: Inode, new: LayerContent, b: Inode, times: bool
) -> Iterator[str]:
    if stat.S_IFMT(a.mode) != stat.S_IFMT(b.mode):
        yield "type"
        return
    if a.is_reg and not same_content(old, a, new, b):
        yield "content"
    if a.target != b.target:
        yield "target"
    if a.rdev != b.rdev:
        yield "device"
    if a.mode != b.mode:
        yield "mode"
    if (a.uid, a.gid) != (b.uid, b.gid):
        yield "owner"
    if times and a.mtime_ns != b.mtime_ns:
        yield "mtime"
    if a.xattrs != b.xattrs:
        yield "xattrs"
    if a.opaque != b.opaque:
        yield "opaque"
