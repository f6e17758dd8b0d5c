"""The store lies, hangs or is gone; the disk is full: the right bytes, or an error in time."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from dsecfs.cache import ChunkCache
from dsecfs.errors import (
    CacheError,
    Corrupt,
    DeadlineExceeded,
    DsecfsError,
    FormatError,
    NotFound,
    StoreError,
    StoreUnavailable,
)
from dsecfs.layers.layout import LZ4, RAW, ZERO, ZSTD, Layout, encode_layout
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import layout_key, object_key
from tests.t2_cache.conftest import ExpectLog, MakeCache, change_boot
from tests.t2_cache.packing import CHUNK, Packed, content, pack
from tests.t2_cache.stores import CountingStore


def flip(chunk: int, at: int = 10) -> object:
    def spoil(i: int, stored: bytes) -> bytes:
        return stored if i != chunk else stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]

    return spoil


@pytest.mark.parametrize("codec", [RAW, LZ4, ZSTD])
def test_corrupt_in_the_store_is_an_error_and_only_there(
    dirs: NodeDirs,
    make_cache: MakeCache,
    store: CountingStore,
    codec: int,
    expect_log: ExpectLog,
) -> None:
    expect_log(r"chunk 3: object .* has another digest")
    data = content(8, seed=3)
    bad = pack(store, data, codecs=(codec,), spoil=flip(3))  # type: ignore[arg-type]
    cache = make_cache(store)
    blob = cache.open(bad.register(dirs))
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"chunk 3: object [0-9a-f]{12} at \d+\+\d+ has another"):
            blob.read(0, blob.size)
        assert blob.read_nowait(3 * CHUNK, 1) is None
        for chunk in (0, 1, 2, 4, 5, 6, 7):
            start = chunk * CHUNK
            assert blob.read(start, CHUNK) == data[start : start + CHUNK]
    counted = cache.stats.snapshot()
    assert counted["corrupt_store"] == 4, "each time fetched once more"
    assert counted["retries"] == 2 and counted["errors"] == 2
    assert blob.contents().valid == 7

    async def main() -> None:
        with pytest.raises(Corrupt):
            await blob.aread(3 * CHUNK, 1)

    trio.run(main)


def test_corrupt_once_is_healed(
    dirs: NodeDirs,
    packed: Packed,
    make_cache: MakeCache,
    store: CountingStore,
    expect_log: ExpectLog,
) -> None:
    expect_log(r"has another digest")
    wrong = [True]

    def change(key: str, offset: int, data: bytes) -> bytes:
        return bytes(len(data)) if wrong and wrong.pop() else data

    store.change = change
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    assert blob.read(0, blob.size) == packed.content
    assert cache.stats.snapshot()["corrupt_store"] >= 1
    assert blob.complete()


@pytest.mark.parametrize("codec", [LZ4, ZSTD, RAW])
@pytest.mark.parametrize("stored", [b"\x00", b"\xff" * 300, os.urandom(CHUNK)])
def test_stored_bytes_that_do_not_decompress(
    dirs: NodeDirs,
    make_cache: MakeCache,
    store: CountingStore,
    codec: int,
    stored: bytes,
    expect_log: ExpectLog,
) -> None:
    expect_log(r"chunk 1: object .* has another digest")
    packed = pack(
        store, content(3, seed=5), codecs=(codec,), spoil=lambda i, s: stored if i == 1 else s
    )
    blob = make_cache(store).open(packed.register(dirs))
    with pytest.raises(Corrupt):
        blob.read(0, blob.size)
    assert blob.read(0, CHUNK) == packed.content[:CHUNK]


def test_a_decompression_bomb_is_refused(
    dirs: NodeDirs,
    make_cache: MakeCache,
    store: CountingStore,
    expect_log: ExpectLog,
) -> None:
    """A frame that states 64 TiB, and one that really has 64 MiB."""
    expect_log(r"chunk 0: .*has another digest")
    expect_log(r"chunk 1: .*has another digest")
    import zstandard

    claims = bytes.fromhex("28b52ffde0") + (1 << 46).to_bytes(8, "little") + b"\x01\x00\x00"
    real = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    bombs = {0: claims, 1: real}
    packed = pack(store, content(3, seed=6), codecs=(ZSTD,), spoil=lambda i, s: bombs.get(i, s))
    blob = make_cache(store).open(packed.register(dirs))
    for chunk in (0, 1):
        with pytest.raises(Corrupt):
            blob.read(chunk * CHUNK, 1)
    assert blob.read(2 * CHUNK, CHUNK) == packed.content[2 * CHUNK :]


def test_a_lying_layout_is_harmless(
    dirs: NodeDirs,
    packed: Packed,
    make_cache: MakeCache,
    store: CountingStore,
    expect_log: ExpectLog,
) -> None:
    """Chunks swapped, called zeros, behind the end: errors or, from a newer layout, bytes."""
    expect_log(r"chunk 3: a chunk of zeros has another digest")
    expect_log(r"chunk [014]: object")
    digest = packed.register(dirs)
    places = list(packed.layout.places)
    places[0], places[1] = places[1], places[0]
    places[2] = places[2]._replace(offset=1 << 40)
    places[3] = places[3]._replace(codec=ZERO)
    places[4] = places[4]._replace(codec=(places[4].codec + 1) % 3)
    lie = Layout(digest, packed.layout.objects, tuple(places))
    (dirs.blob(digest) / "layout").write_bytes(encode_layout(lie))
    blob = make_cache(store).open(digest)
    assert blob.read(0, blob.size) == packed.content, "healed from the store's layout"
    store.put_if_absent(layout_key(digest, 7), encode_layout(lie))
    cache = make_cache(store)
    cache.clear()
    blob = cache.open(digest)
    blob.refresh_layout()
    for chunk in range(5):
        with pytest.raises(DsecfsError):
            blob.read(chunk * CHUNK, 1)
    assert blob.read(5 * CHUNK, blob.size) == packed.content[5 * CHUNK :]


@pytest.mark.parametrize("junk", [b"", b"DSECLAYT", os.urandom(500)])
def test_damaged_local_layout_is_replaced(
    dirs: NodeDirs,
    packed: Packed,
    make_cache: MakeCache,
    store: CountingStore,
    junk: bytes,
    expect_log: ExpectLog,
) -> None:
    expect_log(r"local layout of blob .* is not used")
    path = dirs.blob(packed.register(dirs)) / "layout"
    path.write_bytes(junk)
    blob = make_cache(store).open(packed.digest)
    assert blob.read(0, blob.size) == packed.content
    assert path.read_bytes() == encode_layout(packed.layout)


def test_repacked_objects_are_found_by_the_newest_layout(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    """`optimize` wrote a new layout and collection removed the old objects."""
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    blob.read(0, 1)
    again = pack(store, packed.content, codecs=(ZSTD,), per_object=50_000, sequence=2)
    assert again.digest == packed.digest
    for name in set(packed.layout.objects) - set(again.layout.objects):
        store.delete(object_key(name))
    store.delete(layout_key(packed.digest, 1))
    cache.clear()
    assert blob.read(0, blob.size) == packed.content
    assert cache.stats.snapshot()["layouts"] == 2
    assert make_cache(store).open(packed.digest).read(0, blob.size) == packed.content


def test_missing_object_and_missing_layout(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    for name in packed.layout.objects:
        store.delete(object_key(name))
    blob = make_cache(store).open(packed.register(dirs))
    with pytest.raises(NotFound, match="objects/"):
        blob.read(0, 1)
    store.delete(layout_key(packed.digest, 1))
    (dirs.blob(packed.digest) / "layout").unlink()
    blob = make_cache(store).open(packed.digest)
    with pytest.raises(NotFound, match="no layout"):
        blob.read(0, 1)
    store.put_if_absent(layout_key(packed.digest, 1), b"not a layout")
    with pytest.raises(FormatError):
        blob.read(0, 1)


def test_store_gone_serves_what_is_here(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    blob = make_cache(store).open(packed.register(dirs))
    blob.read(0, 4 * CHUNK)
    blob.prefetch([]).wait(1)
    change_boot(dirs, packed.digest)

    def gone(key: str, offset: int, length: int) -> None:
        raise StoreUnavailable("the store does not answer")

    store.hook = gone
    cache = make_cache(store)
    blob = cache.open(packed.digest)
    assert blob.read(0, 4 * CHUNK) == packed.content[: 4 * CHUNK]
    with pytest.raises(StoreUnavailable):
        blob.read(9 * CHUNK, 10)
    store.hook = lambda key, offset, length: None
    assert blob.read(0, blob.size) == packed.content


def test_the_store_cannot_even_be_opened(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache
) -> None:
    def refuse() -> CountingStore:
        raise StoreError("no such bucket")

    blob = make_cache(refuse).open(packed.register(dirs))
    with pytest.raises(StoreError, match="no such bucket"):
        blob.read(0, 1)


def test_a_bug_in_a_store_does_not_hang_readers(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    seen = []
    previous, threading.excepthook = threading.excepthook, lambda a: seen.append(a.exc_type)
    try:

        def bug(key: str, offset: int, length: int) -> None:
            if length:
                raise ZeroDivisionError

        store.hook = bug
        blob = make_cache(store).open(packed.register(dirs))
        for _ in range(40):  # more often than there are threads
            with pytest.raises(CacheError, match="unexpected error"):
                blob.read(0, 1)
        store.hook = lambda key, offset, length: None
        assert blob.read(0, blob.size) == packed.content
    finally:
        threading.excepthook = previous
    assert seen and set(seen) == {ZeroDivisionError}


def test_a_stalled_store_ends_in_an_error_and_local_reads_go_on(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    release = threading.Event()
    blob = make_cache(store).open(packed.register(dirs))
    blob.read(0, 3 * CHUNK)
    change_boot(dirs, packed.digest)
    store.hook = lambda key, offset, length: bool(length) and release.wait(30)
    cache = make_cache(store, threads=2)
    blob = cache.open(packed.digest)
    try:
        for chunk in (7, 8, 9, 10):
            with pytest.raises(DeadlineExceeded, match=r"did not arrive within 0\.05 s"):
                blob.read(chunk * CHUNK, 1, deadline_s=0.05)
        # Every thread that may wait for the store does so now.
        assert blob.read(0, 3 * CHUNK) == packed.content[: 3 * CHUNK]

        async def main() -> None:
            with pytest.raises(DeadlineExceeded):
                await blob.aread(7 * CHUNK, 1, deadline_s=0.05)
            assert await blob.aread(CHUNK, CHUNK) == packed.content[CHUNK : 2 * CHUNK]

        trio.run(main)
        assert cache.stats.snapshot()["deadlines"] == 5
    finally:
        release.set()
    assert blob.read(0, blob.size) == packed.content


def test_closing_under_readers_ends_them(
    dirs: NodeDirs, packed: Packed, store: CountingStore
) -> None:
    release = threading.Event()
    store.hook = lambda key, offset, length: bool(length) and release.wait(30)
    cache = ChunkCache(dirs, store, max_bytes=1 << 30, min_free=0, threads=1)
    blob = cache.open(packed.register(dirs))
    errors: list[DsecfsError] = []

    def reader(chunk: int) -> None:
        try:
            blob.read(chunk * CHUNK, 1, deadline_s=20)
        except DsecfsError as e:
            errors.append(e)

    threads = [threading.Thread(target=reader, args=(c,)) for c in (0, 3, 9)]
    for thread in threads:
        thread.start()
    while not store.ranges or len(blob.inflight) < 3:
        time.sleep(0.001)
    threading.Timer(0.2, release.set).start()
    cache.close()
    for thread in threads:
        thread.join(10)
    assert not any(t.is_alive() for t in threads)
    assert len(errors) == 2, "the one that was being fetched came in, those that waited were told"
    with pytest.raises(CacheError):
        blob.read(9 * CHUNK, 1)


def test_a_closed_cache_still_serves_what_it_has(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    for chunk in range(5):
        blob.read(chunk * CHUNK, CHUNK)
    blob.prefetch(range(11)).wait(20)
    cache.close()
    for chunk in range(11):  # some of these would start a read-ahead
        assert blob.read(chunk * CHUNK, CHUNK) == packed.content[chunk * CHUNK :][:CHUNK]


# -- a full disk -------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    if os.geteuid():
        pytest.skip("needs root to mount a small tmpfs")
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "dsec-test", str(path)], check=True
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_full_disk_reads_through_and_recovers(small_disk: Path, store: CountingStore) -> None:
    packed = pack(store, content(60, seed=9))
    dirs = NodeDirs(small_disk, small_disk / "run")
    digest = packed.register(dirs)
    cache = ChunkCache(dirs, store, max_bytes=1 << 30, min_free=0)
    try:
        blob = cache.open(digest)
        for _ in range(3):
            for offset in range(0, blob.size, CHUNK):
                assert blob.read(offset, CHUNK) == packed.content[offset : offset + CHUNK]
        assert blob.read(0, blob.size) == packed.content
        counted = cache.stats.snapshot()
        assert counted["read_through"] > 0
        assert counted["errors"] == 0
    finally:
        cache.close()


def test_disk_full_from_the_start(small_disk: Path, store: CountingStore) -> None:
    """Not even the empty files of a blob fit; later they do."""
    packed = pack(store, content(20, seed=10))
    dirs = NodeDirs(small_disk, small_disk / "run")
    digest = packed.register(dirs)
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as f:
        for size in (65536, 4096):
            try:
                while True:
                    f.write(b"x" * size)
            except OSError:
                continue
    cache = ChunkCache(dirs, store, max_bytes=1 << 30, min_free=0)
    try:
        blob = cache.open(digest)
        assert blob.files.volatile
        assert blob.read(0, blob.size) == packed.content
        assert blob.read(100, 70_000) == packed.content[100:70_100]
        assert blob.read_nowait(0, 1) is None
        assert not blob.complete() and not blob.verify_all(deadline_s=5)
        filler.unlink()
        blob.opened -= 3600
        blob = cache.open(digest)
        assert not blob.files.volatile
        assert blob.read(0, blob.size) == packed.content
        assert blob.read_nowait(0, blob.size) == packed.content, "tmpfs is served at once too"
    finally:
        cache.close()


def test_no_space_for_a_chunk_list_is_said(small_disk: Path, packed: Packed) -> None:
    with open(small_disk / "filler", "wb", buffering=0) as f, pytest.raises(OSError):
        while True:
            f.write(b"x" * 4096)
    with pytest.raises(CacheError, match="No space left"):
        packed.register(NodeDirs(small_disk, small_disk / "run"))


def test_a_disk_that_loses_written_pages(
    tmp_path: Path, store: CountingStore, expect_log: ExpectLog
) -> None:
    """A thin disk runs full: writes succeed, writing back fails, and the kernel drops the
    pages. What the file then shows is not the chunk, though its word says VALID."""
    if os.geteuid() or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4")
    expect_log(r"the disk lost data of the cache")
    expect_log(r"damaged in the cache")
    packed = pack(store, content(400, seed=11), codecs=(RAW,))
    thin, mounted = tmp_path / "thin", tmp_path / "mounted"
    thin.mkdir()
    mounted.mkdir()
    with contextlib.ExitStack() as stack:

        def run(*command: str | Path) -> None:
            subprocess.run([str(c) for c in command], check=True, capture_output=True)

        run("mount", "-t", "tmpfs", "-o", "size=4m", "dsec-test", thin)
        stack.callback(run, "umount", "-l", thin)
        image = thin / "image"
        with open(image, "wb") as f:
            f.truncate(64 << 20)
        run("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "nodiscard", image)
        run("mount", "-o", "loop", image, mounted)
        stack.callback(run, "umount", "-l", mounted)
        dirs = NodeDirs(mounted / "data", mounted / "run")
        dirs.create()
        cache = ChunkCache(dirs, store, max_bytes=1 << 30, min_free=0)
        stack.callback(cache.close)
        blob = cache.open(packed.register(dirs))
        assert blob.read(0, blob.size) == packed.content
        assert blob.complete()
        with pytest.raises(CacheError, match="the disk lost data"):
            blob.verify_all(deadline_s=20)
        assert blob.contents().valid == 0
        fd = os.open(dirs.blob(packed.digest) / "data", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        assert blob.read(0, blob.size) == packed.content
        assert cache.stats.snapshot()["disk_errors"] == 1
        assert cache.stats.snapshot()["corrupt_cache"] > 0
        del blob
