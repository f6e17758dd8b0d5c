"""Composed trees as the kernel shows them through FUSE: against EROFS and overlayfs."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsecfs.fuse.config import tree_config
from dsecfs.fuse.daemon import start_daemon, stop_daemon
from dsecfs.fuse.mountpoint import fuse_device, recover_stale
from dsecfs.fuse.trees import write_tree
from dsecfs.kernel.syscalls import FsContext, closing, move_mount, umount
from dsecfs.layers.digest import Digest
from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.tree import BLOCK, Inode, directory
from tests.support.mounts import needs_erofs
from tests.support.trees import (
    Blob,
    blob_of_blocks,
    file_of,
    symlink_to,
    tree_from_directory,
)
from tests.t4_fuse.family import Family, Readers, family, wait_for, why_no_resend
from tests.t4_fuse.layering import BLOCKS, digest_of, kernel_overlay, layers, shown

pytestmark = pytest.mark.skipif(bool(why_no_resend()), reason=why_no_resend() or "it works")


class Layers:
    """Layers put where a daemon finds them."""

    def __init__(self, f: Family) -> None:
        self.family = f
        self.count = 0
        f.dirs.meta(Digest("0")).parent.mkdir(exist_ok=True)

    def new_blob(self) -> tuple[str, Blob]:
        self.count += 1
        digest = digest_of(f"layer blob {self.count}")
        (self.family.dirs.blobs / digest).mkdir()
        return digest, Blob(self.family.dirs.blobs / digest / "data")

    def add(self, root: Inode, digest: str, blob: Blob) -> Digest:
        """Publish `root`, whose data is in `blob`; the layer's digest."""
        if not blob.size:
            blob.append(b"\0")
        place = self.family.dirs.blobs / digest / "chunks"
        place.write_text(str(blob.size))
        layer = Digest(digest_of(f"layer {digest}"))
        image = write_erofs(
            root, [Device(digest.encode(), blob.size)], uuid_salt=digest.encode()
        )
        self.family.dirs.meta(layer).write_bytes(image)
        return layer

    def compose(self, name: str, stack: Sequence[Digest]) -> Path:
        write_tree(self.family.dirs.trees, name, stack)
        return self.family.dirs.fs / "trees" / name

    def images(self, stack: Sequence[Digest]) -> list[Path]:
        return [self.family.dirs.meta(layer) for layer in stack]


@pytest.fixture(scope="module")
def served() -> Iterator[Layers]:
    with family() as f:
        yield Layers(f)


@needs_erofs
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
@given(st.lists(layers(), min_size=1, max_size=4))
def test_same_as_kernel_mode(served: Layers, roots: list[Inode]) -> None:
    f = served.family
    stack, blobs = [], []
    for root in roots:
        digest, _ = served.new_blob()
        blob = blob_of_blocks(f.dirs.blobs / digest / "data", BLOCKS)
        stack.append(served.add(root, digest, blob))
        blobs.append(blob.path)
    top = served.compose(f"t{served.count}", stack)
    with kernel_overlay(served.images(stack), blobs, f.top / "overlay") as overlay:
        assert shown(top) == shown(overlay)


@needs_erofs
def test_a_real_directory(served: Layers) -> None:
    """Python's own library, half of it in a second layer, some of it hidden."""
    source = Path(os.__file__).parent
    work = served.family.top / "source"
    shutil.copytree(source / "json", work / "low" / "json", symlinks=True)
    shutil.copytree(source / "email", work / "low" / "email", symlinks=True)
    shutil.copytree(source / "email", work / "high" / "email", symlinks=True)
    os.mknod(work / "high" / "json", stat.S_IFCHR, 0)
    (work / "high" / "email" / "big").write_bytes(random.Random(1).randbytes(3_000_001))
    os.link(work / "high" / "email" / "big", work / "high" / "name")
    os.truncate(work / "high" / "name", 40_000_000)
    os.setxattr(work / "high" / "name", "user.mime_type", b"text/plain")
    stack, blobs = [], []
    for part in ("low", "high"):
        digest, blob = served.new_blob()
        stack.append(served.add(tree_from_directory(work / part, blob), digest, blob))
        blobs.append(blob.path)
    top = served.compose("real", stack)
    with kernel_overlay(served.images(stack), blobs, served.family.top / "overlay") as overlay:
        assert shown(top) == shown(overlay)
    assert not (top / "json").exists()
    assert os.statvfs(top).f_namemax == 255
    done = subprocess.run(
        ["diff", "-r", work / "high" / "email", top / "email"], check=False, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"")


def wide_layer(served: Layers, entries: int) -> Digest:
    digest, blob = served.new_blob()
    root = directory()
    assert root.children is not None
    wide = root.children[b"wide"] = directory()
    assert wide.children is not None
    for i in range(entries):
        wide.children[b"file-%05d" % i] = file_of(blob, b"%d" % i) if i < 50 else symlink_to(b"x")
    inner = wide.children[b"inner"] = directory()
    assert inner.children is not None
    inner.children[b"deep"] = file_of(blob, b"deep")
    return served.add(root, digest, blob)


