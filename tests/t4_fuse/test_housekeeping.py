"""A worker keeps its node healthy: real daemon, real mounts, chores as they run in production."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from dsecfs.cache.blob import pins, stored_states
from dsecfs.cache.blobfiles import OLD, VALID
from dsecfs.errors import NotFound
from dsecfs.fuse import chores
from dsecfs.fuse.chores import Chores
from dsecfs.fuse.config import node_config
from dsecfs.fuse.daemon import start_daemon, stop_daemon
from dsecfs.fuse.trees import write_tree
from dsecfs.kernel.namespaces import unpin_namespaces
from dsecfs.kernel.syscalls import closing
from dsecfs.layers.digest import Digest
from dsecfs.layers.leases import live_layers
from dsecfs.layers.local import LocalLayer, LocalLayers, known_layers
from dsecfs.layers.publish import Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.mount import Holder, LayerMounts
from dsecfs.mount.fuse import mount_tree, umount_tree
from dsecfs.mount.inuse import layers_in_use
from dsecfs.node import Node
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.directory import DirectoryStore
from tests.support.mounts import needs_erofs
from tests.t4_fuse.family import Family, wait_for, why_no_resend

pytestmark = [
    pytest.mark.skipif(bool(why_no_resend()), reason=why_no_resend() or "it works"),
    needs_erofs,
]

ENTRY = "tests.t4_fuse.test_housekeeping:main"
BOOT = b"00000000-0000-4000-8000-000000000000"


def main(inherited: Any) -> int:
    """The worker of production, whose chores have less patience."""
    from dsecfs.cache import keep, scrub
    from dsecfs.fuse.worker import main as real

    keep.SYNC_S = 0.2
    for chore, name, value in ((scrub.scrub, "look_s", 0.05), (scrub.verify, "after_s", 0.0)):
        defaults = chore.__kwdefaults__
        assert defaults is not None
        defaults[name] = value
    chores.LEASE_S = chores.LOCK_S = chores.FORGET_S = 0.05
    return real(inherited)


class World:
    """Two layers in a store and the node's daemon."""

    def __init__(self) -> None:
        self.family = f = Family()
        self.store = DirectoryStore(f.top / "store", create=True)
        self.data = [os.urandom(700_000), os.urandom(90_000)]
        found = [self._publish(n, data) for n, data in enumerate(self.data)]
        f.config = node_config(
            f.dirs,
            self.url,
            entry=ENTRY,
            cache={"max_bytes": 1 << 30, "min_free": 0},
            housekeeping={"metadata_max_bytes": 1, "check_rate": 1 << 40},
        )
        self.dirs = f.dirs
        self.layers: list[LocalLayer] = LocalLayers(self.store, f.dirs).ensure_all(found)
        self.mounts = LayerMounts(f.dirs)

    @property
    def url(self) -> str:
        return f"file:{self.family.top}/store"

    def _publish(self, number: int, data: bytes) -> Digest:
        place = self.family.top / f"layer{number}"
        place.mkdir()
        (place / "f").write_bytes(data)
        with tarfile.open(f"{place}.tar", "w") as tar:
            tar.add(place, arcname=".")
        source = open_image(f"tar:{place}.tar").layers[0]
        return publish_source(self.store, source, None, Meta("base", "linux/amd64")).digest

    def start(self) -> None:
        start_daemon(self.family.config)

    def holder(self, name: str) -> Holder:
        record = self.family.top / f"record-{name}"
        record.touch()
        return Holder(name, record)

    def read(self, path: Path) -> bytes:
        (fd,) = self.mounts.clone([path])
        with closing(fd), closing(os.open("f", os.O_RDONLY, dir_fd=fd)) as file:
            return os.read(file, 1 << 20)

    def blob(self, number: int) -> Digest:
        return self.layers[number].blobs[0].digest

    def leased(self) -> set[Digest]:
        return set(live_layers(self.store, time.time()))

    def fill(self, number: int) -> None:
        """All of a layer's data, by the daemon."""
        self.family.client.prefetch(f"all-{number}", [(self.blob(number), None)])
        wait_for(
            "prefetch",
            lambda: self.family.client.prefetch_status(f"all-{number}")["finished"],
        )

    def remove(self) -> None:
        self.mounts.close()
        unpin_namespaces(self.dirs.namespace.parent)
        self.store.close()
        self.family.remove()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    try:
        yield made
    except BaseException:
        print(made.family.log())
        raise
    finally:
        made.remove()


