"""The resolver that a sandbox sees: only allowed names exist, and only with public addresses.

What must hold: no question leaves the host but one for the address of an allowed name; an address
goes to the sandbox only if it may be reached, and is remembered as given out for that name, in a
table of bounded size. Questions that wait are bounded; more are not answered.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable

from dsec_runtime.network import dns
from dsec_runtime.network.addresses import Address, is_public, may_reach
from dsec_runtime.network.flow import Host
from dsec_runtime.network.inside import original, sent_from
from dsec_runtime.network.names import host_name
from dsec_runtime.network.resolver import LookupFailed, Resolver

log = logging.getLogger(__name__)

MAX_PENDING = 64
MAX_ADDRESSES = 4096
_MAX_NAMES = 16
"""Names that are remembered for one address."""
GIVEN_S = 3600.0
"""How long an address counts as given out: programs keep addresses longer than their TTL."""
_MAX_TCP_QUESTIONS = 64
_TCP_IDLE_S = 10.0
ASSUMED_PORT = 443
"""A name that is not looked up was wanted for a port that nobody has said yet."""
_QUIET = (".arpa", ".local", ".localdomain", ".invalid")
"""Asked by libraries themselves; not worth telling anybody."""


class Given:
    """Addresses that a sandbox was given, and for which names."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._names: OrderedDict[Address, dict[str, float]] = OrderedDict()

    def add(self, address: Address, name: str) -> None:
        names = self._names.setdefault(address, {})
        self._names.move_to_end(address)
        names.pop(name, None)
        names[name] = self._now() + GIVEN_S
        while len(names) > _MAX_NAMES:
            del names[next(iter(names))]
        while len(self._names) > MAX_ADDRESSES:
            self._names.popitem(last=False)

    def names(self, address: Address) -> list[str]:
        """The last one first."""
        now = self._now()
        found = self._names.get(address, {})
        return [name for name, ends in reversed(found.items()) if now < ends]


class Lookups:
    """Answers the questions of one sandbox."""

    def __init__(self, host: Host, resolver: Resolver) -> None:
        self._host = host
        self._resolver = resolver
        self._loop = asyncio.get_running_loop()
        self._pending: set[asyncio.Task[None]] = set()
        self.given = Given(self._loop.time)

    async def answer(self, message: bytes, most: int) -> bytes | None:
        """The answer to a message; None if it deserves none."""
        try:
            question = dns.parse_question(message)
        except dns.BadMessage:
            return None
        if question.opcode:
            return dns.reply(question, dns.NOTIMP)
        name = host_name(question.name)
        if name is None or "." not in name or name.endswith(_QUIET):
            return dns.reply(question, dns.NXDOMAIN)
        if not self._host.policy.resolves(name):
            if question.kind != dns.AAAA:  # libraries ask for both
                self._host.deny(name, ASSUMED_PORT)
            return dns.reply(question, dns.NXDOMAIN)
        if question.kind not in (dns.A, dns.AAAA):
            return dns.reply(question, dns.NOERROR)
        try:
            found = await self._resolver.lookup(name, question.kind)
        except LookupFailed:
            return dns.reply(question, dns.SERVFAIL)
        if not self._host.policy.resolves(name):  # changed meanwhile
            return dns.reply(question, dns.NXDOMAIN)
        good = [address for address in found.addresses if may_reach(address)]
        if not good and any(not is_public(address) for address in found.addresses):
            self._host.deny(name, ASSUMED_PORT, why="private")
            return dns.reply(question, dns.NXDOMAIN)
        for address in good:
            self.given.add(address, name)
        return dns.reply(question, found.code, good, found.ttl, most)

    # -- UDP ---------------------------------------------------------------------------

    def take(self, sock: socket.socket, data: bytes, ancillary: list[tuple[int, int, bytes]],
             client: tuple[object, ...]) -> None:
        """A datagram to port 53 of any address."""
        to = original(ancillary)
        if to is None or len(self._pending) >= MAX_PENDING:
            return
        task = self._loop.create_task(self._respond(sock, data, to[0], client))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _respond(
        self, sock: socket.socket, data: bytes, to: Address, client: tuple[object, ...]
    ) -> None:
        reply = await self.answer(data, dns.MAX_UDP)
        if reply is None or sock.fileno() < 0:
            return
        try:
            sock.sendmsg([reply], [sent_from(to)], 0, client)
        except OSError as e:
            log.debug("answer to a sandbox: %s", e)

    def close(self) -> None:
        for task in self._pending:
            task.cancel()

    # -- TCP ---------------------------------------------------------------------------

    async def serve(self, client: socket.socket) -> None:
        """Questions on a TCP connection, one after the other (RFC 7766). OSError when it breaks."""
        for _ in range(_MAX_TCP_QUESTIONS):
            async with asyncio.timeout(_TCP_IDLE_S):
                head = await self._exactly(client, 2)
                if head is None:
                    return
                message = await self._exactly(client, struct.unpack("!H", head)[0])
            reply = None if message is None else await self.answer(message, 65535)
            if reply is None:
                return
            async with asyncio.timeout(_TCP_IDLE_S):
                await self._loop.sock_sendall(client, struct.pack("!H", len(reply)) + reply)

    async def _exactly(self, sock: socket.socket, count: int) -> bytes | None:
        """None at the end of the stream."""
        data = b""
        while len(data) < count:
            piece = await self._loop.sock_recv(sock, count - len(data))
            if not piece:
                return None
            data += piece
        return data
