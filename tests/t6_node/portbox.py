"""A network namespace with servers in it, and the edge's real API for its ports in front of it.

What stands for the edge has the parts that ports need: `using`, `call`, the backend's `place`. The
application, its middleware, its error answers and the HTTP server are the edge's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from dsec_runtime.edge.api.app import create_app
from dsec_runtime.edge.service import _config
from dsec_runtime.errors import NoSuchSandbox
from dsec_runtime.ports.dial import start_time

ID = "abcdefghijkl"


def why_not() -> str:
    """What is missing for a network namespace; "" if nothing is."""
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            return f"no {program} (apt-get install util-linux iproute2)"
    return ""


@dataclass
class Inside:
    """The process with the servers."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def started(self) -> int:
        found = start_time(self.pid)
        assert found is not None
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextmanager
def servers() -> Iterator[Inside]:
    """Servers in a user and network namespace, as those of a sandbox are."""
    if reason := why_not():
        pytest.skip(reason)
    script = Path(__file__).with_name("portserver.py")
    process = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--net", sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    inside = Inside(process)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", f"the servers said {line!r}"
        yield inside
    finally:
        inside.kill()
        assert process.stdout is not None
        process.stdout.close()


class Standing:
    """What stands for the edge."""

    def __init__(self, place: Callable[[], tuple[int, int]]) -> None:
        self.metrics = SimpleNamespace(refused=lambda: None)
        self.row = SimpleNamespace(id=ID, record={})
        self.users = 0
        self.places = 0
        self._place = place

    @asynccontextmanager
    async def using(self, sandbox: str) -> AsyncIterator[Any]:
        if sandbox not in (ID, "name"):
            raise NoSuchSandbox(f"no sandbox {sandbox}")
        self.users += 1
        try:
            yield SimpleNamespace(row=self.row)
        finally:
            self.users -= 1

    async def call(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(work, *args)

    def backend_of(self, box: object) -> Any:
        return self

    def place(self, sandbox: str, record: object, user: str | None) -> Any:
        self.places += 1
        pid, started = self._place()
        return SimpleNamespace(pid=pid, started=started)


@dataclass
class Front:
    """The edge's API, served on loopback."""

    edge: Standing
    port: int
    client: httpx.AsyncClient
    app: Any

    def url(self, port: int, path: str = "/") -> str:
        return f"/v1/sandboxes/{ID}/ports/{port}{path}"

    def ws(self, port: int, path: str = "/") -> str:
        return f"ws://127.0.0.1:{self.port}{self.url(port, path)}"


@asynccontextmanager
async def front(inside: Inside, *, token: str = "", place: Any = None) -> AsyncIterator[Front]:
    edge = Standing(place or (lambda: (inside.pid, inside.started)))
    app = create_app(edge, token=token)  # type: ignore[arg-type]
    server = uvicorn.Server(_config(app))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    serving = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits, trust_env=False
        ) as client:
            yield Front(edge, port, client, app)
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 15)
        if dialler := getattr(app.state, "dialler", None):
            dialler.close()
    await until(lambda: edge.users == 0)


async def until(true: Callable[[], bool], limit_s: float = 10) -> None:
    """Wait for something that is about to happen."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it does not happen"
        await asyncio.sleep(0.02)


logging.getLogger("httpx").setLevel(logging.WARNING)