def test_what_is_mounted_is_leased_whoever_dies(world: World) -> None:
    a, b = (layer.digest for layer in world.layers)
    world.start()
    client = world.family.client
    assert client.chores()["lease"]["state"] == "none"
    world.mounts.acquire(world.layers[0], world.holder("one"))
    wait_for("a lease", lambda: world.leased() == {a})
    write_tree(world.dirs.trees, "rec-0123456789abcdef", [b])
    wait_for("a recording's layers", lambda: world.leased() == {a, b})
    held = {"lease": {"state": "held", "layers": 2, "error": ""}, "node": True}
    wait_for("its report", lambda: client.chores() == held)
    (old,) = {info.key.split("/")[1] for info in world.store.list("leases/")}
    world.family.kill_worker()
    wait_for("the next one's", lambda: old not in str(list(world.store.list("leases/"))))
    assert world.leased() == {a, b}
    assert client.restart_worker()
    wait_for("one lease", lambda: len(list(world.store.list("leases/"))) == 1)
    assert world.leased() == {a, b}
    world.mounts.release(a, "one")
    world.mounts.trim(0)
    stop_daemon(world.family.config)
    wait_for("no lease", lambda: not list(world.store.list("leases/")))


def test_a_mount_of_its_own_has_a_lease_of_its_own(world: World) -> None:
    a, b = (layer.digest for layer in world.layers)
    world.start()
    world.mounts.acquire(world.layers[0], world.holder("one"))
    target = world.family.top / "target"
    target.mkdir()
    mount_tree(world.dirs, world.layers[::-1], target, world.url, entry=ENTRY)
    try:
        wait_for("both leases", lambda: world.leased() == {a, b})
        leases = {info.key.split("/")[1] for info in world.store.list("leases/")}
        assert len(leases) == 2
        assert layers_in_use(world.dirs) == (frozenset({a}), frozenset({a, b}))
        assert set(known_layers(world.dirs)) == {a, b}, "metadata of what is mounted stays"
        assert (target / "f").read_bytes() == world.data[1]
    finally:
        umount_tree(world.dirs, target)
    wait_for("one lease", lambda: world.leased() == {a})
    assert world.family.client.chores()["node"] is True


def test_metadata_goes_when_it_is_not_used_and_comes_back(world: World) -> None:
    a, b = (layer.digest for layer in world.layers)
    world.start()
    path = world.mounts.acquire(world.layers[0], world.holder("one"))
    assert world.read(path) == world.data[0]
    then = time.time() - 86400
    for layer in world.layers:
        os.utime(world.dirs.head(layer.digest).with_name(f"{layer.digest}.ok"), (then, then))
        for ref in layer.blobs:
            os.utime(world.dirs.blob(ref.digest) / "chunks", (then, then))
    wait_for("one layer is forgotten", lambda: set(known_layers(world.dirs)) == {a})
    wait_for("its blob, too", lambda: not world.dirs.blob(world.blob(1)).exists())
    world.mounts.release(a, "one")
    time.sleep(0.2)
    assert set(known_layers(world.dirs)) == {a}, "it is still mounted, for the next one"
    world.mounts.trim(0)
    world.family.client.close_idle()
    wait_for("all is forgotten", lambda: not world.dirs.blob(world.blob(0)).exists())
    assert not list(known_layers(world.dirs))
    layers = LocalLayers(world.store, world.dirs).ensure_all([a, b])
    for number, layer in enumerate(layers):
        path = world.mounts.acquire(layer, world.holder("two"))
        assert world.read(path) == world.data[number]


def test_damage_under_a_direct_mount_is_mended_and_nobody_new_gets_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsecfs.mount.layers.UPGRADE_CHECK_S", 0.0)
    world.start()
    world.fill(0)
    layer, blob = world.layers[0], world.blob(0)
    old = world.mounts.acquire(layer, world.holder("old"))
    assert pins(world.dirs, blob), "it reads the cache file itself"
    assert world.mounts.acquire(layer, world.holder("old2")) == old
    data = world.dirs.blob(blob) / "data"
    right = data.read_bytes()
    with data.open("r+b") as file:
        file.seek(300_000)
        file.write(b"\0wrong\0")
    (pin,) = (world.dirs.blob(blob) / "pins").iterdir()
    os.utime(pin, (1, 1))  # so that it is due
    wait_for("it is mended", lambda: data.read_bytes() == right)
    wait_for("it is whole again", lambda: set(stored_states(world.dirs, blob) or b"") == {VALID})
    assert (old.parent / "retired").exists()
    new = world.mounts.acquire(layer, world.holder("new"))
    assert new != old and world.read(new) == world.data[0]
    assert len(pins(world.dirs, blob)) == 2, "direct again, as a generation of its own"
    for name in ("old", "old2"):
        world.mounts.release(layer.digest, name)
    assert world.mounts.mounted()[layer.digest] == [["new"]]
    assert "is used by nobody new" in world.family.log()


