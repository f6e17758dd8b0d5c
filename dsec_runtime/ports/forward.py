"""One HTTP exchange between a client of the edge (ASGI) and a server in a sandbox (h11).

What must hold:
- nothing is collected: at most a few pieces of 64 KiB of either direction are in memory, and who
  reads slowly makes the other side wait;
- a client that goes away closes the connection into the sandbox at once;
- an answer is whole, or its connection is cut so that the client sees that it is not; before its
  first byte every failure is an error that the API turns into a `Problem`;
- every wait has a limit: SILENCE_S before the answer begins, IDLE_S between parts of it.

Each exchange has a connection of its own, so nothing that a server sends can become the answer to
another request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from asyncio import FIRST_COMPLETED

import h11
from starlette.types import Receive, Scope, Send

from dsec_runtime.errors import PortError, SandboxLost
from dsec_runtime.ports.dial import Dialled
from dsec_runtime.ports.headers import Way, framing, inward, outward
from dsecfs.errors import BadInput, DeadlineExceeded, DsecfsError

log = logging.getLogger(__name__)

PIECE = 64 << 10
"""Bytes read at a time."""
MAX_HEAD = 64 << 10
"""Bytes of the answer's status line and headers together, and of anything else that has to be
whole before it is understood. As much as the edge takes of its clients."""
MAX_INTERIM = 16
"""1xx answers before the real one."""
SILENCE_S = 300.0
"""Longest time without a byte in either direction before the answer begins."""
IDLE_S = 3600.0
"""The same once it has begun: a stream of events may be quiet. A client that takes nothing of it
has as long."""
LINGER_S = 1.0
"""What the server said before the sandbox ended may still be on its way."""


async def forward(scope: Scope, receive: Receive, send: Send, dialled: Dialled, way: Way) -> None:
    """Send the request of an ASGI server over the connection, and the answer back.

    PortError, DeadlineExceeded, SandboxLost, BadInput; none once the answer has begun.
    """
    exchange = _Exchange(scope, receive, send, dialled.sock, way)
    try:
        await exchange.run(dialled.gone)
    except DsecfsError as e:
        if not exchange.begun:
            raise
        # The edge's server closes the connection of an answer that is not whole.
        log.info("%s: answer cut: %s", way.prefix, e)


class _Exchange:
    """The two directions of an exchange; each is a task.

    They use the socket itself and no transport of asyncio: that would drop what the server has
    answered when it takes no more of the request.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, sock: socket.socket, way: Way
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._sock = sock
        self._way = way
        self._conn = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self._moved = time.monotonic()
        """When something last moved in either direction."""
        self._closed = False
        """The server has closed its side."""
        self.begun = False
        """The client has the head of the answer, or part of it."""

    async def run(self, gone: asyncio.Future[None]) -> None:
        up = asyncio.create_task(self._up(self._head()))
        down = asyncio.create_task(self._down())
        try:
            while not (up.done() or down.done() or gone.done()):
                left = self._moved + self._limit - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"{self._way.prefix}: silent for {self._limit:g} s",
                        hint="let the server answer early and go on in the background",
                    )
                await asyncio.wait({up, down, gone}, timeout=left, return_when=FIRST_COMPLETED)
            if not (up.done() or down.done()):
                await asyncio.wait({up, down}, timeout=LINGER_S, return_when=FIRST_COMPLETED)
            if down.done():
                down.result()
            elif up.done():
                up.result()  # the client went away
            else:
                raise SandboxLost(f"{self._way.prefix}: the sandbox ended before an answer")
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    @property
    def _limit(self) -> float:
        return IDLE_S if self.begun else SILENCE_S

    # -- client to server --------------------------------------------------------------

    def _head(self) -> bytes:
        headers = inward(self._scope["headers"], self._way) + framing(self._scope["headers"])
        headers.append((b"connection", b"close"))
        try:
            request = h11.Request(
                method=self._scope["method"], target=self._way.target, headers=headers
            )
            return self._conn.send(request) or b""
        except h11.LocalProtocolError as e:
            raise BadInput(f"request for {self._way.prefix}: {e}") from None

    async def _up(self, head: bytes) -> None:
        """Returns when the client has gone away, and not before."""
        takes = await self._pass_in(head)
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return
            if takes and (body := message.get("body")):
                takes = await self._pass_in(self._conn.send(h11.Data(data=body)) or b"")
            if takes and not message.get("more_body", False):
                await self._pass_in(self._conn.send(h11.EndOfMessage()) or b"")
                takes = False

    async def _pass_in(self, data: bytes) -> bool:
        """False when the server takes no more. It may still answer (that it was too much)."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except OSError:
            return False
        self._moved = time.monotonic()
        return True

    # -- server to client --------------------------------------------------------------

    async def _down(self) -> None:
        answer = await self._answer()
        if answer.status_code > 599:
            raise PortError(f"{self._way.prefix}: answered with status {answer.status_code}")
        headers = outward(answer.headers.raw_items(), answer.status_code)
        self.begun = True
        await self._send(
            {"type": "http.response.start", "status": answer.status_code, "headers": headers}
        )
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                part = {"type": "http.response.body", "body": bytes(event.data), "more_body": True}
                await self._send(part)
                self._moved = time.monotonic()
            elif isinstance(event, h11.EndOfMessage):
                await self._send({"type": "http.response.body", "body": b""})
                return
            else:
                raise self._garbage("it stopped")

    async def _answer(self) -> h11.Response:
        for _ in range(MAX_INTERIM):
            event = await self._next()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise self._garbage(f"a {type(event).__name__}")
        raise self._garbage(f"{MAX_INTERIM} answers 1xx")

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        """What the server says next. PortError if it makes no sense."""
        while True:
            try:
                event = self._conn.next_event()
                if event is not h11.NEED_DATA:
                    return event  # type: ignore[return-value]
                data = await asyncio.get_running_loop().sock_recv(self._sock, PIECE)
            except h11.RemoteProtocolError as e:
                raise self._garbage(str(e)) from None
            except OSError as e:
                raise self._garbage(e.strerror or str(e)) from None
            self._moved = time.monotonic()
            self._closed = not data
            self._conn.receive_data(data)

    def _garbage(self, why: str) -> PortError:
        if self._closed:
            why = "it closed the connection"
        where = "in the middle of its answer" if self.begun else "instead of an HTTP answer"
        return PortError(
            f"{self._way.prefix}: {why[:200]} {where}",
            hint="look at the server's own output; the port must speak HTTP/1",
        )
