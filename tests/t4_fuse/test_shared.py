"""What processes of a mount share: slots, the page, processes held by pidfd, the log."""

from __future__ import annotations

import logging
import mmap
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecfs.errors import BadInput, FormatError, NotFound, TooNew
from dsecfs.fuse.config import FsConfig, node_config, tree_config
from dsecfs.fuse.logfile import BoundedFile
from dsecfs.fuse.shared import (
    NOTE_SLOTS,
    POINTS_CRASH,
    POINTS_KILLED,
    POINTS_LIMIT,
    SUSPECT_SLOTS,
    Process,
    RequestKey,
    SharedPage,
    lock_worker,
    start_time,
)
from dsecfs.fuse.slots import Slots
from dsecfs.nodedirs import NodeDirs


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=40))
def test_slots_are_the_same_for_everybody(keys: list[bytes]) -> None:
    fd = os.memfd_create("test")
    try:
        first = Slots(fd)
        numbers = {key: first.number(key) for key in keys}
        assert sorted(numbers.values()) == list(range(1, len(numbers) + 1))
        second = Slots(fd)
        for key, number in numbers.items():
            assert second.key(number) == key
            assert second.number(key) == number
        assert second.number(b"\0new") == len(numbers) + 1
    finally:
        os.close(fd)


def test_slots_of_a_writer_that_died(memfd: int) -> None:
    slots = Slots(memfd)
    slots.number(b"one")
    # The record was written, the header not yet.
    os.pwrite(memfd, struct.pack("=I", 3) + b"two", os.fstat(memfd).st_size)
    after = Slots(memfd)
    with pytest.raises(NotFound):
        after.key(2)
    assert after.number(b"three") == 2
    assert Slots(memfd).key(2) == b"three"
    for slot in (0, 3, 1 << 23):
        with pytest.raises(NotFound):
            after.key(slot)


def test_damaged_slots_are_refused(memfd: int) -> None:
    Slots(memfd).number(b"one")
    os.pwrite(memfd, struct.pack("=I", 1000), 8)
    with pytest.raises(FormatError):
        Slots(memfd)


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """A page as all processes of a mount see it."""
    fd = SharedPage.create()
    yield SharedPage.map(fd)
    os.close(fd)


def test_page_of_another_version(memory: mmap.mmap) -> None:
    SharedPage(memory)
    struct.pack_into("=Q", memory, 0, 99)
    with pytest.raises(TooNew):
        SharedPage(memory)


def test_a_page_is_the_same_for_everybody() -> None:
    fd = SharedPage.create()
    one, other = SharedPage(SharedPage.map(fd)), SharedPage(SharedPage.map(fd))
    one.note(0, *key(1))
    assert other.noted() == [key(1)]
    os.close(fd)


def key(n: int) -> RequestKey:
    return RequestKey(5, n, n * 4096, 2**32 - 1)


def test_two_crashes_condemn_and_an_answer_acquits(memory: mmap.mmap) -> None:
    page = SharedPage(memory)
    page.note(3, *key(1))
    page.note(NOTE_SLOTS - 1, *key(2))
    assert page.pending()
    assert sorted(page.noted()) == [key(1), key(2)]
    assert page.blame(POINTS_CRASH) == []
    assert not page.pending()
    assert page.suspects() == {key(1): POINTS_CRASH, key(2): POINTS_CRASH}
    page.acquit(key(2))
    page.note(0, *key(1))
    assert page.blame(POINTS_CRASH) == [key(1)]
    assert page.suspects() == {key(1): POINTS_LIMIT}
    page.unnote(0)
    assert page.noted() == []


def test_kills_from_outside_weigh_less(memory: mmap.mmap) -> None:
    page = SharedPage(memory)
    for _ in range(31):
        page.note(0, *key(1))
        assert page.blame(POINTS_KILLED) == []
    page.note(0, *key(1))
    assert page.blame(POINTS_KILLED) == [key(1)]


def test_more_suspects_than_fit(memory: mmap.mmap) -> None:
    page = SharedPage(memory)
    many = {key(n): 1 + n % 7 for n in range(SUSPECT_SLOTS + 100)}
    page.set_suspects(many)
    kept = page.suspects()
    assert len(kept) == SUSPECT_SLOTS
    assert all(kept[k] == many[k] for k in kept)
    assert sum(1 for p in many.values() if p == 7) == sum(1 for p in kept.values() if p == 7)


def test_a_process_is_known_by_its_start() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = start_time(child.pid)
    assert start > 0
    assert Process.open(child.pid, start + 1) is None
    process = Process.open(child.pid, start)
    assert process is not None and process.alive and not process.wait(0)
    process.signal(signal.SIGKILL)
    assert process.wait(20)
    assert process.reap() == -signal.SIGKILL
    child.returncode = 0  # reaped already
    assert child.stdin is not None
    child.stdin.close()
    assert start_time(child.pid) == 0
    assert Process.open(child.pid, start) is None
    assert Process.open(0, 0) is None


def test_one_worker_at_a_time_and_death_frees(memfd: int) -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        lock_worker(memfd, 1)
        os.write(write_end, b"x")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(read_end, 1) == b"x"
        assert lock_worker(memfd, 0.05) is None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)
        os.close(write_end)
    fd = lock_worker(memfd, 10)
    assert fd is not None
    assert lock_worker(memfd, 0) is None
    os.close(fd)


def test_config_is_strict(tmp_path: Path) -> None:
    config = node_config(NodeDirs(tmp_path / "d", tmp_path / "r"), "file:/s", stuck_s=3.0)
    assert FsConfig.from_json(config.to_json()) == config
    for bad in ("", "[]", '{"data": "x"}', config.to_json()[:-1] + ', "colour": 1}'):
        with pytest.raises(BadInput):
            FsConfig.from_json(bad)
    one = tree_config(config.dirs, "file:/s", "t", tmp_path / "m")
    other = tree_config(config.dirs, "file:/s", "t", tmp_path / "n")
    assert one.state != other.state


def test_log_is_bounded_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "fs.log"
    first, second = (BoundedFile(path, 1000, capture=False) for _ in range(2))
    for i in range(200):
        for handler in (first, second):
            handler.emit(logging.makeLogRecord({"msg": f"line {i} of some length"}))
    assert path.stat().st_size <= 1100
    assert (tmp_path / "fs.log.1").stat().st_size <= 1100
    assert sorted(os.listdir(tmp_path)) == ["fs.log", "fs.log.1"]
    assert "line 199" in path.read_text()
    path.unlink()
    first.emit(logging.makeLogRecord({"msg": "after it was removed"}))
    assert "after it was removed" in path.read_text()
