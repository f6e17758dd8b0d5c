"""The edge's process (`dsec node start`): its lock, its sockets, the order of start and end.

Start: lock, journal, keeper, gate, backends, recovery, then the sockets. End (SIGTERM, SIGINT):
the sockets close, requests get a moment, sandboxes go on: keeper and gate stay for the next edge.

Where it listens: a Unix socket (mode 0660, group `node_group`), and TCP only with a token file
and either TLS or a loopback address.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import grp
import ipaddress
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn

from dsec_runtime.edge import lifetime
from dsec_runtime.edge.admission import Admission, Capacity
from dsec_runtime.edge.api.app import create_app
from dsec_runtime.edge.backend import Backend
from dsec_runtime.edge.edge import Edge
from dsec_runtime.edge.events import Events
from dsec_runtime.edge.execs import Execs
from dsec_runtime.edge.journal import Journal
from dsec_runtime.edge.metrics import Metrics
from dsec_runtime.files.client import Files
from dsec_runtime.keeper.client import Keeper
from dsec_runtime.keeper.start import ensure_keeper
from dsec_runtime.network.client import Gate
from dsecfs.errors import BadInput, Busy, Unsupported
from dsecfs.locks import try_lock_file
from dsecfs.node import Node

log = logging.getLogger(__name__)

LINGER_S = 5
"""Seconds that requests have left when the edge ends."""
_MIN_TOKEN = 16


@contextlib.contextmanager
def only_one(node: Node) -> Iterator[None]:
    """Hold the node's edge lock. Busy if another edge runs."""
    path = node.dirs.run / "edge.lock"
    fd = try_lock_file(path)
    if fd is None:
        raise Busy(
            f"edge: another one runs for {node.dirs.run}", hint="dsec node status talks to it"
        )
    try:
        yield
    finally:
        os.close(fd)


@contextlib.asynccontextmanager
async def running_edge(node: Node) -> AsyncIterator[Edge]:
    """An edge with everything it needs, recovered and ready to be asked."""
    dirs, settings = node.dirs, node.settings
    journal = await asyncio.to_thread(Journal, dirs.journal)
    backends: dict[str, Backend] = {}
    try:
        # First the backends: what they make (the namespace of crun) is where the keeper lives.
        backends = await asyncio.to_thread(make_backends, node)
        await asyncio.to_thread(ensure_keeper, dirs)
        async with (
            Keeper(dirs) as keeper,
            Gate(dirs, settings) as gate,
            Files(dirs) as files,
        ):
            capacity = Capacity.here(
                memory=settings.node_overcommit_memory,
                cpu=settings.node_overcommit_cpu,
                sandboxes=settings.node_max_sandboxes,
            )
            edge = Edge(
                node,
                journal,
                backends,
                Execs(dirs, keeper),
                gate,
                files,
                Admission(capacity, dirs.data),
                Events(journal),
                Metrics(),
            )
            async with edge:
                edge.spawn(functools.partial(lifetime.run, edge), "lifetimes")
                edge.spawn(functools.partial(_tell_denials, edge), "denials")
                yield edge
    finally:
        for backend in backends.values():
            await asyncio.to_thread(backend.close)
        await asyncio.to_thread(journal.close)


def make_backends(node: Node) -> dict[str, Backend]:
    """What this node can run."""
    from dsec_runtime.container.backend import ContainerBackend

    return {"container": ContainerBackend(node)}


async def _tell_denials(edge: Edge) -> None:
    """What a policy denies is told where the agent looks: on its commands' standard error."""
    async for denial in edge.gate.follow_denials():
        edge.metrics.denied()
        await edge.execs.note(denial.sandbox, f"dsec: {denial.message()}")


# -- the process -----------------------------------------------------------------------


def serve(node: Node, ready: int | None = None) -> None:
    """Run the edge until SIGTERM or SIGINT. Writes a line to the descriptor `ready` when it
    answers. Busy, BadInput, Unsupported when it cannot start."""
    if os.geteuid() != 0:
        raise Unsupported("edge: not root", hint="run it as root")
    node.dirs.create()
    tcp = check_tcp(node)
    with only_one(node):
        asyncio.run(_serve(node, tcp, ready))


