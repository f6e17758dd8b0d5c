"""How fast and how much: token buckets, and the room that the gate's process has."""

from __future__ import annotations

import time


class Bucket:
    """Tokens that come back with time."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._at = burst, time.monotonic()

    def take(self) -> bool:
        """Whether there was one."""
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def wait_s(self) -> float:
        """Seconds until there is one."""
        return max(0.0, (1 - self._tokens) / self._per_s)


class Room:
    """Descriptors that the process may still open. Who takes some gives them back."""

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, count: int) -> bool:
        """Whether there were that many. Nothing is taken otherwise."""
        if count > self._left:
            return False
        self._left -= count
        return True

    def give(self, count: int) -> None:
        self._left += count
