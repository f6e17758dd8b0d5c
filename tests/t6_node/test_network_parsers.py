"""The gate's parsers with what hostile sandboxes and name servers may send."""

from __future__ import annotations

import ipaddress
import ssl
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec_runtime.network import dns
from dsec_runtime.network.addresses import is_public, parse_address
from dsec_runtime.network.flow import first_words
from dsec_runtime.network.http import HostDenied, NotHttp, Requests
from dsec_runtime.network.lookups import MAX_ADDRESSES, Given
from dsec_runtime.network.names import host_name, pattern
from dsec_runtime.network.policy import Policy
from dsec_runtime.network.resolver import read_servers
from dsec_runtime.network.tls import NotTls, server_name

quick = settings(max_examples=200, deadline=None)
LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
NAME = st.lists(LABEL, min_size=2, max_size=4).map(lambda ls: ".".join([*ls, "org"]))


def hello(name: str | None) -> bytes:
    """What a real TLS client sends first."""
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


# -- addresses and names ---------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1",
        "127.255.0.1", "168.63.129.16", "169.254.169.254", "169.254.170.2", "172.16.0.1",
        "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.168.1.1", "198.18.0.1", "198.51.100.1",
        "203.0.113.9", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1",
        "::ffff:10.0.0.1", "::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::1",
        "100::1", "2001::1", "2001:db8::1", "2002:a00:1::1", "fc00::1", "fd00:ec2::254",
        "fe80::1", "fec0::1", "ff02::1", "3fff::1",
    ],
)
def test_addresses_that_are_never_public(text: str) -> None:
    address = parse_address(text)
    assert address is not None and not is_public(address)


