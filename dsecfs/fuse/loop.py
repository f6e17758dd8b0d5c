"""Waiting for the next request, around the event loop while there is nothing else to do.

pyfuse3 waits for each request through trio: a lock, then epoll, two rounds of the event loop,
which cost more than a handler. A program that reads files sends its next request some
microseconds after it got an answer. So whoever has just answered looks for it right away, and
waits for it up to LINGER_MS if no other request is being handled.

What must hold: the connection is read only when it was seen to be readable a moment ago, with
nothing awaited in between (reading it blocks); the event loop runs at least after every BURST
requests. pyfuse3 has no interface for this: its private function is replaced, in versions
whose code was read; in others everything works as it comes.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Awaitable, Callable

import pyfuse3

log = logging.getLogger("dsecfs.fuse.loop")

LINGER_MS = 1
BURST = 64
"""Requests answered in a row before the event loop runs."""
_REPLACED = "_wait_fuse_readable"
_KNOWN = ("3.4.", "3.5.")
"""Versions of pyfuse3 whose session loop awaits `_wait_fuse_readable()` before it reads, ends
when that returns False, and starts another task if none is in there."""


class RequestWait:
    """Waits for requests on the descriptor of one connection."""

    def __init__(
        self,
        fuse_fd: int,
        idle: Callable[[], bool],
        wait_readable: Callable[[], Awaitable[bool]],
    ) -> None:
        """`idle` says whether no request is being handled but those that are answered at once;
        `wait_readable` is pyfuse3's own way: False means the end, True may be out of date."""
        self._idle = idle
        self._wait_readable = wait_readable
        self._ready = select.poll()
        self._ready.register(fuse_fd, select.POLLIN)
        self._row = 0
        self._parked = 0
        """Tasks that wait in pyfuse3's way. It starts a new task whenever there is none."""

    async def wait(self) -> bool:
        """Return True when there is a request to be read now, False at the end."""
        if self._parked and self._row < BURST:
            self._row += 1
            if self._ready.poll(LINGER_MS if self._idle() else 0):
                return True
        self._row = 0
        while True:
            self._parked += 1
            try:
                if not await self._wait_readable():
                    return False
            finally:
                self._parked -= 1
            # Somebody else may have read it since the event loop looked.
            if self._ready.poll(0):
                return True


def wait_around_trio(fuse_fd: int, idle: Callable[[], bool]) -> bool:
    """Have pyfuse3 wait as described above. False if this version is not known."""
    own = getattr(pyfuse3, _REPLACED, None)
    if own is None or not pyfuse3.__version__.startswith(_KNOWN):
        log.info("pyfuse3 %s waits in its own way", pyfuse3.__version__)
        return False
    setattr(pyfuse3, _REPLACED, RequestWait(fuse_fd, idle, own).wait)
    return True
