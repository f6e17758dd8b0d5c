"""Layers get into a store: whole or not at all, once, and the same from everywhere."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsecfs.errors import BadInput, Busy, Conflict, NotFound, UnsafeArchive
from dsecfs.layers import leases
from dsecfs.layers.catalog import Catalog
from dsecfs.layers.digest import Digest
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.leases import Lease, live_layers, parse_lease, tombstone_key, verdict_key
from dsecfs.layers.manifest import ProcessEnv
from dsecfs.layers.names import Name, parse_name
from dsecfs.layers.publish import STEPS, BlobOptions, Meta, Published, publish_source
from dsecfs.layers.sources.image import Image, ImageLayer, open_image
from dsecfs.layers.sources.tar import read_tar
from dsecfs.store.base import head_key, layout_key, object_key
from dsecfs.store.directory import DirectoryStore
from tests.t3_layers.memsink import MemorySink, listing
from tests.t3_layers.oci import layer_tar
from tests.t3_layers.readback import layer_listing, read_head, read_layout

META = Meta("toolkit", "linux/amd64")
NAME = parse_name("toolkit/dsh:1.5")
ENTRIES = [
    ("bin/", None),
    ("bin/dsh", b"#!/bin/sh\necho dsh\n" * 1000),
    ("bin/again => bin/dsh", None),
    ("bin/link -> dsh", None),
    ("share/data", bytes(range(256)) * 5000),
    ("share/empty", b""),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    store = DirectoryStore(tmp_path / "store", create=True)
    yield store
    store.close()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "dsh.tar"
    path.write_bytes(layer_tar(ENTRIES))
    return path


def source(path: Path) -> ImageLayer:
    return open_image(f"tar:{path}").layers[0]


def publish(store: Any, path: Path, name: Name | None = NAME, **options: Any) -> Published:
    return publish_source(store, source(path), name, options.pop("meta", META), **options)


def visible(store: DirectoryStore) -> list[str]:
    return [i.key for prefix in ("refs/", "channels/", "envs/") for i in store.list(prefix)]


def test_what_is_published_can_be_read_back(store: DirectoryStore, archive: Path) -> None:
    meta = Meta(
        "toolkit",
        "linux/amd64",
        ProcessEnv({"DSH": "1"}, {"PATH": ("/bin/dsh",)}),
        {"git": "abc"},
    )
    done = publish(store, archive, meta=meta)
    sink = MemorySink()
    tree = read_tar(io.BytesIO(archive.read_bytes()), sink, "the same archive")
    assert layer_listing(store, done.digest) == listing(tree.root, sink)
    head = read_head(store, done.digest)
    assert head.manifest.process_env == meta.process_env
    assert head.manifest.labels == {"git": "abc"}
    # Root, bin, share; dsh (two names), link, data, empty.
    assert head.manifest.inodes == 7
    assert head.manifest.file_bytes == sum(len(d) for _, d in ENTRIES if d)
    assert Catalog(store).resolve("dsh:1.5", ("toolkit",)).digest == done.digest
    assert [i.key for i in store.list("leases/")] == []


def test_a_prefix_places_the_tree(store: DirectoryStore, archive: Path) -> None:
    done = publish(store, archive, at="/opt/dsh")
    paths = set(layer_listing(store, done.digest))
    assert b"opt/dsh/bin/dsh" in paths and b"bin" not in paths


@pytest.mark.parametrize(
    ("at", "path", "mode"),
    [("/tmp/work", b"tmp", 0o1777), ("/root/x", b"root", 0o700), ("/opt/x", b"opt", 0o755)],
)
def test_directories_on_the_way_have_their_usual_modes(
    store: DirectoryStore, archive: Path, at: str, path: bytes, mode: int
) -> None:
    image = ErofsImage(publish(store, archive, at=at).head.erofs)
    assert stat.S_IMODE(image.stat(image.resolve(path)).mode) == mode


@pytest.mark.parametrize(("kind", "mode"), [("workspace", 0o755), ("base", 0o700)])
def test_only_a_base_decides_on_the_root_directory(
    store: DirectoryStore, tmp_path: Path, kind: str, mode: int
) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "file").write_text("x")
    os.setxattr(private, "user.mark", b"x")
    layer = open_image(f"dir:{private}").layers[0]
    image = ErofsImage(publish_source(store, layer, None, Meta(kind, "linux/amd64")).head.erofs)
    assert stat.S_IMODE(image.stat(image.root_nid).mode) == mode
    assert bool(image.xattrs(image.root_nid)) == (kind == "base")


def test_the_digest_depends_on_content_alone(tmp_path: Path, archive: Path) -> None:
    seen = set()
    for i, codec in enumerate(("lz4", "zstd", "raw")):
        other = DirectoryStore(tmp_path / f"other{i}", create=True)
        options = BlobOptions(codec=codec, workers=1 + i)  # type: ignore[arg-type]
        seen.add(publish(other, archive, options=options).digest)
        other.close()
    assert len(seen) == 1


def test_publishing_again_succeeds_and_uploads_nothing(
    store: DirectoryStore, archive: Path
) -> None:
    first = publish(store, archive)
    before = sorted(i.key for i in store.list(""))
    again = publish(store, archive)
    assert again.digest == first.digest and first.uploaded > 0 and again.uploaded == 0
    assert sorted(i.key for i in store.list("")) == before


def test_a_layout_that_is_there_is_kept(store: DirectoryStore, archive: Path) -> None:
    blob = publish(store, archive).head.manifest.blobs[0]
    before = read_layout(store, blob)
    publish(store, archive, parse_name("toolkit/dsh:2"), options=BlobOptions(codec="zstd"))
    assert read_layout(store, blob) == before
    assert [i.key for i in store.list("layouts/")] == [layout_key(blob.digest, 1)]


def test_another_content_under_a_name_is_a_conflict(
    store: DirectoryStore, archive: Path, tmp_path: Path
) -> None:
    first = publish(store, archive)
    other = tmp_path / "other.tar"
    other.write_bytes(layer_tar([("bin/dsh", b"other")]))
    with pytest.raises(Conflict, match=r"toolkit/dsh:1\.5 exists already"):
        publish(store, other)
    assert Catalog(store).get_ref(NAME).digest == first.digest


def test_a_damaged_store_is_healed_by_publishing_again(
    store: DirectoryStore, archive: Path
) -> None:
    first = publish(store, archive)
    whole = layer_listing(store, first.digest)
    blob = first.head.manifest.blobs[0]
    lost = object_key(read_layout(store, blob).objects[0])
    head = Path(store.root, head_key(first.digest))
    head.chmod(0o600)
    damages: list[Callable[[], None]] = [
        lambda: store.delete(lost),
        lambda: store.delete(layout_key(blob.digest, 1)),
        lambda: os.truncate(head, head.stat().st_size - 10),
        lambda: store.delete(head_key(first.digest)),
    ]
    for damage in damages:
        damage()
        assert publish(store, archive).digest == first.digest
        assert layer_listing(store, first.digest) == whole


def test_an_unreadable_layout_is_superseded(store: DirectoryStore, archive: Path) -> None:
    first = publish(store, archive)
    blob = first.head.manifest.blobs[0]
    assert store.put_if_absent(layout_key(blob.digest, 2), b"no layout")
    publish(store, archive)
    assert layout_key(blob.digest, 3) in [i.key for i in store.list("layouts/")]
    layer_listing(store, first.digest)


def test_hostile_archives_leave_nothing_visible(store: DirectoryStore, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tar"
    bad.write_bytes(layer_tar([("good", b"1" * 100_000), ("../../etc/passwd", b"evil")]))
    with pytest.raises(UnsafeArchive, match="passwd"):
        publish(store, bad)
    assert visible(store) == [] and list(store.list("heads/")) == []
    assert list(store.list("leases/")) == []


def test_bad_requests_are_refused_before_anything_is_written(
    store: DirectoryStore, archive: Path
) -> None:
    for meta, name in (
        (Meta("disk", "linux/amd64"), parse_name("disk/x:1")),
        (Meta("toolkit", "amd64"), NAME),
        (Meta("toolkit", "linux/amd64", ProcessEnv({"A=B": "1"})), NAME),
        (Meta("base", "linux/amd64"), NAME),
        (META, parse_name("toolkit/dsh@stable")),
    ):
        with pytest.raises(BadInput):
            publish(store, archive, name, meta=meta)
    assert list(store.list("")) == []


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step(store: DirectoryStore, archive: Path, step: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.t3_layers.killed", str(store.root), f"tar:{archive}",
         "toolkit/dsh:1.5", step],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split() == list(STEPS[: STEPS.index(step) + 1])
    assert bool(visible(store)) == (step == "ref")
    # Its lease is still there, and lapses by itself.
    assert len(list(store.list("leases/"))) == 1
    again = publish(store, archive)
    assert Catalog(store).get_ref(NAME).digest == again.digest
    layer_listing(store, again.digest)


def _race(root: str, tar: str, start: Any, results: Any) -> None:
    store = DirectoryStore(root)
    start.wait(30)
    try:
        results.put(publish(store, Path(tar)).digest)
    except Conflict as e:
        results.put(str(e))


@pytest.mark.parametrize("same", [True, False])
def test_two_publishers_of_one_version(
    store: DirectoryStore, archive: Path, tmp_path: Path, same: bool
) -> None:
    other = tmp_path / "other.tar"
    other.write_bytes(archive.read_bytes() if same else layer_tar([("bin/dsh", b"other")]))
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(2), context.Queue()
    racers = [
        context.Process(target=_race, args=(str(store.root), str(p), start, results))
        for p in (archive, other)
    ]
    for racer in racers:
        racer.start()
    answers = sorted(results.get(timeout=60) for _ in racers)
    for racer in racers:
        racer.join(30)
        assert racer.exitcode == 0
    winner = Catalog(store).get_ref(NAME).digest
    if same:
        assert answers == [winner, winner]
    else:
        assert winner in answers and any("exists already" in a for a in answers)
    layer_listing(store, winner)


class _Watch:
    """Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, int | None]] = []

    def start(self, task: str, total: int | None) -> None:
        self.told.append(("start", task, total))

    def advance(self, task: str, amount: int) -> None:
        self.told.append(("advance", task, amount))

    def finish(self, task: str) -> None:
        self.told.append(("finish", task, None))


