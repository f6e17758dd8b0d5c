"""The retry policy, over a back end that fails on purpose."""

from __future__ import annotations

import io
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsecfs.errors import NotFound, ShortRead, StoreDenied, StoreError, StoreUnavailable
from dsecfs.store.base import Backend, Priority
from dsecfs.store.directory import DirectoryStore
from dsecfs.store.faults import CountingStore, FaultyStore, Rule
from dsecfs.store.retry import RetryingStore, RetryPolicy

FAST = RetryPolicy(
    foreground_s=3, background_s=3, write_s=3, first_delay_s=0.001, max_delay_s=0.01
)


@pytest.fixture
def inner(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store", create=True)


def over(inner: Backend, *rules: Rule, policy: RetryPolicy = FAST) -> RetryingStore:
    return RetryingStore(FaultyStore(inner, rules), policy)


def attempts(store: RetryingStore) -> int:
    assert isinstance(store.inner, FaultyStore)
    return sum(store.inner.hits.values())


@pytest.mark.parametrize("kind", ["error", "busy", "cut"])
def test_passing_trouble_is_not_seen(inner: DirectoryStore, kind: str) -> None:
    store = over(inner, Rule(kind, times=3, seconds=0.01))  # type: ignore[arg-type]
    assert store.put_if_absent("a", b"12345") is True
    store.put_content("b", b"678")
    assert store.get("a") == b"12345"
    assert store.get_range("a", 1, 3) == b"234"
    assert store.stat("a").size == 5
    assert [info.key for info in store.list("")] == ["a", "b"]
    store.delete("b")
    assert [info.key for info in store.list("")] == ["a"]
    assert attempts(store) == 3 * 7


def test_a_put_whose_answer_was_lost_still_won(inner: DirectoryStore) -> None:
    store = over(inner, Rule("cut", op="put_if_absent", times=2))
    assert store.put_if_absent("a", b"x") is True
    assert store.put_if_absent("a", b"x") is False


def test_exactly_one_wins_although_answers_are_lost(inner: DirectoryStore) -> None:
    for round_ in range(10):
        faults = FaultyStore(inner, [Rule("cut", "put_if_absent", probability=0.6)], seed=round_)
        store = RetryingStore(faults, replace(FAST, quiet=1000))
        ready = threading.Barrier(8)
        won: list[bool] = []

        def write(
            store: RetryingStore = store,
            ready: threading.Barrier = ready,
            won: list[bool] = won,
            key: str = f"race/{round_}",
        ) -> None:
            ready.wait(10)
            won.append(store.put_if_absent(key, b"equal"))

        threads = [threading.Thread(target=write) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won.count(True) == 1 and len(won) == 8


@pytest.mark.parametrize(
    ("kind", "error"), [("denied", StoreDenied), ("broken", StoreError)]
)
def test_final_errors_are_not_repeated(
    inner: DirectoryStore, kind: str, error: type[StoreError]
) -> None:
    store = over(inner, Rule(kind))  # type: ignore[arg-type]
    with pytest.raises(error):
        store.get("a")
    assert attempts(store) == 1
    with pytest.raises(NotFound):
        over(inner).get("a")


def test_trouble_that_stays_ends_in_time_with_its_type(
    inner: DirectoryStore, expect_log: Callable[[str], None]
) -> None:
    expect_log(r"WARNING dsecfs\.store\.retry: store: read a failed \d+ times")
    policy = RetryPolicy(foreground_s=0.2, first_delay_s=0.001, max_delay_s=0.01)
    store = over(inner, Rule("error"), policy=policy)
    with pytest.raises(StoreUnavailable, match=r"tried \d+ times in 0\.\d s.*reachable"):
        store.get("a")
    assert attempts(store) > 4


def test_the_log_is_quiet_until_the_fifth_failure_and_says_little_then(
    inner: DirectoryStore, caplog: pytest.LogCaptureFixture, expect_log: Callable[[str], None]
) -> None:
    for count in (5, 10, 20):
        expect_log(f"failed {count} times")
    inner.put_content("a", b"x")
    with caplog.at_level(logging.DEBUG, "dsecfs.store.retry"):
        over(inner, Rule("error", times=22)).get("a")
    told = [n for n, r in enumerate(caplog.records, 1) if r.levelno == logging.WARNING]
    assert len(caplog.records) == 22 and told == [5, 10, 20]


def test_retry_after_is_obeyed_but_not_beyond_the_deadline(inner: DirectoryStore) -> None:
    inner.put_content("a", b"x")
    store = over(inner, Rule("busy", times=1, seconds=0.3))
    began = time.monotonic()
    assert store.get("a") == b"x"
    assert time.monotonic() - began >= 0.3
    store = over(inner, Rule("busy", seconds=3600))
    with pytest.raises(StoreUnavailable) as error:
        store.get("a")
    assert error.value.retry_after_s == 3600 and attempts(store) == 1


def test_a_short_object_is_given_up_soon(inner: DirectoryStore) -> None:
    inner.put_content("a", b"x" * 10)
    counted = CountingStore(inner)
    store = RetryingStore(counted, FAST)
    with pytest.raises(ShortRead, match="5 of 10 bytes at 5.*is the object whole"):
        store.get_range("a", 5, 10)
    assert counted.stats().ops["get_range"].requests == FAST.short_reads


@pytest.mark.parametrize("kind", ["short", "truncated"])
def test_short_answers_are_asked_for_again(inner: DirectoryStore, kind: str) -> None:
    inner.put_content("a", bytes(range(100)))
    store = over(inner, Rule(kind, op="get_range", times=2))  # type: ignore[arg-type]
    assert store.get_range("a", 10, 50) == bytes(range(10, 60))


def test_deadlines_depend_on_who_waits(
    inner: DirectoryStore, expect_log: Callable[[str], None]
) -> None:
    expect_log("failed")
    policy = RetryPolicy(
        foreground_s=0.05, background_s=0.6, first_delay_s=0.001, max_delay_s=0.02
    )
    counts = []
    for priority in (Priority.FOREGROUND, Priority.BACKGROUND):
        store = over(inner, Rule("error"), policy=policy)
        with pytest.raises(StoreUnavailable):
            store.get_range("a", 0, 1, priority=priority)
        counts.append(attempts(store))
    assert counts[0] < counts[1]


def test_a_stream_is_sent_again_from_where_it_began(inner: DirectoryStore) -> None:
    class HalfWay(DirectoryStore):
        failures = 2

        def put_content(self, key: str, data: object) -> None:
            assert isinstance(data, io.BytesIO)
            if self.failures:
                self.failures -= 1
                data.read(3)
                raise StoreUnavailable("cut in the middle")
            super().put_content(key, data)

    source = io.BytesIO(b"skip-content")
    source.seek(5)
    RetryingStore(HalfWay(inner.root), FAST).put_content("a", source)
    assert inner.get("a") == b"content"


def test_a_list_goes_on_where_it_broke_off(inner: DirectoryStore) -> None:
    keys = [f"k/{i % 5}/{i:03d}" for i in range(60)]
    for key in keys:
        inner.put_content(key, b"")
    store = over(inner, Rule("cut", op="list_key", probability=0.4, times=3))
    assert [info.key for info in store.list("k")] == sorted(keys)
    assert attempts(store) > 5


def test_a_name_that_settles_late_is_waited_for(inner: DirectoryStore) -> None:
    inner.settle_s = 1.0
    store = RetryingStore(inner, FAST)
    thread = threading.Timer(0.3, lambda: inner.put_content("a", b"late"))
    thread.start()
    assert store.get("a") == b"late"
    thread.join()
    began = time.monotonic()
    with pytest.raises(NotFound):
        store.get("b")
    assert time.monotonic() - began >= 1.0
    with pytest.raises(NotFound):
        store.stat("b")  # what only looks whether something is there does not wait


def test_close_ends_a_wait(inner: DirectoryStore) -> None:
    store = over(
        inner, Rule("busy", seconds=20), policy=RetryPolicy(foreground_s=60)
    )
    threading.Timer(0.2, store.close).start()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        store.get("a")
    assert time.monotonic() - began < 15


def test_waits_grow_and_are_spread() -> None:
    policy = RetryPolicy(first_delay_s=0.1, max_delay_s=2.0)

    class Nothing:
        url = "none:"
        settle_s = 0.0

    store = RetryingStore(Nothing(), policy, rng=random.Random(1))  # type: ignore[arg-type]
    for failures, ceiling in ((1, 0.2), (2, 0.4), (3, 0.8), (10, 2.0), (10_000, 2.0)):
        delays = [store._delay(failures, None) for _ in range(300)]
        assert 0 <= min(delays) < 0.1 * ceiling and 0.9 * ceiling < max(delays) <= ceiling
    assert store._delay(1, 7.0) >= 7.0


def test_the_same_seed_gives_the_same_faults(inner: DirectoryStore) -> None:
    def run(seed: int) -> list[bool]:
        store = FaultyStore(inner, [Rule("error", op="stat", probability=0.5)], seed=seed)
        out = []
        for i in range(40):
            try:
                store.stat(f"k{i % 4}")
            except StoreUnavailable:
                out.append(True)
            except NotFound:
                out.append(False)
        return out

    assert run(1) == run(1) != run(2)
    assert 5 < sum(run(1)) < 35


def test_counters_count(inner: DirectoryStore) -> None:
    store = CountingStore(inner)
    store.put_content("a", io.BytesIO(b"12345"))
    store.put_if_absent("b", b"123")
    store.get("a")
    store.get_range("a", 1, 2)
    with pytest.raises(NotFound):
        store.get("c")
    list(store.list(""))
    stats = store.stats(reset=True)
    assert stats.requests == 6 and stats.bytes_read == 7 and stats.bytes_written == 8
    assert stats.ops["get"].errors == 1
    assert store.stats().requests == 0