@pytest.mark.parametrize("text", ["1.1.1.1", "100.63.0.1", "172.32.0.1", "2606:4700::1111"])
def test_public_addresses(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


def test_host_names() -> None:
    assert host_name("PyPI.org.") == "pypi.org"
    assert pattern("*.Exämple.org") == "*.xn--exmple-cua.org"
    for text in ("", ".", "a..b", "-a.org", "1.2.3.4", "a.1", "a b.org", "a/b", "é.org", "a" * 64,
                 ".".join(["a" * 60] * 5), "a.org..", "[::1]", "a\0b.org"):
        assert host_name(text) is None, text
    for text in ("*", "*.", "*.*.org", "a.*.org", "**.org"):
        assert pattern(text) is None, text


def test_a_policy_allows_what_it_names() -> None:
    policy = Policy.parse(
        {"internet": False, "hosts": {"a.org": [443], "*.b.org": [80]},
         "cidrs": [["1.2.3.0/24", [], "tcp"], ["2606::/16", [53], "udp"]]}
    )
    assert policy.allows_name("a.org", 443) and not policy.allows_name("a.org", 80)
    assert not policy.allows_name("x.a.org", 443) and not policy.allows_name("b.org", 80)
    assert policy.allows_name("x.y.b.org", 80) and policy.resolves("x.b.org")
    one, six = ipaddress.ip_address("1.2.3.4"), ipaddress.ip_address("2606::1")
    assert policy.allows_address(one, 9, "tcp") and not policy.allows_address(one, 9, "udp")
    assert policy.allows_address(six, 53, "udp") and not policy.allows_address(six, 54, "udp")
    for wire in ({}, {"internet": 1, "hosts": {}, "cidrs": []},
                 {"internet": False, "hosts": {"A.org": [1]}, "cidrs": []},
                 {"internet": False, "hosts": {"a.org": [0]}, "cidrs": []},
                 {"internet": False, "hosts": {}, "cidrs": [["x", [], "tcp"]]}):
        with pytest.raises((ValueError, KeyError, TypeError)):
            Policy.parse(wire)


def test_given_addresses_are_bounded_and_end() -> None:
    now = 0.0
    given_ = Given(lambda: now)
    for number in range(MAX_ADDRESSES + 10):
        given_.add(ipaddress.ip_address(number + (1 << 24)), f"n{number}.org")
    assert given_.names(ipaddress.ip_address(1 << 24)) == []
    last = ipaddress.ip_address((1 << 24) + MAX_ADDRESSES)
    assert given_.names(last) == [f"n{MAX_ADDRESSES}.org"]
    for number in range(100):
        given_.add(last, f"m{number}.org")
    assert len(given_.names(last)) == 16
    now = 1e9
    assert given_.names(last) == []


def test_servers_of_a_resolv_conf() -> None:
    text = "# x\nnameserver 1.1.1.1\nnameserver\nnameserver bad\nnameserver fe80::1%eth0\n"
    text += "options ndots:1\nnameserver ::1\n"
    assert [str(s) for s in read_servers(text)] == ["1.1.1.1", "::1"]


# -- DNS -------------------------------------------------------------------------------


@quick
@given(st.binary(max_size=600))
def test_dns_garbage(data: bytes) -> None:
    for parse in (dns.parse_question, lambda data: dns.parse_answer(data, 1, "a.org", dns.A)):
        try:
            parse(data)
        except dns.BadMessage:
            pass


@quick
@given(NAME, st.binary(max_size=200), st.integers(0, 300), st.integers(0, 255))
def test_damaged_dns_answers(name: str, tail: bytes, at: int, byte: int) -> None:
    question = dns.parse_question(dns.query(7, name, dns.A))
    assert question.name == name
    whole = dns.reply(question, dns.NOERROR, [ipaddress.ip_address("1.2.3.4")] * 3, 60)
    answer = dns.parse_answer(whole, 7, name, dns.A)
    assert [str(a) for a in answer.addresses] == ["1.2.3.4"] * 3 and answer.ttl == 60
    damaged = bytearray(whole + tail)
    damaged[at % len(damaged)] = byte
    try:
        dns.parse_answer(bytes(damaged), 7, name, dns.A)
    except dns.BadMessage:
        pass


def test_dns_names_that_lead_in_circles_or_look_like_others() -> None:
    head = struct.pack("!HHHHHH", 1, 0, 1, 0, 0, 0)
    for name in (b"\xc0\x0c", b"\x01a\xc0\x0c", b"\x40a", b"\x3f" + b"a" * 5, b"\x01a" * 200):
        with pytest.raises(dns.BadMessage):
            dns.parse_question(head + name + b"\0\0\1\0\1")
    dotted = dns.parse_question(head + b"\x05a.org\0" + b"\0\1\0\1")
    assert dotted.name != "a.org" and host_name(dotted.name) is None


def test_aliases_are_followed_and_strangers_ignored() -> None:
    def name(text: str) -> bytes:
        return b"".join(bytes([len(p)]) + p.encode() for p in text.split(".")) + b"\0"

    def record(owner: str, kind: int, data: bytes) -> bytes:
        return name(owner) + struct.pack("!HHIH", kind, 1, 30, len(data)) + data

    def answer(*records: bytes) -> dns.Answer:
        head = struct.pack("!HHHHHH", 5, 0x8180, 1, len(records), 0, 0)
        message = head + name("a.org") + struct.pack("!HH", dns.A, 1) + b"".join(records)
        return dns.parse_answer(message, 5, "a.org", dns.A)

    stranger = record("evil.org", dns.A, bytes([6, 6, 6, 6]))
    alias = record("a.org", dns.CNAME, name("b.org"))
    assert answer(stranger).addresses == ()
    found = answer(alias, stranger, record("b.org", dns.A, bytes([1, 2, 3, 4])))
    assert [str(a) for a in found.addresses] == ["1.2.3.4"]
    with pytest.raises(dns.BadMessage):
        answer(alias, record("b.org", dns.CNAME, name("a.org")))


def test_a_reply_fits() -> None:
    question = dns.parse_question(dns.query(7, "a.org", dns.A))
    many = [ipaddress.ip_address(n + (1 << 24)) for n in range(100)]
    reply = dns.reply(question, dns.NOERROR, many, 60, dns.MAX_UDP)
    assert 400 < len(reply) <= dns.MAX_UDP
    assert dns.parse_answer(reply, 7, "a.org", dns.A).addresses == tuple(many[:30])


# -- TLS -------------------------------------------------------------------------------


def records(data: bytes, size: int) -> bytes:
    """The same handshake message in records of that size."""
    body = data[5:]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"\x16\x03\x01" + struct.pack("!H", len(p)) + p for p in pieces)


def test_server_names_of_real_hellos() -> None:
    whole = hello("Good.Example.org")
    for at in range(len(whole)):
        assert server_name(whole[:at]) is None
    assert server_name(whole) == "good.example.org"
    assert server_name(records(whole, 100)) == "good.example.org"
    for bad in (hello(None), b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\0\0", records(whole, 1),
                b"\x15\x03\x01\0\x02\x01\0", hello("10.0.0.1")):
        with pytest.raises(NotTls):
            server_name(bad)


@quick
@given(st.binary(max_size=300), st.booleans())
def test_tls_garbage(data: bytes, framed: bool) -> None:
    if framed:
        body = b"\x01" + len(data).to_bytes(3, "big") + data
        data = b"\x16\x03\x01" + struct.pack("!H", len(body)) + body
    try:
        name = server_name(data)
    except NotTls:
        return
    assert name is None or host_name(name) == name


@quick
@given(st.integers(0, 2000), st.integers(0, 255), st.integers(0, 2000))
def test_damaged_hellos(at: int, byte: int, end: int) -> None:
    damaged = bytearray(_HELLO)
    damaged[at % len(damaged)] = byte
    try:
        name = server_name(bytes(damaged[: max(1, end)]))
    except NotTls:
        return
    assert name is None or host_name(name) == name


_HELLO = hello("good.example.org")


# -- HTTP ------------------------------------------------------------------------------

POST = b"POST / HTTP/1.1\r\nHost: good.org\r\n"
CHUNKED = b"PUT / HTTP/1.1\r\nHost: good.org\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: good.org\r\n\r\n"


