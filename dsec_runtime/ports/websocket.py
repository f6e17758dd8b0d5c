"""One WebSocket between a client of the edge (ASGI) and a server in a sandbox (websockets).

The sandbox's side is opened first: what its server answers decides. If it refuses, the client gets
that answer; if it accepts, it chooses the subprotocol. Messages go over whole, of either kind; how
one side closes is how the other is closed. Each side answers its own pings; the edge pings clients,
so one that is gone is found out. A connection into a sandbox breaks only when an end is gone.

What must hold: at most one message of MAX_MESSAGE bytes of either direction is in memory, besides
what the two transports buffer; redirects are passed on, never followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.http11 import Request
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from dsec_runtime.errors import PortError, SandboxLost
from dsec_runtime.ports.dial import Dialled
from dsec_runtime.ports.headers import Headers as Raw
from dsec_runtime.ports.headers import Way, inward, outward
from dsecfs.errors import BadInput, DeadlineExceeded

log = logging.getLogger(__name__)

HANDSHAKE_S = 30.0
"""For the server in the sandbox to accept."""
MAX_MESSAGE = 4 << 20
"""Bytes of a message from a sandbox. Longer ones end the connection with code 1009."""
CLOSE_S = 5.0
"""For the server in the sandbox to answer that the connection is closed."""
TAKE_S = 600.0
"""Longest time that a side takes nothing of what is sent to it."""
LINGER_S = 1.0
_NO_CODE, _ABNORMAL, _AWAY, _TRY_AGAIN, _BAD_GATEWAY = 1005, 1006, 1001, 1013, 1014
"""RFC 6455, section 7.4.1, and the IANA registry. The first two are never sent."""
_REASON = 123
"""Bytes of a reason: a control frame has at most 125."""


async def bridge(websocket: WebSocket, dialled: Dialled, way: Way) -> None:
    """Serve a client's WebSocket from the connection.

    PortError, DeadlineExceeded, SandboxLost, BadInput; none once it is accepted.
    """
    inner = await _open(websocket, dialled, way)
    try:
        if inner is None:
            return
        answer = inner.response
        assert answer is not None
        raw = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in answer.headers.raw_items()]
        headers = outward(raw, 101)
        subprotocol = inner.subprotocol
        await websocket.accept(subprotocol=subprotocol, headers=headers)
        await _run(websocket, inner, dialled.gone)
    finally:
        if inner is not None:
            inner.transport.abort()


class _Protocol(ClientProtocol):
    """Asks with our headers."""

    more: Raw

    def connect(self) -> Request:
        request = super().connect()
        del request.headers["Host"]  # ours has the port, whichever it is
        for name, value in self.more:
            request.headers[name.decode("latin-1")] = value.decode("latin-1")
        return request


class _Inner(ClientConnection):
    """Ends when the handshake has failed: a server that goes on talking is not listened to."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.protocol.handshake_exc is not None:
            self.transport.abort()


async def _open(websocket: WebSocket, dialled: Dialled, way: Way) -> ClientConnection | None:
    """The handshake in the sandbox. None if it was refused, and the client told so."""
    protocol = _protocol(websocket, way)
    _, inner = await asyncio.get_running_loop().create_connection(
        lambda: _Inner(
            protocol,
            ping_interval=None,
            ping_timeout=None,
            close_timeout=CLOSE_S,
            max_queue=1,
        ),
        sock=dialled.sock,
    )
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await inner.handshake(user_agent_header=None)
        return inner
    except TimeoutError:
        inner.transport.abort()
        raise DeadlineExceeded(
            f"{way.prefix}: no answer to the WebSocket's handshake in {HANDSHAKE_S:g} s"
        ) from None
    except InvalidStatus as e:
        inner.transport.abort()
        await _refused(websocket, e, way)
        return None
    except (InvalidHandshake, OSError, EOFError) as e:
        inner.transport.abort()
        if dialled.gone.done():
            raise SandboxLost("the sandbox ended before its server had answered") from None
        raise PortError(
            f"{way.prefix}: no WebSocket: {str(e)[:200]}",
            hint="the port must speak WebSocket at that path",
        ) from None
    except BaseException:
        inner.transport.abort()
        raise


def _protocol(websocket: WebSocket, way: Way) -> ClientProtocol:
    offered = [Subprotocol(word) for word in websocket.scope.get("subprotocols", [])]
    try:
        target = way.target.decode("ascii")
        uri = parse_uri(f"ws://localhost:{way.port}{target}")
    except (UnicodeDecodeError, ValueError) as e:
        raise BadInput(f"request for {way.prefix}: {e}") from None
    protocol = _Protocol(uri, subprotocols=offered or None, max_size=MAX_MESSAGE, logger=log)
    protocol.more = inward(websocket.scope["headers"], way)
    return protocol


async def _refused(websocket: WebSocket, error: InvalidStatus, way: Way) -> None:
    """Hand on the server's own answer."""
    answer = error.response
    raw: Raw = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in answer.headers.raw_items()]
    status = answer.status_code
    if not 200 <= status <= 599:
        raise PortError(f"{way.prefix}: answered with status {status}")
    response = Response(bytes(answer.body or b""), status)
    dropped = (b"content-length", b"transfer-encoding")
    response.raw_headers += [(n, v) for n, v in outward(raw, status) if n not in dropped]
    await websocket.send_denial_response(response)


async def _run(websocket: WebSocket, inner: ClientConnection, gone: asyncio.Future[None]) -> None:
    tasks = {
        asyncio.create_task(_pass_in(websocket, inner)),
        asyncio.create_task(_pass_out(websocket, inner)),
    }
    try:
        waited: set[asyncio.Future[Any]] = {*tasks, gone}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        done, _ = await asyncio.wait(tasks, timeout=LINGER_S, return_when=asyncio.FIRST_COMPLETED)
        code, reason = done.pop().result() if done else (_AWAY, "the sandbox ended")
        # The side that closed first takes no notice of this.
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await inner.close(code, reason)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await websocket.close(code, reason)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_in(websocket: WebSocket, inner: ClientConnection) -> tuple[int, str]:
    """Client to server; how the client closed. Of the server's end the other direction knows."""
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            # Without a code it closed, or is gone: the edge's server does not tell which.
            code = message.get("code") or _NO_CODE
            code = _AWAY if code in (_NO_CODE, _ABNORMAL) else code
            return code, _short(message.get("reason") or "")
        data = message.get("bytes")
        try:
            async with asyncio.timeout(TAKE_S):
                await inner.send(message["text"] if data is None else data)
        except ConnectionClosed:
            continue
        except TimeoutError:
            return _TRY_AGAIN, "the server took nothing"


async def _pass_out(websocket: WebSocket, inner: ClientConnection) -> tuple[int, str]:
    """Server to client; how the server closed."""
    while True:
        try:
            data = await inner.recv()
        except ConnectionClosed as e:
            said = e.rcvd or e.sent
            if said is None:
                return _BAD_GATEWAY, "the server broke the connection"
            return 1000 if said.code == _NO_CODE else said.code, _short(said.reason)
        try:
            async with asyncio.timeout(TAKE_S):
                if isinstance(data, str):
                    await websocket.send_text(data)
                else:
                    await websocket.send_bytes(bytes(data))
        except WebSocketDisconnect:
            return _AWAY, ""
        except TimeoutError:
            return _TRY_AGAIN, "the client took nothing"


def _short(reason: str) -> str:
    return reason.encode()[:_REASON].decode(errors="ignore")
