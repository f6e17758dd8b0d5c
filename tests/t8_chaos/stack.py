"""The whole stack for tests: a store with layers, and nodes on it, each in one of the modes.

    store ── FUSE daemon ── EROFS (from files or loop devices) ── overlay      kernel, loop
                  └──────── trees/<name>                                       fuse
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from dsecfs.cache import read_totals
from dsecfs.errors import DsecfsError
from dsecfs.fuse.config import node_config
from dsecfs.fuse.control import FsClient
from dsecfs.fuse.mountpoint import fuse_device
from dsecfs.fuse.trees import write_tree
from dsecfs.kernel.namespaces import unpin_namespaces
from dsecfs.layers.digest import Digest
from dsecfs.layers.local import LocalLayer, LocalLayers
from dsecfs.layers.names import Name
from dsecfs.layers.publish import BlobOptions, Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.mount import LayerMounts, mount_env, umount_env
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import Store
from dsecfs.store.faults import Rule
from tests.support.mounts import why_no_erofs
from tests.t4_fuse.family import Family, wait_for, why_no_resend
from tests.t5_runtime.conftest import APPLETS
from tests.t8_chaos.faultyworker import RULES

Mode = Literal["kernel", "loop", "fuse"]
MODES: tuple[Mode, ...] = ("kernel", "loop", "fuse")
CHUNK = 64 << 10
HANG_S = 60.0
"""Nothing here may take longer; it is no measure of speed."""


def why_not(mode: Mode) -> str:
    """What is missing for the stack in this mode; "" if nothing is."""
    if why_no_resend():
        return why_no_resend()
    if mode == "loop" and not os.path.exists("/dev/loop-control"):
        return "no loop devices here"
    return "" if mode == "fuse" else why_no_erofs()


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("3")


@dataclass(frozen=True)
class Content:
    """Layers in a store, bottom to top, and what their files are."""

    layers: tuple[Digest, ...]
    sums: dict[str, str]
    """sha256 of each file by path."""
    entries: int
    """Everything below the root of the merged tree."""


def random_files(place: Path, number: int, files: int, seed: int) -> dict[str, str]:
    """`files` files below `place`/dir<number>/; their sums by path."""
    rng = random.Random(f"{seed}:{number}")
    sums = {}
    (place / f"dir{number}").mkdir(parents=True)
    for i in range(files):
        name = f"dir{number}/file{i}"
        data = rng.randbytes(rng.choice((100, 20_000, 150_000, 700_000)))
        (place / name).write_bytes(data)
        sums[name] = hashlib.sha256(data).hexdigest()
    return sums


def make_tar(path: Path, number: int, files: int, seed: int) -> dict[str, str]:
    """An archive with `random_files`; their sums."""
    place = path.with_suffix(".d")
    sums = random_files(place, number, files, seed)

    def timeless(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = 1_700_000_000
        return info

    with tarfile.open(path, "w") as tar:
        tar.add(place, arcname=".", filter=timeless)
    shutil.rmtree(place)
    return sums


def publish(
    store: Store, top: Path, *, layers: int = 2, files: int = 25, seed: int = 1, name: str = ""
) -> Content:
    """Publish layers of random files. With a `name` they are base/<name>:<number>."""
    digests, sums = [], {}
    for number in range(layers):
        path = top / f"layer{seed}-{number}.tar"
        sums.update(make_tar(path, number, files, seed))
        source = open_image(f"tar:{path}").layers[0]
        meta = Meta("base", "linux/amd64")
        wanted = Name("base", name, str(number)) if name else None
        options = BlobOptions(chunk_size=CHUNK)
        digests.append(publish_source(store, source, wanted, meta, options=options).digest)
        path.unlink()
    return Content(tuple(digests), sums, len(sums) + layers)


def publish_shell(store: Store, place: Path, sums: Mapping[str, str] | None = None) -> Digest:
    """A base with a shell; with `sums` it also has /sums, for `sha256sum -c`."""
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "busybox").write_bytes(Path("/usr/bin/busybox").read_bytes())
    (place / "bin" / "busybox").chmod(0o755)
    for name in (*APPLETS, "sha256sum"):
        (place / "bin" / name).symlink_to("busybox")
    lines = [f"{digest}  /{name}\n" for name, digest in (sums or {}).items()]
    (place / "sums").write_text("".join(lines))
    source = open_image(f"dir:{place}").layers[0]
    return publish_source(store, source, None, Meta("base", "linux/amd64")).digest


class Node(Family):
    """One node: its daemon, and the tree of `content` in each of `modes` at `trees`."""

    def __init__(
        self,
        top: Path,
        store_url: str,
        content: Content,
        modes: Sequence[Mode],
        *,
        data: Path | None = None,
        cache: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.top = top
        self.modes = tuple(modes)
        self.content = content
        self.dirs = NodeDirs(data or top / "data", top / "run")
        self.dirs.create()
        limits = {"max_bytes": 1 << 30, "min_free": 0, "deadline_s": 3.0, **(cache or {})}
        settings = {"entry": "tests.t8_chaos.faultyworker:main", **settings}
        self.config = node_config(self.dirs, store_url, cache=limits, **settings)
        self.client = FsClient(self.config.control, timeout_s=HANG_S)
        self.trees = {mode: top / mode for mode in modes}
        if "fuse" in self.trees:
            self.trees["fuse"] = self.dirs.fs / "trees" / "all"
        self.mounts: dict[Mode, LayerMounts] = {}
        self.local: list[LocalLayer] = []

    def up(self, store: Store) -> None:
        """Obtain the layers, start the daemon, mount."""
        self.local = LocalLayers(store, self.dirs).ensure_all(self.content.layers)
        self.start()
        self.mount()

    def mount(self) -> None:
        for mode, tree in self.trees.items():
            if mode == "fuse":
                write_tree(self.dirs.trees, tree.name, self.content.layers)
                continue
            if mode not in self.mounts:
                # Always through the daemon: blobs in direct use would not need it.
                self.mounts[mode] = LayerMounts(self.dirs, mode=mode, direct=False)
            tree.mkdir(exist_ok=True)
            mount_env(self.dirs, self.local[::-1], tree, mounts=self.mounts[mode])

    def unmount(self) -> None:
        """Take the trees and the layer mounts below them away."""
        for mode, mounts in self.mounts.items():
            with contextlib.suppress(DsecfsError):
                umount_env(self.dirs, self.trees[mode], detach=True, mounts=mounts)
            mounts.trim(0)
            mounts.close()
        self.mounts.clear()
        unpin_namespaces(self.dirs.namespace.parent)

    def fault(self, *rules: Rule) -> None:
        """From now on the store misbehaves like this; without rules it is well again."""
        path = self.dirs.data / RULES
        new = path.with_suffix(".new")
        new.write_text(json.dumps([asdict(rule) for rule in rules]))
        new.replace(path)

    def counted(self) -> dict[str, int]:
        """Counters of the cache, over all workers there were."""
        return dict(read_totals(self.dirs))

    def forget_chunks(self) -> None:
        """Empty the chunk cache, as `dsec cache clear` does, and the kernel's."""
        from dsecfs.cache import ChunkCache

        def none() -> Store:
            raise AssertionError("no store is needed for that")

        cache = ChunkCache(self.dirs, none, max_bytes=1 << 30)
        cache.clear()
        cache.close()
        drop_caches()

    def check(self) -> None:
        """In every mode every file is right, and everything is listed."""
        for mode, tree in self.trees.items():
            for name, digest in self.content.sums.items():
                found = hashlib.sha256((tree / name).read_bytes()).hexdigest()
                assert found == digest, (mode, name)
            assert sum(1 for _ in tree.rglob("*")) == self.content.entries, mode

    def lose_supervisors(self) -> None:
        """Kill both supervisors so that neither can replace the other, and wait for new ones."""
        import signal

        s = self.settled()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for role in ("active", "standby"):
                os.kill(s[role], number)
        self.settled()

    def power_loss(self) -> None:
        """Everything of this boot is gone: processes, mounts, the run directory."""
        self.unmount()
        self.kill_everybody()
        self._detach()
        shutil.rmtree(self.dirs.run)
        self.dirs.create()

    def _detach(self) -> None:
        from tests.t4_fuse.family import _libc

        while fuse_device(self.dirs.fs) is not None:
            _libc.umount2(os.fsencode(self.dirs.fs), 1)
            if _libc.umount2(os.fsencode(self.dirs.fs), 2):
                break

    def remove(self) -> None:
        try:
            self.unmount()
        finally:
            super().remove()


