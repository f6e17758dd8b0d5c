"""Optimize: the chunks that a first run needs, back to back in one object, in order of use.

Owns the writing of hot objects and of the layouts that point into them. Prefetching such a
layer is one sequential read. What must hold: identity, cache and pins of a blob stay as
they are, only its layout is replaced (by the next sequence); stored bytes are copied as they
are, after their digest was checked; a run that dies leaves the old layouts in force.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsecfs.errors import Conflict, Corrupt
from dsecfs.layers.codec import decompress
from dsecfs.layers.digest import DIGEST_LEN, Digest
from dsecfs.layers.layout import ZERO, Layout, Place, encode_layout
from dsecfs.layers.leases import Lease
from dsecfs.layers.manifest import BlobRef
from dsecfs.layers.reach import layout_sequences, read_newest_layout
from dsecfs.store.base import Priority, Store, layout_key, object_key

READ_AT_ONCE = 4 << 20
"""Bytes of one range read."""
GAP = 64 << 10
"""Bytes between two wanted chunks that are read along rather than asked for apart."""
_TRIES = 5


class HotBlob(NamedTuple):
    """A blob with hot chunks."""

    ref: BlobRef
    chunk_digests: bytes


@dataclass(frozen=True, slots=True)
class Optimized:
    """What a run wrote."""

    object: Digest | None
    """The hot object; None if there was nothing to do."""
    chunks: int
    stored: int
    """Bytes of the hot object."""
    blobs: int


def optimize(
    store: Store,
    order: Sequence[tuple[Digest, int]],
    blobs: Mapping[Digest, HotBlob],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Optimized:
    """Write one hot object with the chunks `order` (blob, number), and new layouts.

    Blobs follow each other in the order of their first chunk.
    Chunks of blobs that are not in `blobs` are left out. `progress` gets bytes done and in
    all. Raises Corrupt if the store holds something else than the digests say, Conflict if
    others replace the layouts all the time, StoreError.
    """
    for _ in range(_TRIES):
        with Lease(store, "publish") as lease:
            done = _attempt(store, lease, order, blobs, progress)
        if done is not None:
            return done
    raise Conflict("the layouts were replaced by somebody else all the time", hint="try again")


class _Copy(NamedTuple):
    """One stored chunk and where it goes."""

    source: Place
    object: Digest
    blob: Digest
    chunk: int
    target: int


def _attempt(
    store: Store,
    lease: Lease,
    order: Sequence[tuple[Digest, int]],
    blobs: Mapping[Digest, HotBlob],
    progress: Callable[[int, int], None],
) -> Optimized | None:
    layouts: dict[Digest, tuple[int, Layout]] = {}
    copies: list[_Copy] = []
    hot: dict[Digest, list[int]] = {}
    end = 0
    for blob, chunk in _by_blob(order):
        if blob not in blobs:
            continue
        if blob not in layouts:
            key, layout = read_newest_layout(store, blobs[blob].ref)
            layouts[blob] = (int(key.rpartition("/")[2]), layout)
        layout = layouts[blob][1]
        place = layout.places[chunk]
        hot.setdefault(blob, []).append(chunk)
        if place.codec != ZERO:
            copies.append(_Copy(place, layout.objects[place.object], blob, chunk, end))
            end += place.stored
    if not copies:
        return Optimized(None, 0, 0, 0)
    there = {copy.object for copy in copies}
    if (
        len(there) == 1
        and all(copy.source.offset == copy.target for copy in copies)
        and all(layouts[blob][1].hot == tuple(chunks) for blob, chunks in hot.items())
    ):
        return Optimized(there.pop(), len(copies), end, len(hot))  # done by an earlier run
    with tempfile.TemporaryFile() as file:
        done = 0
        for copy, data in _read(store, copies):
            _check(copy, data, blobs[copy.blob])
            os.pwrite(file.fileno(), data, copy.target)
            done += len(data)
            progress(done, end)
        file.seek(0)
        digest = Digest(hashlib.file_digest(file, "sha256").hexdigest())
        file.seek(0)
        lease.put_content(object_key(digest), file)
    moved = {(c.blob, c.chunk): c.target for c in copies}
    for blob, chunks in hot.items():
        sequence, layout = layouts[blob]
        new = _move(layout, digest, chunks, moved)
        for name in new.objects:
            lease.rely_on(object_key(name))
        if not lease.put_if_absent(layout_key(blob, sequence + 1), encode_layout(new)):
            return None
        # What a reader takes for the newest must be ours, or somebody's who saw ours.
        if layout_sequences(store, blob)[-1] < sequence + 1:
            return None
    return Optimized(digest, len(copies), end, len(hot))


def _by_blob(order: Sequence[tuple[Digest, int]]) -> Iterator[tuple[Digest, int]]:
    """Each chunk once; one blob's after the other's, so that each is one run of bytes."""
    grouped: dict[Digest, dict[int, None]] = {}
    for blob, chunk in order:
        grouped.setdefault(blob, {})[chunk] = None
    for blob, chunks in grouped.items():
        for chunk in chunks:
            yield blob, chunk


def _read(store: Store, copies: Sequence[_Copy]) -> Iterator[tuple[_Copy, memoryview]]:
    """The stored bytes of all copies, by few large reads."""
    ordered = sorted(copies, key=lambda c: (c.object, c.source.offset))
    i = 0
    while i < len(ordered):
        first, j, stop = ordered[i], i, 0
        while j < len(ordered) and ordered[j].object == first.object:
            place = ordered[j].source
            if j > i and (
                place.offset > stop + GAP
                or place.offset + place.stored > first.source.offset + READ_AT_ONCE
            ):
                break
            stop = max(stop, place.offset + place.stored)
            j += 1
        start = first.source.offset
        data = memoryview(
            store.get_range(
                object_key(first.object), start, stop - start, priority=Priority.BACKGROUND
            )
        )
        for copy in ordered[i:j]:
            at = copy.source.offset - start
            yield copy, data[at : at + copy.source.stored]
        i = j


def _check(copy: _Copy, data: memoryview, blob: HotBlob) -> None:
    length = min(blob.ref.chunk_size, blob.ref.size - copy.chunk * blob.ref.chunk_size)
    raw = decompress(data, copy.source.codec, length)
    want = blob.chunk_digests[copy.chunk * DIGEST_LEN : (copy.chunk + 1) * DIGEST_LEN]
    if raw is None or hashlib.sha256(raw).digest() != want:
        raise Corrupt(
            f"chunk {copy.chunk} of blob {copy.blob[:12]} is damaged in the store "
            f"(object {copy.object[:12]} at {copy.source.offset})",
            hint="publish it again (an image: import --no-reuse)",
        )


def _move(
    layout: Layout, hot_object: Digest, chunks: list[int], moved: dict[tuple[Digest, int], int]
) -> Layout:
    """The layout with hot chunks in the hot object, without objects that nothing lies in."""
    places = list(layout.places)
    names = (*layout.objects, hot_object)
    for chunk in chunks:
        target = moved.get((layout.blob, chunk))
        if target is not None:
            places[chunk] = places[chunk]._replace(object=len(names) - 1, offset=target)
    used = sorted({p.object for p in places if p.codec != ZERO})
    number = {old: new for new, old in enumerate(used)}
    return Layout(
        layout.blob,
        tuple(names[i] for i in used),
        tuple(p if p.codec == ZERO else p._replace(object=number[p.object]) for p in places),
        tuple(chunks),
    )
