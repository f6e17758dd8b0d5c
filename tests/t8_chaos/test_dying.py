"""Processes of the FUSE daemon die under checksummed load: readers must notice nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dsecfs.store.base import Store
from tests.t8_chaos.stack import Content, Load, Mode, drop_caches, node

KILLS = 20


def test_readers_notice_nothing(
    top: Path, shared_store: Store, content: Content, modes: tuple[Mode, ...]
) -> None:
    # A cache that holds half: chunks are fetched, evicted and fetched again all the time.
    with node(top / "node", shared_store, content, modes, cache={"max_bytes": 6 << 20}) as n:
        with Load(n) as load:
            for number in range(KILLS):
                if number % 5 == 0:
                    drop_caches()
                n.kill_worker()
                load.progress()
            for role in ("active", "worker", "standby", "worker"):
                n.kill(role)
                load.progress()
            n.lose_supervisors()
            n.kill_worker()
            load.progress()
        drop_caches()
        for tree in n.trees.values():
            listed = subprocess.run(
                ["ls", "-lR", tree], capture_output=True, text=True, timeout=60, check=True
            )
            assert listed.stdout.count("file") == len(content.sums)
        n.check()
        assert n.status()["deaths"] >= KILLS
        assert n.client.stats()["fuse"]["errors"] == 0
        counted = n.counted()
        assert counted["errors"] == counted["corrupt_cache"] == counted["corrupt_store"] == 0
        assert counted["evictions"] > 0
        assert "Traceback" not in n.log()
