"""Recording runs and warming by what they read, with the real cache, FUSE and mounts.

What a program reads is known in two ways: from the program itself, which reads what it is told
to, and from strace(1). With read-ahead off a recording has the pages of these, no more, no less.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from dsecfs.cache import ChunkCache
from dsecfs.cache.blob import open_files
from dsecfs.cache.blobfiles import VALID
from dsecfs.errors import CacheError, DsecfsError
from dsecfs.fuse import blobs as fuse_blobs
from dsecfs.fuse.config import node_config
from dsecfs.fuse.daemon import start_daemon, stop_daemon
from dsecfs.fuse.mountpoint import fuse_device
from dsecfs.kernel.namespaces import IdRange, unpin_namespaces
from dsecfs.layers.digest import Digest, sha256
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.local import LocalLayer, LocalLayers
from dsecfs.layers.publish import BlobOptions, Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.layers.trace import (
    REPLAY_AHEAD,
    Access,
    Trace,
    TracedLayer,
    encode_trace,
    load_traces,
    merge_traces,
    trace_chunks,
)
from dsecfs.mount import Holder, LayerMounts, mount_env, recover_mounts, umount_env
from dsecfs.mount import record as recording
from dsecfs.mount.record import Recorder, recover_recordings
from dsecfs.store.base import trace_prefix
from dsecfs.store.directory import DirectoryStore
from dsecfs.store.faults import FaultyStore, Rule
from tests.support.mounts import needs_erofs
from tests.t4_fuse.family import Family, wait_for, why_no_resend

pytestmark = pytest.mark.skipif(bool(why_no_resend()), reason=why_no_resend() or "it works")

CHUNK = 65536
PAGE = 4096
ENV = sha256(b"an environment")
Mode = Literal["kernel", "fuse"]
Ranges = dict[str, set[int]]
"""For each file the numbers of its pages that were read."""

READER = """
import json, mmap, os, sys
for path, offset, length, how in json.load(sys.stdin):
    with open(os.path.join(sys.argv[1], path), "rb") as file:
        if how == "map":
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                for at in range(offset, offset + length, 4096):
                    data[at]
        else:
            os.pread(file.fileno(), length, offset)
"""


class World:
    """A base and a toolkit in a store, and the node's daemon with an empty cache."""

    def __init__(self) -> None:
        self.family = f = Family()
        self.store = DirectoryStore(f.top / "store", create=True)
        self.sizes: dict[str, int] = {}
        rng = random.Random(7)
        base = {f"lib/f{i}": rng.choice((900, 30_000, 400_000)) for i in range(30)}
        layers = [
            self._publish(rng, 0, base),
            self._publish(rng, 1, {"opt/tool": 700_000, "lib/f3": 50_000, "lib/empty": 0}),
        ]
        f.config = node_config(f.dirs, self.url, entry="tests.t4_fuse.realworker:main")
        self.layers: list[LocalLayer] = LocalLayers(self.store, f.dirs).ensure_all(layers)
        f.start()
        self.client = f.client
        self.dirs = f.dirs

    @property
    def url(self) -> str:
        return f"file:{self.family.top}/store"

    def _publish(self, rng: random.Random, number: int, files: dict[str, int]) -> Digest:
        place = self.family.top / f"layer{number}"
        for name, size in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(rng.randbytes(size))
            self.sizes[name] = size
        with tarfile.open(f"{place}.tar", "w") as tar:
            tar.add(place, arcname=".")
        return publish_source(
            self.store,
            open_image(f"tar:{place}.tar").layers[0],
            None,
            Meta("toolkit" if number else "base", "linux/amd64"),
            options=BlobOptions(chunk_size=CHUNK),
        ).digest

    @contextlib.contextmanager
    def mounted(self, mounts: LayerMounts | None = None) -> Iterator[Path]:
        """The composition by kernel mounts."""
        target = self.family.top / "mnt"
        target.mkdir(exist_ok=True)
        own = LayerMounts(self.dirs) if mounts is None else mounts
        try:
            mount_env(self.dirs, self.layers[::-1], target, mounts=own)
            try:
                yield target
            finally:
                umount_env(self.dirs, target, mounts=own)
        finally:
            own.trim(0)
            own.close()

    @contextlib.contextmanager
    def recorded(self, recorder: Recorder, mode: Mode) -> Iterator[Path]:
        """The same, with what is read being recorded."""
        if mode == "kernel":
            with self.mounted(recorder.mounts()) as top:
                yield top
            return
        target = self.family.top / "tree"
        target.mkdir(exist_ok=True)
        config = recorder.tree_config(self.url, target)
        start_daemon(config)
        try:
            yield target
        finally:
            stop_daemon(config, mode="force")

    def record(self, mode: Mode, work: Callable[[Path], object]) -> Trace:
        """Record `work` on the mounted tree, and store the trace."""
        with Recorder.start(self.dirs, ENV, self.layers) as recorder:
            with self.recorded(recorder, mode) as top:
                work(top)
            saved = recorder.save(self.store)
        assert saved.kept is None and not saved.truncated
        return saved.trace

    def present(self) -> set[tuple[Digest, int]]:
        """Chunks that the node's cache has."""
        found = set()
        for blob in (b for layer in self.layers for b in layer.blobs):
            files = open_files(self.dirs, blob.digest, blob.size, blob.chunk_size)
            found |= {(blob.digest, c) for c in range(blob.chunks) if files.state(c) == VALID}
        return found

    def chunks_of(self, *traces: Trace) -> set[tuple[Digest, int]]:
        images = [ErofsImage.open(layer.meta_path) for layer in self.layers[::-1]]
        with contextlib.ExitStack() as stack:
            for image in images:
                stack.callback(image.close)
            layers = [
                TracedLayer(la.blobs, im) for la, im in zip(self.layers[::-1], images, strict=True)
            ]
            merged = merge_traces(traces).accesses
            return set(trace_chunks(merged, layers, ahead=REPLAY_AHEAD))

    def evict(self) -> None:
        cache = ChunkCache(self.dirs, self.store, max_bytes=1 << 30)
        cache.clear()
        cache.close()
        assert not self.present()

    def warm(self) -> dict[str, Any]:
        job = self.client.warm(ENV, [layer.digest for layer in self.layers])
        done: dict[str, Any] = wait_for(
            "warm", lambda: (s := self.client.prefetch_status(job))["finished"] and s
        )
        return done

    def leftovers(self) -> list[str]:
        places = [p for p in (self.dirs.traces, self.dirs.trees) if p.exists()]
        found = [str(p) for place in places for p in place.iterdir() if p.name != ".lock"]
        mounts = LayerMounts(self.dirs)
        try:
            for generations in mounts.mounted().values():
                found += [name for holders in generations for name in holders]
        finally:
            mounts.close()
        return found

    def remove(self) -> None:
        recover_mounts(self.dirs)
        unpin_namespaces(self.dirs.namespace.parent)
        self.store.close()
        self.family.remove()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    try:
        yield made
        assert made.leftovers() == []
    except BaseException:
        print(made.family.log())
        raise
    finally:
        made.remove()