def requests() -> Requests:
    return Requests(lambda host: host == "good.org")


@pytest.mark.parametrize(
    "stream",
    [
        GET * 3,
        b"POST / HTTP/1.1\r\nhost: GOOD.org.:80\r\nContent-Length: 5\r\n\r\nhello" + GET,
        b"PUT / HTTP/1.1\r\nHost: good.org\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;x=y\r\nhello\r\n0\r\nTrailer: 1\r\n\r\n" + GET,
        b"GET http://good.org/ HTTP/1.1\r\nHost: good.org\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: good.org\r\n\r\n",
        b"GET / HTTP/1.0\r\nHost: good.org\r\n\r\n",
    ],
)
def test_requests_pass_byte_for_byte_however_they_come(stream: bytes) -> None:
    assert requests().feed(stream) == stream
    one = requests()
    assert b"".join(one.feed(stream[at : at + 1]) for at in range(len(stream))) == stream


EVIL = b"GET /evil HTTP/1.1\r\nHost: evil.org\r\n\r\n"


@pytest.mark.parametrize(
    "stream",
    [
        EVIL,
        GET + EVIL,
        POST + b"Content-Length: 0\r\n\r\n" + EVIL,
        POST + b"Content-Length: 99\r\nContent-Length: 0\r\n\r\n" + EVIL,
        POST + b"Content-Length: 99\r\nTransfer-Encoding: chunked\r\n"
        b"\r\n0\r\n\r\n" + EVIL,
        POST + b"Transfer-Encoding: xchunked\r\n\r\n" + EVIL,
        POST + b"Transfer-Encoding : chunked\r\n\r\n" + EVIL,
        POST + b"Content-Length: +5\r\n\r\n" + EVIL,
        POST + b"X: a\r\n folded: b\r\n\r\n" + EVIL,
        b"POST / HTTP/1.1\r\nHost: good.org\nHost: evil.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.org\r\nHost: evil.org\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.org@good.org\r\n\r\n",
        b"GET http://evil.org/ HTTP/1.1\r\nHost: good.org\r\n\r\n",
        b"GET http://good.org@evil.org/ HTTP/1.1\r\nHost: good.org\r\n\r\n",
        b"GET https://good.org/ HTTP/1.1\r\nHost: good.org\r\n\r\n",
        b"CONNECT evil.org:443 HTTP/1.1\r\nHost: good.org\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\n\nHost: good.org\n\n",
        b"\r\n" + GET,
        b" GET / HTTP/1.1\r\nHost: good.org\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.org\r\nUpgrade: h2c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.org\r\nX: \0\r\n\r\n",
        CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
        CHUNKED + b"zz\r\n",
        b"GET / HTTP/1.1\r\nHost: good.org\r\nX: " + b"a" * 70000,
        GET + b"GET / HTTP/1.1\r\nHost: good.org\r\nUpgrade: websocket\r\n\r\n",
    ],
)
def test_requests_that_are_cut(stream: bytes) -> None:
    for step in (len(stream), 7):
        one, passed = requests(), b""
        with pytest.raises((NotHttp, HostDenied)):
            for at in range(0, len(stream), step):
                passed += one.feed(stream[at : at + step])
        assert b"/evil" not in passed


def test_nothing_passes_while_an_upgrade_is_open() -> None:
    ask = b"GET / HTTP/1.1\r\nHost: good.org\r\nUpgrade: websocket\r\n\r\n"
    one = requests()
    assert one.feed(ask + EVIL) == ask and one.upgrading
    with pytest.raises(HostDenied):
        one.upgraded(False)
    one = requests()
    assert one.feed(ask) == ask and one.upgraded(True) == b""
    assert one.feed(b"\0raw") == b"\0raw"


@quick
@given(st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([GET, EVIL, b"\r\n", b"Host: "])),
                max_size=12))
def test_http_garbage(pieces: list[bytes]) -> None:
    """What passes is a prefix of what came, and names no other host."""
    one, passed = requests(), b""
    try:
        for piece in pieces:
            passed += one.feed(piece)
    except (NotHttp, HostDenied):
        pass
    assert b"".join(pieces).startswith(passed)
    assert one.hosts <= {"good.org"}
    assert EVIL not in passed


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x16\x03", "tls"), (b"GET / HTTP/1.1", "http"), (b"\r\n\r\nget\t/\thttp/1.1", "http"),
        (b"GET /\xc3\xa9", ""), (b"GE", ""), (b"\r\n", ""), (b"G /\x0b", ""), (b"", ""),
        (b"PING\r\n", "other"), (b"\0\0\0\x08", "other"), (b"tt\0", "other"), (b"*1\r\n", "other"),
        (b"PRI * HTTP/2.0\r\n", "http"), (b"GET /\xc3\xa9 HTTP/1.1", "http"),
    ],
)
def test_first_words(data: bytes, kind: str) -> None:
    assert first_words(data) == kind
