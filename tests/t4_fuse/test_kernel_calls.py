"""System calls, namespaces, loop devices and the probe, against the running kernel."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecfs.errors import Busy, Conflict, DeadlineExceeded, MountError
from dsecfs.kernel import probe as probing
from dsecfs.kernel.loop import attach_loop
from dsecfs.kernel.mountinfo import mount_at, mounts_here, parse
from dsecfs.kernel.namespaces import (
    IdRange,
    NamespaceThread,
    enter_namespace,
    is_pinned,
    new_private_namespace,
    pin_namespace,
    prune_mounts,
    unpin_namespaces,
    user_namespace,
)
from dsecfs.kernel.syscalls import (
    FsContext,
    closing,
    idmap_mount,
    mount,
    move_mount,
    open_in_root,
    open_tree,
    pidfd_open,
    pidfd_send_signal,
    umount,
)
from dsecfs.locks import Claim, locked_file, read_claim
from tests.support.mounts import needs_erofs

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dsec-kernel-", dir="/var/tmp") as name:
        path = Path(os.path.realpath(name))
        try:
            yield path
        finally:
            unpin_namespaces(path / "ns")
            for found in reversed(mounts_here()):
                if found.point.is_relative_to(path):
                    umount(found.point, detach=True)


# -- system calls ----------------------------------------------------------------------


@root_only
def test_errors_have_the_kernels_words() -> None:
    with FsContext("overlay", "mount the test") as fs:
        with pytest.raises(MountError, match=r"mount the test: nonsense=x: .*[Uu]nknown") as e:
            fs.set("nonsense", "x")
    assert e.value.errno == errno.EINVAL
    with pytest.raises(MountError, match="this kernel has no nosuchfs") as e:
        FsContext("nosuchfs", "mount the test")
    assert "dsec doctor" in e.value.hint


@root_only
def test_attach_busy_and_unmount(place: Path) -> None:
    target = place / "t"
    target.mkdir()
    with FsContext("tmpfs", "test") as fs:
        fs.set("size", "1m")
        with closing(fs.mount()) as fd:
            move_mount(fd, target)
    assert mount_at(target) is not None
    with (target / "f").open("wb"), pytest.raises(Busy, match="unmount"):
        umount(target)
    assert umount(target)
    assert not umount(target), "nothing is mounted there any more"
    assert not umount(place / "missing")


@root_only
def test_unmount_follows_no_link(place: Path) -> None:
    target = place / "t"
    target.mkdir()
    mount("test", target, "tmpfs", 0)
    (place / "link").symlink_to(target)
    assert not umount(place / "link")
    assert mount_at(target) is not None


@root_only
def test_what_cannot_be_idmapped_says_so() -> None:
    with closing(open_tree("/proc")) as clone, closing(user_namespace(IdRange(1 << 29, 10))) as ns:
        with pytest.raises(MountError, match="cannot be id-mapped"):
            idmap_mount(clone, ns)


def test_open_in_root_cannot_leave(place: Path) -> None:
    (place / "root" / "etc").mkdir(parents=True)
    (place / "secret").write_text("outside")
    (place / "root" / "secret").write_text("inside")
    (place / "root" / "up").symlink_to("../../../../secret")
    (place / "root" / "abs").symlink_to("/secret")
    (place / "root" / "magic").symlink_to("/proc/self/root")
    with closing(os.open(place / "root", os.O_PATH)) as root:
        for path in ("up", "abs", "/secret", "../../secret", "etc/../../secret"):
            with closing(open_in_root(root, path, os.O_RDONLY)) as fd:
                assert os.read(fd, 10) == b"inside", path
        with pytest.raises(OSError, match="magic"):
            open_in_root(root, "magic")


def test_pidfds() -> None:
    process = subprocess.Popen(["sleep", "60"])
    pidfd = pidfd_open(process.pid)
    assert pidfd is not None
    with closing(pidfd):
        import signal

        assert pidfd_send_signal(pidfd, signal.SIGKILL)
        assert process.wait(10) == -9
        assert not pidfd_send_signal(pidfd, signal.SIGKILL)
    assert pidfd_open(process.pid) is None


def test_mountinfo_is_unescaped() -> None:
    line = b"36 35 98:0 / /mnt\\040a\\011b\\134c rw,noatime shared:1 - ext3 /dev/root rw\n"
    (found,) = parse(line + b"garbage\n\n")
    assert found.point == Path("/mnt a\tb\\c")
    assert (found.mount_id, found.device, found.fstype) == (36, "98:0", "ext3")


# -- namespaces ------------------------------------------------------------------------


@root_only
def test_a_pinned_namespace_outlives_its_maker_and_is_private(place: Path) -> None:
    pinned = place / "ns" / "one"
    inside, outside = place / "inside", place / "outside"
    for path in (inside, outside):
        path.mkdir()
    mount("shared", outside, "tmpfs", 0)
    mount("none", outside, "", 1 << 20)  # MS_SHARED: even what propagates does not get in
    (outside / "sub").mkdir()
    assert pin_namespace(pinned, lambda: prune_mounts([place, Path("/proc")]))
    assert not pin_namespace(pinned, lambda: None), "it is there already"
    assert is_pinned(pinned)

    thread = NamespaceThread(lambda: enter_namespace(pinned), "test")
    try:
        thread.call(lambda: mount("test", inside, "tmpfs", 0))
        assert mount_at(inside) is None
        mount("late", outside / "sub", "tmpfs", 0)
        seen = thread.call(mounts_here)
    finally:
        thread.close()
    points = {m.point for m in seen}
    assert {inside, Path("/"), Path("/proc")} <= points
    assert outside not in points and outside / "sub" not in points, "pruned, and stays so"
    assert Path("/dev/shm") not in points

    again = NamespaceThread(lambda: enter_namespace(pinned), "test")
    assert inside in {m.point for m in again.call(mounts_here)}, "mounts stay without a process"
    again.close()
    unpin_namespaces(place / "ns")
    assert not is_pinned(pinned) and not (place / "ns").exists()
    unpin_namespaces(place / "ns")


@root_only
def test_makers_of_a_namespace_race(place: Path) -> None:
    made: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda: made.append(pin_namespace(place / "ns" / "x", lambda: None))
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(made) == [False] * 5 + [True]


@root_only
def test_a_failed_preparation_pins_nothing(place: Path) -> None:
    def fail() -> None:
        raise MountError("not today")

    with pytest.raises(MountError, match="not today"):
        pin_namespace(place / "ns" / "x", fail)
    assert not is_pinned(place / "ns" / "x")
    assert pin_namespace(place / "ns" / "x", lambda: None)


@root_only
def test_calls_in_a_thread_return_raise_and_time_out() -> None:
    thread = NamespaceThread(new_private_namespace, "test")
    assert thread.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    with pytest.raises(DeadlineExceeded, match="test: no answer"):
        thread.call(lambda: time.sleep(0.5), timeout_s=0.01)
    assert thread.call(lambda: 8) == 8
    thread.close()
    here = os.readlink("/proc/thread-self/ns/mnt")
    assert here == os.readlink("/proc/self/ns/mnt"), "the caller never moved"


@root_only
def test_user_namespaces_map(place: Path) -> None:
    with closing(user_namespace(IdRange(600_000_000, 65536))) as fd:
        with closing(open_tree(place)) as clone:
            (place / "f").touch()
            os.chown(place / "f", 5, 6)
            try:
                idmap_mount(clone, fd)
            except MountError as e:
                pytest.skip(f"the file system of {place} cannot be id-mapped: {e}")
            info = os.stat("f", dir_fd=clone)
            assert (info.st_uid, info.st_gid) == (600_000_005, 600_000_006)


# -- loop devices and the probe --------------------------------------------------------


@root_only
@pytest.mark.skipif(not os.path.exists("/dev/loop-control"), reason="no loop devices here")
@pytest.mark.parametrize("direct_io", [False, True])
def test_loop_devices(place: Path, direct_io: bool) -> None:
    data = os.urandom(8192)
    (place / "f").write_bytes(data)
    device = attach_loop(place / "f", direct_io=direct_io)
    name = os.readlink(f"/proc/self/fd/{device}").rpartition("/")[2]
    backing = Path("/sys/block", name, "loop", "backing_file")
    try:
        assert os.pread(device, 8192, 0) == data
        assert backing.read_text().strip() == str(place / "f")
        assert Path("/sys/block", name, "ro").read_text().strip() == "1"
    finally:
        os.close(device)
    deadline = time.monotonic() + 10
    while backing.exists() and backing.read_text().startswith(str(place)):
        assert time.monotonic() < deadline, "the device clears itself"
        time.sleep(0.01)
    with pytest.raises(MountError, match="loop device"):
        attach_loop(place / "missing", direct_io=False)


@needs_erofs
def test_the_probe_finds_what_the_quick_look_claims(place: Path) -> None:
    before = mounts_here()
    info = probing.probe(place)
    mode, reason = probing.quick_mode()
    assert info.best_mode() == mode, (info.reasons, reason)
    assert info.root and info.release == os.uname().release
    if mode == "kernel":
        assert info.erofs_file and info.erofs_idmap and info.overlay
        assert info.overlay_append == (probing.version() >= probing.OVERLAY_APPEND_VERSION)
        assert "kernel" not in info.reasons
    if os.path.exists("/dev/fuse"):
        assert info.fuse_minor is not None and info.fuse_minor >= 31
    assert os.listdir(place) == []
    ours = [m for m in mounts_here() if m not in before and "dsec-probe" in str(m.point)]
    assert ours == []


def test_quick_mode_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(probing, "filesystems", lambda: frozenset({"erofs", "overlay"}))
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    for version, mode in (
        ((6, 18), "kernel"),
        ((6, 12), "kernel"),
        ((6, 11), "loop"),
        ((5, 19), "loop"),
        ((5, 18), "fuse"),
        ((5, 10), "fuse"),
    ):
        monkeypatch.setattr(probing, "version", lambda version=version: version)
        assert probing.quick_mode()[0] == mode, version
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.setattr(probing, "version", lambda: (6, 1))
    assert probing.quick_mode()[0] == "fuse" and "loop driver" in probing.quick_mode()[1]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert probing.quick_mode()[0] == "fuse" and "root" in probing.quick_mode()[1]


@needs_erofs
def test_a_file_system_that_is_not_loaded_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for a file system, the kernel loads its module; only then it is missing."""
    best = probing.quick_mode()
    monkeypatch.setattr(probing, "filesystems", lambda: frozenset({"tmpfs"}))
    assert probing.quick_mode() == best

    def ask(fstype: str, what: str) -> FsContext:
        return FsContext("nosuchfs" if fstype == "erofs" else fstype, what)

    monkeypatch.setattr(probing, "FsContext", ask)
    mode, why = probing.quick_mode()
    assert mode == "fuse" and why.endswith("has no erofs")


