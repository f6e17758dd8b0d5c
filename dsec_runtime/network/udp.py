"""UDP of a sandbox to other ports than 53: relayed if the policy allows the address.

A *conversation* is what one socket of the sandbox and one destination say to each other. It has a
socket on the host and one in the sandbox's namespace that speaks as the destination; the kernel
gives later datagrams to that one.

What must hold: datagrams go only where the policy allows it now; answers come only from whom was
spoken to; conversations and what waits for them are bounded; what is denied or too much is
dropped, as networks do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from dsec_runtime.network import inside
from dsec_runtime.network.addresses import Address, is_public, may_reach
from dsec_runtime.network.bounds import Bucket, Room
from dsec_runtime.network.flow import Host, drop
from dsecfs.errors import DsecfsError

log = logging.getLogger(__name__)

MAX_CONVERSATIONS = 64
IDLE_S = 60.0
_MAX_WAITING = 16
"""Datagrams kept while a conversation is set up."""
_AT_ONCE = 32
"""Datagrams taken from one socket before others have their turn."""
_NEW_PER_S, _NEW_BURST = 20.0, 64.0
_DESCRIPTORS = 3
"""Of a conversation, one for a moment."""
_LARGEST = 65535
Endpoint = tuple[Address, int]
_LATER = (errno.EAGAIN, errno.EINTR)


@dataclass(slots=True, eq=False)
class _Conversation:
    client: Endpoint
    to: Endpoint
    moved: float
    waiting: list[bytes] = field(default_factory=list)
    outside: socket.socket | None = None
    inside: socket.socket | None = None
    ended: bool = False


class Relay:
    """The conversations of one sandbox."""

    def __init__(self, host: Host, namespace: Callable[[], int], room: Room) -> None:
        """`namespace` gives a descriptor of the sandbox's network namespace, ours to close."""
        self._host = host
        self._namespace = namespace
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._known: dict[tuple[Endpoint, Endpoint], _Conversation] = {}
        self._bucket = Bucket(_NEW_PER_S, _NEW_BURST)
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, data: bytes, client: Endpoint, to: Endpoint) -> None:
        """A datagram that no conversation's socket got."""
        known = self._known.get((client, to))
        if known is None:
            if not self._allowed(to):
                self._host.deny(str(to[0]), to[1], "udp")
                return
            if not self._bucket.take() or not may_reach(to[0]):
                return
            if len(self._known) >= MAX_CONVERSATIONS:
                self._end(min(self._known.values(), key=lambda one: one.moved))
            if not self._room.take(_DESCRIPTORS):
                return
            known = _Conversation(client, to, self._loop.time())
            self._known[client, to] = known
            task = self._loop.create_task(self._open(known))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if known.outside is not None:
            self._send(known, known.outside, data)
        elif len(known.waiting) < _MAX_WAITING:
            known.waiting.append(data)

    def _allowed(self, to: Endpoint) -> bool:
        return is_public(to[0]) and self._host.policy.allows_address(*to, "udp")

    async def _open(self, one: _Conversation) -> None:
        namespace = self._namespace()
        try:
            made = await asyncio.to_thread(inside.as_if, namespace, one.to, one.client)
        except (OSError, DsecfsError) as e:
            log.info("udp to %s:%d: %s", *one.to, e)
            self._end(one)
            return
        finally:
            os.close(namespace)
        if one.ended:
            made.close()
            return
        one.inside = made
        family = socket.AF_INET if one.to[0].version == 4 else socket.AF_INET6
        try:
            one.outside = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            one.outside.connect((str(one.to[0]), one.to[1]))
        except OSError as e:
            log.debug("udp to %s:%d: %s", *one.to, e)
            self._end(one)
            return
        self._loop.add_reader(one.inside, self._move, one, one.inside, one.outside)
        self._loop.add_reader(one.outside, self._move, one, one.outside, one.inside)
        for data in one.waiting:
            self._send(one, one.outside, data)
        one.waiting.clear()

    def _move(self, one: _Conversation, source: socket.socket, to: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                data = source.recv(_LARGEST)
            except OSError as e:
                # Errors are news of earlier datagrams (unreachable); the next one may arrive.
                if e.errno not in _LATER:
                    log.debug("udp to %s:%d: %s", *one.to, e)
                return
            self._send(one, to, data)

    def _send(self, one: _Conversation, to: socket.socket, data: bytes) -> None:
        one.moved = self._loop.time()
        with contextlib.suppress(OSError):  # dropped, as networks do
            to.send(data)

    def _end(self, one: _Conversation) -> None:
        if one.ended:
            return
        one.ended = True
        self._room.give(_DESCRIPTORS)
        del self._known[one.client, one.to]
        for sock in (one.inside, one.outside):
            if sock is not None:
                drop(self._loop, sock, reset=False)

    def review(self) -> int:
        """End what the policy does not allow any more. How many."""
        found = [one for one in self._known.values() if not self._allowed(one.to)]
        for one in found:
            self._end(one)
        return len(found)

    def sweep(self) -> None:
        """End what is idle."""
        now = self._loop.time()
        for one in [one for one in self._known.values() if now - one.moved > IDLE_S]:
            self._end(one)

    def close(self) -> None:
        for one in list(self._known.values()):
            self._end(one)
