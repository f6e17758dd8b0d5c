"""The gate: outlets of all sandboxes of the node, and the requests of the edge (asyncio).

Messages on run/gate.sock are those of keeper/protocol.py. Requests:

    ping                              pid, instance (a new one for every process)
    attach sandbox pid started policy make an outlet, or replace its policy
    update sandbox policy             replace the policy; "cut": connections that ended by it
    detach sandbox                    close the outlet; nothing happens if there is none
    list                              sandboxes with an outlet, and how much each was denied
    follow                            news from now on: {"denied": …} and {"counts": …}
    quit

What must hold: requests about one sandbox are done in their order; an outlet whose process ended
goes by itself; two sandboxes never share a namespace; news that nobody reads are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import socket
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsec_runtime.errors import GateError, SandboxLost
from dsec_runtime.keeper.protocol import HEADER, ProtocolError, pack, parse, sizes
from dsec_runtime.network import inside
from dsec_runtime.network.bounds import Room
from dsec_runtime.network.denials import Denials
from dsec_runtime.network.outlet import Outlet
from dsec_runtime.network.policy import Policy
from dsec_runtime.network.resolver import Resolver
from dsecfs.errors import DsecfsError
from dsecfs.kernel.syscalls import pidfd_open

log = logging.getLogger(__name__)

SWEEP_S = 5.0
COUNTS_S = 1.0
THREADS = 4
"""Namespaces that are prepared at the same time."""
_MAX_NEWS = 256
"""Kept while nobody follows."""
_MAX_UNREAD = 1 << 20
_FILES = 1 << 16
"""Descriptors the process may have, if the system lets it."""
_FILES_KEPT = 64
_PER_OUTLET = 8


@dataclass(slots=True)
class _Held:
    """An outlet and whose it is."""

    outlet: Outlet
    pid: int
    started: int
    pidfd: int
    namespace: tuple[int, int]
    """Device and inode of the network namespace."""


class GateServer:
    """Everything of one gate process."""

    def __init__(self, path: Path) -> None:
        """`path` is that of its socket: when it is gone, or another's, the gate ends."""
        self._path = path
        self._instance = secrets.token_hex(8)
        self._resolver = Resolver()
        self._held: dict[str, _Held] = {}
        self._denials: dict[str, Denials] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._followers: set[asyncio.StreamWriter] = set()
        self._news: deque[dict[str, Any]] = deque(maxlen=_MAX_NEWS)
        self._room = Room(_raise_files() - _FILES_KEPT)
        self._quit = asyncio.Event()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="attach")

    async def serve(self, listener: socket.socket) -> None:
        """Until it is asked to quit."""
        place = self._path.stat()
        server = await asyncio.start_unix_server(self._client, sock=listener)
        chores = (self._sweep(place), self._tell_counts())
        tasks = [asyncio.create_task(chore) for chore in chores]
        try:
            await self._quit.wait()
        finally:
            for task in tasks:
                task.cancel()
            server.close()
            if self._reachable(place):
                self._path.unlink()
            for sandbox in list(self._held):
                self._drop(sandbox)

    # -- requests ----------------------------------------------------------------------

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                text, data = sizes(await reader.readexactly(HEADER.size))
                body = await reader.readexactly(text + data)
                value = parse(body[:text])
                task = asyncio.create_task(self._request(value, writer))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (asyncio.IncompleteReadError, OSError):
            pass  # it has gone
        except ProtocolError as e:
            log.warning("request: %s", e)
        finally:
            # What was begun for it is done all the same.
            self._followers.discard(writer)
            writer.close()

    async def _request(self, value: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any]
        try:
            answer = await self._do(value, writer)
        except DsecfsError as e:
            answer = {"error": e.message, "hint": e.hint, "type": type(e).__name__}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            answer = {"error": f"request: {e!r:.200}", "hint": "", "type": "GateError"}
        except OSError as e:
            answer = {"error": f"network: {e}", "hint": "", "type": "GateError"}
        if not writer.is_closing():
            writer.write(pack({"n": value.get("n"), **answer}))
        if value.get("op") == "quit":
            with contextlib.suppress(OSError):
                await writer.drain()
            self._quit.set()

    async def _do(self, value: dict[str, Any], writer: asyncio.StreamWriter) -> dict[str, Any]:
        match value["op"]:
            case "ping":
                return {"pid": os.getpid(), "instance": self._instance}
            case "quit":
                return {}
            case "list":
                counts = {name: held.outlet.denials.count for name, held in self._held.items()}
                return {"denied": counts}
            case "follow":
                self._followers.add(writer)
                while self._news:
                    writer.write(pack(self._news.popleft()))
                return {}
            case "attach" | "update" | "detach" as op:
                sandbox = value["sandbox"]
                if not isinstance(sandbox, str) or not 0 < len(sandbox) <= 128:
                    raise ValueError("sandbox")
                lock = self._locks.setdefault(sandbox, asyncio.Lock())
                async with lock:
                    return await self._change(op, sandbox, value)
        raise ValueError(f"op {value['op']!r:.40}")

    async def _change(self, op: str, sandbox: str, value: dict[str, Any]) -> dict[str, Any]:
        held = self._held.get(sandbox)
        if op == "detach":
            self._drop(sandbox)
            self._denials.pop(sandbox, None)
            return {}
        policy = Policy.parse(value["policy"])
        if op == "update":
            if held is None:
                raise SandboxLost(f"network: sandbox {sandbox} has no outlet")
            return {"cut": held.outlet.update(policy)}
        pid, started = int(value["pid"]), int(value["started"])
        if held is not None and (held.pid, held.started) == (pid, started):
            return {"cut": held.outlet.update(policy), "denied": held.outlet.denials.count}
        self._drop(sandbox)
        self._held[sandbox] = held = await self._open(sandbox, pid, started, policy)
        asyncio.get_running_loop().add_reader(held.pidfd, self._ended, sandbox)
        return {"cut": 0, "denied": held.outlet.denials.count}

    async def _open(self, sandbox: str, pid: int, started: int, policy: Policy) -> _Held:
        with contextlib.ExitStack() as made:
            if not self._room.take(_PER_OUTLET):
                raise GateError("network: no room for another sandbox in the gate")
            made.callback(self._room.give, _PER_OUTLET)
            loop = asyncio.get_running_loop()
            namespace = await loop.run_in_executor(
                self._pool, inside.open_namespace, pid, started
            )
            made.callback(os.close, namespace)
            found = os.fstat(namespace)
            key = (found.st_dev, found.st_ino)
            for other, held in self._held.items():
                if held.namespace == key:
                    raise GateError(f"network: {sandbox} is in the namespace of sandbox {other}")
            pidfd = pidfd_open(pid)
            if pidfd is None:
                raise SandboxLost(f"network: process {pid} has ended")
            made.callback(os.close, pidfd)
            if inside.start_time(pid) != started:
                raise SandboxLost(f"network: process {pid} has ended")
            sockets = await loop.run_in_executor(self._pool, inside.prepare, namespace)
            denials = self._denials.setdefault(sandbox, Denials(sandbox, self._tell))
            outlet = Outlet(policy, denials, self._resolver, namespace, sockets, self._room)
            made.pop_all()
        return _Held(outlet, pid, started, pidfd, key)

    def _ended(self, sandbox: str) -> None:
        """Its process is gone: so is what was there for it."""
        log.info("sandbox %s has ended", sandbox)
        self._drop(sandbox)

    def _drop(self, sandbox: str) -> None:
        held = self._held.pop(sandbox, None)
        if held is not None:
            asyncio.get_running_loop().remove_reader(held.pidfd)
            os.close(held.pidfd)
            held.outlet.close()
            self._room.give(_PER_OUTLET)

    # -- news --------------------------------------------------------------------------

    def _tell(self, news: dict[str, Any]) -> None:
        if not self._followers:
            self._news.append(news)
        for writer in self._followers:
            if writer.transport.get_write_buffer_size() < _MAX_UNREAD:
                writer.write(pack(news))

    async def _tell_counts(self) -> None:
        """Counters that have grown without a word of it."""
        while True:
            await asyncio.sleep(COUNTS_S)
            if not self._followers:
                continue
            grown = {n: d.count for n, d in self._denials.items() if d.count != d.counted}
            for sandbox, count in grown.items():
                self._denials[sandbox].counted = count
            if grown:
                self._tell({"counts": grown})

    def _reachable(self, place: os.stat_result) -> bool:
        """Whether the socket is still where it was made. Without it nobody can tell us anything,
        and our lock would keep another gate from taking over."""
        try:
            found = self._path.lstat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (place.st_dev, place.st_ino)

    async def _sweep(self, place: os.stat_result) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if not self._reachable(place):
                log.warning("%s is gone: the gate ends", self._path)
                self._quit.set()
            for held in list(self._held.values()):
                held.outlet.sweep()
            for sandbox, lock in list(self._locks.items()):
                if not lock.locked() and sandbox not in self._held:
                    del self._locks[sandbox]
                    self._denials.pop(sandbox, None)


def _raise_files() -> int:
    """Take as many descriptors as we may have; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft if soft != resource.RLIM_INFINITY else _FILES
