"""All ways of mounting show the same tree: kernel, loop and FUSE mode, on the host and inside of
containers, and what `tar -x` with the kernel's own overlay makes of the same input.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from dsec_runtime.cgroups import places
from dsec_runtime.run import Runner, RunSpec
from dsecfs.errors import MountError
from dsecfs.fuse.config import node_config
from dsecfs.fuse.daemon import ensure_daemon, stop_daemon
from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.namespaces import unpin_namespaces
from dsecfs.kernel.probe import Mode
from dsecfs.kernel.syscalls import mount, umount
from dsecfs.layers.local import LocalLayer, LocalLayers
from dsecfs.layers.publish import Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.mount import LayerMounts, mount_env, umount_env
from dsecfs.mount.fuse import mount_tree, umount_tree
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.directory import DirectoryStore
from tests.support.trees import acl
from tests.t4_fuse.family import why_no_resend
from tests.t4_fuse.layering import CAPABILITY, shown
from tests.t5_runtime.conftest import APPLETS, GROUP, PASSWD, Shell, why_no_containers

_WHY = why_no_containers() or why_no_resend()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY or "-")

MODES: tuple[Mode, ...] = get_args(Mode)
START, COUNT = 1 << 29, 65536
MOUNTED = (b"proc", b"sys", b"dev")
OVERFLOW = 65534


class Stack:
    """A node with a FUSE daemon and three layers that have everything a layer can have."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.dirs = NodeDirs(place / "data", place / "run")
        self.dirs.create()
        self.store = DirectoryStore(place / "store", create=True)
        self.url = f"file:{place / 'store'}"
        self.oracle = place / "oracle"
        layers = self._sources()
        local = LocalLayers(self.store, self.dirs)
        self.layers: tuple[LocalLayer, ...] = tuple(local.ensure_all(layers)[::-1])
        self.config = node_config(self.dirs, self.url, cache={"max_bytes": 1 << 28})
        self.client = ensure_daemon(self.config)

    def _publish(self, spec: str, kind: str) -> Any:
        source = open_image(spec).layers[0]
        return publish_source(self.store, source, None, Meta(kind, "linux/amd64")).digest

    def _sources(self) -> list[Any]:
        base, upper, top = (self.place / name for name in ("base", "upper", "top"))
        _make_base(base)
        archive = self.place / "base.tar"
        options = ["--format=posix", "--acls", "--xattrs", "--xattrs-include=*"]
        subprocess.run(["tar", "-C", base, *options, "-cf", archive, "."], check=True)
        extracted = self.place / "extracted"
        extracted.mkdir()
        subprocess.run(["tar", "-C", extracted, *options, "-xpf", archive], check=True)
        work, merged = self.place / "work", self.place / "merged"
        for path in (upper, work, merged):
            path.mkdir()
        mount(
            *("overlay", merged, "overlay", 0),
            f"lowerdir={extracted},upperdir={upper},workdir={work},xino=on,redirect_dir=off",
        )
        try:
            _change(merged)
        finally:
            umount(merged)
        _make_top(top)
        self.lowers = [top, upper, extracted]
        return [
            self._publish(f"tar:{archive}", "base"),
            self._publish(f"upper:{upper}", "snapshot"),
            self._publish(f"upper:{top}", "snapshot"),
        ]

    @contextlib.contextmanager
    def kernels(self) -> Iterator[Path]:
        """The overlay of the unpacked directories."""
        target = self.place / "kernels"
        target.mkdir(exist_ok=True)
        lowers = ":".join(map(str, self.lowers))
        mount("overlay", target, "overlay", 1, f"lowerdir={lowers},xino=on")
        try:
            yield target
        finally:
            umount(target)

    @contextlib.contextmanager
    def mounted(self, mode: Mode) -> Iterator[Path]:
        """The layers as `dsec mount` mounts them."""
        target = self.place / f"mnt-{mode}"
        target.mkdir(exist_ok=True)
        if mode == "fuse":
            mount_tree(self.dirs, self.layers, target, self.url, cache={"max_bytes": 1 << 28})
            try:
                yield target
            finally:
                umount_tree(self.dirs, target)
            return
        with contextlib.closing(LayerMounts(self.dirs, mode=mode)) as mounts:
            mount_env(self.dirs, self.layers, target, mounts=mounts)
            try:
                yield target
            finally:
                umount_env(self.dirs, target, mounts=mounts)

    @contextlib.contextmanager
    def runner(self, mode: Mode, **settings: Any) -> Iterator[Runner]:
        parent = f"/dsec-modes-{os.getpid()}"
        with Runner(self.dirs, mode=mode, cgroup_parent=parent, **settings) as runner:
            try:
                yield runner
            finally:
                runner.recover()
                for path in places(parent):
                    path.rmdir()
                runner.mounts.trim(0)
                assert all(not held for held in runner.mounts.trees.described().values())

    def close(self) -> None:
        stop_daemon(self.config, mode="force")
        self.store.close()
        unpin_namespaces(self.dirs.namespace.parent)
        for found in reversed(mounts_here()):
            if found.point.is_relative_to(self.place):
                umount(found.point, detach=True)
        shutil.rmtree(self.place)


