"""What cache tests share: a node, a store that counts, a blob, caches that are closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsecfs.cache import ChunkCache
from dsecfs.layers.digest import Digest
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import Store
from tests.t2_cache.packing import CHUNK, Packed, content, pack
from tests.t2_cache.stores import CountingStore, directory_store

MakeCache = Callable[..., ChunkCache]
ExpectLog = Callable[[str], None]
"""Announces a warning (tests/conftest.py)."""

_numbers = iter(range(1 << 30))


def new_node(tmp_path: Path) -> tuple[NodeDirs, CountingStore]:
    """A fresh node and store below `tmp_path`, for tests that need many."""
    root = tmp_path / f"n{next(_numbers)}"
    dirs = NodeDirs(root / "data", root / "run")
    dirs.create()
    return dirs, CountingStore(directory_store(root / "store"))


def change_boot(dirs: NodeDirs, blob: Digest) -> None:
    """Make the cache of `blob` look as if an earlier boot had left it."""
    with open(dirs.blob(blob) / "present", "r+b") as f:
        f.seek(68 - 36)
        f.write(b"00000000-0000-4000-8000-000000000000")


@pytest.fixture
def dirs(tmp_path: Path) -> NodeDirs:
    found = NodeDirs(tmp_path / "data", tmp_path / "run")
    found.create()
    return found


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(directory_store(tmp_path / "store"))


@pytest.fixture
def packed(store: CountingStore) -> Packed:
    """A blob of 11 chunks; chunk 6 is zeros, the last one is short."""
    data = content(11, tail=4096)
    return pack(store, data[: 6 * CHUNK] + bytes(CHUNK) + data[7 * CHUNK :], per_object=70_000)


@pytest.fixture
def make_cache(dirs: NodeDirs) -> Iterator[MakeCache]:
    """Makes caches on `dirs`; closes them at the end."""
    made: list[ChunkCache] = []

    def make(store: Store | Callable[[], Store], **options: Any) -> ChunkCache:
        options = {"max_bytes": 1 << 30, "min_free": 0, "deadline_s": 20.0} | options
        made.append(ChunkCache(dirs, store, **options))
        return made[-1]

    yield make
    for cache in made:
        cache.close()
