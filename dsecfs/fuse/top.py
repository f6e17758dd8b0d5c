"""The top of a mount: `blobs/`, `trees/`, `traced/`, and what a slot stands for.

A slot's key says in full what it is, so that a worker that never saw the name resolved
can serve it:

    b  blob digest                      one blob
    t  name, layers bottom to top       a composed tree (its layers, not just its name:
                                        a name may be given anew); recorded if what is
                                        before the first dot is the name of a trace
    s  name, range of ids, layers       the same with owners shifted
    r  name                             the directory of one trace
    d  name, blob digest                one blob under a trace

`disks/` is reserved for block layers.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from dsecfs.errors import BadInput, DsecfsError, NotFound
from dsecfs.fuse.blobs import (
    Blob,
    BlobSource,
    BlobSpace,
    RecordedBlob,
    Recording,
    TracedBlobSpace,
)
from dsecfs.fuse.owners import Owners
from dsecfs.fuse.slots import NODE_BITS, NODE_MASK, Slots
from dsecfs.fuse.spaces import (
    FOREVER,
    SOON,
    Attributes,
    Bounded,
    Data,
    DirEntry,
    Space,
    numbered,
)
from dsecfs.fuse.trees import TREE_ID, MergedTree, TreeSpace, TreeSpec, read_tree
from dsecfs.layers.digest import DIGEST_LEN, Digest, parse_digest
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.nodedirs import NodeDirs

log = logging.getLogger("dsecfs.fuse.top")

ROOT, BLOBS, TREES, TRACED = 1, 2, 3, 4
_NAMES = {b"blobs": BLOBS, b"trees": TREES, b"traced": TRACED}

_RANGE = struct.Struct("<2I")
"""Start and count of a range of owners."""

_KEPT_SPACES = 2048
_KEPT_IMAGES = 512


def _digest(name: bytes) -> Digest:
    """A file name that is exactly 64 hex digits, else NotFound."""
    if len(name) != 2 * DIGEST_LEN:
        raise NotFound("no such name")
    try:
        return parse_digest(name.decode("ascii", "replace"))
    except BadInput:
        raise NotFound("no such name") from None


def _ident(name: bytes) -> str:
    """A name of a tree or a trace, else NotFound."""
    text = name.decode("ascii", "replace")
    if not TREE_ID.match(text):
        raise NotFound("no such name")
    return text


def _pack(kind: bytes, name: str, *digests: Digest, middle: bytes = b"") -> bytes:
    raw = name.encode()
    body = b"".join(bytes.fromhex(d) for d in digests)
    return kind + bytes([len(raw)]) + raw + middle + body


def _unpack(key: bytes, middle: int = 0) -> tuple[str, bytes, tuple[Digest, ...]]:
    """(name, `middle` bytes, digests) of a key."""
    end = 2 + key[1]
    body = key[end + middle :]
    digests = (body[i : i + DIGEST_LEN].hex() for i in range(0, len(body), DIGEST_LEN))
    return key[2:end].decode(), key[end : end + middle], tuple(map(Digest, digests))


def _layers(key: bytes) -> tuple[Digest, ...]:
    """The layers of a tree's key; none if it is not one."""
    if key[:1] not in (b"t", b"s"):
        return ()
    return _unpack(key, _RANGE.size if key[:1] == b"s" else 0)[2]


class _Opened(NamedTuple):
    """A layer's image and which file it was."""

    identity: tuple[int, int] | None
    image: ErofsImage


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_ino, info.st_mtime_ns


def _tree_key(name: str, tree: TreeSpec) -> bytes:
    if tree.owners is None:
        return _pack(b"t", name, *tree.layers)
    return _pack(b"s", name, *tree.layers, middle=_RANGE.pack(tree.owners.start, tree.owners.count))


