"""Work that a long-lived process does beside serving: chores, one step at a time.

A *chore* is a generator that does a small piece of work and yields for how many seconds it has
nothing to do. One thread runs all of a process's chores in turns. What must hold:
- a step is short (one chunk, one directory, one request to a store), so `stop` is obeyed soon
  and no chore keeps another from its turn; what a chore costs per second it decides by what
  it yields;
- a chore that fails is begun anew a minute later, and says so in the log; none of them can
  end the process or another chore.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from dsecfs.errors import DsecfsError

log = logging.getLogger(__name__)

Chore = Callable[[], Iterator[float]]

AGAIN_S = 60.0
"""Seconds until a chore that failed is begun anew."""
_SAY_AGAIN_S = 3600.0
"""The same failure is logged this often."""


class Housekeeper:
    """Runs chores in a thread of its own, between `start` and `stop`."""

    def __init__(
        self, chores: Mapping[str, Chore], *, at_end: Callable[[], None] = lambda: None
    ) -> None:
        """`at_end` is the last thing done when the process ends for good."""
        self._chores = chores
        self._at_end = at_end
        self._stopping = threading.Event()
        self._for_good = False
        self._thread: threading.Thread | None = None
        self._said: dict[str, tuple[str, float]] = {}

    def start(self) -> None:
        """Begin. Nothing of it exists before (processes are forked before)."""
        self._thread = threading.Thread(target=self._run, name="dsec-chores", daemon=True)
        self._thread.start()

    def ask_to_stop(self, *, for_good: bool) -> None:
        """No further step is begun. `for_good`: nobody goes on after this process."""
        self._for_good = for_good
        self._stopping.set()

    def stop(self, wait_s: float, *, for_good: bool) -> bool:
        """`ask_to_stop`, and wait. False if the step under way takes longer than `wait_s`."""
        self.ask_to_stop(for_good=for_good)
        if self._thread is not None:
            self._thread.join(wait_s)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        now = time.monotonic()
        order = enumerate(self._chores.items())
        queue = [(now, number, name, chore()) for number, (name, chore) in order]
        while queue and not self._stopping.wait(max(0.0, queue[0][0] - time.monotonic())):
            _, number, name, steps = heapq.heappop(queue)
            pause = self._step(name, steps)
            if pause is None:
                pause, steps = AGAIN_S, self._chores[name]()
            heapq.heappush(queue, (time.monotonic() + pause, number, name, steps))
        for _, _, name, steps in queue:
            self._guarded(name, getattr(steps, "close", lambda: None))
        if self._for_good:
            self._guarded("end", self._at_end)

    def _step(self, name: str, steps: Iterator[float]) -> float | None:
        """Seconds until the next step; None if the chore failed or came to an end."""
        pause: float | None = None

        def step() -> None:
            nonlocal pause
            pause = next(steps, None)

        self._guarded(name, step)
        return pause

    def _guarded(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except (DsecfsError, OSError) as e:
            text, at = self._said.get(name, ("", 0.0))
            if text != str(e) or time.monotonic() - at > _SAY_AGAIN_S:
                self._said[name] = str(e), time.monotonic()
                log.warning("%s: %s", name, e)
        except Exception:
            # A mistake of ours must cost neither the mount nor the other chores.
            log.exception("%s: unexpected", name)
