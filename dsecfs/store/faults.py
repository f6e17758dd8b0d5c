"""Wrappers around a back end: faults on purpose, and counters.

Put below the retries: `open_store(url, wrap=lambda b: FaultyStore(b, [Rule("stall")]))`.
Which calls are hit depends on the seed, the operation, the key and how often that key was
asked for before, not on how threads interleave: a failing test fails again.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Literal, Self

from dsecfs.errors import ShortRead, StoreDenied, StoreError, StoreUnavailable
from dsecfs.store.base import Backend, ObjectInfo, Priority, seekable_size

Kind = Literal[
    "error",  # 500: nothing done
    "busy",  # 503 with Retry-After
    "denied",  # 403: final
    "broken",  # an answer that is no result: final
    "cut",  # done, but the answer is lost
    "stall",  # late by `seconds`, then done
    "timeout",  # late by `seconds`, then an error
    "short",  # ShortRead, as a back end reports it
    "truncated",  # a back end that lies: fewer bytes
    "wrong",  # a back end that lies: one byte is another
    "missing",  # NotFound is for back ends; this one leaves keys out of a list
]

READS = ("get", "get_range")


@dataclass(frozen=True, slots=True)
class Rule:
    """When something goes wrong, and how."""

    kind: Kind
    op: str = ""
    """Name of a Store method; "" for all."""
    prefix: str = ""
    """Of the key."""
    probability: float = 1.0
    skip: int = 0
    """Calls (of one operation and key) that go well first."""
    times: int | None = None
    """Calls (of one operation and key) that go wrong after that; None for all."""
    seconds: float = 1.0
    """Of "stall" and "timeout", and Retry-After of "busy"."""


class FaultyStore:
    """A Backend that misbehaves by rules. The first rule that matches a call counts.

    `latency_s` is added to every request, faulty or not. `rules` may be replaced while
    the store is in use. `hits` counts faults by (operation, kind).
    """

    def __init__(
        self,
        inner: Backend,
        rules: Sequence[Rule] = (),
        *,
        seed: int = 0,
        latency_s: float = 0.0,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.settle_s = inner.settle_s
        self.rules = tuple(rules)
        self.latency_s = latency_s
        self.hits: Counter[tuple[str, str]] = Counter()
        self._seed = seed
        self._calls: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def put_if_absent(self, key: str, data: bytes, *, put_id: str = "") -> bool:
        kind = self._before("put_if_absent", key)
        won = self.inner.put_if_absent(key, data, put_id=put_id)
        self._after("put_if_absent", key, kind)
        return won

    def put_content(self, key: str, data: bytes | memoryview | BinaryIO) -> None:
        kind = self._before("put_content", key)
        self.inner.put_content(key, data)
        self._after("put_content", key, kind)

    def get(self, key: str, *, max_size: int = 1 << 30) -> bytes:
        kind = self._before("get", key)
        return self._read("get", key, kind, self.inner.get(key, max_size=max_size))

    def get_range(
        self, key: str, offset: int, length: int, *, priority: Priority = Priority.FOREGROUND
    ) -> bytes:
        kind = self._before("get_range", key)
        data = self.inner.get_range(key, offset, length, priority=priority)
        return self._read("get_range", key, kind, data)

    def stat(self, key: str) -> ObjectInfo:
        kind = self._before("stat", key)
        info = self.inner.stat(key)
        self._after("stat", key, kind)
        return info

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """A fault strikes before the first key; "cut" and "missing" strike at every one,
        by the keys' own rules, so that a list breaks off in the middle."""
        self._after("list", prefix, self._before("list", prefix))
        for info in self.inner.list(prefix, after=after):
            kind = self._before("list_key", info.key)
            if kind != "missing":
                self._after("list_key", info.key, kind)
                yield info

    def delete(self, key: str) -> None:
        kind = self._before("delete", key)
        self.inner.delete(key)
        self._after("delete", key, kind)

    def close(self) -> None:
        self.inner.close()

    def _before(self, op: str, key: str) -> str:
        if self.latency_s and op != "list_key":
            time.sleep(self.latency_s)
        with self._lock:
            call = self._calls[op, key]
            self._calls[op, key] += 1
            rule = self._choose(op, key, call)
            if rule is None:
                return ""
            self.hits[op, rule.kind] += 1
        what = f"{self.url}: cannot {op} {key}: injected {rule.kind}"
        if rule.kind in ("stall", "timeout"):
            time.sleep(rule.seconds)
        if rule.kind in ("error", "timeout"):
            raise StoreUnavailable(what)
        if rule.kind == "busy":
            raise StoreUnavailable(what, retry_after_s=rule.seconds)
        if rule.kind == "denied":
            raise StoreDenied(what)
        if rule.kind == "broken":
            raise StoreError(what)
        return rule.kind

    def _choose(self, op: str, key: str, call: int) -> Rule | None:
        for number, rule in enumerate(self.rules):
            if rule.op not in ("", op) or not key.startswith(rule.prefix) or call < rule.skip:
                continue
            if op == "list_key" and rule.op == "":
                continue
            if rule.times is not None and call >= rule.skip + rule.times:
                continue
            dice = random.Random(f"{self._seed}:{number}:{op}:{key}:{call}")
            if dice.random() < rule.probability:
                return rule
        return None

    def _after(self, op: str, key: str, kind: str) -> None:
        if kind == "cut":
            raise StoreUnavailable(f"{self.url}: cannot {op} {key}: injected cut")

    def _read(self, op: str, key: str, kind: str, data: bytes) -> bytes:
        self._after(op, key, kind)
        if kind == "short":
            raise ShortRead(f"{self.url}: {key}: injected short read")
        if kind == "truncated":
            return data[: len(data) // 2]
        if kind == "wrong" and data:
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]
        return data


