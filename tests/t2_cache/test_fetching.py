"""How chunks are fetched: once, merged, ahead, in order, by priority."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsecfs.cache import ChunkCache
from dsecfs.cache.pool import Pool
from dsecfs.cache.readahead import ReadAhead
from dsecfs.errors import BadInput, CacheError
from dsecfs.layers.digest import sha256
from dsecfs.layers.layout import LZ4, RAW, Layout, Place, encode_layout
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import Priority, layout_key, object_key
from tests.t2_cache.conftest import ExpectLog, MakeCache
from tests.t2_cache.packing import CHUNK, Packed, content, pack
from tests.t2_cache.stores import CountingStore


def test_neighbours_become_one_range_read(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    packed = pack(store, content(30))
    blob = make_cache(store, read_ahead=0).open(packed.register(dirs))
    assert blob.read(2 * CHUNK, 20 * CHUNK) == packed.content[2 * CHUNK : 22 * CHUNK]
    assert store.ranges == 1
    stored = sum(p.stored for p in packed.layout.places[2:22])
    assert store.bytes == stored, "exactly the chunks asked for"


def test_a_range_read_is_at_most_4_mib(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    size = 1 << 20
    packed = pack(store, content(10, chunk_size=size), chunk_size=size, codecs=(RAW,))
    blob = make_cache(store).open(packed.register(dirs))
    assert blob.read(0, blob.size) == packed.content
    assert max(length for _, _, length, _ in store.log) == 4 << 20
    assert store.bytes == blob.size


def test_one_fetch_per_chunk_for_many_threads(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    gate = threading.Event()
    store.hook = lambda key, offset, length: bool(length) and gate.wait(20)
    blob = make_cache(store).open(packed.register(dirs))
    results: list[bool] = []

    def reader() -> None:
        results.append(blob.read(0, blob.size) == packed.content)

    threads = [threading.Thread(target=reader) for _ in range(16)]
    for thread in threads:
        thread.start()
    while not store.ranges:
        time.sleep(0.001)
    gate.set()
    for thread in threads:
        thread.join()
    assert results == [True] * 16
    assert store.bytes == sum(p.stored for p in packed.layout.places)


def test_equal_chunks_share_a_request(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    """Deduplicated chunks have one place (what BlobWriter writes)."""
    data = content(4)
    packed = pack(store, data + data)
    first = packed.layout.places[:4]
    shared = Layout(packed.digest, packed.layout.objects, (*first, *first))
    store.put_if_absent(layout_key(packed.digest, 2), encode_layout(shared))
    blob = make_cache(store).open(packed.register(dirs))
    assert blob.read(0, blob.size) == packed.content
    assert store.ranges == 1
    assert store.bytes == sum(p.stored for p in first)


def test_sequential_readers_run_ahead(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    packed = pack(store, content(200), codecs=(LZ4,))
    cache = make_cache(store, read_ahead=64 * CHUNK)
    blob = cache.open(packed.register(dirs))
    for offset in range(0, blob.size, CHUNK):
        assert blob.read(offset, CHUNK) == packed.content[offset : offset + CHUNK]
    counted = cache.stats.snapshot()
    assert store.ranges <= 60, "200 chunks one by one"
    assert counted["prefetched"] >= 120
    assert counted["bytes_fetched"] == sum(p.stored for p in packed.layout.places)


def test_random_readers_fetch_nothing_ahead(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    packed = pack(store, content(200), codecs=(LZ4,))
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    for chunk in range(0, 200, 13):
        blob.read(chunk * CHUNK + 99, 100)
    assert cache.stats.snapshot()["prefetched"] == 0
    assert blob.contents().valid == store.ranges


def test_short_runs_of_chunks_start_no_read_ahead() -> None:
    """What a program does that maps libraries: pieces of 15 chunks here and there."""
    ahead = ReadAhead(10_000, 128)
    for piece in range(40):
        for chunk in range(piece * 100, piece * 100 + 15):
            assert not ahead.missed(chunk, chunk)
    assert not ahead.triggers


def test_read_ahead_is_bounded_by_what_was_read() -> None:
    ahead = ReadAhead(10_000, 128)
    asked = 0
    for chunk in range(1000):
        got = ahead.missed(chunk, chunk) if chunk >= asked else ahead.hit(chunk, chunk)
        assert not got or got.start >= asked
        asked = max(asked, got.stop if got else 0)
        read = chunk + 1
        assert asked <= read + min(read, 128)
    assert asked >= 1000 + 64, "a steady reader has most of the window before it"
    assert not ReadAhead(100, 0).missed(0, 0) and not ReadAhead(100, 0).missed(1, 1)


def test_read_ahead_follows_many_readers_and_stops_at_the_end() -> None:
    ahead = ReadAhead(1000, 32)
    starts = [i * 60 for i in range(16)]
    for step in range(20):
        for start in starts:
            got = ahead.missed(start + step, start + step)
            assert got.stop <= 1000
            if step:
                assert not got or got.start > start + step
    for i in range(100):  # too many streams: forgotten ones leave no triggers
        ahead.missed((i * 37) % 1000, (i * 37) % 1000)
    for chunk in range(1000):
        ahead.hit(chunk, chunk)


def test_prefetch_across_blobs_is_one_sequential_read(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    """A hot object: chunks of several blobs back to back, in the order of use."""
    data = [content(12, seed=s) for s in range(3)]
    blobs = [pack(store, d, codecs=(RAW,)) for d in data]
    order = [(b, c) for c in (7, 0, 3, 9) for b in (2, 0, 1)]
    hot = b"".join(data[b][c * CHUNK : (c + 1) * CHUNK] for b, c in order)
    name = sha256(hot)
    store.put_content(object_key(name), hot)
    for i, packed in enumerate(blobs):
        places = list(packed.layout.places)
        objects = (*packed.layout.objects, name)
        mine = [(at, c) for at, (b, c) in enumerate(order) if b == i]
        for at, c in mine:
            places[c] = Place(len(objects) - 1, at * CHUNK, CHUNK, RAW)
        layout = Layout(packed.digest, objects, tuple(places), tuple(c for _, c in mine))
        store.put_if_absent(layout_key(packed.digest, 2), encode_layout(layout))
        packed.register(dirs)
    cache = make_cache(store)
    opened = [cache.open(b.digest) for b in blobs]
    assert [b.hot_chunks() for b in opened] == [[7, 0, 3, 9]] * 3
    handle = cache.prefetch([(blobs[b].digest, [c]) for b, c in order])
    assert handle.wait(20)
    assert handle.progress() == (12, 12, 0, 12 * CHUNK)
    assert store.bytes == len(hot)
    assert store.ranges == 1
    for b, c in order:
        assert opened[b].read_nowait(c * CHUNK, CHUNK) == data[b][c * CHUNK : (c + 1) * CHUNK]


def test_prefetch_reports_failures_and_goes_on(
    dirs: NodeDirs,
    make_cache: MakeCache,
    store: CountingStore,
    expect_log: ExpectLog,
) -> None:
    expect_log(r"chunk 4: object")
    packed = pack(store, content(9), spoil=lambda i, s: s[:-1] + b"!" if i == 4 else s)
    blob = make_cache(store).open(packed.register(dirs))
    handle = blob.prefetch([*range(9), *range(9)])
    assert handle.wait(20)
    progress = handle.progress()
    assert (progress.total, progress.done, progress.failed) == (18, 17, 1)
    assert "chunk 4" in str(handle.error)
    with pytest.raises(BadInput):
        blob.prefetch([9])
    with pytest.raises(BadInput):
        blob.prefetch([-1])


def test_long_prefetches_are_fed_piecewise_and_can_be_cancelled(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    packed = pack(store, content(2000, chunk_size=4096), chunk_size=4096, codecs=(LZ4,))
    gate = threading.Event()
    store.hook = lambda key, offset, length: bool(length) and gate.wait(20)
    blob = make_cache(store).open(packed.register(dirs))
    handle = blob.prefetch(range(2000))
    assert not handle.wait(0.05)
    assert len(blob.inflight) <= 512
    handle.cancel()
    assert handle.wait(1)
    gate.set()
    end = time.monotonic() + 10
    while blob.inflight and time.monotonic() < end:
        time.sleep(0.002)
    assert not blob.inflight
    assert blob.contents().valid < 2000
    assert blob.prefetch(range(2000)).wait(20)
    assert blob.complete()


def test_a_reader_joins_and_hurries_a_prefetch(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    size = 1 << 18
    packed = pack(store, content(60, chunk_size=size), chunk_size=size, codecs=(RAW,))
    gate = threading.Event()
    store.hook = lambda key, at, n: bool(n) and at != 58 * size and gate.wait(20)
    blob = make_cache(store, threads=3).open(packed.register(dirs))
    handle = blob.prefetch(range(0, 60, 2))  # one thread may prefetch, chunk by chunk
    while not store.ranges:
        time.sleep(0.001)
    assert blob.read(58 * size, 10) == packed.content[58 * size : 58 * size + 10]
    assert [offset for _, offset, _, _ in store.log] == [0, 58 * size]
    assert store.log[1][3] == Priority.FOREGROUND
    gate.set()
    assert handle.wait(20)
    assert store.ranges == 30, "none was fetched twice"


# -- the pool -----------------------------------------------------------------------------


def _block(gate: threading.Event) -> None:
    gate.wait(10)


def test_pool_order_floors_and_limits() -> None:
    pool = Pool("test", 1, shared=1)
    gate, done = threading.Event(), threading.Event()
    order: list[Priority] = []
    pool.submit(Priority.FOREGROUND, functools.partial(_block, gate))
    for priority in (Priority.BACKGROUND, Priority.PREFETCH, Priority.FOREGROUND):
        pool.submit(priority, *([lambda p=priority: order.append(p)] * 100))
    pool.submit_later(0, Priority.BACKGROUND, done.set)
    gate.set()
    assert done.wait(10)
    pool.close()
    first = order[:96]
    assert first.count(Priority.PREFETCH) == 9, (
        "one turn in eight, but the one that is the next line's"
    )
    assert first.count(Priority.BACKGROUND) == 3, "one turn in thirty-two"
    assert first.count(Priority.FOREGROUND) == 84


def test_pool_keeps_threads_for_readers() -> None:
    pool = Pool("test", 4, shared=2)
    gate, done = threading.Event(), threading.Event()
    running = []

    def block() -> None:
        running.append(1)
        gate.wait(10)

    pool.submit(Priority.PREFETCH, *([block] * 20))
    pool.submit(Priority.BACKGROUND, *([block] * 20))
    while len(running) < 2:
        time.sleep(0.001)
    pool.submit(Priority.FOREGROUND, done.set)
    assert done.wait(5)
    assert len(running) == 2
    gate.set()
    pool.close()
    with pytest.raises(CacheError, match="closed"):
        pool.submit(Priority.FOREGROUND, done.set)


def test_pool_survives_work_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    pool = Pool("test", 2, shared=1)

    def bug() -> None:
        raise ZeroDivisionError

    for priority in (Priority.PREFETCH, Priority.FOREGROUND):
        for _ in range(10):
            pool.submit(priority, bug)
    done = [threading.Event() for _ in range(3)]
    for event, priority in zip(done, Priority, strict=True):
        pool.submit(priority, event.set)
    assert all(e.wait(5) for e in done)
    pool.close()


# -- forks ----------------------------------------------------------------------------------


def test_no_thread_before_the_first_miss_and_none_across_a_fork(tmp_path: Path) -> None:
    script = f"""
