"""/v1/node: what this node has and takes; metrics."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from dsec_runtime.edge.admission import memory_pressure
from dsec_runtime.edge.api.app import edge_of
from dsec_runtime.edge.model import Model
from dsecfs import __version__

router = APIRouter()


class NodeStatus(Model):
    version: str
    cordoned: str
    """Why nothing new is taken; "" when it is."""
    backends: list[str]
    states: dict[str, int]
    sandboxes_max: int
    memory_requested_mb: int
    memory_capacity_mb: int
    cpu_requested: float
    cpu_capacity: float
    disk_free_mb: int
    memory_pressure: float


@router.get("/v1/node", response_model=NodeStatus)
async def status(request: Request) -> NodeStatus:
    edge = edge_of(request)
    admission, capacity = edge.admission, edge.admission.capacity
    return NodeStatus(
        version=__version__,
        cordoned=admission.cordoned,
        backends=sorted(edge.backends),
        states=dict(Counter(str(box.row.state) for box in edge.all())),
        sandboxes_max=capacity.sandboxes,
        memory_requested_mb=admission.memory_mb,
        memory_capacity_mb=capacity.memory_mb,
        cpu_requested=admission.cpus,
        cpu_capacity=capacity.cpus,
        disk_free_mb=admission.free_disk_mb(),
        memory_pressure=memory_pressure(),
    )


@router.post("/v1/node/cordon", response_model=NodeStatus)
async def cordon(
    request: Request, reason: Annotated[str, Query(max_length=200)] = "asked"
) -> NodeStatus:
    """Take nothing new; what is there goes on. Holds until `uncordon`, restarts included."""
    await edge_of(request).cordon(reason or "asked")
    return await status(request)


@router.post("/v1/node/uncordon", response_model=NodeStatus)
async def uncordon(request: Request) -> NodeStatus:
    await edge_of(request).cordon("")
    return await status(request)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    edge = edge_of(request)
    states = Counter(str(box.row.state) for box in edge.all())
    return Response(edge.metrics.text(states), media_type="text/plain; version=0.0.4")


@router.get("/healthz")
async def healthz() -> dict[str, bool]:
    return {"ok": True}
