"""A read is right, or an error; whatever eviction, reboots and damage do in between."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dsecfs.cache import CachedBlob, ChunkCache
from dsecfs.errors import BadInput
from dsecfs.layers.layout import LZ4, RAW, ZSTD
from dsecfs.nodedirs import NodeDirs
from tests.t2_cache.conftest import ExpectLog, MakeCache, change_boot, new_node
from tests.t2_cache.packing import CHUNK, Packed, content, pack
from tests.t2_cache.stores import CountingStore


def test_ranges_and_borders(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    size = blob.size
    assert size % CHUNK == 4096
    borders = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 6 * CHUNK, 7 * CHUNK, size - 4097, size - 1]
    for warm in (False, True):
        for start in borders:
            for end in [*borders, size, size + 1, size + 10 * CHUNK]:
                if end < start:
                    continue
                if not warm and end % 3:
                    cache.clear()
                assert blob.read(start, end - start) == packed.content[start:end]
    assert blob.read_nowait(0, size) == packed.content
    for offset in (size, size + 1, 1 << 60):
        assert blob.read(offset, 100) == b"" and blob.read_nowait(offset, 100) == b""
    for bad in ((-1, 1), (0, -1)):
        with pytest.raises(BadInput):
            blob.read(*bad)
        with pytest.raises(BadInput):
            blob.read_nowait(*bad)


@pytest.mark.parametrize("codec", [RAW, LZ4, ZSTD])
def test_every_codec(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore, codec: int
) -> None:
    packed = pack(store, content(5, seed=codec, tail=1), codecs=(codec,))
    blob = make_cache(store).open(packed.register(dirs))
    assert blob.read(0, blob.size) == packed.content


def test_zero_chunks_take_neither_requests_nor_disk(
    dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    packed = pack(store, bytes(50 * CHUNK))
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    assert blob.read(0, blob.size) == packed.content
    assert store.ranges == 0
    assert cache.disk_use() == 0
    assert blob.complete()


def test_zeros_over_garbage(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    """A hole is made, not assumed: something may lie where a chunk of zeros belongs."""
    make_cache(store).open(packed.register(dirs))
    with open(dirs.blob(packed.digest) / "data", "r+b") as f:
        f.seek(6 * CHUNK)
        f.write(b"\xff" * CHUNK)
    blob = make_cache(store).open(packed.digest)
    assert blob.read(6 * CHUNK, CHUNK) == bytes(CHUNK)
    assert blob.read(0, blob.size) == packed.content


def test_aread(dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore) -> None:
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))

    async def main() -> None:
        async def one(offset: int) -> None:
            for step in range(0, blob.size, 5000):
                at = (offset + step) % blob.size
                assert await blob.aread(at, 9000) == packed.content[at : at + 9000]

        async with trio.open_nursery() as nursery:
            for task in range(12):
                nursery.start_soon(one, task * 3777)
        cache.clear()
        assert await blob.aread(0, blob.size + 5) == packed.content
        assert await blob.aread(blob.size, 5) == b""

    trio.run(main)


def test_aread_of_bytes_that_left_memory(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    blob = make_cache(store).open(packed.register(dirs))
    blob.read(0, blob.size)
    fd = os.open(dirs.blob(packed.digest) / "data", os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    requests = store.ranges

    async def main() -> None:
        assert await blob.aread(0, blob.size) == packed.content

    trio.run(main)
    assert store.ranges == requests


def test_cancelled_reads_leave_nothing_behind(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    held = threading.Event()
    store.hook = lambda key, offset, length: bool(length) and held.wait(20)
    blob = make_cache(store).open(packed.register(dirs))

    async def main() -> None:
        for _ in range(20):
            with trio.move_on_after(0.01):
                await blob.aread(0, 3 * CHUNK)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(blob.aread, 0, blob.size)
            await trio.sleep(0.05)
            held.set()
        assert await blob.aread(0, blob.size) == packed.content

    trio.run(main)
    assert not blob.inflight


def test_an_event_loop_that_ended_does_not_hurt_the_fetch(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    held = threading.Event()
    store.hook = lambda key, offset, length: bool(length) and held.wait(20)
    blob = make_cache(store).open(packed.register(dirs))

    async def main() -> None:
        with trio.move_on_after(0.05):
            await blob.aread(0, CHUNK)

    trio.run(main)
    held.set()
    assert blob.read(0, blob.size) == packed.content


_OPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(0, 14 * 4096), st.integers(0, 20000)),
        st.tuples(st.just("nowait"), st.integers(0, 14 * 4096), st.integers(0, 20000)),
        st.tuples(st.just("clear")),
        st.tuples(st.just("prefetch"), st.lists(st.integers(0, 12), max_size=20)),
        st.tuples(st.just("reboot"), st.lists(st.integers(0, 12), max_size=6), st.booleans()),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("spoil"), st.lists(st.integers(0, 12), max_size=6)),
    ),
    max_size=25,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ops=_OPS)
@example(ops=[("read", 0, 9999), ("reboot", [0], True), ("spoil", [4]), ("read", 0, 60000)])
def test_any_sequence_reads_the_reference_bytes(
    tmp_path: Path,
    ops: list[tuple[object, ...]],
    expect_log: ExpectLog,
) -> None:
    """Reads, prefetches, evictions, boots that lost data, single failures of the store."""
    expect_log(r"damaged in the cache")
    expect_log(r"has another digest")
    dirs, store = new_node(tmp_path)
    data = content(13, chunk_size=4096, tail=300)
    data = data[: 5 * 4096] + bytes(2 * 4096) + data[7 * 4096 :]
    packed = pack(store, data, chunk_size=4096, per_object=17_000)
    digest = packed.register(dirs)
    spoiled: set[tuple[str, int]] = set()

    def change(key: str, offset: int, got: bytes) -> bytes:
        # Each of these places is wrong the first time it is read, and right the second.
        for place in [p for p in spoiled if p[0] == key and offset <= p[1] < offset + len(got)]:
            spoiled.discard(place)
            at = place[1] - offset
            got = got[:at] + bytes([got[at] ^ 0x55]) + got[at + 1 :]
        return got

    store.change = change

    def make() -> tuple[ChunkCache, CachedBlob]:
        cache = ChunkCache(dirs, store, max_bytes=1 << 30, min_free=0)
        return cache, cache.open(digest)

    cache, blob = make()
    try:
        for op, *args in ops:
            if op == "read" or op == "nowait":
                offset, size = args
                assert isinstance(offset, int) and isinstance(size, int)
                got = blob.read(offset, size) if op == "read" else blob.read_nowait(offset, size)
                assert got is None or got == data[offset : offset + size]
            elif op == "clear":
                cache.clear()
            elif op == "prefetch":
                chunks = args[0]
                assert isinstance(chunks, list)
                assert blob.prefetch(chunks).wait(20)
            elif op == "spoil":
                chunks = args[0]
                assert isinstance(chunks, list)
                for chunk in chunks:
                    place = packed.layout.places[chunk]
                    if place.stored:
                        name = packed.layout.objects[place.object]
                        spoiled.add((f"objects/{name[:2]}/{name}", place.offset))
            else:
                cache.close()
                if op == "reboot":
                    lost, punched = args
                    assert isinstance(lost, list)
                    with open(dirs.blob(digest) / "data", "r+b") as f:
                        for chunk in lost:
                            f.seek(chunk * 4096)
                            f.write(bytes(300) if punched else os.urandom(300))
                    change_boot(dirs, digest)
                cache, blob = make()
        spoiled.clear()
        assert blob.read(0, len(data)) == data
    finally:
        cache.close()
