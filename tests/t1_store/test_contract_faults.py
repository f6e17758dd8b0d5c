"""The contract through a back end that fails at random, under the retries: what comes out
is right, or an error of the tree in bounded time. Never something else."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsecfs.errors import NotFound, StoreError, StoreUnavailable
from dsecfs.store.faults import FaultyStore, Rule
from dsecfs.store.open import open_store
from dsecfs.store.retry import RetryingStore, RetryPolicy

POLICY = RetryPolicy(
    foreground_s=10, background_s=10, write_s=10, first_delay_s=0.001, max_delay_s=0.02
)
STORM = (
    Rule("error", probability=0.15),
    Rule("busy", probability=0.1, seconds=0.01),
    Rule("stall", probability=0.05, seconds=0.02),
    Rule("cut", probability=0.15),
    Rule("cut", op="list_key", probability=0.05),
    Rule("short", op="get_range", probability=0.1),
    Rule("truncated", op="get_range", probability=0.1),
)
DATA = random.Random(7).randbytes(300_000)


@pytest.fixture
def store(url: str) -> Iterator[RetryingStore]:
    made = open_store(url, policy=POLICY, wrap=lambda inner: FaultyStore(inner, STORM, seed=1))
    made.inner.settle_s = 0.2  # 3fs: would wait seconds for what is really absent
    yield made
    made.close()


@pytest.fixture(autouse=True)
def may_warn() -> Iterator[None]:
    """Warnings of the retries are allowed here, whether they come or not."""
    logger = logging.getLogger("dsecfs.store.retry")
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.NOTSET)


def test_results_are_right_in_a_storm(store: RetryingStore) -> None:
    expected = {}
    for i in range(12):
        key = f"objects/{i % 3}/{i}"
        data = DATA[i * 1000 : i * 20_000 + 5]
        if i % 2:
            store.put_content(key, data)
        else:
            assert store.put_if_absent(key, data) is True
            assert store.put_if_absent(key, b"other") is False
        expected[key] = data
    for key, data in expected.items():
        assert store.get(key) == data
        assert store.stat(key).size == len(data)
        if len(data) > 10:
            assert store.get_range(key, 3, len(data) - 5) == data[3 : len(data) - 2]
    assert [info.key for info in store.list("objects")] == sorted(expected)
    for key in list(expected)[:4]:
        store.delete(key)
        del expected[key]
        with pytest.raises(NotFound):
            store.get(key)
    assert [info.key for info in store.list("")] == sorted(expected)
    assert isinstance(store.inner, FaultyStore) and sum(store.inner.hits.values()) > 10


def test_one_of_eight_writers_wins_in_a_storm(store: RetryingStore) -> None:
    for round_ in range(1 if store.url.startswith("s3:") else 5):
        ready = threading.Barrier(8)

        def write(_: int, key: str = f"race/{round_}", ready: threading.Barrier = ready) -> bool:
            ready.wait(30)
            return store.put_if_absent(key, b"equal")

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(write, range(8))).count(True) == 1


def test_a_store_that_is_gone_is_an_error_in_time(store: RetryingStore) -> None:
    assert isinstance(store.inner, FaultyStore)
    store.inner.rules = (Rule("timeout", seconds=0.02),)
    store.policy = RetryPolicy(
        foreground_s=0.1, background_s=0.1, write_s=0.1, first_delay_s=0.01, max_delay_s=0.02
    )
    began = time.monotonic()
    for call in (
        lambda: store.get("a"),
        lambda: store.get_range("a", 0, 1),
        lambda: store.put_if_absent("a", b"x"),
        lambda: store.put_content("a", b"x"),
        lambda: store.stat("a"),
        lambda: list(store.list("")),
        lambda: store.delete("a"),
    ):
        with pytest.raises(StoreUnavailable):
            call()
    assert time.monotonic() - began < 7 * 10


def test_wrong_bytes_pass_and_are_for_digests_to_find(store: RetryingStore) -> None:
    """The store does not know what is right: this is why everything is named by digest."""
    assert isinstance(store.inner, FaultyStore)
    store.inner.rules = ()
    store.put_content("a", DATA)
    store.inner.rules = (Rule("wrong"),)
    got = store.get_range("a", 0, 1000)
    assert len(got) == 1000 and sum(x != y for x, y in zip(got, DATA, strict=False)) == 1


def test_a_denied_store_is_not_asked_again(store: RetryingStore) -> None:
    assert isinstance(store.inner, FaultyStore)
    store.inner.rules = (Rule("denied"),)
    before = sum(store.inner.hits.values())
    with pytest.raises(StoreError):
        store.get("a")
    assert sum(store.inner.hits.values()) == before + 1
