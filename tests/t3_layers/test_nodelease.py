"""The node's lease: what is mounted is kept, at the cost of few requests, whatever dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsecfs.errors import StoreDenied, StoreUnavailable
from dsecfs.layers.digest import Digest
from dsecfs.layers.gc import collect
from dsecfs.layers.leases import DELETE, live_layers, parse_lease, tombstone_key, verdict_key
from dsecfs.layers.nodelease import AGAIN_S, DENIED_AGAIN_S, LINGER_S, NodeLease
from dsecfs.layers.publish import Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.store.base import head_key
from dsecfs.store.directory import DirectoryStore
from tests.t2_cache.conftest import ExpectLog
from tests.t3_layers.oci import layer_tar


class Watched(DirectoryStore):
    """Counts what is written, and can fail or refuse."""

    puts = 0
    deletes = 0
    away = False
    denied: tuple[str, ...] = ()

    def put_if_absent(self, key: str, data: bytes, *, put_id: str = "") -> bool:
        self._look(key)
        self.puts += 1
        return super().put_if_absent(key, data, put_id=put_id)

    def delete(self, key: str) -> None:
        self._look(key)
        self.deletes += 1
        super().delete(key)

    def _look(self, key: str) -> None:
        if self.away:
            raise StoreUnavailable("the store is away")
        if key.startswith(self.denied or ("-",)):
            raise StoreDenied(f"may not write {key}")


class World:
    def __init__(self, place: Path) -> None:
        self.store = Watched(place / "store", create=True)
        self.note = place / "lease"
        self.now = 1000.0
        self.opened = 0
        self.layers: list[Digest] = []
        for text in "abc":
            path = place / f"{text}.tar"
            path.write_bytes(layer_tar([(text, text.encode() * 100_000)]))
            source = open_image(f"tar:{path}").layers[0]
            meta = Meta("base", "linux/amd64")
            self.layers.append(publish_source(self.store, source, None, meta).digest)
        self.store.puts = self.store.deletes = 0
        self.made: list[NodeLease] = []

    def open(self) -> Watched:
        self.opened += 1
        return self.store

    def lease(self, **options: Any) -> NodeLease:
        self.made.append(NodeLease(self.open, self.note, clock=lambda: self.now, **options))
        return self.made[-1]

    def live(self) -> set[Digest]:
        return set(live_layers(self.store, self.store_time()))

    def store_time(self) -> float:
        return max((i.mtime for i in self.store.list("leases/")), default=0.0) + 1

    def records(self) -> list[str]:
        return [i.key for i in self.store.list("leases/")]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.away, made.store.denied = False, ()
    for lease in made.made:
        lease.release()


def test_nothing_is_written_for_nothing(world: World) -> None:
    lease = world.lease()
    for _ in range(5):
        lease.step([])
        world.now += 5
    assert world.opened == world.store.puts == 0 and lease.report.state == "none"


def test_what_is_used_is_listed_and_comings_and_goings_cost_nothing(world: World) -> None:
    a, b, c = world.layers
    lease = world.lease()
    lease.step([a])
    assert world.live() == {a} and lease.report == ("held", 1, "")
    lease.step([a, b])
    assert world.live() == {a, b} and len(world.records()) == 1
    puts = world.store.puts
    for _ in range(20):
        lease.step([b])
        lease.step([])
        lease.step([a, b])
        world.now += 5
    assert world.store.puts == puts
    world.now += LINGER_S + 1
    lease.step([b])
    assert world.live() == {b}
    lease.step([b, c])
    assert world.live() == {b, c}
    record = parse_lease(world.store.get(world.records()[0]), "lease")
    assert record.kind == "node"
    world.now += LINGER_S + 1
    lease.step([])
    assert world.records() == [] and lease.report.state == "none"
    assert not world.note.exists()
    lease.step([a])
    assert world.live() == {a}


def test_a_collection_keeps_what_is_mounted(world: World) -> None:
    a, b, _ = world.layers
    world.lease().step([a])
    for _ in range(3):
        report = collect(world.store, grace_s=-1.0)
    assert world.store.stat(head_key(a))
    assert not list(world.store.list(head_key(b)))
    assert any(k.why.startswith("lease node-") for k in report.kept if k.key == head_key(a))


def test_a_layer_that_was_to_be_deleted_is_revived(world: World) -> None:
    a = world.layers[0]
    world.store.put_if_absent(tombstone_key(head_key(a)), b"")
    world.lease().step([a])
    assert world.store.get(verdict_key(head_key(a))) == b"keep"


def test_a_node_that_may_not_write_verdicts_has_its_lease_all_the_same(world: World) -> None:
    a, b, _ = world.layers
    world.store.put_if_absent(tombstone_key(head_key(a)), b"")
    world.store.denied = ("verdicts/",)
    lease = world.lease()
    lease.step([a, b])
    assert lease.report.state == "held" and world.live() == {a, b}


def test_a_layer_that_is_gone_is_said_and_not_listed(world: World, expect_log: ExpectLog) -> None:
    a, b, _ = world.layers
    expect_log(rf"a mounted layer can only be read as far as it is here: layer sha256:{a}")
    world.store.delete(head_key(a))
    lease = world.lease()
    for _ in range(3):
        lease.step([a, b])
        world.now += 5
    assert world.live() == {b} and lease.report.layers == 1


def test_a_layer_that_a_collector_is_deleting(
    world: World, expect_log: ExpectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsecfs.layers.leases.revive.__kwdefaults__", {"wait_s": 0.02})
    expect_log(r"not protected from collection: heads/.* is being deleted by a collection")
    a, b, _ = world.layers
    world.store.put_if_absent(tombstone_key(head_key(a)), b"")
    world.store.put_if_absent(verdict_key(head_key(a)), DELETE)
    lease = world.lease()
    lease.step([a, b])
    assert lease.report.state == "failing" and world.live() == {a, b}
    for key in (head_key(a), tombstone_key(head_key(a)), verdict_key(head_key(a))):
        world.store.delete(key)
    expect_log(r"a mounted layer can only be read")
    world.now += AGAIN_S + 1
    lease.step([a, b])
    assert world.live() == {b} and lease.report == ("held", 1, "")


@pytest.mark.parametrize("may_delete", [True, False])
def test_a_successor_takes_over(world: World, may_delete: bool) -> None:
    a, b, _ = world.layers
    world.lease().step([a])
    (old,) = world.records()
    assert json.loads(world.note.read_text())["lease"] in old
    world.store.denied = () if may_delete else ("leases/-",)
    if not may_delete:
        world.store.delete = lambda key: (_ for _ in ()).throw(StoreDenied(key))  # type: ignore[method-assign]
    successor = world.lease()
    successor.step([b])
    assert world.live() == ({b} if may_delete else {a, b}), "its own first, then not the old one"
    if may_delete:
        assert len(world.records()) == 1 and old not in world.records()
    assert successor.report.state == "held"


def test_a_successor_that_ends_at_once_removes_the_old_lease(world: World) -> None:
    world.lease().step(world.layers)
    world.lease().release()
    assert world.records() == [] and not world.note.exists()
    opened = world.opened
    world.lease().release()
    assert world.opened == opened, "nothing to remove: the store is not asked"


def test_a_successor_with_nothing_mounted_removes_the_old_lease(world: World) -> None:
    world.lease().step(world.layers)
    world.lease().step([])
    assert world.records() == []


@pytest.mark.parametrize("junk", ["", "{}", "[]", '{"format": 9, "lease": "node-1", "store": ""}'])
def test_strange_notes_are_not_believed(world: World, junk: str) -> None:
    world.note.write_text(junk)
    world.lease().step([])
    assert world.opened == 0


def test_a_store_that_refuses_is_said_once(world: World, expect_log: ExpectLog) -> None:
    expect_log(r"WARNING dsecfs.layers.nodelease: node's lease: .*: may not write leases/")
    a = world.layers[0]
    world.store.denied = ("leases/",)
    lease = world.lease()
    said: list[str] = []
    for _ in range(3):
        lease.step([a])
        assert lease.report.state == "denied"
        said.append(lease.report.error)
        world.now += DENIED_AGAIN_S / 2
    assert world.opened == 2
    world.store.denied = ()
    world.now += DENIED_AGAIN_S
    lease.step([a])
    assert lease.report == ("held", 1, "") and world.live() == {a}


def test_a_store_that_is_away_and_comes_back(world: World, expect_log: ExpectLog) -> None:
    expect_log(r"not protected from collection: the store is away")
    a, b, _ = world.layers
    lease = world.lease()
    lease.step([a])
    world.store.away = True
    lease.step([a, b])
    assert lease.report == ("failing", 1, "the store is away")
    lease.step([a, b])
    world.store.away = False
    world.now += AGAIN_S + 1
    lease.step([a, b])
    assert lease.report == ("held", 2, "") and world.live() == {a, b}


def test_a_lease_that_may_have_lapsed_is_taken_anew(world: World, expect_log: ExpectLog) -> None:
    expect_log(r"lease node-\w+ was not renewed")
    a = world.layers[0]
    lease = world.lease(ttl_s=600)
    lease.step([a])
    (first,) = world.records()
    inner = lease._lease
    assert inner is not None
    inner._stop.set()
    inner._renewed -= 601  # as after a night's sleep of the machine
    lease.step([a])
    (second,) = world.records()
    assert first.split("/")[1] != second.split("/")[1] and world.live() == {a}
