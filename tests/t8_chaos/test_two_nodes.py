"""Two nodes on one store at once: they share nothing but it, and end apart from each other."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from dsecfs.fuse.daemon import stop_daemon
from dsecfs.store.base import Store
from dsecfs.store.faults import Rule
from tests.t4_fuse.family import wait_for
from tests.t8_chaos.stack import HANG_S, Content, Load, Mode, drop_caches, node


def test_two_nodes_on_one_store(
    top: Path, shared_store: Store, content: Content, modes: tuple[Mode, ...]
) -> None:
    with (
        node(top / "one", shared_store, content, modes) as one,
        node(top / "two", shared_store, content, modes) as two,
        Load([one, two]) as load,
    ):
        load.progress(count=3)
        before = two.counted()
        for _ in range(3):
            one.kill_worker()
            two.kill("active")
            load.progress()
        assert two.status()["worker"] in two.pids()
        assert not one.pids() & two.pids()
        # What one of them does with its cache and its store is nothing to the other.
        one.forget_chunks()
        one.fault(Rule("error", op="get_range", times=1))
        load.progress()
        one.fault()
        assert two.counted()["evictions"] == before["evictions"]


def test_one_node_ends_while_the_other_works(
    top: Path, shared_store: Store, content: Content, modes: tuple[Mode, ...]
) -> None:
    with node(top / "one", shared_store, content, modes) as one:
        with node(top / "two", shared_store, content, modes) as two, Load(one) as load:
            two.check()
            load.progress()
            two.unmount()
            assert stop_daemon(two.config)
            # Its disk is lost: it begins anew, with nothing but the store.
            shutil.rmtree(two.dirs.data)
            shutil.rmtree(two.dirs.run)
            two.dirs.create()
            two.up(shared_store)
            two.check()
            two.power_loss()
            load.progress()
        with Load(one, tolerated=(errno.ENOTCONN, errno.EIO, errno.ECONNABORTED)) as load:
            load.progress()
            # And all of it at once: errors, no hang; then it comes back.
            one.kill_everybody()
            load.fails()
        one.power_loss()
        one.up(shared_store)
        drop_caches()
        one.check()
        wait_for("all three", one.settled, HANG_S)
