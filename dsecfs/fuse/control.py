"""The control socket of a mount: run/fs.sock, one JSON object a line in, one out.

The supervisor makes the listening socket and every worker inherits it, so a caller that
comes while a worker is being replaced waits a moment instead of being refused.

    {"op": "ping"}
    {"op": "status"}                          processes, mode, age, restarts
    {"op": "stats"}                           counters of this worker
    {"op": "chores"}                          what it does beside serving: its lease
    {"op": "close_idle"}                      close blobs that nobody reads right now
    {"op": "prefetch", "id": ID, "blobs": [{"digest": HEX, "chunks": [N, …] | null}]}
    {"op": "warm", "env": HEX | null, "layers": [HEX, …]}   answers {"id": ID}
    {"op": "prefetch_status", "id": ID}       of a prefetch or a warm
    {"op": "stop", "mode": "refuse" | "drain" | "force"}
    {"op": "restart_worker"}

An answer is {"ok": true, …} or {"ok": false, "error": CLASS, "message": …, "hint": …}.
What must hold: only the owner and root are heard; every line, answer, wait and number of
callers is bounded; whatever arrives, the mount goes on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dsecfs.errors
from dsecfs.errors import (
    BadInput,
    Busy,
    DeadlineExceeded,
    DsecfsError,
    FormatError,
    MountError,
    NotFound,
)
from dsecfs.fuse.config import FsConfig
from dsecfs.fuse.mountpoint import unmount
from dsecfs.fuse.shared import Inherited, SharedPage
from dsecfs.fuse.supervisor import unmount_or_drain
from dsecfs.layers.digest import Digest, parse_digest, sha256

if TYPE_CHECKING:
    import trio

    from dsecfs.fuse.blobs import BlobSource
    from dsecfs.fuse.chores import Chores
    from dsecfs.fuse.operations import Handlers
    from dsecfs.fuse.top import Spaces

log = logging.getLogger("dsecfs.fuse.control")

MAX_LINE = 4 << 20
MAX_CALLERS = 32
IDLE_S = 30.0
"""A connection without a request for so long is closed; a request may take as long."""
MAX_JOBS = 256
"""Prefetches that are remembered, and warms that wait for their turn."""
RUNNING_JOBS = 16
"""Prefetches at the same time; one more is refused, a warm waits."""
MAX_BLOBS = 4096

_ACCEPT_AGAIN = (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
STOP_MODES = ("refuse", "drain", "force")


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for `path` that fits the 108 bytes of sun_path (unix(7))."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def listen(path: Path) -> socket.socket:
    """The listening socket at `path`, mode 0600. The caller holds the daemon's lock."""
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with _short(path) as name:
            server.bind(name)
    finally:
        os.umask(before)
    server.listen(MAX_CALLERS)
    return server


# -- client --------------------------------------------------------------------------


