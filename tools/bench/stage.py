"""What the benchmarks run on: a store and a node in a temporary directory, all of it gone after.

    with stage("warm-io") as s:
        layer = s.publish("tar:/x/base.tar")
        s.start()                       # the FUSE daemon
        s.fill([layer])                 # everything into the chunk cache
        s.mount([layer], s.top / "here")
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dsecfs.errors import DeadlineExceeded
from dsecfs.fuse.config import FsConfig, node_config
from dsecfs.fuse.control import FsClient
from dsecfs.fuse.daemon import start_daemon, stop_daemon
from dsecfs.fuse.trees import write_tree
from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.namespaces import unpin_namespaces
from dsecfs.kernel.syscalls import umount
from dsecfs.layers.digest import Digest
from dsecfs.layers.local import LocalLayer, LocalLayers
from dsecfs.layers.publish import Meta, Published, publish_source
from dsecfs.layers.sources.image import Platform, open_image
from dsecfs.mount.environment import mount_env, umount_env
from dsecfs.mount.layers import LayerMounts
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.directory import DirectoryStore

CACHE_VARIABLE = "DSEC_BENCH_CACHE"
FILL_LIMIT_S = 90.0


class Stage:
    """One store, one node. Every method may be called again."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.store = DirectoryStore(top / "store", create=True)
        self.dirs = NodeDirs(top / "data", top / "run")
        self.dirs.create()
        self._config: FsConfig | None = None
        self._targets: list[Path] = []

    def publish(self, spec: str, kind: str = "base") -> Published:
        """A layer of the source `spec` (tar:FILE, dir:DIRECTORY)."""
        with open_image(spec) as image:
            return publish_source(
                self.store, image.layers[0], None, Meta(kind, str(Platform.here()))
            )

    def local(self, layers: Sequence[Digest]) -> list[LocalLayer]:
        """Heads and metadata of layers on this node, in the order given."""
        return LocalLayers(self.store, self.dirs).ensure_all(layers)

    def start(self, **settings: Any) -> FsClient:
        """Start the FUSE daemon. `settings` are fields of FsConfig."""
        self._config = node_config(self.dirs, f"file:{self.top}/store", **settings)
        return start_daemon(self._config)

    def stop(self) -> None:
        """End the FUSE daemon, whoever uses it."""
        if self._config is not None:
            stop_daemon(self._config, mode="force")
            self._config = None

    def fill(self, layers: Sequence[LocalLayer], *, but_last: bool = False) -> None:
        """Bring every chunk into the cache, `but_last` all but the last one of each blob: then
        no blob is whole, and FUSE goes on serving it."""
        client = FsClient(self.dirs.control)
        blobs = [blob for layer in layers for blob in layer.blobs]
        job = f"fill-{time.monotonic_ns()}"
        client.prefetch(
            job, [(b.digest, list(range(b.chunks - 1)) if but_last else None) for b in blobs]
        )
        deadline = time.monotonic() + FILL_LIMIT_S
        while not (now := client.prefetch_status(job))["finished"]:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"fill the cache: {now['done']} of {now['total']} chunks")
            time.sleep(0.05)
        if now["error"]:
            raise SystemExit(f"fill the cache: {now['error']}")

    def mount(
        self, layers: Sequence[LocalLayer], target: Path, *, upper: bool = True, direct: bool = True
    ) -> Path:
        """`layers` (top first) by EROFS and overlay at `target`; `direct` allows generations
        that read cache files without FUSE."""
        target.mkdir(exist_ok=True)
        place = self.top / f"upper-{target.name}" if upper else None
        mounts = LayerMounts(self.dirs, direct=direct)
        try:
            mount_env(self.dirs, layers, target, upper=place, mounts=mounts)
        finally:
            mounts.close()
        self._targets.append(target)
        return target

    def unmount(self, target: Path) -> None:
        """Undo `mount`, and unmount layers that nobody uses then."""
        self._targets.remove(target)
        umount_env(self.dirs, target, detach=True)
        mounts = LayerMounts(self.dirs)
        try:
            mounts.trim(0)
        finally:
            mounts.close()

    def tree(self, name: str, layers: Sequence[LocalLayer]) -> Path:
        """`layers` (bottom first) as a merged tree in the daemon's mount: FUSE mode."""
        write_tree(self.dirs.trees, name, [layer.digest for layer in layers])
        return self.dirs.fs / "trees" / name

    def close(self) -> None:
        for target in list(self._targets):
            self.unmount(target)
        self.stop()
        unpin_namespaces(self.dirs.namespace.parent)
        self.store.close()
        for mount in reversed(mounts_here()):
            if mount.point.is_relative_to(self.top):
                umount(mount.point, detach=True)


@contextlib.contextmanager
def stage(name: str) -> Iterator[Stage]:
    """A stage on a disk. SIGTERM ends it as Ctrl-C does, so that nothing is left mounted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix=f"dsec-{name}-", dir="/var/tmp") as place:
        made = Stage(Path(os.path.realpath(place)))
        try:
            yield made
        finally:
            made.close()


def cache_directory() -> Path:
    """Where images for benchmarks are kept between runs."""
    return Path(os.environ.get(CACHE_VARIABLE, "/var/tmp/dsec-bench"))


def parser(text: str | None, *, repeat: int) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    made = argparse.ArgumentParser(
        description=(text or "").partition("\n\n")[0],
        epilog=f"Images are kept in ${CACHE_VARIABLE} (default {cache_directory()}).",
    )
    made.add_argument("--repeat", type=int, default=repeat, help="rounds (default %(default)s)")
    return made


def alternate(
    rounds: int, sides: dict[str, Callable[[], float]], *, warmup: int = 1
) -> dict[str, list[float]]:
    """Run every side once per round, turning the order around each time; their results.

    `warmup` rounds come first and do not count.
    """
    results: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warmup, rounds):
        order = list(sides) if number % 2 else list(reversed(sides))
        for name in order:
            value = sides[name]()
            if number >= 0:
                results[name].append(value)
    return results
