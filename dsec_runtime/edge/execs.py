"""Commands in sandboxes: from a specification to a result, on top of the keeper.

    data/sandboxes/<id>/execs/<exec>/spec.json   what was asked for, written before the start
    …/meta.json, exit.json, the log              the keeper's

What must hold: a command that was acknowledged is never run twice, nor forgotten: a new edge
finds it by its directory; a result says what is known and no more: without an exit code from the
keeper the outcome is `lost`, a fault of the platform.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from dsec_runtime import cgroups
from dsec_runtime.edge.backend import Backend, Command, HostCommand, Record
from dsec_runtime.edge.box import Box
from dsec_runtime.edge.model import (
    RESULT_EDGE,
    Exec,
    ExecResult,
    ExecSpec,
    Fault,
    Outcome,
    Output,
    State,
)
from dsec_runtime.errors import NoSuchSandbox, SandboxError, WrongState
from dsec_runtime.keeper.client import Ended, Frame, Keeper, Start
from dsec_runtime.keeper.log import STREAMS, Kept, end_of, read_at, read_ended, read_kept
from dsecfs.errors import BadInput, DeadlineExceeded, Unsupported
from dsecfs.nodedirs import NodeDirs

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

SPEC = "spec.json"
MAX_EXECS = 1000
"""Finished commands of a sandbox whose output is kept; older ones are forgotten."""
MAX_RUNNING = 512
"""Commands of one sandbox at a time."""
_SHELL = ("/bin/sh", "-c")
_PIECE = 1 << 18
_DISK_LEFT = 1 << 20
"""With fewer bytes left, a command that failed probably failed of that."""


@dataclass(slots=True)
class Running:
    """A command the edge knows."""

    id: str
    spec: ExecSpec
    started_at: float
    denied_before: int = 0
    ended_at: float | None = None
    result: ExecResult | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Host(Protocol):
    """What commands need of the edge."""

    dirs: NodeDirs

    def backend_of(self, box: Box) -> Backend: ...

    async def call(self, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T: ...

    def spawn(self, work: Callable[[], Awaitable[None]], name: str) -> None: ...

    def denied(self, box: Box) -> int:
        """Connections of the sandbox that were denied so far."""
        ...


def exec_id(sandbox: str, key: str | None) -> str:
    """A name for a command; always the same for the same key."""
    seed = os.urandom(16) if key is None else f"{sandbox}\0{key}".encode()
    return base64.b32encode(hashlib.sha256(seed).digest()[:10]).decode().lower()


class Execs:
    """The commands of all sandboxes of the node."""

    def __init__(self, dirs: NodeDirs, keeper: Keeper) -> None:
        self._dirs = dirs
        self._keeper = keeper
        self._known: dict[str, dict[str, Running]] = {}
        self.host: Host

    # -- starting ----------------------------------------------------------------------

    async def start(self, box: Box, spec: ExecSpec) -> Running:
        """Start a command; the caller holds the sandbox with `Edge.using`.

        BadInput, ProgramNotFound, NotExecutable, NoSuchUser for what cannot be run.
        """
        known = self._known.setdefault(box.row.id, {})
        id = exec_id(box.row.id, spec.key)
        if id in known:
            if known[id].spec != spec:
                raise BadInput(
                    f"key {(spec.key or '')[:60]!r} was used for another command",
                    hint="use a new key for a new command",
                )
            return known[id]
        if len(box.running) >= MAX_RUNNING:
            raise WrongState(f"{len(box.running)} commands run in the sandbox", hint="end some")
        check(spec)
        run = Running(id, spec, time.time(), self.host.denied(box))
        known[id] = run
        box.running.add(id)
        try:
            await self._begin(box, run)
        except BaseException:
            del known[id]
            box.running.discard(id)
            await self.host.call(shutil.rmtree, self._dirs.exec(box.row.id, id), True)
            raise
        self.host.spawn(functools.partial(self._finish, box, run), f"command {id}")
        return run

    async def _begin(self, box: Box, run: Running) -> None:
        row, spec = box.row, run.spec
        assert row.record is not None
        backend = self.host.backend_of(box)
        words = (*self._shell(box), spec.command) if isinstance(spec.command, str) else spec.command
        command = Command(
            args=words,
            variables=spec.variables,
            cwd=spec.cwd,
            user=spec.user,
            tty=spec.tty,
            rows=spec.rows,
            columns=spec.columns,
        )
        place = self._dirs.exec(row.id, run.id)
        host_command = await self.host.call(
            self._prepare, backend, row.id, row.record, command, place, run
        )
        start = Start(
            id=run.id,
            sandbox=row.id,
            command=host_command,
            place=place,
            stdin="pipe" if spec.stdin or spec.input is not None else "null",
            tty=(spec.rows, spec.columns) if spec.tty else None,
            timeout_s=spec.timeout_s,
            grace_s=spec.grace_s,
        )
        await self._keeper.start(start)
        if spec.input is not None:
            await self._keeper.write(run.id, spec.input.encode(errors="surrogateescape"))
            await self._keeper.close_stdin(run.id)

    @staticmethod
    def _prepare(
        backend: Backend, sandbox: str, record: Record, command: Command, place: Path, run: Running
    ) -> HostCommand:
        """Blocking: what runs, and the note that it will."""
        found = backend.command(sandbox, record, command)
        place.mkdir(mode=0o700, parents=True)
        note = {
            "started_at": run.started_at,
            "spec": run.spec.model_dump(mode="json"),
            "cgroup": found.cgroup,
        }
        (place / SPEC).write_text(json.dumps(note))
        return found

    def _shell(self, box: Box) -> tuple[str, ...]:
        found = box.prepared.process.shell if box.prepared else ()
        return found or _SHELL

    async def run(self, box: Box, spec: ExecSpec) -> ExecResult:
        """Start a command and wait for its end."""
        run = await self.start(box, spec)
        await run.done.wait()
        return await self.result(box, run.id)

    async def first(self, box: Box) -> None:
        """The image's own command if it was asked for, and `ready_cmd` until it succeeds.

        SandboxError when it does not within `ready_timeout_s`.
        """
        spec = box.row.spec
        if spec.entrypoint and box.prepared is not None:
            process = box.prepared.process
            words = (*process.entrypoint, *process.cmd)
            if not words:
                raise BadInput(
                    f"environment {spec.environment}: it has no entrypoint or command",
                    hint="leave entrypoint out, and start what you need",
                )
            await self.start(box, ExecSpec(command=words, label="entrypoint", key="entrypoint"))
        if spec.ready_cmd is None:
            return
        deadline = time.monotonic() + spec.ready_timeout_s
        pause, said = 0.05, ""
        while (left := deadline - time.monotonic()) > 0:
            result = await self.run(
                box, ExecSpec(command=spec.ready_cmd, label="ready", timeout_s=left, grace_s=0)
            )
            if result.code == 0:
                return
            said = (result.stderr.text or result.stdout.text)[-400:].strip()
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, 1.0)
        raise SandboxError(
            f"sandbox {box.row.id}: not ready within {spec.ready_timeout_s:g} s: "
            f"{said or 'silent'}",
            hint="ready_cmd must exit with 0; a longer ready_timeout_s gives it more time",
        )

    async def _finish(self, box: Box, run: Running) -> None:
        """Wait for the end, whoever asks for it."""
        try:
            place = self._dirs.exec(box.row.id, run.id)
            ended = await self._keeper.wait(run.id, place)
            if ended.lost:
                await self.host.call(_kill_rest, place)
            run.result = await self.host.call(self._conclude, box, run, ended)
        finally:
            run.ended_at = time.time()
            box.running.discard(run.id)
            box.activity()
            run.done.set()
        await self._retire(box)

    async def _retire(self, box: Box) -> None:
        """Forget the oldest finished commands beyond MAX_EXECS."""
        known = self._known.get(box.row.id, {})
        old = [run for run in known.values() if run.ended_at is not None]
        for run in old[: max(0, len(old) - MAX_EXECS)]:
            del known[run.id]
            await self.host.call(shutil.rmtree, self._dirs.exec(box.row.id, run.id), True)

    # -- asking ------------------------------------------------------------------------

    def get(self, box: Box, id: str) -> Running:
        """NoSuchSandbox when the sandbox has no such command."""
        run = self._known.get(box.row.id, {}).get(id)
        if run is None:
            raise NoSuchSandbox(
                f"sandbox {box.row.id}: no command {id[:40]!r}",
                hint=f"the last {MAX_EXECS} finished ones are kept",
            )
        return run

    def all(self, box: Box) -> list[Running]:
        return list(self._known.get(box.row.id, {}).values())

    def show(self, box: Box, run: Running) -> Exec:
        return Exec(
            id=run.id,
            sandbox=box.row.id,
            command=run.spec.command,
            session=run.spec.session,
            label=run.spec.label,
            tty=run.spec.tty,
            started_at=run.started_at,
            ended_at=run.ended_at,
            running=run.ended_at is None,
        )

    async def result(self, box: Box, id: str, wait_s: float | None = None) -> ExecResult:
        """Its result, waiting for its end. DeadlineExceeded if it runs on after `wait_s`."""
        run = self.get(box, id)
        if not run.done.is_set():
            try:
                await asyncio.wait_for(run.done.wait(), wait_s)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"command {id}: still runs after {wait_s:g} s", hint="ask again"
                ) from None
        if run.result is None:
            ended = read_ended(self._dirs.exec(box.row.id, id)) or Ended.unknown()
            run.result = await self.host.call(self._conclude, box, run, ended)
        return run.result

    def _conclude(self, box: Box, run: Running, ended: Ended) -> ExecResult:
        """Blocking: what is known about the end of a command."""
        place = self._dirs.exec(box.row.id, run.id)
        stdout, stderr, truncated = _outputs(place)
        denied = self.host.denied(box) - run.denied_before
        outcome, fault, limit, message = judge(ended, denied, self._disk_full(box, ended))
        if ended.error:
            # The program never ran: it was there when it was asked for, and then was not, say.
            outcome, fault, limit = Outcome.LOST, Fault.PLATFORM, ""
            message = f"the container runtime: {ended.error}"
        known = fault != Fault.PLATFORM
        return ExecResult(
            id=run.id,
            sandbox=box.row.id,
            outcome=outcome,
            fault=fault,
            code=ended.code if known else None,
            signal=ended.signal if known else None,
            stdout=stdout,
            stderr=stderr,
            truncated=truncated,
            duration_s=ended.duration_s,
            limit=limit,
            message=message,
        )

    def _disk_full(self, box: Box, ended: Ended) -> bool:
        record = box.row.record
        if ended.code in (0, None) or record is None or box.row.state != State.RUNNING:
            return False
        with contextlib.suppress(SandboxError):
            stats = self.host.backend_of(box).stats(box.row.id, record)
            left = stats.disk_limit_bytes - stats.disk_bytes
            return left <= min(_DISK_LEFT, stats.disk_limit_bytes // 10)
        return False

    # -- output, input -----------------------------------------------------------------

    def follow(
        self, box: Box, id: str, at: tuple[int, int] = (0, 0)
    ) -> AsyncIterator[Frame]:
        """Output from these offsets (standard output, error) on, live until the command has
        ended. A reader that makes progress loses nothing; one that does not is dropped."""
        self.get(box, id)
        return self._keeper.follow(id, self._dirs.exec(box.row.id, id), at)

    def kept(
        self, box: Box, id: str, at: tuple[int, int] = (0, 0)
    ) -> AsyncIterator[Frame]:
        """Output from these offsets on that is there now, standard output first."""
        self.get(box, id)
        return self._kept(self._dirs.exec(box.row.id, id), at)

    async def _kept(self, place: Path, at: tuple[int, int]) -> AsyncIterator[Frame]:
        for stream, offset in zip(STREAMS, at, strict=True):
            end = await self.host.call(end_of, place, stream)
            while offset < end:
                most = min(_PIECE, end - offset)
                offset, data = await self.host.call(read_at, place, stream, offset, most)
                if not data:
                    break
                yield Frame(stream, offset, data)
                offset += len(data)

    async def write(self, box: Box, id: str, data: bytes) -> None:
        self._alive(box, id)
        await self._keeper.write(id, data)

    async def close_stdin(self, box: Box, id: str) -> None:
        self._alive(box, id)
        await self._keeper.close_stdin(id)

    async def signal(self, box: Box, id: str, number: int) -> None:
        """SIGKILL ends the whole process tree; others go to the command."""
        if self.get(box, id).ended_at is not None:
            return
        await self._keeper.signal(id, number)

    async def resize(self, box: Box, id: str, rows: int, columns: int) -> None:
        self._alive(box, id)
        await self._keeper.resize(id, rows, columns)

    def _alive(self, box: Box, id: str) -> Running:
        run = self.get(box, id)
        if run.ended_at is not None:
            raise WrongState(f"command {id} has ended")
        return run

    # -- with the sandbox --------------------------------------------------------------

    def running(self, box: Box) -> int:
        return len(box.running)

    async def note(self, sandbox: str, text: str) -> None:
        """A line on the standard error of what runs in the sandbox."""
        await self._keeper.note(sandbox, text)

    async def hold(self, box: Box) -> None:
        """The sandbox is being paused: time stands still for its commands."""
        await self._keeper.hold(box.row.id)

    async def release(self, box: Box) -> None:
        await self._keeper.release(box.row.id)

    async def adopt(self, box: Box) -> None:
        """Find the commands of an earlier edge again."""
        found = await self.host.call(self._load, box.row.id)
        self._known[box.row.id] = {run.id: run for run in found}
        for run in found:
            if run.ended_at is None:
                box.running.add(run.id)
                self.host.spawn(functools.partial(self._finish, box, run), f"command {run.id}")

    def _load(self, sandbox: str) -> list[Running]:
        place = self._dirs.kept(sandbox) / "execs"
        found = []
        for id in os.listdir(place) if place.is_dir() else []:
            try:
                note = json.loads((place / id / SPEC).read_text())
                run = Running(id, ExecSpec.model_validate(note["spec"]), float(note["started_at"]))
            except (OSError, ValueError, KeyError, TypeError) as e:
                log.warning("command %s of sandbox %s: not readable: %s", id, sandbox, e)
                continue
            ended = read_ended(place / id)
            if ended is not None:
                run.ended_at = ended.ended_at
                run.done.set()
            found.append(run)
        return sorted(found, key=lambda run: run.started_at)

    async def forget(self, box: Box) -> None:
        """The sandbox ends: end its commands; what they said stays until it is removed."""
        await self._keeper.forget(box.row.id)

    async def delete(self, box: Box) -> None:
        """Remove what is kept of its commands."""
        self._known.pop(box.row.id, None)
        await self.host.call(shutil.rmtree, self._dirs.kept(box.row.id), True)

    async def limit_hit(self, box: Box) -> str:
        """The limit that the last command hit, when a sandbox is suddenly gone."""
        for run in self.all(box)[-1:]:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.done.wait(), 2.0)
            if run.result is not None:
                return run.result.limit
        return ""


def check(spec: ExecSpec) -> None:
    """BadInput for what no command can be."""
    if not spec.command or (isinstance(spec.command, tuple) and not spec.command[0]):
        raise BadInput("empty command", hint="give a text for the shell, or a list of words")
    if spec.stdin and spec.input is not None:
        raise BadInput("both stdin and input", hint="input is all of it; stdin sends it later")
    if spec.session:
        raise Unsupported(
            "sessions: this node keeps no shell between commands",
            hint="set cwd and variables per command, or start a shell with tty",
        )


def judge(ended: Ended, denied: int, disk_full: bool) -> tuple[Outcome, Fault, str, str]:
    """Outcome, who is to blame, the limit that was hit, a message (design §7)."""
    if ended.timed_out:
        return Outcome.TIMEOUT, Fault.AGENT, "time", "ended at its timeout"
    if ended.lost or ended.code is None:
        return Outcome.LOST, Fault.PLATFORM, "", "its end was not seen: run it again"
    failed = ended.code != 0
    if failed and "memory" in ended.limits:
        return Outcome.OOM, Fault.AGENT, "memory", "the sandbox's memory limit ended processes"
    if failed and "pids" in ended.limits:
        return Outcome.PIDS, Fault.AGENT, "pids", "the sandbox's limit on processes was reached"
    if failed and disk_full:
        return Outcome.DISK, Fault.AGENT, "disk", "the sandbox's disk is full"
    if failed and denied > 0:
        return Outcome.DENIED, Fault.AGENT, "", f"the network policy denied {denied} connections"
    if ended.signal is not None:
        return Outcome.SIGNAL, Fault.AGENT, "", f"ended by signal {ended.signal}"
    return Outcome.EXITED, Fault.NONE, "", ""


def _kill_rest(place: Path) -> None:
    """Nobody looks after what a lost command has left."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        group = json.loads((place / SPEC).read_text())["cgroup"]
        if group:
            cgroups.kill(str(group))


def _outputs(place: Path) -> tuple[Output, Output, bool]:
    kept = read_kept(place, RESULT_EDGE)
    return _output(kept.stdout), _output(kept.stderr), kept.truncated


def _output(kept: Kept) -> Output:
    lost = kept.total - len(kept.head) - len(kept.tail)
    cut = f"\n[… {lost} bytes left out …]\n".encode() if lost > 0 else b""
    text = (kept.head + cut + kept.tail).decode(errors="replace")
    return Output(text=text, head=kept.head, tail=kept.tail, total=kept.total)
