"""Collection while others publish and mount: nothing that is used or named is lost.

Objects are made old by their times in the store's directory, so the real grace counts. What
protects what: a publisher's lease and its verdicts the objects it relies on, a ref what it
leads to, a node's lease the layers that are mounted there.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from dsecfs.errors import DsecfsError, NotFound
from dsecfs.layers.catalog import TRASH_S, Catalog
from dsecfs.layers.digest import Digest
from dsecfs.layers.gc import GRACE_S, GcReport, collect
from dsecfs.layers.head import decode_head
from dsecfs.layers.local import LocalLayers
from dsecfs.layers.names import Name
from dsecfs.layers.publish import BlobOptions, Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.layers.verify import verify_layer
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import Store, head_key
from dsecfs.store.open import open_store
from tests.t4_fuse.family import wait_for
from tests.t8_chaos.stack import CHUNK, HANG_S, Mode, make_tar, node, publish

DEFAULT_ENTRY = "dsecfs.fuse.worker:main"
"""With the chores of a node, of which the lease is one."""
COLLECTED = ("heads", "layouts", "objects", "tombstones", "trash")


@pytest.fixture
def own(top: Path) -> Iterator[Store]:
    store = open_store(f"file:{top}/store", create=True)
    yield store
    store.close()


def age(top: Path, seconds: float) -> None:
    """Make everything that can be collected older. Leases stay as young as they are."""
    for part in COLLECTED:
        for path in (top / "store" / part).rglob("*"):
            try:
                info = path.stat()
                os.utime(path, (info.st_atime - seconds, info.st_mtime - seconds))
            except FileNotFoundError:
                continue


def collected(store: Store, top: Path) -> GcReport:
    """A tombstone and, after the grace, the end of what nothing leads to."""
    age(top, GRACE_S + 60)
    collect(store)
    age(top, GRACE_S + 60)
    return collect(store)


def at_the_same_time(*work: Callable[[], object]) -> list[BaseException]:
    """Run all in threads; what they raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(work))

    def run(one: Callable[[], object]) -> None:
        try:
            start.wait(HANG_S)
            one()
        except (DsecfsError, OSError, AssertionError) as e:
            raised.append(e)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"
    return raised


def test_publishers_race_collectors(top: Path, own: Store) -> None:
    """What is about to be deleted is published again just then, and stays whole."""
    rng = random.Random(9)
    make_tar(top / "a.tar", 0, 12, 1)
    source = open_image(f"tar:{top}/a.tar").layers[0]
    options = BlobOptions(chunk_size=CHUNK)

    def publish_as(name: Name | None) -> Digest:
        meta = Meta("base", "linux/amd64")
        return publish_source(own, source, name, meta, options=options).digest

    layer = publish_as(None)
    deleted = 0
    for number in range(8):
        # Nothing leads to it, its tombstones are older than the grace: it goes now …
        age(top, GRACE_S + 60)
        collect(own)
        age(top, GRACE_S + 60)
        name = Name("base", "raced", str(number))

        def publisher(name: Name = name, pause: float = rng.uniform(0, 0.02)) -> None:
            threading.Event().wait(pause)
            assert publish_as(name) == layer

        def collector() -> None:
            nonlocal deleted
            deleted += len(collect(own).deleted)

        raised = at_the_same_time(collector, publisher, publisher)
        assert raised == []
        # … and whoever came first: now it has a name and is whole.
        assert Catalog(own).resolve(f"base/{name.name}:{name.version}").digest == layer
        assert verify_layer(own, layer).damage == []
        Catalog(own).remove_ref(name)
        age(top, TRASH_S + GRACE_S)
    assert deleted > 0, "sometimes the collector came first"


def test_what_is_mounted_stays_while_its_node_can_say_so(
    top: Path, own: Store, modes: tuple[Mode, ...]
) -> None:
    content = publish(own, top, name="mounted")
    with node(top / "node", own, content, modes, entry=DEFAULT_ENTRY) as n:
        wait_for("the node's lease", lambda: leases(top, "node-"), HANG_S)
        for number in range(len(content.layers)):
            Catalog(own).remove_ref(Name("base", "mounted", str(number)))
        age(top, TRASH_S + GRACE_S)
        raised = at_the_same_time(lambda: collected(own, top), n.check, n.kill_worker)
        assert raised == []
        collected(own, top)
        # The cache is empty, so this needs every object.
        n.forget_chunks()
        n.check()

        # Cut off for so long that its lease lapses: what it has it reads, the rest is EIO.
        n.forget_chunks()
        for mode in modes:
            (n.trees[mode] / "dir0" / "file0").read_bytes()
        for path in leases(top):
            os.utime(path, (1, 1))
        assert collected(own, top).deleted
        for layer in content.layers:
            with pytest.raises(NotFound):
                own.stat(head_key(layer))
        failed = 0
        for mode in modes:
            (n.trees[mode] / "dir0" / "file0").read_bytes()
            for name in content.sums:
                try:
                    (n.trees[mode] / name).read_bytes()
                except OSError as e:
                    assert e.errno == errno.EIO
                    failed += 1
        assert failed > 0
        assert n.status()["deaths"] == 1, "only the one that was killed"
        # Published again, it is whole again; nobody has to mount it anew.
        assert publish(own, top).layers == content.layers
        n.check()


def leases(top: Path, kind: str = "") -> list[Path]:
    """Records of leases in the store."""
    place = top / "store" / "leases"
    found = place.rglob("*") if place.is_dir() else ()
    return [p for p in found if p.is_file() and p.parent.name.startswith(kind)]


def test_a_layer_is_obtained_while_it_is_deleted(top: Path, own: Store) -> None:
    """Nothing protects a layer without a name before somebody has mounted it: a node gets it
    whole, or an error, and nothing half."""
    content = publish(own, top, files=6)
    for number in range(6):
        age(top, GRACE_S + 60)
        collect(own)
        age(top, GRACE_S + 60)
        dirs = NodeDirs(top / f"data{number}", top / f"run{number}")
        dirs.create()
        local = LocalLayers(own, dirs)
        obtain = partial(local.ensure_all, content.layers)
        raised = at_the_same_time(partial(collect, own), obtain)
        assert all(isinstance(e, NotFound) for e in raised), raised
        if raised:
            assert publish(own, top, files=6).layers == content.layers
        # What is there now is right, and what is not can be had.
        for layer, found in zip(content.layers, local.ensure_all(content.layers), strict=True):
            assert decode_head(dirs.head(layer).read_bytes(), layer).erofs == (
                found.meta_path.read_bytes()
            )
        if not raised:
            assert publish(own, top, files=6).layers == content.layers
