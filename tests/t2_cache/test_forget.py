"""Forgetting a blob: never what is pinned, open or about to be mounted; whole or not at all."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import time
import traceback
from typing import Any

import pytest

from dsecfs.cache import ChunkCache, pin, unpin
from dsecfs.cache.blob import forget_blob, open_files, setup_lock
from dsecfs.cache.evict import cached_blobs, disk_use
from dsecfs.errors import Busy, NotFound
from dsecfs.layers.digest import Digest
from dsecfs.nodedirs import NodeDirs
from tests.t2_cache.conftest import ExpectLog, MakeCache
from tests.t2_cache.packing import CHUNK, Packed, content, pack
from tests.t2_cache.stores import CountingStore, directory_store


def test_what_is_used_stays(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    blob.read(0, blob.size)
    assert not forget_blob(dirs, packed.digest, 0), "it is open"
    del blob
    cache.close()
    assert not forget_blob(dirs, packed.digest, 60), "its layer was just asked for"
    pin(dirs, packed.digest, "mount-1")
    assert not forget_blob(dirs, packed.digest, 0)
    unpin(dirs, packed.digest, "mount-1")
    with setup_lock(dirs.blob(packed.digest)):
        assert not forget_blob(dirs, packed.digest, 0)
    assert disk_use(dirs)
    assert forget_blob(dirs, packed.digest, 0)
    assert not list(cached_blobs(dirs)) and not disk_use(dirs)
    assert os.listdir(dirs.gone) == []
    assert not forget_blob(dirs, packed.digest, 0), "it is not there"
    with pytest.raises(NotFound):
        make_cache(store).open(packed.digest)
    with pytest.raises(NotFound):
        open_files(dirs, packed.digest, packed.ref.size, packed.ref.chunk_size)
    assert make_cache(store).open(packed.register(dirs)).read(0, 99) == packed.content[:99]


def test_what_a_killed_forgetter_leaves_is_removed(dirs: NodeDirs, packed: Packed) -> None:
    packed.register(dirs)
    dirs.gone.mkdir()
    dirs.blob(packed.digest).rename(dirs.gone / packed.digest)
    assert not list(cached_blobs(dirs))
    packed.register(dirs)
    assert forget_blob(dirs, packed.digest, 0)
    assert os.listdir(dirs.gone) == []


def _forget(dirs: NodeDirs, blob: Digest, stop: Any, results: Any) -> None:
    done = 0
    while not stop.is_set():
        done += forget_blob(dirs, blob, 0.0)
    results.put(done)


def _use(root: str, dirs: NodeDirs, packed: Packed, ready: Any, results: Any) -> None:
    try:
        results.put(_reads(root, dirs, packed, ready))
    except BaseException:
        results.put(traceback.format_exc())
        raise


def _reads(root: str, dirs: NodeDirs, packed: Packed, ready: Any) -> int:
    reads = 0
    ready.wait(60)
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        cache = ChunkCache(dirs, directory_store(root), max_bytes=1 << 30, min_free=0)
        try:
            blob = cache.open(packed.register(dirs))
            assert blob.read(0, blob.size) == packed.content
            assert blob.complete()
            del blob
            reads += 1
        except (NotFound, Busy):
            pass  # it was forgotten between two steps
        finally:
            cache.close()
        time.sleep(0.003)
    return reads


def test_two_users_and_one_who_forgets(dirs: NodeDirs, store: CountingStore, tmp_path: Any) -> None:
    """A lock is on the directory that has the name, not on one that had it."""
    packed = pack(store, content(3))
    context = multiprocessing.get_context("spawn")
    stop, results, forgotten = context.Event(), context.Queue(), context.Queue()
    forgetter = context.Process(target=_forget, args=(dirs, packed.digest, stop, forgotten))
    forgetter.start()
    ready = context.Barrier(2)
    users = [
        context.Process(
            target=_use, args=(str(tmp_path / "store"), dirs, packed, ready, results)
        )
        for _ in range(2)
    ]
    try:
        for user in users:
            user.start()
        counts = [results.get(timeout=90) for _ in users]
    finally:
        stop.set()
        for process in (forgetter, *users):
            process.join(20)
    assert forgotten.get(timeout=10)
    assert all(isinstance(reads, int) and reads > 3 for reads in counts), counts
    assert [p.exitcode for p in (forgetter, *users)] == [0, 0, 0]


def test_too_many_open_files_is_said_once(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore,
    expect_log: ExpectLog,
) -> None:  # fmt: skip
    expect_log(r"ERROR dsecfs.cache.blob: blobs are read through.*Too many open files")
    cache = make_cache(store)
    other = pack(store, content(2, seed=9))
    packed.register(dirs)
    other.register(dirs)
    cache.open(other.digest).read(0, CHUNK)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        # The limit is a number no descriptor reaches; other tests may hold many.
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, highest + 200), hard))
        with pytest.raises(OSError, match="Too many") as caught:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        assert caught.value.errno == errno.EMFILE
        # Room for the chunk list and the directory, not for the files.
        for fd in (held.pop(), held.pop()):
            os.close(fd)
        for _ in range(2):
            files = open_files(dirs, packed.digest, packed.ref.size, packed.ref.chunk_size)
            assert files.volatile
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    assert cache.open(packed.digest).read(0, 99) == packed.content[:99]
