"""Several processes, one cache: one fetch per chunk, and nobody depends on the living."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsecfs.cache import read_totals
from dsecfs.layers.layout import LZ4
from dsecfs.nodedirs import NodeDirs
from tests.t2_cache.conftest import MakeCache
from tests.t2_cache.packing import CHUNK, Packed, content, pack
from tests.t2_cache.stores import CountingStore

_CHILD = Path(__file__).with_name("child.py")


class Node:
    """Starts children on one cache and one store, and ends those it started."""

    def __init__(self, dirs: NodeDirs, packed: Packed, tmp_path: Path) -> None:
        self.packed = packed
        self.log = tmp_path / "log"
        self.log.touch()
        self._tmp = tmp_path
        (tmp_path / "expected").write_bytes(packed.content)
        self._args = {
            "data": str(dirs.data),
            "run": str(dirs.run),
            "store": str(tmp_path / "store"),
            "log": str(self.log),
            "blob": packed.register(dirs),
            "expected": str(tmp_path / "expected"),
        }
        self._children: list[subprocess.Popen[str]] = []

    def start(self, op: str, **more: Any) -> subprocess.Popen[str]:
        args = json.dumps(self._args | {"op": op} | more)
        child = subprocess.Popen(
            [sys.executable, str(_CHILD), args],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(_CHILD.parents[2])},
        )
        self._children.append(child)
        return child

    def together(self, number: int, op: str, **more: Any) -> list[subprocess.Popen[str]]:
        """Start children that begin their work at the same moment."""
        go = self._tmp / "go"
        ready = [self._tmp / f"ready{i}" for i in range(number)]
        children = [
            self.start(op, ready=str(r), go=str(go), seed=i, **more) for i, r in enumerate(ready)
        ]
        end = time.monotonic() + 30
        while not all(r.exists() for r in ready) and time.monotonic() < end:
            time.sleep(0.005)
        go.touch()
        return children

    def result(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        found: dict[str, Any] = json.loads(out)
        assert found["digest"] == hashlib.sha256(self.packed.content).hexdigest()
        assert found["bad"] == 0
        return found

    def ranges(self) -> list[tuple[int, str, int, int]]:
        rows = [line.split() for line in self.log.read_text().splitlines()]
        return [(int(pid), key, int(offset), int(length)) for pid, key, offset, length in rows]

    def close(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGCONT)
                child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


@pytest.fixture
def node(dirs: NodeDirs, store: CountingStore, tmp_path: Path) -> Iterator[Node]:
    packed = pack(store, content(120), codecs=(LZ4,), per_object=300_000)
    node = Node(dirs, packed, tmp_path)
    yield node
    node.close()


def test_eight_processes_fetch_every_chunk_once(node: Node, dirs: NodeDirs) -> None:
    children = node.together(8, "whole", pause_s=0.005)
    results = [node.result(c) for c in children]
    fetched: Counter[tuple[str, int]] = Counter()
    for _, key, offset, length in node.ranges():
        for byte in range(offset, offset + length, 512):
            fetched[key, byte] += 1
    assert sum(r["stats"]["chunks_fetched"] for r in results) == 120
    assert sum(r["stats"]["read_through"] for r in results) == 0
    assert sum(r["stats"]["bytes_fetched"] for r in results) == sum(
        p.stored for p in node.packed.layout.places
    )
    assert sum(r["stats"]["waits"] for r in results) > 0
    totals = read_totals(dirs)
    for name in ("chunks_fetched", "bytes_fetched", "bytes_served", "waits"):
        assert totals[name] == sum(r["stats"][name] for r in results)


def test_kill_in_mid_fetch_and_the_rest_proceed(node: Node, dirs: NodeDirs) -> None:
    """Five are killed while their range reads are under way; the others read everything."""
    survivors = node.together(3, "whole", pause_s=0.02)
    victims = [node.start("whole", pause_s=5) for _ in range(5)]
    end = time.monotonic() + 20
    pids = {v.pid for v in victims}
    while not pids & {pid for pid, *_ in node.ranges()} and time.monotonic() < end:
        if all(s.poll() is not None for s in survivors):
            break  # they were too fast for the victims
        time.sleep(0.002)
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    for survivor in survivors:
        node.result(survivor)
    node.result(node.start("whole"))


def test_the_holder_of_a_lock_is_killed(node: Node) -> None:
    """Deterministic: one process holds every chunk in a slow fetch, then dies."""
    victim = node.start("whole", pause_s=30)
    end = time.monotonic() + 20
    while not node.ranges() and time.monotonic() < end:
        time.sleep(0.002)
    ready = node.log.with_name("follower")
    follower = node.start("whole", ready=str(ready), go=str(ready))
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(0.5)
    assert follower.poll() is None, "it waits for the one who fetches"
    victim.kill()
    result = node.result(follower)
    assert result["stats"]["waits"] > 0
    assert result["stats"]["wait_timeouts"] == 0
    assert result["stats"]["read_through"] == 0


def test_a_stopped_holder_delays_but_does_not_block(
    node: Node, make_cache: MakeCache, store: CountingStore
) -> None:
    victim = node.start("whole", pause_s=30)
    end = time.monotonic() + 20
    while not node.ranges() and time.monotonic() < end:
        time.sleep(0.002)
    victim.send_signal(signal.SIGSTOP)
    result = node.result(node.start("whole", lock_wait_s=0.3))
    assert result["stats"]["wait_timeouts"] > 0
    assert result["stats"]["read_through"] == result["stats"]["wait_timeouts"]
    # What it fetched is not cached, since the one with the lock may wake up and write …
    cache = make_cache(store, lock_wait_s=0.01)
    blob = cache.open(node.packed.digest)
    cache.clear()
    victim.kill()
    victim.wait()
    # … and once it is gone all is as ever.
    assert blob.read(0, blob.size) == node.packed.content
    assert blob.complete()


def test_readers_and_evictors_in_many_processes(node: Node) -> None:
    readers = node.together(4, "random", seconds=3.0, max_bytes=60 * CHUNK)
    evictor = node.start("evict", seconds=3.0)
    for child in [*readers, evictor]:
        node.result(child)


def test_killed_readers_under_eviction_leave_a_sound_cache(
    node: Node, dirs: NodeDirs, make_cache: MakeCache, store: CountingStore
) -> None:
    evictor = node.start("evict", seconds=4.0)
    for i in range(12):
        child = node.start("random", seconds=60.0, seed=i)
        time.sleep(0.25)
        child.kill()
        child.wait()
    node.result(evictor)
    cache = make_cache(store)
    blob = cache.open(node.packed.digest)
    assert blob.read(0, blob.size) == node.packed.content
    assert blob.verify_all(deadline_s=20)
    assert not any(map(blob.is_damaged, range(blob.chunk_count)))
