"""Composed trees: several layers shown as one, in Python (the mount mode without overlayfs).

`MergedTree` is the merge, without FUSE; `TreeSpace` adds file data. The rules are those of
overlayfs (Documentation/filesystems/overlayfs.rst): the topmost layer that has a name
decides; a whiteout hides it below; directories merge until one is opaque or something
that is no directory lies underneath.

Nodes are numbers that follow from the layers alone, so that any worker understands the
numbers another one gave to the kernel:

    layer << 28 | nid        layer counted from the bottom, nid as in the layer's image

A merged directory is named by its topmost part. A directory has one path in its layer, so
the parts below it can be found again: up by `..` to the layer's root, then down by names.

run/trees/<id>.json describes a tree: its layers, and the range of ids its owners are shifted
to, if any (owners.py). The merge is the same for every range and is shared. A tree with shifted
owners is made to be a container's lower; one without is shown as it is, and so has the names
of escaped attributes that overlayfs would show.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dsecfs.errors import BadInput, FormatError, NotFound
from dsecfs.fuse.blobs import Blob
from dsecfs.fuse.owners import Owners
from dsecfs.fuse.spaces import FOREVER, Attributes, Bounded, Data, DirEntry
from dsecfs.layers.digest import Digest, parse_digest
from dsecfs.layers.erofs.format import overlay_shows
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.tree import Extent

NID_BITS = 28
NID_MASK = (1 << NID_BITS) - 1
MAX_LAYERS = 500
MAX_DEPTH = 2048
"""Directories above each other; a path of PATH_MAX has fewer."""

TREE_FORMAT = 2
TREE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")

_KEPT_DIRECTORIES = 16384
_KEPT_ENTRIES = 200_000
_KEPT_NAMES = 100_000
_PATIENCE = 4
_BYTES_A_LOOKUP = 512
"""All names of a directory are read once, for quick lookups, when PATIENCE names were looked up
and one more for each so many bytes of its size: then that is the smaller part of the work."""
_KEPT_FILES = 16384

Parts = tuple[tuple[int, int], ...]
"""(layer, nid) of the directories that are merged, topmost first."""


class MergedTree:
    """Images merged. All calls are quick, deterministic and bounded by the images' size."""

    def __init__(self, images: Sequence[ErofsImage]) -> None:
        """`images` from top to bottom; at least one."""
        if not 0 < len(images) <= MAX_LAYERS:
            raise BadInput(
                f"a tree of {len(images)} layers", hint=f"1 to {MAX_LAYERS} can be merged"
            )
        self._images = tuple(reversed(images))
        self._parts: Bounded[int, Parts] = Bounded(_KEPT_DIRECTORIES)
        self._above: Bounded[int, tuple[int, bytes]] = Bounded(_KEPT_DIRECTORIES)
        self._listings: Bounded[int, tuple[tuple[bytes, int], ...]] = Bounded(
            _KEPT_ENTRIES, lambda entries: len(entries) + 4
        )
        self._by_name: Bounded[int, Mapping[bytes, int]] = Bounded(
            _KEPT_NAMES, lambda names: len(names) + 4
        )
        self._patience: Bounded[int, int] = Bounded(_KEPT_DIRECTORIES)
        parts: list[tuple[int, int]] = []
        for layer in range(len(self._images) - 1, -1, -1):
            image = self._images[layer]
            parts.append((layer, image.root_nid))
            if image.is_opaque(image.root_nid):
                break
        self._root_parts = tuple(parts)
        self.root = self._node(*parts[0])
        """The node of the tree's root."""

    @property
    def layers(self) -> int:
        return len(self._images)

    @property
    def inodes(self) -> int:
        """Inodes of all layers, hidden ones included; for statfs."""
        return sum(image.inode_count for image in self._images)

    def image(self, layer: int) -> ErofsImage:
        """The image of a layer, counted from the bottom. NotFound if there is none."""
        if layer >= len(self._images):
            raise NotFound(f"tree has no layer {layer}")
        return self._images[layer]

    def split(self, node: int) -> tuple[ErofsImage, int, int]:
        """(image, layer, nid) of a node."""
        layer = node >> NID_BITS
        return self.image(layer), layer, node & NID_MASK

    def _node(self, layer: int, nid: int) -> int:
        if nid > NID_MASK:
            raise FormatError(f"{self._images[layer].name}: inode number {nid} is too large")
        return layer << NID_BITS | nid

    def lookup(self, node: int, name: bytes) -> int | None:
        """What directory `node` has under `name`, None if nothing."""
        names = self._by_name.use(node)
        if names is not None:
            return names.get(name)
        parts = self._parts_of(node)
        left = self._patience.get(node)
        if left is None:
            size = sum(self._images[layer].stat(nid).size for layer, nid in parts)
            left = _PATIENCE + size // _BYTES_A_LOOKUP
        if not left:
            return self._by_name.keep(node, dict(self.entries(node))).get(name)
        self._patience.keep(node, left - 1)
        found, is_dir = self._descend(parts, name)
        if not found:
            return None
        child = self._node(*found[0])
        if is_dir:
            self._parts.keep(child, found)
        return child

    def entries(self, node: int) -> tuple[tuple[bytes, int], ...]:
        """(name, node) of everything directory `node` shows, sorted by name."""
        kept = self._listings.use(node)
        if kept is not None:
            return kept
        parts = self._parts_of(node)
        seen: dict[bytes, int] = {}
        for layer, nid in parts:
            image = self._images[layer]
            for name, child, kind in image.entries(nid):
                if name not in seen:
                    hidden = kind == stat.S_IFCHR and _is_whiteout(image, child)
                    seen[name] = -1 if hidden else self._node(layer, child)
                    if kind == stat.S_IFDIR:
                        self._above.keep(seen[name], (node, name))
        listing = tuple(sorted((name, child) for name, child in seen.items() if child >= 0))
        return self._listings.keep(node, listing)

    def attributes(self, node: int) -> Attributes:
        """What stat shows. A merged directory has one link, as in overlayfs."""
        image, _, nid = self.split(node)
        info = image.stat(nid)
        nlink = info.nlink
        if stat.S_ISDIR(info.mode) and len(self._parts_of(node)) > 1:
            nlink = 1
        return Attributes(
            info.mode, info.size, nlink, info.uid, info.gid, info.rdev, info.mtime_ns
        )

    def readlink(self, node: int) -> bytes:
        image, _, nid = self.split(node)
        return image.readlink(nid)

    def xattrs(self, node: int) -> dict[bytes, bytes]:
        image, _, nid = self.split(node)
        return image.xattrs(nid)

    def parts(self, node: int) -> Parts:
        """The directories that make up directory `node`, topmost first."""
        return self._parts_of(node)

    def _descend(self, parts: Parts, name: bytes) -> tuple[Parts, bool]:
        """One step down: what `name` is made of (() for nothing), and if it is a directory."""
        found: list[tuple[int, int]] = []
        for layer, nid in parts:
            image = self._images[layer]
            child = image.lookup(nid, name)
            if child is None:
                continue
            info = image.stat(child)
            if not stat.S_ISDIR(info.mode):
                if found:
                    break
                hidden = stat.S_ISCHR(info.mode) and info.rdev == 0
                return () if hidden else ((layer, child),), False
            found.append((layer, child))
            if image.is_opaque(child):
                break
        return tuple(found), True

    def _parts_of(self, node: int) -> Parts:
        below: list[bytes] = []
        """Names from a directory whose parts are known down to `node`."""
        at = node
        while True:
            parts = self._root_parts if at == self.root else self._parts.use(at)
            if parts is not None:
                break
            above = self._above.use(at)
            if above is None or len(below) >= MAX_DEPTH:
                below += reversed(self._names(at))
                parts = self._root_parts
                break
            at = above[0]
            below.append(above[1])
        if not below:
            return parts
        for name in reversed(below):
            parts, is_dir = self._descend(parts, name)
            if not is_dir or not parts:
                raise NotFound("a directory that the tree does not show")
        if self._node(*parts[0]) != node:
            raise NotFound("a directory that the tree does not show")
        return self._parts.keep(node, parts)

    def _names(self, node: int) -> list[bytes]:
        """The path of a directory in its own layer."""
        image, _, nid = self.split(node)
        names: list[bytes] = []
        while nid != image.root_nid:
            parent = image.lookup(nid, b"..")
            if parent is None or len(names) >= MAX_DEPTH:
                raise FormatError(f"{image.name}: directory {nid} has no way to the root")
            for name, child, kind in image.entries(parent):
                if child == nid and kind == stat.S_IFDIR:
                    names.append(name)
                    break
            else:
                raise FormatError(f"{image.name}: directory {nid} is not in its parent")
            nid = parent
        return names[::-1]


