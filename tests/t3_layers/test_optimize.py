"""Optimize and heat: the same bytes from fewer, sequential reads; nothing else changes."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dsecfs.cache.chunkcache import ChunkCache
from dsecfs.cache.warm import warm_plan
from dsecfs.errors import Corrupt
from dsecfs.layers.digest import Digest, sha256
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.head import LayerHead
from dsecfs.layers.heat import HeatBlob, HeatLayer, heat
from dsecfs.layers.heatplot import LEVELS, heat_svg, strip
from dsecfs.layers.local import LocalLayers
from dsecfs.layers.names import parse_name
from dsecfs.layers.optimize import HotBlob, optimize
from dsecfs.layers.publish import BlobOptions, Meta, publish_source
from dsecfs.layers.reach import layout_sequences, read_newest_layout
from dsecfs.layers.sources.image import open_image
from dsecfs.layers.trace import (
    REPLAY_AHEAD,
    Access,
    Trace,
    TracedLayer,
    save_trace,
    trace_chunks,
)
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import object_key
from dsecfs.store.directory import DirectoryStore
from dsecfs.store.faults import CountingStore

CHUNK = 65536
FILES = 40
ENV = sha256(b"an environment")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store", create=True)


@pytest.fixture
def head(store: DirectoryStore, tmp_path: Path) -> LayerHead:
    source = tmp_path / "source"
    source.mkdir()
    rng = random.Random(1)
    for i in range(FILES):
        (source / f"f{i:02d}").write_bytes(rng.randbytes(70_000) + bytes(100_000) + b"x" * 50_000)
    with open_image(f"dir:{source}", platform="linux/amd64") as image:
        return publish_source(
            store,
            image.layers[0],
            parse_name("base/b:1"),
            Meta("base", "linux/amd64"),
            options=BlobOptions(chunk_size=CHUNK),
        ).head


def hot_blobs(head: LayerHead) -> dict[Digest, HotBlob]:
    return {
        ref.digest: HotBlob(ref, digests)
        for ref, digests in zip(head.manifest.blobs, head.chunk_digests, strict=True)
    }


def accesses() -> list[Access]:
    """Every third file, last first."""
    return [Access(b"f%02d" % i, 0, 70_000) for i in range(FILES - 1, 0, -3)]


def read_all(store: CountingStore, head: LayerHead, root: Path, chunks: list[int]) -> bytes:
    """Prefetch `chunks` into an empty cache, then read the whole blob."""
    dirs = NodeDirs(root / "data", root / "run")
    dirs.create()
    LocalLayers(store, dirs).ensure(head.digest)
    cache = ChunkCache(dirs, store, max_bytes=1 << 30)
    try:
        blob = head.manifest.blobs[0]
        store.stats(reset=True)
        handle = cache.prefetch([(blob.digest, chunks)])
        assert handle.wait(30)
        fetched.append(store.stats().ops["get_range"].requests)
        return bytes(cache.open(blob.digest).read(0, blob.size))
    finally:
        cache.close()


fetched: list[int] = []


def test_hot_chunks_lie_back_to_back_in_order_and_all_bytes_stay(
    store: DirectoryStore, head: LayerHead, tmp_path: Path
) -> None:
    fetched.clear()
    blob = head.manifest.blobs[0]
    image = ErofsImage(head.erofs)
    order = trace_chunks(accesses(), [TracedLayer(head.manifest.blobs, image)])
    chunks = [chunk for _, chunk in order]
    counting = CountingStore(store)
    before = read_all(counting, head, tmp_path / "one", chunks)
    done = optimize(store, order, hot_blobs(head))
    assert done.object is not None and done.blobs == 1 and 0 < done.chunks <= len(chunks)
    assert store.stat(object_key(done.object)).size == done.stored
    _, layout = read_newest_layout(store, blob)
    assert layout.hot == tuple(chunks)
    hot = [layout.places[c] for c in chunks if layout.places[c].stored]
    assert all(layout.objects[p.object] == done.object for p in hot)
    assert [p.offset for p in hot] == [sum(q.stored for q in hot[:i]) for i in range(len(hot))]
    after = read_all(counting, head, tmp_path / "two", chunks)
    assert after == before
    assert fetched[1] == 1 < fetched[0]


def test_a_second_run_replaces_the_order_and_keeps_the_first_layout_readable(
    store: DirectoryStore, head: LayerHead
) -> None:
    blob = head.manifest.blobs[0]
    first = [(blob.digest, c) for c in range(0, 20)]
    second = [(blob.digest, c) for c in range(30, 10, -1)]
    optimize(store, first, hot_blobs(head))
    optimize(store, second, hot_blobs(head))
    assert layout_sequences(store, blob.digest) == [1, 2, 3]
    _, layout = read_newest_layout(store, blob)
    assert layout.hot == tuple(c for _, c in second)


def test_the_same_again_writes_nothing(store: DirectoryStore, head: LayerHead) -> None:
    blob = head.manifest.blobs[0]
    order = [(blob.digest, c) for c in (9, 3, 4, 5)]
    first = optimize(store, order, hot_blobs(head))
    before = {i.key for i in store.list("")}
    assert optimize(store, order, hot_blobs(head)) == first
    assert {i.key for i in store.list("")} == before
    optimize(store, order[::-1], hot_blobs(head))
    assert layout_sequences(store, blob.digest) == [1, 2, 3]


def test_chunks_of_unknown_blobs_and_nothing_at_all_write_nothing(
    store: DirectoryStore, head: LayerHead
) -> None:
    before = {i.key for i in store.list("")}
    assert optimize(store, [(sha256(b"other"), 3)], hot_blobs(head)).object is None
    assert {i.key for i in store.list("")} == before


def test_a_damaged_object_is_refused_and_the_old_layout_stays(
    store: DirectoryStore, head: LayerHead
) -> None:
    blob = head.manifest.blobs[0]
    path = store.root / next(store.list("objects/")).key
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="chunk 0 of blob"):
        optimize(store, [(blob.digest, 0)], hot_blobs(head))
    assert layout_sequences(store, blob.digest) == [1]


def test_heat_counts_files_bytes_and_chunks(head: LayerHead) -> None:
    image = ErofsImage(head.erofs)
    trace = Trace(sha256(b"env"), (*accesses(), Access(b"f39", 70_000, 1000), Access(b"no", 0, 9)))
    report = heat(trace, [TracedLayer(head.manifest.blobs, image)])
    assert [f.path for f in report.files[:2]] == [b"f39", b"f36"]
    assert report.files[0].read == 71_000 and report.files[0].size == 220_000
    assert report.total_files == FILES and report.total_bytes == FILES * 220_000
    assert report.read == 71_000 + 12 * 70_000
    assert report.chunk_bytes == report.chunks * CHUNK
    assert report.by_directory(1) == [(b"", 13, report.read)]


def test_heat_by_layer_and_as_pictures(head: LayerHead) -> None:
    images = [TracedLayer(head.manifest.blobs, ErofsImage(head.erofs)) for _ in range(2)]
    trace = Trace(ENV, tuple(accesses()))
    report = heat(trace, images)
    top, below = report.layers
    order = trace_chunks(accesses(), images)
    assert [rank for rank in top.blobs[0].ranks if rank is not None] == [
        order.index((top.blobs[0].digest, c))
        for c, rank in enumerate(top.blobs[0].ranks)
        if rank is not None
    ]
    assert top.chunks == report.chunks == len(order)
    assert below.blobs == () and below.chunks == 0, "a blob counts once"
    assert top.total_chunks == head.manifest.blobs[0].chunks
    line = strip(top, 40)
    assert len(line) == 40 and " " in line and set(line) <= set(LEVELS)
    assert strip(HeatLayer(0, 0, ()), 40) == ""
    whole = strip(HeatLayer(1, 1, (HeatBlob(ENV, (0, 1, 2, None, None)),)), 2)
    assert whole == "█▂"
    picture = ElementTree.fromstring(heat_svg(report, ["a <&> b\x00", "c"], "t\udcff"))
    space = "{http://www.w3.org/2000/svg}"
    drawn = [r for r in picture.iter(f"{space}rect") if r.find(f"{space}title") is not None]
    assert len(drawn) == report.chunks
    words = [t.text for t in picture.iter(f"{space}text")]
    assert f"a <&> b\ufffd: {top.chunks} of {top.total_chunks} chunks" in words


# -- what a mount is warmed with ------------------------------------------------------------

def warm(store: DirectoryStore, head: LayerHead, root: Path) -> tuple[list[int], int, int]:
    """Chunks of the plan, requests for objects, and bytes of these, on an empty node."""
    counting = CountingStore(store)
    dirs = NodeDirs(root / "data", root / "run")
    dirs.create()
    layers = LocalLayers(counting, dirs).ensure_all([head.digest])
    cache = ChunkCache(dirs, counting, max_bytes=1 << 30)
    try:
        plan = warm_plan(cache, counting, ENV, layers)
        counting.stats(reset=True)
        assert cache.prefetch(plan).wait(30)
        op = counting.stats().ops.get("get_range")
        assert cache.stats.snapshot()["prefetched"] == sum(len(c) for _, c in plan)
    finally:
        cache.close()
    return [c for _, chunks in plan for c in chunks], *((op.requests, op.bytes) if op else (0, 0))


def test_a_mount_is_warmed_by_its_runs_and_then_by_one_read(
    store: DirectoryStore, head: LayerHead, tmp_path: Path
) -> None:
    blob = head.manifest.blobs[0]
    layers = [TracedLayer(head.manifest.blobs, ErofsImage(head.erofs))]
    _, layout = read_newest_layout(store, blob)
    assert warm(store, head, tmp_path / "unknown") == ([], 0, 0)

    save_trace(store, Trace(ENV, tuple(accesses())))
    order = trace_chunks(accesses(), layers, ahead=REPLAY_AHEAD)
    # Equal chunks lie in one place.
    stored = {layout.places[c][:3] for _, c in order}
    chunks, scattered, count = warm(store, head, tmp_path / "traced")
    assert chunks == [c for _, c in order] and count == sum(place[2] for place in stored)

    done = optimize(store, order, hot_blobs(head))
    assert warm(store, head, tmp_path / "hot") == (chunks, 1, done.stored)
    assert scattered > 1


def test_a_node_that_knows_the_old_layout_finds_the_hot_object(
    store: DirectoryStore, head: LayerHead, tmp_path: Path
) -> None:
    (blob,) = head.manifest.blobs
    layers = [TracedLayer(head.manifest.blobs, ErofsImage(head.erofs))]
    save_trace(store, Trace(ENV, tuple(accesses())))
    before = warm(store, head, tmp_path)
    optimize(store, trace_chunks(accesses(), layers, ahead=REPLAY_AHEAD), hot_blobs(head))
    place = tmp_path / "data" / "blobs" / blob.digest

    def forget_chunks(age: float) -> None:
        (place / "present").unlink()
        (place / "data").unlink()
        os.utime(place / "layout", (time.time() - age, time.time() - age))

    forget_chunks(age=0)
    assert warm(store, head, tmp_path)[1] == before[1]
    forget_chunks(age=3600)
    assert warm(store, head, tmp_path)[1] == 1


def test_an_environment_that_never_ran_is_warmed_by_what_is_hot(
    store: DirectoryStore, head: LayerHead, tmp_path: Path
) -> None:
    blob = head.manifest.blobs[0]
    optimize(store, [(blob.digest, c) for c in (30, 2, 31)], hot_blobs(head))
    chunks, requests, _ = warm(store, head, tmp_path / "one")
    assert (chunks, requests) == ([30, 2, 31], 1)
    # A run of its own says better what it needs.
    save_trace(store, Trace(ENV, (Access(b"f00", 0, 1),)))
    assert 30 not in warm(store, head, tmp_path / "two")[0]
