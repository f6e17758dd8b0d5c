"""One TCP connection of a sandbox: judged, dialed from the host, copied both ways.

What must hold: nothing is sent to a server before the connection was allowed; with a rule for a
host name the server's address is one that the gate itself gave out for an allowed name, and what
the client says (TLS server name, HTTP Host) is an allowed name too; every request of an HTTP
connection is looked at. The policy asked is the one in force at that moment.

Ports other than 80 and 443 of a host rule: whoever speaks first decides. A client's TLS or HTTP
is checked likewise; other protocols, and servers that speak first (ssh), pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import struct
from collections.abc import Callable
from typing import Protocol

from dsec_runtime.network.addresses import Address, is_public, may_reach
from dsec_runtime.network.http import HostDenied, NotHttp, Requests
from dsec_runtime.network.policy import Policy
from dsec_runtime.network.tls import NotTls, server_name

log = logging.getLogger(__name__)

DIAL_S = 10.0
WORDS_S = 30.0
"""Longest wait for a client to say whom it wants."""
IDLE_S = 3600.0
HALF_IDLE_S = 300.0
"""A connection that one side has ended and on which nothing moves."""
_PIECE = 64 << 10
_MAX_READS = 64
"""A hello that comes in more pieces is not worth our time."""
_RESET, _FINISH = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
"""SO_LINGER: a close is a reset, or lets what was sent arrive."""
_MAY_BE_HTTP = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]*(?:\Z|[ \t\r\x0b\x0c])")
"""A method, or the beginning of one."""


class Host(Protocol):
    """The sandbox, as a connection of it sees it."""

    policy: Policy

    def names_of(self, address: Address) -> list[str]:
        """Names for which the sandbox was given that address."""
        ...

    def deny(self, host: str, port: int, protocol: str = "tcp", why: str = "") -> None: ...


class Denied(Exception):
    """The connection is not allowed. `why` as in denials.py."""

    def __init__(self, host: str, why: str = "") -> None:
        super().__init__(host)
        self.host = host
        self.why = why


class Flow:
    """One connection. `run` until it ends; `cut` from outside."""

    def __init__(self, host: Host, client: socket.socket, address: Address, port: int) -> None:
        self._host = host
        self._client = client
        self._server: socket.socket | None = None
        self.address, self.port = address, port
        self._loop = asyncio.get_running_loop()
        self._named: set[str] = set()
        """Names that the connection was allowed for; none: by its address."""
        self._open = False
        self._half = False
        self._clean = False
        self._requests: Requests | None = None
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._moved = self._loop.time()

    def start(self, ended: Callable[[Flow], None]) -> None:
        """`ended` is called once it has."""
        reset_when_killed(self._client)
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(lambda _: ended(self))

    @property
    def established(self) -> bool:
        """Whether bytes may move."""
        return self._open

    def allowed(self) -> bool:
        """Whether the policy in force allows what was established."""
        policy = self._host.policy
        if policy.allows_address(self.address, self.port, "tcp"):
            return True
        named = self._named | (self._requests.hosts if self._requests else set())
        return bool(named) and all(policy.allows_name(name, self.port) for name in named)

    def idle(self) -> bool:
        limit = HALF_IDLE_S if self._half else IDLE_S
        return self._loop.time() - self._moved > limit

    def cut(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._serve()
            self._clean = True
        except Denied as e:
            self._host.deny(e.host, self.port, why=e.why)
        except HostDenied as e:
            self._host.deny(e.host, self.port)
        except (NotHttp, NotTls) as e:
            log.debug("%s:%d: %s", self.address, self.port, e)
            self._host.deny(self._label(), self.port, why="unnamed")
        except (OSError, TimeoutError) as e:
            log.debug("%s:%d: %s", self.address, self.port, e)
        except asyncio.CancelledError:
            pass  # cut
        finally:
            drop(self._loop, self._client, reset=not self._clean)
            if self._server is not None:
                drop(self._loop, self._server, reset=not self._clean)

    def _label(self) -> str:
        """What people call the destination."""
        names = self._host.names_of(self.address)
        return names[0] if names else str(self.address)

    # -- deciding ----------------------------------------------------------------------

    async def _serve(self) -> None:
        if not is_public(self.address):
            raise Denied(str(self.address))
        policy = self._host.policy
        if policy.allows_address(self.address, self.port, "tcp"):
            await self._dial()
            await self._copy(b"")
            return
        names = [n for n in self._host.names_of(self.address) if policy.allows_name(n, self.port)]
        if not names:
            raise Denied(self._label())
        held = b""
        if self.port == 443:
            held = await self._hello(b"")
        elif self.port == 80:
            held = await self._request(b"")
        else:
            self._named.update(names[:1])
        await self._dial()
        if self.port not in (80, 443):
            held = await self._first_words()
        await self._copy(held)

    async def _hello(self, data: bytes) -> bytes:
        """The client's TLS hello, whose name is allowed."""
        async with asyncio.timeout(WORDS_S):
            for _ in range(_MAX_READS):
                name = server_name(data) if data else None
                if name is not None:
                    self._name(name)
                    return data
                data += await self._read_client()
        raise NotTls("hello in too many pieces")

    async def _request(self, data: bytes) -> bytes:
        """The head of the client's first HTTP request, whose host is allowed."""
        self._requests = Requests(self._allows)
        async with asyncio.timeout(WORDS_S):
            while not (ready := self._requests.feed(data)):
                data = await self._read_client()
        return ready

    async def _first_words(self) -> bytes:
        """What the client said, checked, unless the server spoke first."""
        assert self._server is not None
        async with asyncio.timeout(IDLE_S):
            await _either_readable(self._loop, self._client, self._server)
        if not _readable(self._client):
            return b""
        data = b""
        async with asyncio.timeout(WORDS_S):
            for _ in range(_MAX_READS):
                piece = await self._loop.sock_recv(self._client, _PIECE)
                data += piece
                kind = first_words(data)
                if kind == "tls":
                    return await self._hello(data)
                if kind == "http":
                    return await self._request(data)
                if kind == "other" or not piece:
                    return data
        # To pass what may still become a request would let one through in pieces.
        raise NotHttp("a line without an end")

    async def _read_client(self) -> bytes:
        data = await self._loop.sock_recv(self._client, _PIECE)
        if not data:
            raise ConnectionResetError("the client left without a word")
        return data

    def _name(self, name: str) -> None:
        if not self._allows(name):
            raise Denied(name)
        self._named = {name}

    def _allows(self, name: str) -> bool:
        return self._host.policy.allows_name(name, self.port)

    async def _dial(self) -> None:
        if not may_reach(self.address):
            raise Denied(str(self.address), why="private")
        family = socket.AF_INET if self.address.version == 4 else socket.AF_INET6
        self._server = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reset_when_killed(self._server)
        async with asyncio.timeout(DIAL_S):
            await self._loop.sock_connect(self._server, (str(self.address), self.port))
        # The policy may have changed meanwhile; from here on an update sees this connection.
        self._open = True
        if not self.allowed():
            raise Denied(self._label())

    # -- copying -----------------------------------------------------------------------

    async def _copy(self, held: bytes) -> None:
        """Both ways until both have ended; an end on one side is passed on."""
        assert self._server is not None
        self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = {
            self._loop.create_task(self._from_client(self._server, held)),
            self._loop.create_task(self._from_server(self._server)),
        }
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        for way in done:
            way.result()

    async def _from_client(self, server: socket.socket, data: bytes) -> None:
        requests = self._requests
        if data:
            await self._loop.sock_sendall(server, data)
        while True:
            if requests is not None and requests.upgrading:
                await self._more.wait()
            data = await self._loop.sock_recv(self._client, _PIECE)
            if not data:
                break
            self._moved = self._loop.time()
            if requests is not None:
                data = requests.feed(data)
            if data:
                await self._loop.sock_sendall(server, data)
        self._half = True
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    async def _from_server(self, server: socket.socket) -> None:
        start = b""
        try:
            while data := await self._loop.sock_recv(server, _PIECE):
                self._moved = self._loop.time()
                requests = self._requests
                if requests is not None and requests.upgrading:
                    start += data[:12]
                    if len(start) >= 12 or not b"HTTP/1.1 101".startswith(start):
                        rest = requests.upgraded(start.startswith(b"HTTP/1.1 101"))
                        if rest:
                            await self._loop.sock_sendall(server, rest)
                        self._more.set()
                await self._loop.sock_sendall(self._client, data)
        finally:
            self._more.set()
        self._half = True
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_WR)


