"""Workers and supervisors are killed under checksummed load; readers must notice nothing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys

import pytest

from dsecfs.errors import Busy, MountError, NotFound
from dsecfs.fuse.daemon import ensure_daemon, stop_daemon
from dsecfs.fuse.mountpoint import fuse_device
from dsecfs.kernel.cgroups import hierarchies
from dsecfs.kernel.syscalls import mount
from tests.t4_fuse.fakeworker import content
from tests.t4_fuse.family import Family, Readers, family, wait_for, why_no_resend

pytestmark = pytest.mark.skipif(bool(why_no_resend()), reason=why_no_resend() or "it works")

SIZE = 64 << 20


def test_everybody_is_killed_in_turn() -> None:
    with family() as f:
        digest = f.add_blob("big", SIZE)
        with Readers(f.blob(digest), digest, SIZE) as readers:
            for _ in range(20):
                f.kill_worker()
                readers.check_progress()
            for role in ("active", "worker", "standby", "worker", "active", "active", "worker"):
                gone = f.kill(role)
                wait_for("its end", functools.partial(f.has_lost, gone))
                readers.check_progress()
            status = f.settled()
            assert status["takeovers"] >= 3
            assert status["deaths"] >= 23
        listed = subprocess.run(
            ["ls", "-lR", f.dirs.fs], capture_output=True, text=True, timeout=20, check=True
        )
        assert digest in listed.stdout
        # Numbers given out by the first worker mean the same to the last one.
        assert f.blob(digest).read_bytes()[-100:] == content(digest, SIZE - 100, 100)
        assert "Traceback" not in f.log()


def test_worker_and_active_supervisor_at_once() -> None:
    with family() as f:
        digest = f.add_blob("big", SIZE)
        with Readers(f.blob(digest), digest, SIZE) as readers:
            for _ in range(3):
                s = f.settled()
                os.kill(s["worker"], signal.SIGKILL)
                os.kill(s["active"], signal.SIGKILL)
                readers.check_progress()


def test_a_stopped_supervisor_is_replaced() -> None:
    with family(supervisor_stuck_s=1.0) as f:
        s = f.settled()
        os.kill(s["active"], signal.SIGSTOP)
        wait_for("another one", lambda: f.status()["active"] == s["standby"])
        assert s["active"] not in f.pids()
        assert f.status()["worker"] == s["worker"]


def test_upgrade_under_load() -> None:
    with family() as f:
        digest = f.add_blob("big", SIZE)
        with Readers(f.blob(digest), digest, SIZE) as readers:
            seen = {f.status()["worker"]}
            for _ in range(4):
                seen.add(f.client.restart_worker())
                readers.check_progress()
            assert len(seen) == 5
            os.kill(f.status()["active"], signal.SIGHUP)
            wait_for("another worker", lambda: f.status()["worker"] not in seen)
            # New code that does not start: the old worker goes on.
            before = f.status()["worker"]
            broken = f.flag("wont-start")
            with pytest.raises(MountError, match="did not start"):
                f.client.restart_worker()
            broken.unlink()
            assert f.status()["worker"] == before
        status = f.status()
        assert status["deaths"] == 0
        assert "the new code is broken" in f.log()


def test_nothing_is_left_after_stop() -> None:
    with family() as f:
        digest = f.add_blob("small", 8192)
        f.kill_worker()
        f.kill("active")
        f.settled()
        with f.blob(digest).open("rb") as file:
            assert file.read(10) == content(digest, 0, 10)
            with pytest.raises(Busy):
                stop_daemon(f.config)
            assert file.read(10) == content(digest, 10, 10)
        assert stop_daemon(f.config)
        assert f.pids() == set()
        assert fuse_device(f.dirs.fs) is None
        assert os.listdir(f.dirs.fs) == []
        assert not f.config.control.exists()
        assert sorted(os.listdir(f.dirs.run)) == ["fs", "fs.lock", "fs.log"]
        assert not stop_daemon(f.config)
        with pytest.raises(NotFound):
            f.client.ping()


def test_drain_serves_the_last_user() -> None:
    with family() as f:
        digest = f.add_blob("big", SIZE)
        with f.blob(digest).open("rb", buffering=0) as file:
            os.kill(f.status()["active"], signal.SIGTERM)
            wait_for("detached", lambda: fuse_device(f.dirs.fs) is None)
            f.kill_worker()
            assert os.pread(file.fileno(), 100, SIZE // 2) == content(digest, SIZE // 2, 100)
            with pytest.raises(Busy):
                ensure_daemon(f.config)
        wait_for("everybody's end", lambda: not f.pids())


def test_processes_hold_only_what_is_theirs() -> None:
    with family() as f:
        digest = f.add_blob("big", SIZE)
        for _ in range(2):
            f.kill_worker()
            f.kill("standby")
            f.settled()
        f.blob(digest).read_bytes()
        status = f.settled()

        def descriptors(role: str) -> int:
            return len(os.listdir(f"/proc/{status[role]}/fd"))

        before = {role: descriptors(role) for role in ("active", "standby", "worker")}
        assert before["active"] <= 12, before
        assert before["standby"] <= 10, before
        for _ in range(3):
            f.client.ping()
            f.blob(digest).read_bytes()
        assert descriptors("worker") <= before["worker"] + 1
        used = sum(_private_kb(status[role]) for role in ("active", "standby", "worker"))
        assert used < 150 * 1024, f"{used} KiB"


def _private_kb(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return int(fields["Pss"].split()[0])


def test_one_daemon_per_directory() -> None:
    with family() as f:
        with pytest.raises(Busy):
            f.start()
        assert ensure_daemon(f.config).ping() == f.client.ping()


def test_a_control_group_of_its_own() -> None:
    """All processes leave the groups of who started them, also those that are made later."""
    if not hierarchies():
        pytest.skip("no control groups are mounted here")
    group = f"/dsec-test-{os.getpid()}/fs"
    places = [top / group.lstrip("/") for top in hierarchies()]
    try:
        with family(cgroup=group) as f:
            f.kill_worker()
            lose_supervisors(f)
            f.settled()
            pids = f.pids()
            assert len(pids) == 3
            for place in places:
                assert {int(p) for p in (place / "cgroup.procs").read_text().split()} == pids
            assert stop_daemon(f.config)
            assert not any(place.exists() for place in places)
    finally:
        for place in places:
            with contextlib.suppress(FileNotFoundError):
                place.parent.rmdir()


def test_a_group_that_cannot_be_made_is_no_obstacle() -> None:
    with family(cgroup="/dsec-test-none/a\nb") as f:
        assert "stays in the control group of its caller" in f.log()
    for top in hierarchies():
        with contextlib.suppress(FileNotFoundError):
            (top / "dsec-test-none").rmdir()


def test_stale_mount_is_recovered() -> None:
    with family() as f:
        digest = f.add_blob("small", 8192)
        f.blob(digest).read_bytes()
        f.kill_everybody()
        with pytest.raises(OSError):
            os.listdir(f.dirs.fs)
        f.start()
        assert f.blob(digest).read_bytes() == content(digest, 0, 8192)
        assert "without anybody to serve it" in f.log()
        f.kill_everybody()
        left = f.dirs.run / "fusectl.left"
        left.mkdir()
        mount("fusectl", left, "fusectl", 0)
        assert stop_daemon(f.config)
        assert fuse_device(f.dirs.fs) is None
        assert not stop_daemon(f.config)
        f.start()
        assert not left.exists()


def lose_supervisors(f: Family) -> int:
    """Kill both supervisors so that neither can replace the other; the worker's pid."""
    s = f.settled()
    # Stopped first.
    for role in ("active", "standby"):
        os.kill(s[role], signal.SIGSTOP)
    for role in ("active", "standby"):
        os.kill(s[role], signal.SIGKILL)
    wait_for("their end", lambda: not f.pids() & {s["active"], s["standby"]})
    return int(s["worker"])


