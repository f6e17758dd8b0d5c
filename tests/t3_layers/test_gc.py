"""Collection: what refs lead to stays, the rest goes after the grace, races included."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest

from dsecfs.errors import Busy, DsecfsError, FormatError, NotFound, StoreUnavailable
from dsecfs.layers import leases
from dsecfs.layers.catalog import Catalog
from dsecfs.layers.digest import Digest
from dsecfs.layers.environment import Environment, EnvironmentManifest, ProcessDefaults
from dsecfs.layers.gc import GRACE_S, collect
from dsecfs.layers.leases import DELETE, Lease, live_layers, tombstone_key, verdict_key
from dsecfs.layers.names import parse_name
from dsecfs.layers.publish import Meta, publish_source
from dsecfs.layers.reach import reach
from dsecfs.layers.sources.image import open_image
from dsecfs.layers.trace import Access, Trace, save_trace
from dsecfs.store.base import ObjectInfo, Priority, Store, head_key
from dsecfs.store.directory import DirectoryStore

DAY = 86400


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store", create=True)


def publish(store: Store, work: Path, name: str, text: str) -> Digest:
    source = work / f"source-{time.monotonic_ns()}"
    source.mkdir(parents=True)
    (source / "file").write_text(text * 1000)
    for path in (source / "file", source):
        os.utime(path, (1, 1))
    with open_image(f"dir:{source}", platform="linux/amd64") as image:
        kind = name.partition("/")[0]
        meta = Meta(kind, "linux/amd64")
        return publish_source(store, image.layers[0], parse_name(name), meta).digest


def age(store: DirectoryStore, days: float, *, leases: bool = True) -> None:
    """Everything in the store becomes older: the store's clock runs ahead of it.

    Without `leases` their holders have renewed them meanwhile.
    """
    for info in store.list(""):
        if info.key.startswith("leases/") and not leases:
            continue
        path = store.root / info.key
        os.utime(path, (info.mtime - days * DAY, info.mtime - days * DAY))


def keys(store: DirectoryStore, *prefixes: str) -> set[str]:
    return {i.key for i in store.list("") if not prefixes or i.key.startswith(prefixes)}


DATA = ("heads/", "layouts/", "objects/", "envs/")


def intact(store: DirectoryStore) -> None:
    """Nothing that a root leads to is missing."""
    assert reach(store, time.time()).missing == []


def test_what_names_lead_to_stays_and_the_rest_goes_after_the_grace(
    store: DirectoryStore, tmp_path: Path
) -> None:
    kept = publish(store, tmp_path, "base/kept:1", "kept")
    lost = publish(store, tmp_path, "base/lost:1", "lost")
    catalog = Catalog(store)
    catalog.remove_ref(parse_name("base/lost:1"))
    assert collect(store).tombstoned == []  # the trash still leads there
    age(store, 15)
    report = collect(store)
    assert {i.key.partition("/")[0] for i in report.tombstoned} == {"heads", "layouts", "objects"}
    assert not report.deleted
    assert collect(store).deleted == []  # the grace is not over
    age(store, 3)
    report = collect(store)
    assert head_key(lost) in {i.key for i in report.deleted}
    assert head_key(kept) in {k.key for k in report.kept}
    assert keys(store, *DATA) == {k.key for k in report.kept if k.key.startswith(DATA)}
    assert not keys(store, "tombstones/", "verdicts/", "gc/")
    intact(store)


def test_a_dry_run_says_the_same_and_changes_nothing(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, "base/lost:1", "lost")
    Catalog(store).remove_ref(parse_name("base/lost:1"))
    age(store, 15)
    before = keys(store)
    said = collect(store, dry_run=True)
    assert keys(store) == before
    done = collect(store)
    assert [i.key for i in said.tombstoned] == [i.key for i in done.tombstoned]


def test_environments_and_channels_keep_their_layers(store: DirectoryStore, tmp_path: Path) -> None:
    base = publish(store, tmp_path, "base/b:1", "base")
    old = publish(store, tmp_path, "toolkit/t:1", "old")
    new = publish(store, tmp_path, "toolkit/t:2", "new")
    catalog = Catalog(store)
    manifest = EnvironmentManifest({"linux/amd64": Environment("linux/amd64", base)})
    catalog.put_env(manifest, parse_name("env/e:1"))
    catalog.channel_set("toolkit", "t", "stable", "1", actor="a", reason="r")
    for name in ("base/b:1", "toolkit/t:1", "toolkit/t:2"):
        catalog.remove_ref(parse_name(name))
    age(store, 20)
    catalog.channel_set("toolkit", "t", "next", f"sha256:{new}", actor="a", reason="r")
    catalog.channel_set("toolkit", "t", "stable", f"sha256:{new}", actor="a", reason="r")
    collect(store)
    age(store, 3)
    collect(store)
    # The entry that was in force until lately keeps the old one, so one can go back.
    assert {head_key(base), head_key(old), head_key(new)} <= keys(store, "heads/")
    age(store, 15)
    collect(store)
    age(store, 3)
    collect(store)
    assert keys(store, "heads/") == {head_key(base), head_key(new)}
    intact(store)


def test_traces_stay_as_long_as_what_was_recorded_can_run(
    store: DirectoryStore, tmp_path: Path
) -> None:
    base = publish(store, tmp_path, "base/b:1", "base")
    there = Environment("linux/amd64", base, process=ProcessDefaults(cwd="/there"))
    gone = Environment("linux/amd64", base, process=ProcessDefaults(cwd="/gone"))
    arm = Environment("linux/arm64", base)
    # Labels and other platforms make another manifest of it, not another composition.
    manifest = EnvironmentManifest({"linux/amd64": there, "linux/arm64": arm}, {"a": "label"})
    catalog = Catalog(store)
    catalog.put_env(manifest, parse_name("env/e:1"))
    for env in (there, gone, arm, Environment("linux/amd64", base)):
        save_trace(store, Trace(env.digest, (Access(b"file", 0, 1),)))
    age(store, 20)
    collect(store)
    assert len(keys(store, "traces/")) == 4
    age(store, 20)
    collect(store)
    age(store, 3)
    collect(store)
    assert {key.split("/")[2] for key in keys(store, "traces/")} == {
        there.digest,
        arm.digest,
        Environment("linux/amd64", base).digest,
    }


def test_a_live_lease_keeps_a_layer_and_a_lapsed_one_does_not(
    store: DirectoryStore, tmp_path: Path
) -> None:
    layer = publish(store, tmp_path, "base/lost:1", "lost")
    Catalog(store).remove_ref(parse_name("base/lost:1"))
    age(store, 20)
    with Lease(store, "node", layers=[layer], ttl_s=DAY * 6):
        assert not collect(store).tombstoned
        age(store, 7)
        assert collect(store).tombstoned


def test_a_publisher_revives_what_has_a_tombstone(store: DirectoryStore, tmp_path: Path) -> None:
    layer = publish(store, tmp_path, "base/b:1", "same")
    Catalog(store).remove_ref(parse_name("base/b:1"))
    age(store, 20)
    assert collect(store).tombstoned
    age(store, 1.9)
    assert publish(store, tmp_path, "base/c:1", "same") == layer
    age(store, 5)
    report = collect(store)
    assert not report.deleted and len(report.revived) >= 3
    assert not keys(store, "tombstones/", "verdicts/")
    intact(store)


def test_a_publisher_waits_for_a_deletion_and_puts_anew(
    store: DirectoryStore, tmp_path: Path
) -> None:
    layer = publish(store, tmp_path, "base/b:1", "same")
    Catalog(store).remove_ref(parse_name("base/b:1"))
    age(store, 20)
    collect(store)
    key = head_key(layer)
    # A collector that has decided and is slow.
    assert store.put_if_absent(verdict_key(key), DELETE)
    done: list[Digest] = []
    thread = threading.Thread(
        target=lambda: done.append(publish(store, tmp_path, "base/c:1", "same"))
    )
    thread.start()
    time.sleep(0.3)
    assert not done
    for gone in (key, tombstone_key(key), verdict_key(key)):
        store.delete(gone)
    thread.join(20)
    assert done == [layer]
    intact(store)


def test_a_ref_is_restored_with_all_it_needs_or_not_at_all(
    store: DirectoryStore, tmp_path: Path
) -> None:
    name = parse_name("base/b:1")
    publish(store, tmp_path, str(name), "x")
    Catalog(store).remove_ref(name)
    age(store, 15)
    assert collect(store).tombstoned
    Catalog(store).restore_ref(name)
    age(store, 3)
    collect(store)
    intact(store)
    Catalog(store).remove_ref(name)
    age(store, 14.5)
    collect(store)
    age(store, 2.1)
    collect(store, grace_s=1)
    with pytest.raises(NotFound):
        Catalog(store).restore_ref(name)
    assert not keys(store, "refs/")


def test_only_one_run_at_a_time(store: DirectoryStore, tmp_path: Path) -> None:
    store.put_if_absent("gc/runs/00000001", b"x")
    with pytest.raises(Busy, match="under way"):
        collect(store)
    age(store, 1)
    collect(store)
    assert not keys(store, "gc/")


class Watched:
    """A store that calls `before` with the name of each operation before it does it."""

    def __init__(self, inner: DirectoryStore, before: Callable[[str], None]) -> None:
        self._inner = inner
        self._before = before
        self.url = inner.url

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._before("put_if_absent")
        return self._inner.put_if_absent(key, data)

    def put_content(self, key: str, data: bytes | memoryview | BinaryIO) -> None:
        self._before("put_content")
        self._inner.put_content(key, data)

    def get(self, key: str, *, max_size: int = 1 << 30) -> bytes:
        self._before("get")
        return self._inner.get(key, max_size=max_size)

    def get_range(
        self, key: str, offset: int, length: int, *, priority: Priority = Priority.FOREGROUND
    ) -> bytes:
        self._before("get_range")
        return self._inner.get_range(key, offset, length, priority=priority)

    def stat(self, key: str) -> ObjectInfo:
        self._before("stat")
        return self._inner.stat(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._before("list")
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._before("delete")
        self._inner.delete(key)

    def close(self) -> None:
        self._inner.close()


class Once:
    """Calls `hook` before operation number `at`, counted from 0."""

    def __init__(self, at: int, hook: Callable[[], None]) -> None:
        self._at = at
        self._hook = hook
        self.calls = 0
        self._guard = threading.Lock()

    def __call__(self, operation: str) -> None:
        with self._guard:
            due, self.calls = self.calls == self._at, self.calls + 1
        if due:
            self._hook()


class Dies(Exception):
    """The collector was killed."""


def dies_after(changes: int) -> Callable[[str], None]:
    left = changes

    def before(operation: str) -> None:
        nonlocal left
        if operation in ("put_if_absent", "put_content", "delete"):
            if not left:
                raise Dies
            left -= 1

    return before


def test_a_run_that_dies_anywhere_leaves_a_store_in_which_all_is_there(tmp_path: Path) -> None:
    for changes in range(60):
        store = DirectoryStore(tmp_path / f"store{changes}", create=True)
        publish(store, tmp_path, "base/kept:1", "kept")
        publish(store, tmp_path, "base/lost:1", "lost")
        Catalog(store).remove_ref(parse_name("base/lost:1"))
        age(store, 15)
        collect(store)
        age(store, 3)
        try:
            collect(Watched(store, dies_after(changes)))
            break
        except Dies:
            intact(store)
        age(store, 3)  # its lock lapses
        collect(store)
        intact(store)
        age(store, 3)
        collect(store)
        assert len(keys(store, "heads/")) == 1
        assert not keys(store, "tombstones/", "verdicts/", "gc/")
        # What was deleted can be published again.
        publish(store, tmp_path, "base/again:1", "lost")
        intact(store)
    else:
        pytest.fail("the run never ended")
    assert changes > 10


def garbage(tmp_path: Path, tombstone_days: float | None) -> DirectoryStore:
    """A store with content that nothing leads to, and tombstones of that age if not None."""
    store = DirectoryStore(tmp_path / f"store-{time.monotonic_ns()}", create=True)
    publish(store, tmp_path, "base/lost:1", "same")
    Catalog(store).remove_ref(parse_name("base/lost:1"))
    age(store, 20)
    if tombstone_days is not None:
        collect(store)
        age(store, tombstone_days)
    return store


@pytest.mark.parametrize("tombstone_days", [None, 0, 1.1, 1.99, 3])
def test_a_whole_collection_between_any_two_steps_of_a_publisher(
    tmp_path: Path, tombstone_days: float | None
) -> None:
    """Before it, nearly the longest time that a publish may take goes by."""
    for at in range(200):
        store = garbage(tmp_path, tombstone_days)

        def interlude(store: DirectoryStore = store) -> None:
            age(store, 0.95, leases=False)
            collect(store)

        once = Once(at, interlude)
        publish(Watched(store, once), tmp_path, "base/again:1", "same")
        intact(store)
        for _ in range(2):
            age(store, 3)
            collect(store)
            intact(store)
        if once.calls <= at:
            break
    else:
        pytest.fail("the publisher never ended")
    assert at > 10


@pytest.mark.parametrize("tombstone_days", [None, 1.99, 3])
def test_a_whole_publish_between_any_two_steps_of_a_collection(
    tmp_path: Path, tombstone_days: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "revive", partial(leases.revive, wait_s=0.05))
    for at in range(200):
        store = garbage(tmp_path, tombstone_days)
        errors: list[DsecfsError] = []

        def interlude(store: DirectoryStore = store, errors: list[DsecfsError] = errors) -> None:
            try:
                publish(store, tmp_path, "base/again:1", "same")
            except Busy as e:
                # The collector has decided to delete, and cannot do it while we wait here.
                errors.append(e)

        once = Once(at, interlude)
        collect(Watched(store, once))
        if errors:
            publish(store, tmp_path, "base/again:1", "same")
        intact(store)
        for _ in range(2):
            age(store, 3)
            collect(store)
            intact(store)
        if once.calls <= at:
            break
    else:
        pytest.fail("the collection never ended")
    assert at > 10


def test_unreadable_things_end_a_run_before_anything_is_deleted(
    store: DirectoryStore, tmp_path: Path
) -> None:
    layer = publish(store, tmp_path, "base/b:1", "x")
    publish(store, tmp_path, "base/lost:1", "lost")
    Catalog(store).remove_ref(parse_name("base/lost:1"))
    age(store, 15)
    path = store.root / head_key(layer)
    path.write_bytes(path.read_bytes()[:20])
    before = keys(store, *DATA)
    with pytest.raises(DsecfsError, match="head of layer"):
        collect(store)
    assert keys(store, *DATA) == before and not keys(store, "tombstones/")


def test_damage_is_reported(store: DirectoryStore, tmp_path: Path) -> None:
    layer = publish(store, tmp_path, "base/b:1", "x")
    victim = next(store.list("objects/")).key
    store.delete(victim)
    assert [k for k, _ in collect(store).missing] == [victim]
    store.delete(head_key(layer))
    assert [k for k, _ in collect(store).missing] == [head_key(layer)]


def test_the_grace_is_longer_than_any_publish() -> None:
    from dsecfs.layers.leases import MAX_PUBLISH_S

    assert GRACE_S > MAX_PUBLISH_S


def test_a_removal_and_a_restoration_at_once_lose_nothing(tmp_path: Path) -> None:
    """The whole of one between any two steps of the other: the ref is there, or in the trash."""
    name = parse_name("base/a:1")

    def remove(store: Store) -> None:
        Catalog(store).remove_ref(name)

    def restore(store: Store) -> None:
        Catalog(store).restore_ref(name)

    def there(store: Store) -> bool:
        catalog = Catalog(store)
        return name in [*catalog.ls(["base"]), *(removed for removed, _ in catalog.trash())]

    for outer, inner, removed in ((remove, restore, False), (restore, remove, True)):
        for at in range(100):
            store = DirectoryStore(tmp_path / f"{outer.__name__}{at}", create=True)
            publish(store, tmp_path, str(name), "a")
            if removed:
                remove(store)

            def interlude(
                store: DirectoryStore = store, inner: Callable[[Store], None] = inner
            ) -> None:
                with contextlib.suppress(NotFound):
                    inner(store)

            once = Once(at, interlude)
            with contextlib.suppress(NotFound):
                outer(Watched(store, once))
            assert there(store), (outer.__name__, at)
            if once.calls <= at:
                break
        else:
            pytest.fail("it never ended")


def test_a_lease_lists_only_what_the_store_has(store: DirectoryStore, tmp_path: Path) -> None:
    layer = publish(store, tmp_path, "base/a:1", "a")
    away = False

    def before(operation: str) -> None:
        if away and operation == "put_if_absent":
            raise StoreUnavailable("the store is away")

    with Lease(Watched(store, before), "node") as lease:
        away = True
        with pytest.raises(StoreUnavailable):
            lease.add([layer])
        away = False
        lease.add([layer])  # not taken for listed already
        assert layer in live_layers(store, time.time())


def test_keys_of_others_are_errors_of_ours(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, tmp_path, "base/a:1", "a")
    store.put_if_absent("traces/ab", b"x")
    age(store, 3)
    with pytest.raises(FormatError, match="traces/ab: not the key of a trace"):
        collect(store)
    store.delete("traces/ab")
    store.put_if_absent("channels/base/a/.c/stable/next", b"x")
    with pytest.raises(FormatError, match="not an entry of a channel"):
        collect(store)
    with pytest.raises(FormatError, match="not an entry of a channel"):
        Catalog(store).channel_set("base", "a", "stable", "1", actor="me", reason="test")
