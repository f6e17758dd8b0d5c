"""Eviction: bounded, oldest use first, pins and locks respected, nothing leaks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from dsecfs.cache import CachedBlob, ChunkCache, disk_use
from dsecfs.cache.blob import open_files
from dsecfs.layers.layout import RAW
from dsecfs.nodedirs import NodeDirs
from tests.t2_cache.conftest import ExpectLog, MakeCache
from tests.t2_cache.packing import CHUNK, Packed, content, pack
from tests.t2_cache.stores import CountingStore


def present(blob: CachedBlob) -> list[int]:
    missing = set(blob.files.missing(0, blob.chunk_count - 1))
    return [c for c in range(blob.chunk_count) if c not in missing]


def idle(cache: ChunkCache) -> None:
    """Wait for an eviction that was started in the background."""
    end = time.monotonic() + 10
    while cache._evictor._scheduled and time.monotonic() < end:
        time.sleep(0.002)


def test_never_above_the_limit_and_always_right(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    packed = pack(store, content(300), codecs=(RAW,))
    limit = 100 * CHUNK
    cache = make_cache(store, max_bytes=limit, read_ahead=0)
    blob = cache.open(packed.register(dirs))
    top = 0
    for offset in range(0, blob.size, CHUNK):
        assert blob.read(offset, CHUNK) == packed.content[offset : offset + CHUNK]
        top = max(top, disk_use(dirs))
    # A few threads may each be writing one chunk while the last free one is taken.
    assert limit // 2 < top <= limit + 4 * CHUNK + 65536
    idle(cache)
    cache.evict()
    assert disk_use(dirs) <= limit
    assert cache.stats.snapshot()["evictions"] > 0


def test_oldest_use_goes_first(dirs: NodeDirs, make_cache: MakeCache, store: CountingStore) -> None:
    one, two = (pack(store, content(50, seed=s), codecs=(RAW,)) for s in (1, 2))
    big = make_cache(store)
    blobs = [big.open(p.register(dirs)) for p in (one, two)]
    now = int(time.time()) - 10_000
    ages: dict[tuple[int, int], int] = {}
    for b, blob in enumerate(blobs):
        blob.read(0, blob.size)
        for chunk in range(50):
            ages[b, chunk] = blob.files.used[chunk] = now + (chunk * 37 + b * 11) % 97
    cache = make_cache(store, max_bytes=90 * CHUNK, high=0.9, low=0.5)
    assert cache.evict() >= 55 * CHUNK - 65536
    left = {(b, c) for b, blob in enumerate(blobs) for c in present(blob)}
    gone = ages.keys() - left
    assert 40 <= len(left) <= 45
    assert max(ages[k] for k in gone) <= min(ages[k] for k in left)
    for blob, packed in zip(blobs, (one, two), strict=True):
        assert blob.read(0, blob.size) == packed.content


def test_pinned_blobs_stay(dirs: NodeDirs, make_cache: MakeCache, store: CountingStore) -> None:
    one, two = (pack(store, content(20, seed=s), codecs=(RAW,)) for s in (1, 2))
    cache = make_cache(store)
    kept, other = (cache.open(p.register(dirs)) for p in (one, two))
    for blob in (kept, other):
        blob.read(0, blob.size)
        blob.files.used[0] = 1
    cache.pin(kept.digest, "mount")
    small = make_cache(store, max_bytes=CHUNK)
    small.evict()
    assert kept.complete() and not present(other)
    cleared = cache.clear()
    assert (cleared.pinned, cleared.chunks) == (1, 0)
    cache.unpin(kept.digest, "mount")
    cleared = cache.clear(kept.digest)
    assert (cleared.pinned, cleared.chunks) == (0, 20)
    assert disk_use(dirs) <= 4096 * 2
    for blob, packed in ((kept, one), (other, two)):
        assert blob.read(0, blob.size) == packed.content


def test_a_locked_chunk_stays(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    blob.read(0, blob.size)
    files = open_files(dirs, packed.digest, packed.ref.size, packed.ref.chunk_size)
    assert files.lock(4)
    cache.clear()
    assert present(blob) == [4]


@pytest.mark.parametrize("crash", ["before the word was set", "before the data was punched"])
def test_space_of_a_crash_comes_back(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore, crash: str
) -> None:
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    blob.read(0, 2 * CHUNK)
    if crash.startswith("before the word"):
        with open(dirs.blob(packed.digest) / "data", "r+b") as f:
            f.seek(3 * CHUNK)
            f.write(b"half a chunk" * 3000)
    else:
        blob.read(0, blob.size)
        blob.files.clear(2, 8)
    assert disk_use(dirs) > 4 * CHUNK
    make_cache(store, max_bytes=3 * CHUNK, high=0.99, low=0.99).evict()
    assert disk_use(dirs) <= 3 * CHUNK
    assert present(blob)[:2] == [0, 1], "space nobody can use goes first"
    assert blob.read(0, blob.size) == packed.content


def test_a_damaged_neighbour_does_not_stop_eviction(
    dirs: NodeDirs,
    make_cache: MakeCache,
    store: CountingStore,
    expect_log: ExpectLog,
) -> None:
    expect_log(r"cannot be used and loses its data")
    one, two = (pack(store, content(20, seed=s), codecs=(RAW,)) for s in (1, 2))
    cache = make_cache(store)
    for p in (one, two):
        cache.open(p.register(dirs)).read(0, 20 * CHUNK)
    (dirs.blob(one.digest) / "chunks").write_bytes(b"junk")
    (dirs.blobs / "not-a-digest").mkdir()
    (dirs.blobs / ("0" * 64)).write_bytes(b"a file")
    cache.clear()
    assert disk_use(dirs) <= 8192
    assert cache.open(one.digest).read(0, 20 * CHUNK) == one.content, "its files were kept open"
    one.register(dirs)
    assert make_cache(store).open(one.digest).read(0, 20 * CHUNK) == one.content


def test_readers_against_eviction_never_see_zeros(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    packed = pack(store, content(64), codecs=(RAW,))
    cache = make_cache(store, max_bytes=40 * CHUNK)
    blob = cache.open(packed.register(dirs))
    stop = threading.Event()
    wrong: list[int] = []
    served = [0]

    def evictor() -> None:
        while not stop.is_set():
            cache.clear()

    def reader(seed: int) -> None:
        at = seed
        while not stop.is_set():
            at = (at * 1103515245 + 12345) % (1 << 31)
            offset, size = at % blob.size, at % (3 * CHUNK)
            data = blob.read_nowait(offset, size)
            if data is None:
                data = blob.read(offset, size)
            else:
                served[0] += 1
            if data != packed.content[offset : offset + size]:
                wrong.append(offset)

    threads = [threading.Thread(target=evictor)]
    threads += [threading.Thread(target=reader, args=(s,)) for s in (1, 2, 3)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert served[0] and cache.stats.snapshot()["evictions"]


def test_only_one_process_evicts_at_a_time(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    import fcntl

    make_cache(store).open(packed.register(dirs)).read(0, 1 << 20)
    cache = make_cache(store, max_bytes=1)
    fd = os.open(dirs.data / "evict.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert cache.evict() == 0
    os.close(fd)
    assert cache.evict() > 0


def test_disk_is_left_to_others(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore, tmp_path: Path
) -> None:
    make_cache(store).open(packed.register(dirs)).read(0, 1 << 20)
    disk = os.statvfs(tmp_path)
    cache = make_cache(store, min_free=disk.f_blocks * disk.f_frsize * 2)
    assert cache.evict() > 0
    assert disk_use(dirs) <= 8192
