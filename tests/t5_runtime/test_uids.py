"""Ranges of ids: given out once, exhausted with a word, freed when their owner is dead."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dsec_runtime.uids import RANGE, UidRanges
from dsecfs.errors import Busy
from dsecfs.nodedirs import NodeDirs


@pytest.fixture
def dirs(tmp_path: Path) -> NodeDirs:
    return NodeDirs(tmp_path / "data", tmp_path / "run")


def test_every_range_is_given_out_once(dirs: NodeDirs) -> None:
    ranges = UidRanges(dirs, first=1 << 20, count=5)
    taken = [ranges.acquire() for _ in range(5)]
    starts = sorted(r.ids.start for r in taken)
    assert starts == [(1 << 20) + i * RANGE for i in range(5)] == ranges.taken()
    with pytest.raises(Busy, match="all 5 ranges are taken"):
        ranges.acquire()
    taken[2].release()
    assert ranges.acquire().ids == taken[2].ids


def test_recovery_frees_what_dead_processes_had(dirs: NodeDirs) -> None:
    ranges = UidRanges(dirs, count=3)
    mine = ranges.acquire()
    child = os.fork()
    if child == 0:
        UidRanges(dirs, count=3).acquire()
        UidRanges(dirs, count=3).acquire()
        time.sleep(60)
        os._exit(0)
    try:
        deadline = time.monotonic() + 10
        while len(ranges.taken()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ranges.recover(()) == []
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    kept, freed = sorted(set(ranges.taken()) - {mine.ids.start})
    assert ranges.recover({kept}) == [freed]
    assert ranges.recover(()) == [kept]
    assert ranges.taken() == [mine.ids.start]
