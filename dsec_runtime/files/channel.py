"""The server's process and the operations under way (asyncio). Owns both.

What must hold: a slot is taken for every child and given back when the server says that it is gone,
not before: what a sandbox blocks for good (its own file systems can) uses up its own slots and
nobody else's. Whoever stops waiting for an operation closes it, which ends its child. A server that
dies is started again by the next operation; its children die with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from dsec_runtime.edge.backend import Place
from dsec_runtime.errors import FilesError
from dsec_runtime.files import wire
from dsec_runtime.files.answers import error_of
from dsecfs.errors import Busy, DeadlineExceeded
from dsecfs.nodedirs import NodeDirs

log = logging.getLogger(__name__)

LOG = "files.log"
PER_SANDBOX = 32
"""Operations at the same time in one sandbox; others wait their turn."""
WATCHES = 16
"""Watches at the same time in one sandbox: they last."""
IN_ALL = 256
"""Operations and watches at the same time on the node."""
TURN_S = 30.0
"""Longest wait for a slot."""
ANSWER_S = 60.0
"""Longest wait for the next sign of life from a child that is not told otherwise."""
END_S = 5.0
"""Longest wait for the server's end."""
_RESTART_S = 1.0
"""Between two starts of the server."""
_PIECE = 256 << 10


class Job:
    """One operation: the edge's end of its socket. Close it, or use `Channel.job`."""

    def __init__(self, number: int, sock: socket.socket, doing: str) -> None:
        self.number = number
        self.doing = doing
        self._sock = sock
        self._held = bytearray()
        self._loop = asyncio.get_running_loop()

    async def send(self, kind: int, data: bytes) -> None:
        """OSError when the child is gone; DeadlineExceeded."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._loop.sock_sendall(self._sock, wire.frame(kind, data))
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.doing}: nothing taken in {ANSWER_S:g} s",
                hint="a file system in the sandbox does not answer",
            ) from None

    async def receive(self, timeout_s: float | None = ANSWER_S) -> tuple[int, bytes]:
        """The next PART, DATA or RESULT. What an ERROR stands for; FilesError when the child is
        gone or says what it should not; DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                kind, data = await self._frame()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.doing}: no answer in {timeout_s:g} s",
                hint="a file system in the sandbox does not answer, or there is too much to do",
            ) from None
        except (OSError, wire.WireError) as e:
            raise FilesError(
                f"{self.doing}: the files helper ended without an answer ({e})",
                hint="something in the sandbox may have killed it; try again",
            ) from None
        if kind == wire.ERROR:
            value = self.parse(data)
            if value.get("reason") == wire.INTERNAL:
                log.error("files helper: %s: %.200a", self.doing, value.get("entry"))
            raise error_of(self.doing, value)
        if kind not in (wire.PART, wire.DATA, wire.RESULT):
            raise self.broken(f"frame of kind {kind}")
        return kind, data

    async def json(self, wanted: int, timeout_s: float | None = ANSWER_S) -> dict[str, Any]:
        """The next frame, which must be of that kind. Errors as `receive`."""
        kind, data = await self.receive(timeout_s)
        if kind != wanted:
            raise self.broken(f"frame of kind {kind}")
        return self.parse(data)

    def parse(self, data: bytes) -> dict[str, Any]:
        try:
            return wire.parse_json(data)
        except wire.WireError as e:
            raise self.broken(str(e)) from None

    def broken(self, what: str) -> FilesError:
        return FilesError(f"{self.doing}: the files helper does not speak as it should ({what})")

    async def _frame(self) -> tuple[int, bytes]:
        kind, length = wire.parse_header(await self._take(wire.HEADER.size))
        return kind, await self._take(length)

    async def _take(self, size: int) -> bytes:
        while len(self._held) < size:
            piece = await self._loop.sock_recv(self._sock, _PIECE)
            if not piece:
                raise wire.WireError("end of file")
            self._held += piece
        found = bytes(memoryview(self._held)[:size])
        del self._held[:size]
        return found

    def close(self) -> None:
        self._sock.close()


class _Slots:
    """Of one sandbox."""

    def __init__(self) -> None:
        self.short = asyncio.Semaphore(PER_SANDBOX)
        self.watches = asyncio.Semaphore(WATCHES)
        self.users = 0


