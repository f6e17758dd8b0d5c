"""From a tree to the list of inodes an image will hold, in the order they are stored.

Owns the checks of a tree from outside: after `collect`, every name, number and target fits
the format. What must hold: the order depends on names only (never on the insertion order
of a dict), the root comes first, a directory is followed by its files and then by its
subdirectories: what `ls -l` reads lies together.
"""

from __future__ import annotations

import bisect
import stat
from collections.abc import Sequence

from dsecfs.errors import BadInput
from dsecfs.layers.erofs import format as f
from dsecfs.layers.erofs.chunks import plan_chunks
from dsecfs.layers.sources.base import show
from dsecfs.layers.tree import NAME_MAX, Inode

_ID_MAX = 0xFFFFFFFE
"""Linux keeps uid and gid 2^32-1 for "no such id"."""

_SHOWN = 200
"""Bytes of a path in a message."""

_TIME_END = (1 << 63) * 1_000_000_000


class Node:
    """An inode on its way into an image."""

    __slots__ = (
        "blocks",
        "compact",
        "ftype",
        "head",
        "info",
        "inode",
        "layout",
        "name",
        "names",
        "nlink",
        "nodes",
        "parent",
        "path_len",
        "pos",
        "size",
        "start",
        "tail",
        "tail_len",
        "xattrs",
    )

    def __init__(self, inode: Inode, parent: Node | None, name: bytes) -> None:
        self.inode = inode
        self.parent = parent
        self.name = name
        self.path_len = 0
        self.nlink = 1
        self.ftype = f.FT_OF.get(stat.S_IFMT(inode.mode), 0)
        self.names: Sequence[bytes] = ()
        """A directory's names in the kernel's order (bytes), `.` and `..` included."""
        self.nodes: Sequence[Node] = ()
        """What they name."""
        self.blocks: Sequence[int] = ()
        """How many entries lie in each of a directory's blocks."""
        self.xattrs = b""
        """The whole attribute body."""
        self.layout = f.FLAT_PLAIN
        self.info = 0
        """i_u, unless it is the address of data."""
        self.size = 0
        """i_size."""
        self.tail = b""
        """What follows inode and attributes: chunk indexes or a symlink's target."""
        self.tail_len = 0
        """Its length; for a directory the bytes used in its last block."""
        self.start = -1
        """First block of a directory's or symlink's data that is not inline; -1: none."""
        self.head = 0
        """Bytes of inode and attributes."""
        self.compact = False
        self.pos = 0
        """Where the inode lies; its nid times 32."""

    @property
    def path(self) -> str:
        """For people: the end of the first path by which the inode was reached."""
        names = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            names.append(node.name)
            node = node.parent
        path = b"/" + b"/".join(reversed(names))
        return show(path) if len(path) <= _SHOWN else f"…{show(path[-_SHOWN:])}"

    def bad(self, why: str, hint: str = "") -> BadInput:
        return BadInput(f"cannot store {self.path} in a layer: {why}", hint=hint)


def collect(root: Inode, devices: Sequence[f.Device]) -> list[Node]:
    """Every inode below `root` once, checked, links counted.

    Raises BadInput that names the path for anything the format or the kernel cannot hold,
    and for a directory that is reached twice (a cycle or a hard link).
    """
    top = Node(root, None, b"")
    _prepare(top, devices)
    if root.children is None:
        raise top.bad("the root of a tree must be a directory")
    seen = {root: top}
    found: list[Node] = []
    stack = [top]
    while stack:
        here = stack.pop()
        found.append(here)
        children = here.inode.children
        assert children is not None
        names = sorted(children)
        nodes: list[Node] = []
        below: list[Node] = []
        here.nlink = 2
        for name in names:
            child = children[name]
            node = seen.get(child)
            if node is None:
                node = Node(child, here, name)
                _check_name(node)
                seen[child] = node
                _prepare(node, devices)
                if child.children is None:
                    found.append(node)
                else:
                    below.append(node)
                    here.nlink += 1
            elif child.children is not None:
                raise Node(child, here, name).bad(
                    f"the directory is also {node.path}; directories have one name"
                )
            else:
                _check_name(Node(child, here, name))
                node.nlink += 1
            nodes.append(node)
        for dot, node in ((b".", here), (b"..", here.parent or here)):
            place = bisect.bisect(names, dot)
            names.insert(place, dot)
            nodes.insert(place, node)
        here.names = names
        here.nodes = nodes
        below.reverse()
        stack.extend(below)
    return found


def _check_name(node: Node) -> None:
    name = node.name
    if not 1 <= len(name) <= NAME_MAX:
        raise node.bad(f"a name of {len(name)} bytes", f"names have 1 to {NAME_MAX} bytes")
    if name == b"." or name == b".." or b"/" in name or b"\0" in name:
        raise node.bad(f"{name!r} is not a file name")
    assert node.parent is not None
    node.path_len = node.parent.path_len + 1 + len(name)
    if node.path_len > f.PATH_LIMIT:
        raise node.bad(f"its path is longer than {f.PATH_LIMIT} bytes")


def _prepare(node: Node, devices: Sequence[f.Device]) -> None:
    """Check one inode's own fields; plan the data of everything but directories."""
    inode = node.inode
    if not node.ftype or inode.mode >> 16:
        raise node.bad(f"mode {inode.mode:o} has no known file type")
    if not 0 <= inode.uid <= _ID_MAX or not 0 <= inode.gid <= _ID_MAX:
        raise node.bad(f"owner {inode.uid}:{inode.gid} does not fit 32 bits")
    if not -_TIME_END <= inode.mtime_ns < _TIME_END:
        raise node.bad(f"a time of {inode.mtime_ns} ns does not fit 64 bits of seconds")
    kind = stat.S_IFMT(inode.mode)
    if (inode.children is not None) != (kind == stat.S_IFDIR):
        raise node.bad("only a directory has entries")
    if inode.opaque and inode.children is None:
        raise node.bad("only a directory can be opaque")
    if kind == stat.S_IFREG:
        if not 0 <= inode.size <= f.SIZE_MAX:
            raise node.bad(f"a size of {inode.size} bytes does not fit 63 bits")
        if inode.size:
            node.layout = f.CHUNK_BASED
            node.size = inode.size
            node.info, node.tail = plan_chunks(inode.size, inode.extents, devices, node.bad)
            node.tail_len = len(node.tail)
            return
    if inode.extents:
        raise node.bad("only a regular file with a size has data")
    if kind == stat.S_IFLNK:
        target = inode.target
        if not 1 <= len(target) <= f.SYMLINK_MAX or b"\0" in target:
            raise node.bad(
                f"a symlink's target of {len(target)} bytes",
                f"targets have 1 to {f.SYMLINK_MAX} bytes, none of them NUL",
            )
        node.layout = f.FLAT_INLINE
        node.tail = target
        node.size = node.tail_len = len(target)
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        rdev = f.encode_rdev(inode.rdev)
        if rdev is None:
            raise node.bad(f"device number {inode.rdev:#x} does not fit 12 + 20 bits")
        node.info = rdev
