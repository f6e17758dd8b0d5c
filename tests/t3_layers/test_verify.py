"""Verify finds every kind of damage, names it, and finds nothing in a sound store."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dsecfs.errors import FormatError, NotFound
from dsecfs.layers.digest import sha256
from dsecfs.layers.names import parse_name
from dsecfs.layers.publish import BlobOptions, Meta, Published, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.layers.verify import verify_layer
from dsecfs.store.base import head_key
from dsecfs.store.directory import DirectoryStore


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store", create=True)


@pytest.fixture
def layer(store: DirectoryStore, tmp_path: Path) -> Published:
    source = tmp_path / "source"
    source.mkdir()
    rng = random.Random(5)
    for i in range(30):
        (source / f"f{i}").write_bytes(rng.randbytes(90_000) + b"text " * 40_000)
    (source / "zeros").write_bytes(bytes(1 << 20))
    with open_image(f"dir:{source}", platform="linux/amd64") as image:
        return publish_source(
            store,
            image.layers[0],
            parse_name("base/b:1"),
            Meta("base", "linux/amd64"),
            options=BlobOptions(chunk_size=65536),
        )


def only_object(store: DirectoryStore) -> Path:
    return store.root / next(store.list("objects/")).key


def test_a_sound_layer_has_no_damage_and_all_of_it_is_read(
    store: DirectoryStore, layer: Published
) -> None:
    read: list[int] = []
    found = verify_layer(store, layer.digest, progress=read.append)
    assert not found.damage and not found.bad_chunks
    assert found.chunks == layer.head.manifest.blobs[0].chunks
    assert found.bytes == layer.head.manifest.blobs[0].size
    assert sum(read) >= only_object(store).stat().st_size


def test_each_damaged_chunk_is_named(store: DirectoryStore, layer: Published) -> None:
    path = only_object(store)
    data = bytearray(path.read_bytes())
    for at in (10, len(data) // 2, len(data) - 1):
        data[at] ^= 0x55
    path.write_bytes(data)
    found = verify_layer(store, layer.digest)
    assert found.bad_chunks == len(found.damage) == 3
    assert all("chunk" in line for line in found.damage)


def test_a_truncated_and_a_missing_object_are_damage(
    store: DirectoryStore, layer: Published
) -> None:
    path = only_object(store)
    path.write_bytes(path.read_bytes()[:-1])
    assert verify_layer(store, layer.digest).bad_chunks
    path.unlink()
    found = verify_layer(store, layer.digest)
    assert found.chunks < found.bad_chunks and path.name in found.damage[0]


def test_a_missing_layout_is_damage_and_a_damaged_head_is_an_error(
    store: DirectoryStore, layer: Published
) -> None:
    store.delete(next(store.list("layouts/")).key)
    assert "no layout" in verify_layer(store, layer.digest).damage[0]
    path = store.root / head_key(layer.digest)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FormatError, match="truncated"):
        verify_layer(store, layer.digest)


def test_a_layer_that_does_not_exist(store: DirectoryStore) -> None:
    with pytest.raises(NotFound):
        verify_layer(store, sha256(b"nothing"))