def test_a_worker_alone_has_new_supervisors_made() -> None:
    with family() as f:
        digest = f.add_blob("big", SIZE)
        with Readers(f.blob(digest), digest, SIZE) as readers:
            for _ in range(2):
                worker = lose_supervisors(f)
                readers.check_progress()
                s = f.settled()
                assert s["worker"] == worker
                assert s["supervisors"] == 2
                # The new ones are as good as the old ones.
                for role in ("worker", "active", "worker", "standby"):
                    f.kill(role)
                    readers.check_progress()
            f.client.restart_worker()
        assert f.blob(digest).read_bytes()[-100:] == content(digest, SIZE - 100, 100)
        with f.blob(digest).open("rb"), pytest.raises(Busy):
            stop_daemon(f.config)
        assert "Traceback" not in f.log()
        assert stop_daemon(f.config)
        # Somebody else on this machine may just be copying the mount table.
        wait_for("everybody's end", lambda: not f.pids())
        assert sorted(os.listdir(f.dirs.run)) == ["fs", "fs.lock", "fs.log"]


def test_a_worker_alone_can_be_stopped() -> None:
    with family() as f:
        digest = f.add_blob("small", 8192)
        lose_supervisors(f)
        assert f.blob(digest).read_bytes() == content(digest, 0, 8192)
        assert stop_daemon(f.config)
        assert fuse_device(f.dirs.fs) is None


@pytest.mark.parametrize("flags", [0, 1, 2], ids=["plain", "force", "detach"])
def test_unmounting_by_hand_ends_everybody(flags: int) -> None:
    with family() as f:
        digest = f.add_blob("small", 8192)
        f.blob(digest).read_bytes()
        assert ctypes.CDLL(None).umount2(os.fsencode(f.dirs.fs), flags) == 0
        wait_for("everybody's end", lambda: not f.pids())
        assert not f.config.control.exists()
        assert "Traceback" not in f.log()
        f.start()
        assert f.blob(digest).read_bytes() == content(digest, 0, 8192)


def test_in_the_foreground() -> None:
    """For a service manager: one process to watch, ended by one signal to its group."""
    f = Family()
    try:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "dsecfs.fuse.daemon", "--foreground"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert daemon.stdin is not None
        daemon.stdin.write(f.config.to_json().encode())
        daemon.stdin.close()
        wait_for("the mount", lambda: fuse_device(f.dirs.fs))
        assert f.settled()["active"] == daemon.pid
        os.killpg(daemon.pid, signal.SIGINT)
        assert daemon.wait(30) == 0
        assert daemon.stderr is not None
        assert b"serves" in daemon.stderr.read()
        daemon.stderr.close()
        assert not f.pids()
    finally:
        f.remove()


def test_many_starts_at_once() -> None:
    """Of several callers one starts the daemon, all get it."""
    f = Family()
    try:
        code = (
            "import sys; from dsecfs.fuse.config import FsConfig;"
            "from dsecfs.fuse.daemon import ensure_daemon;"
            "print(ensure_daemon(FsConfig.from_json(sys.argv[1])).status()['active'])"
        )
        callers = [
            subprocess.Popen(
                [sys.executable, "-c", code, f.config.to_json()],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        said = {c.communicate(timeout=60)[0] for c in callers}
        assert [c.returncode for c in callers] == [0] * 4
        assert len(said) == 1
    finally:
        f.remove()
