"""The node's chunk cache as the source of a mount's blobs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trio

from dsecfs.cache import ChunkCache, read_chunk_list
from dsecfs.cache.chunkcache import CachedBlob
from dsecfs.fuse.blobs import Progress
from dsecfs.fuse.config import FsConfig
from dsecfs.layers.digest import Digest

if TYPE_CHECKING:
    from dsecfs.store.base import Store

OPEN_BLOBS = 512
"""Blobs whose files stay open in a worker (three files and two mappings each)."""
POLL_S = 0.1


def _open_store(url: str) -> Store:
    # Client libraries start threads: first needed at the first miss, long after any fork.
    from dsecfs.store.open import open_store

    return open_store(url)


def open_source(config: FsConfig) -> CachedSource:
    """The cache of `config`. Without `max_bytes` it may take half of its file system."""
    settings: dict[str, Any] = {"open_blobs": OPEN_BLOBS, **config.cache}
    if "max_bytes" not in settings:
        s = os.statvfs(config.data)
        settings["max_bytes"] = s.f_blocks * s.f_frsize // 2
    open_it = functools.partial(_open_store, config.store)
    return CachedSource(ChunkCache(config.dirs, open_it, **settings), open_it)


class CachedSource:
    """A `BlobSource`."""

    def __init__(self, cache: ChunkCache, open_store: Callable[[], Store]) -> None:
        self._cache = cache
        self._open_store = open_store

    def exists(self, blob: Digest) -> bool:
        return (self._cache.dirs.blob(blob) / "chunks").exists()

    def size(self, blob: Digest) -> int:
        return read_chunk_list(self._cache.dirs, blob).size

    def open(self, blob: Digest) -> CachedBlob:
        return self._cache.open(blob)

    def stats(self) -> Mapping[str, int]:
        return self._cache.stats.snapshot()

    async def warm(
        self, env: Digest | None, layers: Sequence[Digest], progress: Progress
    ) -> None:
        def plan() -> Sequence[tuple[Digest, Sequence[int]]]:
            from dsecfs.cache.warm import warm_plan
            from dsecfs.layers.local import LocalLayers

            store = self._open_store()
            try:
                local = LocalLayers(store, self._cache.dirs).ensure_all(layers)
                return warm_plan(self._cache, store, env, local)
            finally:
                store.close()

        await self.prefetch(await trio.to_thread.run_sync(plan, abandon_on_cancel=True), progress)

    async def prefetch(
        self, wanted: Sequence[tuple[Digest, Sequence[int] | None]], progress: Progress
    ) -> None:
        plan: list[tuple[Digest, Sequence[int]]] = []
        for digest, chunks in wanted:
            blob = self._cache.open(digest)
            plan.append((digest, range(blob.chunk_count) if chunks is None else chunks))
            await trio.lowlevel.checkpoint()
        handle = self._cache.prefetch(plan)
        try:
            finished = False
            while not finished:
                finished = handle.wait(0)
                now = handle.progress()
                progress(now.done + now.failed, now.total)
                if not finished:
                    await trio.sleep(POLL_S)
        finally:
            handle.cancel()
        if handle.error is not None:
            raise handle.error