@dataclass(slots=True)
class OpStats:
    """Of one operation."""

    requests: int = 0
    errors: int = 0
    bytes: int = 0
    """Of object content, both directions."""
    seconds: float = 0.0
    """Summed over threads."""


@dataclass(slots=True)
class StoreStats:
    """A snapshot of what went through a CountingStore."""

    ops: dict[str, OpStats] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return sum(op.requests for op in self.ops.values())

    @property
    def bytes_read(self) -> int:
        return sum(self.ops[op].bytes for op in READS if op in self.ops)

    @property
    def bytes_written(self) -> int:
        return sum(op.bytes for name, op in self.ops.items() if name.startswith("put"))


class CountingStore:
    """A Backend that counts requests: put below the retries, every attempt is one."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.url = inner.url
        self.settle_s = inner.settle_s
        self._lock = threading.Lock()
        self._ops: dict[str, OpStats] = {}

    def stats(self, *, reset: bool = False) -> StoreStats:
        """Counts since the beginning or the last reset."""
        with self._lock:
            copy = {
                name: OpStats(op.requests, op.errors, op.bytes, op.seconds)
                for name, op in self._ops.items()
            }
            if reset:
                self._ops.clear()
        return StoreStats(copy)

    def put_if_absent(self, key: str, data: bytes, *, put_id: str = "") -> bool:
        with _Counted(self, "put_if_absent") as call:
            won = self.inner.put_if_absent(key, data, put_id=put_id)
            call.bytes = len(data)
            return won

    def put_content(self, key: str, data: bytes | memoryview | BinaryIO) -> None:
        with _Counted(self, "put_content") as call:
            view = isinstance(data, (bytes, memoryview))
            size = memoryview(data).nbytes if view else seekable_size(data)  # type: ignore[arg-type]
            self.inner.put_content(key, data)
            call.bytes = size

    def get(self, key: str, *, max_size: int = 1 << 30) -> bytes:
        with _Counted(self, "get") as call:
            data = self.inner.get(key, max_size=max_size)
            call.bytes = len(data)
            return data

    def get_range(
        self, key: str, offset: int, length: int, *, priority: Priority = Priority.FOREGROUND
    ) -> bytes:
        with _Counted(self, "get_range") as call:
            data = self.inner.get_range(key, offset, length, priority=priority)
            call.bytes = len(data)
            return data

    def stat(self, key: str) -> ObjectInfo:
        with _Counted(self, "stat"):
            return self.inner.stat(key)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Counted as one request, however many pages the back end asks for."""
        with _Counted(self, "list"):
            yield from self.inner.list(prefix, after=after)

    def delete(self, key: str) -> None:
        with _Counted(self, "delete"):
            self.inner.delete(key)

    def close(self) -> None:
        self.inner.close()


class _Counted:
    def __init__(self, store: CountingStore, op: str) -> None:
        self._store = store
        self._op = op
        self.bytes = 0

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._store._lock:
            op = self._store._ops.setdefault(self._op, OpStats())
            op.requests += 1
            op.errors += kind is not None and kind is not GeneratorExit
            op.bytes += self.bytes
            op.seconds += time.perf_counter() - self._began
