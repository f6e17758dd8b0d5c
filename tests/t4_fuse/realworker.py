"""The real worker, over a store that is slow: entry point for a daemon in tests."""

from __future__ import annotations

from dsecfs.fuse.config import FsConfig
from dsecfs.fuse.shared import Inherited
from dsecfs.fuse.worker import run

LATENCY_S = 0.005


def main(inherited: Inherited) -> int:
    from dsecfs.cache import ChunkCache
    from dsecfs.fuse.cached import CachedSource
    from dsecfs.store.faults import FaultyStore
    from dsecfs.store.open import open_store

    config = FsConfig(**inherited.config)

    def slow() -> object:
        return open_store(config.store, wrap=lambda b: FaultyStore(b, latency_s=LATENCY_S))

    cache = ChunkCache(config.dirs, slow, max_bytes=1 << 30)  # type: ignore[arg-type]
    return run(inherited, config, CachedSource(cache))
