"""What this node already has: verified chunks on the local disk, and how more get there.

`chunkcache.py` is the door; docs/cache-protocol.md is the contract between processes.
"""

from dsecfs.cache.blob import pin, pins, read_chunk_list, unpin, write_chunk_list
from dsecfs.cache.chunkcache import CachedBlob, ChunkCache, Contents
from dsecfs.cache.evict import Cleared, cached_blobs, disk_use
from dsecfs.cache.prefetch import PrefetchHandle, Progress
from dsecfs.cache.stats import COUNTERS, amplification, read_totals

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
