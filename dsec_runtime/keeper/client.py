"""The edge's side of the keeper (asyncio).

What must hold: when the connection breaks, because a worker was killed, it is made anew and
everything that can be asked twice is; a wait ends with what is known, however often that happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from dsec_runtime.edge.backend import HostCommand
from dsec_runtime.errors import KeeperError
from dsec_runtime.keeper.log import STREAMS, Ended, read_at, read_ended
from dsec_runtime.keeper.protocol import HEADER, pack, parse, sizes
from dsec_runtime.keeper.start import ensure_keeper
from dsecfs.nodedirs import NodeDirs

log = logging.getLogger(__name__)

__all__ = ["Ended", "Frame", "Keeper", "Start"]

ANSWER_S = 30.0
"""Longest wait for an answer, but for those that come when something ends."""
_PIECE = 256 << 10


class Frame(NamedTuple):
    """A piece of output."""

    stream: int
    start: int
    """Offset of its first byte in the stream."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Start:
    """What to start."""

    id: str
    sandbox: str
    command: HostCommand
    place: Path
    stdin: str = "null"
    """null or pipe"""
    tty: tuple[int, int] | None = None
    """Rows, columns."""
    timeout_s: float | None = None
    grace_s: float = 5.0
    state: Path | None = None
    """File that the command gets as descriptor 3; what it writes to descriptor 4 is kept
    (log.read_state)."""

    def message(self) -> dict[str, Any]:
        command = self.command
        return {
            "id": self.id,
            "sandbox": self.sandbox,
            "argv": list(command.argv),
            "cgroup": command.cgroup,
            "counters": {n: [str(path), key] for n, (path, key) in command.counters.items()},
            "place": str(self.place.absolute()),
            "scratch": None if command.scratch is None else str(command.scratch.absolute()),
            "stdin": self.stdin,
            "tty": None if self.tty is None else list(self.tty),
            "timeout_s": self.timeout_s,
            "grace_s": self.grace_s,
            "state": None if self.state is None else str(self.state.absolute()),
        }


@dataclass(slots=True)
class _Asked:
    message: bytes
    again: bool
    answer: asyncio.Future[dict[str, Any]]


class _Reader:
    """Somebody who reads the output of a command."""

    def __init__(self, at: list[int]) -> None:
        self.at = at
        self.more = asyncio.Event()
        self.dropped = False