def _is_whiteout(image: ErofsImage, nid: int) -> bool:
    info = image.stat(nid)
    return stat.S_ISCHR(info.mode) and info.rdev == 0


class TreeSpec(NamedTuple):
    """What a tree is made of."""

    layers: tuple[Digest, ...]
    """Bottom to top."""
    owners: Owners | None = None
    """What owners are shifted to; None shows them as they are. A shifted tree is the lower of
    an overlay."""

    def check(self) -> None:
        """Raises ValueError."""
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise ValueError(f"{len(self.layers)} layers; 1 to {MAX_LAYERS} can be merged")
        if self.owners is not None and not self.owners.valid:
            raise ValueError("its range of owners is no range of ids")


def read_tree(trees: Path, name: str) -> TreeSpec:
    """What run/trees/<name>.json says. NotFound or FormatError."""
    if not TREE_ID.match(name):
        raise NotFound(f"no tree {name[:80]!r}")
    path = trees / f"{name}.json"
    try:
        value = json.loads(path.read_bytes())
        if value["format"] != TREE_FORMAT:
            raise ValueError(f"format {value['format']!r} is not known")
        layers = tuple(parse_digest(layer) for layer in value["layers"])
        shift = value["owners"]
        owners = None if shift is None else Owners(int(shift["start"]), int(shift["count"]))
        spec = TreeSpec(layers, owners)
        spec.check()
    except FileNotFoundError:
        raise NotFound(f"no tree {name}") from None
    except (ValueError, KeyError, TypeError, AttributeError, BadInput) as e:
        raise FormatError(f"tree {path}: {e}") from None
    return spec


