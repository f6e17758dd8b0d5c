"""A node as its users drive it: `dsec` as processes of their own, over a store that may fail.

Everything of a `Machine` is below its `top`; `remove` ends and unmounts whatever is left of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec_runtime.cgroups import places
from dsec_runtime.cgroups import remove as remove_cgroup
from dsecfs.errors import DsecfsError
from dsecfs.fuse.config import node_config
from dsecfs.fuse.control import FsClient
from dsecfs.fuse.daemon import start_daemon
from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.namespaces import unpin_namespaces
from dsecfs.kernel.syscalls import umount
from dsecfs.layers.names import Name
from dsecfs.layers.publish import BlobOptions, Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.mount import LayerMounts
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import Store
from tests.support.cli import Said
from tests.t5_runtime.conftest import APPLETS
from tests.t8_chaos.remains import loops_of, mounts_of, processes_of
from tests.t8_chaos.stack import CHUNK, HANG_S, Node, random_files

ROOT = Path(__file__).resolve().parents[2]
BASE = "base/box:1"


@dataclass(frozen=True)
class Base:
    """BASE in a store: a shell, files, and their sums in /sums."""

    store: str
    files: int


def publish_base(store: Store, place: Path, *, files: int = 25) -> Base:
    """Publish BASE with random files below /dir0. `place` is for scratch, and goes."""
    (place / "bin").mkdir(parents=True)
    shutil.copy("/usr/bin/busybox", place / "bin" / "busybox")
    for applet in (*APPLETS, "sha256sum"):
        (place / "bin" / applet).symlink_to("busybox")
    sums = random_files(place, 0, files, seed=7)
    (place / "sums").write_text("".join(f"{s}  /{name}\n" for name, s in sums.items()))
    source = open_image(f"dir:{place}").layers[0]
    name = Name("base", "box", "1")
    options = BlobOptions(chunk_size=CHUNK)
    publish_source(store, source, name, Meta("base", "linux/amd64"), options=options)
    shutil.rmtree(place)
    return Base(store.url, len(sums))


class Machine(Node):
    """A node on which nothing runs yet."""

    def __init__(
        self, top: Path, store: str, *, data: Path | None = None, **settings: Any
    ) -> None:
        """`settings` are settings of `dsec`."""
        self.top = top
        self.modes = ()
        self.trees = {}
        self.mounts = {}
        self.dirs = NodeDirs(data or top / "data", top / "run")
        kept = {n: v for n, v in os.environ.items() if not n.startswith("DSEC_")}
        self.environ = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "DSEC_CONFIG": "",
            "DSEC_DATA_DIR": str(self.dirs.data),
            "DSEC_RUN_DIR": str(self.dirs.run),
            "DSEC_STORE": store,
            **{f"DSEC_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self.config = node_config(self.dirs, store)
        self.client = FsClient(self.config.control, timeout_s=HANG_S)

    def start_faulty(self, *, cache: dict[str, Any] | None = None, **settings: Any) -> None:
        """Start the daemon over a store that obeys `fault`; commands use it as any other."""
        limits = {"max_bytes": 1 << 30, "min_free": 0, "deadline_s": 20.0, **(cache or {})}
        settings = {"entry": "tests.t8_chaos.faultyworker:main", **settings}
        self.dirs.create()
        self.config = node_config(self.dirs, self.environ["DSEC_STORE"], cache=limits, **settings)
        start_daemon(self.config)

    def popen(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """`dsec WORDS`, with its output in pipes and nothing to read."""
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dsecfs.cli.main", *words],
            stdin=subprocess.DEVNULL,
            env=self.environ,
            text=True,
            **given,
        )

    def __call__(
        self, *words: str, code: int | Sequence[int] = 0, timeout: float = HANG_S
    ) -> Said:
        """Run `dsec WORDS` to its end, which must be `code` (one of them)."""
        process = self.popen(*words)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        said = Said(process.returncode, out, err)
        codes = (code,) if isinstance(code, int) else code
        assert said.code in codes, f"dsec {' '.join(words)}: {said}"
        return said

    def sandboxes(self) -> set[str]:
        """Ids of the sandboxes there are."""
        names = os.listdir(self.dirs.sandboxes) if self.dirs.sandboxes.is_dir() else []
        return {name.removesuffix(".json") for name in names}

    def left(self, sandboxes: Sequence[str] | set[str] = ()) -> dict[str, list[str]]:
        """What is here of containers, and of `sandboxes`, which all have ended; {} if nothing."""
        run, spaces = self.dirs.run, self.dirs.namespace.parent
        pinned = sorted(spaces.iterdir()) if spaces.is_dir() else []
        holders = LayerMounts(self.dirs).mounted().values()
        trees = self.dirs.trees.glob("*.refs/*") if self.dirs.trees.is_dir() else ()
        found = {
            "sandboxes": _names(self.dirs.sandboxes),
            "uppers": [n for n in _names(self.dirs.uppers) if not n.startswith("blank-")],
            "ids": _names(self.dirs.uids),
            "crun": _names(run / "crun"),
            "groups": [str(p) for s in sorted(sandboxes) for p in places(f"/dsec/{s}")],
            "holders": [h for held in holders for g in held for h in g],
            "trees": [str(path) for path in trees],
            "mounts": [
                m
                for space in (None, *pinned)
                for m in mounts_of(self.top, space)
                if not m.startswith(tuple(str(p) for p in (self.dirs.fs, spaces, self.dirs.layers)))
                and (space is None or "overlay" in m.split(" ")[1])
            ],
            "loops": loops_of(self.top),
            "processes": [p for p in processes_of(str(run)) if "dsecfs.fuse" not in p],
        }
        return {kind: what for kind, what in found.items() if what}

    def remove(self) -> None:
        for sandbox in self.sandboxes():
            with contextlib.suppress(DsecfsError):
                remove_cgroup(f"/dsec/{sandbox}")
        unpin_namespaces(self.dirs.namespace.parent)
        self.end_family()
        for mount in reversed(mounts_here()):
            if mount.point.is_relative_to(self.top):
                umount(mount.point, detach=True)
        if self.top.exists():
            shutil.rmtree(self.top)


@contextlib.contextmanager
def machine(top: Path, store: str, **options: Any) -> Iterator[Machine]:
    """A machine; its daemon's log is printed if the test fails."""
    top.mkdir(exist_ok=True)
    made = Machine(top, store, **options)
    try:
        yield made
    except BaseException:
        print(made.log())
        raise
    finally:
        made.remove()


def _names(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.is_dir() else []
