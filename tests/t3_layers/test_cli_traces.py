"""`dsec env heat`, `dsec env traces` and `dsec layer optimize`, with traces made by hand."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsecfs.layers.catalog import Catalog
from dsecfs.layers.digest import Digest
from dsecfs.layers.environment import Environment
from dsecfs.layers.layout import Layout
from dsecfs.layers.reach import read_layer_manifest, read_newest_layout
from dsecfs.layers.trace import Access, Trace, keep_trace, load_traces, save_trace
from dsecfs.store.base import trace_prefix
from dsecfs.store.directory import DirectoryStore
from tests.support.cli import Dsec

CHUNK = 65536


class Node:
    """A base, a toolkit and two environments with them."""

    def __init__(self, dsec: Dsec, place: Path) -> None:
        self.dsec = dsec
        self.store = DirectoryStore(place / "store")
        rng = random.Random(3)
        for name, target, files in (
            ("base/debian:12", "rootfs", ("bin/sh", "lib/a", "lib/b")),
            ("toolkit/dsh:1", "dsh", ("opt/dsh/bin/dsh",)),
        ):
            for file in files:
                path = place / target / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(rng.randbytes(4 * CHUNK))
            dsec("layer", "publish", str(place / target), name, "--chunk-size", "64KiB")
        dsec("env", "create", "one:1", "debian:12", "+dsh:1")
        dsec("env", "create", "two:1", "debian:12", "-e", "X=1")
        self.kept = place / "data" / "traces"

    def environment(self, name: str, toolkits: Sequence[str] = ()) -> Environment:
        return Catalog(self.store).environment_for(name, toolkits)

    def trace(self, name: str, *paths: str, toolkits: Sequence[str] = ()) -> Trace:
        accesses = tuple(Access(path.encode(), 0, 10) for path in paths)
        return Trace(self.environment(name, toolkits).digest, accesses)

    def layout(self, layer: str) -> Layout:
        digest = Catalog(self.store).resolve(layer).digest
        (blob,) = read_layer_manifest(self.store, digest).blobs
        return read_newest_layout(self.store, blob)[1]


@pytest.fixture
def node(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Node:
    return Node(Dsec(tmp_path, capfd, monkeypatch), tmp_path)


def test_traces_are_listed_stored_and_removed(node: Node) -> None:
    dsec = node.dsec
    assert "no run was recorded" in dsec("env", "traces", "one:1", "--no-json").out
    digest = node.environment("one:1").digest
    key = save_trace(node.store, node.trace("one:1", "bin/sh"))
    os.utime(node.store.root / key, (1, 1))
    keep_trace(node.kept, node.trace("one:1", "lib/a", "lib/b"))
    junk = Digest("ab" * 32)
    node.store.put_content(trace_prefix(digest) + junk, b"no trace")
    os.utime(node.store.root / (trace_prefix(digest) + junk), (2, 2))
    kept, damaged, stored = dsec("env", "traces", "one:1").json
    assert (kept["in_store"], kept["files"], kept["bytes"]) == (False, 2, 20)
    assert (stored["in_store"], stored["files"], stored["recorded"]) == (True, 1, 1)
    assert damaged["trace"] == junk and "does not decompress" in damaged["damage"]
    assert "damage" in dsec("env", "traces", "one:1", "--no-json").out

    dsec("env", "traces", "one:1", "--rm", junk[:8])
    assert all(row["in_store"] for row in dsec("env", "traces", "one:1", "--push").json)
    assert len(load_traces(node.store, digest)) == 2
    assert not os.listdir(node.kept / digest)
    assert "no trace abcdef" in dsec("env", "traces", "one:1", "--rm", "abcdef", code=3).error
    assert "6 characters" in dsec("env", "traces", "one:1", "--rm", "a", code=2).error
    assert dsec("env", "traces", "one:1", "--rm", "all").json == []
    assert load_traces(node.store, digest) == []


def test_heat_of_an_environment(node: Node, tmp_path: Path) -> None:
    dsec = node.dsec
    assert "was recorded" in dsec("env", "heat", "one:1", code=3).error
    save_trace(node.store, node.trace("one:1", "lib/b", "opt/dsh/bin/dsh"))
    keep_trace(node.kept, node.trace("one:1", "bin/sh", "lib/b"))
    heat = dsec("env", "heat", "one:1").json
    assert (heat["runs"], heat["files_read"], heat["files"], heat["bytes_read"]) == (2, 3, 4, 30)
    assert {row["path"]: row["layer"] for row in heat["read"]} == {
        "/bin/sh": "base",
        "/lib/b": "base",
        "/opt/dsh/bin/dsh": "toolkit dsh",
    }
    assert [(r["layer"], r["chunks_read"], r["chunks"]) for r in heat["layers"]] == [
        ("toolkit dsh", 1, 4),
        ("base", 2, 12),
    ]
    assert {row["path"] for row in heat["directories"]} == {"/bin", "/lib", "/opt/dsh/bin"}
    shown = dsec("env", "heat", "one:1", "--depth", "1", "--no-json").out
    assert "2 runs read 3 of 4 files" in shown and "where in base" in shown and "█" in shown
    assert "/opt/dsh" not in shown
    assert "/opt/dsh/bin/dsh" in dsec("env", "heat", "one:1", "--files", "--no-json").out
    picture = tmp_path / "heat.svg"
    dsec("env", "heat", "one:1", "--svg", str(picture))
    assert picture.read_text().startswith("<svg") and "toolkit dsh: 1 of 4" in picture.read_text()


def test_optimize_an_environment_a_layer_and_chosen_runs(node: Node) -> None:
    dsec = node.dsec
    assert "was recorded" in dsec("layer", "optimize", "one:1", code=3).error
    assert "was recorded" in dsec("layer", "optimize", "base/debian:12", code=3).error
    save_trace(node.store, node.trace("one:1", "lib/b", "opt/dsh/bin/dsh"))
    save_trace(node.store, node.trace("two:1", "lib/a"))
    save_trace(node.store, node.trace("debian:12", "bin/sh"))

    done = dsec("layer", "optimize", "one:1").json
    assert (done["runs"], done["environments"], done["blobs"]) == (1, 1, 2)
    # Each range, and what mounts read ahead of it.
    assert done["chunks"] == 2 * 3
    first = node.layout("base/debian:12").hot
    assert len(first) == 3 and len(node.layout("dsh:1").hot) == 3

    done = dsec("layer", "optimize", "base/debian:12").json
    assert (done["runs"], done["environments"], done["blobs"]) == (3, 3, 1)
    hot = node.layout("base/debian:12")
    assert len(hot.hot) == 9 and set(first) < set(hot.hot)
    assert f"sha256:{hot.objects[hot.places[hot.hot[0]].object]}" == done["hot_object"]

    done = dsec("layer", "optimize", "base/debian:12", "--env", "two:1", "--env", "debian:12").json
    assert (done["environments"], done["chunks"]) == (2, 6)
    assert "no run" in dsec("layer", "optimize", "dsh:1", "--env", "two:1 +dsh:1", code=3).error
    save_trace(node.store, node.trace("two:1", "opt/dsh/bin/dsh", toolkits=["dsh:1"]))
    done = dsec("layer", "optimize", "dsh:1", "--env", "two:1 +dsh:1").json
    assert (done["environments"], done["chunks"], done["blobs"]) == (1, 3, 1)
    assert "is a layer" in dsec("layer", "optimize", "base/debian:12", "+dsh:1", code=2).error
