"""A layer on this node: fetched once, verified, healed, and cheap when it is there."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dsecfs.cache.blob import read_chunk_list
from dsecfs.errors import CacheError, Corrupt, FormatError, NotFound, StoreUnavailable
from dsecfs.layers import local
from dsecfs.layers.digest import Digest
from dsecfs.layers.local import (
    LocalLayers,
    forget_layer,
    known_layers,
    layer_files,
    layer_lock,
    local_manifest,
)
from dsecfs.layers.manifest import ProcessEnv
from dsecfs.layers.publish import Meta, Published, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import head_key
from dsecfs.store.directory import DirectoryStore
from tests.t3_layers.oci import layer_tar


class Counting(DirectoryStore):
    """Counts reads, and can be cut off."""

    reads = 0
    away = False

    def get(self, key: str, *, max_size: int = 1 << 30) -> bytes:
        self.reads += 1
        if self.away:
            raise StoreUnavailable("the store is away")
        return super().get(key, max_size=max_size)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Counting]:
    store = Counting(tmp_path / "store", create=True)
    yield store
    store.close()


@pytest.fixture
def dirs(tmp_path: Path) -> NodeDirs:
    return NodeDirs(tmp_path / "data", tmp_path / "run")


def publish(store: Any, tmp_path: Path, text: str = "a") -> Published:
    path = tmp_path / f"{text}.tar"
    path.write_bytes(layer_tar([(f"file-{text}", text.encode() * 100_000), ("empty/", None)]))
    meta = Meta("toolkit", "linux/amd64", ProcessEnv({"X": text}))
    return publish_source(store, open_image(f"tar:{path}").layers[0], None, meta)


@pytest.fixture
def layer(store: Counting, tmp_path: Path) -> Published:
    return publish(store, tmp_path)


def check(dirs: NodeDirs, found: local.LocalLayer, expected: Published) -> None:
    assert found.digest == expected.digest
    assert found.manifest == expected.head.manifest
    assert found.blobs == expected.head.manifest.blobs
    assert found.meta_path.read_bytes() == expected.head.erofs
    for blob, digests in zip(found.blobs, expected.head.chunk_digests, strict=True):
        assert read_chunk_list(dirs, blob.digest).digests == digests


def test_one_read_of_the_store_then_none(
    store: Counting, dirs: NodeDirs, layer: Published
) -> None:
    store.reads = 0
    check(dirs, LocalLayers(store, dirs).ensure(layer.digest), layer)
    assert store.reads == 1
    store.away = True
    check(dirs, LocalLayers(store, dirs).ensure(layer.digest), layer)
    assert store.reads == 1
    assert not [p for p in dirs.data.rglob("*") if ".tmp" in p.name]


def test_several_at_once(store: Counting, dirs: NodeDirs, tmp_path: Path) -> None:
    published = [publish(store, tmp_path, t) for t in "abcd"]
    layers = LocalLayers(store, dirs)
    layers.ensure(published[1].digest)
    store.reads = 0
    wanted = [p.digest for p in published] + [published[0].digest]
    found = layers.ensure_all(wanted)
    assert [f.digest for f in found] == wanted and store.reads == 3
    for local_layer, expected in zip(found, published, strict=False):
        check(dirs, local_layer, expected)
    with pytest.raises(NotFound):
        layers.ensure_all([Digest("a" * 64), Digest("b" * 64)])


def _ok(dirs: NodeDirs, layer: Digest) -> Path:
    return Path(f"{dirs.head(layer)}.ok")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def test_damage_here_is_healed(store: Counting, dirs: NodeDirs, layer: Published) -> None:
    layers = LocalLayers(store, dirs)
    layers.ensure(layer.digest)
    head, meta = dirs.head(layer.digest), dirs.meta(layer.digest)
    ok = _ok(dirs, layer.digest)
    chunks = dirs.blob(layer.head.manifest.blobs[0].digest) / "chunks"
    for damage, reads in (
        (lambda: _flip(meta), 0),
        (lambda: os.truncate(meta, 4096), 0),
        (lambda: meta.unlink(), 0),
        (lambda: _flip(ok), 0),
        (lambda: ok.write_bytes(b""), 0),
        (lambda: ok.unlink(), 0),
        (lambda: chunks.unlink(), 0),
        (lambda: _flip(chunks), 0),
        (lambda: os.truncate(chunks, 40), 0),
        (lambda: shutil.rmtree(dirs.blobs), 0),
        (lambda: _flip(head), 1),
        (lambda: os.truncate(head, 100), 1),
        (lambda: head.unlink(), 1),
        (lambda: shutil.rmtree(dirs.data), 1),
    ):
        damage()
        store.reads = 0
        check(dirs, layers.ensure(layer.digest), layer)
        assert store.reads == reads


def test_after_another_boot_everything_is_hashed_again(
    store: Counting, dirs: NodeDirs, layer: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = LocalLayers(store, dirs)
    meta = layers.ensure(layer.digest).meta_path
    store.away = True
    monkeypatch.setattr(local, "boot_id", lambda: "another boot")
    # Damage that keeps inode, size and mtime: blocks that a power loss took.
    stat = meta.stat()
    _flip(meta)
    os.utime(meta, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    check(dirs, layers.ensure(layer.digest), layer)
    store.reads = 0
    _flip(dirs.head(layer.digest))
    monkeypatch.setattr(local, "boot_id", lambda: "a third boot")
    with pytest.raises(StoreUnavailable):
        layers.ensure(layer.digest)
    store.away = False
    check(dirs, layers.ensure(layer.digest), layer)


def test_a_mounted_image_is_never_changed(
    store: Counting, dirs: NodeDirs, layer: Published
) -> None:
    layers = LocalLayers(store, dirs)
    with open(layers.ensure(layer.digest).meta_path, "rb") as mounted:
        before = mounted.read()
        _ok(dirs, layer.digest).unlink()
        layers.ensure(layer.digest)
        assert os.fstat(mounted.fileno()).st_nlink == 1
        dirs.meta(layer.digest).unlink()
        layers.ensure(layer.digest)
        mounted.seek(0)
        assert mounted.read() == before


def test_a_bad_head_in_the_store_is_refused(
    store: Counting,
    dirs: NodeDirs,
    layer: Published,
    tmp_path: Path,
    expect_log: Callable[[str], None],
) -> None:
    expect_log("reading it once more")
    other = publish(store, tmp_path, "b")
    path = Path(store.root, head_key(layer.digest))
    whole = path.read_bytes()
    path.chmod(0o600)
    for data, error in (
        (whole[: len(whole) // 2], FormatError),
        (b"", FormatError),
        (Path(store.root, head_key(other.digest)).read_bytes(), Corrupt),
    ):
        path.write_bytes(data)
        with pytest.raises(error, match=layer.digest[:12]):
            LocalLayers(store, dirs).ensure(layer.digest)
        assert not dirs.head(layer.digest).exists() and not dirs.meta(layer.digest).exists()
    path.write_bytes(whole)
    check(dirs, LocalLayers(store, dirs).ensure(layer.digest), layer)


def test_a_layer_without_data(store: Counting, dirs: NodeDirs, tmp_path: Path) -> None:
    path = tmp_path / "empty.tar"
    path.write_bytes(layer_tar([("empty/", None)]))
    meta = Meta("toolkit", "linux/amd64")
    done = publish_source(store, open_image(f"tar:{path}").layers[0], None, meta)
    assert done.head.manifest.blobs == ()
    check(dirs, LocalLayers(store, dirs).ensure(done.digest), done)


def test_no_place_is_a_cache_error(store: Counting, tmp_path: Path, layer: Published) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError):
        LocalLayers(store, NodeDirs(tmp_path / "file", tmp_path / "run")).ensure(layer.digest)


def test_forgetting(store: Counting, dirs: NodeDirs, layer: Published) -> None:
    layers = LocalLayers(store, dirs)
    layers.ensure(layer.digest)
    assert list(known_layers(dirs)) == [layer.digest]
    assert local_manifest(dirs, layer.digest) == layer.head.manifest
    assert not forget_layer(dirs, layer.digest, 60), "somebody may be about to mount it"
    reads = store.reads
    check(dirs, layers.ensure(layer.digest), layer)
    assert store.reads == reads
    assert forget_layer(dirs, layer.digest, 0)
    assert not any(path.exists() for path in layer_files(dirs, layer.digest))
    assert not list(known_layers(dirs)) and local_manifest(dirs, layer.digest) is None
    check(dirs, layers.ensure(layer.digest), layer)


def test_a_use_is_seen_by_who_forgets(
    store: Counting, dirs: NodeDirs, layer: Published, tmp_path: Path
) -> None:
    layers = LocalLayers(store, dirs)
    layers.ensure(layer.digest)
    ok = layer_files(dirs, layer.digest)[0]
    os.utime(ok, (1, 1))
    layers.ensure(layer.digest)
    assert not forget_layer(dirs, layer.digest, 60)
    for wrong in (1, 1 << 33):  # long ago; and far ahead, because a clock was wrong
        os.utime(ok, (wrong, wrong))
        assert forget_layer(dirs, layer.digest, 60)
        layers.ensure(layer.digest)
    with layer_lock(dirs, layer.digest):
        assert not forget_layer(dirs, layer.digest, 0), "it is being fetched"


def test_what_a_killed_forgetter_leaves(
    store: Counting, dirs: NodeDirs, layer: Published
) -> None:
    layers = LocalLayers(store, dirs)
    ok, head, meta = layer_files(dirs, layer.digest)
    for gone in ((), (meta,), (meta, head)):
        layers.ensure(layer.digest)
        ok.rename(ok.with_name(f".tmp-{ok.name}"))
        for path in gone:
            path.unlink()
        check(dirs, layers.ensure(layer.digest), layer)
        assert not list(head.parent.glob(".tmp-*"))


def _forget_again_and_again(dirs: NodeDirs, layer: Digest, stop: Any) -> None:
    while not stop.is_set():
        forget_layer(dirs, layer, 0.05)


def test_forgetting_while_others_use(store: Counting, dirs: NodeDirs, layer: Published) -> None:
    """Whoever got a layer finds its files for as long as it counts as just used."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=_forget_again_and_again, args=(dirs, layer.digest, stop))
    process.start()
    try:
        layers = LocalLayers(store, dirs)
        reads: set[int] = set()
        # As long as the other process needs to begin, on a machine that is busy.
        enough, end = time.monotonic() + 2.5, time.monotonic() + 60
        while (now := time.monotonic()) < enough or (len(reads) <= 3 and now < end):
            found = layers.ensure(layer.digest)
            used = time.monotonic()
            there = found.meta_path.exists() and read_chunk_list(dirs, found.blobs[0].digest)
            assert there or time.monotonic() - used > 0.04
            reads.add(store.reads)
            if len(reads) % 3 == 0:
                time.sleep(0.06)
        assert len(reads) > 3, "it was forgotten in between"
    finally:
        stop.set()
        process.join(20)
    assert process.exitcode == 0


