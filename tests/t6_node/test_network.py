"""The gate with real namespaces, servers and name server: what is reachable, and what never is."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_runtime.edge.model import Network
from dsec_runtime.errors import BadNetwork, GateError, SandboxLost
from dsec_runtime.network import dns, inside
from dsec_runtime.network.client import Denial, Gate
from tests.t6_node.networld import (
    BANNER,
    ECHO,
    GOOD,
    GOOD_6,
    HOST,
    HOST_PUBLIC,
    OTHER,
    PRIVATE,
    THIRD,
    UDP_ECHO,
    Sandbox,
    World,
    read_all,
    world,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]


def why_not() -> str:
    for program in ("nft", "ip", "unshare", "openssl"):
        if shutil.which(program) is None:
            return f"no {program}"
    return ""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("certificate")
    key, found = place / "key.pem", place / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", str(key), "-out", str(found), "-subj", "/CN=test", "-days", "2"],
        check=True, stderr=subprocess.DEVNULL, timeout=30,
    )
    found.write_bytes(found.read_bytes() + key.read_bytes())
    return found


@pytest.fixture
def net(tmp_path: Path, certificate: Path) -> Iterator[World]:
    if reason := why_not():
        pytest.skip(reason)
    with world(tmp_path, certificate) as made:
        made.names("good.example.org", GOOD)
        made.names("other.example.net", OTHER)
        made.names("a.wild.example.org", GOOD)
        yield made


def hosts(*names: str, ports: tuple[int, ...] = ()) -> Network:
    return Network.model_validate({"allow": [{"host": n, "ports": ports} for n in names]})


def cidr(text: str, protocol: str = "tcp", ports: tuple[int, ...] = ()) -> Network:
    rule = {"cidr": text, "protocol": protocol, "ports": ports}
    return Network.model_validate({"allow": [rule]})


def is_cut(sandbox: Sandbox, address: str, port: int, said: bytes = b"x") -> bool:
    """Whether a connection ends with a reset, whatever the client says."""
    try:
        with sandbox.connect(address, port) as sock:
            sock.sendall(said)
            return read_all(sock) == b""
    except (ConnectionResetError, BrokenPipeError, ConnectionRefusedError):
        return True


async def attach(gate: Gate, sandbox: Sandbox, network: Network) -> None:
    await gate.attach(sandbox.name, sandbox.pid, sandbox.started, network)


async def next_denial(gate: Gate) -> Denial:
    return await asyncio.wait_for(anext(aiter(gate.follow_denials())), 20)


def test_only_the_allowed_host_is_reached(net: World) -> None:
    box = net.sandbox("one")

    def look() -> None:
        assert box.resolves("good.example.org") == [GOOD]
        assert box.ask("good.example.org", server="8.8.8.8").addresses
        assert [str(a) for a in box.ask_tcp("good.example.org").addresses] == [GOOD]
        assert box.http(GOOD, "good.example.org").endswith(f"you reached {GOOD}".encode())
        assert box.tls(GOOD, "good.example.org") == b"you reached TLS"
        found = box.ask("other.example.net")
        assert (found.code, found.addresses) == (dns.NXDOMAIN, ())
        assert is_cut(box, OTHER, 80, b"GET / HTTP/1.1\r\nHost: good.example.org\r\n\r\n")
        assert is_cut(box, GOOD, ECHO)

    async def check(gate: Gate) -> None:
        await attach(gate, box, hosts("good.example.org"))
        await asyncio.to_thread(look)
        told = [await next_denial(gate) for _ in range(3)]
        assert [d.message() for d in told] == [
            'network denied other.example.net:443; '
            'allow with network={"allow": [{"host": "other.example.net"}]}',
            f'network denied {OTHER}:80; allow with network={{"allow": [{{"cidr": "{OTHER}"}}]}}',
            f'network denied good.example.org:{ECHO}; allow with '
            f'network={{"allow": [{{"host": "good.example.org", "ports": [{ECHO}]}}]}}',
        ]
        assert gate.denied("one") == 3

    net.run(check)
    assert "other.example.net" not in net.questions
    assert {address for address, _, _ in net.seen} == {GOOD}


def test_a_sandbox_without_rules_has_no_way(net: World) -> None:
    box = net.sandbox("none")
    with pytest.raises(OSError) as found:
        box.connect(GOOD, 80)
    assert found.value.errno == 101  # ENETUNREACH


def test_wildcards_and_services(net: World) -> None:
    box = net.sandbox("one")
    net.names("pypi.org", GOOD)

    def look() -> None:
        assert box.resolves("a.wild.example.org") == [GOOD]
        assert box.tls(GOOD, "a.wild.example.org") == b"you reached TLS"
        assert box.ask("wild.example.org").code == dns.NXDOMAIN
        assert box.ask("awild.example.org").code == dns.NXDOMAIN
        assert box.ask("pypi.org").code == dns.NXDOMAIN

    async def check(gate: Gate) -> None:
        await attach(gate, box, hosts("*.wild.example.org"))
        await asyncio.to_thread(look)
        told = [await next_denial(gate) for _ in range(3)]
        assert told[2].message() == 'network denied pypi.org:443; allow with network={"pypi": true}'
        await gate.update("one", Network.model_validate({"pypi": True}))
        assert await asyncio.to_thread(box.resolves, "pypi.org") == [GOOD]
        assert await asyncio.to_thread(box.tls, GOOD, "pypi.org") == b"you reached TLS"

    net.run(check)


def test_another_name_at_the_same_address_is_denied(net: World) -> None:
    box = net.sandbox("one")

    def look() -> None:
        assert box.resolves("good.example.org") == [GOOD]
        for name in ("evil.example.com", None):
            with pytest.raises(OSError):
                box.tls(GOOD, name)
        assert is_cut(box, GOOD, 80, b"GET / HTTP/1.1\r\nHost: evil.example.com\r\n\r\n")
        assert is_cut(box, GOOD, 80, b"SSH-2.0-x\r\n\r\n")
        assert is_cut(box, GOOD, 443, b"GET / HTTP/1.1\r\nHost: good.example.org\r\n\r\n")
        # The second request of a connection, and one that hides behind a body.
        with box.connect(GOOD, 80) as sock:
            sock.sendall(b"POST / HTTP/1.1\r\nHost: good.example.org\r\nContent-Length: 0\r\n\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
            sock.sendall(b"GET /second HTTP/1.1\r\nHost: evil.example.com\r\n\r\n")
            with pytest.raises(ConnectionResetError):
                read_all(sock)
        # What happens on other ports: TLS and HTTP are looked at there, too.
        with pytest.raises(OSError):
            box.tls(GOOD, "evil.example.com", port=8443)
        assert box.tls(GOOD, "good.example.org", port=8443) == b"you reached TLS"
        assert is_cut(box, GOOD, 8080, b"\r\nGET / HTTP/1.1\r\nHost: evil.example.com\r\n\r\n")
        assert b"you reached" in box.http(GOOD, "good.example.org", port=8080)

    async def check(gate: Gate) -> None:
        await attach(gate, box, hosts("good.example.org", ports=(80, 443, 8080, 8443)))
        await asyncio.to_thread(look)
        assert (await next_denial(gate)).host == "evil.example.com"

    net.run(check)
    assert not any(b"evil" in data or b"second" in data for _, _, data in net.seen)


def test_servers_that_speak_first_and_half_closed_connections(net: World) -> None:
    box = net.sandbox("one")

    def look() -> None:
        assert box.resolves("good.example.org") == [GOOD]
        with box.connect(GOOD, BANNER) as sock:
            assert sock.recv(100) == b"SSH-2.0-test\r\n"
            sock.sendall(b"hello")
            assert sock.recv(5) == b"hello"
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock) == b"bye"
        with box.connect(GOOD, ECHO) as sock:
            data = bytes(range(256)) * 4096
            sock.sendall(data[:1])
            got = sock.recv(1)
            import threading

            def send() -> None:
                sock.sendall(data[1:])
                sock.shutdown(socket.SHUT_WR)

            sender = threading.Thread(target=send)
            sender.start()
            got += read_all(sock)
            sender.join()
            assert got == data + b"bye"

    async def check(gate: Gate) -> None:
        await attach(gate, box, hosts("good.example.org", ports=(BANNER, ECHO)))
        await asyncio.to_thread(look)

    net.run(check)


def test_websockets_pass_and_false_ones_do_not(net: World) -> None:
    box = net.sandbox("one")
    upgrade = b"GET / HTTP/1.1\r\nHost: %b\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n"

    def look() -> None:
        assert box.resolves("good.example.org") == [GOOD]
        with box.connect(GOOD, 80) as sock:
            sock.sendall(upgrade % (b"good.example.org", b"websocket"))
            assert sock.recv(1000).startswith(b"HTTP/1.1 101")
            sock.sendall(b"\x81\x00frame")
            assert sock.recv(100) == b"ws \x81\x00frame"
        assert is_cut(box, GOOD, 80, upgrade % (b"good.example.org", b"h2c"))
        # This server takes no lower-case name: it answers 200, and the next request is looked at.
        with box.connect(GOOD, 80) as sock:
            sock.sendall(
                (upgrade % (b"good.example.org", b"websocket")).replace(b"Upgrade:", b"upgrade:")
            )
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
            sock.sendall(b"GET /hidden HTTP/1.1\r\nHost: evil.example.com\r\n\r\n")
            with pytest.raises(ConnectionResetError):
                read_all(sock)

    async def check(gate: Gate) -> None:
        await attach(gate, box, hosts("good.example.org"))
        await asyncio.to_thread(look)

    net.run(check)
    assert not any(b"hidden" in data for _, _, data in net.seen)


def test_private_local_and_metadata_addresses_are_never_reached(net: World) -> None:
    box = net.sandbox("one")
    for number, address in enumerate((*PRIVATE, HOST, HOST_PUBLIC, "127.0.0.1", "0.0.0.0")):
        net.names(f"n{number}.rebind.example.org", address)
    net.names("n8.rebind.example.org", "::ffff:10.9.9.9")
    net.names("n9.rebind.example.org", "64:ff9b::a09:909")
    net.names("mixed.rebind.example.org", PRIVATE[0], GOOD)

    def look() -> None:
        for number in range(10):
            name = f"n{number}.rebind.example.org"
            for kind in (dns.A, dns.AAAA):
                assert box.ask(name, kind).addresses == ()
        assert box.resolves("mixed.rebind.example.org") == [GOOD]
        for address in (*PRIVATE, HOST, HOST_PUBLIC):
            assert is_cut(box, address, 80, b"GET / HTTP/1.1\r\nHost: x.y\r\n\r\n")
            assert is_cut(box, f"::ffff:{address}", 80, b"GET / HTTP/1.1\r\nHost: x.y\r\n\r\n")
        for address in ("fd99::1", "64:ff9b::a09:909", "2002:a09:909::1"):
            assert is_cut(box, address, 80)

    async def check(gate: Gate) -> None:
        everything = Network.model_validate({
            "internet": True,
            "allow": [{"cidr": "0.0.0.0/0"}, {"cidr": "::/0"}, {"host": "*.example.org"}],
        })
        await attach(gate, box, everything)
        await asyncio.to_thread(look)
        assert gate.denied("one") > 0

    net.run(check)
    assert net.seen == []


def test_everything_public(net: World) -> None:
    box = net.sandbox("one")
    net.names("six.example.org", GOOD_6)

    def look() -> None:
        assert b"you reached" in box.http(OTHER, "any.example.org")
        assert box.tls(THIRD, None) == b"you reached TLS"
        assert [str(a) for a in box.ask("six.example.org", dns.AAAA).addresses] == [GOOD_6]
        assert GOOD_6.encode() in box.http(GOOD_6, "six.example.org")
        with box.socket(socket.SOCK_DGRAM) as sock:
            sock.sendto(b"hi", (GOOD, UDP_ECHO))
            assert sock.recvfrom(100) == (b"echo hi", (GOOD, UDP_ECHO))

    async def check(gate: Gate) -> None:
        await attach(gate, box, Network(internet=True))
        await asyncio.to_thread(look)

    net.run(check)


def test_ranges_ports_and_udp(net: World) -> None:
    box = net.sandbox("one")

    def allowed() -> None:
        with box.connect(GOOD, ECHO) as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
        assert is_cut(box, GOOD, 80, b"GET / HTTP/1.1\r\nHost: a.b\r\n\r\n")
        assert is_cut(box, THIRD, ECHO)
        with box.socket(socket.SOCK_DGRAM) as sock:
            sock.settimeout(0.5)
            sock.sendto(b"lost", (GOOD, UDP_ECHO))
            with pytest.raises(TimeoutError):
                sock.recv(100)

    def datagrams() -> None:
        with box.socket(socket.SOCK_DGRAM) as sock:
            for number in range(20):
                sock.sendto(b"%d" % number, (GOOD, UDP_ECHO))
                assert sock.recvfrom(100) == (b"echo %d" % number, (GOOD, UDP_ECHO))

    async def check(gate: Gate) -> None:
        await attach(gate, box, cidr("93.184.216.0/24", ports=(ECHO,)))
        await asyncio.to_thread(allowed)
        denied = gate.denied("one")
        assert denied >= 2
        await gate.update("one", cidr(f"{GOOD}/32", "udp"))
        await asyncio.to_thread(datagrams)
        assert await gate.update("one", Network()) >= 1

    net.run(check)


def test_an_update_cuts_what_it_does_not_allow(net: World) -> None:
    box = net.sandbox("one")
    net.names("stays.example.org", OTHER)

    async def check(gate: Gate) -> None:
        await attach(gate, box, hosts("good.example.org", "stays.example.org", ports=(ECHO,)))
        for name in ("good.example.org", "stays.example.org"):
            assert await asyncio.to_thread(box.resolves, name)
        gone = await asyncio.to_thread(box.connect, GOOD, ECHO)
        stays = await asyncio.to_thread(box.connect, OTHER, ECHO)
        for sock in (gone, stays):
            await asyncio.to_thread(sock.sendall, b"\0")
            assert await asyncio.to_thread(sock.recv, 1) == b"\0"
        assert await gate.update("one", hosts("stays.example.org", ports=(ECHO,))) == 1
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(gone.recv, 1)
        await asyncio.to_thread(stays.sendall, b"y")
        assert await asyncio.to_thread(stays.recv, 1) == b"y"
        assert (await asyncio.to_thread(box.ask, "good.example.org")).code == dns.NXDOMAIN
        assert await asyncio.to_thread(is_cut, box, GOOD, ECHO)

    net.run(check)


def test_sandboxes_do_not_share_rights(net: World) -> None:
    one, two = net.sandbox("one"), net.sandbox("two")

    def look() -> None:
        assert one.resolves("good.example.org") == [GOOD]
        assert two.resolves("good.example.org") == []
        assert two.resolves("other.example.net") == [OTHER]
        assert is_cut(two, GOOD, 80, b"GET / HTTP/1.1\r\nHost: good.example.org\r\n\r\n")
        assert is_cut(one, OTHER, 80, b"GET / HTTP/1.1\r\nHost: other.example.net\r\n\r\n")
        # They have the same address: none can get to the other one.
        with one.socket() as server:
            server.bind(("0.0.0.0", 9000))
            server.listen()
            with pytest.raises(ConnectionRefusedError):
                two.connect(inside.OWN, 9000)
            one.connect(inside.OWN, 9000).close()

    async def check(gate: Gate) -> None:
        await attach(gate, one, hosts("good.example.org"))
        await attach(gate, two, hosts("other.example.net"))
        await asyncio.to_thread(look)
        with pytest.raises(GateError, match="namespace of sandbox one"):
            await gate.attach("three", one.pid, one.started, hosts("other.example.net"))
        with pytest.raises(SandboxLost):
            await gate.attach("three", two.pid, two.started + 1, hosts("other.example.net"))
        with pytest.raises(GateError, match="of its own"):
            pid = net.gate_pid()
            started = inside.start_time(pid)
            assert started is not None
            await gate.attach("three", pid, started, hosts("other.example.net"))

    net.run(check)


def test_what_the_sandbox_owns_does_not_help_it(net: World) -> None:
    """It is root in its namespace: without rules and routes it is cut off, and an address of its
    own choice for the gate's listener is judged like any other."""
    box = net.sandbox("one")

    def look() -> None:
        nsenter = ["nsenter", "-t", str(box.pid), "-U", "-n", "--preserve-credentials"]
        assert is_cut(box, inside.RESOLVER, 1)  # the listener itself
        subprocess.run([*nsenter, "nft", "flush", "ruleset"], check=True, timeout=20)
        with pytest.raises(ConnectionRefusedError):
            box.connect(GOOD, 80)
        ip = [*nsenter, "ip"]
        subprocess.run([*ip, "addr", "add", "10.9.9.9/32", "dev", "lo"], check=True, timeout=20)
        subprocess.run([*ip, "route", "flush", "table", "local"], check=True, timeout=20)

    async def check(gate: Gate) -> None:
        await attach(gate, box, hosts("good.example.org"))
        await asyncio.to_thread(look)
        await gate.update("one", hosts("good.example.org", "other.example.net"))

    net.run(check)
    assert net.seen == []


