"""A bounded pool of threads that takes work by priority, with a floor for each class.

What must hold: no thread exists before the first `submit` (the FUSE worker is forked); at
most `shared` threads at a time do anything but FOREGROUND work, so a reader never waits
behind a pool full of prefetches; and every class gets turns however long the queues
before it are.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable

from dsecfs.errors import CacheError
from dsecfs.store.base import Priority

Work = Callable[[], object]

_PREFETCH_TURN = 8
"""Every so many turns PREFETCH goes first …"""
_BACKGROUND_TURN = 32
"""… and every so many BACKGROUND does."""


class Pool:
    """Threads that run what is submitted. Work must not raise; if it does, its thread ends
    through threading.excepthook and another one takes its place."""

    def __init__(self, name: str, threads: int, *, shared: int) -> None:
        self._name = name
        self._threads = threads
        self._shared = shared
        self._changed = threading.Condition()
        self._queues: tuple[deque[Work], ...] = tuple(deque() for _ in Priority)
        self._later: list[tuple[float, int, Priority, Work]] = []
        self._count = 0
        self._running = 0
        self._idle = 0
        self._busy_shared = 0
        self._turn = 0
        self._closed = False

    def submit(self, priority: Priority, *work: Work) -> None:
        """Queue `work`, each piece for one thread. CacheError after `close`."""
        with self._changed:
            self._check()
            self._queues[priority].extend(work)
            self._wake()

    def submit_later(self, delay_s: float, priority: Priority, work: Work) -> None:
        """Queue `work` in `delay_s` seconds, without a thread that waits for it."""
        with self._changed:
            self._check()
            self._count += 1
            heapq.heappush(self._later, (time.monotonic() + delay_s, self._count, priority, work))
            self._wake()

    def waiting(self, priority: Priority) -> int:
        """How many pieces of this class are queued."""
        return len(self._queues[priority])

    def close(self, wait_s: float = 5.0) -> None:
        """Drop what is queued; return when all threads have ended or after `wait_s`."""
        end = time.monotonic() + wait_s
        with self._changed:
            self._closed = True
            for queue in self._queues:
                queue.clear()
            self._later.clear()
            self._changed.notify_all()
            while self._running and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)

    def _check(self) -> None:
        if self._closed:
            raise CacheError("the cache was closed while work was under way")

    def _wake(self) -> None:
        shared = len(self._queues[Priority.PREFETCH]) + len(self._queues[Priority.BACKGROUND])
        useful = len(self._queues[Priority.FOREGROUND]) + min(
            shared, self._shared - self._busy_shared
        )
        useful = max(useful, 1 if self._later else 0)
        self._changed.notify(useful)
        for _ in range(min(useful - self._idle, self._threads - self._running)):
            # Daemons: a thread stuck in a store must not keep a process from ending.
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._running += 1
            thread.start()

    def _serve(self) -> None:
        try:
            while (taken := self._take()) is not None:
                priority, work = taken
                try:
                    work()
                finally:
                    del work, taken
                    if priority != Priority.FOREGROUND:
                        with self._changed:
                            self._busy_shared -= 1
                            self._changed.notify()
        finally:
            with self._changed:
                self._running -= 1
                if not self._closed:
                    self._wake()  # ended by an exception: somebody must do the rest
                self._changed.notify_all()

    def _take(self) -> tuple[Priority, Work] | None:
        """The next piece of work; None when the pool is closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                while self._later and self._later[0][0] <= now:
                    _, _, priority, work = heapq.heappop(self._later)
                    self._queues[priority].append(work)
                priorities = self._order()
                for priority in priorities:
                    queue = self._queues[priority]
                    if queue and (
                        priority == Priority.FOREGROUND or self._busy_shared < self._shared
                    ):
                        self._turn += 1
                        if priority != Priority.FOREGROUND:
                            self._busy_shared += 1
                        if self._later and self._idle:
                            self._changed.notify()  # somebody must watch the clock
                        return priority, queue.popleft()
                self._idle += 1
                self._changed.wait(self._later[0][0] - now if self._later else None)
                self._idle -= 1
            return None

    def _order(self) -> tuple[Priority, ...]:
        if self._turn % _BACKGROUND_TURN == _BACKGROUND_TURN - 1:
            return (Priority.BACKGROUND, Priority.FOREGROUND, Priority.PREFETCH)
        if self._turn % _PREFETCH_TURN == _PREFETCH_TURN - 1:
            return (Priority.PREFETCH, Priority.FOREGROUND, Priority.BACKGROUND)
        return (Priority.FOREGROUND, Priority.PREFETCH, Priority.BACKGROUND)
