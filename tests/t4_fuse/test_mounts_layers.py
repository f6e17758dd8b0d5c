"""Layer mounts: shared, counted, renewed, recovered; overlays; mounts on host directories."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecfs.cache.blob import pins
from dsecfs.errors import BadInput, Busy, Conflict, MountError, NotFound
from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.namespaces import IdRange, is_pinned, user_namespace
from dsecfs.kernel.syscalls import closing, mount, open_tree, umount
from dsecfs.layers.local import LocalLayer
from dsecfs.layers.tree import Inode, directory
from dsecfs.mount import Holder, LayerMounts, mount_env, recover_mounts, umount_env
from dsecfs.mount.environment import mounted_envs
from dsecfs.mount.erofs import erofs_mount, get_read_ahead
from dsecfs.mount.overlay import overlay_root
from tests.support.mounts import needs_erofs
from tests.support.node import Node, file_inode, node

pytestmark = needs_erofs

HELLO = b"hello\n" * 2000


@pytest.fixture
def here() -> Iterator[Node]:
    with node() as made:
        yield made


@pytest.fixture
def mounts(here: Node) -> Iterator[LayerMounts]:
    made = LayerMounts(here.dirs)
    yield made
    made.close()


def holder(here: Node, name: str = "h1") -> Holder:
    record = here.place / f"record-{name}"
    record.touch()
    return Holder(name, record)


def read(mounts: LayerMounts, path: Path, name: str) -> bytes:
    """A file of a layer's mount, through a clone of it."""
    (fd,) = mounts.clone([path])
    with closing(fd), closing(os.open(name, os.O_RDONLY, dir_fd=fd)) as file:
        return os.read(file, 1 << 20)


def generations(mounts: LayerMounts, layer: LocalLayer) -> list[list[str]]:
    return mounts.mounted().get(layer.digest, [])


def test_holders_share_one_mount(here: Node, mounts: LayerMounts) -> None:
    layer = here.layer({"a/f": HELLO})
    first = mounts.acquire(layer, holder(here, "h1"))
    second = mounts.acquire(layer, holder(here, "h2"))
    assert first == second
    assert read(mounts, first, "a/f") == HELLO
    assert generations(mounts, layer) == [["h1", "h2"]]
    assert [p for p in here.mounts() if not p.endswith("/run/ns")] == [
        str(here.dirs.run / "ns" / "layers")
    ], "layer mounts must not be in the host's namespace"
    mounts.release(layer.digest, "h1")
    mounts.release(layer.digest, "h1")
    assert generations(mounts, layer) == [["h2"]]
    mounts.release(layer.digest, "h2")
    assert generations(mounts, layer) == [[]], "stays mounted, for the next one"
    # Somebody else is about to make the first mount of another layer.
    coming = here.dirs.layers / ("0" * 64)
    coming.mkdir()
    assert mounts.trim(keep=1) == 0
    assert mounts.trim(keep=0) == 1
    coming.rmdir()
    assert generations(mounts, layer) == []
    assert os.listdir(here.dirs.layers) == []


def test_two_processes_share_one_mount(here: Node, mounts: LayerMounts) -> None:
    layer = here.layer({"f": HELLO})

    def other() -> None:
        own = LayerMounts(here.dirs)
        own.acquire(layer, holder(here, f"p{os.getpid()}"))
        own.close()

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=other) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    (holders,) = generations(mounts, layer)
    assert len(holders) == 4
    path = mounts.acquire(layer, holder(here))
    assert read(mounts, path, "f") == HELLO


def test_threads_race_for_one_layer(here: Node, mounts: LayerMounts) -> None:
    layer = here.layer({"f": HELLO})
    failures: list[BaseException] = []

    def use(number: int) -> None:
        try:
            for _ in range(10):
                path = mounts.acquire(layer, holder(here, f"t{number}"))
                assert read(mounts, path, "f") == HELLO
                mounts.release(layer.digest, f"t{number}")
                mounts.trim(keep=0)
        except BaseException as e:  # shown by the main thread
            failures.append(e)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    mounts.trim(keep=0)
    assert generations(mounts, layer) == []


