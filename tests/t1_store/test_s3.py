"""What only S3 can do wrong: the network between, credentials, several servers' habits."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dsecfs.errors import (
    DsecfsError,
    NotFound,
    ShortRead,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from dsecfs.store import s3
from dsecfs.store.open import open_store
from dsecfs.store.retry import RetryPolicy
from dsecfs.store.s3 import PART, S3Store, parse_s3_url
from dsecfs.store.s3errors import by_status
from tests.support.netfault import Fault, NetFault
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, Seaweed

DATA = os.urandom(1 << 20)

PASS = Fault("stall", seconds=0)
"""Lets a request through. A PUT is two on the wire ("Expect: 100-continue"): headers, body."""


@pytest.fixture
def proxy(s3_server: Seaweed) -> Iterator[NetFault]:
    with NetFault("127.0.0.1", s3_server.port) as proxy:
        yield proxy


@pytest.fixture(params=["obstore", "boto3"])
def url(request: pytest.FixtureRequest, s3_server: Seaweed, proxy: NetFault) -> str:
    """A fresh prefix behind the proxy."""
    prefix = uuid.uuid4().hex
    return f"{s3_server.url(prefix=prefix, port=proxy.port)}&reader={request.param}"


@pytest.fixture
def raw(url: str) -> Iterator[S3Store]:
    store = S3Store(parse_s3_url(url))
    yield store
    store.close()


def uploads(store: S3Store) -> list[Any]:
    answer = store._boto().list_multipart_uploads(Bucket=store.settings.bucket)
    base = store.settings.prefix
    return [u for u in answer.get("Uploads", []) if u["Key"].startswith(base)]


def test_a_connection_cut_in_the_middle_of_an_answer(raw: S3Store, proxy: NetFault) -> None:
    raw.put_content("a", DATA)
    assert raw.get_range("a", 0, len(DATA)) == DATA
    for after in (0, 10, 1000, 500_000):
        proxy.fail(Fault("cut", after))
        with pytest.raises(StoreUnavailable):
            raw.get_range("a", 0, len(DATA))
        proxy.fail(Fault("cut", after))
        with pytest.raises(StoreUnavailable):
            raw.get("a")
    store = open_store(raw.url)
    proxy.fail(*[Fault("cut", 700_000)] * 3)
    assert store.get("a") == DATA
    store.close()


def test_a_server_that_stalls_is_left_in_time(
    url: str, proxy: NetFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 0.5)
    raw = S3Store(parse_s3_url(url))
    raw.put_content("a", DATA)
    for after in (0, 200_000):
        proxy.fail(Fault("stall", after, seconds=8))
        with pytest.raises(StoreUnavailable):
            raw.get_range("a", 0, len(DATA))
    assert raw.get("a") == DATA
    raw.close()


def test_a_server_that_is_gone(raw: S3Store, proxy: NetFault) -> None:
    raw.put_content("a", DATA)
    with proxy.down():
        for call in (
            lambda: raw.get("a"),
            lambda: raw.get_range("a", 0, 1),
            lambda: raw.put_if_absent("b", b"x"),
            lambda: raw.put_content("b", b"x"),
            lambda: raw.stat("a"),
            lambda: list(raw.list("")),
            lambda: raw.delete("a"),
        ):
            with pytest.raises(StoreUnavailable) as error:
                call()
            assert "\n" not in str(error.value)
    assert raw.get("a") == DATA


def test_a_put_whose_answer_was_lost_on_the_wire_won(raw: S3Store, proxy: NetFault) -> None:
    store = open_store(raw.url, policy=RetryPolicy(first_delay_s=0.001))
    proxy.fail(PASS, Fault("cut", 0))
    with pytest.raises(StoreUnavailable):
        raw.put_if_absent("done", b"x")
    assert raw.get("done") == b"x", "the put itself must have been done"
    for i in range(4):
        proxy.fail(PASS, Fault("cut", 0))
        assert store.put_if_absent(f"r/{i}", b"equal") is True
        assert store.put_if_absent(f"r/{i}", b"equal") is False
    assert len(list(store.list("r"))) == 4
    store.close()


def test_one_wins_although_answers_are_lost_on_the_wire(raw: S3Store, proxy: NetFault) -> None:
    store = open_store(raw.url, policy=RetryPolicy(first_delay_s=0.001))
    ready = threading.Barrier(8)

    def write(_: int) -> bool:
        ready.wait(30)
        return store.put_if_absent("race", b"equal")

    proxy.fail(*[PASS, Fault("cut", 0)] * 6)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(write, range(8))).count(True) == 1
    store.close()


def test_nothing_is_visible_of_a_put_cut_in_the_middle(raw: S3Store, proxy: NetFault) -> None:
    raw.put_content("warm", b"x")
    proxy.fail(PASS, Fault("cut", 300_000, side="request"))
    with pytest.raises(StoreUnavailable):
        raw.put_if_absent("half", DATA)
    with pytest.raises(NotFound):
        raw.stat("half")
    assert raw.put_if_absent("half", DATA) is True


def test_a_failed_multipart_upload_leaves_no_parts(raw: S3Store, proxy: NetFault) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() >= PART:
                raise OSError("the source broke")
            return super().read(size)

    with pytest.raises(OSError, match="the source broke"):
        raw.put_content("o/a", Broken(bytes(3 * PART)))
    assert list(raw.list("")) == [] and uploads(raw) == []

    class Shrinking(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return b"" if self.tell() >= 2 * PART else super().read(size)

    with pytest.raises(StoreError, match="source had"):
        raw.put_content("o/a", Shrinking(bytes(3 * PART)))
    assert list(raw.list("")) == [] and uploads(raw) == []
    # One request begins the upload, then come three parts with headers and body each: of
    # four faults at least one hits a body.
    before = proxy.bytes_up
    proxy.fail(PASS, *[Fault("cut", 5_000_000, side="request")] * 4)
    with pytest.raises(StoreUnavailable):
        raw.put_content("o/a", io.BytesIO(bytes(3 * PART)))
    assert proxy.bytes_up - before > 5_000_000
    proxy.forget()
    assert list(raw.list("")) == [] and uploads(raw) == []


def test_an_object_that_was_replaced_is_noticed(raw: S3Store) -> None:
    raw.put_content("a", b"first" * 10)
    assert raw.get_range("a", 0, 5) == b"first"
    raw.put_content("a", b"other" * 10)
    with pytest.raises(ShortRead, match="changed"):
        raw.get_range("a", 5, 5)
    assert raw.get_range("a", 5, 5) == b"other"


def test_an_object_replaced_between_two_pieces_is_never_mixed(
    raw: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "PIECE", 1000)
    raw.put_content("a", b"1" * 2500)
    assert raw.get("a") == b"1" * 2500
    reader = raw._read_with()
    fetch = reader.fetch

    def slow(name: str, start: int, length: int, *, if_match: str = "") -> Any:
        if start == 1000:
            raw.put_content("a", b"2" * 2500)
        return fetch(name, start, length, if_match=if_match)

    monkeypatch.setattr(reader, "fetch", slow)
    with pytest.raises(ShortRead, match="changed"):
        raw.get("a")


def test_wrong_credentials_are_denied_and_shown_nowhere(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (
        ("AWS_SECRET_ACCESS_KEY", "very-wrong-secret"),
        ("AWS_ACCESS_KEY_ID", "unknown-key-id"),
    ):
        monkeypatch.setenv(name, value)
        with caplog.at_level(logging.INFO):
            store = open_store(url)
            for call in (
                lambda store=store: store.get("a"),
                lambda store=store: store.get_range("a", 0, 1),
                lambda store=store: store.put_if_absent("a", b"x"),
                lambda store=store: list(store.list("")),
            ):
                with pytest.raises(StoreDenied) as error:
                    call()
                text = f"{error.value} {error.value!r} {caplog.text} {store.url}"
                for secret in ("very-wrong-secret", "unknown-key-id", ACCESS_KEY, SECRET_KEY):
                    assert secret not in text
                assert error.value.__cause__ is None and error.value.__suppress_context__


def test_no_credentials_says_where_to_put_them(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreDenied, match="no credentials; set AWS_ACCESS_KEY_ID"):
        open_store(url).get("a")


def test_a_missing_bucket_is_not_a_missing_object(s3_server: Seaweed) -> None:
    for reader in ("obstore", "boto3"):
        store = open_store(f"{s3_server.url('no-such-bucket')}&reader={reader}")
        for call in (lambda s=store: s.get("a"), lambda s=store: list(s.list(""))):
            with pytest.raises(StoreError, match="there is no bucket no-such-bucket") as error:
                call()
            assert not error.value.recoverable


def test_objects_of_others_in_the_bucket_are_left_out(raw: S3Store) -> None:
    raw.put_content("a/b", b"x")
    for name in ("a b", "a/ü", "~x"):
        raw._boto().put_object(
            Bucket=raw.settings.bucket, Key=f"{raw.settings.prefix}/{name}", Body=b""
        )
    assert [info.key for info in raw.list("")] == ["a/b"]


def test_many_threads_share_a_store(raw: S3Store) -> None:
    """More than fit urllib3's default pool of 10, which would warn (and fail the test)."""
    raw.put_content("a", DATA)

    def read(i: int) -> bool:
        return raw.get_range("a", i * 1000, 4000) == DATA[i * 1000 : i * 1000 + 4000]

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(read, range(256)))