@contextlib.contextmanager
def node(
    top: Path,
    store: Store,
    content: Content,
    modes: Sequence[Mode],
    *,
    url: str = "",
    **options: Any,
) -> Iterator[Node]:
    """A node that is up; its log is printed if the test fails."""
    top.mkdir()
    made = Node(top, url or store.url, content, modes, **options)
    try:
        made.up(store)
        yield made
    except BaseException:
        print(made.log())
        raise
    finally:
        made.remove()


class Load:
    """Readers that check every byte of a tree's files, past the caches, while the block lasts."""

    def __init__(
        self, nodes: Node | Sequence[Node], *, threads: int = 4, tolerated: Sequence[int] = ()
    ) -> None:
        """`tolerated` are errno values that count as `failures`, not as the end of a reader."""
        self._nodes = [nodes] if isinstance(nodes, Node) else list(nodes)
        self._tolerated = tolerated
        self._stop = threading.Event()
        self._lock = threading.Lock()
        modes = {mode for node in self._nodes for mode in node.modes}
        self.reads = dict.fromkeys(modes, 0)
        self.failures = dict.fromkeys(modes, 0)
        self.slowest_s = 0.0
        self.errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(threads)
        ]

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self._stop.is_set():
                node = rng.choice(self._nodes)
                mode = rng.choice(node.modes)
                name = rng.choice(list(node.content.sums))
                began = time.monotonic()
                try:
                    self._read(node.trees[mode] / name, node.content.sums[name])
                except OSError as e:
                    if e.errno not in self._tolerated:
                        raise
                    self._count(mode, self.failures)
                else:
                    self._count(mode, self.reads)
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        except (OSError, AssertionError) as e:
            self.errors.append(e)

    def _read(self, path: Path, digest: str) -> None:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = hashlib.sha256()
            while data := file.read(1 << 18):
                found.update(data)
        assert found.hexdigest() == digest, f"wrong bytes in {path}"

    def _count(self, mode: Mode, counts: dict[Mode, int]) -> None:
        with self._lock:
            counts[mode] += 1

    def progress(self, *, count: int = 1) -> None:
        """In every mode reads go on, and all that were made are right."""
        self._grow("reads that go on", self.reads, count)

    def fails(self, *, count: int = 1) -> None:
        """In every mode reads fail with what is tolerated, and none gives wrong bytes."""
        self._grow("errors", self.failures, count)

    def _grow(self, what: str, counts: dict[Mode, int], count: int) -> None:
        wanted = {mode: before + count for mode, before in counts.items()}

        def reached() -> bool:
            return bool(self.errors) or all(counts[mode] >= n for mode, n in wanted.items())

        wait_for(f"{what} in every mode", reached, HANG_S)
        assert not self.errors, self.errors

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(HANG_S)
        assert not any(thread.is_alive() for thread in self._threads), "a reader hangs"
        if kind is None:
            assert not self.errors, self.errors
            assert self.slowest_s < HANG_S
