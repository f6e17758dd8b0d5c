"""The node's chunk cache as the source of a mount's blobs."""

from __future__ import annotations

import functools
import os
import resource
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from dsecfs.cache import ChunkCache, read_chunk_list
from dsecfs.cache.chunkcache import CachedBlob
from dsecfs.fuse.blobs import Progress
from dsecfs.fuse.config import FsConfig
from dsecfs.fuse.spaces import Bounded
from dsecfs.layers.digest import Digest

if TYPE_CHECKING:
    from dsecfs.cache.warm import Plan
    from dsecfs.store.base import Store

OPEN_BLOBS = 512
"""Blobs whose files stay open in a worker, where it may have so many files."""
MIN_OPEN_BLOBS = 16
FILES_PER_BLOB = 4
"""Two files, and one for each of two mappings."""
OTHER_FILES = 1024
"""Images of composed trees, connections, pipes."""
POLL_S = 0.1
PLAN_S = 300.0
"""Seconds after which it is looked anew what a mount should be warmed with."""
KEPT_CHUNKS = 1 << 20
"""Chunks in the plans that are remembered (4 bytes each)."""
_PLANNERS = 2
"""Plans that are made at the same time: traces of several MB may be in memory."""

_Mount = tuple[Digest | None, tuple[Digest, ...]]


class _Planned(NamedTuple):
    """What a mount is warmed with."""

    made: float
    plan: Plan
    chunks: int


_limiters: list[trio.CapacityLimiter] = []


def _planners() -> trio.CapacityLimiter:
    if not _limiters:
        _limiters.append(trio.CapacityLimiter(_PLANNERS))
    return _limiters[0]


def _open_store(url: str) -> Store:
    # Client libraries start threads: nothing here comes before the last fork.
    from dsecfs.store.open import open_store

    return open_store(url, load=True)


def open_cache(config: FsConfig) -> ChunkCache:
    """The cache of `config`. Without `max_bytes` it may take half of its file system."""
    settings: dict[str, Any] = {"open_blobs": open_blobs(), **config.cache}
    if "max_bytes" not in settings:
        s = os.statvfs(config.data)
        settings["max_bytes"] = s.f_blocks * s.f_frsize // 2
    open_it = functools.partial(_open_store, config.store)
    return ChunkCache(config.dirs, open_it, **settings)


def open_blobs() -> int:
    """How many blobs may stay open under this process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return OPEN_BLOBS
    return max(MIN_OPEN_BLOBS, min(OPEN_BLOBS, (soft - OTHER_FILES) // FILES_PER_BLOB))


class CachedSource:
    """A `BlobSource`."""

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache
        self._plans: Bounded[_Mount, _Planned] = Bounded(KEPT_CHUNKS, lambda p: 100 + p.chunks)

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
        key = (env, tuple(layers))
        planned = self._plans.use(key)
        if planned is None or time.monotonic() - planned.made > PLAN_S:
            plan = await trio.to_thread.run_sync(
                self._plan, env, layers, abandon_on_cancel=True, limiter=_planners()
            )
            chunks = sum(len(numbers) for _, numbers in plan)
            planned = self._plans.keep(key, _Planned(time.monotonic(), plan, chunks))
        await self.prefetch(planned.plan, progress)

    def _plan(self, env: Digest | None, layers: Sequence[Digest]) -> Plan:
        from dsecfs.cache.warm import warm_plan
        from dsecfs.layers.local import LocalLayers

        store = self._cache.store()
        local = LocalLayers(store, self._cache.dirs).ensure_all(layers)
        return warm_plan(self._cache, store, env, local)

    async def prefetch(
        self, wanted: Sequence[tuple[Digest, Sequence[int] | None]], progress: Progress
    ) -> None:
        plan: list[tuple[Digest, Sequence[int]]] = []
        for digest, chunks in wanted:
            if chunks is None:
                chunks = range(self._cache.open(digest).chunk_count)
            plan.append((digest, chunks))
            await trio.lowlevel.checkpoint()
        # Looks at the state of every chunk first: not in the event loop.
        handle = await trio.to_thread.run_sync(self._cache.prefetch, plan)
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