class _Server(uvicorn.Server):
    """Tells when it answers, and ends in order."""

    def __init__(self, config: uvicorn.Config, ready: int | None) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None and self.started:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._ready, b"ready\n")
            os.close(self._ready)
            self._ready = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, which raises the signal again afterwards: that would kill us before the
        edge has ended."""
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def _serve(node: Node, tcp: _Tcp | None, ready: int | None) -> None:
    async with running_edge(node) as edge:
        local = _Server(_config(create_app(edge)), ready)
        listener = open_socket(node.dirs.edge, node.settings.node_group)
        try:
            async with asyncio.TaskGroup() as group:
                if tcp is not None:
                    app = create_app(edge, token=tcp.token)
                    remote = uvicorn.Server(_config(app, tcp))
                    remote.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
                    task = group.create_task(remote.serve([tcp.listen()]))
                await local.serve([listener])
                if tcp is not None:
                    remote.should_exit = True
                    await task
        finally:
            node.dirs.edge.unlink(missing_ok=True)


def _config(app: object, tcp: _Tcp | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        loop="asyncio",
        http="httptools",
        ws="websockets-sansio",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=LINGER_S,
        ssl_certfile=tcp.certificate if tcp and tcp.certificate else None,
        ssl_keyfile=tcp.key if tcp and tcp.certificate else None,
        ws_max_size=1 << 20,
        h11_max_incomplete_event_size=64 << 10,
    )


def open_socket(path: Path, group: str) -> socket.socket:
    """The edge's Unix socket: what is there is of an edge that is gone (we hold the lock)."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        if group:
            try:
                os.chown(path, -1, grp.getgrnam(group).gr_gid)
                path.chmod(0o660)
                path.parent.chmod(path.parent.stat().st_mode | 0o011)
            except KeyError:
                log.info("no group %s: the socket is root's alone", group)
        listener.listen(1024)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


class _Tcp:
    """Where the edge listens besides its socket, checked."""

    def __init__(self, host: str, port: int, token: str, certificate: str, key: str) -> None:
        self.host, self.port = host, port
        self.token = token
        self.certificate, self.key = certificate, key

    def listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server((self.host, self.port), family=family, backlog=1024)
        listener.setblocking(False)
        return listener


def check_tcp(node: Node) -> _Tcp | None:
    """BadInput unless TCP is off, or has a token and TLS or loopback."""
    settings = node.settings
    if not settings.node_listen:
        return None
    host, _, port = settings.node_listen.rpartition(":")
    host = host.strip("[]")
    try:
        address = ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        raise BadInput(
            f"node_listen {settings.node_listen[:60]!r}", hint="expected ADDRESS:PORT"
        ) from None
    if not settings.node_token_file:
        raise BadInput(
            f"node_listen {settings.node_listen}: no token",
            hint="set node_token_file to a file with a secret of 16 characters or more",
        )
    token = _read_token(Path(settings.node_token_file))
    if bool(settings.node_tls_cert) != bool(settings.node_tls_key):
        raise BadInput("node_tls_cert and node_tls_key", hint="set both or none")
    if not settings.node_tls_cert and not address.is_loopback:
        raise BadInput(
            f"node_listen {settings.node_listen}: not loopback, and no TLS",
            hint="set node_tls_cert and node_tls_key, or listen on 127.0.0.1",
        )
    if settings.node_tls_cert:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                settings.node_tls_cert, settings.node_tls_key
            )
        except (OSError, ssl.SSLError) as e:
            raise BadInput(f"node_tls_cert {settings.node_tls_cert}: {e}") from None
    return _Tcp(host, number, token, settings.node_tls_cert, settings.node_tls_key)


def _read_token(path: Path) -> str:
    try:
        found = path.stat()
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"node_token_file {path}: {e}") from None
    if found.st_mode & 0o077:
        raise BadInput(f"node_token_file {path}: others can read it", hint=f"chmod 600 {path}")
    if len(token) < _MIN_TOKEN:
        raise BadInput(f"node_token_file {path}: fewer than {_MIN_TOKEN} characters")
    return token