def test_damage_that_cannot_be_mended_leaves_direct_use(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsecfs.mount.layers.UPGRADE_CHECK_S", 0.0)
    world.start()
    world.fill(0)
    layer, blob = world.layers[0], world.blob(0)
    old = world.mounts.acquire(layer, world.holder("old"))
    with contextlib.suppress(FileNotFoundError):
        for info in list(world.store.list("objects/")):
            world.store.delete(info.key)
    with (world.dirs.blob(blob) / "data").open("r+b") as file:
        file.write(b"\0wrong\0")
    (pin,) = (world.dirs.blob(blob) / "pins").iterdir()
    os.utime(pin, (1, 1))
    wait_for("it is retired", lambda: (old.parent / "retired").exists())
    wait_for("it is said", lambda: "cannot be fetched again" in world.family.log())
    new = world.mounts.acquire(layer, world.holder("new"))
    assert new != old and len(pins(world.dirs, blob)) == 1, "through FUSE, which knows the hole"
    with pytest.raises(OSError, match="Input/output error"):
        world.read(new)


def test_a_whole_blob_of_an_earlier_boot_is_verified(world: World) -> None:
    world.start()
    world.fill(0)
    blob = world.blob(0)
    world.family.client.close_idle()
    with (world.dirs.blob(blob) / "present").open("r+b") as file:
        file.seek(68 - 36)
        file.write(BOOT)
    assert set(stored_states(world.dirs, blob) or b"") == {OLD}
    os.kill(world.family.status()["worker"], signal.SIGKILL)
    wait_for("all is verified", lambda: set(stored_states(world.dirs, blob) or b"") == {VALID})
    path = world.mounts.acquire(world.layers[0], world.holder("one"))
    assert pins(world.dirs, blob) and world.read(path) == world.data[0]


def test_doctor_says_when_the_lease_is_refused() -> None:
    from dsecfs.doctor import _daemon

    class Refused:
        def chores(self) -> dict[str, Any]:
            return {"lease": {"state": "denied", "layers": 0, "error": "may not"}, "node": True}

    class ANode:
        dirs = NodeDirs(Path("/data"), Path("/run"))

        def fs_client(self) -> Refused:
            return Refused()

    daemon, lease = _daemon(cast(Node, ANode()))
    assert (daemon.state, lease.state) == ("ok", "warning")
    assert "not protected from collection: may not" in lease.found and "leases/" in lease.hint


def test_in_use_by_strange_files(world: World) -> None:
    dirs = world.dirs
    assert layers_in_use(dirs) == (frozenset(), frozenset())
    dirs.trees.mkdir()
    dirs.layers.mkdir()
    (dirs.layers / "no-digest").mkdir()
    (dirs.layers / ("f" * 64)).touch()
    for name, text in (("a.json", "{"), (".b.json", "{}"), ("c", "x"), ("own-1.json", "[]")):
        (dirs.trees / name).write_text(text)
    found = layers_in_use(dirs)
    assert found.held == frozenset() and found.mounted == {Digest("f" * 64)}
    a, b = (layer.digest for layer in world.layers)
    own = f"own-{'0' * 32}"
    write_tree(dirs.trees, own, [a, b])
    (dirs.trees / f"{own}.refs").mkdir()
    assert layers_in_use(dirs).held == frozenset(), "kept for the next one"
    gone = world.family.top / "gone"
    (dirs.trees / f"{own}.refs/dead").write_text(str(gone))
    assert layers_in_use(dirs).held == frozenset()
    gone.touch()
    assert layers_in_use(dirs).held == {a, b}
    write_tree(dirs.trees, "mnt-0123456789abcdef", [a])
    assert layers_in_use(dirs).mounted == {Digest("f" * 64), a, b}


def test_one_process_does_the_nodes_chores(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsecfs.fuse.cached import open_cache

    cache = open_cache(world.family.config)
    first, second = (Chores(world.family.config, cache) for _ in range(2))
    done: list[int] = []

    def chore(number: int) -> Callable[[], Iterator[float]]:
        def steps() -> Iterator[float]:
            done.append(number)
            yield 1.0

        return steps

    assert list(first._alone(chore(1))) == [chores.LEASE_S, 1.0]
    other = second._alone(chore(2))
    assert [next(other), next(other)] == [chores.LEASE_S, chores.LOCK_S] and done == [1]
    os.close(first._lock_fd)
    assert next(other) == 1.0 and done == [1, 2]
    os.close(second._lock_fd)
    assert json.loads(json.dumps(first.report()))["lease"]["state"] == "none"
    with pytest.raises(NotFound):
        world.family.client.chores()
    cache.close()