def test_a_whole_blob_makes_a_new_generation_and_the_old_one_drains(
    here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsecfs.mount.layers.UPGRADE_CHECK_S", 0.0)
    mounts = LayerMounts(here.dirs)
    layer = here.layer({"f": HELLO * 50})
    (blob,) = layer.blobs
    old = mounts.acquire(layer, holder(here, "old"))
    assert mounts.acquire(layer, holder(here, "old2")) == old, "nothing cached: same generation"
    here.fill_cache(layer)
    new = mounts.acquire(layer, holder(here, "new"))
    assert new != old
    assert generations(mounts, layer) == [["old", "old2"], ["new"]]
    assert len(pins(here.dirs, blob.digest)) == 1
    (here.dirs.fs / "blobs" / blob.digest).unlink()  # FUSE is not needed any more
    assert read(mounts, new, "f") == HELLO * 50
    mounts.release(layer.digest, "old")
    assert generations(mounts, layer) == [["old2"], ["new"]]
    mounts.release(layer.digest, "old2")
    assert generations(mounts, layer) == [["new"]]
    mounts.recover()
    assert len(pins(here.dirs, blob.digest)) == 1, "recovery keeps the pin of a live mount"
    mounts.release(layer.digest, "new")
    mounts.trim(keep=0)
    assert pins(here.dirs, blob.digest) == []
    mounts.close()


def test_a_blob_with_a_hole_is_not_used_directly(here: Node, mounts: LayerMounts) -> None:
    from dsecfs.cache.blob import open_files

    layer = here.layer({"f": os.urandom(600_000)})
    (blob,) = layer.blobs
    here.fill_cache(layer)
    files = open_files(here.dirs, blob.digest, blob.size, blob.chunk_size)
    assert files.lock(1)
    files.clear(1)
    files.unlock(1)
    mounts.acquire(layer, holder(here))
    assert pins(here.dirs, blob.digest) == []
    assert generations(mounts, layer) == [["h1"]]


def test_pins_of_an_earlier_boot_go(here: Node, mounts: LayerMounts) -> None:
    from dsecfs.cache.blob import pin

    layer = here.layer({"f": HELLO})
    here.fill_cache(layer)
    (blob,) = layer.blobs
    pin(here.dirs, blob.digest, "mount-0123456789abcdef-" + layer.digest[:32] + "-1")
    pin(here.dirs, blob.digest, "by-hand")
    mounts.recover()
    assert pins(here.dirs, blob.digest) == ["by-hand"]


def test_recovery_drops_holders_whose_record_is_gone(here: Node, mounts: LayerMounts) -> None:
    layer = here.layer({"f": HELLO})
    dead, alive = holder(here, "dead"), holder(here, "alive")
    mounts.acquire(layer, dead)
    mounts.acquire(layer, alive)
    dead.record.unlink()
    assert mounts.recover().holders == ["dead"]
    assert generations(mounts, layer) == [["alive"]]


def test_recovery_clears_generations_that_crashes_left(here: Node, mounts: LayerMounts) -> None:
    layer = here.layer({"f": HELLO})
    place = here.dirs.layers / layer.digest
    (place / "00000001" / "mnt").mkdir(parents=True)  # before its record
    (place / "00000002" / "mnt").mkdir(parents=True)  # before its mount
    record: dict[str, object] = {"format": 2, "ready": False, "direct": False, "private": False}
    record |= {"blobs": [], "mode": "kernel", "fuse": 0}
    (place / "00000002" / "record").write_text(json.dumps(record))
    (place / "00000003" / "mnt").mkdir(parents=True)  # of a namespace that is gone
    (place / "00000003" / "refs").mkdir()
    (place / "00000003" / "record").write_text(json.dumps({**record, "ready": True}))
    path = mounts.acquire(layer, holder(here))
    assert read(mounts, path, "f") == HELLO
    assert generations(mounts, layer) == [["h1"]]
    (place / "00000009" / "mnt").mkdir(parents=True)
    assert mounts.recover().mounts == [str(place / "00000009")]
    assert generations(mounts, layer) == [["h1"]]


def test_a_lost_namespace_is_made_again(here: Node, mounts: LayerMounts) -> None:
    from dsecfs.kernel.namespaces import unpin_namespaces

    layer = here.layer({"f": HELLO})
    mounts.acquire(layer, holder(here))
    mounts.close()
    unpin_namespaces(here.dirs.namespace.parent)
    assert not is_pinned(mounts.namespace)
    again = LayerMounts(here.dirs)
    assert read(again, again.acquire(layer, holder(here, "h2")), "f") == HELLO
    again.close()


def test_a_new_fuse_mount_gives_a_new_generation(here: Node, mounts: LayerMounts) -> None:
    layer = here.layer({"f": HELLO})
    old = mounts.acquire(layer, holder(here, "old"))
    blobs = here.dirs.fs / "blobs"
    content = (blobs / layer.blobs[0].digest).read_bytes()
    mount("again", here.dirs.fs, "tmpfs", 0)
    try:
        with pytest.raises(MountError, match="start the FUSE daemon"):
            mounts.acquire(layer, holder(here, "early"))
        blobs.mkdir()
        (blobs / layer.blobs[0].digest).write_bytes(content)
        new = mounts.acquire(layer, holder(here, "new"))
        assert new != old
        assert generations(mounts, layer) == [["old"], ["new"]]
        assert read(mounts, new, "f") == HELLO
        mounts.release(layer.digest, "old")
        assert generations(mounts, layer) == [["new"]]
    finally:
        umount(here.dirs.fs, detach=True)


def test_a_missing_device_says_what_to_do_and_leaves_nothing(
    here: Node, mounts: LayerMounts
) -> None:
    layer = here.layer({"f": HELLO})
    (here.dirs.fs / "blobs" / layer.blobs[0].digest).unlink()
    with pytest.raises(MountError, match="start the FUSE daemon"):
        mounts.acquire(layer, holder(here))
    assert generations(mounts, layer) == []
    assert os.listdir(here.dirs.layers) == []


def test_a_damaged_image_gives_the_kernels_words(here: Node, mounts: LayerMounts) -> None:
    layer = here.layer({"f": HELLO})
    layer.meta_path.write_bytes(b"\0" * 8192)
    with pytest.raises(MountError, match="erofs"):
        mounts.acquire(layer, holder(here))
    assert generations(mounts, layer) == []


def test_names_are_checked(here: Node, mounts: LayerMounts) -> None:
    layer = here.layer({"f": HELLO})
    with pytest.raises(BadInput):
        mounts.acquire(layer, Holder("../x", here.place))
    with pytest.raises(BadInput):
        mounts.release(layer.digest, "a/b")


def test_recording_mounts_are_private_and_read_nothing_ahead(
    here: Node, mounts: LayerMounts
) -> None:
    layer = here.layer({"f": HELLO})
    device = here.dirs.fs / "blobs" / layer.blobs[0].digest
    shared = mounts.acquire(layer, holder(here, "shared"))
    private = mounts.acquire_private(layer, holder(here, "trace"), [device])
    assert private != shared
    assert mounts.acquire(layer, holder(here, "other")) == shared
    fds = mounts.clone([shared, private])
    try:
        assert [get_read_ahead(fd) for fd in fds] == [128, 0]
    finally:
        for fd in fds:
            os.close(fd)
    mounts.release(layer.digest, "trace")
    assert generations(mounts, layer) == [["other", "shared"]]


@pytest.mark.skipif(not os.path.exists("/dev/loop-control"), reason="no loop devices here")
def test_loop_mode_shows_the_same_tree(here: Node) -> None:
    mounts = LayerMounts(here.dirs, mode="loop")
    layer = here.layer({"a/f": HELLO, "l": "a/f"})
    path = mounts.acquire(layer, holder(here))
    assert read(mounts, path, "a/f") == HELLO
    assert read(mounts, path, "l") == HELLO
    mounts.close()
    data = str(here.place)
    kernel = LayerMounts(here.dirs)
    again = kernel.acquire(layer, holder(here))
    assert again != path, "what another mode has mounted is not what was asked for"
    assert read(kernel, again, "a/f") == HELLO
    kernel.release(layer.digest, "h1")
    kernel.trim(keep=0)
    kernel.close()
    backing = [p.read_text() for p in Path("/sys/block").glob("loop*/loop/backing_file")]
    assert not [b for b in backing if b.startswith(data)], "loop devices clear themselves"


# -- overlays ----------------------------------------------------------------------------


def test_idmapped_lowers_shift_owners_and_whiteouts_hide(here: Node, mounts: LayerMounts) -> None:
    data = bytearray()
    base = here.layer(
        {"gone": b"x", "f": file_inode(b"data", data, uid=0, gid=5), "d/old": b"o"}, data
    )
    opaque = directory()
    opaque.opaque = True
    top = here.layer({"gone": None, "d": opaque})
    paths = [mounts.acquire(layer, holder(here)) for layer in (top, base)]
    with closing(user_namespace(IdRange(700_000, 65536))) as userns:
        lowers = mounts.clone(paths, userns)
    upper = here.place / "u"
    for name in ("upper", "work"):
        (upper / name).mkdir(parents=True)
        os.chown(upper / name, 700_000, 700_000)
    up = open_tree(upper)
    tree = overlay_root([*lowers], up, what="test", volatile=True)
    for fd in (*lowers, up):
        os.close(fd)
    with closing(tree):
        assert names_in(tree) == ["d", "f"]
        assert os.listdir(f"/proc/self/fd/{tree}/d") == []
        info = os.stat("f", dir_fd=tree)
        assert (info.st_uid, info.st_gid) == (700_000, 700_005)
        with closing(os.open("f", os.O_WRONLY, dir_fd=tree)) as file:
            os.write(file, b"new")
        assert (upper / "upper" / "f").read_bytes() == b"newa"
        assert (upper / "upper" / "f").stat().st_uid == 700_000
        assert os.stat("f", dir_fd=tree).st_ino == info.st_ino, "copy-up keeps the inode number"


def names_in(tree: int) -> list[str]:
    """A mount's descriptor cannot be read itself."""
    return sorted(os.listdir(f"/proc/self/fd/{tree}"))


def test_layers_can_be_attached_for_older_kernels(here: Node) -> None:
    one, two = here.layer({"a": b"1"}), here.layer({"b": b"2"})
    fds = [
        erofs_mount(layer.meta_path, [here.dirs.fs / "blobs" / b.digest for b in layer.blobs])
        for layer in (one, two)
    ]
    attach = here.place / "attach"
    tree = overlay_root(fds, None, what="test", attach=attach)
    for fd in fds:
        os.close(fd)
    with closing(tree):
        assert names_in(tree) == ["a", "b"]
    assert not attach.exists()
    assert here.mounts() == []


@pytest.mark.parametrize("release", [(5, 19), (6, 8)])
def test_overlays_of_older_kernels(
    here: Node, mounts: LayerMounts, monkeypatch: pytest.MonkeyPatch, release: tuple[int, int]
) -> None:
    """Attached layers; before 6.8 all in one option, with no character to escape in it."""
    monkeypatch.setattr("dsecfs.mount.overlay.version", lambda: release)
    target, upper = here.place / "a:b,c\\d", here.place / "u:p,\\"
    target.mkdir()
    layers = [here.layer({f"f{n}": HELLO, "all": b"%d" % n}) for n in range(12)]
    layers[0] = here.layer({"f11": None, "all": b"top"})
    for up in (None, upper):
        mount_env(here.dirs, layers, target, upper=up, mounts=mounts)
        assert sorted(os.listdir(target)) == sorted(["all", *(f"f{n}" for n in range(1, 11))])
        assert (target / "all").read_bytes() == b"top"
        assert (target / "f7").read_bytes() == HELLO
        found = [m for m in mounts_here() if m.point == target]
        assert len(found) == 1 and ("ro" in found[0].options.split(",")) == (up is None)
        assert {"nosuid", "nodev"} <= set(found[0].options.split(","))
        if up is not None:
            (target / "f7").write_bytes(b"new")
        umount_env(here.dirs, target, mounts=mounts)
    assert (upper / "upper" / "f7").read_bytes() == b"new"
    assert here.mounts() == [str(here.dirs.run / "ns"), str(here.dirs.run / "ns" / "layers")]
    assert [n for n in os.listdir(here.dirs.run / "mounts") if n.endswith("attach")] == []


def test_too_many_layers_for_an_older_kernel(
    here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsecfs.mount.overlay.version", lambda: (6, 1))
    layer = here.layer({"a": b"1"})
    with contextlib.ExitStack() as stack:
        devices = [here.dirs.fs / "blobs" / b.digest for b in layer.blobs]
        first = stack.enter_context(closing(erofs_mount(layer.meta_path, devices)))
        rest = [stack.enter_context(closing(open_tree("", at=first))) for _ in range(260)]
        with pytest.raises(MountError, match="260 layers do not fit"):
            overlay_root(rest, None, what="test", attach=here.place / "attach")
    assert here.mounts() == []
    assert not (here.place / "attach").exists()


def test_device_nodes_of_an_image_are_no_devices_here(here: Node, mounts: LayerMounts) -> None:
    node_ = Inode(stat.S_IFCHR | 0o666, rdev=os.makedev(1, 5))  # /dev/zero
    layer = here.layer({"zero": node_})
    target = here.place / "t"
    target.mkdir()
    mount_env(here.dirs, [layer], target, mounts=mounts)
    with pytest.raises(PermissionError):
        (target / "zero").open("rb")
    umount_env(here.dirs, target, mounts=mounts)


def test_an_images_redirect_is_not_obeyed(here: Node, mounts: LayerMounts) -> None:
    secret = here.layer({"secret/f": HELLO})
    lure = directory()
    lure.xattrs = {b"trusted.overlay_redirect": b"/secret"}
    top = here.layer({"lure": lure})
    # The writer refuses such an attribute, so the image is made hostile afterwards.
    image = top.meta_path.read_bytes()
    assert image.count(b"overlay_redirect") == 1
    image = image.replace(b"overlay_redirect", b"overlay.redirect")
    # feature_compat of the superblock: no checksum.
    top.meta_path.write_bytes(image[:1032] + bytes([image[1032] & ~1]) + image[1033:])
    target = here.place / "t"
    target.mkdir()
    mount_env(here.dirs, [top, secret], target, mounts=mounts)
    with pytest.raises(PermissionError):
        os.listdir(target / "lure")
    umount_env(here.dirs, target, mounts=mounts)


# -- dsec mount ----------------------------------------------------------------------------


def test_mount_and_unmount_an_environment(here: Node, mounts: LayerMounts) -> None:
    base, tool = here.layer({"bin/a": HELLO, "bin/b": b"b"}), here.layer({"bin/b": b"tool"})
    target = here.place / "target"
    target.mkdir()
    mount_env(here.dirs, [tool, base], target, mounts=mounts)
    assert (target / "bin" / "a").read_bytes() == HELLO
    assert (target / "bin" / "b").read_bytes() == b"tool"
    with pytest.raises(OSError, match="Read-only"):
        (target / "x").touch()
    assert mounted_envs(here.dirs) == {target: [tool.digest, base.digest]}
    with pytest.raises(Conflict, match="mounted there already"):
        mount_env(here.dirs, [base], target, mounts=mounts)
    assert recover_mounts(here.dirs, mounts=mounts) == []
    with (target / "bin" / "a").open("rb"), pytest.raises(Busy):
        umount_env(here.dirs, target, mounts=mounts)
    umount_env(here.dirs, target, mounts=mounts)
    assert os.listdir(target) == []
    assert generations(mounts, base) == [[]]
    with pytest.raises(NotFound):
        umount_env(here.dirs, target, mounts=mounts)


def test_mount_with_an_upper_is_writable(here: Node) -> None:
    base = here.layer({"f": HELLO})
    target, upper = here.place / "target", here.place / "mine"
    target.mkdir()
    mount_env(here.dirs, [base], target, upper=upper)
    (target / "f").write_text("changed")
    umount_env(here.dirs, target)
    assert (upper / "upper" / "f").read_text() == "changed"


def test_recovery_releases_a_mount_that_others_unmounted(here: Node, mounts: LayerMounts) -> None:
    base = here.layer({"f": HELLO})
    target = here.place / "target"
    target.mkdir()
    mount_env(here.dirs, [base], target, mounts=mounts)
    assert umount(target)
    assert len(recover_mounts(here.dirs, mounts=mounts)) == 1
    assert generations(mounts, base) == [[]]
    mount_env(here.dirs, [base], target, mounts=mounts)
    umount_env(here.dirs, target, mounts=mounts)


def test_a_target_that_becomes_a_link_is_not_followed(
    here: Node, mounts: LayerMounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = here.layer({"f": HELLO})
    target, moved, victim = (here.place / name for name in ("target", "moved", "victim"))
    target.mkdir()
    victim.mkdir()
    acquire = mounts.acquire

    def swap(layer: LocalLayer, holder: Holder) -> Path:
        target.rename(moved)
        target.symlink_to(victim)
        return acquire(layer, holder)

    monkeypatch.setattr(mounts, "acquire", swap)
    mount_env(here.dirs, [base], target, mounts=mounts)
    assert os.listdir(victim) == [] and os.listdir(moved) == ["f"]
    assert umount(moved)
    recover_mounts(here.dirs, mounts=mounts)
    assert generations(mounts, base) == [[]]


@pytest.mark.parametrize("bad", ["missing", "file", "link"])
def test_a_bad_target_is_refused(here: Node, mounts: LayerMounts, bad: str) -> None:
    (here.place / "file").touch()
    (here.place / "link").symlink_to("/tmp")
    with pytest.raises(BadInput, match="not a directory"):
        mount_env(here.dirs, [here.layer({})], here.place / bad, mounts=mounts)
    with pytest.raises(BadInput, match="no layers"):
        mount_env(here.dirs, [], here.place, mounts=mounts)
