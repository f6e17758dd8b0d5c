"""A node, a small base (static busybox) and a Runner whose control groups are the test's own."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsec_runtime.cgroups import places as cgroup_places
from dsec_runtime.run import Runner, RunSpec
from dsec_runtime.running import RunResult
from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.namespaces import unpin_namespaces
from dsecfs.kernel.syscalls import umount
from dsecfs.layers.local import LocalLayer
from tests.support.cli import Dsec
from tests.support.mounts import why_no_erofs
from tests.support.node import Entry, Node, file_inode, node

APPLETS = str.split(
    "cat chmod chown dd echo env false grep head hostname id ip kill ln ls mkdir mknod mount nc "
    "ping ps pwd rm sh sleep stat stty su tail test touch tr true umount unshare wc yes"
)
PASSWD = b"root:x:0:0:root:/root:/bin/sh\nbob:x:1000:1001:Bob:/home/bob:/bin/sh\nodd:x:9:9\n"
GROUP = b"root:x:0:\nbob:x:1001:\nextra:x:50:bob,other\nstaff:x:60:other\n"


def why_no_containers() -> str:
    """What is missing to run containers here; "" if nothing is."""
    if not Path("/usr/bin/busybox").exists():
        return "no static busybox (apt-get install busybox-static)"
    if b"/lib64/ld-linux" in Path("/usr/bin/busybox").read_bytes()[:4096]:
        return "busybox is not static (apt-get install busybox-static)"
    for program in ("crun", "catatonit"):
        if shutil.which(program) is None:
            return f"no {program} (apt-get install {program})"
    return why_no_erofs()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_containers()
    for item in items:
        ours = "t5_runtime" in str(item.path) and "runner" in getattr(item, "fixturenames", ())
        if ours and reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def here() -> Iterator[Node]:
    with node() as made:
        yield made


def base_entries(data: bytearray) -> dict[str, Entry]:
    """What a base needs for sh."""
    entries: dict[str, Entry] = {
        "bin/busybox": file_inode(Path("/usr/bin/busybox").read_bytes(), data),
        "etc/passwd": file_inode(PASSWD, data, 0o644),
        "etc/group": file_inode(GROUP, data, 0o644),
        "home/bob/mine": file_inode(b"bob's\n", data, 0o600, uid=1000, gid=1001),
        "etc/plain": file_inode(b"no program\n", data, 0o644),
    }
    return entries | {f"bin/{name}": "busybox" for name in APPLETS}


@pytest.fixture
def base(here: Node) -> LocalLayer:
    data = bytearray()
    return here.layer(base_entries(data), data)


@pytest.fixture
def runner(here: Node) -> Iterator[Runner]:
    """Checks at the end that nothing is left, then clears what a failed test left."""
    parent = f"/dsec-test-{os.getpid()}"
    with Runner(here.dirs, cgroup_parent=parent) as made:
        yield made
        left = remains(here, made)
        made.recover()
    for place in cgroup_places(parent):
        place.rmdir()
    assert left == {}


def remains(here: Node, runner: Runner) -> dict[str, Any]:
    """What is left of sandboxes; {} if nothing is."""
    sandboxes = runner.sandboxes
    found = {
        "sandboxes": os.listdir(here.dirs.sandboxes) if here.dirs.sandboxes.exists() else [],
        "uppers": [n for n in names(here.dirs.uppers) if not n.startswith("blank-")],
        "crun": names(sandboxes.state),
        "cgroups": [
            str(p / name)
            for p in cgroup_places(sandboxes.cgroup_parent)
            for name in os.listdir(p)
            if (p / name).is_dir()
        ],
        "holders": [h for gens in runner.mounts.mounted().values() for g in gens for h in g],
        "processes": processes_of(here),
        "mounts": [m for m in here.mounts() if not re.search(r"/run/ns(/|$)", m)],
        "loops": [
            str(p)
            for p in Path("/sys/block").glob("loop*/loop/backing_file")
            if p.read_text().startswith(str(here.place))
        ],
    }
    return {key: value for key, value in found.items() if value}


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.exists() else []


def processes_of(here: Node) -> list[str]:
    """Processes of containers: their user ids are in the ranges that are given out."""
    starts = [int(name) for name in names(here.dirs.uids)]
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            uid = os.stat(f"/proc/{pid}").st_uid
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state == "Z":
            continue  # dead, and for the host's init to collect
        if any(start <= uid < start + 65536 for start in starts):
            found.append(f"{pid} {line!r}")
    return found


class Shell:
    """Runs commands in containers and gives what they print."""

    def __init__(self, runner: Runner, *layers: LocalLayer) -> None:
        self.runner = runner
        self.layers = layers

    def run(self, *args: str, stdin: bytes = b"", **fields: Any) -> tuple[RunResult, str, str]:
        """Result, standard output, standard error."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with tempfile.TemporaryFile() as given:
                given.write(stdin)
                given.seek(0)
                spec = RunSpec(
                    self.layers,
                    args,
                    stdin=given.fileno(),
                    stdout=out.fileno(),
                    stderr=err.fileno(),
                    **fields,
                )
                result = self.runner.run(spec)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return result, texts[0], texts[1]

    def sh(self, script: str, **fields: Any) -> str:
        """Standard output of a shell script that must succeed."""
        result, out, err = self.run("sh", "-c", script, **fields)
        assert result.exit_code == 0, f"exit {result.exit_code}: {out}{err}"
        return out


@pytest.fixture
def shell(runner: Runner, base: LocalLayer) -> Shell:
    return Shell(runner, base)


def environment_of(text: str) -> Mapping[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


@pytest.fixture
def dsec(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Dsec]:
    """A node on the disk with a base and a toolkit in its store."""
    place = Path(os.path.realpath(tempfile.mkdtemp(prefix="dsec-cli-", dir="/var/tmp")))
    try:
        made = Dsec(place, capfd, monkeypatch)
        _publish(made)
        yield made
        made("fs", "stop", "--force")
    finally:
        unpin_namespaces(place / "run" / "ns")
        for mount in reversed(mounts_here()):
            if mount.point.is_relative_to(place):
                umount(mount.point, detach=True)
        shutil.rmtree(place)


def _publish(dsec: Dsec) -> None:
    top = dsec.place / "rootfs"
    (top / "bin").mkdir(parents=True)
    (top / "etc").mkdir()
    (top / "home/bob").mkdir(parents=True)
    (top / "tmp").mkdir()
    shutil.copy("/usr/bin/busybox", top / "bin/busybox")
    for applet in APPLETS:
        (top / "bin" / applet).symlink_to("busybox")
    (top / "etc/passwd").write_bytes(PASSWD)
    (top / "etc/group").write_bytes(GROUP)
    dsec("layer", "publish", str(top), "base/box:1")
    tool = dsec.place / "tool/bin"
    tool.mkdir(parents=True)
    (tool / "greet").write_text("#!/bin/sh\necho hello $1\n")
    (tool / "greet").chmod(0o755)
    dsec(
        *("layer", "publish", str(tool.parent), "toolkit/greet:1", "--at", "/opt/greet"),
        *("--path-prepend", "/opt/greet/bin"),
    )