def write_tree(
    trees: Path, name: str, layers: Sequence[Digest], owners: Owners | None = None
) -> None:
    """Describe a composed tree, so that `trees/<name>` exists. `layers` bottom to top."""
    spec = TreeSpec(tuple(layers), owners)
    try:
        if not TREE_ID.match(name):
            raise ValueError("not a name of a tree")
        spec.check()
    except ValueError as e:
        raise BadInput(f"tree {name[:80]!r} cannot be described: {e}") from None
    shift = None if owners is None else {"start": owners.start, "count": owners.count}
    content = {"format": TREE_FORMAT, "layers": list(layers), "owners": shift}
    trees.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = trees / f".{name}.{os.getpid()}.{threading.get_native_id()}"
    temporary.write_text(json.dumps(content))
    temporary.replace(trees / f"{name}.json")


class _Carried:
    """A blob whose bytes follow the metadata in the image's own file."""

    def __init__(self, image: ErofsImage, device: int) -> None:
        self._image = image
        self._device = device
        self.size = image.devices[device].size

    def read_nowait(self, offset: int, size: int) -> Data | None:
        return self._image.carried(self._device, offset, size)

    async def aread(self, offset: int, size: int) -> Data:
        return self._image.carried(self._device, offset, size)


class _File:
    """Where a regular file's bytes are."""

    __slots__ = ("extents", "layer", "logical", "size")

    def __init__(self, layer: int, size: int, extents: tuple[Extent, ...]) -> None:
        self.layer = layer
        self.size = size
        self.extents = extents
        self.logical = [e.logical for e in extents]


def _end(extent: Extent) -> int:
    return extent.logical + extent.length


