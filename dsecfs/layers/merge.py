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


class _Merger(Generic[B]):
    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._root = directory()
        self._implied: set[Inode] = {self._root}
        self._links: dict[Inode, bytes] = {}
        self._blobs: dict[B, int] = {}

    def add(self, layer: LayerTree[B], what: str) -> None:
        """Put one more layer on top."""
        numbers = [self._blobs.setdefault(b, len(self._blobs)) for b in layer.blobs]
        # Links mean files as they were below this layer: find them before anything changes.
        copies = {node: self._link(layer, node, path, what) for node, path in layer.links.items()}
        late: list[tuple[bytes, Inode]] = []
        self._merge(b"", self._root, layer.root, layer, numbers, copies, late, what)
        # Last what the layer put behind symbolic links of lower layers.
        for path, source in late:
            into = follow(
                self._root, path.split(b"/"), lambda p=path: f"{what}: {show(p)!r}", make=self._imply  # type: ignore[misc]
            )
            assert into is not None
            rest: list[tuple[bytes, Inode]] = []
            self._merge(path, into, source, layer, numbers, copies, rest, what)
            late.extend(rest)

    def _merge(
        self,
        top: bytes,
        target: Inode,
        source: Inode,
        layer: LayerTree[B],
        numbers: list[int],
        copies: dict[Inode, Inode],
        late: list[tuple[bytes, Inode]],
        what: str,
    ) -> None:
        """Merge the directory `source` of `layer` into `target`, which is found at `top`."""
        todo = [(top, target, source)]
        while todo:
            path, into, of = todo.pop()
            assert into.children is not None and of.children is not None
            if of not in layer.implied:
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
                    copy = copies.get(child)
                    if copy is None:
                        copy = copies[child] = self._copy(child, numbers, what)
                    into.children[name] = copy
                elif old is not None and old.is_dir:
                    todo.append((prefix + name, old, child))
                elif old is not None and old.is_symlink and child in layer.implied and not child.opaque:
                    late.append((prefix + name, child))
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

    def _copy(self, inode: Inode, numbers: list[int], what: str) -> Inode:
        try:
            extents = tuple(
                Extent(e.logical, numbers[e.blob], e.physical, e.length) for e in inode.extents
            )
        except IndexError:
            raise FormatError(f"{what}: a file lies in a blob that the layer does not have") from None
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


def hidden(layers: Sequence[LayerTree[B]]) -> Iterator[tuple[bytes, int, int]]:
    """Files that a layer hides from another: (path, index of the hiding layer, of the hidden).

    One item for every non-directory of a lower layer that does not show, with the nearest
    layer above that replaces, removes or covers it. Sorted by path within a directory.
    """
    todo = [(b"", [(i, layers[i].root) for i in range(len(layers) - 1, -1, -1)])]
    while todo:
        path, entries = todo.pop()
        hider: int | None = None
        shown: list[tuple[int, Inode]] = []
        last = 0
        for i, inode in entries:
            if not inode.is_dir and shown and hider is None:
                hider = last
            if hider is not None:
                for below, file in walk(inode):
                    if not file.is_dir and not file.is_whiteout:
                        yield (path + b"/" + below if below else path), hider, i
            else:
                shown.append((i, inode))
                last = i
            if not inode.is_dir or inode.opaque:
                hider = i
        shown = [(i, inode) for i, inode in shown if inode.is_dir]
        if len(shown) < 2:
            continue
        names = sorted({n for _, d in shown for n in d.children or ()}, reverse=True)
        prefix = path + b"/" if path else b""
        for name in names:
            todo.append(
                (prefix + name, [(i, d.children[name]) for i, d in shown if d.children and name in d.children])
            )
