"""Puts entries of a foreign archive into a tree, the way extracting into a chroot would.

What must hold: symbolic links are followed in the model alone, never outside the root, at
most MAX_LINKS of them for one path; a later entry replaces an earlier one, except that a
directory over a directory only changes its attributes; the order of whiteouts and entries
in one layer does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsecfs.errors import BadInput, UnsafeArchive
from dsecfs.layers.sources.base import Limits, show, split_path
from dsecfs.layers.tree import NAME_MAX, Inode, directory, whiteout

MAX_LINKS = 40
"""Symbolic links followed for one path before it counts as a loop (Linux MAXSYMLINKS)."""

MAX_STEPS = 8192
"""Components walked for one path, those of links on the way included: twice what PATH_MAX
holds. Without it a few hundred bytes of an archive could cost 80,000 steps each."""

_KNOWN = 16384
_KNOWN_PATH = 1024
"""How many parents are remembered, and how long their paths may be: 16 MiB at most."""


def follow(
    root: Inode,
    parts: Sequence[bytes],
    label: Callable[[], str],
    *,
    make: Callable[[Inode, bytes], Inode] | None = None,
    depth: int = 4096,
) -> Inode | None:
    """The directory that `parts` lead to, symbolic links resolved as in a chroot.

    A missing component (or a whiteout) is made by `make(parent, name)`; without `make` the
    answer is None, also where a component is no directory. With `make` that is BadInput.
    Raises UnsafeArchive for loops and beyond `depth`.
    """
    todo = list(reversed(parts))
    stack = [root]
    links = 0
    steps = len(todo)
    while todo:
        part = todo.pop()
        if not part or part == b".":
            continue
        if part == b"..":
            if len(stack) > 1:
                stack.pop()
            continue
        children = stack[-1].children
        assert children is not None
        child = children.get(part)
        if child is None or child.is_whiteout:
            if make is None:
                return None
            child = make(stack[-1], part)
        if child.is_dir:
            stack.append(child)
            if len(stack) > depth:
                raise UnsafeArchive(f"{label()}: deeper than {depth} directories")
        elif child.is_symlink:
            links += 1
            if links > MAX_LINKS:
                raise UnsafeArchive(
                    f"{label()}: more than {MAX_LINKS} symbolic links on the way to it (a loop?)"
                )
            if child.target.startswith(b"/"):
                del stack[1:]
            steps += child.target.count(b"/") + 1
            if steps > MAX_STEPS:
                raise UnsafeArchive(
                    f"{label()}: symbolic links on the way to it have more than {MAX_STEPS} "
                    "components"
                )
            todo.extend(reversed(child.target.split(b"/")))
        elif make is not None:
            raise BadInput(f"{label()}: {show(part)!r} on the way to it is not a directory")
        else:
            return None
    return stack[-1]


class TreeBuilder:
    """A tree under construction. `label` names the current entry in messages."""

    def __init__(self, limits: Limits, label: Callable[[], str]) -> None:
        self.root = directory()
        self.implied: set[Inode] = {self.root}
        self._limits = limits
        self._label = label
        self._entries = 0
        self._metadata = 0
        # Parents by their path as the archive writes it. Forgotten when a directory or
        # link that may be on the way to one is replaced.
        self._known: dict[bytes, Inode] = {}

    def place(self, path: bytes, inode: Inode) -> None:
        """Put `inode` under `path`, replacing what is there."""
        self._charge(path, inode)
        parent, name = self.parent(path)
        if not name:
            if not inode.is_dir:
                raise BadInput(f"{self._label()}: the root must be a directory")
            self._update(self.root, inode)
            return
        assert parent.children is not None
        old = parent.children.get(name)
        if old is not None:
            if old.is_dir and inode.is_dir:
                self._update(old, inode)
                return
            if inode.is_dir and old.is_whiteout:
                inode.opaque = True
            if old.is_dir or old.is_symlink:
                self._known.clear()
        parent.children[name] = inode

    def place_whiteout(self, path: bytes) -> None:
        """Hide `path` of lower layers. An entry of this layer with that name stays."""
        mark = whiteout()
        self._charge(path, mark)
        parent, name = self.parent(path)
        assert parent.children is not None
        old = parent.children.setdefault(name, mark)
        if old.is_dir:
            old.opaque = True

    def directory(self, path: bytes) -> Inode:
        """The directory under `path`, symbolic links followed, made if missing."""
        return self._make_all(split_path(path, self._limits, self._label()))

    def find(self, path: bytes) -> Inode | None:
        """What stands under `path`; the last component is not followed. Makes nothing."""
        parts = split_path(path, self._limits, self._label())
        if not parts:
            return self.root
        parent = follow(self.root, parts[:-1], self._label)
        return None if parent is None or parent.children is None else parent.children.get(parts[-1])

    def parent(self, path: bytes) -> tuple[Inode, bytes]:
        """The directory `path` lies in (made if missing), and its last component.

        The root gives itself and b"".
        """
        head, _, name = path.rstrip(b"/").rpartition(b"/")
        plain = name not in (b"", b".", b"..") and len(name) <= NAME_MAX and b"\0" not in name
        if plain and (known := self._known.get(head)) is not None:
            return known, name
        parts = split_path(path, self._limits, self._label())
        if not parts:
            return self.root, b""
        found = self._make_all(parts[:-1])
        if plain and len(head) <= _KNOWN_PATH:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[head] = found
        return found, parts[-1]

    def _make_all(self, parts: list[bytes]) -> Inode:
        found = follow(self.root, parts, self._label, make=self._imply, depth=self._limits.depth)
        assert found is not None
        return found

    def _imply(self, parent: Inode, name: bytes) -> Inode:
        """A directory that no entry has named so far."""
        assert parent.children is not None
        if len(name) > NAME_MAX:  # from a symbolic link; entries' names are checked
            raise BadInput(
                f"{self._label()}: a link on the way to it has a name of {len(name)} bytes"
            )
        new = directory()
        self._charge(name, new)
        new.opaque = name in parent.children  # as a whiteout, or we would not be here
        self.implied.add(new)
        parent.children[name] = new
        return new

    def _update(self, old: Inode, new: Inode) -> None:
        old.mode, old.uid, old.gid = new.mode, new.uid, new.gid
        old.mtime_ns, old.xattrs = new.mtime_ns, new.xattrs
        self.implied.discard(old)

    def _charge(self, path: bytes, inode: Inode) -> None:
        """Count an entry: its last name, its link target, its attributes."""
        self._entries += 1
        if self._entries > self._limits.entries:
            raise UnsafeArchive(f"{self._label()}: more than {self._limits.entries} entries")
        self._metadata += min(len(path), NAME_MAX) + len(inode.target)
        for key, value in inode.xattrs.items():
            self._metadata += len(key) + len(value)
        if self._metadata > self._limits.metadata:
            raise UnsafeArchive(
                f"{self._label()}: more than {self._limits.metadata} bytes of names and attributes"
            )
