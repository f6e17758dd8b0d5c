"""What a node remembers is bounded: the oldest goes, what is used stays, all can come back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsecfs.cache import ChunkCache
from dsecfs.cache.evict import cached_blobs, disk_use
from dsecfs.errors import Busy
from dsecfs.layers.catalog import REMEMBER_S
from dsecfs.layers.digest import Digest
from dsecfs.layers.forget import Forgotten, forget_unused, metadata_use
from dsecfs.layers.local import LocalLayers, known_layers, layer_files
from dsecfs.layers.manifest import ProcessEnv
from dsecfs.layers.publish import Meta, Published, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.locks import locked_file
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.directory import DirectoryStore
from tests.t3_layers.oci import layer_tar

LONG_AGO = 7 * 86400
HUGE = 1 << 40


class World:
    """A store with layers, and a node that used some of them at different times."""

    def __init__(self, place: Path) -> None:
        self.dirs = NodeDirs(place / "data", place / "run")
        self.dirs.create()
        self.store = DirectoryStore(place / "store", create=True)
        self.local = LocalLayers(self.store, self.dirs)
        self._place = place

    def publish(self, text: str, env: str = "") -> Published:
        path = self._place / f"{text}.tar"
        path.write_bytes(layer_tar([(f"file-{text}", text.encode() * 100_000)]))
        meta = Meta("toolkit", "linux/amd64", ProcessEnv({"X": env}))
        return publish_source(self.store, open_image(f"tar:{path}").layers[0], None, meta)

    def use(self, layer: Published, days_ago: float) -> Digest:
        """Ensure a layer and read its data, as of some days ago."""
        self.local.ensure(layer.digest)
        cache = ChunkCache(self.dirs, self.store, max_bytes=1 << 30, min_free=0)
        for ref in layer.head.manifest.blobs:
            cache.open(ref.digest).read(0, 10)
        cache.close()
        self.age(layer, days_ago)
        return layer.digest

    def age(self, layer: Published, days_ago: float) -> None:
        then = time.time() - days_ago * 86400
        paths = [layer_files(self.dirs, layer.digest)[0]]
        paths += [self.dirs.blob(b.digest) / "chunks" for b in layer.head.manifest.blobs]
        for path in paths:
            os.utime(path, (then, then))

    def forget(self, limit: int = 0, mounted: set[Digest] | None = None, **k: Any) -> Forgotten:
        return forget_unused(self.dirs, limit, mounted or set(), **k)

    @property
    def layers(self) -> set[Digest]:
        return set(known_layers(self.dirs))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.close()


def test_the_oldest_goes_first_with_its_blobs(world: World) -> None:
    old, middle, new = (world.publish(t) for t in "abc")
    world.use(new, 1)
    world.use(old, 3)
    world.use(middle, 2)
    use = metadata_use(world.dirs)
    done = world.forget(HUGE)
    assert (done.layers, done.bytes, done.left) == (0, 0, use), "below the limit nothing goes"
    done = world.forget(use - 1)
    assert world.layers == {middle.digest, new.digest}
    assert (done.layers, done.blobs) == (1, 1) and done.bytes > 0
    assert metadata_use(world.dirs) == done.left == use - done.bytes
    assert set(cached_blobs(world.dirs)) == {
        p.head.manifest.blobs[0].digest for p in (middle, new)
    }
    world.use(old, 0)
    assert old.digest in world.layers, "it comes back from the store"


def test_what_is_mounted_or_was_just_asked_for_stays(world: World) -> None:
    mounted, asked, gone = (world.publish(t) for t in "abc")
    for days, layer in ((9, mounted), (5, asked), (1, gone)):
        world.use(layer, days)
    world.local.ensure(asked.digest)
    done = world.forget(0, {mounted.digest})
    assert world.layers == {mounted.digest, asked.digest} and done.layers == 1
    assert disk_use(world.dirs) > 0
    world.age(asked, 5)
    world.forget(0)
    assert not world.layers and not disk_use(world.dirs)
    assert metadata_use(world.dirs) == 0


def test_a_blob_stays_for_another_layer(world: World) -> None:
    one, two = world.publish("a", "1"), world.publish("a", "2")
    (blob,) = {p.head.manifest.blobs[0].digest for p in (one, two)}
    world.use(one, 5)
    world.use(two, 3)
    done = world.forget(metadata_use(world.dirs) - 1)
    assert (done.layers, done.blobs) == (1, 0) and list(cached_blobs(world.dirs)) == [blob]
    ok = layer_files(world.dirs, two.digest)[0]
    ok.write_bytes(b"damaged")
    world.age(two, 3)
    world.forget(0, {two.digest})
    assert list(cached_blobs(world.dirs)) == [blob], "a mounted layer that cannot be parsed"
    world.age(two, 3)
    assert world.forget(0).blobs == 1


def test_an_open_or_pinned_blob_stays(world: World) -> None:
    layer = world.publish("a")
    world.use(layer, 5)
    cache = ChunkCache(world.dirs, world.store, max_bytes=1 << 30, min_free=0)
    (ref,) = layer.head.manifest.blobs
    blob = cache.open(ref.digest)
    world.forget(0)
    assert list(cached_blobs(world.dirs)) == [ref.digest]
    assert blob.read(0, 3) == b"aaa"
    del blob
    cache.pin(ref.digest, "mount-x")
    cache.close()
    assert world.forget(0).blobs == 0
    cache.unpin(ref.digest, "mount-x")
    assert world.forget(0).blobs == 1


def test_refs_are_bounded_and_end(world: World) -> None:
    for n, days in enumerate((1, 3, REMEMBER_S / 86400 + 1)):
        path = world.dirs.refs / f"store/refs/base/n/.v/{n}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        os.utime(path, (time.time() - days * 86400,) * 2)
    use = metadata_use(world.dirs)
    done = world.forget(HUGE)
    assert done.left < use, "one was too old to be believed"
    done = world.forget(done.left - 1)
    assert done.refs == 1 and [p.name for p in world.dirs.refs.rglob("[0-9]")] == ["0"]


def test_what_crashes_left_is_removed(world: World) -> None:
    world.dirs.gone.mkdir()
    (world.dirs.gone / "x").mkdir()
    (world.dirs.gone / "x/data").write_text("x")
    layer = world.publish("a")
    world.local.ensure(layer.digest)
    heads = world.dirs.data / "heads"
    for name, days in ((".tmp-a", 0), (".tmp-b", 2)):
        (heads / name).write_text("x")
        os.utime(heads / name, (time.time() - days * 86400,) * 2)
    world.forget(HUGE)
    assert not os.listdir(world.dirs.gone)
    assert [p.name for p in heads.glob(".tmp-*")] == [".tmp-a"], "somebody may be writing it"


def test_one_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsecfs.layers.forget._LOCK_S", 0.05)
    with (
        locked_file(world.dirs.data / "evict.lock", "a test"),
        pytest.raises(Busy, match="what this node remembers"),
    ):
        world.forget(0)
    assert world.forget(0).left == 0
