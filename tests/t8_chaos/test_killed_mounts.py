"""`dsec mount` and `dsec umount` are killed at random moments: recovery finds what they left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.syscalls import umount
from dsecfs.mount import LayerMounts, mount_env, recover_mounts
from dsecfs.mount.environment import mounted_envs, umount_env
from dsecfs.mount.fuse import mount_tree, mounted_trees, recover_trees, umount_tree
from dsecfs.store.base import Store
from tests.t8_chaos.stack import HANG_S, Content, Mode, Node, node, why_not

KILLS: dict[Mode, int] = {"kernel": 20, "loop": 10, "fuse": 6}

PROGRAM = """
import json, sys
from pathlib import Path
from dsecfs.layers.local import LocalLayer
from dsecfs.layers.manifest import parse_manifest
from dsecfs.mount import LayerMounts, mount_env, recover_mounts, umount_env
from dsecfs.mount.fuse import mount_tree, recover_trees, umount_tree
from dsecfs.nodedirs import NodeDirs
given = json.loads(sys.argv[1])
dirs = NodeDirs(Path(given["data"]), Path(given["run"]))
target = Path(given["target"])
layers = [
    LocalLayer(digest, parse_manifest(manifest.encode()), dirs.meta(digest))
    for digest, manifest in given["layers"]
]
print("ready", flush=True)
sys.stdin.readline()
if given["mode"] == "fuse":
    recover_trees(dirs)
    while True:
        mount_tree(dirs, layers, target, given["store"])
        umount_tree(dirs, target)
mounts = LayerMounts(dirs, mode=given["mode"], direct=False)
recover_mounts(dirs, mounts=mounts)
while True:
    mount_env(dirs, layers, target, mounts=mounts)
    umount_env(dirs, target, mounts=mounts)
"""


def start(n: Node, mode: Mode, target: Path) -> subprocess.Popen[bytes]:
    given = {
        "data": str(n.dirs.data),
        "run": str(n.dirs.run),
        "target": str(target),
        "layers": [(la.digest, la.manifest.to_json().decode()) for la in n.local[::-1]],
        "mode": mode,
        "store": n.config.store,
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def left(n: Node, target: Path) -> set[str]:
    """Files of mounts, mounts in the host's namespace, and processes of their own daemons."""
    names = {str(p.relative_to(n.top)) for p in (n.dirs.run / "mounts").rglob("*")}
    names |= {str(p.relative_to(n.top)) for p in n.dirs.trees.glob("*")}
    names |= {
        f"{m.point} {m.fstype}" for m in mounts_here() if m.point.is_relative_to(n.top)
    }
    for layer, generations in LayerMounts(n.dirs).mounted().items():
        names |= {f"{layer} held by {holder}" for held in generations for holder in held}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fds = os.listdir(f"/proc/{pid}/fd")
            links = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in fds}
        except OSError:
            continue
        if any(link.startswith(str(n.dirs.run / "mounts")) for link in links):
            names.add(f"process {pid}")
    return names


@pytest.mark.parametrize("mode", ["kernel", "loop", "fuse"])
def test_nothing_leaks(top: Path, shared_store: Store, content: Content, mode: Mode) -> None:
    if why_not(mode):
        pytest.skip(why_not(mode))
    rng = random.Random(3)
    target = top / "target"
    target.mkdir()
    with node(top / "node", shared_store, content, ()) as n:
        mounts = LayerMounts(n.dirs, mode="kernel" if mode == "fuse" else mode, direct=False)

        def once() -> None:
            """Mounted, seen to be right, unmounted; whatever others left is in nobody's way."""
            if mode == "fuse":
                mount_tree(n.dirs, n.local[::-1], target, n.config.store)
            else:
                mount_env(n.dirs, n.local[::-1], target, mounts=mounts)
            assert sum(1 for _ in target.rglob("*")) == content.entries
            undo()

        def undo() -> None:
            if mode == "fuse":
                umount_tree(n.dirs, target)
            else:
                umount_env(n.dirs, target, mounts=mounts)

        def recover() -> None:
            if mode == "fuse":
                recover_trees(n.dirs)
            else:
                recover_mounts(n.dirs, mounts=mounts)
                mounts.recover()

        once()
        mounts.trim(0)
        before = left(n, target)
        try:
            for _ in range(KILLS[mode]):
                process = start(n, mode, target)
                assert process.stdout is not None and process.stdin is not None
                assert process.stdout.readline() == b"ready\n"
                process.stdin.write(b"go\n")
                process.stdin.flush()
                time.sleep(rng.uniform(0.0, 0.8 if mode == "fuse" else 0.1))
                assert process.poll() is None, "it goes on until it is killed"
                process.kill()
                process.wait(HANG_S)
                process.stdin.close()
                process.stdout.close()
                # A mount that was finished is the user's, who takes it away.
                recover()
                if target in (*mounted_envs(n.dirs), *(t.target for t in mounted_trees(n.dirs))):
                    undo()
            recover()
            mounts.trim(0)
            deadline = time.monotonic() + 10
            while (after := left(n, target)) != before and time.monotonic() < deadline:
                time.sleep(0.05)
                recover()
            assert after == before
            once()
        finally:
            mounts.close()
            while any(m.point == target for m in mounts_here()):
                umount(target, detach=True)
