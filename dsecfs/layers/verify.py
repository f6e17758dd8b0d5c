"""Verify a published layer: its head, its layouts, and every stored chunk.

Reads everything the layer has in the store, each object once from front to back, and
reports all that is wrong instead of ending at the first. Identity is what is checked: head
against the layer's digest, chunks against the digests in the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dsecfs.errors import Corrupt, FormatError, NotFound, ShortRead
from dsecfs.layers.content import READ_AT_ONCE, LayerContent
from dsecfs.layers.digest import Digest
from dsecfs.layers.layout import ZERO, Layout
from dsecfs.store.base import Priority, Store, object_key

_PARALLEL = 4
_MOST_REPORTED = 100


@dataclass
class Verified:
    """What was found. A layer is sound if `damage` is empty."""

    chunks: int = 0
    bytes: int = 0
    """Uncompressed bytes that are right."""
    stored: int = 0
    """Bytes they take in the store."""
    damage: list[str] = field(default_factory=list)
    """One line for each thing that is wrong; at most _MOST_REPORTED."""
    bad_chunks: int = 0

    def report(self, what: str) -> None:
        if len(self.damage) < _MOST_REPORTED:
            self.damage.append(what)


def verify_layer(
    store: Store, layer: Digest, *, progress: Callable[[int], None] = lambda count: None
) -> Verified:
    """Check a layer. `progress` gets numbers of stored bytes as they are read.

    A head that is missing or damaged raises (there is nothing to go on from); store errors
    other than missing and short objects raise too: nothing is known about the layer then.
    """
    content = LayerContent(store, layer)
    found = Verified()
    for number, blob in enumerate(content.head.manifest.blobs):
        try:
            layout = content.layout(number)
        except (NotFound, FormatError) as e:
            found.report(e.message)
            found.bad_chunks += blob.chunks
            continue
        _verify_blob(store, content, number, layout, found, progress)
    return found


def _verify_blob(
    store: Store,
    content: LayerContent,
    blob: int,
    layout: Layout,
    found: Verified,
    progress: Callable[[int], None],
) -> None:
    def read(run: list[int]) -> memoryview | str:
        first, last = layout.places[run[0]], layout.places[run[-1]]
        key = object_key(layout.objects[first.object])
        length = last.offset + last.stored - first.offset
        try:
            data = store.get_range(key, first.offset, length, priority=Priority.BACKGROUND)
        except (NotFound, ShortRead) as e:
            return e.message
        return memoryview(data)

    for chunk, place in enumerate(layout.places):
        if place.codec == ZERO:
            _check(content, blob, chunk, memoryview(b""), ZERO, found)
    runs = list(_runs(layout))
    with ThreadPoolExecutor(_PARALLEL, "verify") as pool:
        # A few at a time: all results of map() would be in memory at once.
        for at in range(0, len(runs), _PARALLEL):
            some = runs[at : at + _PARALLEL]
            for run, data in zip(some, pool.map(read, some), strict=True):
                if isinstance(data, str):
                    found.bad_chunks += len(run)
                    found.report(data)
                    continue
                start = layout.places[run[0]].offset
                for chunk in run:
                    place = layout.places[chunk]
                    stored = data[place.offset - start : place.offset - start + place.stored]
                    _check(content, blob, chunk, stored, place.codec, found)
                progress(len(data))


def _check(
    content: LayerContent, blob: int, chunk: int, stored: memoryview, codec: int, found: Verified
) -> None:
    try:
        raw = content.unpack(blob, chunk, stored, codec)
    except Corrupt as e:
        found.bad_chunks += 1
        found.report(e.message)
        return
    found.chunks += 1
    found.bytes += len(raw)
    found.stored += len(stored)


def _runs(layout: Layout) -> Iterator[list[int]]:
    """Stored chunks in the order of their places, those that touch together, in reads of at
    most READ_AT_ONCE. Chunks that share a place are one by one."""
    places = layout.places
    order = sorted(
        (i for i, p in enumerate(places) if p.codec != ZERO),
        key=lambda i: (places[i].object, places[i].offset),
    )
    run: list[int] = []
    for chunk in order:
        if run:
            first, last, place = places[run[0]], places[run[-1]], places[chunk]
            if (
                place.object != first.object
                or place.offset != last.offset + last.stored
                or place.offset + place.stored > first.offset + READ_AT_ONCE
            ):
                yield run
                run = []
        run.append(chunk)
    if run:
        yield run