def _make_base(top: Path) -> None:
    for name in ("bin", "etc", "home/bob", "proc", "sys", "dev", "tmp"):
        (top / name).mkdir(parents=True)
    for name in ("gone/deep", "opaque/old", "covered"):
        (top / name).mkdir(parents=True)
    shutil.copy("/usr/bin/busybox", top / "bin/busybox")
    for applet in APPLETS:
        (top / "bin" / applet).symlink_to("busybox")
    (top / "etc/passwd").write_bytes(PASSWD)
    (top / "etc/group").write_bytes(GROUP)
    (top / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (top / "tmp").chmod(0o1777)
    odd = top / "odd"
    odd.mkdir()
    for raw in (b"\xff\xfe", b"new\nline", b"n" * 255, b" lead", b"-x", b"a:b,c\\d", b".h", b"*"):
        (odd / os.fsdecode(raw)).write_bytes(raw)
    for name in ("gone/file", "gone/deep/file", "opaque/old/file", "kept", "changed", "renamed"):
        (top / name).write_text(name)
    (top / "large").write_bytes(os.urandom(700_001))
    with (top / "sparse").open("wb") as file:
        file.seek(50 << 20)
        file.write(b"end")
    (top / "empty").touch()
    os.link(top / "large", top / "odd/link")
    os.link(top / "kept", top / "home/bob/kept")
    (top / "dangling").symlink_to("/nowhere/\N{SNOWMAN}")
    for name, mode, device in (
        ("fifo", stat.S_IFIFO | 0o640, 0),
        ("char", stat.S_IFCHR | 0o600, os.makedev(1, 3)),
        ("block", stat.S_IFBLK | 0o660, os.makedev(259, 70000)),
        ("socket", stat.S_IFSOCK | 0o755, 0),
    ):
        if name != "socket":  # tar has none
            os.mknod(top / name, mode, device)
    owners = {"bob": (1000, 1001), "last": (65535, 65535), "beyond": (70000, 65536)}
    for name, (uid, gid) in owners.items():
        for mode in (0o4755, 0o2711, 0o600):
            path = top / f"{name}-{mode:o}"
            path.write_text(name)
            os.chown(path, uid, gid)
            path.chmod(mode)
            if mode != 0o600:
                os.setxattr(path, "user.note", name.encode() * 9)
    (top / "acl").mkdir()
    os.setxattr(top / "acl", "system.posix_acl_default", acl(7))
    for name in ("f", "g"):
        (top / "acl" / name).write_text("acl")
    os.setxattr(top / "acl/g", "system.posix_acl_access", acl(0, 1000))
    os.setxattr(top / "acl/f", "system.posix_acl_access", acl(0, 1000, 70000))
    os.setxattr(top / "acl/f", "trusted.secret", b"t")
    for name, value in (
        ("cap2", CAPABILITY),
        ("cap3", b"\x01\0\0\3" + CAPABILITY[4:] + struct.pack("<I", 1000)),
    ):
        shutil.copy("/usr/bin/busybox", top / name)
        os.setxattr(top / name, "security.capability", value)
    for path in (top / "kept", top / "gone", top / "dangling"):
        os.utime(path, ns=(0, 1_234_567_890_123_456_789), follow_symlinks=False)
    os.utime(top / "empty", ns=(0, -86_400_000_000_000))


def _change(top: Path) -> None:
    """What a sandbox might do: the kernel writes the whiteouts and marks."""
    (top / "changed").write_text("new")
    shutil.rmtree(top / "gone")
    shutil.rmtree(top / "opaque")
    (top / "opaque").mkdir()
    (top / "opaque/new").write_text("new")
    (top / "renamed").rename(top / "home/bob/moved")
    (top / "odd/-x").unlink()
    (top / "odd/-x").mkdir()
    (top / "fifo").unlink()
    os.link(top / "empty", top / "linked")
    os.chown(top / "bob-600", 5, 6)
    os.setxattr(top / "acl/f", "user.late", b"1")
    os.removexattr(top / "cap2", "security.capability")
    os.setxattr(top / "cap2", "security.capability", CAPABILITY)


def _make_top(top: Path) -> None:
    (top / "opt/tool").mkdir(parents=True)
    (top / "opt/tool/run").write_text("#!/bin/sh\necho tool\n")
    (top / "opt/tool/run").chmod(0o755)
    (top / "kept").mkdir()  # a directory over a file
    (top / "covered").write_text("a file over a directory")
    os.mknod(top / "linked", stat.S_IFCHR, 0)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    place = Path(os.path.realpath(tempfile.mkdtemp(prefix="dsec-modes-", dir="/var/tmp")))
    made: Stack | None = None
    try:
        made = Stack(place)
        yield made
    finally:
        if made is not None:
            made.close()
        elif place.exists():
            shutil.rmtree(place)


def test_on_the_host(stack: Stack) -> None:
    with stack.kernels() as kernels:
        wanted = shown(kernels, blocks=False)
    assert len(wanted) > 45 + len(APPLETS), "all of it is there"
    for mode in MODES:
        with stack.mounted(mode) as top:
            found = shown(top)
        assert {p for p in wanted if found.get(p) != wanted[p]} == set(), mode
        assert found == wanted, mode


INSIDE = """
import os, pickle, sys
from dsecfs.kernel.syscalls import CLONE_NEWNS, CLONE_NEWUSER, setns, unshare
from tests.t4_fuse.layering import shown
from pathlib import Path
pid = sys.argv[1]
spaces = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("user", "mnt")]
setns(spaces[0], CLONE_NEWUSER)
setns(spaces[1], CLONE_NEWNS)
os.setgroups([])
os.setgid(0)
os.setuid(0)
found = shown(Path("/"), skip=(b"proc", b"sys", b"dev"), blocks=False)
sys.stdout.buffer.write(pickle.dumps(found))
"""


def inside(runner: Runner, layers: tuple[LocalLayer, ...]) -> dict[bytes, tuple[Any, ...]]:
    """What root in a container sees."""
    read, write = os.pipe()
    running = runner.start(RunSpec(layers, ("sh", "-c", "echo x; sleep 60"), stdout=write))
    try:
        assert os.read(read, 10) == b"x\n"
        state = runner.sandboxes.state / running.sandbox / "status"
        deadline = time.monotonic() + 20
        while not state.exists():  # crun writes it when the program runs already
            assert time.monotonic() < deadline
            time.sleep(0.01)
        status = json.loads(state.read_text())
        done = subprocess.run(
            [sys.executable, "-c", INSIDE, str(status["pid"])],
            capture_output=True,
            timeout=60,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr.decode()
        found: dict[bytes, tuple[Any, ...]] = pickle.loads(done.stdout)
        return found
    finally:
        running.stop(signal.SIGKILL, 0)
        running.wait()
        os.close(read)
        os.close(write)


def seen_from_inside(
    host: dict[bytes, tuple[Any, ...]],
) -> dict[bytes, tuple[Any, ...]]:
    """What the host shows as a container with 65,536 ids must show it."""
    out = {}
    for path, found in host.items():
        text, mode, uid, gid, mtime, rdev, size, target, xattrs, body, first = found
        if path in MOUNTED or path.startswith(tuple(name + b"/" for name in MOUNTED)):
            continue
        kept = []
        for name, value in xattrs:
            if name.startswith(b"trusted."):
                continue
            if name.startswith(b"system.posix_acl"):
                entries = []
                for tag, permissions, number in struct.iter_unpack("<HHI", value[4:]):
                    inside = number if tag not in (2, 8) or number < COUNT else 2**32 - 1
                    entries.append(struct.pack("<HHI", tag, permissions, inside))
                value = value[:4] + b"".join(entries)
            kept.append((name, value))
        unmapped = uid >= COUNT or gid >= COUNT
        if unmapped and not int(mode, 8) & 0o004 and text[0] == "-":
            body, kept = b"refused", [(b"refused", b"")] if kept else []
        ids = [number if number < COUNT else OVERFLOW for number in (uid, gid)]
        out[path] = (text, mode, *ids, mtime, rdev, size, target, tuple(kept), body, first)
    return out


def test_inside_of_containers(stack: Stack) -> None:
    with stack.mounted("kernel") as top:
        host = seen_from_inside(shown(top))
    for mode in MODES:
        with stack.runner(mode, first_uid=START, uid_ranges=1) as runner:
            found = inside(runner, stack.layers)
        assert {p for p in host if found.get(p) != host[p]} == set(), mode
        assert found == host, mode


SCRIPT = """
set -e
echo more >> /changed; cat /changed
mv /opt/tool/run /opt/run; /opt/run
ln /large /large2; stat -c '%h %s' /large2; echo x >> /large2; tail -c 2 /large
chown bob:staff /acl/g; stat -c '%u:%g %a' /acl/g
rm -r /acl /opaque; mkdir /acl; ls -a /acl
chmod 700 /home/bob; rm -r /home/bob/moved; ls /home/bob
stat -c '%u:%g %a %F %t %T' /beyond-4755 /char /block
cat /beyond-600 2>&1 || true
test ! -e /gone && test ! -e /fifo && echo gone
"""


def test_writing_in_containers(stack: Stack) -> None:
    said = {}
    for mode in MODES:
        with stack.runner(mode) as runner:
            said[mode] = Shell(runner, *stack.layers).sh(SCRIPT)
    assert len(set(said.values())) == 1, said
    assert "new\nmore" in said["kernel"] or "newmore" in said["kernel"]
    assert "65534:65534 4755 regular file" in said["kernel"]


# -- FUSE mode -----------------------------------------------------------------------------


def trees(stack: Stack) -> set[str]:
    return {p.name for p in stack.dirs.trees.iterdir() if p.name.startswith("own-")}


def test_a_tree_is_used_again_with_its_range(stack: Stack) -> None:
    with stack.runner("fuse") as runner:
        trees_ = runner.mounts.trees
        trees_.trim(0)
        for _ in range(3):
            assert Shell(runner, *stack.layers).sh("id -u; cat /changed") == "0\nnew"
        (name,) = trees_.described()
        assert trees_.described() == {name: []}
        spec = RunSpec(stack.layers, ("sleep", "60"))
        first, second = runner.start(spec), runner.start(spec)
        held = trees_.described()
        assert len(held) == 2 and held[name] in ([first.sandbox], [second.sandbox])
        assert trees_.trim(0) == 0, "none is idle"
        for one in (first, second):
            one.stop(signal.SIGKILL, 0)
            one.wait()
    with stack.runner("fuse") as again:
        before = set(again.mounts.trees.described())
        Shell(again, *stack.layers).sh("true")
        assert set(again.mounts.trees.described()) == before == set(held), "by another process, too"
        assert again.mounts.trees.trim(1) == 1
        again.mounts.trees.trim(0)
    assert trees(stack) == set()


def test_recovery_of_a_killed_process(stack: Stack) -> None:
    with stack.runner("fuse") as runner:
        layers = stack.layers
        program = """
import os, pickle, sys
from pathlib import Path
from dsec_runtime.run import Runner, RunSpec
from dsecfs.nodedirs import NodeDirs
dirs, layers, parent = pickle.loads(sys.stdin.buffer.read())
runner = Runner(dirs, mode="fuse", cgroup_parent=parent)
runner.start(RunSpec(layers, ("sleep", "60"), stdout=-3, stderr=-3))
print("ready", flush=True)
os.kill(os.getpid(), 9)
"""
        given = pickle.dumps((stack.dirs, layers, runner.sandboxes.cgroup_parent))
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=given,
            capture_output=True,
            timeout=60,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        assert done.stdout == b"ready\n", done.stderr.decode()
        (holders,) = runner.mounts.trees.described().values()
        assert len(holders) == 1
        # Another mode's run clears it, too.
        with stack.runner("kernel") as other:
            assert other.recover() == holders
        assert list(runner.mounts.trees.described().values()) == [[]]
        assert os.listdir(stack.dirs.uppers) == []
        ref = stack.dirs.trees / f"{next(iter(runner.mounts.trees.described()))}.refs" / "lost"
        ref.write_bytes(b"/no/such/record")
        assert runner.mounts.trees.recover() == ["lost"]
        runner.mounts.trees.trim(0)


def test_workers_die_under_a_container(stack: Stack, tmp_path: Path) -> None:
    script = "while true; do cat /large /sparse /opt/tool/run > /dev/null || exit 9; done"
    drop = Path("/proc/sys/vm/drop_caches")
    with stack.runner("fuse") as runner:
        running = runner.start(RunSpec(stack.layers, ("sh", "-c", script), timeout_s=3.0))
        killed = threading.Event()

        def kill() -> None:
            for _ in range(3):
                drop.write_text("3")
                before = stack.client.status()
                os.kill(before["worker"], signal.SIGKILL)
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline:
                    with contextlib.suppress(Exception):
                        if stack.client.status()["generation"] > before["generation"]:
                            break
                    time.sleep(0.01)
            killed.set()

        thread = threading.Thread(target=kill)
        thread.start()
        result = running.wait()
        thread.join(60)
        assert killed.is_set() and result.timed_out
        assert result.exit_code == 143, "ended by us, and not for want of a file"
        runner.mounts.trees.trim(0)


def test_without_the_daemon(stack: Stack) -> None:
    empty = NodeDirs(stack.dirs.data, stack.place / "run2")
    empty.create()
    with Runner(empty, mode="fuse") as runner:
        try:
            with pytest.raises(MountError, match="does not show it; dsec fs start"):
                runner.run(RunSpec(stack.layers, ("true",)))
            assert runner.sandboxes.all() == []
        finally:
            unpin_namespaces(empty.namespace.parent)
