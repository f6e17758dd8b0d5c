"""The store fails under load: errors in bounded time, never wrong bytes, and it ends with it."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from dsecfs.store.base import Store
from dsecfs.store.faults import Rule
from dsecfs.store.open import open_store
from tests.support.netfault import Fault, NetFault
from tests.support.seaweed import Seaweed
from tests.t4_fuse.family import wait_for
from tests.t8_chaos.stack import HANG_S, Content, Load, Mode, drop_caches, node, publish

GONE = Rule("error", op="get_range", prefix="objects/")
LYING = Rule("wrong", op="get_range", prefix="objects/")
SHORT = Rule("truncated", op="get_range", prefix="objects/")
HANGING = Rule("stall", op="get_range", prefix="objects/", seconds=2.5)
SLOW = Rule("stall", op="get_range", prefix="objects/", seconds=0.1)


@pytest.mark.parametrize(
    ("rule", "counter"),
    [(GONE, "errors"), (LYING, "corrupt_store"), (SHORT, "errors"), (HANGING, "deadlines")],
    ids=["gone", "lying", "short", "hanging"],
)
def test_errors_then_recovery(
    top: Path,
    shared_store: Store,
    content: Content,
    modes: tuple[Mode, ...],
    rule: Rule,
    counter: str,
) -> None:
    with node(top / "node", shared_store, content, modes, cache={"deadline_s": 1.0}) as n:
        with Load(n, tolerated=(errno.EIO,)) as load:
            load.progress()
            assert not any(load.failures.values())
            n.fault(rule)
            n.forget_chunks()
            load.fails()
            n.fault()
            wait_for("no more errors", lambda: _quiet(load), HANG_S)
            load.progress(count=5)
        drop_caches()
        n.check()
        assert n.counted()[counter] > 0
        assert n.client.stats()["fuse"]["errors"] > 0
        assert n.status()["deaths"] == 0, "a worker died of a store"


def _quiet(load: Load) -> bool:
    """Whether no read failed for half a second."""
    before = sum(load.failures.values())
    time.sleep(0.5)
    return sum(load.failures.values()) == before


def test_a_store_that_is_only_slow_is_waited_for(
    top: Path, shared_store: Store, content: Content, modes: tuple[Mode, ...]
) -> None:
    with node(top / "node", shared_store, content, modes, cache={"deadline_s": 30.0}) as n:
        n.fault(SLOW)
        with Load(n) as load:
            load.progress(count=2)
            # What the node has needs no store.
            cached = threading.Thread(target=n.check)
            cached.start()
            cached.join(HANG_S)
            assert not cached.is_alive()
        assert n.counted()["errors"] == 0


def test_one_answer_in_three_is_wrong(
    top: Path, shared_store: Store, content: Content, modes: tuple[Mode, ...]
) -> None:
    """What is asked for again is right then; readers see right bytes or EIO."""
    with node(top / "node", shared_store, content, modes) as n:
        n.fault(*(Rule(k, op="get_range", probability=1 / 9) for k in ("wrong", "error", "short")))
        with Load(n, tolerated=(errno.EIO,)) as load:
            load.progress(count=10)
            n.fault()
        n.check()
        assert n.counted()["corrupt_store"] > 0


def test_a_server_that_goes_away(
    top: Path, s3_server: Seaweed, modes: tuple[Mode, ...]
) -> None:
    """SeaweedFS behind a proxy: connections are cut, hang, and are refused."""
    own = open_store(s3_server.url(prefix="chaos"))
    with NetFault("127.0.0.1", s3_server.port) as proxy:
        try:
            content = publish(own, top, seed=2)
            url = s3_server.url(prefix="chaos", port=proxy.port)
            with (
                node(top / "node", own, content, modes, url=url) as n,
                Load(n, tolerated=(errno.EIO,)) as load,
            ):
                load.progress()
                for fault in (
                    Fault("cut", after=1000),
                    Fault("cut", side="request"),
                    Fault("stall", after=2000, seconds=0.5),
                ):
                    proxy.fail(fault, fault, fault)
                    n.forget_chunks()
                    load.progress(count=3)
                    proxy.forget()
                n.forget_chunks()
                with proxy.down():
                    n.forget_chunks()
                    load.fails()
                wait_for("no more errors", lambda: _quiet(load), HANG_S)
                load.progress(count=5)
                drop_caches()
                n.check()
                assert n.status()["deaths"] == 0
        finally:
            own.close()


def test_a_missing_object_is_an_error_until_it_is_back(
    top: Path, modes: tuple[Mode, ...]
) -> None:
    store = open_store(f"file:{top}/store", create=True)
    try:
        content = publish(store, top, seed=3)
        objects = top / "store" / "objects"
        with node(top / "node", store, content, modes) as n:
            objects.rename(top / "gone")
            for tree in n.trees.values():
                with pytest.raises(OSError) as caught:
                    (tree / "dir0" / "file0").read_bytes()
                assert caught.value.errno == errno.EIO
                # Names are in the layers' metadata, which is here.
                assert len(os.listdir(tree / "dir1")) == len(content.sums) // 2
            (top / "gone").rename(objects)
            n.check()
    finally:
        store.close()