class Keeper:
    """A connection to the node's keeper. Use it in `async with`."""

    def __init__(self, dirs: NodeDirs) -> None:
        self._dirs = dirs
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._readers: defaultdict[str, list[_Reader]] = defaultdict(list)
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        connected = asyncio.Event()
        self._task = asyncio.create_task(self._run(connected), name="keeper")
        waiting = asyncio.create_task(connected.wait())
        await asyncio.wait([self._task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            await self._task
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    # -- the connection ----------------------------------------------------------------

    async def _run(self, connected: asyncio.Event) -> None:
        try:
            while True:
                reader, self._writer = await self._connect()
                for asked in list(self._asked.values()):
                    self._writer.write(asked.message)
                for id in self._readers:
                    self._tell_at(id, "follow")
                connected.set()
                try:
                    while True:
                        self._take(*await _read(reader))
                except (OSError, asyncio.IncompleteReadError) as e:
                    log.info("keeper: connection lost: %s", e)
                self._lost()
        finally:
            self._lost(all=True)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        failures = 0
        while True:
            try:
                return await asyncio.open_unix_connection(str(self._dirs.keeper))
            except OSError:
                failures += 1
                if failures > 5:
                    await asyncio.to_thread(ensure_keeper, self._dirs)
                await asyncio.sleep(0.02 * failures)

    def _lost(self, *, all: bool = False) -> None:
        """What cannot be asked again fails."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for number, asked in list(self._asked.items()):
            if all or not asked.again:
                del self._asked[number]
                if not asked.answer.done():
                    asked.answer.set_exception(
                        KeeperError("keeper: the connection broke", hint="try it again")
                    )

    def _take(self, value: dict[str, Any], data: bytes) -> None:
        number = value.pop("n", None)
        if number is not None:
            asked = self._asked.pop(number, None)
            if asked is not None and not asked.answer.done():
                asked.answer.set_result(value)
            return
        for word in ("grown", "ended", "dropped"):
            if word in value:
                for reader in self._readers.get(value[word], ()):
                    reader.dropped |= word == "dropped"
                    reader.more.set()

    async def _ask(
        self, op: str, data: bytes = b"", *, again: bool = True, limit_s: float | None = ANSWER_S,
        **more: Any,
    ) -> dict[str, Any]:
        number = next(self._numbers)
        message = pack({"n": number, "op": op, **more}, data)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self._writer is None and not again:
            raise KeeperError("keeper: the connection broke", hint="try it again")
        self._asked[number] = _Asked(message, again, answer)
        try:
            if self._writer is not None:
                self._writer.write(message)
            value = await asyncio.wait_for(answer, limit_s)
        except TimeoutError:
            raise KeeperError(f"keeper: no answer to {op} in {limit_s:g} s") from None
        finally:
            self._asked.pop(number, None)
        if "error" in value:
            raise KeeperError(f"keeper: {op}: {value['error']}")
        return value

    # -- commands ----------------------------------------------------------------------

    async def start(self, start: Start) -> None:
        """Start it, once, however often it is asked. KeeperError."""
        await self._ask("start", **start.message())

    async def wait(self, id: str, place: Path) -> Ended:
        """Until it has ended. `lost` if nobody knows how."""
        while True:
            ended = await asyncio.to_thread(read_ended, place)
            if ended is not None:
                return ended
            answer = await self._ask("wait", limit_s=None, id=id, place=str(place))
            if not answer["known"]:
                return await asyncio.to_thread(read_ended, place) or Ended.unknown()

    async def write(self, id: str, data: bytes) -> None:
        """Send to its standard input; waits while it does not read. KeeperError if that is
        closed, or if it is not known whether it arrived."""
        for at in range(0, len(data), _PIECE):
            piece = data[at : at + _PIECE]
            await self._ask("stdin", piece, again=False, limit_s=None, id=id)

    async def close_stdin(self, id: str) -> None:
        await self._ask("close_stdin", id=id)

    async def signal(self, id: str, number: int) -> None:
        await self._ask("signal", id=id, signal=number)

    async def resize(self, id: str, rows: int, columns: int) -> None:
        await self._ask("resize", id=id, rows=rows, columns=columns)

    async def hold(self, sandbox: str) -> None:
        await self._ask("hold", sandbox=sandbox)

    async def release(self, sandbox: str) -> None:
        await self._ask("release", sandbox=sandbox)

    async def note(self, sandbox: str, text: str) -> None:
        await self._ask("note", f"{text}\n".encode(errors="replace"), again=False, sandbox=sandbox)

    async def forget(self, sandbox: str) -> None:
        """Kill all commands of a sandbox."""
        await self._ask("forget", sandbox=sandbox)

    # -- output ------------------------------------------------------------------------

    async def follow(self, id: str, place: Path, at: tuple[int, int]) -> AsyncIterator[Frame]:
        """Output from `at` (of each stream) on, live, up to its end. KeeperError if the reader
        was dropped because it did not read."""
        reader = _Reader(list(at))
        self._readers[id].append(reader)
        try:
            known = (await self._ask("follow", id=id, at=self._least(id)))["known"]
            while True:
                reader.more.clear()
                ended = await asyncio.to_thread(read_ended, place)
                progress = False
                for stream in STREAMS:
                    start, data = await asyncio.to_thread(
                        read_at, place, stream, reader.at[stream - 1], _PIECE
                    )
                    if data:
                        progress = True
                        yield Frame(stream, start, data)
                        reader.at[stream - 1] = start + len(data)
                if progress:
                    self._tell_at(id, "at")
                elif ended is not None or not known:
                    return
                elif reader.dropped:
                    raise KeeperError(f"output of command {id}: not read in time")
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.more.wait(), ANSWER_S)
        finally:
            self._readers[id].remove(reader)
            if self._readers[id]:
                self._tell_at(id, "at")
            else:
                del self._readers[id]
                self._send("unfollow", id=id)

    def _least(self, id: str) -> list[int]:
        """How far the slowest reader of a command is."""
        return [min(reader.at[i] for reader in self._readers[id]) for i in range(len(STREAMS))]

    def _tell_at(self, id: str, op: str) -> None:
        self._send(op, id=id, at=self._least(id))

    def _send(self, op: str, **more: Any) -> None:
        if self._writer is not None:
            self._writer.write(pack({"op": op, **more}))


async def _read(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    text, data = sizes(await reader.readexactly(HEADER.size))
    body = await reader.readexactly(text + data)
    return parse(body[:text]), body[text:]
