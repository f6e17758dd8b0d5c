"""What a mount's worker does beside serving it, so that a node stays healthy for weeks.

    store       its client libraries are imported before a read waits for that
    lease       layers in use here are kept in the store (layers/nodelease.py)
    idle        blobs that nobody reads are closed
    scrub       blobs in direct use are hashed now and then (cache/scrub.py)
    verify      what an earlier boot left whole is hashed when it is quiet
    forget      what is remembered of layers is bounded (layers/forget.py)

The last three are done by one process of the node, whoever has the lock data/chores.lock.
What must hold: nothing of it exists before the worker serves; it ends when the worker drains;
a successor goes on with nothing but what lies on the disk.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsecfs.cache import ChunkCache
from dsecfs.cache.housekeeping import Chore, Housekeeper
from dsecfs.fuse.config import FsConfig
from dsecfs.fuse.trees import read_tree
from dsecfs.layers.digest import Digest

if TYPE_CHECKING:
    from dsecfs.layers.nodelease import NodeLease

LEASE_S = 5.0
"""A layer is protected from collection so long after its mount, at the latest; and how long
nothing is done after the start."""
CLOSE_AFTER_S = 600.0
IDLE_S = 60.0
FORGET_S = 600.0
LOCK_S = 30.0
"""How often it is looked whether the process that does the node's chores is gone."""

SCRUB_INTERVAL_S = 86400.0
CHECK_RATE = 16 << 20
"""Bytes per second that scrub and verify each read: some 3 % of a core."""
METADATA_BYTES = 4 << 30

_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)
"""malloc_trim(3): gives free pages of the heap back. Other C libraries have none."""


class Chores:
    """The chores of one worker. `settings` of FsConfig.housekeeping:

    scrub_interval_s    seconds between two hashings of a blob in direct use
    check_rate          bytes per second that may be hashed
    metadata_max_bytes  disk space for what is remembered of layers
    """

    def __init__(self, config: FsConfig, cache: ChunkCache) -> None:
        self._config = config
        self._cache = cache
        self._dirs = config.dirs
        self._settings: dict[str, Any] = {
            "scrub_interval_s": SCRUB_INTERVAL_S,
            "check_rate": CHECK_RATE,
            "metadata_max_bytes": METADATA_BYTES,
            **config.housekeeping,
        }
        self._lock_fd = -1
        self._housekeeper = Housekeeper(
            {
                "store": self._open_store,
                "lease": self._keep_lease,
                "idle": self._close_idle,
                "scrub": functools.partial(self._alone, self._scrub),
                "verify": functools.partial(self._alone, self._verify),
                "forget": functools.partial(self._alone, self._forget),
            },
            at_end=self._release,
        )
        self._lease: NodeLease | None = None

    def start(self) -> None:
        """Begin; the worker serves."""
        self._housekeeper.start()

    def ask_to_stop(self) -> None:
        """Begin nothing more: a successor is about to go on."""
        self._housekeeper.ask_to_stop(for_good=False)

    def stop(self, wait_s: float) -> None:
        """End for good: the mount is gone, so nothing is in use here any more."""
        self._housekeeper.stop(wait_s, for_good=True)

    def close_idle(self) -> int:
        """Close all blobs that nobody reads right now; how many."""
        return self._cache.close_idle(0.0)

    def report(self) -> dict[str, Any]:
        """For the control socket."""
        lease = self._lease.report._asdict() if self._lease is not None else {"state": "none"}
        return {"lease": lease, "node": self._lock_fd >= 0}

    # -- in the thread

    def _open_store(self) -> Iterator[float]:
        self._cache.store()
        while True:
            yield LOCK_S

    def _keep_lease(self) -> Iterator[float]:
        yield LEASE_S  # who started us has a mount to make first
        lease = self._the_lease()
        while True:
            lease.step(self._used())
            yield LEASE_S

    def _the_lease(self) -> NodeLease:
        from dsecfs.layers.nodelease import NodeLease

        if self._lease is None:
            self._lease = NodeLease(self._cache.store, Path(self._config.state, "fs.lease"))
        return self._lease

    def _release(self) -> None:
        self._the_lease().release()

    def _used(self) -> Iterable[Digest]:
        from dsecfs.mount.inuse import layers_in_use

        if self._config.tree:
            return read_tree(self._dirs.trees, self._config.tree).layers
        return layers_in_use(self._dirs).held

    def _close_idle(self) -> Iterator[float]:
        while True:
            yield IDLE_S
            self._cache.close_idle(CLOSE_AFTER_S)
            if not self._cache.busy():
                # Buffers of reads leave the heap full of holes: after 64 readers at once a
                # worker had 183 MB, of which 97 were free.
                _trim(0)

    def _alone(self, chore: Chore) -> Iterator[float]:
        """`chore`, once no other process of this node does it."""
        yield LEASE_S
        while not self._locks():
            yield LOCK_S
        yield from chore()

    def _locks(self) -> bool:
        if self._lock_fd < 0:
            path = self._dirs.data / "chores.lock"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return False
            self._lock_fd = fd
        return True

    def _scrub(self) -> Iterator[float]:
        from dsecfs.cache.scrub import scrub
        from dsecfs.mount.direct import direct_blobs, retire

        return scrub(
            self._cache,
            functools.partial(direct_blobs, self._dirs),
            interval_s=self._settings["scrub_interval_s"],
            rate=self._settings["check_rate"],
            on_damage=functools.partial(retire, self._dirs),
        )

    def _verify(self) -> Iterator[float]:
        from dsecfs.cache.scrub import verify

        return verify(self._cache, rate=self._settings["check_rate"])

    def _forget(self) -> Iterator[float]:
        from dsecfs.layers.forget import forget_unused
        from dsecfs.mount.inuse import layers_in_use

        while True:
            yield FORGET_S
            limit = self._settings["metadata_max_bytes"]
            done = forget_unused(self._dirs, limit, layers_in_use(self._dirs).mounted)
            self._cache.stats.add("forgotten", done.layers + done.blobs)
