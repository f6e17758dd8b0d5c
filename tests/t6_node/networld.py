"""A small internet for tests of the gate, in network namespaces of the test's own.

    internet   public-looking addresses with servers, a name server at DNS, and private addresses
               that nobody may reach
    host       where the gate runs: a private address, a default route to the internet
    sandboxes  processes in user and network namespaces of their own

Sockets are made by threads inside the namespaces and used from the test. Nothing is routed to the
machine's real network.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dsec_runtime.network import dns, inside
from dsec_runtime.network.client import Gate
from dsec_runtime.network.start import ask, end_gate
from dsecfs.kernel.namespaces import NamespaceThread, new_private_namespace
from dsecfs.kernel.syscalls import MS_BIND, mount, unshare
from dsecfs.nodedirs import NodeDirs
from dsecfs.settings import Settings

T = TypeVar("T")
Socket = socket.socket

DNS = "9.9.9.9"
GOOD, OTHER, THIRD = "93.184.216.34", "93.184.216.35", "151.101.1.1"
GOOD_6 = "2606:4700::1111"
PRIVATE = ("10.9.9.9", "169.254.169.254", "100.64.3.3", "192.168.7.7")
HOST, HOST_GATEWAY = "10.99.0.2", "10.99.0.1"
HOST_PUBLIC = "142.250.1.1"
"""An address in a public range that the host itself has."""
ECHO, BANNER, UDP_ECHO = 7000, 22, 5000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


def idle_process(*options: str) -> subprocess.Popen[bytes]:
    """A process in new namespaces; it is in them when this returns."""
    child = subprocess.Popen(
        ["unshare", *options, "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"\n"
    return child


class Sandbox:
    """A process with a user and a network namespace, and clients in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process = idle_process("--user", "--map-root-user", "--net")
        self.pid = self.process.pid
        started = inside.start_time(self.pid)
        assert started is not None
        self.started = started
        self.fd = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.sockets: list[socket.socket] = []

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        os.close(self.fd)
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def socket(self, kind: int = socket.SOCK_STREAM, family: int = socket.AF_INET) -> Socket:
        sock = inside.within(self.fd, lambda: Socket(family, kind))
        sock.settimeout(20)
        self.sockets.append(sock)
        return sock

    def connect(self, address: str, port: int) -> Socket:
        """OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = self.socket(family=family)
        sock.connect((address, port))
        return sock

    def ask(self, name: str, kind: int = dns.A, server: str = inside.RESOLVER) -> dns.Answer:
        sock = self.socket(socket.SOCK_DGRAM)
        sock.connect((server, 53))
        sock.send(dns.query(77, name, kind))
        return dns.parse_answer(sock.recv(4096), 77, name, kind)

    def ask_tcp(self, name: str, kind: int = dns.A) -> dns.Answer:
        sock = self.connect("8.8.4.4", 53)
        message = dns.query(78, name, kind)
        sock.sendall(struct.pack("!H", len(message)) + message)
        data = b""
        while len(data) < 2 or len(data) < 2 + struct.unpack("!H", data[:2])[0]:
            piece = sock.recv(4096)
            assert piece
            data += piece
        return dns.parse_answer(data[2:], 78, name, kind)

    def http(self, address: str, host: str, *, port: int = 80, path: str = "/") -> bytes:
        """The whole answer; b"" or an error when it is cut."""
        with self.connect(address, port) as sock:
            head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            sock.sendall(head.encode())
            return read_all(sock)

    def tls(self, address: str, name: str | None, *, port: int = 443) -> bytes:
        """What a TLS server says after the handshake."""
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with self.connect(address, port) as sock:
            with context.wrap_socket(sock, server_hostname=name) as wrapped:
                return read_all(wrapped)

    def resolves(self, name: str) -> list[str]:
        return [str(address) for address in self.ask(name).addresses]


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


@dataclass
class World:
    """The whole of it."""

    place: Path
    dirs: NodeDirs
    host: NamespaceThread
    internet: int
    zone: dict[tuple[str, int], list[str]]
    """Name and kind to addresses; an empty name answers with nothing."""
    questions: list[str]
    """What the name server was asked."""
    seen: list[tuple[str, int, bytes]]
    """Address, port and first bytes of connections that reached servers."""
    _made: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def sandbox(self, name: str) -> Sandbox:
        made = Sandbox(name)
        self._made.callback(made.close)
        return made

    def settings(self, **more: str) -> Settings:
        values: dict[str, Any] = {"data_dir": self.dirs.data, "run_dir": self.dirs.run}
        return Settings(**values | more)

    def run(self, work: Callable[[Gate], Awaitable[T]], **more: str) -> T:
        """Run a coroutine function with a connection to the gate, on the host."""

        async def connected() -> T:
            async with Gate(self.dirs, self.settings(**more)) as gate:
                return await asyncio.wait_for(work(gate), 100)

        return self.host.call(lambda: asyncio.run(connected()), timeout_s=110)

    def gate_pid(self) -> int:
        found = ask(self.dirs, "ping")
        assert found is not None
        return int(str(found["pid"]))

    def kill_gate(self) -> int:
        pid = self.gate_pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    def names(self, name: str, *addresses: str) -> None:
        """What the name server says about a name."""
        for kind, colon in ((dns.A, False), (dns.AAAA, True)):
            self.zone[name, kind] = [a for a in addresses if (":" in a) == colon]


@contextlib.contextmanager
def world(place: Path, certificate: Path) -> Iterator[World]:
    """Everything, taken away at the end."""
    with contextlib.ExitStack() as made:
        net = idle_process("--net")
        made.callback(net.wait)
        made.callback(net.kill)
        assert net.stdout is not None
        made.callback(net.stdout.close)
        internet = os.open(f"/proc/{net.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        made.callback(os.close, internet)
        resolv = place / "resolv.conf"
        resolv.write_text(f"nameserver {DNS}\n")

        def enter() -> None:
            unshare(inside.CLONE_NEWNET)
            new_private_namespace()
            mount(resolv, os.path.realpath("/etc/resolv.conf"), "", MS_BIND)

        host = NamespaceThread(enter, "host")
        made.callback(host.close)
        host.call(lambda: _wire(net.pid))
        inside.within(internet, _addresses)
        dirs = NodeDirs(place / "data", place / "run")
        dirs.create()
        found = World(place, dirs, host, internet, {}, [], [], made)
        servers = Servers(found, certificate)
        made.callback(servers.close)
        made.callback(_end, dirs)
        yield found


def _end(dirs: NodeDirs) -> None:
    end_gate(dirs)
    deadline = time.monotonic() + 10
    while ask(dirs, "ping") is not None and time.monotonic() < deadline:
        time.sleep(0.02)


def _wire(pid: int) -> None:
    ip("link", "set", "lo", "up")
    ip("link", "add", "up0", "type", "veth", "peer", "name", "down0", "netns", str(pid))
    ip("addr", "add", f"{HOST}/24", "dev", "up0")
    ip("addr", "add", f"{HOST_PUBLIC}/32", "dev", "lo")
    ip("addr", "add", "fd99::2/64", "dev", "up0", "nodad")
    ip("link", "set", "up0", "up")
    ip("route", "add", "default", "via", HOST_GATEWAY)
    ip("-6", "route", "add", "default", "via", "fd99::1")


def _addresses() -> None:
    ip("link", "set", "lo", "up")
    ip("addr", "add", f"{HOST_GATEWAY}/24", "dev", "down0")
    ip("addr", "add", "fd99::1/64", "dev", "down0", "nodad")
    ip("link", "set", "down0", "up")
    for address in (DNS, GOOD, OTHER, THIRD, *PRIVATE):
        ip("addr", "add", f"{address}/32", "dev", "lo")
    ip("addr", "add", f"{GOOD_6}/128", "dev", "lo", "nodad")


class Servers:
    """One thread for each listener, one for each connection."""

    def __init__(self, world: World, certificate: Path) -> None:
        self._world = world
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate)
        for family, any_ in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
            for port, serve in (
                (80, self._http), (443, self._https), (8443, self._https), (8080, self._http),
                (ECHO, self._echo), (BANNER, self._banner),
            ):
                self._listen(family, any_, port, serve)
        for address in (HOST_PUBLIC, HOST):
            world.host.call(lambda a=address: self._listen_here(a, 80))  # type: ignore[misc]
        self._datagrams(DNS, 53, self._answer)
        self._datagrams(GOOD, UDP_ECHO, lambda data: b"echo " + data)

    def close(self) -> None:
        self._closed = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _listen(
        self, family: int, address: str, port: int, serve: Callable[[socket.socket], None]
    ) -> None:
        def make() -> socket.socket:
            return socket.create_server((address, port), family=family, backlog=1024)

        self._accept(inside.within(self._world.internet, make), serve)

    def _listen_here(self, address: str, port: int) -> None:
        self._accept(socket.create_server((address, port)), self._http)

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self._sockets.append(listener)

        def accept() -> None:
            while not self._closed:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                client.settimeout(60)
                self._sockets.append(client)
                threading.Thread(target=self._guard, args=(client, serve), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def _guard(self, client: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        # The other side may leave at any moment, which is what tests are about.
        with contextlib.suppress(OSError), client:
            serve(client)

    def _saw(self, client: socket.socket, data: bytes) -> None:
        address, port = client.getsockname()[:2]
        self._world.seen.append((address, port, data))

    def _http(self, client: socket.socket) -> None:
        held = b""
        while True:
            while b"\r\n\r\n" not in held:
                piece = client.recv(65536)
                if not piece:
                    return
                held += piece
            head, _, held = held.partition(b"\r\n\r\n")
            self._saw(client, head)
            if b"Upgrade: websocket" in head:
                client.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
                while piece := client.recv(65536):
                    client.sendall(b"ws " + piece)
                return
            body = f"you reached {client.getsockname()[0]}".encode()
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            if b"Connection: close" in head:
                return

    def _https(self, client: socket.socket) -> None:
        self._saw(client, client.recv(65536, socket.MSG_PEEK))
        with self._tls.wrap_socket(client, server_side=True) as wrapped:
            wrapped.sendall(b"you reached TLS")
            wrapped.unwrap()

    def _echo(self, client: socket.socket) -> None:
        while data := client.recv(65536):
            self._saw(client, data)
            client.sendall(data)
        client.sendall(b"bye")

    def _banner(self, client: socket.socket) -> None:
        client.sendall(b"SSH-2.0-test\r\n")
        self._echo(client)

    def _datagrams(self, address: str, port: int, answer: Callable[[bytes], bytes | None]) -> None:
        def make() -> socket.socket:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.bind((address, port))
            return sock

        sock = inside.within(self._world.internet, make)
        self._sockets.append(sock)

        def serve() -> None:
            while not self._closed:
                try:
                    data, client = sock.recvfrom(65535)
                    if client is None:
                        return  # shut down
                    reply = answer(data)
                    if reply is not None:
                        sock.sendto(reply, client)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()

    def _answer(self, data: bytes) -> bytes | None:
        question = dns.parse_question(data)
        self._world.questions.append(question.name)
        found = self._world.zone.get((question.name, question.kind))
        if found is None:
            return dns.reply(question, dns.NXDOMAIN)
        addresses = [ipaddress.ip_address(text) for text in found]
        return dns.reply(question, dns.NOERROR, addresses, 1)
