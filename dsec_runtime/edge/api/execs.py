"""…/execs: commands in a sandbox.

Streams of output are frames: one byte (1 standard output, 2 standard error), eight bytes offset of
the first byte in its stream, four bytes length (both big endian), the bytes; so are the messages of
the WebSocket, without offset and length: 0 is standard input (an empty one ends it), 3 is JSON:
{"resize": [rows, columns]}, {"signal": number} from the client, {"exit": result} from us at the
end. Who comes back says how much of each stream it has (`stdout`, `stderr`): a frame that starts
later than asked for means that what was in between is not kept any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import struct
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import Response, StreamingResponse

from dsec_runtime.edge.api.app import edge_of, problem_of
from dsec_runtime.edge.edge import Edge
from dsec_runtime.edge.model import Exec, ExecResult, ExecSpec, Model
from dsecfs.errors import BadInput, DsecfsError

router = APIRouter(prefix="/v1/sandboxes/{sandbox}")

STDIN, STDOUT, STDERR, CONTROL = 0, 1, 2, 3
MAX_WAIT_S = 3600.0


class Execs(Model):
    execs: list[Exec]


class Signal(Model):
    signal: int | str
    """A number, or a name: TERM, SIGINT. KILL ends the whole process tree."""

    def number(self) -> int:
        """BadInput for what is none."""
        text = str(self.signal).upper().removeprefix("SIG")
        with contextlib.suppress(ValueError, KeyError):
            if text.isascii() and text.isdigit():
                return int(signal.Signals(int(text)))
            return int(signal.Signals[f"SIG{text}"])
        raise BadInput(
            f"no signal {str(self.signal)[:40]!r}", hint="use e.g. TERM, INT, KILL or 15"
        )


class Size(Model):
    rows: int
    columns: int


def _json(result: ExecResult) -> Response:
    return Response(result.model_dump_json(), media_type="application/json")


@router.post("/run", response_model=ExecResult)
async def run(sandbox: str, spec: ExecSpec, request: Request) -> Response:
    """Run a command and wait for its end. It goes on when the client goes away, up to its
    `timeout_s`; with `key` the same request finds it again."""
    edge = edge_of(request)
    async with edge.using(sandbox) as box:
        return _json(await edge.execs.run(box, spec))


@router.post("/execs", status_code=201, response_model=Exec)
async def start(sandbox: str, spec: ExecSpec, request: Request) -> Exec:
    """Start a command in the background."""
    edge = edge_of(request)
    async with edge.using(sandbox) as box:
        return edge.execs.show(box, await edge.execs.start(box, spec))


@router.get("/execs", response_model=Execs)
async def ls(sandbox: str, request: Request) -> Execs:
    edge = edge_of(request)
    box = edge.find(sandbox)
    return Execs(execs=[edge.execs.show(box, run) for run in edge.execs.all(box)])


@router.get("/execs/{exec}", response_model=Exec)
async def get(sandbox: str, exec: str, request: Request) -> Exec:
    edge = edge_of(request)
    box = edge.find(sandbox)
    return edge.execs.show(box, edge.execs.get(box, exec))


@router.get("/execs/{exec}/result", response_model=ExecResult)
async def result(
    sandbox: str,
    exec: str,
    request: Request,
    wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = MAX_WAIT_S,
) -> Response:
    """How it ended; waits for its end."""
    edge = edge_of(request)
    return _json(await edge.execs.result(edge.find(sandbox), exec, wait_s))


@router.get("/execs/{exec}/output")
async def output(
    sandbox: str,
    exec: str,
    request: Request,
    stream: Literal["both", "stdout", "stderr"] = "both",
    stdout: Annotated[int, Query(ge=0)] = 0,
    stderr: Annotated[int, Query(ge=0)] = 0,
    live: bool = True,
) -> StreamingResponse:
    """Output from these offsets on that is kept, then, if `live`, what comes until its end. One
    stream is raw bytes, both are frames."""
    edge = edge_of(request)
    box = edge.find(sandbox)
    source = edge.execs.follow if live else edge.execs.kept
    frames = source(box, exec, (stdout, stderr))
    wanted = {"stdout": (STDOUT,), "stderr": (STDERR,)}.get(stream, (STDOUT, STDERR))

    async def parts() -> AsyncIterator[bytes]:
        async for frame in frames:
            if frame.stream not in wanted:
                continue
            if stream == "both":
                yield struct.pack(">BQI", frame.stream, frame.start, len(frame.data))
            yield frame.data

    kind = "application/vnd.dsec.frames" if stream == "both" else "application/octet-stream"
    return StreamingResponse(parts(), media_type=kind)


@router.post("/execs/{exec}/stdin", status_code=204)
async def stdin(sandbox: str, exec: str, request: Request, close: bool = False) -> Response:
    """Send the body to its standard input; with close=true that is the end of it."""
    edge = edge_of(request)
    async with edge.using(sandbox) as box:
        async for part in request.stream():
            if part:
                await edge.execs.write(box, exec, part)
        if close:
            await edge.execs.close_stdin(box, exec)
    return Response(status_code=204)


@router.post("/execs/{exec}/signal", status_code=204)
async def send_signal(sandbox: str, exec: str, body: Signal, request: Request) -> Response:
    edge = edge_of(request)
    async with edge.using(sandbox) as box:
        await edge.execs.signal(box, exec, body.number())
    return Response(status_code=204)


@router.post("/execs/{exec}/resize", status_code=204)
async def resize(sandbox: str, exec: str, size: Size, request: Request) -> Response:
    """Change the size of its terminal."""
    edge = edge_of(request)
    async with edge.using(sandbox) as box:
        await edge.execs.resize(box, exec, _side(size.rows), _side(size.columns))
    return Response(status_code=204)


@router.delete("/execs/{exec}", status_code=204)
async def kill(sandbox: str, exec: str, request: Request) -> Response:
    """End its whole process tree."""
    edge = edge_of(request)
    async with edge.using(sandbox) as box:
        await edge.execs.signal(box, exec, signal.SIGKILL)
    return Response(status_code=204)


@router.websocket("/execs/{exec}/attach")
async def attach(
    websocket: WebSocket, sandbox: str, exec: str, stdout: int = 0, stderr: int = 0
) -> None:
    """Its output from these offsets on, and its input. The command goes on without us."""
    edge: Edge = websocket.app.state.edge
    await websocket.accept()
    try:
        async with edge.using(sandbox) as box:
            frames = edge.execs.follow(box, exec, (max(0, stdout), max(0, stderr)))
            run = edge.execs.get(box, exec)
            async with asyncio.TaskGroup() as group:
                told = group.create_task(_tell(websocket, frames))
                heard = group.create_task(_hear(websocket, edge, sandbox, exec))
                told.add_done_callback(lambda _: heard.cancel())
                heard.add_done_callback(lambda _: told.cancel())
            if not told.cancelled():
                await run.done.wait()
                found = await edge.execs.result(box, exec)
                last = {"exit": found.model_dump(mode="json", exclude={"stdout", "stderr"})}
                await websocket.send_bytes(bytes([CONTROL]) + json.dumps(last).encode())
                await websocket.close()
    except* (WebSocketDisconnect, RuntimeError):
        pass  # the client went away
    except* DsecfsError as group_:
        error = group_.exceptions[0]
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, DsecfsError)
        with contextlib.suppress(RuntimeError):
            problem = problem_of(error).model_dump(mode="json")
            await websocket.send_bytes(bytes([CONTROL]) + json.dumps({"error": problem}).encode())
            await websocket.close(4000, error.message[:100])


async def _tell(websocket: WebSocket, frames: AsyncIterator[Any]) -> None:
    async for frame in frames:
        await websocket.send_bytes(bytes([frame.stream]) + frame.data)


async def _hear(websocket: WebSocket, edge: Edge, sandbox: str, exec: str) -> None:
    box = edge.find(sandbox)
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code") or 1000)
        data = message.get("bytes") or (message.get("text") or "").encode()
        if not data:
            raise BadInput("empty message", hint="the first byte says what it is")
        if data[0] == STDIN:
            if len(data) > 1:
                await edge.execs.write(box, exec, data[1:])
            else:
                await edge.execs.close_stdin(box, exec)
        elif data[0] == CONTROL:
            await _control(edge, box, exec, data[1:])
        else:
            raise BadInput(f"message of kind {data[0]}", hint="0 is input, 3 is control")


async def _control(edge: Edge, box: Any, exec: str, data: bytes) -> None:
    try:
        said = json.loads(data)
        rows_columns = said.get("resize")
        number = said.get("signal")
    except (ValueError, AttributeError):
        raise BadInput("control message: no JSON object") from None
    if isinstance(rows_columns, list) and len(rows_columns) == 2:
        rows, columns = (_side(value) for value in rows_columns)
        await edge.execs.resize(box, exec, rows, columns)
    elif isinstance(number, int | str):
        await edge.execs.signal(box, exec, Signal(signal=number).number())
    else:
        raise BadInput("control message: neither resize nor signal")


def _side(value: object) -> int:
    if not isinstance(value, int) or not 1 <= value <= 4096:
        raise BadInput("size of a terminal", hint="rows and columns are 1 to 4096")
    return value
