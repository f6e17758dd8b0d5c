"""Published layers, the real cache and store, FUSE, EROFS and overlayfs on top: one stack."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecfs.errors import NotFound
from dsecfs.fuse.blobs import recorded, start_recording
from dsecfs.fuse.config import node_config
from dsecfs.fuse.trees import write_tree
from dsecfs.layers.digest import Digest
from dsecfs.layers.local import LocalLayer, LocalLayers
from dsecfs.layers.publish import Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.store.directory import DirectoryStore
from tests.support.mounts import needs_erofs
from tests.t4_fuse.family import Family, wait_for, why_no_resend
from tests.t4_fuse.layering import kernel_overlay, shown

pytestmark = pytest.mark.skipif(bool(why_no_resend()), reason=why_no_resend() or "it works")

FILES = 60


class Node:
    """Two layers in a store, and a daemon with an empty cache."""

    def __init__(self) -> None:
        self.family = Family()
        self.store = DirectoryStore(self.family.top / "store", create=True)

    def up(self) -> None:
        f = self.family
        self.sums: dict[str, str] = {}
        rng = random.Random(4)
        self.layers: list[Digest] = []
        for number in range(2):
            place = f.top / f"layer{number}"
            (place / f"dir{number}").mkdir(parents=True)
            for i in range(FILES):
                name = f"dir{number}/file{i}"
                data = rng.randbytes(rng.choice((10, 5000, 300_000)))
                (place / name).write_bytes(data)
                self.sums[name] = hashlib.sha256(data).hexdigest()
            with tarfile.open(f.top / f"layer{number}.tar", "w") as tar:
                tar.add(place, arcname=".")
            source = open_image(f"tar:{f.top}/layer{number}.tar").layers[0]
            meta = Meta("base", "linux/amd64")
            self.layers.append(publish_source(self.store, source, None, meta).digest)
        f.config = node_config(
            f.dirs, f"file:{f.top}/store", entry="tests.t4_fuse.realworker:main"
        )
        self.local: list[LocalLayer] = LocalLayers(self.store, f.dirs).ensure_all(self.layers)
        f.start()

    def check(self, top: Path) -> None:
        for name, digest in self.sums.items():
            found = hashlib.sha256((top / name).read_bytes()).hexdigest()
            assert found == digest, name

    def remove(self) -> None:
        self.store.close()
        self.family.remove()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    try:
        made.up()
        yield made
    except BaseException:
        print(made.family.log())
        raise
    finally:
        made.remove()


def kernel_mode(node: Node) -> list[Path]:
    """The device file of each layer in the FUSE mount."""
    return [node.family.blob(layer.blobs[0].digest) for layer in node.local]


class Checkers:
    """Programs that read everything cold, again and again, as long as the block lasts."""

    def __init__(self, node: Node, top: Path) -> None:
        self.passes = 0
        self.errors: list[BaseException] = []
        self._node, self._top = node, top
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def one_more(self) -> None:
        """Wait until everything was read once more."""
        before = self.passes
        wait_for("a pass", lambda: self.passes > before or self.errors)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                Path("/proc/sys/vm/drop_caches").write_text("3")
                self._node.check(self._top)
                self.passes += 1
        except (OSError, AssertionError) as e:
            self.errors.append(e)

    def __enter__(self) -> Checkers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self.errors, self.errors
        assert self.passes


@needs_erofs
def test_kernel_mode_with_dying_processes(node: Node) -> None:
    f = node.family
    images = [layer.meta_path for layer in node.local]
    with kernel_overlay(images, kernel_mode(node), f.top / "overlay") as top:
        with Checkers(node, top) as checkers:
            for _ in range(8):
                f.kill_worker()
                checkers.one_more()
            f.kill("active")
            f.kill_worker()
            f.kill("active")
            f.kill("worker")
            f.settled()
        assert len(shown(top)) == 2 * FILES + 3
    stats = f.client.stats()
    assert stats["fuse"]["errors"] == 0


@needs_erofs
def test_fuse_mode_shows_the_same_while_processes_die(node: Node) -> None:
    f = node.family
    write_tree(f.dirs.trees, "both", node.layers)
    tree = f.dirs.fs / "trees" / "both"
    with Checkers(node, tree):
        for _ in range(4):
            f.kill_worker()
        f.kill("active")
        f.kill_worker()
        f.settled()
    images = [layer.meta_path for layer in node.local]
    with kernel_overlay(images, kernel_mode(node), f.top / "overlay") as top:
        assert shown(tree) == shown(top)


def test_prefetch_brings_everything_in(node: Node) -> None:
    f = node.family
    blobs = [layer.blobs[0] for layer in node.local]
    f.client.prefetch("all", [(blobs[0].digest, None), (blobs[1].digest, [0])])
    done = wait_for(
        "the end", lambda: (s := f.client.prefetch_status("all"))["finished"] and s
    )
    assert done["error"] == ""
    assert done["done"] == done["total"] == blobs[0].chunks + 1
    assert f.client.stats()["cache"]["prefetched"] > 0
    # Everything of the first blob is here: the store may go.
    os.rename(f.top / "store" / "objects", f.top / "gone")
    data = f.blob(blobs[0].digest).read_bytes()
    assert len(data) == blobs[0].size
    with pytest.raises(OSError) as caught:
        f.blob(blobs[1].digest).read_bytes()
    assert caught.value.errno == errno.EIO
    os.rename(f.top / "gone", f.top / "store" / "objects")
    assert len(f.blob(blobs[1].digest).read_bytes()) == blobs[1].size


@needs_erofs
def test_a_recording_has_every_read(node: Node) -> None:
    f = node.family
    blobs = [layer.blobs[0].digest for layer in node.local]
    start_recording(f.dirs.traces, "run-1", blobs)
    traced = f.dirs.fs / "traced" / "run-1"
    # The page cache of the plain files is warm, the traced ones are other inodes.
    f.blob(blobs[0]).read_bytes()
    with kernel_overlay(
        [layer.meta_path for layer in node.local], [traced / b for b in blobs], f.top / "overlay"
    ) as top:
        wanted = (top / "dir1" / "file3").read_bytes()
        f.kill_worker()
        (top / "dir0" / "file5").read_bytes()
    touches = list(recorded(f.dirs.traces, "run-1"))
    assert {t.blob for t in touches} == set(blobs)
    assert all(t.offset >= 0 and t.length > 0 for t in touches)
    assert sum(t.length for t in touches) >= len(wanted)
    assert sorted(os.listdir(traced)) == sorted(blobs)
    assert os.listdir(f.dirs.fs / "traced") == ["run-1"]
    with pytest.raises(FileNotFoundError):
        os.stat(traced / ("0" * 64))
    with pytest.raises(FileNotFoundError):
        os.stat(f.dirs.fs / "traced" / "run-2")
    with pytest.raises(NotFound):
        list(recorded(f.dirs.traces, "run-2"))
    (f.dirs.traces / "run-1.json").unlink()
    wait_for("its end", lambda: not traced.exists())


def test_the_default_entry(node: Node) -> None:
    """`ensure_daemon` with nothing but a store serves from it, through the node's cache."""
    from dsecfs.fuse.daemon import ensure_daemon, stop_daemon

    f = node.family
    stop_daemon(f.config)
    f.config = node_config(f.dirs, f"file:{f.top}/store", cache={"max_bytes": 1 << 28})
    client = ensure_daemon(f.config)
    blob = node.local[0].blobs[0]
    assert len(f.blob(blob.digest).read_bytes()) == blob.size
    assert client.stats()["cache"]["misses"] > 0
    # No thread and no client library before the fork: supervisors stay small.
    status = client.status()
    for role in ("active", "standby"):
        assert len(os.listdir(f"/proc/{status[role]}/task")) == 1
    listed = subprocess.run(["ls", f.dirs.fs / "blobs"], capture_output=True, check=True)
    assert len(listed.stdout.split()) == 2