def children() -> set[str]:
    """Children of this process, dead ones too. Servers of other tests may be among them."""
    found: set[str] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        found |= set(path.read_text().split())
    return found


@root_only
def test_user_namespaces_in_a_process_with_busy_threads() -> None:
    before = children()
    stop = threading.Event()
    threads = [threading.Thread(target=lambda: sum(iter(stop.is_set, True))) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(5):
            with closing(user_namespace(IdRange(1 << 29, 100 + number))) as fd:
                assert os.readlink(f"/proc/self/fd/{fd}").startswith("user:")
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    assert children() <= before
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@root_only
def test_a_range_that_cannot_be_mapped_leaves_no_child() -> None:
    before = children()
    with pytest.raises(MountError, match="uid_map"):
        user_namespace(IdRange(0xFFFFFFFF, 10))
    assert children() <= before


# -- locks -----------------------------------------------------------------------------


def test_claims_end_with_their_process(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    child = os.fork()
    if child == 0:
        Claim.make(path, {"who": "child"})
        time.sleep(60)
        os._exit(0)
    try:
        deadline = time.monotonic() + 10
        while not path.exists() or not path.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert Claim.take(path) is None, "its maker lives"
        with pytest.raises(Conflict):
            Claim.make(path, {})
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    claim = Claim.take(path)
    assert claim is not None and claim.read() == {"who": "child"}
    assert Claim.take(path) is None, "it is ours now"
    claim.release()
    assert not path.exists()
    claim.release()
    assert Claim.take(path) is None


def test_claims_are_rewritten_and_survive_garbage(tmp_path: Path) -> None:
    claim = Claim.make(tmp_path / "c", {"a": "a long value"})
    claim.write({"b": 1})
    assert claim.read() == {"b": 1}
    claim.close()
    (tmp_path / "c").write_text("{nonsense")
    again = Claim.take(tmp_path / "c")
    assert again is not None and again.read() == {}
    again.release()


def test_a_claim_taken_for_a_dead_one_s_is_made_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody recovers just between the two steps of `make`: he removes the new file."""
    path = tmp_path / "claim"
    taken: list[Claim] = []
    real = fcntl.flock
    clearing: list[threading.Thread] = []

    def flock(fd: int, how: int) -> None:
        if not taken:
            with path.open("rb") as file:
                other = os.dup(file.fileno())
            real(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken.append(Claim(path, other))
            clearing.append(threading.Timer(0.05, taken[0].release))
            clearing[0].start()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    claim = Claim.make(path, {"who": "maker"})
    clearing[0].join()
    assert read_claim(path) == {"who": "maker"}
    assert Claim.take(path) is None
    claim.release()


def test_a_claim_that_cannot_be_written_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fds = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            Claim.make(tmp_path / "claim", {})
    assert not (tmp_path / "claim").exists()
    assert set(os.listdir("/proc/self/fd")) == fds
    Claim.make(tmp_path / "claim", {}).release()


def test_lock_files_exclude_and_give_up(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    inside = 0
    most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(30):
            with locked_file(path, "test"):
                inside += 1
                most = max(most, inside)
                time.sleep(0.0005)
                inside -= 1
                path.unlink()  # who holds it may: waiters start again

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == 1
    with locked_file(path, "test"), pytest.raises(Busy, match="other: locked"):
        with locked_file(path, "other", wait_s=0.05):
            pass
