"""Looks names up at the resolvers that /etc/resolv.conf of the host names (asyncio).

What must hold: an answer counts only if it comes from the address that was asked and repeats the
number and the question; a lookup ends within LIMIT_S; there are at most MAX_PENDING at a time,
more wait; what is remembered is bounded and used no longer than its TTL says. Search domains and
/etc/hosts are not used: sandboxes get public names.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import struct
import time
from collections import OrderedDict
from pathlib import Path

from dsec_runtime.network.addresses import Address, parse_address
from dsec_runtime.network.dns import (
    NOERROR,
    NXDOMAIN,
    Answer,
    BadMessage,
    parse_answer,
    query,
)

log = logging.getLogger(__name__)

RESOLV_CONF = Path("/etc/resolv.conf")
LIMIT_S = 8.0
"""Less than the 5 s times 2 attempts of a C library, which then hears SERVFAIL instead."""
TRY_S = 2.0
MAX_PENDING = 256
MAX_KEPT = 8192
LEAST_TTL_S, MOST_TTL_S = 1, 300
_NOT_THERE_S = 10
"""How long a missing name is remembered."""
_MAX_SERVERS = 3
"""As resolv.conf(5) has it."""
_DNS = 53


class LookupFailed(Exception):
    """No resolver answered, or none could tell."""


class Resolver:
    """One for all sandboxes of the node."""

    def __init__(self, config: Path = RESOLV_CONF) -> None:
        self._config = config
        self._read_at = -1.0
        self._servers: list[Address] = []
        self._kept: OrderedDict[tuple[str, int], tuple[float, Answer]] = OrderedDict()
        self._asking: dict[tuple[str, int], asyncio.Task[Answer]] = {}
        self._slots = asyncio.Semaphore(MAX_PENDING)

    async def lookup(self, name: str, kind: int) -> Answer:
        """Addresses of a host name; `ttl` is what is left of it. LookupFailed.

        The same question of several sandboxes is asked once.
        """
        key = (name, kind)
        now = time.monotonic()
        if (kept := self._kept.get(key)) is not None:
            ends, answer = kept
            if now < ends:
                return Answer(answer.code, answer.addresses, max(1, int(ends - now)))
            del self._kept[key]
        task = self._asking.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(name, kind))
            self._asking[key] = task
            task.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(task)

    def _done(self, key: tuple[str, int], task: asyncio.Task[Answer]) -> None:
        del self._asking[key]
        if task.cancelled() or task.exception() is not None:
            return
        answer = task.result()
        ttl = min(max(answer.ttl, LEAST_TTL_S), MOST_TTL_S) if answer.addresses else _NOT_THERE_S
        self._kept[key] = (time.monotonic() + ttl, answer)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    async def _ask(self, name: str, kind: int) -> Answer:
        try:
            async with asyncio.timeout(LIMIT_S), self._slots:
                for _ in range(2):
                    for server in self._find_servers():
                        answer = await self._try(server, name, kind)
                        if answer is not None:
                            return answer
        except TimeoutError:
            pass
        raise LookupFailed(name)

    async def _try(self, server: Address, name: str, kind: int) -> Answer | None:
        """What one server says; None if it does not, or cannot tell."""
        try:
            async with asyncio.timeout(TRY_S):
                answer = await _by_udp(server, name, kind)
                if answer.truncated:
                    answer = await _by_tcp(server, name, kind)
        except (OSError, BadMessage, asyncio.IncompleteReadError) as e:
            # TimeoutError is an OSError.
            log.debug("resolver %s: %s: %r", server, name, e)
            return None
        return answer if answer.code in (NOERROR, NXDOMAIN) else None

    def _find_servers(self) -> list[Address]:
        """Those of resolv.conf, read again when it changed."""
        try:
            changed = self._config.stat().st_mtime
            if changed != self._read_at:
                self._servers = read_servers(self._config.read_text(errors="replace"))
                self._read_at = changed
        except OSError as e:
            log.warning("resolver: %s: %s", self._config, e.strerror)
            self._servers, self._read_at = [], -1.0
        return self._servers


def read_servers(text: str) -> list[Address]:
    """The first servers of a resolv.conf."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            address = parse_address(words[1])
            if address is not None:
                found.append(address)
    return found[:_MAX_SERVERS]


def _family(server: Address) -> socket.AddressFamily:
    return socket.AF_INET if server.version == 4 else socket.AF_INET6


async def _by_udp(server: Address, name: str, kind: int) -> Answer:
    loop = asyncio.get_running_loop()
    with socket.socket(_family(server), socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        # Connected: the kernel picks a random port and drops what others send.
        sock.connect((str(server), _DNS))
        number = secrets.randbelow(1 << 16)
        await loop.sock_sendall(sock, query(number, name, kind))
        while True:
            try:
                return parse_answer(await loop.sock_recv(sock, 65535), number, name, kind)
            except BadMessage as e:
                # It may be forged: the right one may still come.
                log.debug("resolver %s: %s: %s", server, name, e)


async def _by_tcp(server: Address, name: str, kind: int) -> Answer:
    reader, writer = await asyncio.open_connection(str(server), _DNS)
    try:
        number = secrets.randbelow(1 << 16)
        message = query(number, name, kind)
        writer.write(struct.pack("!H", len(message)) + message)
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        return parse_answer(await reader.readexactly(length), number, name, kind)
    finally:
        writer.close()