def test_progress_is_told_in_bytes_of_the_source(store: DirectoryStore, archive: Path) -> None:
    watch = _Watch()
    publish(store, archive, progress=watch)
    task, size = "toolkit/dsh:1.5", archive.stat().st_size
    assert watch.told[0] == ("start", task, size) and watch.told[-1] == ("finish", task, None)
    assert sum(n or 0 for what, _, n in watch.told if what == "advance") == size


# -- leases


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_lists_its_layers_and_goes(store: DirectoryStore, archive: Path) -> None:
    layer = publish(store, archive).digest
    with Lease(store, "node", layers=[layer], ttl_s=60) as lease:
        (info,) = store.list("leases/")
        record = parse_lease(store.get(info.key), info.key)
        assert record.layers == (layer,) and record.ttl_s == 60 and record.kind == "node"
        assert live_layers(store, info.mtime + 59) == {layer: lease.id}
        assert live_layers(store, info.mtime + 61) == {}
        lease.drop([layer])
        assert live_layers(store, info.mtime) == {}
        assert len(list(store.list("leases/"))) == 1
    assert list(store.list("leases/")) == []


def test_a_lapsed_lease_publishes_nothing(store: DirectoryStore) -> None:
    clock = Clock()
    with Lease(store, "publish", ttl_s=600, clock=clock) as lease:
        lease.put_if_absent("refs/toolkit/x/.v/1", b"{}")
        clock.now += 600
        with pytest.raises(Busy, match="not renewed"):
            lease.put_if_absent("refs/toolkit/x/.v/2", b"{}")
        lease.add([])
    assert [i.key for i in store.list("refs/")] == ["refs/toolkit/x/.v/1"]