def _in_child(store: S3Store, answers: Any) -> None:
    try:
        store.put_content("child", b"from the child")
        answers.put((store.get("a") == DATA, store.get_range("a", 5, 10) == DATA[5:15]))
    except DsecfsError as e:
        answers.put(repr(e))


def test_a_store_opened_before_a_fork_works_after_it(s3_server: Seaweed) -> None:
    store = S3Store(parse_s3_url(s3_server.url(prefix=uuid.uuid4().hex) + "&reader=boto3"))
    store.put_content("a", DATA)
    assert store.get("a") == DATA
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(store, answers))
    child.start()
    assert answers.get(timeout=60) == (True, True)
    child.join(30)
    assert child.exitcode == 0
    assert store.get("child") == b"from the child" and store.get("a") == DATA
    store.close()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (500, "InternalError", StoreUnavailable),
        (503, "SlowDown", StoreUnavailable),
        (502, "", StoreUnavailable),
        (501, "NotImplemented", StoreError),
        (429, "", StoreUnavailable),
        (408, "", StoreUnavailable),
        (400, "RequestTimeout", StoreUnavailable),
        (409, "ConditionalRequestConflict", StoreUnavailable),
        (404, "NoSuchKey", NotFound),
        (404, "NoSuchBucket", StoreError),
        (416, "InvalidRange", ShortRead),
        (412, "PreconditionFailed", ShortRead),
        (401, "", StoreDenied),
        (403, "AccessDenied", StoreDenied),
        (400, "ExpiredToken", StoreDenied),
        (301, "PermanentRedirect", StoreError),
        (400, "InvalidArgument", StoreError),
        (200, "<script>\n", StoreError),
    ],
)
def test_what_answers_mean(status: int, code: str, kind: type[DsecfsError]) -> None:
    error = by_status(status, code, "s3://b", "b", "read", "k")
    assert type(error) is kind and "\n" not in str(error) and "<" not in str(error)


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), ("0", 0.0), ("x", None), (None, None), ("-1", None)]
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    error = by_status(503, "SlowDown", "s3://b", "b", "read", "k", retry_after=value)
    assert isinstance(error, StoreUnavailable) and error.retry_after_s == seconds
    date = by_status(
        503, "", "s3://b", "b", "read", "k", retry_after="Wed, 21 Oct 2015 07:28:00 GMT"
    )
    assert isinstance(date, StoreUnavailable) and date.retry_after_s == 0.0


