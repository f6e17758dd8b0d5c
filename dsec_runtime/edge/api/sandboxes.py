"""/v1/sandboxes: create, list, end, pause, resume, network, lifetime, events, why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from dsec_runtime.edge.api.app import edge_of
from dsec_runtime.edge.box import Box
from dsec_runtime.edge.model import (
    Event,
    ExecResult,
    Lifetime,
    Model,
    Network,
    Sandbox,
    SandboxSpec,
    State,
    Stats,
    Why,
)

router = APIRouter(prefix="/v1")

PAGE = 1000


class SandboxPage(Model):
    sandboxes: list[Sandbox]
    next: str | None
    """Ask for what comes `after` this; None at the end."""


class EventPage(Model):
    events: list[Event]
    next: int
    """Ask for what comes `after` this."""


class WhyAnswer(Model):
    """Everything that is known about a sandbox's end, or its present state."""

    sandbox: Sandbox
    why: Why
    last: ExecResult | None
    """The last command that has ended."""
    events: list[Event]


@router.post("/sandboxes", status_code=201, response_model=Sandbox)
async def create(spec: SandboxSpec, request: Request, wait: bool = True) -> Sandbox:
    """Make a sandbox; the answer comes when it is running, with wait=false at once."""
    return (await edge_of(request).create(spec, wait=wait)).show()


@router.get("/sandboxes", response_model=SandboxPage)
async def ls(
    request: Request,
    state: Annotated[list[State] | None, Query()] = None,
    job: str | None = None,
    name: str | None = None,
    label: Annotated[list[str] | None, Query(description="KEY or KEY=VALUE")] = None,
    ended: bool = False,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 200,
) -> SandboxPage:
    """Sandboxes in the order of their ids; those that ended only if asked for."""
    wanted = set(state or ())
    labels = [text.partition("=") for text in label or ()]

    def fits(box: Box) -> bool:
        spec = box.row.spec
        if wanted:
            if box.row.state not in wanted:
                return False
        elif box.row.state.ended and not ended:
            return False
        if (job is not None and spec.job != job) or (name is not None and spec.name != name):
            return False
        return all(
            key in spec.labels and (not sign or spec.labels[key] == value)
            for key, sign, value in labels
        )

    found = sorted((b for b in edge_of(request).all() if fits(b)), key=lambda b: b.row.id)
    page = [b for b in found if b.row.id > after][: limit + 1]
    following = page[limit - 1].row.id if len(page) > limit else None
    return SandboxPage(sandboxes=[b.show() for b in page[:limit]], next=following)


@router.get("/sandboxes/{sandbox}", response_model=Sandbox)
async def get(sandbox: str, request: Request) -> Sandbox:
    """By id, start of an id, or name."""
    return edge_of(request).find(sandbox).show()


@router.delete("/sandboxes/{sandbox}", status_code=204)
async def remove(sandbox: str, request: Request) -> Response:
    """End it and forget it with all output of its commands."""
    await edge_of(request).remove(sandbox)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox}/stop", response_model=Sandbox)
async def stop(sandbox: str, request: Request) -> Sandbox:
    """End it; what is known about it stays for a day."""
    return (await edge_of(request).stop(sandbox)).show()


@router.post("/sandboxes/{sandbox}/pause", response_model=Sandbox)
async def pause(sandbox: str, request: Request) -> Sandbox:
    return (await edge_of(request).pause(sandbox)).show()


@router.post("/sandboxes/{sandbox}/resume", response_model=Sandbox)
async def resume(sandbox: str, request: Request) -> Sandbox:
    return (await edge_of(request).resume(sandbox)).show()


@router.put("/sandboxes/{sandbox}/network", response_model=Sandbox)
async def set_network(sandbox: str, network: Network, request: Request) -> Sandbox:
    """Replace its rules in one step."""
    return (await edge_of(request).set_network(sandbox, network)).show()


@router.put("/sandboxes/{sandbox}/lifetime", response_model=Sandbox)
async def set_lifetime(sandbox: str, lifetime: Lifetime, request: Request) -> Sandbox:
    return (await edge_of(request).set_lifetime(sandbox, lifetime)).show()


@router.post("/sandboxes/{sandbox}/touch", response_model=Sandbox)
async def touch(sandbox: str, request: Request) -> Sandbox:
    """Its idle time starts again."""
    box = edge_of(request).find(sandbox)
    box.activity()
    return box.show()


@router.get("/sandboxes/{sandbox}/stats", response_model=Stats)
async def stats(sandbox: str, request: Request) -> Stats:
    return await edge_of(request).stats(sandbox)


@router.get("/sandboxes/{sandbox}/why", response_model=WhyAnswer)
async def why(sandbox: str, request: Request) -> WhyAnswer:
    """Cause of its state, last output, what happened."""
    edge = edge_of(request)
    box = edge.find(sandbox)
    ended = [run for run in edge.execs.all(box) if run.ended_at is not None]
    last = await edge.execs.result(box, ended[-1].id) if ended else None
    events = await edge.events.read(0, PAGE, box.row.id)
    return WhyAnswer(sandbox=box.show(), why=box.row.why, last=last, events=events[-50:])


@router.get("/events", response_model=EventPage)
async def events(
    request: Request,
    sandbox: str | None = None,
    after: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 200,
    follow: Literal["no", "yes"] = "no",
) -> Response:
    """Events after a number; with follow=yes a stream of them, one JSON object a line."""
    edge = edge_of(request)
    box = edge.find(sandbox) if sandbox is not None else None
    of = box.row.id if box else None
    if follow == "no":
        found = await edge.events.read(after, limit, of)
        page = EventPage(events=found, next=found[-1].seq if found else after)
        return Response(page.model_dump_json(), media_type="application/json")

    async def lines() -> AsyncIterator[bytes]:
        done = (lambda: box.row.state.ended) if box else (lambda: False)
        async for event in edge.events.follow(after, of, done):
            yield event.model_dump_json().encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")