class FsClient:
    """Talks to the daemon of a mount. Blocking; one connection per call; safe in threads."""

    def __init__(self, path: Path, *, timeout_s: float = 10.0) -> None:
        self.path = path
        self.timeout_s = timeout_s

    def call(self, op: str, *, timeout_s: float | None = None, **fields: Any) -> dict[str, Any]:
        """The answer's fields. NotFound if no daemon listens, DeadlineExceeded if it does not
        answer, or the error that it answered with.

        A request whose worker ends before it has answered is asked again of the next one.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        request = json.dumps({"op": op, **fields}).encode() + b"\n"
        lost = False
        try:
            while not (answer := self._ask(request, deadline)).endswith(b"\n"):
                if len(answer) > MAX_LINE:
                    raise FormatError(f"FUSE daemon at {self.path}: {op}: answer is too long")
                if time.monotonic() > deadline:
                    raise TimeoutError
                lost = True
                time.sleep(0.01)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            if lost and op == "stop":
                return {"stopped": True}  # it did before it could say so
            raise NotFound(
                f"no FUSE daemon at {self.path}", hint="it starts with the first mount"
            ) from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"FUSE daemon at {self.path}: no answer to {op} in {limit:g} s",
                hint=f"see {self.path.with_name('fs.log')}",
            ) from None
        except OSError as e:
            raise MountError(f"FUSE daemon at {self.path}: {op}: {e.strerror}") from None
        return self._result(op, answer)

    def _ask(self, request: bytes, deadline: float) -> bytes:
        """One attempt. The answer; without its end if the connection was lost."""
        answer = bytearray()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(max(0.001, deadline - time.monotonic()))
            with _short(self.path) as name:
                _connect(s, name, deadline)
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                s.sendall(request)
                while not answer.endswith(b"\n"):
                    s.settimeout(max(0.001, deadline - time.monotonic()))
                    part = s.recv(65536)
                    if not part or len(answer) > MAX_LINE:
                        break
                    answer += part
        return bytes(answer)

    def _result(self, op: str, answer: bytes) -> dict[str, Any]:
        try:
            value = json.loads(answer)
            ok = value.pop("ok")
        except (ValueError, AttributeError, KeyError, TypeError):
            raise FormatError(f"FUSE daemon at {self.path}: {op}: not an answer") from None
        if ok:
            return dict(value)
        kind = getattr(dsecfs.errors, str(value.get("error")), None)
        if not (isinstance(kind, type) and issubclass(kind, DsecfsError)):
            kind = DsecfsError
        raise kind(str(value.get("message")), hint=str(value.get("hint", "")))

    def ping(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        return self.call("ping", timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        return self.call("status")

    def stats(self) -> dict[str, Any]:
        return self.call("stats")

    def chores(self) -> dict[str, Any]:
        """How what the worker does beside serving fares: its `lease`, and whether it does the
        `node`'s chores."""
        return self.call("chores")

    def close_idle(self) -> int:
        """Have blobs closed that nobody reads right now; how many."""
        return int(self.call("close_idle")["closed"])

    def prefetch(self, job: str, blobs: list[tuple[Digest, list[int] | None]]) -> None:
        """Start bringing chunks (None: all) into the cache under the name `job`."""
        self.call("prefetch", id=job, blobs=[{"digest": d, "chunks": c} for d, c in blobs])

    def warm(self, env: Digest | None, layers: Sequence[Digest]) -> str:
        """Start bringing in what runs of `env`, made of `layers` (bottom first), read; the id
        for `prefetch_status`. Asked again while it goes on, it is the same one; asked later, it
        brings in what is missing then. Busy if too much else is being brought in."""
        return str(self.call("warm", env=env, layers=list(layers))["id"])

    def prefetch_status(self, job: str) -> dict[str, Any]:
        """done, total, finished, error ("" while all is well)."""
        return self.call("prefetch_status", id=job)

    def restart_worker(self, *, timeout_s: float = 60.0) -> int:
        """Replace the worker by one with the code on disk; its pid. MountError if that does
        not start (the old one goes on)."""
        before = self.status()
        self.call("restart_worker")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                now = self.status()
            except DeadlineExceeded:
                continue
            if now["generation"] != before["generation"]:
                return int(now["worker"])
            if now["upgrades_failed"] != before["upgrades_failed"]:
                raise MountError(
                    "the new worker did not start; the old one goes on",
                    hint=f"see {self.path.with_name('fs.log')}",
                )
            time.sleep(0.02)
        raise DeadlineExceeded(f"the worker was not replaced in {timeout_s:g} s")


def _connect(s: socket.socket, name: str, deadline: float) -> None:
    """A unix socket whose queue of callers is full refuses at once instead of waiting."""
    while True:
        try:
            return s.connect(name)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            time.sleep(0.01)


# -- server --------------------------------------------------------------------------


class _Job:
    """A prefetch."""

    def __init__(self) -> None:
        self.done = 0
        self.total = 0
        self.finished = False
        self.error = ""

    def progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total


