"""TCP connections inside a sandbox's network namespace.

A socket belongs for life to the namespace of the thread that makes it. So a thread of its own
enters the namespace, makes the socket and ends; connecting, reading and writing are the event
loop's. What must hold:

- what is kept of a sandbox is a pidfd of one of its processes, which keeps no namespace alive; the
  process was recognised by its start time, and an id used again can never lead elsewhere;
- a thread that entered a namespace never does anything else and ends: none can stay in the
  wrong one;
- both ends of a connection have the same address. So it cannot leave the sandbox, whatever
  addresses, routes and sockets its root made up;
- the end of the process is told to everybody who has a connection (`Dialled.gone`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dsec_runtime.errors import PortClosed, SandboxLost
from dsecfs.errors import BadInput, Busy, DeadlineExceeded, MountError, Unsupported
from dsecfs.kernel.syscalls import pidfd_open, setns

T = TypeVar("T")

CONNECT_S = 5.0
"""Longest time from the wish to an open connection: everything is on this machine."""
MAX_OPEN = 512
"""Connections into one sandbox at a time, as many as commands."""
MAX_KEPT = 256
"""Sandboxes that are remembered while nobody talks to them."""
MAX_THREADS = 32
"""Threads in namespaces at a time."""
_TABLE = 1 << 20
"""Bytes of the table of sockets that are looked at; listening ones come first."""
_LOOPBACK = ("127.0.0.1", "::1")
_LISTEN = "0A"
"""TCP_LISTEN: include/net/tcp_states.h"""
_CLONE_NEWNET = 0x40000000
"""include/uapi/linux/sched.h"""
_IP_BIND_ADDRESS_NO_PORT = 24
"""include/uapi/linux/in.h: the port is chosen at connect, so that there is one for each peer."""
_NOBODY = (
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EADDRNOTAVAIL,
    errno.EAFNOSUPPORT,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
)
"""What it means that there is no listener, or no such address in there."""

Locate = Callable[[], Awaitable[tuple[int, int]]]
"""Finds a process of the sandbox: its id and its start time (`Backend.place`)."""


@dataclass(frozen=True, slots=True)
class Dialled:
    """An open connection."""

    sock: socket.socket
    """Not blocking. It is closed at the end of `Dialler.connection`."""
    gone: asyncio.Future[None]
    """Done when the sandbox is no more. Never cancel it: others have it, too."""


class _Known:
    """A sandbox whose process we watch."""

    def __init__(self, pidfd: int, gone: asyncio.Future[None]) -> None:
        self.pidfd = pidfd
        self.gone = gone
        self.open = 0


class Dialler:
    """Connects to ports in sandboxes. Belongs to one event loop."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._threads = asyncio.Semaphore(MAX_THREADS)

    def close(self) -> None:
        """Forget all; connections go on."""
        for sandbox in list(self._known):
            self._forget(sandbox)

    @contextlib.asynccontextmanager
    async def connection(
        self, sandbox: str, port: int, locate: Locate
    ) -> AsyncIterator[Dialled]:
        """A connection to what listens on the port: on 127.0.0.1, on ::1, or on any other address.

        PortClosed when nothing does, DeadlineExceeded, SandboxLost, Busy.
        """
        if not 1 <= port <= 65535:
            raise BadInput(f"port {port}", hint="ports are 1 to 65535")
        known = await self._find(sandbox, locate)
        if known.open >= MAX_OPEN:
            raise Busy(
                f"sandbox {sandbox}: {known.open} connections into it are open",
                hint="end some first",
            )
        known.open += 1
        try:
            sock = await self._connect(known, sandbox, port)
            try:
                yield Dialled(sock, known.gone)
            finally:
                sock.close()
        finally:
            known.open -= 1

    # -- whom we know ------------------------------------------------------------------

    async def _find(self, sandbox: str, locate: Locate) -> _Known:
        if (known := self._known.pop(sandbox, None)) is None:
            pid, started = await locate()
            pidfd = await self._thread(lambda: _recognise(sandbox, pid, started), os.close)
            if (known := self._known.pop(sandbox, None)) is not None:
                os.close(pidfd)  # somebody was faster
            else:
                loop = asyncio.get_running_loop()
                known = _Known(pidfd, loop.create_future())
                loop.add_reader(pidfd, self._ended, sandbox)
        self._known[sandbox] = known  # the last in order is the last used
        for old in list(self._known)[: max(0, len(self._known) - MAX_KEPT)]:
            if not self._known[old].open and old != sandbox:
                self._forget(old)
        return known

    def _ended(self, sandbox: str) -> None:
        self._forget(sandbox).gone.set_result(None)

    def _forget(self, sandbox: str) -> _Known:
        known = self._known.pop(sandbox)
        asyncio.get_running_loop().remove_reader(known.pidfd)
        os.close(known.pidfd)
        return known

    # -- connecting --------------------------------------------------------------------

    async def _connect(self, known: _Known, sandbox: str, port: int) -> socket.socket:
        try:
            async with asyncio.timeout(CONNECT_S):
                for address in _LOOPBACK:
                    if sock := await self._try(known, address, port):
                        return sock
                for address in await self._inside(known, lambda: listeners(port), _nothing):
                    if sock := await self._try(known, address, port):
                        return sock
        except TimeoutError:
            raise DeadlineExceeded(
                f"sandbox {sandbox}: port {port} took no connection in {CONNECT_S:g} s",
                hint="what listens there must accept connections",
            ) from None
        except MountError as e:
            if e.errno == errno.ESRCH:
                raise SandboxLost(
                    f"sandbox {sandbox}: it has just ended", hint=f"dsec sandbox why {sandbox}"
                ) from None
            raise
        raise PortClosed(
            f"sandbox {sandbox}: nothing listens on port {port}",
            hint="start a server on it and wait until it listens, on any address",
        )

    async def _try(self, known: _Known, address: str, port: int) -> socket.socket | None:
        """None if nobody listens there."""
        try:
            sock = await self._inside(known, lambda: _socket(address), socket.socket.close)
        except OSError as e:
            if e.errno in _NOBODY:
                return None
            raise
        try:
            await asyncio.get_running_loop().sock_connect(sock, (address, port))
            # A client's port may happen to be the one it calls: then it has called itself.
            if sock.getsockname() != sock.getpeername():
                return sock
        except OSError as e:
            if e.errno == errno.ETIMEDOUT:
                raise TimeoutError from None
            if e.errno not in (*_NOBODY, errno.ENOTCONN):
                sock.close()
                raise
        except BaseException:
            sock.close()
            raise
        sock.close()
        return None

    async def _inside(
        self, known: _Known, work: Callable[[], T], discard: Callable[[T], None]
    ) -> T:
        """Run `work` in the sandbox's network namespace."""
        if known.gone.done():
            raise MountError("enter a namespace: its process has ended", errno=errno.ESRCH)
        # A descriptor of its own: ours is closed, and its number another's, when the sandbox ends.
        pidfd = os.dup(known.pidfd)

        def enter() -> T:
            try:
                setns(pidfd, _CLONE_NEWNET)
            finally:
                os.close(pidfd)
            if os.path.samefile("/proc/thread-self/ns/net", "/proc/self/ns/net"):
                raise Unsupported(
                    "ports of a sandbox that has the node's own network",
                    hint="its servers are reached at the node's addresses",
                )
            return work()

        return await self._thread(enter, discard)

    async def _thread(self, work: Callable[[], T], discard: Callable[[T], None]) -> T:
        """Run `work`, which does not block, in a thread that ends with it. `discard` gets what
        nobody waits for any more."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = work()
            except BaseException as e:  # handed to the caller, who raises it
                loop.call_soon_threadsafe(done.set_exception, e)
            else:
                loop.call_soon_threadsafe(done.set_result, value)

        def unwanted(done: asyncio.Future[T]) -> None:
            if done.exception() is None:
                discard(done.result())

        async with self._threads:
            threading.Thread(target=run, name="dial", daemon=True).start()
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                done.add_done_callback(unwanted)
                raise


def _nothing(value: object) -> None:
    pass


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, in clock ticks since boot; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(b")")[2].split()[19])


def _recognise(sandbox: str, pid: int, started: int) -> int:
    """A pidfd of that process. SandboxLost if it is gone.

    The descriptor comes first: if the number still has the right start time after that, it was
    the right process's all the time.
    """
    pidfd = pidfd_open(pid)
    if pidfd is not None:
        if start_time(pid) == started:
            return pidfd
        os.close(pidfd)
    raise SandboxLost(f"sandbox {sandbox}: it has just ended", hint=f"dsec sandbox why {sandbox}")


def _socket(address: str) -> socket.socket:
    """In the namespace: a socket that can only reach the address it has itself."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((address, 0))
    except BaseException:
        sock.close()
        raise
    return sock


def listeners(port: int) -> list[str]:
    """In the namespace: addresses other than loopback ones on which somebody listens."""
    found: dict[str, None] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            with open(f"/proc/thread-self/net/{name}", "rb", buffering=0) as file:
                table = bytearray()
                while len(table) < _TABLE and (part := file.read(1 << 16)):
                    table += part
                    if b"\n" in part and _state(part) != _LISTEN:
                        break
            for line in table.decode("ascii", "replace").splitlines()[1:]:
                words = line.split()
                if len(words) > 3 and words[3] == _LISTEN:
                    host, _, number = words[1].partition(":")
                    if int(number, 16) == port:
                        found[_address(host)] = None
    return [a for a in found if a not in (*_LOOPBACK, "0.0.0.0", "::")][:8]


def _state(table: bytes) -> str:
    """State of the last whole line."""
    words = table.rpartition(b"\n")[0].rpartition(b"\n")[2].split()
    return words[3].decode("ascii", "replace") if len(words) > 3 else _LISTEN


def _address(text: str) -> str:
    """The kernel writes words of 32 bits as the machine has them."""
    raw = bytes.fromhex(text)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return str(ipaddress.ip_address(raw))
