"""…/files: files in a sandbox, touched as its user or another one (`user`).

Paths are absolute, or relative to the sandbox's cwd; `~` is not expanded. They are query parameters
everywhere, percent-encoded bytes: names that are no UTF-8 work like all others. A stream that was
begun and cannot be ended breaks the connection, so that nobody takes a part for the whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator
from typing import Annotated
from urllib.parse import unquote_to_bytes

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from dsec_runtime.edge.api.app import edge_of
from dsec_runtime.edge.backend import Place
from dsec_runtime.errors import SandboxLost
from dsec_runtime.files.client import MAX_DEPTH, MAX_LIST, MAX_WATCH_S, Files
from dsec_runtime.files.model import Entry, Listing, Made, Moved, Removed, Unpacked, Written
from dsecfs.errors import BadInput, DsecfsError

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/sandboxes/{sandbox}/files")

MAX_RANGE = 1 << 62

Path = Annotated[str, Query(min_length=1)]
User = Annotated[str | None, Query(max_length=128)]
Mode = Annotated[str | None, Query(pattern=r"^[0-7]{1,4}$", description="octal")]


def raw(request: Request, name: str) -> str:
    """A query parameter with the bytes that were sent: what is no UTF-8 as lone surrogates."""
    found = b""
    for field in request.scope["query_string"].split(b"&"):
        key, _, value = field.partition(b"=")
        if unquote_to_bytes(key.replace(b"+", b" ")) == name.encode():
            found = unquote_to_bytes(value.replace(b"+", b" "))
    return os.fsdecode(found)


@contextlib.asynccontextmanager
async def at(
    request: Request, sandbox: str, user: str | None
) -> AsyncIterator[tuple[Files, Place]]:
    """The sandbox in use: awake, not idle."""
    edge = edge_of(request)
    async with edge.using(sandbox) as box:
        record = box.row.record
        if record is None:
            raise SandboxLost(f"sandbox {box.row.id} has ended")
        place = await edge.call(edge.backend_of(box).place, box.row.id, record, user)
        yield edge.files, place


class Held(StreamingResponse):
    """A stream that holds what it is made from until its end, however that comes."""

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        held: contextlib.AsyncExitStack,
        media_type: str,
        headers: dict[str, str] | None = None,
        status: int = 200,
    ) -> None:
        super().__init__(parts, status, headers=headers, media_type=media_type)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            try:
                await super().__call__(scope, receive, send)
            except DsecfsError as e:
                # The answer is not complete: the server closes the connection.
                log.info("%s: cut off: %s", scope["path"], e)


@router.get("/content")
async def read(request: Request, sandbox: str, path: Path, user: User = None) -> Response:
    """A regular file. One range of bytes is understood (Range: bytes=FIRST-LAST)."""
    first, last = byte_range(request)
    async with contextlib.AsyncExitStack() as stack:
        files, place = await stack.enter_async_context(at(request, sandbox, user))
        reading = await stack.enter_async_context(
            files.read(place, raw(request, "path"), first=first, last=last)
        )
        headers = {"accept-ranges": "bytes"}
        status = 200
        if reading.length is not None:
            headers["content-length"] = str(reading.length)
            if first is not None or last is not None:
                status = 206
                end = reading.start + reading.length - 1
                size = reading.entry.size
                headers["content-range"] = f"bytes {reading.start}-{end}/{size}"
        answer = Held(reading.parts, stack.pop_all(), "application/octet-stream", headers, status)
    return answer


def byte_range(request: Request) -> tuple[int | None, int | None]:
    """First and last byte of a Range header; none for what RFC 9110 lets us ignore: other units,
    several ranges, a condition."""
    text = request.headers.get("range", "").strip().lower()
    unit, _, value = text.partition("=")
    if unit != "bytes" or "," in value or "if-range" in request.headers:
        return None, None
    first, dash, last = (part.strip() for part in value.partition("-"))
    if not dash or not (first or last):
        return None, None
    if not all(part.isascii() and part.isdigit() for part in (first, last) if part):
        return None, None
    low, high = (min(int(part[:19]), MAX_RANGE) if part else None for part in (first, last))
    if low is not None and high is not None and high < low:
        return None, None
    return low, high


@router.put("/content", response_model=Written)
async def write(
    request: Request,
    sandbox: str,
    path: Path,
    mode: Mode = None,
    make_parents: bool = False,
    sync: bool = False,
    user: User = None,
) -> Response:
    """The body becomes the file, at once and whole, or nothing changes. Owner and mode of a file
    that is replaced are kept unless `mode` says otherwise."""
    async with upload(request), at(request, sandbox, user) as (files, place):
        found = await files.write(
            place,
            raw(request, "path"),
            request.stream(),
            mode=None if mode is None else int(mode, 8),
            make_parents=make_parents,
            sync=sync,
        )
        return _json(found)


@contextlib.asynccontextmanager
async def upload(request: Request) -> AsyncIterator[None]:
    """Nobody is left to be told when the client goes in the middle of its upload."""
    try:
        yield
    except ClientDisconnect:
        raise BadInput("the upload was cut off") from None


@router.get("/stat", response_model=Entry)
async def stat(
    request: Request, sandbox: str, path: Path, follow: bool = True, user: User = None
) -> Response:
    """With follow=false, a symlink itself."""
    async with at(request, sandbox, user) as (files, place):
        return _json(await files.stat(place, raw(request, "path"), follow=follow))


@router.get("/list", response_model=Listing)
async def ls(
    request: Request,
    sandbox: str,
    path: Path,
    depth: Annotated[int, Query(ge=1, le=MAX_DEPTH)] = 1,
    limit: Annotated[int, Query(ge=1, le=MAX_LIST)] = 1000,
    user: User = None,
) -> Response:
    async with at(request, sandbox, user) as (files, place):
        return _json(await files.list(place, raw(request, "path"), depth=depth, limit=limit))


@router.post("/mkdir", response_model=Made)
async def mkdir(
    request: Request,
    sandbox: str,
    path: Path,
    mode: Mode = None,
    parents: bool = False,
    user: User = None,
) -> Response:
    """With `parents` also what is missing above it, and no error if it is there."""
    async with at(request, sandbox, user) as (files, place):
        number = 0o755 if mode is None else int(mode, 8)
        return _json(
            await files.mkdir(place, raw(request, "path"), mode=number, parents=parents)
        )


@router.post("/move", response_model=Moved)
async def move(
    request: Request,
    sandbox: str,
    source: Path,
    target: Path,
    replace: bool = True,
    user: User = None,
) -> Response:
    """`target` is the whole new path, not the directory to move into."""
    async with at(request, sandbox, user) as (files, place):
        return _json(
            await files.move(
                place, raw(request, "source"), raw(request, "target"), replace=replace
            )
        )


@router.delete("", response_model=Removed)
async def remove(
    request: Request, sandbox: str, path: Path, recursive: bool = False, user: User = None
) -> Response:
    """A file, a symlink (not what it leads to), an empty directory; with `recursive` a tree."""
    async with at(request, sandbox, user) as (files, place):
        return _json(await files.remove(place, raw(request, "path"), recursive=recursive))


@router.get("/tar")
async def pack(request: Request, sandbox: str, path: Path, user: User = None) -> Response:
    """What is in a directory, or one file, as tar. Sockets, fifos, devices and what is in /proc
    and /sys are left out."""
    async with contextlib.AsyncExitStack() as stack:
        files, place = await stack.enter_async_context(at(request, sandbox, user))
        parts = await stack.enter_async_context(files.pack(place, raw(request, "path")))
        answer = Held(parts, stack.pop_all(), "application/x-tar")
    return answer


@router.put("/tar", response_model=Unpacked)
async def unpack(
    request: Request, sandbox: str, path: Path, make_parents: bool = False, user: User = None
) -> Response:
    """Unpack the body, a tar (plain, gzip, bzip2, xz), in a directory. All that is made belongs to
    the user. After an error, what was made before it stays."""
    async with upload(request), at(request, sandbox, user) as (files, place):
        return _json(
            await files.unpack(
                place, raw(request, "path"), request.stream(), make_parents=make_parents
            )
        )


@router.get("/watch")
async def watch(
    request: Request,
    sandbox: str,
    path: Path,
    recursive: bool = False,
    timeout_s: Annotated[float, Query(gt=0, le=MAX_WATCH_S)] = MAX_WATCH_S,
    user: User = None,
) -> Response:
    """What happens to a file or directory, one JSON object a line, from now on. The sandbox is in
    use meanwhile."""
    async with contextlib.AsyncExitStack() as stack:
        files, place = await stack.enter_async_context(at(request, sandbox, user))
        changes = await stack.enter_async_context(
            files.watch(place, raw(request, "path"), recursive=recursive, timeout_s=timeout_s)
        )

        async def lines() -> AsyncIterator[bytes]:
            async for change in changes:
                yield change.model_dump_json().encode() + b"\n"

        answer = Held(lines(), stack.pop_all(), "application/x-ndjson")
    return answer


def _json(found: Entry | Listing | Made | Moved | Removed | Unpacked | Written) -> Response:
    return Response(found.model_dump_json(), media_type="application/json")
