"""The gate when processes are killed, when sandboxes flood it, and when they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec_runtime.edge.model import Network
from dsec_runtime.errors import GateError, SandboxLost
from dsec_runtime.network import dns, inside
from dsec_runtime.network.client import Gate
from dsec_runtime.network.outlet import MAX_FLOWS
from dsec_runtime.network.start import ask
from tests.t6_node.networld import ECHO, GOOD, OTHER, Sandbox, World
from tests.t6_node.test_network import attach, certificate, hosts, is_cut, net

__all__ = ["certificate", "net"]

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]


def until(what: str, check: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 30
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_kb(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0])


def echoes(sock: socket.socket) -> bool:
    sock.sendall(b"\0echo")
    return sock.recv(100) == b"\0echo"


EDGE = """
import asyncio, sys, pathlib
from dsec_runtime.edge.model import Network
from dsec_runtime.network import Gate
from dsecfs.nodedirs import NodeDirs
from dsecfs.settings import Settings

async def main():
    data, run, pid, started = sys.argv[1:]
    dirs = NodeDirs(pathlib.Path(data), pathlib.Path(run))
    async with Gate(dirs, Settings(data_dir=dirs.data, run_dir=dirs.run)) as gate:
        rules = {"allow": [{"host": "good.example.org", "ports": [7000]}]}
        await gate.attach("one", int(pid), int(started), Network.model_validate(rules))
        print("attached", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_connections_outlive_the_edge(net: World) -> None:
    box = net.sandbox("one")
    words = [sys.executable, "-c", EDGE, str(net.dirs.data), str(net.dirs.run), str(box.pid),
             str(box.started)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    edge = net.host.call(
        lambda: subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, cwd="/")
    )
    assert edge.stdout is not None
    try:
        assert edge.stdout.readline() == b"attached\n"
        assert box.resolves("good.example.org") == [GOOD]
        sock = box.connect(GOOD, ECHO)
        assert echoes(sock)
    finally:
        edge.send_signal(signal.SIGKILL)
        edge.wait()
        edge.stdout.close()
    pid = net.gate_pid()
    assert echoes(sock)
    assert box.ask("other.example.net").code == dns.NXDOMAIN

    async def check(gate: Gate) -> None:
        assert gate.denied("one") == 1  # counted while nobody listened
        denial = await asyncio.wait_for(anext(aiter(gate.follow_denials())), 20)
        assert denial.host == "other.example.net"
        await gate.update("one", hosts("good.example.org", ports=(ECHO,)))
        assert await asyncio.to_thread(echoes, sock)
        assert await gate.update("one", Network()) == 1

    net.run(check)
    assert net.gate_pid() == pid


def test_a_killed_gate_is_replaced_and_gets_all_policies(net: World) -> None:
    one, two = net.sandbox("one"), net.sandbox("two")

    def cut_off() -> None:
        with pytest.raises(ConnectionRefusedError):
            one.connect(GOOD, ECHO)

    def back(box: Sandbox, name: str, address: str) -> None:
        def works() -> bool:
            try:
                return box.resolves(name) == [address]
            except OSError:
                return False

        until("the gate is back", works)

    async def check(gate: Gate) -> None:
        await attach(gate, one, hosts("good.example.org", ports=(ECHO,)))
        await attach(gate, two, hosts("other.example.net", ports=(ECHO,)))
        assert await asyncio.to_thread(one.resolves, "good.example.org")
        sock = await asyncio.to_thread(one.connect, GOOD, ECHO)
        assert await asyncio.to_thread(echoes, sock)
        before = await asyncio.to_thread(net.kill_gate)
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(sock.recv, 1)
        await asyncio.to_thread(back, one, "good.example.org", GOOD)
        await asyncio.to_thread(back, two, "other.example.net", OTHER)
        assert await asyncio.to_thread(net.gate_pid) != before
        assert await asyncio.to_thread(echoes, await asyncio.to_thread(one.connect, GOOD, ECHO))
        assert await asyncio.to_thread(one.resolves, "other.example.net") == []
        # A change that is asked for while it is dead is made.
        await asyncio.to_thread(net.kill_gate)
        await gate.update("one", hosts("other.example.net", ports=(ECHO,)))
        await asyncio.to_thread(back, one, "other.example.net", OTHER)
        assert await asyncio.to_thread(one.resolves, "good.example.org") == []

    net.run(check)
    # Nobody is there to start another one: what a policy allowed is not reachable either.
    net.kill_gate()
    until("the gate is gone", lambda: ask(net.dirs, "ping") is None)
    cut_off()

    async def again(gate: Gate) -> None:
        await attach(gate, one, hosts("good.example.org", ports=(ECHO,)))
        assert await asyncio.to_thread(one.resolves, "good.example.org") == [GOOD]

    net.run(again)


def test_nothing_is_left_of_sandboxes_that_end(net: World) -> None:
    async def check(gate: Gate) -> None:
        warm = net.sandbox("warm")
        await attach(gate, warm, hosts("good.example.org"))
        await gate.detach("warm")
        pid = await asyncio.to_thread(net.gate_pid)
        before = await asyncio.to_thread(files_of, pid)
        for number in range(20):
            await gate.attach("warm", warm.pid, warm.started, hosts(f"n{number}.org"))
            await gate.detach("warm")
        await gate.detach("warm")
        await gate.detach("never heard of")
        with pytest.raises(SandboxLost):
            await gate.update("warm", hosts("good.example.org"))
        # One that is killed, with connections open and a question on its way.
        box = net.sandbox("one")
        await attach(gate, box, hosts("good.example.org", ports=(ECHO,)))
        assert await asyncio.to_thread(box.resolves, "good.example.org")
        sock = await asyncio.to_thread(box.connect, GOOD, ECHO)
        assert await asyncio.to_thread(echoes, sock)
        box.process.kill()
        gone = lambda: not (ask(net.dirs, "list") or {}).get("denied")  # noqa: E731
        await asyncio.to_thread(until, "the outlet is gone", gone)
        with pytest.raises(SandboxLost):
            await attach(gate, box, hosts("good.example.org"))
        flat = lambda: files_of(pid) <= before  # noqa: E731
        await asyncio.to_thread(until, "descriptors are closed", flat)

    net.run(check)


def test_floods_are_bounded_and_do_not_stop_others(net: World) -> None:
    bad, good = net.sandbox("bad"), net.sandbox("good")

    def names() -> None:
        sock = bad.socket(socket.SOCK_DGRAM)
        sock.connect((inside.RESOLVER, 53))
        for number in range(20000):
            with contextlib.suppress(OSError):
                sock.send(dns.query(number % 65536, f"n{number}.evil.example.com", dns.A))
                sock.send(os.urandom(number % 200))

    def datagrams() -> None:
        sock = bad.socket(socket.SOCK_DGRAM)
        for number in range(20000):
            with contextlib.suppress(OSError):
                sock.sendto(b"x", (f"1.2.{number % 250}.4", 1 + number % 60000))

    def connections() -> None:
        for number in range(1500):
            sock = bad.socket()
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect((f"1.2.3.{number % 250}", 443))

    async def check(gate: Gate) -> None:
        await attach(gate, bad, hosts("good.example.org"))
        await attach(gate, good, hosts("good.example.org", ports=(ECHO, 80)))
        assert await asyncio.to_thread(good.resolves, "good.example.org")
        held = await asyncio.to_thread(good.connect, GOOD, ECHO)
        pid = await asyncio.to_thread(net.gate_pid)
        before = memory_kb(pid)
        flood = asyncio.gather(*(asyncio.to_thread(f) for f in (names, datagrams, connections)))
        rounds = 0
        while not flood.done():
            assert await asyncio.to_thread(echoes, held)
            assert b"you reached" in await asyncio.to_thread(good.http, GOOD, "good.example.org")
            rounds += 1
        await flood
        assert rounds > 1
        await asyncio.sleep(1.5)  # counters come once a second
        told = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                async for denial in gate.follow_denials():
                    assert denial.sandbox == "bad"
                    told += 1
        assert 1 < told < 100
        assert gate.denied("bad") > 500
        assert gate.denied("good") == 0
        assert memory_kb(pid) - before < 64 << 10

    net.run(check)
    assert net.questions == ["good.example.org"]


def test_connections_are_limited(net: World) -> None:
    box = net.sandbox("one")

    def fill() -> list[socket.socket]:
        opened = []
        for _ in range(MAX_FLOWS):
            opened.append(box.connect(GOOD, ECHO))
        assert all(echoes(sock) for sock in opened)
        return opened

    async def check(gate: Gate) -> None:
        await attach(gate, box, hosts("good.example.org", ports=(ECHO,)))
        assert await asyncio.to_thread(box.resolves, "good.example.org")
        opened = await asyncio.to_thread(fill)
        assert await asyncio.to_thread(is_cut, box, GOOD, ECHO)
        opened[0].close()

        def room() -> bool:
            try:
                return echoes(box.connect(GOOD, ECHO))
            except OSError:
                return False

        await asyncio.to_thread(until, "there is room again", room)
        pid = net.gate_pid()
        assert await gate.update("one", Network()) == MAX_FLOWS
        few = lambda: files_of(pid) < 100  # noqa: E731
        await asyncio.to_thread(until, "descriptors are closed", few)

    net.run(check)


PROGRAM = """
import socket, urllib.request
print(urllib.request.urlopen("http://good.example.org/", timeout=20).read().decode())
try:
    urllib.request.urlopen("http://other.example.net/", timeout=20)
except OSError as e:
    print(e)
"""


def test_an_ordinary_program(net: World) -> None:
    """With the C library's resolver, which reads /etc/resolv.conf."""
    box = net.sandbox("one")
    resolv = net.place / "sandbox-resolv.conf"
    resolv.write_text(f"nameserver {inside.RESOLVER}\n")
    words = ["nsenter", "-t", str(box.pid), "-U", "-n", "--preserve-credentials", "unshare", "-m",
             "sh", "-c", 'mount --bind "$1" "$(realpath /etc/resolv.conf)" && exec "$2" -c "$3"',
             "sh", str(resolv), sys.executable, PROGRAM]

    async def check(gate: Gate) -> None:
        await attach(gate, box, hosts("good.example.org"))
        done = await asyncio.to_thread(
            subprocess.run, words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
        )
        text = done.stdout.decode()
        assert f"you reached {GOOD}" in text
        assert "Name or service not known" in text

    net.run(check)


def test_a_gate_runs_only_where_it_is_needed(net: World) -> None:
    async def check(gate: Gate) -> None:
        gate.check(hosts("good.example.org"))
        await gate.detach("never heard of")
        assert ask(net.dirs, "ping") is None
        box = net.sandbox("one")
        await attach(gate, box, hosts("good.example.org"))
        assert await asyncio.to_thread(box.resolves, "good.example.org") == [GOOD]

    net.run(check)
    # One that nobody can reach any more makes place for another.
    pid = net.gate_pid()
    net.dirs.gate.unlink()
    until("the gate has ended", lambda: inside.start_time(pid) is None)


def test_a_gate_that_cannot_be_started_is_an_error(
    net: World, expect_log: Callable[[str], None]
) -> None:
    expect_log("gate: ended at its start")
    (net.dirs.run / "gate.log").mkdir()

    async def check(gate: Gate) -> None:
        box = net.sandbox("one")
        with pytest.raises(GateError, match="gate"):
            await attach(gate, box, hosts("good.example.org"))
        (net.dirs.run / "gate.log").rmdir()
        await attach(gate, box, hosts("good.example.org"))

    net.run(check)
