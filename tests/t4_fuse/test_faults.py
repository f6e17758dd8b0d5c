"""What happens when requests misbehave: stuck, crashing, failing, or without RESEND."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from dsecfs.errors import MountError
from dsecfs.fuse.mountpoint import fuse_device
from tests.t4_fuse.fakeworker import content
from tests.t4_fuse.family import Family, family, wait_for, why_no_fuse, why_no_resend

pytestmark = pytest.mark.skipif(bool(why_no_resend()), reason=why_no_resend() or "it works")

SIZE = 1 << 20
AT = 512 * 1024


def read_at(path: Path, offset: int, size: int = 4096) -> bytes:
    """Past the page cache and without read-ahead."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def errno_at(path: Path, offset: int) -> int:
    with pytest.raises(OSError) as caught:
        read_at(path, offset)
    assert caught.value.errno is not None
    return caught.value.errno


def test_a_request_that_kills_workers_gets_eio() -> None:
    with family() as f:
        digest = f.add_blob("b", SIZE)
        f.flag(f"crash-{AT}")
        assert errno_at(f.blob(digest), AT) == errno.EIO
        status = f.status()
        assert status["deaths"] == 2
        # Its neighbours are served, and it goes on being refused without another death.
        assert read_at(f.blob(digest), 0) == content(digest, 0, 4096)
        assert errno_at(f.blob(digest), AT) == errno.EIO
        assert f.status()["deaths"] == 2


def test_an_innocent_request_beside_it_is_answered() -> None:
    with family() as f:
        digest = f.add_blob("b", SIZE)
        slow = f.flag("slow")
        got: list[bytes] = []
        innocent = threading.Thread(
            target=lambda: got.append(read_at(f.blob(digest), 4096)), daemon=True
        )
        innocent.start()
        wait_for("it waits", lambda: f.client.stats()["fuse"]["waited_reads"] == 1)
        f.flag(f"crash-{AT}")
        assert errno_at(f.blob(digest), AT) == errno.EIO
        slow.unlink()
        innocent.join(20)
        assert got == [content(digest, 4096, 4096)]
        assert f.status()["deaths"] == 2


def test_a_stuck_worker_is_replaced() -> None:
    with family(stuck_s=1.0) as f:
        digest = f.add_blob("b", SIZE)
        f.flag(f"stuck-{AT}")
        assert errno_at(f.blob(digest), AT) == errno.EIO
        assert read_at(f.blob(digest), 0) == content(digest, 0, 4096)
        assert "is stuck" in f.log()
        # The log says where it was stuck.
        assert "read_nowait" in f.log()


def test_an_idle_worker_is_not_taken_for_stuck() -> None:
    with family(stuck_s=0.2) as f:
        before = f.status()["worker"]
        wait_for("time goes by", lambda: f.status()["uptime_s"] > 2)
        assert f.status()["worker"] == before


def test_errors_of_the_store_and_bugs_are_eio_and_logged() -> None:
    with family() as f:
        digest = f.add_blob("b", SIZE)
        path = f.blob(digest)
        down = f.flag("down")
        assert errno_at(path, 0) == errno.EIO
        down.unlink()
        assert read_at(path, 0) == content(digest, 0, 4096)
        f.flag(f"bug-{AT}")
        assert errno_at(path, AT) == errno.EIO
        log = f.log()
        assert "503" in log
        assert "ZeroDivisionError: a bug in the cache" in log
        assert f.status()["deaths"] == 0


def test_a_request_has_a_limit() -> None:
    with family(request_limit_s=0.3) as f:
        digest = f.add_blob("b", SIZE)
        slow = f.flag("slow")
        assert errno_at(f.blob(digest), 0) == errno.EIO
        slow.unlink()
        assert read_at(f.blob(digest), 0) == content(digest, 0, 4096)


def test_interrupted_readers_leave_nothing_behind() -> None:
    """A request that nobody waits for any more does not hold the worker up."""
    with family(drain_s=1.0) as f:
        digest = f.add_blob("b", SIZE)
        slow = f.flag("slow")
        for _ in range(3):
            pid = os.fork()
            if not pid:
                try:
                    read_at(f.blob(digest), AT)
                finally:
                    os._exit(0)
            wait_for("it waits", lambda: f.client.stats()["fuse"]["waited_reads"] > 0)
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        slow.unlink()
        assert f.client.restart_worker() == f.status()["worker"]
        assert read_at(f.blob(digest), AT) == content(digest, AT, 4096)


def test_cut_off_requests_are_answered_by_the_successor() -> None:
    with family(drain_s=0.3) as f:
        digest = f.add_blob("b", SIZE)
        slow = f.flag("slow")
        got: list[bytes] = []
        reader = threading.Thread(
            target=lambda: got.append(read_at(f.blob(digest), AT)), daemon=True
        )
        reader.start()
        wait_for("it waits", lambda: f.client.stats()["fuse"]["waited_reads"] == 1)
        f.client.restart_worker()
        slow.unlink()
        reader.join(20)
        assert got == [content(digest, AT, 4096)]
        assert f.status()["deaths"] == 0


def test_without_resend_readers_get_errors_not_a_hang() -> None:
    with family(no_resend=True) as f:
        digest = f.add_blob("b", SIZE)
        f.flag("slow")
        failed: list[int | None] = []

        def reader() -> None:
            try:
                read_at(f.blob(digest), 0)
            except OSError as e:
                failed.append(e.errno)

        thread = threading.Thread(target=reader, daemon=True)
        thread.start()
        wait_for("it waits", lambda: f.client.stats()["fuse"]["waited_reads"] == 1)
        os.kill(f.status()["worker"], 9)
        thread.join(20)
        assert len(failed) == 1
        assert failed[0] in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV)
        wait_for("everybody's end", lambda: not f.pids())
        assert fuse_device(f.dirs.fs) is None


def test_a_worker_that_cannot_start_is_reported() -> None:
    f = Family()
    try:
        f.flag("wont-start")
        with pytest.raises(MountError, match="the worker ended"):
            f.start()
        assert "the new code is broken" in f.log()
        wait_for("everybody's end", lambda: not f.pids())
        assert fuse_device(f.dirs.fs) is None
    finally:
        f.remove()


def test_a_crash_loop_backs_off_and_ends() -> None:
    """Workers that cannot start any more do not burn a processor, and the mount heals."""
    with family() as f:
        digest = f.add_blob("b", SIZE)
        broken = f.flag("wont-start")
        os.kill(f.status()["worker"], 9)
        wait_for("several tries", lambda: f.log().count("the new code is broken") >= 5)
        broken.unlink()
        assert read_at(f.blob(digest), 0) == content(digest, 0, 4096)
        assert f.log().count("the new code is broken") < 20


@pytest.mark.skipif(bool(why_no_fuse()), reason=why_no_fuse() or "it works")
def test_a_mount_point_that_cannot_be_used() -> None:
    f = Family()
    try:
        f.dirs.fs.write_text("a file")
        with pytest.raises(MountError):
            f.start()
        assert not f.pids()
    finally:
        f.remove()
