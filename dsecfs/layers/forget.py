"""Bounding what a node remembers of layers: heads, images, small files of blobs, refs.

The chunk cache has its own bound (cache/evict.py). All this can be had from the store again, and
goes by last use, the oldest first. What must hold:
- what is mounted stays (the caller says what is), and so does what was asked for within
  `idle_s`: somebody may be about to mount it. `ensure` and `forget_layer` agree on that without
  a lock (local.py), `write_chunk_list` and `forget_blob` by the blob's lock (cache/blob.py);
- a blob goes with the last layer of this node that has it, with all its cached data;
- one process of the node does it at a time; one that dies leaves nothing that is believed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsecfs.cache.blob import forget_blob
from dsecfs.cache.evict import cached_blobs
from dsecfs.errors import DsecfsError
from dsecfs.layers.catalog import REMEMBER_S
from dsecfs.layers.digest import Digest, parse_digest
from dsecfs.layers.local import forget_layer, known_layers, layer_files, local_manifest
from dsecfs.locks import locked_file
from dsecfs.nodedirs import NodeDirs, age_s

LOW = 0.85
"""Share of the limit down to which things go once it is exceeded."""
IDLE_S = 3600.0
"""What was used within this time stays, in normal operation."""
CLEAR_IDLE_S = 30.0
"""The same when everything unused is to go: longer than from resolving a name to its mount."""
_DEAD_S = 86400.0
"""A file that a process was writing so long ago was left by its death."""
_LOCK_S = 10.0

_SMALL = ("chunks", "layout", "present", "used", "scrubbed")
"""Files of a blob besides its data."""


@dataclass
class Forgotten:
    """What went, and what the rest takes."""

    layers: int = 0
    blobs: int = 0
    refs: int = 0
    bytes: int = 0
    """Disk space that it gave back, cached data not counted."""
    left: int = 0
    """Disk space that everything of this kind takes now."""


@dataclass(frozen=True)
class _Layer:
    digest: Digest
    age: float
    size: int
    blobs: frozenset[Digest]


def metadata_use(dirs: NodeDirs) -> int:
    """Bytes of disk that heads, images, refs and the small files of blobs take."""
    layers = sum(_size(*layer_files(dirs, layer)) for layer in known_layers(dirs))
    blobs = sum(_blob_size(dirs, blob) for blob in cached_blobs(dirs))
    return layers + blobs + sum(_size(path) for path in _files(dirs.refs))


def forget_unused(
    dirs: NodeDirs, limit: int, mounted: Collection[Digest], *, idle_s: float = IDLE_S
) -> Forgotten:
    """Bring what is remembered below `limit` bytes, if that can be without what is in use.

    `mounted` are layers to keep with their blobs. Busy if another process is at it; CacheError.
    """
    done = Forgotten()
    with locked_file(dirs.data / "evict.lock", "what this node remembers", wait_s=_LOCK_S):
        _sweep(dirs)
        done.left = metadata_use(dirs)
        if done.left > limit:
            _Forgetter(dirs, int(limit * LOW), mounted, idle_s, done).run()
    return done


class _Forgetter:
    """One pass. The lock is held."""

    def __init__(
        self,
        dirs: NodeDirs,
        target: int,
        mounted: Collection[Digest],
        idle_s: float,
        done: Forgotten,
    ) -> None:
        self._dirs = dirs
        self._target = target
        self._idle_s = idle_s
        self._done = done
        self._layers = {layer.digest: layer for layer in map(self._look, known_layers(dirs))}
        self._mounted = mounted
        self._uses: dict[Digest, int] = {}
        for layer in self._layers.values():
            for blob in layer.blobs:
                self._uses[blob] = self._uses.get(blob, 0) + 1

    def run(self) -> None:
        unused = [b for b in cached_blobs(self._dirs) if b not in self._uses]
        items: list[tuple[float, _Layer | Digest | Path]] = []
        items += [(layer.age, layer) for layer in self._layers.values()]
        items += [(_age(self._dirs.blob(blob) / "chunks"), blob) for blob in unused]
        items += [(_age(path), path) for path in _files(self._dirs.refs)]
        for _, item in sorted(items, key=lambda pair: pair[0], reverse=True):
            if self._done.left <= self._target:
                break
            if isinstance(item, _Layer):
                self._layer(item)
            elif isinstance(item, Path):
                self._ref(item)
            else:
                self._blob(item)

    def _layer(self, layer: _Layer) -> None:
        if layer.digest in self._mounted or not forget_layer(
            self._dirs, layer.digest, self._idle_s
        ):
            return
        self._done.layers += 1
        self._gone(layer.size)
        for blob in layer.blobs:
            self._uses[blob] -= 1
            if not self._uses[blob]:
                self._blob(blob)

    def _blob(self, blob: Digest) -> None:
        size = _blob_size(self._dirs, blob)
        if forget_blob(self._dirs, blob, self._idle_s):
            self._done.blobs += 1
            self._gone(size)

    def _ref(self, path: Path) -> None:
        # Whoever resolves it meanwhile has read it, or asks the store.
        size = _size(path)
        path.unlink(missing_ok=True)
        self._done.refs += 1
        self._gone(size)

    def _gone(self, size: int) -> None:
        self._done.bytes += size
        self._done.left -= size

    def _look(self, digest: Digest) -> _Layer:
        ok, head, meta = layer_files(self._dirs, digest)
        manifest = local_manifest(self._dirs, digest)
        if manifest is not None:
            blobs = frozenset(ref.digest for ref in manifest.blobs)
        else:
            blobs = _devices(meta)  # it may be mounted all the same
        age = _age(ok) if ok.exists() else _age(head)
        return _Layer(digest, age, _size(ok, head, meta), blobs)


def _devices(meta: Path) -> frozenset[Digest]:
    """The blobs of an image, as far as it can be read."""
    from dsecfs.layers.erofs.reader import ErofsImage

    with contextlib.suppress(DsecfsError), contextlib.closing(ErofsImage.open(meta)) as image:
        tags = (device.tag.decode("ascii", "replace") for device in image.devices)
        return frozenset(parse_digest(tag) for tag in tags)
    return frozenset()


def _sweep(dirs: NodeDirs) -> None:
    """Remove what crashes left, and refs that are too old to be believed."""
    for name in os.listdir(dirs.gone) if dirs.gone.is_dir() else ():
        shutil.rmtree(dirs.gone / name, ignore_errors=True)
    for place in (dirs.data / "heads", dirs.data / "meta"):
        if place.is_dir():
            for path in place.glob(".tmp-*"):
                if _age(path) > _DEAD_S:
                    path.unlink(missing_ok=True)
    for path in _files(dirs.refs):
        if _age(path) > REMEMBER_S:
            path.unlink(missing_ok=True)


def _files(place: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(place):
        for name in names:
            yield Path(folder, name)


def _blob_size(dirs: NodeDirs, blob: Digest) -> int:
    return _size(*(dirs.blob(blob) / name for name in _SMALL))


def _size(*paths: Path) -> int:
    """Bytes of disk; what is not there takes none."""
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            total += path.stat(follow_symlinks=False).st_blocks * 512
    return total


def _age(path: Path) -> float:
    """Seconds since it was last used; one that is gone is as old as can be."""
    try:
        return age_s(path.stat(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return float("inf")
