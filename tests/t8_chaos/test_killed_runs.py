"""`dsec run` is killed at random moments, in every mode and with every upper; recovery then
finds all of it: nothing is left that was not there before."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_runtime.cgroups import places
from dsec_runtime.run import Runner, RunSpec
from dsec_runtime.upper import UpperKind
from dsecfs.layers.local import LocalLayer
from dsecfs.store.base import Store
from tests.t5_runtime.conftest import why_no_containers
from tests.t8_chaos.remains import below, loops_of, mounts_of, processes_of
from tests.t8_chaos.stack import HANG_S, Content, Mode, Node, node, publish_shell, why_not

pytestmark = pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers() or "ok")

KILLS = 30
"""In kernel mode; a third of that in the others."""

PROGRAM = """
import json, sys
from pathlib import Path
from dsec_runtime.run import Runner, RunSpec
from dsecfs.layers.local import LocalLayer
from dsecfs.layers.manifest import parse_manifest
from dsecfs.nodedirs import NodeDirs
given = json.loads(sys.argv[1])
dirs = NodeDirs(Path(given["data"]), Path(given["run"]))
layers = tuple(
    LocalLayer(digest, parse_manifest(manifest.encode()), dirs.meta(digest))
    for digest, manifest in given["layers"]
)
spec = RunSpec(layers, tuple(given["args"]), upper=given["upper"])
print("ready", flush=True)
sys.stdin.readline()
with Runner(dirs, mode=given["mode"], cgroup_parent=given["parent"]) as runner:
    runner.recover()
    sys.exit(runner.run(spec).exit_code)
"""


class Killed:
    """A node with a base that has a shell, and the process that will be killed."""

    def __init__(self, n: Node, mode: Mode) -> None:
        self.node = n
        self.mode: Mode = mode
        self.parent = f"/dsec-chaos-{os.getpid()}"
        self.layers: tuple[LocalLayer, ...] = tuple(n.local[::-1])
        self.runner = Runner(n.dirs, mode=mode, cgroup_parent=self.parent)

    def process(self, args: list[str], upper: UpperKind) -> subprocess.Popen[bytes]:
        """Everything imported, nothing begun."""
        given = {
            "data": str(self.node.dirs.data),
            "run": str(self.node.dirs.run),
            "layers": [(la.digest, la.manifest.to_json().decode()) for la in self.layers],
            "args": args,
            "upper": upper,
            "mode": self.mode,
            "parent": self.parent,
        }
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def recover(self) -> None:
        self.runner.recover()
        # What is kept on purpose for the next run goes, too.
        self.runner.mounts.trim(0)
        if self.mode == "fuse":
            self.runner.mounts.trees.trim(0)

    def left(self) -> dict[str, Any]:
        """Everything of ours on this machine, but for the FUSE daemon.

        Network and user namespaces live by processes and by mounts of them, which are here.
        """
        top = self.node.top
        dirs = self.node.dirs
        files = {
            str(path.relative_to(top))
            for place in (dirs.run, dirs.uppers)
            for path in below(place, skip=dirs.fs)
            if not path.name.startswith("fs.")
        }
        groups = {str(p) for place in places(self.parent) for p in place.rglob("*") if p.is_dir()}
        spaces = sorted((dirs.run / "ns").iterdir()) if (dirs.run / "ns").is_dir() else []
        return {
            "files": files,
            "groups": groups,
            "mounts": [mounts_of(top), *(mounts_of(top, space) for space in spaces)],
            "loops": loops_of(top),
            "processes": processes_of(str(top)),
        }


@pytest.fixture
def killed(
    request: pytest.FixtureRequest, top: Path, shared_store: Store, content: Content
) -> Iterator[Killed]:
    mode: Mode = request.param
    if why_not(mode):
        pytest.skip(why_not(mode))
    shell = publish_shell(shared_store, top / "base")
    whole = Content((shell, *content.layers), content.sums, 0)
    with node(top / "node", shared_store, whole, ()) as n:
        made = Killed(n, mode)
        try:
            yield made
        finally:
            made.runner.recover()
            made.recover()
            made.runner.close()
            for place in places(made.parent):
                place.rmdir()


@pytest.mark.parametrize("killed", ["kernel", "loop", "fuse"], indirect=True)
def test_nothing_leaks(killed: Killed) -> None:
    rng = random.Random(8)
    loops = os.path.exists("/dev/loop-control")
    uppers: tuple[UpperKind, ...] = ("disk", "tmpfs", "image") if loops else ("disk", "tmpfs")
    # Once in peace: what is made once per node is made, and how long a run takes is known.
    for upper in uppers:
        spec = RunSpec(killed.layers, ("sh", "-c", "cat /dir0/* /dir1/* > /all"), upper=upper)
        assert killed.runner.run(spec).exit_code == 0
    took = _duration(killed.process(["true"], "disk"))
    killed.recover()
    before = killed.left()
    count = KILLS if killed.mode == "kernel" else KILLS // 3
    ahead = [killed.process(*_work(rng, uppers)) for _ in range(2)]
    caught = started = 0
    try:
        for number in range(count):
            process = ahead.pop(0)
            if number + 2 < count:
                ahead.append(killed.process(*_work(rng, uppers)))
            _go(process)
            # Each begins with recovery of the one before, and may be killed in that.
            time.sleep(rng.uniform(0.0, 1.5 * took))
            caught += process.poll() is None
            started += _runs(killed)
            _end(process)
    finally:
        for process in ahead:
            _end(process)
    assert caught, "they were killed while they worked"
    assert started or killed.mode != "kernel", "some had started their container"
    killed.recover()
    # The kernel ends processes and loop devices a moment later.
    deadline = time.monotonic() + 5
    while (after := killed.left()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    for kind, found in before.items():
        assert after[kind] == found, kind
    assert killed.runner.run(RunSpec(killed.layers, ("true",))).exit_code == 0


def _go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdin.write(b"go\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(HANG_S)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _duration(process: subprocess.Popen[bytes]) -> float:
    """Seconds a run takes that is not killed."""
    _go(process)
    began = time.monotonic()
    assert process.wait(HANG_S) == 0
    took = time.monotonic() - began
    _end(process)
    return took


def _runs(killed: Killed) -> bool:
    """Whether crun knows a container."""
    return bool(list((killed.node.dirs.run / "crun").glob("*")))


def _work(
    rng: random.Random, uppers: tuple[UpperKind, ...]
) -> tuple[list[str], UpperKind]:
    command = rng.choice(
        (
            ["true"],
            ["sleep", "300"],
            ["sh", "-c", "(sleep 300 & sleep 300 &) ; cat /dir0/* > /all; sleep 300"],
        )
    )
    return command, rng.choice(uppers)