Plan = list[tuple[str, int, int, str]]

PLAN: Plan = [
    ("opt/tool", 655_360, 40_000, "read"),
    ("lib/f3", 0, 10, "read"),
    ("opt/tool", 8192, 12_288, "map"),
    ("opt/tool", 100_000, 1, "read"),
    ("lib/empty", 0, 100, "read"),
    ("lib/f3", 5000, 200_000, "read"),
    ("lib/f1", 1, 899, "map"),
]


def read_as(plan: Plan) -> Callable[[Path], object]:
    return lambda top: subprocess.run(
        [sys.executable, "-c", READER, top],
        input=json.dumps(plan).encode(),
        check=True,
        timeout=60,
    )


def pages_read(world: World, plan: Plan) -> Ranges:
    found: Ranges = {}
    for path, offset, length, _ in plan:
        end = min(offset + length, world.sizes[path])
        if end > offset:
            found.setdefault(path, set()).update(range(offset // PAGE, (end - 1) // PAGE + 1))
    return found


def pages_of(trace: Trace) -> Ranges:
    found: Ranges = {}
    for path, offset, length in trace.accesses:
        assert offset % PAGE == 0
        pages = found.setdefault(path.decode(), set())
        fresh = set(range(offset // PAGE, (offset + length - 1) // PAGE + 1))
        assert not pages & fresh, "each byte once"
        pages |= fresh
    return found


@needs_erofs
@pytest.mark.parametrize("mode", ["kernel", "fuse"])
def test_a_recording_has_what_the_program_reads(world: World, mode: Mode) -> None:
    first = world.record(mode, read_as(PLAN))
    assert pages_of(first) == pages_read(world, PLAN)
    order = list(dict.fromkeys(a.path for a in first.accesses))
    assert order == [b"opt/tool", b"lib/f3", b"lib/f1"]
    # Everything in the chunk cache and in the page cache: the same again.
    with world.mounted() as top:
        for name, size in world.sizes.items():
            assert len((top / name).read_bytes()) == size
    again = world.record(mode, read_as(PLAN))
    assert again.accesses == first.accesses
    assert world.leftovers() == []
    assert [t.accesses for t in load_traces(world.store, ENV)] == [first.accesses]


@needs_erofs
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace (apt-get install strace)")
@pytest.mark.parametrize("mode", ["kernel", "fuse"])
def test_a_recording_has_what_strace_saw(world: World, mode: Mode) -> None:
    log = world.family.top / "strace"
    names = ["lib/f2", "opt/tool", "lib/f9", "lib/f3"]

    def work(top: Path) -> None:
        subprocess.run(
            [
                *("strace", "-y", "-s0", "-etrace=openat,read", "-o", str(log)),
                *("head", "-qc", "300000", *(str(top / name) for name in names)),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )

    trace = world.record(mode, work)
    seen: Ranges = {}
    offsets: dict[str, int] = {}
    for path, count in re.findall(r"^read\(\d+<(.*?)>, .* = (\d+)$", log.read_text(), re.M):
        name = "/".join(path.split("/")[-2:])
        if name in names and int(count):
            at = offsets.get(name, 0)
            end = offsets[name] = at + int(count)
            seen.setdefault(name, set()).update(range(at // PAGE, (end - 1) // PAGE + 1))
    assert set(seen) == set(names)
    assert pages_of(trace) == seen


def test_a_container_root_in_fuse_mode_is_recorded(world: World) -> None:
    ids = IdRange(200_000, 65_536)
    top_first = world.layers[::-1]
    record = world.family.top / "record"
    record.touch()
    with Recorder.start(world.dirs, ENV, world.layers) as recorder:
        with contextlib.closing(recorder.mounts(mode="fuse")) as mounts:
            trees = mounts.trees
            name = trees.name(top_first, ids)
            assert name != LayerMounts(world.dirs, mode="fuse").trees.name(top_first, ids)
            fd = trees.acquire(name, top_first, ids, Holder("sandbox", record))
            try:
                assert os.stat("opt/tool", dir_fd=fd).st_uid == 200_000
                read_as(PLAN)(Path(f"/proc/{os.getpid()}/fd/{fd}"))
            finally:
                os.close(fd)
            trees.release(name, "sandbox")
        trace = recorder.save(world.store).trace
    seen = pages_of(trace)
    # Read-ahead of the node's FUSE mount is on: whole files here.
    assert set(seen) == set(pages_read(world, PLAN))
    for path, pages in pages_read(world, PLAN).items():
        assert pages <= seen[path]
    assert world.leftovers() == []


@needs_erofs
@pytest.mark.parametrize("mode", ["kernel", "fuse"])
def test_a_recording_goes_on_when_workers_die(world: World, mode: Mode) -> None:
    def work(top: Path) -> None:
        read_as(PLAN[:3])(top)
        if mode == "kernel":
            world.family.kill_worker()
        else:
            from dsecfs.fuse.config import tree_config
            from dsecfs.fuse.control import FsClient

            client = FsClient(tree_config(world.dirs, world.url, "", top).control)
            before = client.status()
            os.kill(before["worker"], signal.SIGKILL)

            def replaced() -> bool:
                try:
                    return bool(client.status()["generation"] > before["generation"])
                except DsecfsError:
                    return False

            wait_for("a new worker", replaced)
        read_as(PLAN[3:])(top)

    assert pages_of(world.record(mode, work)) == pages_read(world, PLAN)


@needs_erofs
def test_a_killed_recorder_leaves_nothing(world: World) -> None:
    program = """
import sys, time
from dsecfs.layers.digest import Digest
from dsecfs.layers.local import LocalLayers
from dsecfs.mount import mount_env
from dsecfs.mount.record import Recorder
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.directory import DirectoryStore
from pathlib import Path
data, run, store, target, *layers = sys.argv[1:]
dirs = NodeDirs(Path(data), Path(run))
local = LocalLayers(DirectoryStore(store), dirs).ensure_all([Digest(x) for x in layers])
recorder = Recorder.start(dirs, Digest("e" * 64), local)
mount_env(dirs, local[::-1], Path(target), mounts=recorder.mounts())
Path(target, "lib/f1").read_bytes()
print("ready", flush=True)
time.sleep(60)
"""
    target = world.family.top / "mnt"
    target.mkdir()
    arguments: list[object] = [world.dirs.data, world.dirs.run, world.family.top / "store", target]
    arguments += [layer.digest for layer in world.layers]
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        # While it lives nobody clears its recording.
        assert recover_recordings(world.dirs) == []
        process.kill()
    left = [p.name for p in world.dirs.traces.iterdir()]
    (name,) = {n.partition(".")[0] for n in left}
    assert {n.partition(".")[2] for n in left} == {"claim", "json", "log"}
    (world.dirs.traces / f".{name}.4711").write_text("half a descr")
    umount_env(world.dirs, target)
    with Recorder.start(world.dirs, ENV, world.layers) as another:
        assert name not in " ".join(world.leftovers())
        assert {p.name for p in world.dirs.traces.iterdir()} == {
            f"{another.name}.claim",
            f"{another.name}.json",
        }
    assert world.leftovers() == []


def test_the_log_is_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> None:
    expect_log("is full")
    size = fuse_blobs.TRACE_RECORD.size
    monkeypatch.setattr(fuse_blobs, "TRACE_LIMIT", 10 * size)
    monkeypatch.setattr(recording, "TRACE_LIMIT", 10 * size)
    with Recorder.start(world.dirs, ENV, world.layers) as recorder:
        worker = fuse_blobs.Recording(world.dirs.traces, recorder.name)
        for page in range(30):
            worker.record(0, page * PAGE, PAGE)
        log = world.dirs.traces / f"{recorder.name}.log"
        assert log.stat().st_size == 10 * size
        saved = recorder.save(world.store)
        assert saved.truncated and sum(map(len, pages_of(saved.trace).values())) == 10
    # The worker still has the file open: its space is given back all the same.
    assert os.fstat(worker._fd).st_size == 0


@needs_erofs
def test_a_trace_that_the_store_refuses_stays_on_the_node(world: World) -> None:
    denied = FaultyStore(world.store, [Rule("denied", op="put_content")])
    with Recorder.start(world.dirs, ENV, world.layers) as recorder:
        with world.recorded(recorder, "kernel") as top:
            read_as(PLAN)(top)
        saved = recorder.save(denied)
        assert saved.key == "" and saved.kept is not None and "denied" in saved.why_kept
        shutil.rmtree(world.dirs.kept_traces)
        world.dirs.kept_traces.write_text("in the way")
        with pytest.raises(CacheError, match="cannot be kept"):
            recorder.save(denied)
        world.dirs.kept_traces.unlink()
        recorder.save(denied)
    assert load_traces(world.store, ENV) == []
    world.evict()
    assert world.warm()["done"] > 0
    assert world.present() == world.chunks_of(saved.trace)


# -- warming -----------------------------------------------------------------------------


@needs_erofs
def test_warm_brings_what_all_runs_read_and_nothing_else(world: World) -> None:
    one = world.record("kernel", read_as(PLAN[:3]))
    other = world.record("kernel", read_as([("lib/f7", 0, 1, "read"), *PLAN[3:]]))
    world.evict()
    before = world.client.stats()["cache"]
    status = world.warm()
    wanted = world.chunks_of(one, other)
    assert status["error"] == "" and status["done"] == status["total"] == len(wanted)
    assert world.present() == wanted
    after = world.client.stats()["cache"]
    assert after["prefetched"] - before["prefetched"] == len(wanted)
    # What runs now waits for nothing.
    reads = world.client.stats()["fuse"]["waited_reads"]
    with world.mounted() as top:
        read_as(PLAN)(top)
    assert world.client.stats()["fuse"]["waited_reads"] == reads
    # Again: nothing to do. After an eviction: the same chunks.
    requests = world.client.stats()["cache"]["requests"]
    assert world.warm()["total"] == len(wanted)
    assert world.client.stats()["cache"]["requests"] == requests
    world.evict()
    world.warm()
    assert world.present() == wanted


@needs_erofs
def test_damaged_and_hostile_traces_are_left_out(world: World) -> None:
    good = world.record("kernel", read_as(PLAN))
    hostile = [
        b"",
        b"no trace",
        encode_trace(Trace(sha256(b"another"), good.accesses)),
        encode_trace(good)[:-9],
    ]
    for data in hostile:
        world.store.put_content(trace_prefix(ENV) + sha256(data), data)
    # One that reads well and asks for the impossible.
    wild = Trace(
        ENV,
        (
            Access(b"../../etc/passwd", 0, 1 << 62),
            Access(b"lib/f5", (1 << 62) - 1, 1 << 62),
            Access(b"lib", 0, 10),
            Access(b"\xff/\0", 5, 5),
            Access(b"lib/f6", 0, 1 << 62),
        ),
    )
    data = encode_trace(wild)
    world.store.put_content(trace_prefix(ENV) + sha256(data), data)
    world.evict()
    status = world.warm()
    assert status["error"] == ""
    assert world.present() == world.chunks_of(good, Trace(ENV, (Access(b"lib/f6", 0, 1 << 40),)))
    assert world.family.log().count("is left out") == len(hostile)


def test_without_traces_warm_does_nothing_and_without_a_store_it_says_so(world: World) -> None:
    assert world.warm() | {"id": ""} == {
        "id": "", "done": 0, "total": 0, "finished": True, "error": "",
    }  # fmt: skip
    job = world.client.warm(ENV, ["0" * 64])  # type: ignore[list-item]
    failed = wait_for("it", lambda: (s := world.client.prefetch_status(job))["finished"] and s)
    assert "heads/00" in failed["error"]
    assert fuse_device(world.dirs.fs) is not None
    for bad in ({"env": 5, "layers": []}, {"env": ENV, "layers": "x"}, {"env": "x", "layers": []}):
        with pytest.raises(DsecfsError):
            world.client.call("warm", **bad)
