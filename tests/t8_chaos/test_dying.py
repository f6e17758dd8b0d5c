"""Processes of the FUSE daemon die under checksummed load: readers must notice nothing."""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from dsec_runtime.cgroups import places
from dsec_runtime.run import Runner, RunSpec
from dsecfs.mount import LayerMounts
from dsecfs.store.base import Store
from tests.t5_runtime.conftest import why_no_containers
from tests.t8_chaos.stack import HANG_S, Content, Load, Mode, drop_caches, node, publish_shell

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


SCRIPT = """
i=0
while [ $i -lt 5 ]; do
    sha256sum -c /sums > /dev/null || exit 9
    i=$((i+1))
done
ls /dir0 | wc -l
"""


@pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers() or "they work")
def test_containers_notice_nothing(
    top: Path, shared_store: Store, content: Content, modes: tuple[Mode, ...]
) -> None:
    """A container in each mode reads everything again and again; the same must come out."""
    shell = publish_shell(shared_store, top / "base", content.sums)
    whole = Content((shell, *content.layers), content.sums, 0)
    parent = f"/dsec-chaos-{os.getpid()}"
    limits = {"max_bytes": 6 << 20}
    with node(top / "node", shared_store, whole, (), cache=limits) as n, ExitStack() as stack:
        running = {}
        for mode in modes:
            mounts = stack.enter_context(closing(LayerMounts(n.dirs, mode=mode, direct=False)))
            stack.callback(mounts.trim, 0)
            runner = stack.enter_context(Runner(n.dirs, cgroup_parent=parent, mounts=mounts))
            out = stack.enter_context((top / mode).open("wb"))
            spec = RunSpec(tuple(n.local[::-1]), ("sh", "-c", SCRIPT), stdout=out.fileno())
            running[mode] = runner.start(spec)
        with ThreadPoolExecutor() as waiting:
            ends = {mode: waiting.submit(one.wait) for mode, one in running.items()}
            for number in range(8):
                drop_caches()
                n.kill_worker()
                if number % 4 == 3:
                    n.kill("active")
                time.sleep(0.1)
        for mode, end in ends.items():
            assert end.result(HANG_S).exit_code == 0, mode
            assert (top / mode).read_text() == "25\n"
        assert n.client.stats()["fuse"]["errors"] == 0
    for place in places(parent):
        place.rmdir()
