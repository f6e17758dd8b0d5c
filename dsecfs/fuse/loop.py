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
from collections.abc import Callable

import pyfuse3
import trio

log = logging.getLogger("dsecfs.fuse.loop")

LINGER_MS = 1
BURST = 64
"""Requests answered in a row before the event loop runs."""
_KNOWN = ("3.4.", "3.5.")
"""Versions of pyfuse3 whose session loop awaits `_wait_fuse_readable()` before it reads, and ends
when that returns False."""


class RequestWait:
    """Waits for requests on the descriptor of one connection."""

    def __init__(self, fuse_fd: int, idle: Callable[[], bool]) -> None:
        """`idle` says whether no request is being handled but those that are answered at once."""
        self._fd = fuse_fd
        self._idle = idle
        self._ready = select.poll()
        self._ready.register(fuse_fd, select.POLLIN)
        self._turn = trio.Lock()
        self._row = 0
        self._ended = False

    def install(self) -> bool:
        """Have pyfuse3 wait here. False if this version is not known."""
        if not pyfuse3.__version__.startswith(_KNOWN) or not hasattr(
            pyfuse3, "_wait_fuse_readable"
        ):
            log.info("pyfuse3 %s waits in its own way", pyfuse3.__version__)
            return False
        pyfuse3._wait_fuse_readable = self.wait
        return True

    def end(self) -> None:
        """No more requests are read. Call before `pyfuse3.terminate`."""
        self._ended = True

    async def wait(self) -> bool:
        """Return True when there is a request to be read now, False at the end."""
        if self._row < BURST and not self._ended:
            self._row += 1
            if self._ready.poll(LINGER_MS if self._idle() else 0):
                return True
        async with self._turn:
            self._row = 0
            while not self._ended:
                try:
                    await trio.lowlevel.wait_readable(self._fd)
                except trio.ClosedResourceError:
                    return False
                # Somebody else may have read it since the event loop looked.
                if self._ready.poll(0):
                    return True
        return False
