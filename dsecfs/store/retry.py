"""The one retry policy. No other module repeats a store call that failed.

What must hold:
- only errors marked recoverable by the error tree (StoreUnavailable and below) are tried
  again; a ShortRead only a few times, because an object that *is* too short stays so;
- every call ends: no attempt begins after the deadline, and a back end bounds its own
  attempts, so a call takes at most deadline + one attempt;
- the last error comes out with its own type, saying how often and how long it was tried;
- a repeated `put_if_absent` carries the id of the first attempt, so exactly one of all
  callers gets True although answers may be lost. A call that *raised* may still have put.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

from dsecfs.errors import FormatError, NotFound, ShortRead, StoreUnavailable
from dsecfs.store.base import Backend, ObjectInfo, Priority, seekable_size

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long and how often. All times in seconds."""

    foreground_s: float = 30.0
    """Deadline of a call for which somebody waits: every read unless it says otherwise, and each
    step of a list."""
    background_s: float = 120.0
    """Deadline of reads with Priority.PREFETCH or BACKGROUND."""
    write_s: float = 120.0
    """Deadline of put and delete."""
    first_delay_s: float = 0.05
    max_delay_s: float = 5.0
    """The n-th wait is drawn from 0 to min(max_delay_s, first_delay_s × 2ⁿ) ("full jitter":
    many clients that failed together must not come back together)."""
    short_reads: int = 4
    """Attempts for a range that comes back short."""
    quiet: int = 4
    """Failures before the first warning: a store that hiccups is a store."""


DEFAULT_POLICY = RetryPolicy()


class RetryingStore:
    """A Store over a Backend, with the policy applied to every call."""

    def __init__(
        self,
        inner: Backend,
        policy: RetryPolicy = DEFAULT_POLICY,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.policy = policy
        self._rng = rng or random.Random()
        self._closed = threading.Event()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        put_id = uuid.uuid4().hex
        return self._call(
            "create", key, self.policy.write_s,
            lambda: self.inner.put_if_absent(key, data, put_id=put_id),
        )  # fmt: skip

    def put_content(self, key: str, data: bytes | memoryview | BinaryIO) -> None:
        if isinstance(data, (bytes, memoryview)):
            self._call(
                "store", key, self.policy.write_s, lambda: self.inner.put_content(key, data)
            )
            return
        stream = data
        seekable_size(stream)
        begin = stream.tell()

        def attempt() -> None:
            stream.seek(begin)
            self.inner.put_content(key, stream)

        self._call("store", key, self.policy.write_s, attempt)

    def get(self, key: str, *, max_size: int = 1 << 30) -> bytes:
        def attempt() -> bytes:
            data = self.inner.get(key, max_size=max_size)
            if len(data) > max_size:
                raise FormatError(f"{self.url}: {key} has more than {max_size} bytes")
            return data

        return self._call("read", key, self.policy.foreground_s, attempt, self.inner.settle_s)

    def get_range(
        self, key: str, offset: int, length: int, *, priority: Priority = Priority.FOREGROUND
    ) -> bytes:
        def attempt() -> bytes:
            data = self.inner.get_range(key, offset, length, priority=priority)
            if len(data) != length:
                raise ShortRead(f"{self.url}: {key}: {len(data)} of {length} bytes at {offset}")
            return data

        foreground = priority == Priority.FOREGROUND
        deadline = self.policy.foreground_s if foreground else self.policy.background_s
        return self._call("read", key, deadline, attempt, self.inner.settle_s)

    def stat(self, key: str) -> ObjectInfo:
        return self._call("stat", key, self.policy.foreground_s, lambda: self.inner.stat(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        after = ""
        listing = self.inner.list(prefix)

        def step() -> ObjectInfo | None:
            nonlocal listing
            try:
                return next(listing, None)
            except StoreUnavailable:
                # A generator is dead after it raised: go on behind the last key.
                listing = self.inner.list(prefix, after=after)
                raise

        while (info := self._call("list", prefix, self.policy.foreground_s, step)) is not None:
            after = info.key
            yield info

    def delete(self, key: str) -> None:
        self._call("delete", key, self.policy.write_s, lambda: self.inner.delete(key))

    def close(self) -> None:
        self._closed.set()
        self.inner.close()

    def _call(
        self,
        verb: str,
        key: str,
        deadline_s: float,
        attempt: Callable[[], T],
        settle_s: float = 0.0,
    ) -> T:
        began = time.monotonic()
        failures = shorts = 0
        while True:
            error: StoreUnavailable | NotFound
            try:
                return attempt()
            except NotFound as e:
                if time.monotonic() - began >= settle_s:
                    raise
                error = e
                delay = min(0.5, settle_s / 8)
            except StoreUnavailable as e:
                error = e
                failures += 1
                shorts += isinstance(e, ShortRead)
                delay = self._delay(failures, e.retry_after_s)
                spent = time.monotonic() - began
                if spent + delay > deadline_s or shorts >= self.policy.short_reads:
                    raise self._give_up(e, failures, spent) from None
                log.log(
                    logging.WARNING if self._is_told(failures) else logging.DEBUG,
                    "store: %s %s failed %d times, again in %.1f s: %s",
                    verb, key, failures, delay, e.message,
                )  # fmt: skip
            if self._closed.wait(delay):
                raise error

    def _is_told(self, failures: int) -> bool:
        """With each doubling of what is kept quiet: the fifth failure, the tenth, twentieth …"""
        times, rest = divmod(failures, self.policy.quiet + 1)
        return not rest and times.bit_count() == 1

    def _delay(self, failures: int, retry_after_s: float | None) -> float:
        policy = self.policy
        ceiling = min(policy.max_delay_s, policy.first_delay_s * 2 ** min(failures, 30))
        return (retry_after_s or 0.0) + self._rng.uniform(0.0, ceiling)

    def _give_up(self, e: StoreUnavailable, failures: int, spent: float) -> StoreUnavailable:
        short = isinstance(e, ShortRead)
        hint = "is the object whole?" if short else "is the store reachable? then try again"
        times = "once" if failures == 1 else f"{failures} times in {spent:.1f} s"
        return type(e)(
            f"{e.message} (tried {times})",
            hint=e.hint or hint,
            retry_after_s=e.retry_after_s,
        )
