"""The application: every error becomes a `Problem`, bodies are bounded, callers are known."""

from __future__ import annotations

import hmac
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dsec_runtime.edge.edge import Edge
from dsec_runtime.edge.model import Problem
from dsec_runtime.errors import (
    BadRange,
    CannotFreeze,
    FileDenied,
    FileProblem,
    FilesError,
    KeeperError,
    NoSpace,
    NoSuchSandbox,
    NoSuchUser,
    NotExecutable,
    PortError,
    ProgramNotFound,
    Refused,
    SandboxLost,
    WrongState,
)
from dsecfs import __version__
from dsecfs.errors import (
    BadInput,
    Busy,
    Conflict,
    DeadlineExceeded,
    DsecfsError,
    NotFound,
    StoreError,
    StoreUnavailable,
    Unsupported,
)

log = logging.getLogger(__name__)

MAX_BODY = 64 << 20
"""Bytes of a request's body where no route says otherwise (files and archives have no limit)."""
_UNLIMITED = ("/files/", "/ports/")

_STATUS: tuple[tuple[type[DsecfsError], int], ...] = (
    (NoSuchSandbox, 404),
    (NotFound, 404),
    (ProgramNotFound, 422),
    (NotExecutable, 422),
    (NoSuchUser, 422),
    (SandboxLost, 410),
    (WrongState, 409),
    (CannotFreeze, 409),
    (Refused, 409),
    (KeeperError, 503),
    (FilesError, 503),
    (FileDenied, 403),
    (BadRange, 416),
    (NoSpace, 507),
    (PortError, 502),
    (BadInput, 422),
    (Conflict, 409),
    (FileProblem, 422),
    (Busy, 409),
    (DeadlineExceeded, 504),
    (StoreUnavailable, 503),
    (StoreError, 502),
    (Unsupported, 501),
)
"""The first that fits. Everything else of ours is 500."""


def create_app(edge: Edge, *, token: str = "") -> FastAPI:
    """The API of an edge. With `token`, callers must send it as a bearer token."""
    from dsec_runtime.edge.api import execs, files, node, ports, sandboxes

    app = FastAPI(
        title="dsec edge",
        version=__version__,
        description="Sandboxes of one node.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.edge = edge
    app.state.token = token
    for module in (sandboxes, execs, files, ports, node):
        app.include_router(module.router)
    app.add_exception_handler(DsecfsError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unknown)
    app.add_middleware(_Limits)
    if token:
        app.add_middleware(_Token, token=token)
    return app


def edge_of(request: Request) -> Edge:
    """The edge that serves a request."""
    found: Edge = request.app.state.edge
    return found


def status_of(error: DsecfsError) -> int:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def problem_of(error: DsecfsError, field: str = "") -> Problem:
    after = getattr(error, "retry_after_s", None)
    return Problem(
        type=type(error).__name__,
        message=error.message,
        hint=error.hint,
        field=getattr(error, "field", field),
        recoverable=error.recoverable,
        sandbox_usable=not isinstance(error, SandboxLost | NoSuchSandbox),
        retry_after_s=after,
    )


def answer(error: DsecfsError) -> Response:
    problem = problem_of(error)
    headers = {}
    if problem.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(problem.retry_after_s)))
    return _json(status_of(error), problem, headers)


def _json(status: int, problem: Problem, headers: dict[str, str] | None = None) -> Response:
    return Response(
        problem.model_dump_json(), status, headers=headers, media_type="application/json"
    )


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, DsecfsError)
    if isinstance(error, Refused):
        edge_of(request).metrics.refused()
    return answer(error)


async def _invalid(request: Request, error: Exception) -> Response:
    """What pydantic found, as the first field to blame and the reason."""
    assert isinstance(error, RequestValidationError)
    found: Any = error.errors()[0]
    where = [str(part) for part in found["loc"] if part not in ("body", "query", "path")]
    message = str(found["msg"]).removeprefix("Value error, ")
    field = ".".join(where)
    more = len(error.errors()) - 1
    hint = f"and {more} more" if more else ""
    text = f"{field}: {message}" if field else message
    return _json(422, Problem(type="BadInput", message=text[:2000], hint=hint, field=field[:200]))


async def _unknown(request: Request, error: Exception) -> Response:
    """A fault of ours: logged with its place, told without."""
    log.error("%s %s", request.method, request.url.path, exc_info=error)
    return _json(500, Problem(type="Internal", message="a fault of the edge; its log has more"))


class _Limits:
    """Refuse bodies that are too large, before and while they are read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or any(part in scope["path"] for part in _UNLIMITED):
            await self._app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > MAX_BODY:
            await _too_large()(scope, receive, send)
            return
        taken = 0

        async def bounded() -> Any:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > MAX_BODY:
                raise BadInput(f"request body of more than {MAX_BODY} bytes")
            return message

        await self._app(scope, bounded, send)


def _too_large() -> Response:
    text = f"request body of more than {MAX_BODY} bytes"
    return _json(413, Problem(type="BadInput", message=text))


class _Token:
    """Only callers with the token get through, but for the question whether we live."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] != "/healthz":
            said = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, given = said.partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 4401, "reason": "no token"})
                    return
                denied = Problem(
                    type="Unauthorized", message="no valid token", hint="Authorization: Bearer …"
                )
                await _json(401, denied, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


