"""What every back end must do. The oracle is a dict."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsecfs.errors import BadInput, FormatError, NotFound, ShortRead, StoreUnavailable
from dsecfs.store.base import Backend
from dsecfs.store.keys import MAX_COMPONENT, MAX_KEY
from dsecfs.store.open import check_store, open_store

WRITER = Path(__file__).with_name("writer.py")
DATA = bytes(range(256)) * 1024

once_per_writer = pytest.mark.parametrize("url", ["file", "3fs", "s3-obstore"], indirect=True)
"""For what only writes: both S3 readers have one way of writing."""


def keys(store: Backend, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


@contextlib.contextmanager
def process(*args: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, str(WRITER), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_what_was_put_comes_back(backend: Backend) -> None:
    assert backend.put_if_absent("refs/base/debian/.v/12", b"ref")
    backend.put_content("objects/ab/abc", DATA)
    backend.put_content("objects/ab/view", memoryview(DATA)[100:200])
    source = io.BytesIO(b"skipped" + DATA)
    source.seek(7)
    backend.put_content("objects/ab/stream", source)
    assert backend.get("refs/base/debian/.v/12") == b"ref"
    assert backend.get("objects/ab/abc") == DATA
    assert backend.get("objects/ab/view") == DATA[100:200]
    assert backend.get("objects/ab/stream") == DATA
    assert type(backend.get_range("objects/ab/abc", 0, 10)) is bytes


def test_the_first_put_stays(backend: Backend) -> None:
    assert backend.put_if_absent("refs/a", b"first") is True
    assert backend.put_if_absent("refs/a", b"second") is False
    assert backend.put_if_absent("refs/a", b"first") is False
    assert backend.get("refs/a") == b"first"


def test_a_repeated_put_with_its_id_gives_its_answer_again(backend: Backend) -> None:
    mine, other = "1" * 32, "2" * 32
    assert backend.put_if_absent("refs/a", b"same", put_id=mine) is True
    assert backend.put_if_absent("refs/a", b"same", put_id=mine) is True
    assert backend.put_if_absent("refs/a", b"same", put_id=other) is False
    assert backend.put_if_absent("refs/a", b"same", put_id=other) is False


@once_per_writer
def test_content_may_be_put_again_and_is_new_then(backend: Backend) -> None:
    backend.put_content("objects/a", DATA)
    first = backend.stat("objects/a").mtime
    time.sleep(1.1)  # S3 counts whole seconds
    backend.put_content("objects/a", io.BytesIO(DATA))
    again = backend.stat("objects/a")
    assert again.mtime > first and again.size == len(DATA)
    assert backend.get("objects/a") == DATA


def test_a_damaged_object_of_another_size_is_healed_by_a_put(backend: Backend) -> None:
    backend.put_content("objects/a", DATA[:1000])
    backend.put_content("objects/a", DATA)
    assert backend.get("objects/a") == DATA


@pytest.mark.parametrize("size", [0, 1])
def test_tiny_objects(backend: Backend, size: int) -> None:
    assert backend.put_if_absent("a/ref", b"x" * size)
    backend.put_content("a/content", io.BytesIO(b"x" * size))
    for key in ("a/ref", "a/content"):
        assert backend.get(key) == b"x" * size
        assert backend.stat(key).size == size
        with pytest.raises(ShortRead):
            backend.get_range(key, 0, 2)
        with pytest.raises(ShortRead):
            backend.get_range(key, 5, 1)


def test_ranges_are_exact(backend: Backend) -> None:
    backend.put_content("objects/a", DATA)
    end = len(DATA)
    for offset, length in ((0, 1), (0, end), (end - 1, 1), (255, 2), (4095, 4098), (end // 2, 77)):
        assert backend.get_range("objects/a", offset, length) == DATA[offset : offset + length]
    for offset, length in ((end - 1, 2), (end, 1), (end + 10, 5), (0, end + 1), (0, 1 << 40)):
        with pytest.raises(ShortRead):
            backend.get_range("objects/a", offset, length)
    for offset, length in ((-1, 1), (0, 0), (0, -1)):
        with pytest.raises(BadInput):
            backend.get_range("objects/a", offset, length)


def test_absent_keys(backend: Backend) -> None:
    backend.put_content("objects/ab/abc", b"x")
    for key in ("nothing", "objects/ab/abd", "objects/ab", "objects/ab/abc/below"):
        with pytest.raises(NotFound):
            backend.get(key)
        with pytest.raises(NotFound):
            backend.get_range(key, 0, 1)
        with pytest.raises(NotFound):
            backend.stat(key)
        backend.delete(key)
    assert keys(backend) == ["objects/ab/abc"]


def test_a_larger_object_than_expected_is_refused(backend: Backend) -> None:
    backend.put_content("a", b"x" * 100)
    assert len(backend.get("a", max_size=100)) == 100
    with pytest.raises(FormatError, match="100 bytes.*99"):
        backend.get("a", max_size=99)


def test_large_objects_by_stream(backend: Backend) -> None:
    piece = hashlib.sha256(b"seed").digest() * 32768
    data = b"".join(bytes([i]) + piece for i in range(40))  # 40 MiB, no two MiB alike
    backend.put_content("objects/large", io.BytesIO(data))
    assert backend.stat("objects/large").size == len(data)
    assert backend.get("objects/large") == data
    assert backend.get_range("objects/large", (16 << 20) - 3, 9 << 20) == (
        data[(16 << 20) - 3 : (25 << 20) - 3]
    )
    backend.put_content("objects/view", memoryview(data)[: 17 << 20])
    assert backend.get("objects/view") == data[: 17 << 20]


def test_a_source_that_cannot_seek_is_refused(backend: Backend) -> None:
    read, write = os.pipe()
    os.close(write)
    with open(read, "rb") as pipe, pytest.raises(BadInput, match="cannot seek"):
        open_store(backend.url).put_content("a", pipe)


def test_stat_and_list_agree(backend: Backend) -> None:
    before = time.time() - 2
    backend.put_content("objects/a", DATA)
    info = backend.stat("objects/a")
    assert info == next(iter(backend.list("objects")))
    assert info.key == "objects/a" and info.size == len(DATA)
    assert before < info.mtime < time.time() + 2


TRICKY = ["a", "a-b", "a-c/x", "a.b", "a/b.c", "a/b/c", "a/b/d", "a/b-c", "a/b0", "a0",
          "A/z", "_x", "z/.v/1", "z/.v/10", "z/.v/9", "z-1/.v/1"]  # fmt: skip


def test_lists_are_sorted_and_end_at_components(backend: Backend) -> None:
    # "a" beside "a/…" exists on S3 only.
    names = [k for k in TRICKY if k != "a" or backend.url.startswith("s3:")]
    for key in reversed(names):
        backend.put_content(key, key.encode())
    if hasattr(backend, "page_size"):
        backend.page_size = 3
    assert keys(backend) == sorted(names)
    for prefix in ("a", "a/", "a/b", "z", "z/.v", "a-c", "A", "nothing", "a/b/c/d", "a0"):
        below = prefix.rstrip("/") + "/"
        assert keys(backend, prefix) == sorted(k for k in names if k.startswith(below)), prefix
    for prefix in ("", "a", "z", "a/b"):
        listed = keys(backend, prefix)
        for after in [*listed, "0", "a/b", "zzz"]:
            rest = [info.key for info in backend.list(prefix, after=after)]
            assert rest == [k for k in listed if k > after], (prefix, after)


def test_lists_of_many(backend: Backend) -> None:
    names = [f"n/{i:02d}/{i * 7919 % 1000:03d}" for i in range(60)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: backend.put_content(key, b""), names))
    if hasattr(backend, "page_size"):
        backend.page_size = 7
    assert keys(backend, "n") == sorted(names)


def test_deleted_is_gone(backend: Backend) -> None:
    for key in ("a/b/c", "a/b/d", "a/e"):
        backend.put_content(key, b"x")
    backend.delete("a/b/c")
    backend.delete("a/b/c")
    assert keys(backend) == ["a/b/d", "a/e"]
    backend.delete("a/b/d")
    backend.delete("a/e")
    assert keys(backend) == []
    assert backend.put_if_absent("a/b/c", b"again")
    assert keys(backend) == ["a/b/c"]


HOSTILE = ["", "/", "/etc/passwd", "a/", "a//b", ".", "..", "../x", "a/../../x", "a/..", "a/./b",
           "a\0b", "a b", "a\nb", "ä", "a/\u202e", "%2e%2e/x", "a\\b", "~tmp/x", "a:b", "a?b", "a*",
           "x" * (MAX_KEY + 1), "x" * (MAX_COMPONENT + 1), "a" + "/a" * 500]  # fmt: skip


@pytest.mark.parametrize("key", HOSTILE, ids=lambda k: ascii(k[:20]))
def test_hostile_keys_are_refused(backend: Backend, key: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: backend.put_if_absent(key, b"x"),
        lambda: backend.put_content(key, b"x"),
        lambda: backend.get(key),
        lambda: backend.get_range(key, 0, 1),
        lambda: backend.stat(key),
        lambda: backend.delete(key),
    ]
    if key not in ("", "a/"):
        calls.append(lambda: list(backend.list(key)))
    for call in calls:
        with pytest.raises(BadInput) as error:
            call()
        assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_the_longest_keys_work(backend: Backend) -> None:
    longest = "/".join(["k" * MAX_COMPONENT, "-" * MAX_COMPONENT, "." * 254 + "x", "z" * 100])
    for key in (longest, "-rf/--help", ".hidden/...", "a" + "/a" * 100):
        assert len(key) <= MAX_KEY
        assert backend.put_if_absent(key, key.encode())
        assert backend.get(key) == key.encode()
        assert key in keys(backend)


def test_one_of_many_threads_wins(backend: Backend) -> None:
    # SeaweedFS takes over a second for each round.
    for round_ in range(2 if backend.url.startswith("s3:") else 20):
        ready = threading.Barrier(8)

        def write(number: int, round_: int = round_, ready: threading.Barrier = ready) -> bool:
            ready.wait(30)
            return backend.put_if_absent(f"race/{round_}", str(number).encode())

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(write, range(8)))
        assert won.count(True) == 1
        assert backend.get(f"race/{round_}") == str(won.index(True)).encode()


@once_per_writer
def test_one_of_many_processes_wins(url: str, backend: Backend) -> None:
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(process("race", url, "race/a", str(i), "2")) for i in range(4)
        ]
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        printed = "".join(child.communicate(timeout=60)[0] for child in children)
        lines = [line.split() for line in printed.splitlines()]
    assert len(lines) == 8
    winners = [who for who, won in lines if won == "True"]
    assert len(winners) == 1
    assert backend.get("race/a") == winners[0].encode()


def test_writers_of_one_content_do_not_disturb_readers(backend: Backend) -> None:
    backend.put_content("objects/a", DATA)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            backend.put_content("objects/a", io.BytesIO(DATA))

    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write) for _ in range(2)]
        try:
            for i in range(60):
                assert backend.get_range("objects/a", i * 100, 5000) == (
                    DATA[i * 100 : i * 100 + 5000]
                )
                assert backend.get("objects/a") == DATA
        finally:
            stop.set()
        for writer in writers:
            writer.result()


def test_readers_see_all_or_nothing_of_a_deleted_object(backend: Backend) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            backend.put_if_absent("x/y/z", DATA)
            backend.delete("x/y/z")

    seen = 0
    with ThreadPoolExecutor(2) as pool:
        writer = pool.submit(write)
        try:
            deadline = time.monotonic() + 30
            while seen < 20 and time.monotonic() < deadline:
                with contextlib.suppress(NotFound, StoreUnavailable):
                    assert backend.get("x/y/z") == DATA
                    seen += 1
                assert keys(backend, "x") in ([], ["x/y/z"])
        finally:
            stop.set()
        writer.result()
    assert seen == 20


@once_per_writer
def test_nothing_is_visible_of_a_writer_that_was_killed(url: str, backend: Backend) -> None:
    with process("stuck", url, "objects/half", str(96 << 20)) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        assert keys(backend) == []
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    assert keys(backend) == []
    with pytest.raises(NotFound):
        backend.stat("objects/half")
    backend.put_content("objects/half", DATA)
    assert backend.get("objects/half") == DATA


def test_the_probe_finds_nothing_wrong_and_leaves_nothing(url: str) -> None:
    store = open_store(url)
    check_store(store)
    assert list(store.list("")) == []
    store.close()