import os, sys, threading
from pathlib import Path
before = threading.active_count()
from dsecfs.cache import ChunkCache
from dsecfs.errors import CacheError
from dsecfs.nodedirs import NodeDirs
from tests.t2_cache.stores import directory_store
from tests.t2_cache.packing import pack, content
heavy = {{"trio", "boto3", "obstore", "pyfuse3", "pydantic", "rich"}} & set(sys.modules)
assert not heavy, heavy
dirs = NodeDirs(Path({str(tmp_path / "d")!r}), Path({str(tmp_path / "r")!r}))
dirs.create()
store = directory_store({str(tmp_path / "s")!r})
packed = pack(store, content(6))
packed.register(dirs)
cache = ChunkCache(dirs, store, max_bytes=1 << 30, min_free=0)
assert threading.active_count() == before
child = os.fork()
if not child:
    blob = cache.open(packed.digest)
    os._exit(0 if blob.read(0, blob.size) == packed.content else 1)
assert os.waitpid(child, 0)[1] == 0
blob = cache.open(packed.digest)
assert blob.read(0, 1)
cache.clear()
def refused():
    child = os.fork()
    if not child:
        for reopen in (False, True):
            try:
                (cache.open(packed.digest) if reopen else blob).read(0, 1, deadline_s=5)
            except CacheError as e:
                print(e, flush=True)
                if "before a fork" not in str(e):
                    os._exit(1)
                continue
            os._exit(10 + reopen)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert refused() == 11, "opened before: refused; opened again: fine, no thread was started yet"
cache.clear()
assert blob.read(0, 1)
cache.clear()
assert refused() == 0, "the threads are not in the child"
cache.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_open_blobs_are_bounded(
    dirs: NodeDirs,
    make_cache: MakeCache,
    store: CountingStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dsecfs.cache.keep.SYNC_S", 0.0)
    blobs = [pack(store, content(2, seed=s)) for s in range(12)]
    cache = make_cache(store, open_blobs=4)
    kept = cache.open(blobs[0].register(dirs))
    base = len(os.listdir("/proc/self/fd"))
    for packed in blobs:
        blob = cache.open(packed.register(dirs))
        assert blob.read(0, blob.size) == packed.content
    del blob
    end = time.monotonic() + 10
    bound = base + 4 * 4 + 4
    while len(os.listdir("/proc/self/fd")) > bound and time.monotonic() < end:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= bound
    assert kept.read(0, kept.size) == blobs[0].content


def test_limits_are_checked(dirs: NodeDirs, store: CountingStore) -> None:
    for bad in ({"max_bytes": 0}, {"max_bytes": 1, "low": 0.9, "high": 0.8}):
        with pytest.raises(BadInput, match="make no sense"):
            ChunkCache(dirs, store, **bad)