class _Pages:
    """A boto3 client that lists what it is told to, in the order it is told to."""

    def __init__(self, keys: list[str], by_walk: bool) -> None:
        order: Callable[[str], Any] = (lambda k: k.split("/")) if by_walk else (lambda k: k)
        self.keys = sorted(keys, key=order)
        self.order = order
        self.sent = 0

    def get_paginator(self, _: str) -> _Pages:
        return self

    def paginate(self, *, Prefix: str, StartAfter: str = "", **_: Any) -> Iterator[Any]:
        from datetime import UTC, datetime

        for key in self.keys:
            if key.startswith(Prefix) and self.order(key) > self.order(StartAfter):
                self.sent += 1
                item = {"Key": key, "Size": 1, "LastModified": datetime.now(UTC)}
                yield {"Contents": [item]}


@pytest.mark.parametrize("by_walk", [True, False])
def test_lists_are_sorted_whatever_order_the_server_has(by_walk: bool) -> None:
    """Amazon sorts whole keys, SeaweedFS walks directories: no server here does both."""
    keys = [f"{a}{b}{c}" for a in ("p/", "p/a", "p/a-", "p/a.x", "p/0", "p/A/") for b in ("", "b")
            for c in ("", "0", "-c", "/d", ".e/f")]  # fmt: skip
    keys = sorted({k for k in keys if "//" not in k and not k.endswith("/")})
    store = S3Store(parse_s3_url("s3://bucket"))
    store._pid = os.getpid()
    store._client = pages = _Pages(keys, by_walk)
    assert [info.key for info in store.list("p")] == keys
    for after in keys:
        assert [info.key for info in store.list("p", after=after)] == [k for k in keys if k > after]
    many = [f"objects/{i:02x}/{j}" for i in range(256) for j in range(10)]
    store._client = pages = _Pages(many, by_walk)
    listing = store.list("objects")
    first = [next(listing) for _ in range(100)]
    assert [info.key for info in first] == sorted(many)[:100]
    assert pages.sent < 150, "a list must stream"
    pages.sent = 0
    assert len(list(store.list("objects", after="objects/f0/3"))) == 16 * 10 - 4
    assert pages.sent <= 17 * 10, "a list that goes on must not begin from the start"
