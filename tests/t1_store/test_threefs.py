"""The rules of 3FS: USRBIO over a stand-in that keeps them, names over a mount that
imitates them. No 3FS runs here."""

from __future__ import annotations

import errno
import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsecfs.errors import NotFound, ShortRead, StoreError, StoreUnavailable
from dsecfs.store import usrbio
from dsecfs.store.directory import DirectoryStore
from dsecfs.store.open import check_store, open_store
from dsecfs.store.retry import RetryPolicy
from dsecfs.store.threefs import USRBIO_MIN, ThreeFsStore
from tests.support.threefs_mount import ABSENT_S, threefs_mount, why_no_fuse
from tests.support.usrbio_standin import StandIn

DATA = random.Random(3).randbytes(20 << 20)


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    module = StandIn(str(tmp_path))
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", module)
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", module)
    yield module
    module.stop()
    assert module.broken == []


@pytest.fixture
def store(daemon: StandIn, tmp_path: Path) -> Iterator[ThreeFsStore]:
    made = ThreeFsStore(tmp_path / "store", create=True)
    yield made
    made.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("dsec-")}


def test_large_reads_go_through_rings(store: ThreeFsStore, daemon: StandIn) -> None:
    store.put_content("o/a", io.BytesIO(DATA))
    store.get_range("o/a", 0, USRBIO_MIN)  # makes a lane, which is kept
    before = descriptors(), shared_memory()
    for offset, length in (
        (0, USRBIO_MIN),
        (1, 1 << 20),
        (12345, (8 << 20) + 17),  # more than a lane takes at once
        (len(DATA) - (2 << 20), 2 << 20),
        (0, len(DATA)),
    ):
        assert store.get_range("o/a", offset, length) == DATA[offset : offset + length]
    assert daemon.bytes_read > len(DATA) and not daemon.registered
    assert (descriptors(), shared_memory()) == before
    through_rings = daemon.reads
    assert store.get_range("o/a", 77, USRBIO_MIN - 1) == DATA[77 : 77 + USRBIO_MIN - 1]
    assert daemon.reads == through_rings


def test_many_threads_have_a_ring_each(store: ThreeFsStore, daemon: StandIn) -> None:
    store.put_content("o/a", DATA)

    def read(seed: int) -> bool:
        dice = random.Random(seed)
        offset = dice.randrange(10 << 20)
        length = dice.randrange(USRBIO_MIN, 4 << 20)
        return store.get_range("o/a", offset, length) == DATA[offset : offset + length]

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(read, range(100)))
    assert daemon.reads >= 100 and not daemon.registered


def test_ranges_behind_the_end_are_short(store: ThreeFsStore) -> None:
    store.put_content("o/a", DATA[: 1 << 20])
    with pytest.raises(ShortRead):
        store.get_range("o/a", 1, 1 << 20)
    with pytest.raises(NotFound):
        store.get_range("o/b", 0, 1 << 20)


