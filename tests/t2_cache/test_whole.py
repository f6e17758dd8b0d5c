"""Whole blobs: complete, verified for direct use; and the counters."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from dsecfs.cache import COUNTERS, amplification, read_totals
from dsecfs.cache.stats import Stats
from dsecfs.nodedirs import NodeDirs
from tests.t2_cache.conftest import ExpectLog, MakeCache, change_boot
from tests.t2_cache.packing import CHUNK, Packed
from tests.t2_cache.stores import CountingStore


def test_complete_is_about_this_boot(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    blob = make_cache(store).open(packed.register(dirs))
    assert not blob.complete() and not blob.verify_all(deadline_s=10)
    assert blob.contents() == (11, 0, 0), "verifying fetches nothing that is not here"
    assert blob.prefetch(range(11)).wait(20)
    assert blob.complete()
    data = (dirs.blob(packed.digest) / "data").read_bytes()
    assert data == packed.content, "the file itself is the blob: EROFS may use it"
    change_boot(dirs, packed.digest)
    blob = make_cache(store).open(packed.digest)
    assert not blob.complete()
    assert blob.verify_all(deadline_s=20) and blob.complete()


def test_verify_all_replaces_what_is_damaged(
    dirs: NodeDirs,
    packed: Packed,
    make_cache: MakeCache,
    store: CountingStore,
    expect_log: ExpectLog,
) -> None:
    expect_log(r"chunk 2: damaged in the cache")
    blob = make_cache(store).open(packed.register(dirs))
    blob.read(0, blob.size)
    with open(dirs.blob(packed.digest) / "data", "r+b") as f:
        f.seek(2 * CHUNK + 5)
        f.write(b"\0\0\0")
    change_boot(dirs, packed.digest)
    cache = make_cache(store)
    assert cache.open(packed.digest).verify_all(deadline_s=20)
    assert (dirs.blob(packed.digest) / "data").read_bytes() == packed.content
    assert cache.stats.snapshot()["corrupt_cache"] == 1


def test_counters_and_amplification(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    assert set(read_totals(dirs).values()) == {0}
    assert amplification(read_totals(dirs)) == 0.0
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    blob.read(0, 100)
    blob.read(0, 100)
    counted = cache.stats.snapshot()
    assert (counted["hits"], counted["misses"], counted["bytes_served"]) == (1, 1, 200)
    assert counted["requests"] == 1 and counted["bytes_fetched"] == store.bytes
    assert amplification(counted) == CHUNK / 200
    assert read_totals(dirs) == counted


def test_a_dead_process_keeps_what_it_counted(dirs: NodeDirs) -> None:
    child = os.fork()
    if not child:
        stats = Stats(dirs)
        stats.add("hits", 7)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    stats = Stats(dirs)
    stats.add("hits", 3)
    assert read_totals(dirs)["hits"] == 10
    assert stats.snapshot()["hits"] == 3
    several = [Stats(dirs) for _ in range(100)]
    for s in several:
        s.add("misses")
    assert read_totals(dirs)["misses"] == 63, "slots are counted, the others count in memory"
    assert several[-1].snapshot()["misses"] == 1


def test_strange_counter_files_do_not_fail_reads(dirs: NodeDirs, tmp_path: Path) -> None:
    path = dirs.data / "cache.stats"
    for junk in (b"junk", struct.pack("<8sI", b"DSECSTAT", 99)):
        path.write_bytes(junk)
        stats = Stats(dirs)
        stats.add("hits")
        stats.hit(5)
        assert stats.snapshot()["hits"] == 2
        assert path.read_bytes() == junk
        assert read_totals(dirs) == dict.fromkeys(COUNTERS, 0)
    path.unlink()
    path.mkdir()
    Stats(dirs).add("hits")