class ControlServer:
    """Answers requests in the worker."""

    def __init__(
        self,
        inherited: Inherited,
        config: FsConfig,
        page: SharedPage,
        spaces: Spaces,
        handlers: Handlers,
        source: BlobSource,
        chores: Chores | None = None,
    ) -> None:
        self._inherited = inherited
        self._config = config
        self._page = page
        self._spaces = spaces
        self._handlers = handlers
        self._source = source
        self._chores = chores
        self._jobs: dict[str, _Job] = {}
        self._callers = 0
        self._busy = 0
        self._operations: dict[str, Callable[[dict[str, Any]], Any]] = {
            "ping": self._ping,
            "status": self._status,
            "stats": self._stats,
            "chores": self._report_chores,
            "close_idle": self._close_idle,
            "prefetch": self._prefetch,
            "warm": self._warm,
            "prefetch_status": self._prefetch_status,
            "stop": self._stop,
            "restart_worker": self._restart_worker,
        }

    async def serve(
        self, draining: trio.Event, *, task_status: trio.TaskStatus[None] | None = None
    ) -> None:
        """Accept callers until `draining`."""
        import trio

        # A duplicate: closing it here leaves the supervisors' descriptor open.
        listener = trio.socket.from_stdlib_socket(
            socket.socket(fileno=os.dup(self._inherited.control_fd))
        )
        self._warming = trio.CapacityLimiter(RUNNING_JOBS)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if task_status is not None:
                task_status.started()

            async def stop_accepting() -> None:
                await draining.wait()
                listener.close()

            nursery.start_soon(stop_accepting)
            while not draining.is_set():
                try:
                    connection, _ = await listener.accept()
                except trio.ClosedResourceError:
                    break
                except OSError as e:
                    if draining.is_set():
                        break  # a caller came just when the listener was closed
                    if e.errno not in _ACCEPT_AGAIN:
                        raise
                    log.warning("control socket: %s", e.strerror)
                    await trio.sleep(0.1)
                    continue
                if self._callers >= MAX_CALLERS or not self._may_call(connection):
                    connection.close()
                    continue
                nursery.start_soon(self._talk, connection)

    async def finish(self) -> None:
        """Wait until requests that are being answered are answered."""
        import trio

        while self._busy:
            await trio.sleep(0.01)

    def _may_call(self, connection: trio.socket.SocketType) -> bool:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        assert isinstance(raw, bytes)
        pid, uid, _ = struct.unpack("iII", raw)
        if uid in (0, os.geteuid()):
            return True
        log.warning("control socket: process %d of user %d was turned away", pid, uid)
        return False

    async def _talk(self, connection: trio.socket.SocketType) -> None:
        import trio

        self._callers += 1
        try:
            with connection:
                buffer = bytearray()
                while True:
                    with trio.fail_after(IDLE_S):
                        line = await _read_line(connection, buffer)
                    if line is None:
                        return
                    self._busy += 1
                    try:
                        with trio.fail_after(IDLE_S):
                            answer = await self._answer(line)
                            await _send_all(connection, json.dumps(answer).encode() + b"\n")
                    finally:
                        self._busy -= 1
        except (OSError, trio.TooSlowError):
            return  # The caller went away or sleeps: nobody is left to tell.
        finally:
            self._callers -= 1

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            try:
                request = json.loads(line)
            except (ValueError, RecursionError):
                raise BadInput("control socket: a request is not JSON") from None
            if not isinstance(request, dict) or not isinstance(request.get("op"), str):
                raise BadInput("control socket: a request is an object with a string `op`")
            operation = self._operations.get(request["op"])
            if operation is None:
                raise BadInput(f"control socket: unknown operation {request['op'][:40]!r}")
            return {"ok": True, **await operation(request)}
        except DsecfsError as e:
            return {
                "ok": False,
                "error": type(e).__name__,
                "message": e.message,
                "hint": e.hint,
            }
        except Exception:
            log.exception("control socket: unexpected")
            return {"ok": False, "error": "DsecfsError", "message": "internal error, see the log"}

    # -- operations

    async def _ping(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"worker": os.getpid()}

    async def _status(self, request: dict[str, Any]) -> dict[str, Any]:
        page = self._page
        age = (time.monotonic_ns() - page.mounted_at_ns) / 1e9
        return {
            "worker": os.getpid(),
            "active": page.active_pid,
            "standby": page.standby_pid,
            "supervisors": page.supervisors(),
            "mountpoint": self._config.mountpoint,
            "store": self._config.store,
            "tree": self._config.tree,
            "resend": page.resend,
            "draining": page.draining,
            "uptime_s": round(age, 3),
            "generation": page.generation,
            "deaths": page.deaths,
            "takeovers": page.takeovers,
            "upgrades_failed": page.upgrades_failed,
            "open": self._spaces.open_spaces,
        }

    async def _stats(self, request: dict[str, Any]) -> dict[str, Any]:
        h = self._handlers
        return {
            "fuse": {"reads": h.reads, "waited_reads": h.waited_reads, "errors": h.errors},
            "cache": dict(self._source.stats()),
        }

    async def _report_chores(self, request: dict[str, Any]) -> dict[str, Any]:
        return {} if self._chores is None else self._chores.report()

    async def _close_idle(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"closed": 0 if self._chores is None else self._chores.close_idle()}

    async def _prefetch(self, request: dict[str, Any]) -> dict[str, Any]:
        wanted = _wanted(request)
        name = _job_name(request)
        return self._start_job(name, lambda job: self._source.prefetch(wanted, job.progress))

    async def _warm(self, request: dict[str, Any]) -> dict[str, Any]:
        env, layers = request.get("env"), request.get("layers")
        if not isinstance(layers, list) or len(layers) > MAX_BLOBS:
            raise BadInput(f"warm: `layers` must be a list of at most {MAX_BLOBS}")
        if not all(isinstance(d, str) for d in (*layers, env or "")):
            raise BadInput("warm: `env` and `layers` are digests")
        digests = [parse_digest(layer) for layer in layers]
        of = parse_digest(env) if env is not None else None
        name = f"warm-{sha256(json.dumps([env, layers]).encode())[:32]}"
        running = self._jobs.get(name)
        if running is not None and not running.finished:
            return {"id": name}

        async def work(job: _Job) -> None:
            async with self._warming:
                await self._source.warm(of, digests, job.progress)

        return self._start_job(name, work, MAX_JOBS)

    def _start_job(
        self, name: str, work: Callable[[_Job], Awaitable[None]], limit: int = RUNNING_JOBS
    ) -> dict[str, Any]:
        if name in self._jobs and not self._jobs[name].finished:
            raise Busy(f"prefetch {name} is running", hint="wait for it or use another id")
        if sum(not j.finished for j in self._jobs.values()) >= limit:
            raise Busy(f"{limit} prefetches are running", hint="try again later")
        self._jobs.pop(name, None)
        for old in [n for n, j in self._jobs.items() if j.finished][:-MAX_JOBS]:
            del self._jobs[old]
        job = self._jobs[name] = _Job()
        self._nursery.start_soon(self._run_job, name, job, work)
        return {"id": name}

    async def _run_job(
        self, name: str, job: _Job, work: Callable[[_Job], Awaitable[None]]
    ) -> None:
        try:
            await work(job)
        except DsecfsError as e:
            job.error = str(e)
            log.warning("prefetch %s: %s", name, e)
        except Exception:
            log.exception("prefetch %s: unexpected", name)
            job.error = "internal error, see the log"
        finally:
            job.finished = True

    async def _prefetch_status(self, request: dict[str, Any]) -> dict[str, Any]:
        name = _job_name(request)
        job = self._jobs.get(name)
        if job is None:
            raise NotFound(f"no prefetch {name}", hint="a new worker does not know old ones")
        return {
            "id": name,
            "done": job.done,
            "total": job.total,
            "finished": job.finished,
            "error": job.error,
        }

    async def _stop(self, request: dict[str, Any]) -> dict[str, Any]:
        """The end of the mount ends the family, so unmounting is all there is to do."""
        import trio

        mode = request.get("mode", "refuse")
        if mode not in STOP_MODES:
            raise BadInput(f"stop: unknown mode {str(mode)[:40]!r}", hint=f"one of {STOP_MODES}")
        if mode == "force":
            self._page.force = True
            os.eventfd_write(self._inherited.command_fd, 1)
            return {"stopped": True}
        fuse_fd = self._inherited.fuse_fd
        mountpoint = Path(self._config.mountpoint)
        if mode == "refuse":
            await trio.to_thread.run_sync(lambda: unmount(mountpoint))
        await trio.to_thread.run_sync(lambda: unmount_or_drain(mountpoint, fuse_fd, self._page))
        return {"stopped": not self._page.draining}

    async def _restart_worker(self, request: dict[str, Any]) -> dict[str, Any]:
        self._page.restart = True
        os.eventfd_write(self._inherited.command_fd, 1)
        return {}


