"""Finding the layout of a blob: the local copy first, then the newest in the store.

Owns data/blobs/<hex>/layout (the stored bytes, replaced as a whole) and `Places`, the
compact form that is kept in memory. A wrong or old layout is harmless (chunk digests
decide), so the local copy is used as it is, and read anew from the store when an object it
names is gone or holds something else.
"""

from __future__ import annotations

import logging
import re
import threading
from array import array

from dsecfs.cache.blob import replace_file, setup_lock
from dsecfs.errors import Busy, DsecfsError, FormatError, NotFound
from dsecfs.layers.digest import Digest
from dsecfs.layers.layout import Layout, Place, decode_layout
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import Store, layout_key, layout_prefix

log = logging.getLogger(__name__)

_SEQUENCE = re.compile(r"[0-9]{8,12}\Z")
_RELISTS = 3
"""Attempts when the newest layout vanishes between listing and getting it."""


class Places:
    """A layout in about 20 bytes per chunk (a Layout takes some 200)."""

    def __init__(self, layout: Layout) -> None:
        self.objects = layout.objects
        self.hot = array("I", layout.hot)
        self._object = array("I", (p.object for p in layout.places))
        self._offset = array("Q", (p.offset for p in layout.places))
        self._stored = array("I", (p.stored for p in layout.places))
        self._codec = bytes(p.codec for p in layout.places)

    def __getitem__(self, chunk: int) -> Place:
        return Place(
            self._object[chunk], self._offset[chunk], self._stored[chunk], self._codec[chunk]
        )


def _max_size(chunks: int) -> int:
    """Most bytes an encoded layout can have: layout.py's records, and the frame around them."""
    return 65536 + 96 * chunks


def local_layout(dirs: NodeDirs, blob: Digest, chunks: int, chunk_size: int) -> Places | None:
    """The layout this node has, or None: absent, unreadable or damaged (the store has it)."""
    try:
        with open(dirs.blob(blob) / "layout", "rb") as f:
            data = f.read(_max_size(chunks))
        return Places(decode_layout(data, blob, chunks, chunk_size))
    except FileNotFoundError:
        return None
    except (OSError, FormatError) as e:
        log.warning("local layout of blob %s is not used: %s", blob[:12], e)
        return None


def newest_layout(
    dirs: NodeDirs, store: Store, blob: Digest, chunks: int, chunk_size: int
) -> Places:
    """The newest layout of `blob` in the store; also becomes the local copy.

    Raises NotFound when the store has none, FormatError, StoreError.
    """
    data = _newest_bytes(store, blob, _max_size(chunks))
    places = Places(decode_layout(data, blob, chunks, chunk_size))
    path = dirs.blob(blob)
    try:
        with setup_lock(path):
            replace_file(path / "layout", data)
    except (OSError, Busy) as e:
        log.info("layout of blob %s is not kept on this node: %s", blob[:12], e)
    return places


def _newest_bytes(store: Store, blob: Digest, max_size: int) -> bytes:
    """Lists the sequences while getting number 1, which nearly always is the only one."""
    first: list[bytes] = []

    def get_first() -> None:
        try:
            first.append(store.get(layout_key(blob, 1), max_size=max_size))
        except DsecfsError as e:
            # Collected, or the store is ill: then the listing decides and says so.
            log.debug("first layout of blob %s: %s", blob[:12], e)

    getting = threading.Thread(target=get_first, name="dsec-layout", daemon=True)
    getting.start()
    try:
        newest = _newest_sequence(store, blob)
    finally:
        getting.join()  # ends: every wait in a store has a limit
    for _ in range(_RELISTS):
        if newest is None:
            break
        if newest == 1 and first:
            return first[0]
        try:
            return store.get(layout_key(blob, newest), max_size=max_size)
        except NotFound:
            newest = _newest_sequence(store, blob)
    raise NotFound(
        f"blob {blob[:12]}: the store {store.url} has no layout of it",
        hint="publish the layer again, or check that this is the right store",
    )


def _newest_sequence(store: Store, blob: Digest) -> int | None:
    prefix = layout_prefix(blob)
    found = [
        int(tail)
        for info in store.list(prefix)
        if _SEQUENCE.match(tail := info.key.removeprefix(prefix))
    ]
    return max(found, default=None)