def test_a_file_that_shrinks_under_the_ring_is_short(
    store: ThreeFsStore, daemon: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_content("o/a", DATA[: 3 << 20])
    register = daemon.register_fd

    def shrink(fd: int) -> None:
        os.truncate(store.root / "o/a", (1 << 20) + 5)
        register(fd)

    monkeypatch.setattr(daemon, "register_fd", shrink)
    with pytest.raises(ShortRead):
        store.get_range("o/a", 0, 3 << 20)


def test_errors_of_the_ring_are_those_of_the_file_system(
    store: ThreeFsStore, daemon: StandIn
) -> None:
    store.put_content("o/a", DATA[: 2 << 20])
    store.get_range("o/a", 0, USRBIO_MIN)
    before = descriptors()
    for code, kind in ((errno.EIO, StoreUnavailable), (errno.ENXIO, StoreError)):
        daemon.fail_with = -code
        with pytest.raises(kind, match=os.strerror(code)):
            store.get_range("o/a", 0, 2 << 20)
    daemon.fail_with = 0
    assert store.get_range("o/a", 0, 2 << 20) == DATA[: 2 << 20]
    assert descriptors() == before


def test_a_daemon_that_is_silent_costs_its_rings_then_fuse_is_used(
    store: ThreeFsStore,
    daemon: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: Callable[[str], None],
) -> None:
    expect_log("USRBIO lost 8 rings; reading through FUSE")
    monkeypatch.setattr(usrbio, "TIMEOUT_S", 0.02)
    store.put_content("o/a", DATA[: 2 << 20])
    daemon.silent = True
    for _ in range(usrbio.MAX_LOST):
        with pytest.raises(StoreUnavailable, match="2 requests unanswered"):
            store.get_range("o/a", 0, 2 << 20)
    # The daemon may still write there: the descriptors stay, and stay registered.
    assert len(daemon.registered) == usrbio.MAX_LOST
    assert store.get_range("o/a", 0, 2 << 20) == DATA[: 2 << 20]
    for fd in list(daemon.registered):
        daemon.deregister_fd(fd)
        os.close(fd)


def test_another_mount_is_read_by_pread(daemon: StandIn, tmp_path: Path) -> None:
    daemon.mount = "/somewhere/else"
    store = ThreeFsStore(tmp_path / "store", create=True)
    store.put_content("o/a", DATA[: 2 << 20])
    assert store.get_range("o/a", 0, 2 << 20) == DATA[: 2 << 20]
    assert daemon.reads == 0
    store.close()


def test_content_that_is_there_is_kept_for_its_readers(tmp_path: Path) -> None:
    """rename(2) would take the file from under those who hold it open."""
    store = ThreeFsStore(tmp_path)
    store.put_content("o/a", b"content")
    first = os.stat(tmp_path / "o/a").st_ino
    os.utime(tmp_path / "o/a", (1, 1))
    store.put_content("o/a", b"content")
    info = os.stat(tmp_path / "o/a")
    assert info.st_ino == first and info.st_mtime > time.time() - 60 and info.st_nlink == 1
    for damage in (b"damaged!", b"c0ntent", b""):
        (tmp_path / "o/a").write_bytes(damage)
        store.put_content("o/a", b"content")
        assert store.get("o/a") == b"content"
    assert os.listdir(tmp_path / "~tmp") == []
    store.close()


# -- a mount with the caches of 3FS ------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    if why := why_no_fuse():
        pytest.skip(why)
    for name in ("backing", "mnt"):
        (tmp_path / name).mkdir()
    with threefs_mount(tmp_path / "backing", tmp_path / "mnt") as at:
        yield at


def test_on_a_mount_with_its_limits(mount: Path, tmp_path: Path) -> None:
    store = open_store(f"3fs:{mount}/store", create=True)
    check_store(store)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTSUP)):
        os.setxattr(mount / "store", "user.x", b"x")
    store.put_content("o/ab/a", io.BytesIO(DATA))
    assert store.put_if_absent("r/a", b"1") and not store.put_if_absent("r/a", b"2")
    assert store.get("o/ab/a") == DATA
    assert store.get_range("o/ab/a", 5, 3 << 20) == DATA[5 : 5 + (3 << 20)]
    assert [info.key for info in store.list("")] == ["o/ab/a", "r/a"]
    store.delete("r/a")
    # Another client sees the same.
    other = DirectoryStore(tmp_path / "backing/store")
    assert other.get("o/ab/a") == DATA
    assert [info.key for info in other.list("")] == ["o/ab/a"]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: store.put_if_absent("race", b"%d" % i), range(8)))
    assert won.count(True) == 1
    store.close()


def test_a_name_cached_as_absent_is_waited_for(mount: Path, tmp_path: Path) -> None:
    other = DirectoryStore(tmp_path / "backing")
    store = open_store(f"3fs:{mount}", policy=RetryPolicy(foreground_s=20))
    store.put_content("h/x", b"x")
    with pytest.raises(NotFound):
        store.inner.get("h/new")
    other.put_content("h/new", b"new")
    with pytest.raises(NotFound):
        store.inner.get("h/new")  # the imitation does imitate
    began = time.monotonic()
    assert store.get("h/new") == b"new"
    assert time.monotonic() - began < ABSENT_S + 5
    store.close()


def test_one_of_two_clients_wins_although_names_are_cached(mount: Path, tmp_path: Path) -> None:
    other = DirectoryStore(tmp_path / "backing")
    store = ThreeFsStore(mount)
    for i in range(10):
        with pytest.raises(NotFound):
            store.stat(f"r/{i}")  # cached as absent from here on
        assert other.put_if_absent(f"r/{i}", b"theirs") is True
        assert store.put_if_absent(f"r/{i}", b"ours") is False
        store.put_content(f"r/{i}", b"theirs")
        assert other.get(f"r/{i}") == b"theirs"
    store.close()
