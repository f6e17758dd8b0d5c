"""Several trees become one, as overlayfs would show them; and who provides or hides what.

What must hold:
- the result of `merge` is what overlayfs shows for the same layers (or, with whiteouts kept,
  can stand in their place between others): nearest to the top wins, a whiteout hides, an
  opaque directory hides what is under it, directories merge and take the upper's attributes,
  everything else replaces (Documentation/filesystems/overlayfs.rst, "Upper and Lower");
- inputs are not changed and share no `Inode` with the result;
- a hard link stays one `Inode`, within a layer and to lower layers (`SourceTree.links`).
"""

from __future__ import annotations

import stat
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from dsecfs.errors import BadInput, FormatError
from dsecfs.layers.sources.base import SourceTree, show
from dsecfs.layers.sources.build import follow
from dsecfs.layers.tree import Extent, Inode, directory, walk, whiteout

B = TypeVar("B", bound=Hashable)


@dataclass(frozen=True, slots=True)
class LayerTree(Generic[B]):
    """A tree and the blobs that its extents index. For the last two see `SourceTree`."""

    root: Inode
    blobs: Sequence[B]
    implied: frozenset[Inode] = frozenset()
    links: Mapping[Inode, bytes] = field(default_factory=dict)

    @staticmethod
    def of(tree: SourceTree, blobs: Sequence[B]) -> LayerTree[B]:
        """What a source found, with the blobs its sink made."""
        return LayerTree(tree.root, blobs, tree.implied, tree.links)


def merge(layers: Sequence[LayerTree[B]], *, keep_whiteouts: bool = False) -> LayerTree[B]:
    """One tree that shows what `layers` (bottom first) show together.

    The blob list has every blob once that the tree refers to, in the order of the layers.
    With `keep_whiteouts` the result can replace consecutive layers that do not start at the
    base: whiteouts and opaque marks stay where they may hide something further down, and so
    do links whose target is not among `layers`. Without it there are none left.

    Raises BadInput for a link to a file that no lower layer has, UnsafeArchive for loops of
    symbolic links on the way to a directory, FormatError for an extent without a blob.
    """
    merger: _Merger[B] = _Merger(keep_whiteouts)
    for number, layer in enumerate(layers):
        merger.add(layer, f"layer {number + 1} of {len(layers)}")
    return merger.result()


@dataclass(slots=True)
class _Source:
    """A layer while it is put on top of the others."""

    what: str
    implied: frozenset[Inode]
    numbers: list[int]
    """Its blob numbers -> those of the result."""
    copies: dict[Inode, Inode]
    """Its files -> those of the result: what keeps hard links together."""
    late: list[tuple[bytes, Inode]]
    """Directories to be merged behind a symbolic link of a lower layer."""


class _Merger(Generic[B]):
    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._root = directory()
        self._implied: set[Inode] = {self._root}
        self._links: dict[Inode, bytes] = {}
        self._blobs: dict[B, int] = {}

    def add(self, layer: LayerTree[B], what: str) -> None:
        """Put one more layer on top."""
        # Links mean files as they were below this layer: find them before anything changes.
        source = _Source(
            what,
            layer.implied,
            [self._blobs.setdefault(b, len(self._blobs)) for b in layer.blobs],
            {node: self._link(layer, node, path, what) for node, path in layer.links.items()},
            [],
        )
        self._merge(b"", self._root, layer.root, source)
        # Merging one directory may find more of them.
        while source.late:
            path, of = source.late.pop(0)
            label = partial(_label, what, path)
            into = follow(self._root, path.split(b"/"), label, make=self._imply)
            assert into is not None
            self._merge(path, into, of, source)

    def _merge(self, top: bytes, target: Inode, upper: Inode, source: _Source) -> None:
        """Merge a directory of a layer into `target`, which is found at `top`."""
        todo = [(top, target, upper)]
        while todo:
            path, into, of = todo.pop()
            assert into.children is not None and of.children is not None
            if of not in source.implied:
                into.mode, into.uid, into.gid = of.mode, of.uid, of.gid
                into.mtime_ns, into.xattrs = of.mtime_ns, dict(of.xattrs)
                self._implied.discard(into)
            if of.opaque:
                into.children.clear()
                into.opaque = self._keep
            prefix = path + b"/" if path else b""
            for name, child in of.children.items():
                old = into.children.get(name)
                if child.is_whiteout:
                    if self._keep:
                        into.children[name] = whiteout()
                    else:
                        into.children.pop(name, None)
                elif not child.is_dir:
                    copy = source.copies.get(child)
                    if copy is None:
                        copy = source.copies[child] = self._copy(child, source)
                    into.children[name] = copy
                elif old is not None and old.is_dir:
                    todo.append((prefix + name, old, child))
                elif (
                    old is not None
                    and old.is_symlink
                    and child in source.implied
                    and not child.opaque
                ):
                    source.late.append((prefix + name, child))
                else:
                    todo.append((prefix + name, self._imply(into, name), child))

    def _imply(self, parent: Inode, name: bytes) -> Inode:
        """A new directory in the result; it hides what is further down if it replaces."""
        assert parent.children is not None
        new = directory()
        new.opaque = self._keep and name in parent.children
        parent.children[name] = new
        self._implied.add(new)
        return new

    def _copy(self, inode: Inode, source: _Source) -> Inode:
        try:
            extents = tuple(
                Extent(e.logical, source.numbers[e.blob], e.physical, e.length)
                for e in inode.extents
            )
        except IndexError:
            raise FormatError(
                f"{source.what}: a file lies in a blob that the layer does not have"
            ) from None
        return Inode(
            inode.mode,
            inode.uid,
            inode.gid,
            inode.mtime_ns,
            inode.rdev,
            inode.size,
            inode.target,
            dict(inode.xattrs),
            extents,
        )

    def _link(self, layer: LayerTree[B], node: Inode, path: bytes, what: str) -> Inode:
        """The file that a link to lower layers means: an inode of the result so far."""
        parts = [p for p in path.split(b"/") if p and p != b"."]
        parent = follow(self._root, parts[:-1], lambda: f"{what}: hard link to {show(path)!r}")
        found = (parent.children or {}).get(parts[-1]) if parent and parts else None
        if found is not None and not found.is_dir and not found.is_whiteout:
            return found
        if self._keep and found is None:
            kept = Inode(stat.S_IFREG)
            self._links[kept] = path
            return kept
        where = next((p for p, inode in walk(layer.root) if inode is node), b"")
        raise BadInput(
            f"{what}: entry {show(where)!r}: hard link to {show(path)!r}, which no lower layer has"
        )

    def result(self) -> LayerTree[B]:
        """Drop what nothing refers to any more and number the blobs anew."""
        inodes: set[Inode] = set()
        todo = [(self._root, False)]
        while todo:
            inode, pure = todo.pop()
            inodes.add(inode)
            if inode.children is None:
                continue
            if pure:
                inode.opaque = False
            elif inode.opaque:
                pure = True
            if pure:
                # Nothing lower shows through here. overlayfs would list such whiteouts.
                for name in [n for n, c in inode.children.items() if c.is_whiteout]:
                    del inode.children[name]
            todo.extend((child, pure) for child in inode.children.values())
        used = {e.blob for inode in inodes for e in inode.extents}
        blobs = [b for b, number in self._blobs.items() if number in used]
        renumber = {old: new for new, old in enumerate(sorted(used))}
        if any(old != new for old, new in renumber.items()):
            for inode in inodes:
                inode.extents = tuple(e._replace(blob=renumber[e.blob]) for e in inode.extents)
        return LayerTree(
            self._root,
            blobs,
            frozenset(d for d in self._implied if d in inodes),
            {node: path for node, path in self._links.items() if node in inodes},
        )