def _job_name(request: dict[str, Any]) -> str:
    name = request.get("id")
    if not isinstance(name, str) or not 0 < len(name) <= 128:
        raise BadInput("prefetch: `id` must be a string of 1 to 128 characters")
    return name


def _wanted(request: dict[str, Any]) -> list[tuple[Digest, list[int] | None]]:
    blobs = request.get("blobs")
    if not isinstance(blobs, list) or len(blobs) > MAX_BLOBS:
        raise BadInput(f"prefetch: `blobs` must be a list of at most {MAX_BLOBS}")
    wanted = []
    for item in blobs:
        if not isinstance(item, dict) or not isinstance(item.get("digest"), str):
            raise BadInput("prefetch: every blob is an object with a `digest`")
        chunks = item.get("chunks")
        if chunks is not None and not (
            isinstance(chunks, list)
            and all(isinstance(c, int) and not isinstance(c, bool) and c >= 0 for c in chunks)
        ):
            raise BadInput("prefetch: `chunks` must be null or a list of numbers")
        wanted.append((parse_digest(item["digest"]), chunks))
    return wanted


async def _read_line(connection: trio.socket.SocketType, buffer: bytearray) -> bytes | None:
    """The next line; what follows it stays in `buffer`. None at the end or if too long."""
    looked = 0
    while (end := buffer.find(b"\n", looked)) < 0:
        looked = len(buffer)
        if looked > MAX_LINE:
            return None
        part = await connection.recv(65536)
        if not part:
            return None
        buffer += part
    line = bytes(buffer[:end])
    del buffer[: end + 1]
    return line


async def _send_all(connection: trio.socket.SocketType, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[await connection.send(view) :]