def test_rules_are_checked(net: World, tmp_path: Path) -> None:
    file = tmp_path / "services.toml"
    file.write_text('[mine]\nhosts = ["*.mirror.example.org"]\nports = [8443]\n')

    async def check(gate: Gate) -> None:
        gate.check(Network.model_validate({"mine": True, "npm": True}))
        for rule, field, text in (
            ({"service": "npmm"}, "service", "did you mean npm"),
            ({"host": "not a host"}, "host", "no host name"),
            ({"host": "*"}, "host", "internet: true"),
            ({"host": "10.0.0.1"}, "host", "as cidr"),
            ({"host": "a..b"}, "host", "no host name"),
            ({"host": "x.org", "protocol": "udp"}, "protocol", "udp"),
            ({"cidr": "1.2.3.4/99"}, "cidr", "no range"),
            ({"cidr": "1.2.3.4/8"}, "cidr", "no range"),
            ({"cidr": "10.0.0.0/8"}, "cidr", "never"),
            ({"cidr": "169.254.169.254"}, "cidr", "never"),
            ({"cidr": "fd00::/8"}, "cidr", "never"),
            ({"cidr": "::ffff:1.2.3.4"}, "cidr", "IPv4"),
        ):
            network = Network.model_validate({"allow": [{"host": "ok.org"}, rule]})
            with pytest.raises(BadNetwork) as found:
                gate.check(network)
            assert found.value.field == f"network.allow.1.{field}"
            assert text in str(found.value)

    net.run(check, network_services=str(file))
