"""Directory and overlay-upper sources against the file system and the kernel's overlay."""

from __future__ import annotations

import ctypes
import io
import os
import random
import shutil
import socket
import stat
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsecfs.errors import BadInput, DsecfsError, UnsafeArchive, Unsupported
from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.merge import LayerTree, merge
from dsecfs.layers.sources.base import Limits, Segment, align_segments, at_prefix
from dsecfs.layers.sources.directory import read_directory
from dsecfs.layers.sources.tar import read_tar
from dsecfs.layers.sources.upper import IdRange, read_upper
from dsecfs.layers.tree import Inode
from tests.t3_layers.disktree import difference, disk_listing
from tests.t3_layers.memsink import MemorySink, listing
from tests.t3_layers.test_merge import kernel
from tests.t3_layers.test_sources_tar import add_xattrs, get, populate, root_only

libc = ctypes.CDLL(None, use_errno=True)
MS_BIND = 4096


def check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.fixture
def mounts() -> Iterator[Callable[..., None]]:
    """mount(source, target, type, flags, options); everything is unmounted at the end."""
    made: list[Path] = []

    def mount(source: str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
        check(libc.mount(source.encode(), bytes(target), kind.encode(), flags, options.encode()))
        made.append(target)

    try:
        yield mount
    finally:
        for target in reversed(made):
            check(libc.umount2(bytes(target), 0))


@root_only
def test_same_as_the_directory(tmp_path: Path) -> None:
    populate(tmp_path)
    add_xattrs(tmp_path)
    os.setxattr(tmp_path / "long-soft", "trusted.on-a-link", b"x", follow_symlinks=False)
    sink = MemorySink()
    tree = read_directory(str(tmp_path), sink)
    assert tree.notes == () and tree.self_contained
    assert difference(listing(tree.root, sink), disk_listing(str(tmp_path))) == []
    assert len(sink.data) < 4_500_000 and get(tree.root, "all-hole").extents == ()
    again = MemorySink()
    read_directory(str(tmp_path), again)
    assert again.data == sink.data


@root_only
def test_the_same_tree_gives_the_same_layer_whatever_the_order_on_disk(tmp_path: Path) -> None:
    names = [f"{d}/{n}" for d in "abc" for n in range(20)]
    found = []
    for seed in (1, 2):
        top = tmp_path / str(seed)
        random.Random(seed).shuffle(names)
        for name in names:
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(name)
            os.utime(top / name, ns=(0, 0))
        for d in (top / "a", top / "b", top / "c", top):
            os.utime(d, ns=(0, 0))
        sink = MemorySink()
        found.append((listing(read_directory(str(top), sink).root, sink), sink.data))
    assert found[0] == found[1]


def test_owner_and_prefix(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir(mode=0o711)
    (tmp_path / "bin/dsh").write_bytes(b"#!")
    if os.geteuid() == 0:
        os.chown(tmp_path / "bin/dsh", 1000, 1000)
    sink = MemorySink()
    tree = at_prefix(read_directory(str(tmp_path), sink, root_owned=True), b"/opt//dsh/")
    dsh = get(tree.root, "opt/dsh/bin/dsh")
    assert (dsh.uid, dsh.gid) == (0, 0) and sink.content(dsh) == b"#!"
    assert get(tree.root, "opt/dsh/bin").mode & 0o777 == 0o711
    assert tree.implied == {tree.root, get(tree.root, "opt")}
    assert at_prefix(tree, b"/").root is tree.root
    with pytest.raises(BadInput, match=r"'\.\.'"):
        at_prefix(tree, b"../x")


def test_sockets_are_left_out_with_a_note(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "s"))
        tree = read_directory(str(tmp_path), MemorySink())
    assert tree.root.children == {} and "/s: a socket" in tree.notes[0]


@root_only
def test_mount_points_are_left_empty(tmp_path: Path, mounts: Callable[..., None]) -> None:
    top = tmp_path / "top"
    for name in ("proc", "bind", "own"):
        (top / name).mkdir(parents=True)
    (top / "own/file").write_bytes(b"x")
    mounts("proc", top / "proc", "proc")
    mounts(str(top / "own"), top / "bind", "", MS_BIND)
    tree = read_directory(str(top), MemorySink())
    assert get(tree.root, "proc").children == {} == get(tree.root, "bind").children
    assert get(tree.root, "own/file").size == 1
    assert [n.partition(": ")[2][:13] for n in tree.notes] == ["a mount point", "a mount point"]


@root_only
def test_mounts_are_crossed_when_asked(tmp_path: Path, mounts: Callable[..., None]) -> None:
    (tmp_path / "m").mkdir()
    mounts("none", tmp_path / "m", "tmpfs")
    (tmp_path / "m/file").write_bytes(b"x")
    assert get(read_directory(str(tmp_path), MemorySink()).root, "m").children == {}
    tree = read_directory(str(tmp_path), MemorySink(), cross_mounts=True)
    assert get(tree.root, "m/file").size == 1


def test_deep_trees_need_few_descriptors(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    try:
        top = str(tmp_path)
        root = read_directory(top, MemorySink()).root
        assert get(root, "d/" * 1000 + "f").is_reg
        with pytest.raises(UnsafeArchive, match="deeper than 999"):
            read_directory(top, MemorySink(), limits=Limits(depth=999))
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


class Meddling(MemorySink):
    """Does something to the tree in the middle of the data of the first file."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def add(self, stream: Any, size: int) -> Any:
        first = stream.read(1)
        self.act()

        class Rest:
            def read(self, n: int) -> bytes:
                nonlocal first
                data, first = first, b""
                return data or bytes(stream.read(n))

        return super().add(Rest(), size)


@pytest.mark.parametrize("change", ["grow", "shrink", "overwrite", "directory to symlink"])
def test_a_change_while_reading_is_an_error(change: str, tmp_path: Path) -> None:
    top, secret = tmp_path / "top", tmp_path / "secret"
    (top / "z").mkdir(parents=True)
    (top / "z/passwd").write_bytes(b"ours")
    secret.mkdir()
    (secret / "passwd").write_bytes(b"secret")
    file = top / "zz"  # read after `z` was listed, and before it is opened
    file.write_bytes(b"x" * 3_000_000)
    os.utime(file, ns=(0, 0))

    def act() -> None:
        if change == "directory to symlink":
            shutil.rmtree(top / "z")
            os.symlink(secret, top / "z")
        elif change == "shrink":
            os.truncate(file, 10)
        else:
            with open(file, "r+b") as f:
                f.seek(0, os.SEEK_END if change == "grow" else os.SEEK_SET)
                f.write(b"y")

    name = "z" if change == "directory to symlink" else "zz"
    sink = Meddling(act)
    with pytest.raises(BadInput, match=f"top/{name}: it changed while"):
        read_directory(str(top), sink)
    assert b"secret" not in sink.data


def test_whiteout_devices_and_marks_are_not_taken_from_a_plain_directory(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to make a device")
    (tmp_path / "d").mkdir()
    os.setxattr(tmp_path / "d", "trusted.overlay.opaque", b"y")
    tree = read_directory(str(tmp_path), MemorySink())
    assert not get(tree.root, "d").opaque
    assert get(tree.root, "d").xattrs == {b"trusted.overlay.overlay.opaque": b"y"}
    os.mknod(tmp_path / "w", stat.S_IFCHR, 0)
    with pytest.raises(UnsafeArchive, match="/w: a character device 0:0.*upper:"):
        read_directory(str(tmp_path), MemorySink())


def in_child(uid: int, act: Callable[[], str]) -> str:
    """What `act` says when run by another user, in a child process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = "it raised something else"
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            said = act()
        except (DsecfsError, OSError) as e:
            said = f"{type(e).__name__}: {e}"
        finally:
            os.write(write, said.encode()[:4000])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        said = f.read().decode()
    os.waitpid(pid, 0)
    return said


@root_only
def test_without_root() -> None:
    # Not below pytest's own directory, which another run may close to others at any time.
    with tempfile.TemporaryDirectory(prefix="dsec-test-") as made:
        os.chmod(made, 0o755)
        top = Path(made) / "top"
        top.mkdir()
        populate(top)
        want = disk_listing(str(top), xattrs=False)

        def read() -> str:
            sink = MemorySink()
            root = read_directory(str(top), sink).root
            return repr(difference(listing(root, sink), want))

        assert in_child(65534, read) == "[]"
        (top / "dir/file").chmod(0)
        assert "dir/file: cannot read it: Permission denied" in in_child(65534, read)


# Uppers.


def age(top: Path) -> None:
    for path in [top, *top.rglob("*")]:
        os.utime(path, ns=(0, 10**18), follow_symlinks=False)


def make_lower(lower: Path) -> None:
    for name in ("keep", "wiped", "renamed", "gone"):
        (lower / name / "sub").mkdir(parents=True)
        (lower / name / "file").write_bytes(b"lower")
        (lower / name / "sub/file").write_bytes(b"lower sub")
    os.link(lower / "keep/file", lower / "hard")
    age(lower)


def change(merged: Path) -> None:
    (merged / "keep/file").write_bytes(b"changed")
    (merged / "keep/new").write_bytes(b"new" * 5000)
    os.link(merged / "keep/new", merged / "keep/link")
    os.chmod(merged / "keep/sub", 0o700)
    shutil.rmtree(merged / "gone")
    shutil.rmtree(merged / "wiped")
    (merged / "wiped").mkdir()
    (merged / "wiped/only").write_bytes(b"only")
    (merged / "keep/sub/file").unlink()
    os.symlink("nowhere", merged / "keep/sub/file")
    os.mkfifo(merged / "fifo")
    os.setxattr(merged / "keep", "user.note", b"note")


@kernel
@pytest.mark.parametrize("options", ["", ",index=off,metacopy=off,redirect_dir=nofollow"])
def test_upper_is_the_difference(options: str, tmp_path: Path, mounts: Callable[..., None]) -> None:
    lower, upper, work, merged = (tmp_path / n for n in ("lower", "upper", "work", "merged"))
    for path in (lower, upper, work, merged):
        path.mkdir()
    make_lower(lower)
    mounts(
        "overlay",
        merged,
        "overlay",
        0,
        f"lowerdir={lower},upperdir={upper},workdir={work}{options}",
    )
    change(merged)
    want = disk_listing(str(merged))
    low, high = MemorySink(0), MemorySink(0)
    lower_tree = read_directory(str(lower), low)
    upper_tree = read_upper(str(upper), high)
    assert upper_tree.notes == ()
    assert get(upper_tree.root, "gone").is_whiteout and get(upper_tree.root, "wiped").opaque
    whole = merge([LayerTree.of(lower_tree, ["low"]), LayerTree.of(upper_tree, ["high"])])
    sinks = {"low": low, "high": high}

    class Both(MemorySink):
        def content(self, inode: Inode) -> bytes:
            if not inode.extents:
                return b""
            plain = Inode(
                inode.mode,
                size=inode.size,
                extents=tuple(e._replace(blob=0) for e in inode.extents),
            )
            return sinks[whole.blobs[inode.extents[0].blob]].content(plain)

    assert difference(listing(whole.root, Both()), want) == []


@root_only
def test_marks_of_an_upper(tmp_path: Path) -> None:
    for name in ("y", "x", "data"):
        (tmp_path / name).mkdir()
    os.setxattr(tmp_path / "y", "trusted.overlay.opaque", b"y")
    os.setxattr(tmp_path / "y", "trusted.overlay.origin", b"\0\xfb")
    os.setxattr(tmp_path / "y", "trusted.overlay.overlay.opaque", b"y")
    os.setxattr(tmp_path / "x", "trusted.overlay.opaque", b"x")
    (tmp_path / "x/gone").touch()
    os.setxattr(tmp_path / "x/gone", "trusted.overlay.whiteout", b"")
    os.setxattr(tmp_path / "data", "user.overlay.opaque", b"y")
    root = read_upper(str(tmp_path), MemorySink()).root
    assert get(root, "y").opaque and not get(root, "x").opaque and not get(root, "data").opaque
    assert get(root, "x/gone").is_whiteout and get(root, "x/gone").xattrs == {}
    assert get(root, "y").xattrs == {b"trusted.overlay.overlay.opaque": b"y"}
    assert get(root, "data").xattrs == {b"user.overlay.overlay.opaque": b"y"}
    root = read_upper(str(tmp_path), MemorySink(), userxattr=True).root
    assert get(root, "data").opaque and not get(root, "y").opaque
    for mark in ("redirect", "metacopy", "verity"):
        (tmp_path / mark).touch()
        os.setxattr(tmp_path / mark, f"trusted.overlay.{mark}", b"/etc")
        with pytest.raises(Unsupported, match=f"/{mark}: overlay mark 'trusted.overlay.{mark}'"):
            read_upper(str(tmp_path), MemorySink())
        (tmp_path / mark).unlink()


@root_only
def test_ids_are_shifted_everywhere(tmp_path: Path) -> None:
    base = 200_000
    (tmp_path / "f").touch()
    os.chown(tmp_path, base, base)
    os.chown(tmp_path / "f", base + 1000, base + 65535)
    os.symlink("f", tmp_path / "l")
    os.lchown(tmp_path / "l", base, base)
    os.mknod(tmp_path / "w", stat.S_IFCHR, 0)
    capability = struct.pack("<IIIIII", 0x03000001, 1 << 10, 0, 0, 0, base)
    os.setxattr(tmp_path / "f", "security.capability", capability)
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", *entry)
        for entry in (
            (1, 6, 2**32 - 1),
            (2, 4, base + 7),
            (4, 4, 2**32 - 1),
            (16, 4, 2**32 - 1),
            (32, 0, 2**32 - 1),
        )
    )
    os.setxattr(tmp_path / "f", "system.posix_acl_access", acl)
    root = read_upper(str(tmp_path), MemorySink(), ids=IdRange(base)).root
    f = get(root, "f")
    assert (root.uid, f.uid, f.gid, get(root, "l").uid) == (0, 1000, 65535, 0)
    assert get(root, "w").is_whiteout
    assert f.xattrs[b"security.capability"] == struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
    assert struct.pack("<HHI", 2, 4, 7) in f.xattrs[b"system.posix_acl_access"]
    with pytest.raises(
        BadInput, match="/f: id 265535 is outside the sandbox's range 200000\\+1001"
    ):
        read_upper(str(tmp_path), MemorySink(), ids=IdRange(base, 1001))


@root_only
def test_directory_and_its_tar_are_the_same_tree(tmp_path: Path) -> None:
    populate(tmp_path)
    add_xattrs(tmp_path)
    packed = subprocess.run(
        ["tar", "--xattrs", "--xattrs-include=*", "--sparse", "-cC", tmp_path, "."],
        capture_output=True,
        check=True,
    ).stdout
    one, two = MemorySink(), MemorySink()
    ours = listing(read_directory(str(tmp_path), one).root, one)
    assert difference(ours, listing(read_tar(io.BytesIO(packed), two, "a").root, two)) == []


def test_a_fifo_in_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    done = []
    thread = threading.Thread(
        target=lambda: done.append(read_directory(str(tmp_path), MemorySink())), daemon=True
    )
    thread.start()
    thread.join(20)
    assert done and get(done[0].root, "f").mode & 0o170000 == stat.S_IFIFO


def test_a_huge_sparse_file_gets_a_coarse_map(tmp_path: Path) -> None:
    """/var/log/lastlog of a machine with large uids."""
    size = 292 * 10**9
    path = tmp_path / "tree" / "lastlog"
    path.parent.mkdir()
    with path.open("wb") as f:
        f.truncate(size)
        for offset in (0, 292 * 1000, size - 292):
            f.seek(offset)
            f.write(b"x" * 292)
    sink = MemorySink()
    tree = read_directory(str(path.parent), sink)
    inode = (tree.root.children or {})[b"lastlog"]
    assert inode.size == size
    assert len(sink.data) <= 6 << 20
    with path.open("rb") as f:
        for e in inode.extents:
            f.seek(e.logical)
            assert sink.data[e.physical : e.physical + e.length] == f.read(e.length)
    assert len(write_erofs(tree.root, [Device(b"a" * 64, len(sink.data))])) < 4 << 20


def test_a_sparse_map_is_not_widened_to_mostly_zeros() -> None:
    spread = [Segment(i << 27, 1) for i in range(1000)]
    assert sum(s.length for s in align_segments(spread, 1 << 40)) == 4096 * 1000
