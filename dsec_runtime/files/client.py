"""`Files`: what the edge does with files in sandboxes (asyncio).

A `Place` says in which sandbox and as whom. Paths are texts in which bytes that are no UTF-8 are
lone surrogates (`os.fsdecode`); a relative one starts at the place's cwd. Errors: NoSuchFile,
FileExists, FileDenied, NoSpace, FileProblem, BadInput, UnsafeArchive for what is asked;
SandboxLost; Busy; DeadlineExceeded; FilesError when the helper was killed.

What must hold: a wait ends; what a child says is checked; whoever stops waiting ends the operation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from dsec_runtime.edge.backend import Place
from dsec_runtime.errors import FilesError
from dsec_runtime.files import answers, wire
from dsec_runtime.files.channel import ANSWER_S, Channel, Job, check_path
from dsec_runtime.files.model import (
    Change,
    Entry,
    Listing,
    Made,
    Moved,
    Removed,
    Unpacked,
    Written,
)
from dsecfs.errors import BadInput, DeadlineExceeded
from dsecfs.nodedirs import NodeDirs

SHORT_S = 30.0
"""For stat, mkdir, and everything up to the first byte."""
LONG_S = 600.0
"""For listing, moving and removing trees, and for the end of an upload (its fsync)."""
CLIENT_S = 300.0
"""Longest wait for the next bytes of an upload."""
MAX_LIST = 50_000
MAX_DEPTH = 64
MAX_WATCH_S = 86400.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A file that is being read."""

    entry: Entry
    start: int
    length: int | None
    """None: it is not known before its end (/proc)."""
    parts: AsyncIterator[bytes]
    """Exactly `length` bytes, or an error."""