class TreeSpace:
    """A composed tree with its data."""

    def __init__(
        self,
        tree: MergedTree,
        base: int,
        open_blob: Callable[[Digest], Blob],
        owners: Owners | None = None,
    ) -> None:
        """`base` is added to nodes to make inode numbers; `open_blob` may raise NotFound."""
        self._tree = tree
        self._owners = owners
        self._base = base
        self._open_blob = open_blob
        self._files: Bounded[int, _File] = Bounded(
            _KEPT_FILES * 4, lambda file: 4 + len(file.extents)
        )
        self._digests: dict[tuple[int, int], Digest] = {}
        self._carried: dict[tuple[int, int], Blob] = {}
        self.root = base | tree.root
        """Inode number of the root."""
        self.inodes = tree.inodes

    def names_hold(self, node: int) -> float:
        return FOREVER

    def attributes(self, node: int) -> Attributes:
        found = self._tree.attributes(node)
        return found if self._owners is None else self._owners.attributes(found)

    def lookup(self, node: int, name: bytes) -> int:
        child = self._tree.lookup(node, name)
        return 0 if child is None else self._base | child

    def listing(self, node: int, start: int) -> Iterator[DirEntry]:
        entries = self._tree.entries(node)
        for place in range(start, len(entries)):
            name, child = entries[place]
            yield DirEntry(place + 1, name, self._base | child)

    def readlink(self, node: int) -> bytes:
        return self._tree.readlink(node)

    def xattrs(self, node: int) -> Mapping[bytes, bytes]:
        found = self._tree.xattrs(node)
        if self._owners is not None:
            # A lower of an overlay, which removes escapes itself and obeys what has none.
            return self._owners.xattrs(found)
        return {overlay_shows(name): value for name, value in found.items()}

    def _file(self, node: int) -> _File:
        file = self._files.use(node)
        if file is None:
            image, layer, nid = self._tree.split(node)
            info = image.stat(nid)
            if not stat.S_ISREG(info.mode):
                raise BadInput("not a regular file")
            file = self._files.keep(node, _File(layer, info.size, image.extents_of(info)))
        return file

    def _blob(self, layer: int, number: int) -> Blob:
        carried = self._carried.get((layer, number))
        if carried is not None:
            return carried
        digest = self._digests.get((layer, number))
        if digest is None:
            image = self._tree.image(layer)
            if image.carries(number):
                return self._carried.setdefault((layer, number), _Carried(image, number))
            tag = image.devices[number].tag
            digest = parse_digest(tag.decode("ascii", "replace"))
            self._digests[layer, number] = digest
        return self._open_blob(digest)

    def _plan(self, file: _File, offset: int, size: int) -> list[tuple[Blob | None, int, int]]:
        """(blob or None for a hole, physical, length) that make up a range of a file."""
        end = min(offset + size, file.size)
        plan: list[tuple[Blob | None, int, int]] = []
        i = max(0, bisect_right(file.logical, offset) - 1)
        while offset < end:
            while i < len(file.extents) and _end(file.extents[i]) <= offset:
                i += 1
            if i == len(file.extents) or file.extents[i].logical >= end:
                plan.append((None, 0, end - offset))
                break
            logical, number, physical, length = file.extents[i]
            if logical > offset:
                plan.append((None, 0, logical - offset))
                offset = logical
            count = min(end, logical + length) - offset
            plan.append((self._blob(file.layer, number), physical + offset - logical, count))
            offset += count
        return plan

    def read_nowait(self, node: int, offset: int, size: int) -> Data | None:
        plan = self._plan(self._file(node), offset, size)
        pieces: list[Data] = []
        for blob, physical, length in plan:
            piece = bytes(length) if blob is None else blob.read_nowait(physical, length)
            if piece is None:
                return None
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def aread(self, node: int, offset: int, size: int) -> Data:
        pieces: list[Data] = []
        for blob, physical, length in self._plan(self._file(node), offset, size):
            pieces.append(bytes(length) if blob is None else await blob.aread(physical, length))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