class Spaces:
    """All spaces of a mount, opened when they are first needed and bounded in number."""

    def __init__(self, dirs: NodeDirs, slots: Slots, source: BlobSource) -> None:
        self._dirs = dirs
        self._slots = slots
        self._source = source
        self._open: Bounded[int, Space] = Bounded(_KEPT_SPACES)
        self._images: Bounded[Digest, _Opened] = Bounded(_KEPT_IMAGES)
        self._merges: WeakValueDictionary[tuple[Digest, ...], MergedTree] = WeakValueDictionary()
        self._traces: WeakValueDictionary[str, Recording] = WeakValueDictionary()
        self._top = _Top(self)

    def get(self, slot: int) -> Space:
        """The space of a slot. NotFound if the slot does not exist or its content is gone."""
        if slot == 0:
            return self._top
        space = self._open.use(slot)
        if space is None:
            space = self._open.keep(slot, self._make(slot, self._slots.key(slot)))
        return space

    def _make(self, slot: int, key: bytes) -> Space:
        kind = key[:1]
        if kind == b"b":
            return BlobSpace(self._source, Digest(key[1:].hex()))
        if kind == b"s":
            name, shift, digests = _unpack(key, _RANGE.size)
            owners = Owners(*_RANGE.unpack(shift))
            return TreeSpace(
                self._merged(digests), slot << NODE_BITS, self._opener(name), owners
            )
        name, _, digests = _unpack(key)
        if kind == b"t":
            return TreeSpace(self._merged(digests), slot << NODE_BITS, self._opener(name))
        if kind == b"r":
            return _TraceDirectory(self, name)
        trace = self.trace(name)
        return TracedBlobSpace(self._source, digests[0], trace, trace.number(digests[0]))

    def _merged(self, layers: tuple[Digest, ...]) -> MergedTree:
        """Layers, bottom first, merged: the same object for all trees of these layers."""
        tree = self._merges.get(layers)
        if tree is None:
            tree = MergedTree([self._image(layer) for layer in reversed(layers)])
            self._merges[layers] = tree
        return tree

    def _opener(self, tree: str) -> Callable[[Digest], Blob]:
        """How a tree's files come to their blobs."""
        recording = tree.partition(".")[0]
        if not self.trace_exists(recording):
            return self._source.open
        trace = self.trace(recording)

        def open_recorded(blob: Digest) -> Blob:
            found = self._source.open(blob)
            return RecordedBlob(found, trace, trace.number(blob)) if trace.has(blob) else found

        return open_recorded

    def _image(self, layer: Digest) -> ErofsImage:
        opened = self._images.use(layer)
        if opened is None:
            path = self._dirs.meta(layer)
            opened = self._images.keep(layer, _Opened(_identity(path), ErofsImage.open(path)))
        return opened.image

    def reopen(self, slot: int) -> bool:
        """Let go of images of a tree that were replaced on disk since they were opened; whether
        there were any. Numbers stay what they are: they follow from the layers' content."""
        replaced = {
            layer
            for layer in _layers(self._slots.key(slot) if slot else b"")
            if (opened := self._images.get(layer)) is not None
            and opened.identity != _identity(self._dirs.meta(layer))
        }
        if not replaced:
            return False
        log.warning("images of layers were replaced: %s", ", ".join(d[:12] for d in replaced))
        for layer in replaced:
            self._images.drop(layer)
        for other in [s for s in self._open if replaced.intersection(_layers(self._slots.key(s)))]:
            self._open.drop(other)
        for layers in [m for m in self._merges if replaced.intersection(m)]:
            self._merges.pop(layers, None)
        return True

    def trace(self, name: str) -> Recording:
        trace = self._traces.get(name)
        if trace is None:
            trace = self._traces[name] = Recording(self._dirs.traces, name)
        return trace

    def trace_exists(self, name: str) -> bool:
        return (self._dirs.traces / f"{name}.json").exists()

    @property
    def open_spaces(self) -> int:
        """Blobs and trees that were used lately."""
        return len(self._open)

    # -- inode numbers of things by name

    def blob_ino(self, name: bytes) -> int:
        digest = _digest(name)
        if not self._source.exists(digest):
            raise NotFound(f"no blob {digest[:12]} on this node")
        return self._slots.number(b"b" + bytes.fromhex(digest)) << NODE_BITS

    def tree_ino(self, name: bytes) -> int:
        ident = _ident(name)
        tree = read_tree(self._dirs.trees, ident)
        slot = self._slots.number(_tree_key(ident, tree))
        space = self.get(slot)
        assert isinstance(space, TreeSpace)
        return space.root

    def trace_ino(self, name: bytes) -> int:
        ident = _ident(name)
        if not self.trace_exists(ident):
            raise NotFound(f"no trace {ident}")
        return self._slots.number(_pack(b"r", ident)) << NODE_BITS

    def traced_ino(self, trace: str, name: bytes) -> int:
        digest = _digest(name)
        self.trace(trace).number(digest)
        if not self._source.exists(digest):
            raise NotFound(f"no blob {digest[:12]} on this node")
        return self._slots.number(_pack(b"d", trace, digest)) << NODE_BITS

    def names(self, directory: Path, suffix: str) -> list[bytes]:
        """What a local directory has, sorted; nothing if it does not exist."""
        try:
            found = os.listdir(os.fsencode(directory))
        except FileNotFoundError:
            return []
        tail = suffix.encode()
        return sorted(n[: len(n) - len(tail)] for n in found if n.endswith(tail))

    def top_names(self, node: int) -> list[bytes]:
        if node == BLOBS:
            return self.names(self._dirs.blobs, "")
        return self.names(self._dirs.trees if node == TREES else self._dirs.traces, ".json")


