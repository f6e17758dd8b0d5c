"""…/ports/PORT/…: HTTP and WebSocket to a server in a sandbox; nothing is published for it.

The server sees the path after the port, Host: localhost:PORT and X-Forwarded-For, -Host, -Proto
and -Prefix. The answer is the server's: what is wrong with it is a `Problem` with status 502
(nothing listens: type PortClosed; it speaks no HTTP: PortError) or 504 (no answer in time).

Pages of all sandboxes have the edge's own origin. A program is not concerned; whoever shows them in
a browser must give each sandbox a host name of its own, in front of the edge.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Path, Request, WebSocket
from fastapi.responses import Response
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from dsec_runtime.edge.api.app import answer
from dsec_runtime.edge.edge import Edge
from dsec_runtime.ports.dial import Dialled, Dialler
from dsec_runtime.ports.forward import forward
from dsec_runtime.ports.headers import Way
from dsec_runtime.ports.websocket import bridge
from dsecfs.errors import BadInput, DsecfsError

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/sandboxes/{sandbox}/ports/{port}")

Port = Annotated[int, Path(ge=1, le=65535)]
_USUAL = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_OTHERS = [
    *("ACL", "BIND", "CHECKOUT", "COPY", "LINK", "LOCK", "MERGE", "MKACTIVITY", "MKCALENDAR"),
    *("MKCOL", "MOVE", "NOTIFY", "PROPFIND", "PROPPATCH", "PURGE", "QUERY", "REBIND", "REPORT"),
    *("SEARCH", "SOURCE", "SUBSCRIBE", "TRACE", "UNBIND", "UNLINK", "UNLOCK", "UNSUBSCRIBE"),
]
"""What else the edge's server can parse, but for CONNECT, which is no request for a path."""
_BEFORE_PORT = 5
"""Parts of a path up to the port: v1, sandboxes, ID, ports, PORT."""


class _Forwarded(Response):
    """An answer that comes from a sandbox."""

    def __init__(self, sandbox: str, port: int) -> None:
        super().__init__()
        self._sandbox, self._port = sandbox, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        way = way_of(HTTPConnection(scope), self._port)
        async with _dialled(scope["app"], self._sandbox, self._port) as dialled:
            await forward(scope, receive, send, dialled, way)


@router.api_route("/{path:path}", methods=_USUAL, operation_id="request_to_port")
async def http(sandbox: str, port: Port, request: Request) -> Response:
    """Any request, to a server in the sandbox. A paused sandbox is resumed first."""
    return _Forwarded(sandbox, port)


@router.api_route("/{path:path}", methods=_OTHERS, include_in_schema=False)
async def http_other(sandbox: str, port: Port, request: Request) -> Response:
    return _Forwarded(sandbox, port)


@router.websocket("")
@router.websocket("/{path:path}")
async def websocket(websocket: WebSocket, sandbox: str, port: Port) -> None:
    """A WebSocket to a server in the sandbox."""
    try:
        way = way_of(websocket, port)
        async with _dialled(websocket.app, sandbox, port) as dialled:
            await bridge(websocket, dialled, way)
    except DsecfsError as e:
        with contextlib.suppress(RuntimeError):  # the client went away
            await websocket.send_denial_response(answer(e))


@contextlib.asynccontextmanager
async def _dialled(app: Starlette, sandbox: str, port: int) -> AsyncIterator[Dialled]:
    """A connection into the sandbox, which is in use as long as it is open."""
    state = app.state
    edge: Edge = state.edge
    dialler = getattr(state, "dialler", None)
    if dialler is None:
        dialler = state.dialler = Dialler()

    async with edge.using(sandbox) as box:

        async def locate() -> tuple[int, int]:
            record = box.row.record
            assert record is not None  # it runs
            place = await edge.call(edge.backend_of(box).place, box.row.id, record, None)
            return place.pid, place.started

        async with dialler.connection(box.row.id, port, locate) as dialled:
            yield dialled


def way_of(connection: HTTPConnection, port: int) -> Way:
    """Where a request goes. BadInput when its path is not written plainly up to the port."""
    scope = connection.scope
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    parts = raw.split(b"/", _BEFORE_PORT + 1)
    if parts[1:3] != [b"v1", b"sandboxes"] or parts[4:5] != [b"ports"] or parts[0]:
        raise BadInput("path: escaped before the port", hint="/v1/sandboxes/ID/ports/PORT/…")
    rest = parts[_BEFORE_PORT + 1] if len(parts) > _BEFORE_PORT + 1 else b""
    query: bytes = scope["query_string"]
    scheme = "https" if scope["scheme"] in ("https", "wss") else "http"
    client = scope.get("client")
    return Way(
        port=port,
        prefix=b"/".join(parts[: _BEFORE_PORT + 1]).decode("ascii", "replace"),
        target=b"/" + rest + (b"?" + query if query else b""),
        scheme=scheme,
        client=client[0] if client else "",
        token=getattr(connection.app.state, "token", "").encode(),
    )
