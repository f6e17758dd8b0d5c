"""The edge's side of the gate (asyncio).

What must hold: when the gate is gone another one is started and told every policy again before
anything else is asked of it; until then sandboxes reach nothing. A request is repeated until it
is answered or its time is up: all of them can be. A node without rules has no gate: the first
sandbox that needs one starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from dsec_runtime.edge.model import Network
from dsec_runtime.errors import GateError, SandboxLost
from dsec_runtime.keeper.protocol import HEADER, ProtocolError, pack, parse, sizes
from dsec_runtime.network.policy import Wire
from dsec_runtime.network.rules import advice, compile_policy
from dsec_runtime.network.services import Service, load_services
from dsec_runtime.network.start import LOG, ensure_gate
from dsecfs.errors import DsecfsError, Unsupported
from dsecfs.nodedirs import NodeDirs
from dsecfs.settings import Settings

log = logging.getLogger(__name__)

ANSWER_S = 30.0
START_S = 60.0
"""Longest wait for the first connection; a gate is started within 20 s."""
_MAX_DENIALS = 1024
"""Denials that wait for whoever follows; the oldest go."""
_WHY = {
    "private": "its addresses are not public: they are never reachable",
    "unnamed": "the connection does not say for which host it is (TLS server name, HTTP/1 Host)",
    "limit": "too many connections at a time",
}
_ERRORS: dict[str, type[DsecfsError]] = {
    error.__name__: error for error in (GateError, SandboxLost, Unsupported)
}


@dataclass(frozen=True, slots=True)
class Denial:
    """Something that was denied. The same again is told only after a while."""

    sandbox: str
    host: str
    """A name, or an address. Safe to print."""
    port: int
    """443 for a name that was not looked up: nobody had said a port yet."""
    protocol: str
    advice: str
    """What would allow it, or why nothing would."""

    def message(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        udp = " (udp)" if self.protocol == "udp" else ""
        return f"network denied {host}:{self.port}{udp}; {self.advice}"


@dataclass(frozen=True, slots=True)
class _Attached:
    pid: int
    started: int
    policy: Wire

    def request(self, sandbox: str) -> dict[str, Any]:
        return {
            "op": "attach",
            "sandbox": sandbox,
            "pid": self.pid,
            "started": self.started,
            "policy": self.policy,
        }


class Gate:
    """A connection to the node's gate. Use it in `async with`."""

    def __init__(self, dirs: NodeDirs, settings: Settings) -> None:
        """BadInput if the file of services (setting network_services) is wrong."""
        self._dirs = dirs
        self._services: dict[str, Service] = load_services(settings.network_services)
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]] = {}
        self._attached: dict[str, _Attached] = {}
        self._counts: dict[str, int] = {}
        self._denials: deque[Denial] = deque(maxlen=_MAX_DENIALS)
        self._more = asyncio.Event()
        self._wanted = asyncio.Event()
        """Something was asked."""
        self._writer: asyncio.StreamWriter | None = None
        self._instance: object = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(connected), name="gate")
        await asyncio.wait(
            [self._task, connected], timeout=START_S, return_when=asyncio.FIRST_COMPLETED
        )
        if self._task.done():
            await self._task
        if not connected.done():
            await self.__aexit__(None, None, None)
            raise GateError(
                f"gate: no answer in {START_S:g} s", hint=f"see {self._dirs.run}/{LOG}"
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """The gate goes on."""
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    # -- what the edge asks ------------------------------------------------------------

    def check(self, network: Network) -> None:
        """BadNetwork (with `field`) unless the gate can enforce it."""
        compile_policy(network, self._services)

    async def attach(self, sandbox: str, pid: int, started: int, network: Network) -> None:
        """Let the sandbox whose network namespace that process is in reach what the rules allow.
        Again: replace its rules. BadNetwork, SandboxLost, GateError, Unsupported."""
        wanted = _Attached(pid, started, compile_policy(network, self._services))
        answer = await self._ask(wanted.request(sandbox))
        self._attached[sandbox] = wanted
        self._counts[sandbox] = answer["denied"]

    async def update(self, sandbox: str, network: Network) -> int:
        """Replace the rules in one step. Connections that they do not allow are cut: how many.
        SandboxLost if it is not attached; BadNetwork, GateError: the rules are as before, or, when
        no gate answered, will be the new ones."""
        policy = compile_policy(network, self._services)
        before = self._attached.get(sandbox)
        if before is not None:
            # Before it is asked: a gate that is started meanwhile must not get the old one.
            self._attached[sandbox] = _Attached(before.pid, before.started, policy)
        answer = await self._ask({"op": "update", "sandbox": sandbox, "policy": policy})
        return int(answer["cut"])

    async def detach(self, sandbox: str) -> None:
        """Nothing of it is left in the gate. Nothing happens if it is not attached. GateError."""
        self._attached.pop(sandbox, None)
        self._counts.pop(sandbox, None)
        if self._writer is None and not self._needed():
            return  # no gate runs, or it will end this when it is told all policies
        await self._ask({"op": "detach", "sandbox": sandbox})

    def denied(self, sandbox: str) -> int:
        """What was denied to it so far."""
        return self._counts.get(sandbox, 0)

    async def follow_denials(self) -> AsyncIterator[Denial]:
        """Each goes to one follower."""
        while True:
            while self._denials:
                yield self._denials.popleft()
            self._more.clear()
            await self._more.wait()

    # -- the connection ----------------------------------------------------------------

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = (request, answer)
        try:
            self._send(number, request)
            self._wanted.set()
            value = await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError:
            raise GateError(
                f"gate: no answer to {request['op']} in {ANSWER_S:g} s",
                hint=f"see {self._dirs.run}/{LOG}",
            ) from None
        finally:
            self._asked.pop(number, None)
        if "error" in value:
            kind = _ERRORS.get(value["type"], GateError)
            raise kind(str(value["error"]), hint=str(value["hint"]))
        return value

    def _send(self, number: int, request: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(pack({"n": number, **request}))

    async def _run(self, connected: asyncio.Future[None]) -> None:
        while True:
            reader, writer = await self._connect(connected)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._begin(reader, writer)
                # The policies went ahead; the gate does what concerns one sandbox in order.
                self._writer = writer
                for number, (request, _) in list(self._asked.items()):
                    self._send(number, request)
                if not connected.done():
                    connected.set_result(None)
                while True:
                    self._take(await _read(reader))
            except (OSError, EOFError, ProtocolError) as e:
                log.info("gate: connection lost: %s", e)
            finally:
                self._writer = None
                writer.close()

    def _needed(self) -> bool:
        """Whether a gate has to be started if none runs."""
        return bool(self._attached or self._asked)

    async def _connect(
        self, connected: asyncio.Future[None]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sets `connected` if there is none to connect to, and waits until one is needed."""
        wait_s = 0.05
        while True:
            self._wanted.clear()
            try:
                if self._needed():
                    await asyncio.to_thread(ensure_gate, self._dirs)
                return await asyncio.open_unix_connection(str(self._dirs.gate))
            except (DsecfsError, OSError) as e:
                if not self._needed():
                    if not connected.done():
                        connected.set_result(None)
                    await self._wanted.wait()
                    continue
                log.warning("gate: %s", e)
                if isinstance(e, DsecfsError):
                    self._fail(e)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 5.0)

    def _fail(self, error: DsecfsError) -> None:
        """Whoever waits need not wait longer."""
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(GateError(error.message, hint=error.hint))

    async def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tell a new gate all policies; learn what an old one has counted."""
        for number, op in (("instance", "ping"), ("counts", "list"), ("follow", "follow")):
            writer.write(pack({"n": number, "op": op}))
        instance = None
        missing = {"instance", "counts", "follow"}
        while missing:
            value = await _read(reader)
            missing.discard(value.get("n"))
            if value.get("n") == "instance":
                instance = value["instance"]
            else:
                self._take(value)
        if instance != self._instance:
            self._instance = instance
            for sandbox, wanted in self._attached.items():
                writer.write(pack({"n": f"again {sandbox}", **wanted.request(sandbox)}))

    def _take(self, value: dict[str, Any]) -> None:
        number = value.pop("n", None)
        if isinstance(number, int):
            found = self._asked.get(number)
            if found is not None and not found[1].done():
                found[1].set_result(value)
        elif isinstance(number, str):
            if number == "counts":
                self._counts |= value["denied"]
            elif "error" in value and value["type"] != SandboxLost.__name__:
                log.warning("gate: %s: %s", number, value["error"])
        elif "counts" in value:
            for sandbox, count in value["counts"].items():
                self._count(sandbox, count)
        elif "denied" in value:
            self._count(value["denied"], value["count"])
            self._denials.append(self._denial(value))
            self._more.set()

    def _count(self, sandbox: str, count: int) -> None:
        if sandbox in self._counts:
            self._counts[sandbox] = count

    def _denial(self, news: dict[str, Any]) -> Denial:
        host, port, protocol = news["host"], news["port"], news["protocol"]
        said = _WHY.get(news["why"]) or advice(host, port, protocol, self._services)
        return Denial(news["denied"], host, port, protocol, said)


async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
    text, data = sizes(await reader.readexactly(HEADER.size))
    body = await reader.readexactly(text + data)
    return parse(body[:text])