def first_words(data: bytes) -> str:
    """What a client begins with: "tls", "http", "other", or "" if more is needed to say.

    "other" is what no server takes for HTTP, however lenient it is.
    """
    if data[:1] == b"\x16":
        return "tls"
    text = data.lstrip(b"\r\n \t")
    line, end, _ = text.partition(b"\n")
    if b"HTTP/" in line.upper():
        return "http"
    if end or not _MAY_BE_HTTP.match(line):
        return "other"
    return ""


def reset_when_killed(sock: socket.socket) -> None:
    """If our process is killed the other side sees a reset, which nobody takes for the end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def drop(loop: asyncio.AbstractEventLoop, sock: socket.socket, *, reset: bool) -> None:
    """Close a socket of which the loop may still watch something: a number that is used anew
    must not be taken for it."""
    if sock.fileno() < 0:
        return
    loop.remove_reader(sock)
    loop.remove_writer(sock)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET if reset else _FINISH)
    sock.close()


def _readable(sock: socket.socket) -> bool:
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    return True


async def _either_readable(
    loop: asyncio.AbstractEventLoop, one: socket.socket, other: socket.socket
) -> None:
    ready = asyncio.Event()
    loop.add_reader(one, ready.set)
    loop.add_reader(other, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(one)
        loop.remove_reader(other)