class _Directory:
    """What is the same for directories that are not a layer's."""

    def names_hold(self, node: int) -> float:
        return SOON

    def readlink(self, node: int) -> bytes:
        raise BadInput("not a symlink")

    def xattrs(self, node: int) -> Mapping[bytes, bytes]:
        return {}

    def read_nowait(self, node: int, offset: int, size: int) -> Data | None:
        raise BadInput("not a file")

    async def aread(self, node: int, offset: int, size: int) -> Data:
        raise BadInput("not a file")


class _Top(_Directory):
    """Slot 0: the root and the directories in it."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces

    def names_hold(self, node: int) -> float:
        return FOREVER if node == ROOT else SOON

    def attributes(self, node: int) -> Attributes:
        if not ROOT <= node <= TRACED:
            raise NotFound("no such node")
        # Blobs are for root and those it passes an open file to, whatever is mounted where.
        mode = 0o700 if node in (BLOBS, TRACED) else 0o755
        return Attributes(stat.S_IFDIR | mode, nlink=2, uid=os.geteuid(), gid=os.getegid())

    def lookup(self, node: int, name: bytes) -> int:
        if node == BLOBS:
            return self._spaces.blob_ino(name)
        if node == TREES:
            return self._spaces.tree_ino(name)
        if node == TRACED:
            return self._spaces.trace_ino(name)
        try:
            return _NAMES[name]
        except KeyError:
            raise NotFound("no such name") from None

    def listing(self, node: int, start: int) -> Iterator[DirEntry]:
        if node == ROOT:
            yield from numbered(_NAMES.items(), start)
            return
        # Names that come or go between two calls may shift the rest by one, as in any
        # directory that changes while it is read.
        for place, name in enumerate(self._spaces.top_names(node), 1):
            if place > start:
                try:
                    ino = self.lookup(node, name)
                    self._spaces.get(split_ino(ino)[0])
                except DsecfsError as e:
                    log.warning("%s is not listed: %s", os.fsdecode(name), e)
                    continue
                yield DirEntry(place, name, ino)


class _TraceDirectory(_Directory):
    """traced/<name>: node 0."""

    def __init__(self, spaces: Spaces, name: str) -> None:
        self._spaces = spaces
        self._name = name

    def attributes(self, node: int) -> Attributes:
        return Attributes(stat.S_IFDIR | 0o700, nlink=2, uid=os.geteuid(), gid=os.getegid())

    def lookup(self, node: int, name: bytes) -> int:
        return self._spaces.traced_ino(self._name, name)

    def listing(self, node: int, start: int) -> Iterator[DirEntry]:
        for place, blob in enumerate(self._spaces.trace(self._name).blobs, 1):
            if place > start:
                try:
                    yield DirEntry(place, blob.encode(), self.lookup(node, blob.encode()))
                except NotFound:
                    continue


def split_ino(ino: int) -> tuple[int, int]:
    """(slot, node) of an inode number."""
    return ino >> NODE_BITS, ino & NODE_MASK