class Files:
    """Use it in `async with`; the helper starts with it."""

    def __init__(self, dirs: NodeDirs) -> None:
        self._channel = Channel(dirs)

    async def __aenter__(self) -> Self:
        await self._channel.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._channel.close()

    @property
    def pid(self) -> int | None:
        """Process id of the helper."""
        return self._channel.pid

    # -- short ones --------------------------------------------------------------------

    async def stat(self, place: Place, path: str, *, follow: bool = True) -> Entry:
        """With `follow` of what a symlink leads to."""
        request = {"op": "stat", "path": path, "follow": follow}
        async with self._job(place, request) as job:
            return answers.entry_of(await job.json(wire.RESULT, SHORT_S))

    async def list(self, place: Place, path: str, *, depth: int = 1, limit: int = 1000) -> Listing:
        """What is in a directory, and in those below it down to `depth` levels."""
        if not 1 <= depth <= MAX_DEPTH or not 1 <= limit <= MAX_LIST:
            raise BadInput(f"list: depth is 1 to {MAX_DEPTH}, limit 1 to {MAX_LIST}")
        request = {"op": "list", "path": path, "depth": depth, "limit": limit}
        entries: list[Entry] = []
        async with self._job(place, request) as job, _within(job, LONG_S):
            while True:
                kind, data = await job.receive()
                value = job.parse(data)
                if kind == wire.RESULT:
                    truncated = answers.flag_of(value, "truncated")
                    return Listing(entries=entries, truncated=truncated)
                entries += map(answers.entry_of, answers.list_of(value, "entries"))
                if len(entries) > limit:
                    raise job.broken("more entries than asked for")

    async def mkdir(
        self, place: Place, path: str, *, mode: int = 0o755, parents: bool = False
    ) -> Made:
        """With `parents` also what is missing above it, and no error if it is there."""
        request = {"op": "mkdir", "path": path, "mode": _mode(mode), "parents": parents}
        async with self._job(place, request) as job:
            value = await job.json(wire.RESULT, SHORT_S)
            made = answers.flag_of(value, "made")
            return Made(entry=answers.entry_of(value.get("entry")), made=made)

    async def move(self, place: Place, source: str, target: str, *, replace: bool = True) -> Moved:
        """Rename; `target` is the whole new path. Copies where the kernel cannot rename."""
        _check(target, "target")
        request = {
            "op": "move",
            "path": source,
            "source": source,
            "target": target,
            "replace": replace,
        }
        async with self._job(place, request) as job:
            value = await job.json(wire.RESULT, LONG_S)
            return Moved(entry=answers.entry_of(value.get("entry")))

    async def remove(self, place: Place, path: str, *, recursive: bool = False) -> Removed:
        request = {"op": "remove", "path": path, "recursive": recursive}
        async with self._job(place, request) as job:
            value = await job.json(wire.RESULT, LONG_S)
            return Removed(removed=answers.number_of(value, "removed"))

    # -- streams -----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def read(
        self, place: Place, path: str, *, first: int | None = None, last: int | None = None
    ) -> AsyncIterator[Reading]:
        """A regular file, or of it the bytes `first` to `last` (inclusive), from `first` on, or,
        without `first`, the last `last` ones. BadRange."""
        request = {"op": "read", "path": path, "first": first, "last": last}
        async with self._job(place, request) as job:
            value = await job.json(wire.PART, SHORT_S)
            length = None
            if value.get("length") is not None:
                length = answers.number_of(value, "length")
            yield Reading(
                answers.entry_of(value.get("entry")),
                answers.number_of(value, "start"),
                length,
                _data(job, length),
            )

    async def write(
        self,
        place: Place,
        path: str,
        chunks: AsyncIterator[bytes],
        *,
        mode: int | None = None,
        make_parents: bool = False,
        sync: bool = False,
    ) -> Written:
        """Replace or make a file, atomically: `chunks` to their end, or nothing. Owner and mode of
        what is replaced are kept unless `mode` is given; a new file is 644. With `sync` it is on
        the disk when this returns."""
        request = {
            "op": "write",
            "path": path,
            "mode": None if mode is None else _mode(mode),
            "make_parents": make_parents,
            "sync": sync,
        }
        async with self._job(place, request) as job:
            value = await _upload(job, chunks)
            replaced = answers.flag_of(value, "replaced")
            return Written(entry=answers.entry_of(value.get("entry")), replaced=replaced)

    @contextlib.asynccontextmanager
    async def pack(self, place: Place, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """A tree, or one file, as tar. An archive that ends without an error is whole."""
        async with self._job(place, {"op": "pack", "path": path}) as job:
            await job.json(wire.PART, SHORT_S)
            yield _data(job, None)

    async def unpack(
        self, place: Place, path: str, chunks: AsyncIterator[bytes], *, make_parents: bool = False
    ) -> Unpacked:
        """A tar into a directory. What was made before an error stays."""
        request = {"op": "unpack", "path": path, "make_parents": make_parents}
        async with self._job(place, request) as job:
            value = await _upload(job, chunks)
            return Unpacked(
                entries=answers.number_of(value, "entries"),
                bytes=answers.number_of(value, "bytes"),
            )

    @contextlib.asynccontextmanager
    async def watch(
        self, place: Place, path: str, *, recursive: bool = False, timeout_s: float = MAX_WATCH_S
    ) -> AsyncIterator[AsyncIterator[Change]]:
        """What happens to a file or a directory, from when the block is entered, for `timeout_s`
        seconds or until it is gone."""
        request = {"op": "watch", "path": path, "recursive": recursive}
        async with self._job(place, request, watch=True) as job:
            await job.json(wire.PART, SHORT_S)
            yield _changes(job, timeout_s)

    @contextlib.asynccontextmanager
    async def _job(
        self, place: Place, request: dict[str, Any], *, watch: bool = False
    ) -> AsyncIterator[Job]:
        path = request["path"]
        _check(path, "path")
        doing = f"{request['op']} {path[:200]!a}"
        async with self._channel.job(place, doing, request, watch=watch) as job:
            try:
                yield job
            except wire.WireError as e:
                raise job.broken(str(e)) from None


def _check(path: str, what: str) -> None:
    if wrong := check_path(path, what):
        raise BadInput(wrong)


def _mode(mode: int) -> int:
    if not 0 <= mode <= 0o7777:
        raise BadInput(f"mode {mode:o}", hint="octal, 0 to 7777")
    return mode


@contextlib.asynccontextmanager
async def _within(job: Job, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{job.doing}: not done in {seconds:g} s") from None


async def _data(job: Job, length: int | None) -> AsyncIterator[bytes]:
    """DATA up to the RESULT; exactly `length` bytes."""
    count = 0
    while True:
        kind, data = await job.receive()
        if kind == wire.RESULT:
            if length is not None and count != length:
                raise job.broken(f"{count} bytes, {length} announced")
            return
        count += len(data)
        if kind != wire.DATA or (length is not None and count > length):
            raise job.broken("more than announced")
        yield data


async def _changes(job: Job, seconds: float) -> AsyncIterator[Change]:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while True:
        try:
            kind, data = await job.receive(max(0.0, until - loop.time()))
        except DeadlineExceeded:
            return
        if kind == wire.RESULT:
            yield Change(type="gone", path="", path_base64=None, directory=False)
            return
        for value in answers.list_of(job.parse(data), "events"):
            yield answers.change_of(value)


async def _upload(job: Job, chunks: AsyncIterator[bytes]) -> dict[str, Any]:
    """Send `chunks` and return the RESULT. A child that gives up early is heard at once."""

    async def send() -> None:
        while True:
            try:
                async with asyncio.timeout(CLIENT_S):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{job.doing}: the upload stopped for {CLIENT_S:g} s"
                ) from None
            if chunk is None:
                break
            for at in range(0, len(chunk), wire.MAX_DATA):
                await job.send(wire.DATA, chunk[at : at + wire.MAX_DATA])
        await job.send(wire.END, b"")

    sending = asyncio.ensure_future(send())
    answer = asyncio.ensure_future(job.json(wire.RESULT, None))
    try:
        await asyncio.wait({sending, answer}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done() and not answer.done():
            error = sending.exception()
            if error is not None and not isinstance(error, OSError):
                raise error
            # A broken socket: the child has said why, or it was killed.
            limit = LONG_S if error is None else ANSWER_S
            await asyncio.wait({answer}, timeout=limit)
            if not answer.done():
                raise DeadlineExceeded(f"{job.doing}: no answer in {limit:g} s")
        value = await answer
        if not sending.done():
            raise FilesError(f"{job.doing}: the files helper answered before the upload's end")
        return value
    finally:
        for task in (sending, answer):
            task.cancel()
        await asyncio.gather(sending, answer, return_exceptions=True)