def test_listing_goes_on_in_the_next_worker(served: Layers) -> None:
    top = served.compose("wide", [wide_layer(served, 4000), wide_layer(served, 10)])
    names = []
    with os.scandir(top / "wide") as it:
        for i, entry in enumerate(it):
            names.append(entry.name)
            if i in (100, 3000):
                served.family.kill_worker()
    assert len(names) == len(set(names)) == 4001


def test_names_that_are_not_there_are_remembered(served: Layers) -> None:
    """The kernel knows without asking: programs look for a module in many directories."""
    top = served.compose("absent", [wide_layer(served, 100)])
    fd = os.open(top / "wide", os.O_RDONLY | os.O_DIRECTORY)
    worker = served.family.client.status()["worker"]
    try:
        names = [f"no-{number}" for number in range(30)]
        for name in names:
            with pytest.raises(FileNotFoundError):
                os.stat(name, dir_fd=fd)
        os.kill(worker, signal.SIGSTOP)
        for name in names:
            with pytest.raises(FileNotFoundError):
                os.stat(name, dir_fd=fd)
    finally:
        os.kill(worker, signal.SIGCONT)
        os.close(fd)
    assert (top / "wide" / "file-00007").read_bytes() == b"7"
    # A watchdog would have ended one that had something to answer.
    assert served.family.client.status()["worker"] == worker


def test_open_directories_and_files_outlive_workers(served: Layers) -> None:
    top = served.compose("open", [wide_layer(served, 60)])
    inner = os.open(top / "wide" / "inner", os.O_RDONLY | os.O_DIRECTORY)
    file = os.open(top / "wide" / "file-00007", os.O_RDONLY)
    try:
        for _ in range(2):
            served.family.kill_worker()
            assert os.listdir(inner) == ["deep"]
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(file, 10, 0) == b"7"
            deep = os.open("deep", os.O_RDONLY, dir_fd=inner)
            assert os.read(deep, 10) == b"deep"
            os.close(deep)
            assert os.path.samestat(os.fstat(file), os.stat(top / "wide" / "file-00007"))
    finally:
        os.close(inner)
        os.close(file)


def test_trees_under_load_with_dying_workers(served: Layers) -> None:
    f = served.family
    digest, blob = served.new_blob()
    size = 8 << 20
    from tests.t4_fuse.fakeworker import content

    root = directory()
    assert root.children is not None
    root.children[b"big"] = file_of(blob, content("big", 0, size))
    top = served.compose("load", [served.add(root, digest, blob), wide_layer(served, 100)])
    with Readers(top / "big", "big", size) as readers:
        for _ in range(5):
            f.kill_worker()
            readers.check_progress()
            subprocess.run(["find", top, "-type", "f"], check=True, capture_output=True, timeout=30)


def test_a_name_that_is_given_anew(served: Layers) -> None:
    one, two = wide_layer(served, 1), wide_layer(served, 2)
    top = served.compose("anew", [one])
    kept = os.open(top / "wide", os.O_RDONLY)
    try:
        assert sorted(os.listdir(kept)) == ["file-00000", "inner"]
        served.compose("anew", [two])
        wait_for("the new tree", lambda: len(os.listdir(top / "wide")) == 3)
        # Who has the old one open keeps the old one, also in a new worker.
        served.family.kill_worker()
        assert sorted(os.listdir(kept)) == ["file-00000", "inner"]
    finally:
        os.close(kept)
    (served.family.dirs.trees / "anew.json").unlink()
    wait_for("its end", lambda: not top.exists())


def test_what_cannot_be_shown(served: Layers) -> None:
    f = served.family
    trees = f.dirs.fs / "trees"
    wide_layer(served, 1)

    def failure(path: Path) -> int | None:
        with pytest.raises(OSError) as caught:
            os.stat(path)
        return caught.value.errno

    place = f.dirs.trees
    place.mkdir(exist_ok=True)
    assert failure(trees / "nothing") == errno.ENOENT
    assert failure(trees / ("x" * 200)) == errno.ENOENT
    (place / "garbage.json").write_bytes(b"\xff{")
    assert failure(trees / "garbage") == errno.EIO
    (place / "newer.json").write_text(json.dumps({"format": 3, "layers": [], "owners": None}))
    assert failure(trees / "newer") == errno.EIO
    (place / "empty.json").write_text(json.dumps({"format": 2, "layers": [], "owners": None}))
    assert failure(trees / "empty") == errno.EIO
    served.compose("lost", [Digest(digest_of("no such layer"))])
    assert failure(trees / "lost") == errno.ENOENT
    damaged = Digest(digest_of("damaged layer"))
    f.dirs.meta(damaged).write_bytes(b"\0" * 2 * BLOCK)
    served.compose("damaged", [damaged])
    assert failure(trees / "damaged") == errno.EIO
    # A listing shows what can be shown.
    served.compose("good", [wide_layer(served, 1)])
    listed = os.listdir(trees)
    assert "good" in listed and "damaged" not in listed
    with pytest.raises(OSError) as caught:
        (trees / "good" / "new").touch()
    assert caught.value.errno == errno.EROFS
    for name in ("garbage", "newer", "empty", "lost", "damaged"):
        (place / f"{name}.json").unlink()