def _label(what: str, path: bytes) -> str:
    return f"{what}: {show(path)!r}"


def provider(layers: Sequence[LayerTree[B]], path: bytes) -> int | None:
    """The index (bottom is 0) of the layer whose file stands at `path`, None if nothing does.

    Symbolic links are not followed. A directory is provided by the highest layer that names
    it, since that one gives its attributes.
    """
    level = [(i, layers[i].root) for i in range(len(layers) - 1, -1, -1)]
    level = _visible(level)
    for name in (p for p in path.split(b"/") if p and p != b"."):
        below = [(i, d.children[name]) for i, d in level if d.children and name in d.children]
        level = _visible(below)
    for i, inode in level:
        if inode not in layers[i].implied:
            return i
    return level[0][0] if level else None


def _visible(entries: list[tuple[int, Inode]]) -> list[tuple[int, Inode]]:
    """What shows of entries of one name, highest first: one file, or directories to merge."""
    shown: list[tuple[int, Inode]] = []
    for i, inode in entries:
        if inode.is_whiteout or (shown and not inode.is_dir):
            break
        shown.append((i, inode))
        if not inode.is_dir or inode.opaque:
            break
    return shown


class _Shown:
    """A file that shows so far, and the layer that provides it."""

    __slots__ = ("children", "layer")

    def __init__(self, layer: int, is_dir: bool) -> None:
        self.layer = layer
        self.children: dict[bytes, _Shown] | None = {} if is_dir else None

    def files(self, path: bytes) -> Iterator[tuple[bytes, int]]:
        """(path, layer) of every non-directory from here down, in the order of names."""
        todo = [(path, self)]
        while todo:
            path, node = todo.pop()
            if node.children is None:
                yield path, node.layer
                continue
            prefix = path + b"/" if path else b""
            todo.extend(
                (prefix + name, node.children[name]) for name in sorted(node.children, reverse=True)
            )


def hidden(layers: Sequence[LayerTree[B]]) -> Iterator[tuple[bytes, int, int]]:
    """Files that a layer hides from another: (path, index of the hiding layer, of the hidden).

    One item for every non-directory of a lower layer that does not show in the whole, with
    the lowest layer above it that replaces, removes or covers it. Ordered by hiding layer.
    """
    top = _Shown(0, True)
    for number, layer in enumerate(layers):
        todo = [(b"", top, layer.root)]
        while todo:
            path, shown, inode = todo.pop()
            below = shown.children
            assert below is not None
            prefix = path + b"/" if path else b""
            if inode.opaque:
                for file, lower in shown.files(path):
                    yield file, number, lower
                below.clear()
            entries = inode.children or {}
            for name in sorted(entries, reverse=True):
                child, old = entries[name], below.get(name)
                if old is not None and not (child.is_dir and old.children is not None):
                    for file, lower in old.files(prefix + name):
                        yield file, number, lower
                    old = None
                if child.is_whiteout:
                    below.pop(name, None)
                    continue
                if old is None:
                    below[name] = old = _Shown(number, child.is_dir)
                if child.is_dir:
                    todo.append((prefix + name, old, child))
