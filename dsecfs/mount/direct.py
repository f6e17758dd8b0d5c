"""Using a blob's cache file without FUSE, once it is whole.

What must hold: a blob is used directly only while a pin of ours protects it from eviction
and every chunk was verified in this boot; pins are made before that is asked and removed
after the last mount that uses the file is gone. A pin says which boot and which mount it
belongs to, so that recovery can tell those that nobody will remove any more.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from dsecfs.cache.blob import open_files, pin, pins, unpin
from dsecfs.errors import Busy, CacheError
from dsecfs.layers.digest import Digest
from dsecfs.layers.manifest import BlobRef
from dsecfs.nodedirs import NodeDirs, boot_id

log = logging.getLogger(__name__)

RETIRED = "retired"
"""A file in a generation's directory: nobody new gets it."""
_PREFIX = "mount-"


@functools.cache
def _boot() -> str:
    return boot_id().replace("-", "")[:16]


def pin_name(layer: Digest, generation: int) -> str:
    """The pin of one mount of `layer` in this boot."""
    return f"{_PREFIX}{_boot()}-{layer[:32]}-{generation}"


def may_be_whole(dirs: NodeDirs, blob: BlobRef) -> bool:
    """A cheap first look: False if the cache certainly does not have the whole blob."""
    return (dirs.blob(blob.digest) / "present").exists()


def direct_file(dirs: NodeDirs, blob: BlobRef, name: str) -> Path | None:
    """The data file of `blob`, pinned under `name`, or None (and no pin) if it is not whole."""
    try:
        pin(dirs, blob.digest, name)
    except (Busy, CacheError):
        return None  # being set up or evicted, or the disk is full: FUSE serves it
    whole = False
    try:
        files = open_files(dirs, blob.digest, blob.size, blob.chunk_size)
        whole = not files.volatile and not files.missing(0, blob.chunks - 1)
    except (Busy, CacheError):
        whole = False
    finally:
        if not whole:
            unpin(dirs, blob.digest, name)
    return dirs.blob(blob.digest) / "data" if whole else None


def direct_blobs(dirs: NodeDirs) -> Iterator[Digest]:
    """Blobs whose cache files mounts of this boot read themselves."""
    from dsecfs.cache.evict import cached_blobs

    for blob in cached_blobs(dirs):
        if any(name.startswith(f"{_PREFIX}{_boot()}-") for name in pins(dirs, blob)):
            yield blob


def retire(dirs: NodeDirs, blob: Digest) -> None:
    """The cache file of `blob` was found damaged: mounts that read it may have wrong bytes in
    the page cache even after it was mended. Who acquires one of these layers from now on gets
    a new mount; the old ones go with their holders."""
    for name in pins(dirs, blob):
        boot, _, rest = name.removeprefix(_PREFIX).partition("-")
        layer, _, number = rest.partition("-")
        if not name.startswith(_PREFIX) or boot != _boot() or not number.isdigit():
            continue
        for place in dirs.layers.glob(f"{layer}*"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                generation = place / f"{int(number):08d}"
                (generation / RETIRED).touch(mode=0o600)
                log.warning("%s is used by nobody new: its data was damaged", generation)


def drop_stale_pins(dirs: NodeDirs, alive: Callable[[str], bool]) -> Iterator[Digest]:
    """Remove pins of mounts for which `alive(name)` is false, and of earlier boots."""
    try:
        blobs = os.listdir(dirs.blobs)
    except FileNotFoundError:
        return
    for blob in map(Digest, blobs):
        for name in pins(dirs, blob):
            if name.startswith(_PREFIX) and not (
                name.startswith(f"{_PREFIX}{_boot()}-") and alive(name)
            ):
                unpin(dirs, blob, name)
                yield blob
