"""What this node already has: verified chunks on the local disk, and how more get there.

`chunkcache.py` is the door; docs/cache-protocol.md is the contract between processes. The
names below are imported when they are used: `dsec run` needs the words of a blob
(`blob.py`), not the machinery that fetches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsecfs.cache.blob import pin, pins, read_chunk_list, unpin, write_chunk_list
    from dsecfs.cache.chunkcache import CachedBlob, ChunkCache, Contents
    from dsecfs.cache.evict import Cleared, cached_blobs, disk_use
    from dsecfs.cache.prefetch import PrefetchHandle, Progress
    from dsecfs.cache.stats import COUNTERS, amplification, read_totals

_HOMES = {
    "blob": ("pin", "pins", "read_chunk_list", "unpin", "write_chunk_list"),
    "chunkcache": ("CachedBlob", "ChunkCache", "Contents"),
    "evict": ("Cleared", "cached_blobs", "disk_use"),
    "prefetch": ("PrefetchHandle", "Progress"),
    "stats": ("COUNTERS", "amplification", "read_totals"),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"dsecfs.cache.{module}"), name)
    raise AttributeError(name)


__all__ = [
    "COUNTERS",
    "CachedBlob",
    "ChunkCache",
    "Cleared",
    "Contents",
    "PrefetchHandle",
    "Progress",
    "amplification",
    "cached_blobs",
    "disk_use",
    "pin",
    "pins",
    "read_chunk_list",
    "read_totals",
    "unpin",
    "write_chunk_list",
]