def test_a_tree_at_a_directory(served: Layers) -> None:
    """A mount of its own for one tree, beside the node's."""
    f = served.family
    served.compose("alone", [wide_layer(served, 5)])
    target = f.top / "any where"
    config = tree_config(f.dirs, "file:/nowhere", "alone", target, entry=f.config.entry)
    client = start_daemon(config)
    try:
        assert sorted(os.listdir(target)) == ["wide"]
        assert (target / "wide" / "file-00003").read_bytes() == b"3"
        before = os.stat(target)
        assert before.st_ino == 1
        os.kill(client.status()["worker"], 9)
        assert len(os.listdir(target / "wide")) == 6
        assert stop_daemon(config)
        assert fuse_device(target) is None
    finally:
        stop_daemon(config, mode="force")


def why_no_unprivileged() -> str:
    if why_no_resend():
        return why_no_resend()
    if shutil.which("fusermount3") is None or shutil.which("setpriv") is None:
        return "fusermount3 (Debian: fuse3) or setpriv (util-linux) not installed"
    return ""


READ_ANYTHING = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
"""The interpreter may lie in root's home. It does not help to mount anything."""

OPEN_DEV_FUSE = (
    'mknod "$0" c 10 229; chmod 0666 "$0"; mount --bind "$0" /dev/fuse; exec "$@"'
)
"""What Debian's udev rule does, for the test alone."""


@pytest.mark.skipif(bool(why_no_unprivileged()), reason=why_no_unprivileged() or "it works")
def test_without_root() -> None:
    """A user mounts a tree, its worker dies and is replaced, and it is unmounted again."""
    f = Family()
    try:
        own = Layers(f)
        own.compose("mine", [wide_layer(own, 5)])
        (f.top / "mnt").mkdir()
        for path in [f.top, *f.top.rglob("*")]:
            os.chown(path, 65534, 65534)
        code = (
            "import os, sys\n"
            "from pathlib import Path\n"
            "from dsecfs.nodedirs import NodeDirs\n"
            "from dsecfs.fuse.config import tree_config\n"
            "from dsecfs.fuse.daemon import start_daemon, stop_daemon\n"
            "top = Path(sys.argv[1])\n"
            "c = tree_config(NodeDirs(top / 'data', top / 'run'), 'file:/nowhere', 'mine',\n"
            "                top / 'mnt', entry=sys.argv[2])\n"
            "client = start_daemon(c)\n"
            "try:\n"
            "    assert sorted(os.listdir(top / 'mnt')) == ['wide']\n"
            "    os.kill(client.status()['worker'], 9)\n"
            "    assert (top / 'mnt/wide/file-00003').read_bytes() == b'3'\n"
            "    print(len(os.listdir(top / 'mnt/wide')), os.getuid())\n"
            "finally:\n"
            "    stop_daemon(c)\n"
            "assert os.listdir(top / 'mnt') == []\n"
        )
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-ec", OPEN_DEV_FUSE,
             str(f.top / "fuse"), "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
             *READ_ANYTHING, sys.executable, "-c", code, str(f.top), f.config.entry],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "HOME": str(f.top)},
        )  # fmt: skip
        log = "".join(p.read_text() for p in f.dirs.run.rglob("fs.log"))
        assert done.returncode == 0, done.stderr + log
        assert done.stdout == "6 65534\n"
    finally:
        f.remove()


def test_another_file_systems_mount_is_left_alone(tmp_path: Path) -> None:
    with (
        closing(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)) as device,
        FsContext("fuse", "mount another FUSE file system") as fs,
    ):
        options = {"source": "other", "subtype": "sshfs", "fd": str(device), "rootmode": "40000"}
        for key, value in {**options, "user_id": "0", "group_id": "0"}.items():
            fs.set(key, value)
        with closing(fs.mount()) as mount:
            move_mount(mount, tmp_path)
        try:
            assert fuse_device(tmp_path) is None
            assert recover_stale(tmp_path) is False
        finally:
            assert umount(tmp_path, detach=True)


def test_a_damaged_image_that_was_replaced(served: Layers) -> None:
    """Trees that have it open go on with the new file, at the first read that shows the damage."""
    f = served.family
    layer = wide_layer(served, 400)
    one, two = served.compose("one", [layer]), served.compose("two", [wide_layer(served, 3), layer])
    image = f.dirs.meta(layer)
    good = image.read_bytes()
    for tree in (one, two):
        assert (tree / "wide" / "file-00007").read_bytes() == b"7"
    with image.open("r+b") as file:
        file.seek(BLOCK)
        file.write(bytes(len(good) - BLOCK))
    for tree in (one, two):
        with pytest.raises(OSError):
            os.lstat(tree / "wide" / "file-00300")
    image.with_suffix(".new").write_bytes(good)
    image.with_suffix(".new").replace(image)
    for tree in (one, two):
        assert os.readlink(tree / "wide" / "file-00301") == "x"
    assert len(os.listdir(one / "wide")) == 401