class Channel:
    """The server as the edge has it."""

    def __init__(self, dirs: NodeDirs) -> None:
        self._dirs = dirs
        self._numbers = itertools.count(1)
        self._slots: dict[tuple[int, int], _Slots] = {}
        self._all = asyncio.Semaphore(IN_ALL)
        self._running: dict[int, contextlib.ExitStack] = {}
        """What is given back when an operation's child is gone."""
        self._out: deque[tuple[bytes, socket.socket | None]] = deque()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()
        self._started = -_RESTART_S

    # -- operations --------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def job(
        self, place: Place, doing: str, request: dict[str, Any], *, watch: bool = False
    ) -> AsyncIterator[Job]:
        """An operation whose request is sent. Its child ends with the block at the latest. Busy;
        FilesError."""
        async with contextlib.AsyncExitStack() as stack:
            slots = await self._turn(place, doing, watch)
            back = contextlib.ExitStack()
            back.callback(self._give_back, place, slots, watch)
            number = next(self._numbers)
            try:
                await self.start()
                ours, theirs = socket.socketpair()
                job = Job(number, ours, doing)
                ours.setblocking(False)
                self._running[number] = back
            except BaseException:
                back.close()
                raise
            stack.callback(self._end, job)
            self._tell(
                {
                    "start": number,
                    "pid": place.pid,
                    "started": place.started,
                    "uid": place.uid,
                    "gid": place.gid,
                    "groups": list(place.groups),
                    "cwd": place.cwd,
                },
                theirs,
            )
            # A child that could not be made has answered already: receiving tells why.
            with contextlib.suppress(OSError):
                await job.send(wire.REQUEST, json.dumps(request).encode())
            yield job

    def _end(self, job: Job) -> None:
        job.close()
        if job.number in self._running:
            self._tell({"kill": job.number}, None)

    async def _turn(self, place: Place, doing: str, watch: bool) -> _Slots:
        key = (place.pid, place.started)
        slots = self._slots.setdefault(key, _Slots())
        slots.users += 1
        mine = slots.watches if watch else slots.short
        try:
            async with asyncio.timeout(TURN_S):
                await mine.acquire()
                try:
                    await self._all.acquire()
                except BaseException:
                    mine.release()
                    raise
        except BaseException as e:
            self._forget(key, slots)
            if isinstance(e, TimeoutError):
                raise Busy(
                    f"{doing}: too many operations on files", hint="wait for some to end"
                ) from None
            raise
        return slots

    def _give_back(self, place: Place, slots: _Slots, watch: bool) -> None:
        self._all.release()
        (slots.watches if watch else slots.short).release()
        self._forget((place.pid, place.started), slots)

    def _forget(self, key: tuple[int, int], slots: _Slots) -> None:
        slots.users -= 1
        if slots.users == 0 and self._slots.get(key) is slots:
            del self._slots[key]

    # -- the server --------------------------------------------------------------------

    async def start(self) -> None:
        """The server runs when this returns. FilesError."""
        if self._control is not None:
            return
        async with self._starting:
            if self._control is not None:
                return
            await asyncio.sleep(max(0.0, self._started + _RESTART_S - time.monotonic()))
            self._started = time.monotonic()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._process = await asyncio.to_thread(self._spawn, theirs)
            except OSError as e:
                ours.close()
                raise FilesError(f"start the files helper: {e}") from None
            finally:
                theirs.close()
            ours.setblocking(False)
            self._control = ours
            asyncio.get_running_loop().add_reader(ours, self._heard)

    def _spawn(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[2])
        with (self._dirs.run / LOG).open("ab") as out:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-X",
                    "utf8",
                    "-m",
                    "dsec_runtime.files",
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd="/",
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": root},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """Of the server, if it runs."""
        return self._process.pid if self._process is not None else None

    def _tell(self, value: dict[str, Any], fd: socket.socket | None) -> None:
        self._out.append((json.dumps(value).encode(), fd))
        self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._out and self._control is not None:
            data, sock = self._out[0]
            try:
                socket.send_fds(self._control, [data], [] if sock is None else [sock.fileno()])
            except BlockingIOError:
                loop.add_writer(self._control, self._flush)
                return
            except OSError:
                self._lost()
                return
            self._out.popleft()
            if sock is not None:
                sock.close()
        if self._control is not None:
            loop.remove_writer(self._control)

    def _heard(self) -> None:
        assert self._control is not None
        try:
            while data := self._control.recv(4096):
                number = json.loads(data)["ended"]
                if back := self._running.pop(number, None):
                    back.close()
        except BlockingIOError:
            return
        except OSError:
            pass
        self._lost()

    def _lost(self) -> None:
        """The server is gone, and all children: the kernel kills them with it."""
        control, process = self._control, self._process
        if control is None or process is None:
            return
        log.info("the files helper ended; the next operation starts it again")
        self._forget_server(control)
        asyncio.get_running_loop().run_in_executor(None, _end, process)

    def _forget_server(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(control)
        loop.remove_writer(control)
        control.close()
        self._control = self._process = None
        for _, sock in self._out:
            if sock is not None:
                sock.close()
        self._out.clear()
        for back in list(self._running.values()):
            back.close()
        self._running.clear()

    async def close(self) -> None:
        """End the server and all operations."""
        if self._control is not None and self._process is not None:
            process = self._process
            self._forget_server(self._control)
            await asyncio.to_thread(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


def check_path(path: str, what: str = "path") -> str:
    """BadInput's material: what the kernel could not take. "" if it can."""
    raw = os.fsencode(path)
    if not raw:
        return f"{what}: empty"
    if b"\0" in raw:
        return f"{what}: has a zero byte"
    if len(raw) > 4095:
        return f"{what}: longer than 4095 bytes"
    return ""