def test_a_publisher_that_takes_too_long_publishes_nothing(store: DirectoryStore) -> None:
    clock = Clock()
    with Lease(store, "publish", ttl_s=600, clock=clock) as lease:
        clock.now += leases.MAX_PUBLISH_S + 1
        lease._renewed = clock.now
        with pytest.raises(Busy, match="24 hours"):
            lease.put_content("objects/aa/x", b"x")


def test_leases_renew_themselves(store: DirectoryStore) -> None:
    with Lease(store, "node", ttl_s=1):
        names = set()
        pause = threading.Event()
        for _ in range(100):
            names |= {i.key for i in store.list("leases/")}
            if len(names) >= 3:
                break
            pause.wait(0.1)
        assert len(names) >= 3
    assert list(store.list("leases/")) == []


def test_a_publish_revives_what_carries_a_tombstone(store: DirectoryStore, archive: Path) -> None:
    first = publish(store, archive)
    keys = [
        i.key for prefix in ("objects/", "layouts/", "heads/", "refs/") for i in store.list(prefix)
    ]
    for key in keys:
        store.put_if_absent(tombstone_key(key), b"")
    assert publish(store, archive).digest == first.digest
    for key in keys:
        assert store.get(verdict_key(key)) == leases.KEEP


def test_a_publish_waits_for_a_deletion_and_puts_anew(
    store: DirectoryStore, archive: Path
) -> None:
    first = publish(store, archive)
    whole = layer_listing(store, first.digest)
    (key,) = [i.key for i in store.list("objects/")]
    store.put_if_absent(tombstone_key(key), b"")
    store.put_if_absent(verdict_key(key), leases.DELETE)

    def collector() -> None:
        store.delete(key)
        store.delete(tombstone_key(key))
        store.delete(verdict_key(key))

    timer = threading.Timer(0.2, collector)
    timer.start()
    try:
        assert publish(store, archive).digest == first.digest
    finally:
        timer.join(10)
    assert layer_listing(store, first.digest) == whole


def test_a_deletion_that_does_not_end_is_busy(store: DirectoryStore) -> None:
    store.put_if_absent(tombstone_key("objects/aa/x"), b"")
    store.put_if_absent(verdict_key("objects/aa/x"), leases.DELETE)
    with pytest.raises(Busy, match="is being deleted"):
        leases.revive(store, "objects/aa/x", wait_s=0.05)


def test_relying_on_a_layer_that_is_not_there(store: DirectoryStore, archive: Path) -> None:
    layer = publish(store, archive, None).digest
    with Lease(store, "publish") as lease:
        lease.rely_on_layers([layer])
        store.put_if_absent(tombstone_key("objects/aa/other"), b"")
        lease.rely_on_layers([layer])
        (key,) = [i.key for i in store.list("objects/")]
        store.delete(key)
        with pytest.raises(NotFound, match="not in the store"):
            lease.rely_on_layers([layer])
        with pytest.raises(NotFound, match="not in the store"):
            lease.rely_on_layers([Digest("a" * 64)])


def test_sources_are_closed(archive: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with open_image(f"tar:{archive}") as image:
        assert isinstance(image, Image)
    assert len(os.listdir("/proc/self/fd")) == before