def _ensure(root: str, dirs: NodeDirs, layers: list[Digest], start: Any, results: Any) -> None:
    store = Counting(root)
    start.wait(30)
    for layer in layers:
        LocalLayers(store, dirs).ensure(layer)
    results.put(store.reads)


def test_many_processes_fetch_each_layer_once(
    store: Counting, dirs: NodeDirs, tmp_path: Path
) -> None:
    published = [publish(store, tmp_path, t) for t in "abcdef"]
    wanted = [p.digest for p in published]
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    racers = [
        context.Process(target=_ensure, args=(str(store.root), dirs, order, start, results))
        for order in (wanted, wanted[::-1], wanted[3:] + wanted[:3])
    ]
    for racer in racers:
        racer.start()
    assert sum(results.get(timeout=60) for _ in racers) == len(wanted)
    for racer in racers:
        racer.join(30)
        assert racer.exitcode == 0
    for expected in published:
        check(dirs, LocalLayers(store, dirs).ensure(expected.digest), expected)


def test_many_threads_fetch_a_layer_once(
    store: Counting, dirs: NodeDirs, layer: Published
) -> None:
    store.reads = 0
    layers = LocalLayers(store, dirs)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(layers.ensure, [layer.digest] * 16))
    assert store.reads == 1 and {f.digest for f in found} == {layer.digest}


_FAST = """
import sys
from pathlib import Path
from dsecfs.layers.catalog import Catalog
from dsecfs.layers.local import LocalLayers
from dsecfs.nodedirs import NodeDirs
found = LocalLayers(None, NodeDirs(Path(sys.argv[1]), Path(sys.argv[2]))).ensure(sys.argv[3])
assert found.manifest.process_env.set == {"X": "a"}
heavy = {"boto3", "obstore", "trio", "pyfuse3", "pydantic", "rich", "zstandard", "lz4",
         "concurrent.futures", "multiprocessing", "asyncio"}
print(sorted(heavy & set(sys.modules)))
"""


def test_the_fast_path_imports_nothing_heavy(
    store: Counting, dirs: NodeDirs, layer: Published
) -> None:
    LocalLayers(store, dirs).ensure(layer.digest)
    done = subprocess.run(
        [sys.executable, "-c", _FAST, str(dirs.data), str(dirs.run), layer.digest],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
