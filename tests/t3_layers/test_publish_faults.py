"""Publishing, importing and fetching layers over a store that errs, stalls and lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsecfs.errors import FormatError, NotFound, StoreDenied, StoreError, StoreUnavailable
from dsecfs.layers.catalog import Catalog
from dsecfs.layers.image import import_image
from dsecfs.layers.local import LocalLayers
from dsecfs.layers.names import parse_name
from dsecfs.layers.publish import Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.faults import FaultyStore, Rule
from dsecfs.store.open import open_store
from dsecfs.store.retry import RetryingStore, RetryPolicy
from tests.t3_layers.oci import layer_tar, oci_layout
from tests.t3_layers.readback import layer_listing

NAME = parse_name("toolkit/dsh:1")
META = Meta("toolkit", "linux/amd64")
LAYERS = [
    layer_tar([("etc/", None), ("etc/a", b"a" * 300_000), ("usr/lib/x", b"x" * 700_000)]),
    layer_tar([("etc/.wh.a", b""), ("usr/lib/y => usr/lib/x", None)]),
    layer_tar([("app/main", bytes(range(256)) * 4000)]),
]


def open_faulty(
    path: Path, *rules: Rule, seed: int = 0, wait_s: float = 0
) -> tuple[FaultyStore, RetryingStore]:
    faulty: list[FaultyStore] = []

    def wrap(backend: Any) -> FaultyStore:
        faulty.append(FaultyStore(backend, rules, seed=seed))
        return faulty[0]

    policy = RetryPolicy(first_delay_s=0.001, max_delay_s=0.01, quiet=1000)
    if wait_s:
        policy = replace(policy, foreground_s=wait_s, background_s=wait_s, write_s=wait_s)
    store = open_store(f"file:{path}", create=True, policy=policy, wrap=wrap)
    return faulty[0], store


@pytest.fixture
def archive(tmp_path: Path) -> str:
    (tmp_path / "a.tar").write_bytes(LAYERS[0])
    return f"tar:{tmp_path / 'a.tar'}"


def publish(store: Any, spec: str) -> Any:
    return publish_source(store, open_image(spec).layers[0], NAME, META)


@pytest.mark.parametrize("kind", ["error", "cut", "short", "stall", "busy"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_store_that_hiccups_changes_nothing(
    tmp_path: Path, archive: str, kind: Any, seed: int
) -> None:
    layout = oci_layout(tmp_path / "image", LAYERS)
    _, clean = open_faulty(tmp_path / "clean")
    # A short read is tried four times only.
    rule = Rule(kind, probability=0.05 if kind == "short" else 0.4, seconds=0.002)
    faulty, store = open_faulty(tmp_path / "faulty", rule, seed=seed)
    digests = set()
    for target in (clean, store):
        layer = publish(target, archive).digest
        with open_image(f"oci:{layout}", platform="linux/amd64") as image:
            imported = import_image(target, image, parse_name("x:1"))
        digests.add((layer, imported.environment, imported.base.digest))
        env = Catalog(target, tmp_path / "refs").environment_for("x:1", ["dsh:1"], "linux/amd64")
        dirs = NodeDirs(tmp_path / target.url.rpartition("/")[2] / "node", tmp_path / "run")
        found = LocalLayers(target, dirs).ensure_all(env.layers_bottom_up())
        assert [f.digest for f in found] == [imported.base.digest, layer]
    assert len(digests) == 1
    assert faulty.hits
    for layer in env.layers_bottom_up():
        assert layer_listing(store, layer) == layer_listing(clean, layer)
    assert list(clean.list("leases/")) == list(store.list("leases/")) == []


@pytest.mark.parametrize("prefix", ["leases/", "objects/", "layouts/", "heads/", "refs/"])
def test_a_store_that_refuses_leaves_nothing_visible(
    tmp_path: Path, archive: str, prefix: str
) -> None:
    faulty, store = open_faulty(
        tmp_path / "s",
        Rule("denied", "put_if_absent", prefix),
        Rule("denied", "put_content", prefix),
    )
    with pytest.raises(StoreDenied):
        publish(store, archive)
    faulty.rules = ()
    assert list(store.list("refs/")) == [] and list(store.list("leases/")) == []
    again = publish(store, archive)
    assert Catalog(store).resolve("toolkit/dsh:1").digest == again.digest


def test_a_store_that_goes_away_while_publishing(tmp_path: Path, archive: str) -> None:
    faulty, store = open_faulty(tmp_path / "s", wait_s=0.1)

    def hook(step: str) -> None:
        if step == "objects":
            faulty.rules = (Rule("error"),)

    with pytest.raises(StoreUnavailable):
        publish_source(store, open_image(archive).layers[0], NAME, META, hook=hook)
    faulty.rules = ()
    with pytest.raises(NotFound):
        Catalog(store).resolve("toolkit/dsh:1")
    # Its lease could not be taken back; it lapses, and does not hinder anybody.
    assert len(list(store.list("leases/"))) == 1
    layer_listing(store, publish(store, archive).digest)


@pytest.mark.parametrize("kind", ["wrong", "truncated"])
def test_one_wrong_answer_is_asked_for_again(
    tmp_path: Path, archive: str, kind: Any, expect_log: Callable[[str], None]
) -> None:
    expect_log("reading it once more")
    _, clean = open_faulty(tmp_path / "s")
    layer = publish(clean, archive).digest
    dirs = NodeDirs(tmp_path / "data", tmp_path / "run")
    _, lying = open_faulty(tmp_path / "s", Rule(kind, "get", "heads/"))
    with pytest.raises((FormatError, StoreError)):
        LocalLayers(lying, dirs).ensure(layer)
    assert not dirs.head(layer).exists() and not dirs.meta(layer).exists()
    _, once = open_faulty(tmp_path / "s", Rule(kind, "get", "heads/", times=1))
    assert LocalLayers(once, dirs).ensure(layer).digest == layer
