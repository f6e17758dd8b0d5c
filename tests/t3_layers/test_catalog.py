"""Names: what they resolve to, who wins, what is remembered, what can be undone."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecfs.errors import BadInput, Conflict, DsecfsError, NotFound, StoreUnavailable
from dsecfs.layers.catalog import (
    REMEMBER_S,
    TRASH_S,
    Catalog,
    ChannelEntry,
    Ref,
    Use,
    parse_channel_entry,
    parse_ref,
    parse_trash,
)
from dsecfs.layers.digest import Digest
from dsecfs.layers.environment import Environment, EnvironmentManifest, Toolkit
from dsecfs.layers.leases import Lease
from dsecfs.layers.names import Name, parse_name
from dsecfs.layers.publish import Meta, publish_tree
from dsecfs.layers.tree import directory
from dsecfs.store.base import channel_prefix, env_key, ref_key
from dsecfs.store.directory import DirectoryStore

ACTOR = {"actor": "me", "reason": "test"}


class Counting(DirectoryStore):
    """Counts reads, and can be cut off."""

    reads = 0
    away = False

    def get(self, key: str, *, max_size: int = 1 << 30) -> bytes:
        self._read()
        return super().get(key, max_size=max_size)

    def stat(self, key: str) -> Any:
        self._read()
        return super().stat(key)

    def _read(self) -> None:
        self.reads += 1
        if self.away:
            raise StoreUnavailable("the store is away")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Counting]:
    store = Counting(tmp_path / "store", create=True)
    yield store
    store.close()


def put(store: Any, text: str) -> Digest:
    """Publish an empty layer of its own under a name; its digest."""
    name = parse_name(text)
    with Lease(store, "publish") as lease:
        meta = Meta(name.kind, "linux/amd64", labels={"made for": text})
        digest = publish_tree(store, lease, directory(), [], meta).digest
        Catalog(store).put_ref(name, digest, lease=lease)
    return digest


def put_env(store: Any, text: str, base: Digest, *toolkits: Toolkit) -> Digest:
    env = Environment("linux/amd64", base, toolkits=toolkits)
    return Catalog(store).put_env(EnvironmentManifest({"linux/amd64": env}), parse_name(text))


# -- resolving


def test_an_environment_comes_before_a_base(store: Counting) -> None:
    catalog = Catalog(store)
    base = put(store, "base/debian:12")
    found = catalog.resolve("debian:12", ("env", "base"))
    assert found == ("base", Name("base", "debian", "12"), base)
    env = put_env(store, "debian:12", base)
    for kinds in (("env", "base"), ("base", "env")):
        found = catalog.resolve("debian:12", kinds)
        assert (found.kind, found.digest) == ("env", env)
    assert catalog.resolve("base/debian:12").digest == base
    assert catalog.resolve("env/debian:12").digest == env


def test_ambiguous_layers_are_listed(store: Counting) -> None:
    put(store, "base/x:1")
    put(store, "toolkit/x:1")
    with pytest.raises(BadInput, match=r"ambiguous.*base/x:1, toolkit/x:1"):
        Catalog(store).resolve("x:1")
    assert Catalog(store).resolve("x:1", ("toolkit",)).kind == "toolkit"


def test_another_kind_than_was_wanted(store: Counting) -> None:
    put(store, "toolkit/dsh:1")
    with pytest.raises(BadInput, match="is a toolkit; expected environment or base"):
        Catalog(store).resolve("toolkit/dsh:1", ("env", "base"))


def test_a_suggestion_for_a_name_that_is_not_there(store: Counting) -> None:
    base = put(store, "base/debian:12")
    put_env(store, "swe/django:1", base)
    put(store, "toolkit/dsh:1.5")
    catalog = Catalog(store)
    for wanted, kinds, message in (
        ("swe/djagno:1", ("env", "base"),
         "no environment swe/djagno:1; did you mean swe/django:1?"),
        ("dsh:1.6", ("toolkit",), "no toolkit dsh:1.6; did you mean dsh:1.5?"),
        ("base/debain:12", ("env", "base"), "no base debain:12; did you mean debian:12?"),
        ("zzz:9", ("env",), "no environment zzz:9; dsec env ls lists what there is"),
        ("dsh@stabel", ("toolkit",), "no toolkit dsh@stabel; dsec layer ls lists what there is"),
    ):  # fmt: skip
        with pytest.raises(NotFound) as e:
            catalog.resolve(wanted, kinds)
        assert str(e.value) == message
    catalog.channel_set("toolkit", "dsh", "stable", "1.5", **ACTOR)
    with pytest.raises(NotFound, match="did you mean dsh@stable"):
        catalog.resolve("dsh@stabel", ("toolkit",))


def test_digests_resolve_to_what_is_there(store: Counting) -> None:
    base = put(store, "base/debian:12")
    env = put_env(store, "swe/x:1", base)
    catalog = Catalog(store)
    assert catalog.resolve(f"sha256:{env}") == ("env", None, env)
    assert catalog.resolve(f"sha256:{base}") == ("", None, base)
    assert catalog.resolve(f"sha256:{base}", ("env", "base")) == ("base", None, base)
    with pytest.raises(NotFound):
        catalog.resolve(f"sha256:{env}", ("base",))
    with pytest.raises(BadInput):
        catalog.resolve("sha256:../../x")


@given(st.text())
def test_any_text_is_answered_or_refused(text: str) -> None:
    try:
        Catalog(_Empty()).resolve(text)  # type: ignore[arg-type]
    except (BadInput, NotFound):
        return
    raise AssertionError("resolved in an empty store")


class _Empty:
    """A store with nothing in it."""

    url = "empty:"

    def get(self, key: str, *, max_size: int = 0) -> bytes:
        raise NotFound(key)

    stat = get

    def list(self, prefix: str) -> Iterator[Any]:
        return iter(())


def test_the_composition_of_a_name(store: Counting) -> None:
    base, other = put(store, "base/debian:12"), put(store, "base/debian:13")
    old, new = put(store, "toolkit/dsh:1"), put(store, "toolkit/dsh:2")
    tool = put(store, "toolkit/git:1")
    put_env(store, "swe/x:1", base, Toolkit("dsh", old))
    catalog = Catalog(store)
    catalog.channel_set("toolkit", "dsh", "stable", "2", **ACTOR)
    env = catalog.environment_for("swe/x:1", ["dsh@stable", "git:1"], "linux/amd64")
    assert env.layers_bottom_up() == (base, new, tool)
    bare = catalog.environment_for("debian:13", [f"sha256:{tool}"], platform="linux/amd64")
    assert bare.base == other and bare.toolkits == (Toolkit(tool, tool),)
    with pytest.raises(NotFound, match="is not for linux/arm64"):
        catalog.environment_for("swe/x:1", platform="linux/arm64")
    with pytest.raises(BadInput, match="expected toolkit"):
        catalog.environment_for("swe/x:1", ["base/debian:12"], platform="linux/amd64")


def test_an_environment_of_layers_that_are_not_there(store: Counting) -> None:
    with pytest.raises(NotFound, match="not in the store"):
        put_env(store, "swe/x:1", Digest("a" * 64))
    assert list(store.list("envs/")) == list(store.list("refs/")) == []


# -- what a node remembers


def test_what_was_resolved_needs_no_store(store: Counting, tmp_path: Path) -> None:
    base = put(store, "base/debian:12")
    put_env(store, "swe/x:1", base)
    cache = tmp_path / "refs"
    Catalog(store, cache).environment_for("swe/x:1", platform="linux/amd64")
    store.reads, store.away = 0, True
    env = Catalog(store, cache).environment_for("swe/x:1", platform="linux/amd64")
    assert env.base == base and store.reads == 0
    # A bare base cannot be told from an environment of that name without the store.
    with pytest.raises(StoreUnavailable):
        Catalog(store, cache).environment_for("debian:12", platform="linux/amd64")


def test_channels_are_never_remembered(store: Counting, tmp_path: Path) -> None:
    first, second = put(store, "toolkit/dsh:1"), put(store, "toolkit/dsh:2")
    catalog = Catalog(store, tmp_path / "refs")
    for version, digest in (("1", first), ("2", second), ("1", first)):
        catalog.channel_set("toolkit", "dsh", "stable", version, **ACTOR)
        assert catalog.resolve("dsh@stable", ("toolkit",)).digest == digest


def test_stores_are_not_mixed_up(store: Counting, tmp_path: Path) -> None:
    cache = tmp_path / "refs"
    put(store, "base/debian:12")
    Catalog(store, cache).resolve("base/debian:12")
    other = DirectoryStore(tmp_path / "other", create=True)
    with pytest.raises(NotFound):
        Catalog(other, cache).resolve("base/debian:12")
    other.close()


def test_old_or_damaged_memory_is_no_memory(store: Counting, tmp_path: Path) -> None:
    assert REMEMBER_S < TRASH_S
    cache = tmp_path / "refs"
    digest = put(store, "base/debian:12")
    Catalog(store, cache).resolve("base/debian:12")
    (path,) = [p for p in cache.rglob("12") if p.is_file()]
    for damage in (
        lambda: path.write_bytes(b"{"),
        lambda: os.utime(path, (time.time() - REMEMBER_S - 10,) * 2),
        path.unlink,
    ):
        damage()
        store.reads = 0
        assert Catalog(store, cache).resolve("base/debian:12").digest == digest
        assert store.reads > 0 and parse_ref(path.read_bytes(), "memory").digest == digest
    assert not list(cache.rglob(".tmp*"))


def test_a_node_without_space_goes_on(store: Counting, tmp_path: Path) -> None:
    digest = put(store, "base/debian:12")
    (tmp_path / "refs").write_bytes(b"a file in the way")
    assert Catalog(store, tmp_path / "refs").resolve("base/debian:12").digest == digest


# -- channels


def test_a_channel_is_an_audit_trail(store: Counting) -> None:
    first, second = put(store, "toolkit/dsh:1"), put(store, "toolkit/dsh:2")
    catalog = Catalog(store)
    catalog.channel_set("toolkit", "dsh", "stable", "1", actor="ann", reason="first")
    catalog.channel_set("toolkit", "dsh", "stable", f"sha256:{second}", actor="bob", reason="fix")
    catalog.channel_set("toolkit", "dsh", "stable", "1", actor="ann", reason="back")
    log = catalog.channel_log("toolkit", "dsh", "stable")
    assert [(e.sequence, e.digest, e.version, e.actor, e.reason) for e in log] == [
        (1, first, "1", "ann", "first"),
        (2, second, "", "bob", "fix"),
        (3, first, "1", "ann", "back"),
    ]
    assert catalog.channel_get("toolkit", "dsh", "stable") == log[-1]
    assert list(catalog.channels()) == [Name("toolkit", "dsh", channel="stable")]
    catalog.channel_close("toolkit", "dsh", "stable", actor="ann", reason="unsupported")
    with pytest.raises(NotFound):
        catalog.resolve("toolkit/dsh@stable")
    assert len(catalog.channel_log("toolkit", "dsh", "stable")) == 4


def test_a_channel_leads_only_to_what_there_is(store: Counting) -> None:
    put(store, "toolkit/dsh:1")
    catalog = Catalog(store)
    with pytest.raises(NotFound, match="did you mean dsh:1"):
        catalog.channel_set("toolkit", "dsh", "stable", "2", **ACTOR)
    with pytest.raises(NotFound):
        catalog.channel_set("toolkit", "dsh", "stable", f"sha256:{'a' * 64}", **ACTOR)
    with pytest.raises(NotFound, match="no channel"):
        catalog.channel_close("toolkit", "dsh", "stable", **ACTOR)
    for kind, name, channel in (("toolkit", "../x", "s"), ("x", "dsh", "s"), ("toolkit", "d", "/")):
        with pytest.raises(BadInput):
            catalog.channel_set(kind, name, channel, "1", **ACTOR)
    assert list(store.list("channels/")) == []


def test_many_move_a_channel_and_none_is_lost(store: Counting) -> None:
    put(store, "toolkit/dsh:1")

    def move(i: int) -> None:
        Catalog(store).channel_set("toolkit", "dsh", "stable", "1", actor=str(i), reason="race")

    threads = [threading.Thread(target=move, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    log = Catalog(store).channel_log("toolkit", "dsh", "stable")
    assert [e.sequence for e in log] == list(range(1, 9))
    assert {e.actor for e in log} == set(map(str, range(8)))


# -- listing, removing, use


def test_listing(store: Counting) -> None:
    base = put(store, "base/debian:12")
    put(store, "base/debian:13")
    put(store, "toolkit/dsh:1")
    put_env(store, "swe/x:1", base)
    catalog = Catalog(store)
    assert [str(n) for n in catalog.ls()] == [
        "base/debian:12", "base/debian:13", "toolkit/dsh:1", "swe/x:1",
    ]  # fmt: skip
    assert [str(n) for n in catalog.ls(("base", "env"), "swe/")] == ["swe/x:1"]


def test_a_removed_name_can_be_restored(store: Counting, tmp_path: Path) -> None:
    digest = put(store, "toolkit/dsh:1")
    name = parse_name("toolkit/dsh:1")
    catalog = Catalog(store, tmp_path / "refs")
    labels = catalog.get_ref(name)
    before = int(time.time())
    catalog.remove_ref(name)
    with pytest.raises(NotFound):
        catalog.resolve("toolkit/dsh:1")
    with pytest.raises(NotFound):
        catalog.remove_ref(name)
    ((trashed, when),) = catalog.trash()
    assert trashed == name and before <= when <= time.time()
    assert catalog.restore_ref(name) == labels
    assert catalog.resolve("toolkit/dsh:1").digest == digest
    assert list(catalog.trash()) == []
    with pytest.raises(NotFound, match="not in the trash"):
        catalog.restore_ref(name)


def test_a_removed_name_does_not_come_back_as_something_else(store: Counting) -> None:
    digest, other = put(store, "toolkit/dsh:1"), put(store, "toolkit/dsh:2")
    name = parse_name("toolkit/dsh:1")
    catalog = Catalog(store)
    catalog.remove_ref(name)
    with Lease(store, "publish") as lease:
        with pytest.raises(Conflict, match="was removed"):
            catalog.put_ref(name, other, lease=lease)
        assert catalog.put_ref(name, digest, lease=lease)


def test_who_uses_a_layer(store: Counting) -> None:
    base, tool = put(store, "base/debian:12"), put(store, "toolkit/dsh:1")
    env = put_env(store, "swe/x:1", base, Toolkit("dsh", tool))
    catalog = Catalog(store)
    catalog.channel_set("toolkit", "dsh", "stable", "1", **ACTOR)
    assert catalog.used_by(tool) == [
        Use("ref", "toolkit/dsh:1"),
        Use("channel", "toolkit/dsh@stable"),
        Use("env", env),
    ]
    assert catalog.used_by(env) == [Use("ref", "env/swe/x:1")]
    assert catalog.used_by(Digest("a" * 64)) == []


# -- stored forms and hostile stores


def test_the_stored_forms(store: Counting) -> None:
    # Written out by hand from docs/formats.md.
    a = Digest("a" * 64)
    assert Ref(a, 5, {"k": "v"}).to_json() == (
        b'{"created":5,"digest":"%s","format":1,"labels":{"k":"v"}}' % a.encode()
    )
    entry = ChannelEntry(3, a, "1.5", 7, "ann", "why")
    stored = (
        b'{"actor":"ann","created":7,"digest":"%s","format":1,"reason":"why","version":"1.5"}'
        % a.encode()
    )
    assert entry.to_json() == stored and parse_channel_entry(stored, 3, "x") == entry
    digest = put(store, "toolkit/dsh:1")
    assert ref_key("toolkit", "dsh", "1") == "refs/toolkit/dsh/.v/1"
    assert parse_ref(store.get("refs/toolkit/dsh/.v/1"), "x").digest == digest
    Catalog(store).channel_set("toolkit", "dsh", "stable", "1", **ACTOR)
    assert store.stat(channel_prefix("toolkit", "dsh", "stable") + "00000001")


@given(st.binary() | st.dictionaries(st.text(), st.text()).map(json.dumps).map(str.encode))
def test_parsers_raise_only_our_errors(data: bytes) -> None:
    for parse in (
        lambda: parse_ref(data, "x"),
        lambda: parse_channel_entry(data, 1, "x"),
        lambda: parse_trash(data, "x"),
    ):
        with pytest.raises(DsecfsError):
            parse()


def test_an_environment_that_was_changed_in_the_store(store: Counting) -> None:
    env = put_env(store, "swe/x:1", put(store, "base/debian:12"))
    path = Path(store.root, env_key(env))
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(b'"cwd":""', b'"cwd":"/"'))
    with pytest.raises(DsecfsError, match="another digest"):
        Catalog(store).environment_for("swe/x:1", platform="linux/amd64")
