"""What keeps a cache healthy over weeks: chores, scrubbing, verifying after a boot."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dsecfs.cache import ChunkCache, pin
from dsecfs.cache.blob import stored_states
from dsecfs.cache.blobfiles import ABSENT, OLD, VALID
from dsecfs.cache.chunkcache import CachedBlob
from dsecfs.cache.housekeeping import Housekeeper
from dsecfs.cache.scrub import is_due, left_whole, scrub, verify
from dsecfs.errors import CacheError, StoreUnavailable
from dsecfs.layers.digest import Digest
from dsecfs.nodedirs import NodeDirs
from tests.t2_cache.conftest import ExpectLog, MakeCache, change_boot
from tests.t2_cache.packing import CHUNK, Packed, content, pack
from tests.t2_cache.stores import CountingStore

RATE = 1e12


def wait_for(condition: Callable[[], Any], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def drive(chore: Iterator[float], until: float = 1.0) -> list[float]:
    """Run a chore to its first pause of `until` seconds; the shorter ones."""
    pauses = []
    end = time.monotonic() + 20
    while (pause := next(chore)) < until:
        assert time.monotonic() < end
        pauses.append(pause)
        time.sleep(min(pause, 0.005))
    return pauses


def damage(dirs: NodeDirs, blob: Digest, *places: int) -> None:
    with open(dirs.blob(blob) / "data", "r+b") as f:
        for at in places:
            f.seek(at)
            byte = f.read(1)
            f.seek(at)
            f.write(bytes([byte[0] ^ 1]))


# -- chores -----------------------------------------------------------------------------


def test_chores_take_turns_and_failures_stay_alone(
    expect_log: ExpectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsecfs.cache.housekeeping.AGAIN_S", 0.01)
    expect_log(r"WARNING dsecfs.cache.housekeeping: failing: no disk")
    expect_log(r"ERROR dsecfs.cache.housekeeping: wrong: unexpected")
    done: list[str] = []
    closed = threading.Event()

    def good(name: str) -> Iterator[float]:
        try:
            while True:
                done.append(name)
                yield 0.001
        finally:
            closed.set()

    def failing() -> Iterator[float]:
        done.append("failing")
        yield 0.0
        raise CacheError("no disk")

    def wrong() -> Iterator[float]:
        done.append("wrong")
        raise ZeroDivisionError
        yield 0.0

    ended: list[str] = []
    keeper = Housekeeper(
        {"a": lambda: good("a"), "failing": failing, "wrong": wrong, "b": lambda: good("b")},
        at_end=lambda: ended.append("end"),
    )
    keeper.start()
    wait_for(lambda: all(done.count(n) > 20 for n in "ab") and done.count("failing") > 2)
    assert keeper.stop(10, for_good=False)
    assert closed.is_set() and ended == []
    count = len(done)
    time.sleep(0.02)
    assert len(done) == count
    assert done.count("wrong") > 1, "begun anew"


def test_the_last_thing_is_done_only_at_the_end_for_good() -> None:
    ended: list[int] = []

    def chore() -> Iterator[float]:
        while True:
            yield 3600.0

    keeper = Housekeeper({"a": chore}, at_end=lambda: ended.append(1))
    keeper.start()
    assert keeper.stop(10, for_good=True) and ended == [1]
    assert Housekeeper({}).stop(1, for_good=True), "never started"


def test_a_step_that_takes_long_is_not_waited_for_long() -> None:
    free = threading.Event()

    def chore() -> Iterator[float]:
        free.wait(20)
        yield 0.0

    keeper = Housekeeper({"a": chore})
    keeper.start()
    assert not keeper.stop(0.01, for_good=True)
    free.set()
    assert keeper.stop(10, for_good=True)


# -- scrubbing --------------------------------------------------------------------------


class Scrubbed:
    """A blob in direct use, and what the scrubber told of it."""

    def __init__(self, dirs: NodeDirs, cache: ChunkCache, packed: Packed) -> None:
        self.dirs = dirs
        self.cache = cache
        self.digest = packed.register(dirs)
        self.blob: CachedBlob = cache.open(self.digest)
        self.blob.read(0, self.blob.size)
        pin(dirs, self.digest, "mount-1")
        self.told: list[Digest] = []

    def chore(self, interval_s: float = 0.0, rate: float = RATE) -> Iterator[float]:
        return scrub(
            self.cache,
            lambda: [self.digest],
            interval_s=interval_s,
            rate=rate,
            on_damage=self.told.append,
        )

    @property
    def data(self) -> bytes:
        return (self.dirs.blob(self.digest) / "data").read_bytes()

    def count(self, name: str) -> int:
        return self.cache.stats.snapshot()[name]


@pytest.fixture
def scrubbed(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> Scrubbed:
    return Scrubbed(dirs, make_cache(store), packed)


def test_scrubbing_mends_in_place_and_tells_first(
    scrubbed: Scrubbed, packed: Packed, expect_log: ExpectLog
) -> None:
    for chunk in (0, 3, 10):
        expect_log(rf"chunk {chunk}: damaged in the cache")
    size = len(packed.content)
    drive(scrubbed.chore())
    assert scrubbed.count("scrubbed") == 11 and scrubbed.told == []
    damage(scrubbed.dirs, scrubbed.digest, 0, 3 * CHUNK + 9, size - 1)
    inode = (scrubbed.dirs.blob(scrubbed.digest) / "data").stat().st_ino
    drive(scrubbed.chore())
    assert scrubbed.told == [scrubbed.digest] * 3
    assert scrubbed.data == packed.content
    assert (scrubbed.dirs.blob(scrubbed.digest) / "data").stat().st_ino == inode
    assert scrubbed.blob.complete()
    assert (scrubbed.count("corrupt_cache"), scrubbed.count("unhealed")) == (3, 0)
    assert scrubbed.count("evictions") == 0


def test_scrubbing_keeps_its_rate_and_its_interval(scrubbed: Scrubbed, packed: Packed) -> None:
    chore = scrubbed.chore(interval_s=3600.0, rate=float(1 << 20))
    assert not is_due(scrubbed.dirs, scrubbed.digest, 3600)
    assert drive(chore) == [0.0], "mounted lately, so verified lately"
    pin_file = scrubbed.dirs.blob(scrubbed.digest) / "pins/mount-1"
    os.utime(pin_file, (1, 1))
    assert is_due(scrubbed.dirs, scrubbed.digest, 3600)
    pauses = drive(chore)
    assert sum(pauses) == pytest.approx(len(packed.content) / (1 << 20))
    assert max(pauses) == CHUNK / (1 << 20)
    assert not is_due(scrubbed.dirs, scrubbed.digest, 3600), "a new process does not begin anew"
    assert drive(chore) == [0.0]
    os.utime(scrubbed.dirs.blob(scrubbed.digest) / "scrubbed", (1 << 33, 1 << 33))
    assert is_due(scrubbed.dirs, scrubbed.digest, 3600), "a clock was wrong"


def test_what_cannot_be_mended_is_said_and_tried_again(
    scrubbed: Scrubbed,
    packed: Packed,
    store: CountingStore,
    expect_log: ExpectLog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expect_log(r"chunk 2: damaged in the cache")
    expect_log(r"ERROR dsecfs.cache.scrub: blob .*: 1 chunks are damaged and cannot be fetched")
    expect_log(r"WARNING dsecfs.cache.scrub: blob .*: 1 chunks in direct use are not verified")

    def away(key: str, offset: int, length: int) -> None:
        raise StoreUnavailable("the store is away")

    store.hook = away
    damage(scrubbed.dirs, scrubbed.digest, 2 * CHUNK)
    chore = scrubbed.chore()
    drive(chore)
    assert scrubbed.told == [scrubbed.digest] and scrubbed.count("unhealed") == 1
    assert not (scrubbed.dirs.blob(scrubbed.digest) / "scrubbed").exists()
    with pytest.raises(StoreUnavailable):
        scrubbed.blob.read(2 * CHUNK, 1)
    store.hook = lambda key, offset, length: None
    asked = store.ranges
    drive(chore)
    assert store.ranges == asked, "not at once"
    monkeypatch.setattr("dsecfs.cache.scrub.HEAL_AGAIN_S", 0.0)
    drive(scrubbed.chore())
    assert scrubbed.data == packed.content and scrubbed.blob.complete()
    assert scrubbed.count("unhealed") == 1


def test_a_disk_that_lost_pages_is_noticed_at_the_next_look(
    scrubbed: Scrubbed, packed: Packed, expect_log: ExpectLog
) -> None:
    """A failed sync makes all words OLD; EROFS reads the file all the same."""
    expect_log(r"11 chunks in direct use are not verified any more")
    expect_log(r"chunk 5: damaged in the cache")
    chore = scrubbed.chore(interval_s=3600.0)
    drive(chore)
    damage(scrubbed.dirs, scrubbed.digest, 5 * CHUNK)
    scrubbed.blob.files.demote(0, scrubbed.blob.chunk_count)
    drive(chore)
    assert scrubbed.told and scrubbed.data == packed.content and scrubbed.blob.complete()


# -- after a boot ----------------------------------------------------------------------


def test_whole_blobs_are_verified_after_a_boot_and_no_others(
    dirs: NodeDirs, store: CountingStore, make_cache: MakeCache, expect_log: ExpectLog
) -> None:
    expect_log(r"chunk 1: damaged in the cache")
    whole, part, newer = (pack(store, content(40, seed=i)) for i in range(3))
    cache = make_cache(store)
    for p, size in ((whole, 40), (part, 20), (newer, 40)):
        cache.open(p.register(dirs)).read(0, size * CHUNK)
    cache.close()
    os.utime(dirs.blob(newer.digest) / "used", (1 << 32, 1 << 32))
    for p in (whole, part, newer):
        assert set(stored_states(dirs, p.digest) or b"") <= {VALID, ABSENT}
        change_boot(dirs, p.digest)
        assert set(stored_states(dirs, p.digest) or b"") <= {OLD, ABSENT}
    assert left_whole(dirs) == [newer.digest, whole.digest]
    damage(dirs, whole.digest, CHUNK)
    cache = make_cache(store)
    asked = store.ranges
    pauses = drive(verify(cache, rate=float(64 << 20), after_s=0.0))
    assert sum(p for p in pauses if p) >= 2 * 40 * CHUNK / (64 << 20)
    assert left_whole(dirs) == []
    for p in (whole, newer):
        assert cache.open(p.digest).complete()
        assert (dirs.blob(p.digest) / "data").read_bytes() == p.content
    assert set(stored_states(dirs, part.digest) or b"") == {OLD, ABSENT}, "left alone"
    assert store.ranges == asked + 1


def test_verifying_waits_for_a_quiet_moment(
    dirs: NodeDirs,
    store: CountingStore,
    make_cache: MakeCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, coming = pack(store, content(4)), pack(store, content(4, seed=5))
    cache = make_cache(store)
    cache.open(here.register(dirs)).read(0, 4 * CHUNK)
    cache.close()
    change_boot(dirs, here.digest)
    cache = make_cache(store)
    arrive = threading.Event()
    store.hook = lambda key, offset, length: arrive.wait(20)
    handle = cache.open(coming.register(dirs)).prefetch(range(4))
    wait_for(cache.busy)
    chore = verify(cache, rate=RATE, after_s=0.0)
    pauses = [next(chore) for _ in range(6)]
    assert pauses[2:] == [1.0] * 4, "something is being fetched"
    assert left_whole(dirs)
    monkeypatch.setattr("dsecfs.cache.scrub.BUSY_S", 0.0)
    drive(verify(cache, rate=RATE, after_s=0.0))
    assert not left_whole(dirs), "not for ever"
    arrive.set()
    assert handle.wait(20)


def test_stored_states_of_strange_files(dirs: NodeDirs, packed: Packed) -> None:
    path = dirs.blob(packed.register(dirs)) / "present"
    assert stored_states(dirs, packed.digest) is None
    for junk in (b"", b"junk" * 100, b"DSECPRES\x63\0\0\0" + bytes(200)):
        path.write_bytes(junk)
        assert stored_states(dirs, packed.digest) is None


def test_open_blobs_are_bounded_in_chunks_too(
    dirs: NodeDirs,
    store: CountingStore,
    make_cache: MakeCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dsecfs.cache.chunkcache._MAX_OPEN_CHUNKS", 10)
    cache = make_cache(store)
    packs = [pack(store, content(4, seed=i)) for i in range(4)]
    opened = [cache.open(p.register(dirs)) for p in packs]
    assert cache.open(packs[3].digest) is opened[3] and cache.open(packs[2].digest) is opened[2]
    assert cache.open(packs[0].digest) is not opened[0]
    assert cache.close_idle(0) == 2
    big = pack(store, content(12, seed=9))
    assert cache.open(big.register(dirs)) is cache.open(big.digest), "one may always be open"


def test_idle_blobs_are_closed(
    dirs: NodeDirs, store: CountingStore, make_cache: MakeCache, packed: Packed
) -> None:
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    assert cache.close_idle(60) == 0 and cache.open(packed.digest) is blob
    assert cache.close_idle(0) == 1 and cache.close_idle(0) == 0
    assert blob.read(0, 10) == packed.content[:10], "who holds it goes on"
    assert cache.open(packed.digest) is not blob
    assert cache.open(packed.digest, keep=False) is cache.open(packed.digest)
    cache.close_idle(0)
    assert cache.open(packed.digest, keep=False) is not cache.open(packed.digest, keep=False)
