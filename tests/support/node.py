"""A node in a temporary directory: layers made from trees, blobs as plain files.

Everything that a test mounted through it is gone when it is closed, also after a failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.namespaces import unpin_namespaces
from dsecfs.kernel.syscalls import umount
from dsecfs.layers.digest import DEFAULT_CHUNK_SIZE, blob_digest, layer_digest
from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.local import LocalLayer
from dsecfs.layers.manifest import BlobRef, LayerManifest
from dsecfs.layers.tree import BLOCK, Extent, Inode, directory, walk, whiteout
from dsecfs.nodedirs import NodeDirs

Entry = bytes | str | Inode | None
"""File content, symlink target, a ready inode, or None for a whiteout."""


def tree_of(entries: dict[str, Entry], data: bytearray) -> Inode:
    """A tree from paths; directories are made as needed. File contents go to `data`."""
    root = directory()
    for path, entry in entries.items():
        here = root
        *parents, name = path.strip("/").split("/")
        for part in parents:
            assert here.children is not None
            here = here.children.setdefault(part.encode(), directory())
        assert here.children is not None
        here.children[name.encode()] = _inode(entry, data)
    return root


def _inode(entry: Entry, data: bytearray) -> Inode:
    if isinstance(entry, Inode):
        return entry
    if isinstance(entry, str):
        return Inode(stat.S_IFLNK | 0o777, target=entry.encode())
    if entry is None:
        return whiteout()
    return file_inode(entry, data)


def file_inode(content: bytes, data: bytearray, mode: int = 0o755, **fields: Any) -> Inode:
    """A regular file whose content is added to `data`."""
    at = len(data)
    data += content.ljust(-(-len(content) // BLOCK) * BLOCK, b"\0")
    extents = (Extent(0, 0, at, len(content)),) if content else ()
    return Inode(stat.S_IFREG | mode, size=len(content), extents=extents, **fields)


class Node:
    """Directories of a node and what tests need to fill it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.dirs = NodeDirs(place / "data", place / "run")
        self.dirs.create()
        (self.dirs.fs / "blobs").mkdir(parents=True)
        (self.dirs.data / "meta").mkdir()

    def layer(self, entries: dict[str, Entry] | Inode, data: bytearray | None = None) -> LocalLayer:
        """A layer of this node. Its blob is a plain file where FUSE would show it."""
        data = bytearray() if data is None else data
        root = entries if isinstance(entries, Inode) else tree_of(entries, data)
        blobs, digests = [], b""
        if data:
            for at in range(0, len(data), DEFAULT_CHUNK_SIZE):
                digests += hashlib.sha256(data[at : at + DEFAULT_CHUNK_SIZE]).digest()
            digest = blob_digest(len(data), DEFAULT_CHUNK_SIZE, digests)
            blobs.append(BlobRef(digest, len(data), DEFAULT_CHUNK_SIZE))
            (self.dirs.fs / "blobs" / digest).write_bytes(data)
        image = write_erofs(root, [Device(b.digest.encode(), b.size) for b in blobs])
        inodes = len({id(inode) for _, inode in walk(root)})
        manifest = LayerManifest("base", "linux/amd64", tuple(blobs), inodes=inodes)
        layer = layer_digest(manifest.to_json(), image, [digests] if blobs else [])
        self.dirs.meta(layer).write_bytes(image)
        return LocalLayer(layer, manifest, self.dirs.meta(layer))

    def fill_cache(self, layer: LocalLayer) -> None:
        """Put the layer's whole blob into the chunk cache, as the fetcher would."""
        from dsecfs.cache.blob import open_files, write_chunk_list

        for blob in layer.blobs:
            data = (self.dirs.fs / "blobs" / blob.digest).read_bytes()
            chunks = [data[i : i + blob.chunk_size] for i in range(0, len(data), blob.chunk_size)]
            digests = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
            write_chunk_list(self.dirs, blob, digests)
            files = open_files(self.dirs, blob.digest, blob.size, blob.chunk_size)
            for number, chunk in enumerate(chunks):
                assert files.lock(number)
                files.fill(number, chunk, zeros=False)
                files.unlock(number)

    def close(self) -> None:
        unpin_namespaces(self.dirs.namespace.parent)
        for mount in reversed(mounts_here()):
            if mount.point.is_relative_to(self.place):
                umount(mount.point, detach=True)
        shutil.rmtree(self.place)

    def mounts(self) -> list[str]:
        """Mounts below the node's directories in the test's own namespace."""
        return [str(m.point) for m in mounts_here() if m.point.is_relative_to(self.place)]


@contextlib.contextmanager
def node() -> Iterator[Node]:
    """A node on the disk (EROFS mounts no files of tmpfs), gone at the end."""
    place = Path(os.path.realpath(tempfile.mkdtemp(prefix="dsec-node-", dir="/var/tmp")))
    made = Node(place)
    try:
        yield made
    finally:
        made.close()
