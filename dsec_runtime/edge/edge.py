"""The edge: every sandbox of the node, its state and who may change it.

What must hold:
- the journal has a step before it is taken; nobody is answered before it is durable;
- one change at a time per sandbox (its lock), any number of sandboxes at once;
- whoever works in a sandbox holds it with `using`: it is awake then, not idle, and the end waits
  for nobody: it makes the work fail;
- nothing blocks the event loop: backends are called in threads of one bounded pool.

After a restart `start` adopts what lives, clears what is half made or gone, and answers only then.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from dsec_runtime.edge import journal as j
from dsec_runtime.edge.admission import Admission
from dsec_runtime.edge.backend import Backend, Record
from dsec_runtime.edge.box import Box
from dsec_runtime.edge.events import Events
from dsec_runtime.edge.execs import Execs
from dsec_runtime.edge.journal import Journal, Row
from dsec_runtime.edge.metrics import Metrics
from dsec_runtime.edge.model import (
    Fault,
    Lifetime,
    Network,
    Sandbox,
    SandboxSpec,
    State,
    Stats,
    Why,
)
from dsec_runtime.errors import (
    NoSuchSandbox,
    SandboxError,
    SandboxLost,
    WrongState,
)
from dsec_runtime.files.client import Files
from dsec_runtime.network import Gate
from dsec_runtime.sandbox import new_id
from dsecfs.errors import BadInput, Conflict, DsecfsError, Unsupported
from dsecfs.node import Node, Prepared
from dsecfs.nodedirs import boot_id

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 32
"""Calls into backends at the same time."""
CREATES = 16
"""Sandboxes that are being made at the same time; others wait their turn."""
MAX_WAITING = 16384
"""Creates that wait. More are refused."""
FREEZE_S = 5.0
"""Longest wait for a sandbox to freeze."""
STOP_S = 60.0
"""Longest wait for a stop that somebody else began."""
ENDED_KEPT_S = 86400.0
"""How long `why` answers for a sandbox that ended."""


class Edge:
    """Owns the node's sandboxes. `async with edge:` between start and end of the daemon."""

    def __init__(
        self,
        node: Node,
        journal: Journal,
        backends: Mapping[str, Backend],
        execs: Execs,
        gate: Gate,
        files: Files,
        admission: Admission,
        events: Events,
        metrics: Metrics,
    ) -> None:
        self.node = node
        self.backends = backends
        self.dirs = node.dirs
        self.execs = execs
        execs.host = self
        self.gate = gate
        self.files = files
        self.admission = admission
        self.events = events
        self.metrics = metrics
        self._journal = journal
        self._boxes: dict[str, Box] = {}
        self._keys: dict[str, asyncio.Future[Box]] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="backend")
        self._making = asyncio.Semaphore(CREATES)
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # -- start and end -----------------------------------------------------------------

    async def __aenter__(self) -> Edge:
        await self._recover()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Sandboxes go on."""
        for box in self._boxes.values():
            self._unwatch(box)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def call(self, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Run blocking work in a thread of the pool. It goes on when the caller is cancelled."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(
            loop.run_in_executor(self._pool, functools.partial(work, *args, **more))
        )

    def spawn(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        """Run a coroutine function in the background, until the edge ends at the latest."""

        async def guarded() -> None:
            try:
                await work()
            except (DsecfsError, OSError) as e:
                log.warning("%s: %s", name, e)
            except Exception:
                # A fault of ours in one sandbox's affairs is no reason to drop all others.
                log.exception("%s", name)
                self.metrics.leftover()

        task = asyncio.get_running_loop().create_task(guarded(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _recover(self) -> None:
        rows = await self.call(self._journal.load)
        boot = boot_id()
        before: str | None = await self.call(self._journal.meta, "boot")
        rebooted = before not in (None, boot)
        for row in rows:
            box = self._boxes[row.id] = Box(row)
            if row.spec.key:
                self._remember_key(row.spec.key, box)
        known = {id for id, box in self._boxes.items() if not box.row.state.ended}
        for backend in self.backends.values():
            for sandbox in await self.call(backend.all):
                if sandbox not in known:
                    log.info("sandbox %s is in no journal: cleared", sandbox)
                    await self._destroy(backend, sandbox, None)
        async with asyncio.TaskGroup() as group:
            for box in self._boxes.values():
                if not box.row.state.ended and box.row.state != State.ARCHIVED:
                    group.create_task(self._adopt(box, rebooted))
        await self._journal.write(j.set_meta("boot", boot))
        cordoned: str | None = await self.call(self._journal.meta, "cordoned")
        self.admission.cordoned = cordoned or ""

    async def _adopt(self, box: Box, rebooted: bool) -> None:
        row, backend = box.row, self._backend(box)
        found = "gone"
        if row.state in (State.RUNNING, State.PAUSED) and row.record is not None and not rebooted:
            found = await self.call(backend.adopt, row.id, row.record)
        if found == "gone":
            if row.state == State.STOPPING:
                why = row.why
            elif rebooted:
                why = Why(cause="reboot", message="the node was restarted", fault=Fault.PLATFORM)
            elif row.state == State.CREATING:
                why = Why(
                    cause="create-failed",
                    message="the edge ended while it was made",
                    fault=Fault.PLATFORM,
                )
            else:
                why = Why(cause="lost", message="it was gone", fault=Fault.PLATFORM)
            self.admission.adopt(row.id, row.spec)
            asked = row.state == State.STOPPING
            await self._end(box, why, State.STOPPED if asked else State.FAILED)
            return
        self.admission.adopt(row.id, row.spec)
        box.activity()
        state = State.PAUSED if found == "paused" else State.RUNNING
        await self._change(box, state, "adopted", paused_at=row.paused_at)
        await self._watch(box)
        await self.execs.adopt(box)
        await self._attach_network(box)

    # -- asking ------------------------------------------------------------------------

    def get(self, sandbox: str) -> Box:
        """NoSuchSandbox."""
        box = self._boxes.get(sandbox)
        if box is None:
            raise NoSuchSandbox(
                f"no sandbox {sandbox[:40]!r} on this node", hint="dsec sandbox ls lists them"
            )
        return box

    def find(self, text: str) -> Box:
        """By id, by the start of an id, or by name if only one live sandbox has it."""
        if text in self._boxes:
            return self._boxes[text]
        found = [b for b in self._boxes.values() if b.row.spec.name == text]
        found = [b for b in found if not b.row.state.ended] or found[-1:]
        if not found and len(text) >= 4:
            found = [b for id, b in self._boxes.items() if id.startswith(text)]
        if len(found) > 1:
            raise BadInput(
                f"sandbox {text[:40]!r} can be any of {len(found)}",
                hint="use an id: " + ", ".join(b.row.id for b in found[:5]),
            )
        return found[0] if found else self.get(text)

    def all(self) -> list[Box]:
        return list(self._boxes.values())

    def show(self, box: Box) -> Sandbox:
        return box.show()

    # -- making ------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec, *, wait: bool = True) -> Box:
        """Make a sandbox; returns when it is running, ready_cmd and all, or without `wait` when
        it is counted in and will be made.

        Errors as `Node.prepare` and `Backend.create`; Refused; Conflict for a key that was used
        with another specification. After an error nothing is left of it.
        """
        if spec.key is None:
            return await self._create(spec, wait)
        known = self._keys.get(spec.key)
        if known is not None:
            box = await asyncio.shield(known)
            if box.row.spec != spec:
                raise Conflict(
                    f"key {spec.key[:60]!r} was used for another specification",
                    hint="use a new key for a new sandbox",
                )
            return box
        made: asyncio.Future[Box] = asyncio.get_running_loop().create_future()
        self._keys[spec.key] = made
        try:
            box = await self._create(spec, wait)
        except BaseException as e:
            del self._keys[spec.key]
            if isinstance(e, asyncio.CancelledError):
                made.cancel()
            else:
                made.set_exception(e)
                made.exception()  # whoever waits gets it; nobody may
            raise
        made.set_result(box)
        return box

    async def _create(self, spec: SandboxSpec, wait: bool) -> Box:
        backend = self.backends.get(spec.backend)
        if backend is None:
            raise Unsupported(
                f"backend {spec.backend}: not on this node",
                hint=f"it has {', '.join(sorted(self.backends))}",
            )
        self.gate.check(spec.network)
        _check_lifetime(spec.lifetime)
        began = time.monotonic()
        row = Row(new_id(), spec, State.CREATING, time.time())
        self.admission.reserve(row.id, spec)
        box = Box(row)
        try:
            await self._journal.write(j.insert(row), self.events.created(box))
        except BaseException:
            self.admission.release(row.id)
            raise
        self._boxes[row.id] = box
        # From here on it goes on whether or not the caller waits.
        task = asyncio.ensure_future(self._make(box, backend))

        async def made() -> None:
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                task.add_done_callback(lambda t: t.cancelled() or t.exception())
                raise
            self.metrics.created(spec.backend, time.monotonic() - began)

        if wait:
            await made()
        else:
            self.spawn(made, f"create of sandbox {row.id}")
        return box

    async def _make(self, box: Box, backend: Backend) -> None:
        row = box.row
        async with box.lock:
            try:
                async with self._turn():
                    prepared = await self.call(self._prepare, row.spec)
                    box.prepared = prepared.environment
                    record = await self.call(backend.create, row.id, row.spec, prepared)
                    row.record, row.environment = record, prepared.digest
                    await self._attach_network(box)
                row.started_at = time.time()
                await self._change(
                    box,
                    State.RUNNING,
                    None,
                    record=record,
                    environment=row.environment,
                    started_at=row.started_at,
                )
                await self._watch(box)
            except BaseException as e:
                await self._failed(box, e)
                raise
        if row.spec.entrypoint or row.spec.ready_cmd is not None:
            try:
                async with self.using(row.id):
                    await self.execs.first(box)
            except BaseException as e:
                async with box.lock:
                    await self._failed(box, e)
                raise
        box.activity()
        await self.note(box, "running")

    async def _failed(self, box: Box, error: BaseException) -> None:
        fault = Fault.CALLER if isinstance(error, BadInput) else Fault.PLATFORM
        if isinstance(error, SandboxError) and not error.recoverable:
            fault = Fault.ENVIRONMENT
        why = Why(cause="create-failed", message=str(error)[:4000], fault=fault)
        self.metrics.failed(box.row.spec.backend, type(error).__name__)
        await self._end(box, why, State.FAILED)

    def _prepare(self, spec: SandboxSpec) -> Prepared:
        prepared = self.node.prepare(spec.environment, spec.toolkits, spec.platform)
        client = self.node.start_fs()
        self.node.warm(client, prepared)
        return prepared

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            async with self._making:
                yield
        finally:
            self._waiting -= 1

    # -- working in it -----------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def using(self, sandbox: str) -> AsyncIterator[Box]:
        """Work in a sandbox: a paused one is resumed first, once; it is not idle meanwhile.

        NoSuchSandbox; WrongState when it is not one to work in; SandboxLost when it has ended.
        """
        box = self.find(sandbox)
        box.users += 1
        try:
            if box.row.state != State.RUNNING:
                await self._awake(box)
            yield box
        finally:
            box.users -= 1
            box.activity()

    async def _awake(self, box: Box) -> None:
        async with box.lock:
            state = box.row.state
            if state == State.PAUSED:
                await self._resume(box)
            elif state.ended or state == State.STOPPING:
                why = box.row.why
                raise SandboxLost(
                    f"sandbox {box.row.id} has ended ({why.cause}): {why.message}".rstrip(": "),
                    hint=f"dsec sandbox why {box.row.id}",
                )
            elif state != State.RUNNING:
                raise WrongState(f"sandbox {box.row.id} is {state}", hint="wait, or resume it")

    # -- changing ----------------------------------------------------------------------

    async def pause(self, sandbox: str, *, cause: str = "asked", if_idle: bool = False) -> Box:
        """Freeze it and give its memory back. Nothing happens if it is paused, or with `if_idle`
        if it is in use.

        WrongState; CannotFreeze, and it runs on.
        """
        box = self.find(sandbox)
        async with box.lock:
            if box.row.state == State.PAUSED or (if_idle and box.busy):
                return box
            record = self._running(box, "pause")
            backend = self._backend(box)
            began = time.monotonic()
            await self.execs.hold(box)
            try:
                await self.call(backend.pause, box.row.id, record, deadline_s=FREEZE_S)
            except BaseException:
                await self.execs.release(box)
                raise
            box.row.paused_at = time.time()
            why = Why(cause=cause)
            await self._change(
                box,
                State.PAUSED,
                "paused",
                paused_at=box.row.paused_at,
                why=why,
                data={"cause": cause},
            )
            self.metrics.took("pause", time.monotonic() - began)
        self.spawn(functools.partial(self._reclaim, box), f"reclaim memory of {box.row.id}")
        return box

    async def _reclaim(self, box: Box) -> None:
        async with box.lock:
            if box.row.state == State.PAUSED and box.row.record is not None:
                freed = await self.call(
                    self._backend(box).reclaim, box.row.id, box.row.record
                )
                log.info("sandbox %s: %d bytes reclaimed", box.row.id, freed)

    async def resume(self, sandbox: str) -> Box:
        """Let it go on. Nothing happens if it runs."""
        box = self.find(sandbox)
        if box.row.state != State.RUNNING:
            await self._awake(box)
        box.activity()
        return box

    async def _resume(self, box: Box) -> None:
        row = box.row
        assert row.record is not None
        began = time.monotonic()
        await self.call(self._backend(box).resume, row.id, row.record)
        paused = max(0.0, time.time() - (row.paused_at or time.time()))
        row.paused_s += paused
        row.paused_at = None
        await self._change(
            box, State.RUNNING, "resumed", paused_at=None, paused_s=row.paused_s, why=Why()
        )
        await self.execs.release(box)
        self.metrics.took("resume", time.monotonic() - began)

    async def set_network(self, sandbox: str, network: Network) -> Box:
        """Replace its rules in one step; flows that are not allowed any more are cut."""
        box = self.find(sandbox)
        self.gate.check(network)
        async with box.lock:
            if box.row.state not in (State.RUNNING, State.PAUSED):
                raise WrongState(f"sandbox {box.row.id} is {box.row.state}")
            assert box.row.record is not None
            before = box.row.spec.network
            spec = box.row.spec.model_copy(update={"network": network})
            await self._journal.write(
                j.update(box.row.id, spec=spec), self.events.change(box, "network", {})
            )
            box.row.spec = spec
            if before.allow or before.internet:
                await self.gate.update(box.row.id, network)
            else:
                await self._attach_network(box)
        return box

    async def _attach_network(self, box: Box) -> None:
        """A sandbox without rules has a loopback device, and needs no gate."""
        row, network = box.row, box.row.spec.network
        if network.allow or network.internet:
            assert row.record is not None
            place = await self.call(self._backend(box).place, row.id, row.record, None)
            await self.gate.attach(row.id, place.pid, place.started, network)

    async def set_lifetime(self, sandbox: str, lifetime: Lifetime) -> Box:
        box = self.find(sandbox)
        async with box.lock:
            _check_lifetime(lifetime)
            if box.row.state.ended:
                raise WrongState(f"sandbox {box.row.id} has ended")
            spec = box.row.spec.model_copy(update={"lifetime": lifetime})
            await self._journal.write(j.update(box.row.id, spec=spec))
            box.row.spec = spec
            box.warned = False
            box.activity()
        return box

    async def stop(
        self, sandbox: str, *, cause: str = "asked", message: str = "", if_idle: bool = False
    ) -> Box:
        """End it, whatever it does. Its record stays for `why`. Nothing happens if it ended, or
        with `if_idle` if it is in use."""
        box = self.find(sandbox)
        async with box.lock:
            if not (box.row.state.ended or (if_idle and box.busy)):
                await self._end(box, Why(cause=cause, message=message), State.STOPPED)
        return box

    async def remove(self, sandbox: str) -> None:
        """End it and forget it with all that is kept of it."""
        box = await self.stop(sandbox)
        async with box.lock:
            if self._boxes.get(box.row.id) is box:
                await self.execs.delete(box)
                await self._journal.write(j.remove(box.row.id), j.remove_events(box.row.id))
                del self._boxes[box.row.id]
                if box.row.spec.key:
                    self._keys.pop(box.row.spec.key, None)

    async def _end(self, box: Box, why: Why, state: State) -> None:
        """The one way to the end, with the lock held: also of what failed and of leftovers."""
        row = box.row
        if row.state != State.STOPPING:
            await self._change(box, State.STOPPING, "stopping", why=why, data={"cause": why.cause})
        self._unwatch(box)
        await self.execs.forget(box)
        await self.gate.detach(row.id)
        await self._destroy(self._backend(box), row.id, row.record)
        self.admission.release(row.id)
        row.record = None
        row.ended_at = time.time()
        await self._change(
            box,
            state,
            str(state),
            why=why,
            record=None,
            ended_at=row.ended_at,
            data=why.model_dump(mode="json"),
        )
        self.metrics.ended(row.spec.backend, why.cause)

    async def _destroy(self, backend: Backend, sandbox: str, record: Record | None) -> None:
        """What cannot be removed now is logged and removed by the next start."""
        try:
            await self.call(backend.destroy, sandbox, record)
        except (DsecfsError, OSError) as e:
            log.warning("sandbox %s is not removed: %s", sandbox, e)
            self.metrics.leftover()

    async def stats(self, sandbox: str) -> Stats:
        box = self.find(sandbox)
        if box.row.record is None:
            raise WrongState(f"sandbox {box.row.id} is {box.row.state}: it uses nothing")
        found = await self.call(self._backend(box).stats, box.row.id, box.row.record)
        return found.model_copy(
            update={
                "execs": self.execs.running(box),
                "network_denied": self.gate.denied(box.row.id),
            }
        )

    # -- the end of it by itself -------------------------------------------------------

    async def _watch(self, box: Box) -> None:
        assert box.row.record is not None
        fd = await self.call(self._backend(box).watch, box.row.id, box.row.record)
        box.watch = fd
        asyncio.get_running_loop().add_reader(fd, self._gone, box)

    def _unwatch(self, box: Box) -> None:
        if box.watch is not None:
            asyncio.get_running_loop().remove_reader(box.watch)
            os.close(box.watch)
            box.watch = None

    def _gone(self, box: Box) -> None:
        self._unwatch(box)

        async def end() -> None:
            async with box.lock:
                if box.row.state.ended:
                    return
                oom = await self.execs.limit_hit(box)
                why = (
                    Why(cause="oom", message="it used up its memory", fault=Fault.AGENT)
                    if oom == "memory"
                    else Why(cause="exited", message="its first process ended", fault=Fault.AGENT)
                )
                await self._end(box, why, State.FAILED)

        self.spawn(end, f"end of sandbox {box.row.id}")

    # -- helpers -----------------------------------------------------------------------

    def _backend(self, box: Box) -> Backend:
        return self.backends[box.row.spec.backend]

    def backend_of(self, box: Box) -> Backend:
        return self._backend(box)

    def _running(self, box: Box, what: str) -> Record:
        if box.row.state != State.RUNNING or box.row.record is None:
            raise WrongState(
                f"{what} sandbox {box.row.id}: it is {box.row.state}", hint="it must be running"
            )
        return box.row.record

    def _remember_key(self, key: str, box: Box) -> None:
        made: asyncio.Future[Box] = asyncio.get_running_loop().create_future()
        made.set_result(box)
        self._keys[key] = made

    async def _change(
        self,
        box: Box,
        state: State,
        event: str | None,
        *,
        data: dict[str, object] | None = None,
        **values: object,
    ) -> None:
        """Journal a new state, then have it."""
        changes = [j.update(box.row.id, state=state, **values)]
        if event:
            changes.append(self.events.change(box, event, data or {}))
        await self._journal.write(*changes)
        box.row.state = state
        if isinstance(why := values.get("why"), Why):
            box.row.why = why
        self.events.wake()

    async def cordon(self, why: str) -> None:
        """Take no new sandboxes, restarts of the edge included; "" takes them again."""
        await self._journal.write(j.set_meta("cordoned", why))
        self.admission.cordoned = why

    def denied(self, box: Box) -> int:
        """Connections of the sandbox that were denied so far."""
        return self.gate.denied(box.row.id)

    async def note(self, box: Box, kind: str, data: dict[str, object] | None = None) -> None:
        await self._journal.write(self.events.change(box, kind, data or {}))
        self.events.wake()


def _check_lifetime(lifetime: Lifetime) -> None:
    """Unsupported for what this node does not do: nobody shall rely on it."""
    if lifetime.archive_after_s is not None or lifetime.keep_on_failure:
        raise Unsupported(
            "lifetime: this node neither archives sandboxes nor keeps those that failed",
            hint="leave archive_after_s and keep_on_failure out",
        )
