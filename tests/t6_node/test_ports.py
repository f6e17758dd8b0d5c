"""HTTP into a network namespace through the edge's API, with kind and hostile servers in there."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from dsec_runtime.ports import dial, forward
from dsec_runtime.ports.headers import Way, inward, is_token, outward
from dsecfs.errors import Busy
from dsecfs.kernel.syscalls import pidfd_open
from tests.t6_node.portbox import ID, Front, Inside, front, servers, until
from tests.t6_node.portserver import (
    ADDRESS,
    ENDLESS,
    FULL,
    HTTP,
    OTHER_ADDRESS,
    RAW,
    RAW_ANSWERS,
    V6_ONLY,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

TOKEN = "a token of the edge"


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with servers() as made:
        yield made


@pytest.fixture
def lone() -> Iterator[Inside]:
    """One that may be killed."""
    with servers() as made:
        yield made


def check(inside: Inside, work: Callable[[Front], Any], **more: Any) -> None:
    async def run() -> None:
        async with front(inside, **more) as made:
            await work(made)

    asyncio.run(run())


def seen(answer: httpx.Response) -> tuple[dict[str, Any], dict[str, str]]:
    """What the server got, and its headers by name."""
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found, dict(found["headers"])


# -- what passes ---------------------------------------------------------------------------


def test_a_request_arrives_as_it_was_sent(inside: Inside) -> None:
    async def work(f: Front) -> None:
        body = os.urandom(300_000)
        found, headers = seen(
            await f.client.put(
                f.url(HTTP, "/a%2Fb//c/%C3%A4?x=1&y=%20%2F&x=2"),
                content=body,
                headers={"x-mine": "1", "cookie": "own=1", "user-agent": "me"},
            )
        )
        assert found["method"] == "PUT"
        assert (found["path"], found["query"]) == ("/a%2Fb//c/%C3%A4", "x=1&y=%20%2F&x=2")
        assert (found["length"], found["sha256"]) == (len(body), hashlib.sha256(body).hexdigest())
        assert headers["host"] == f"localhost:{HTTP}"
        assert headers["x-forwarded-host"] == f"127.0.0.1:{f.port}"
        assert headers["x-forwarded-for"] == "127.0.0.1"
        assert headers["x-forwarded-proto"] == "http"
        assert headers["x-forwarded-prefix"] == f"/v1/sandboxes/{ID}/ports/{HTTP}"
        assert (headers["x-mine"], headers["cookie"], headers["user-agent"]) == ("1", "own=1", "me")
        assert headers["content-length"] == str(len(body))
        assert headers["connection"] == "close"

    check(inside, work)


@pytest.mark.parametrize(
    "method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS", "PATCH", "PROPFIND", "MKCOL", "TRACE"]
)
def test_methods(inside: Inside, method: str) -> None:
    async def work(f: Front) -> None:
        answer = await f.client.request(method, f.url(HTTP, "/x"))
        assert answer.status_code == 200
        if method == "HEAD":
            assert answer.content == b"" and int(answer.headers["content-length"]) > 0
        else:
            assert answer.json()["method"] == method

    check(inside, work)


def test_a_missing_slash_is_a_redirect_to_the_page(inside: Inside) -> None:
    async def work(f: Front) -> None:
        answer = await f.client.get(f.url(HTTP, ""))
        assert answer.status_code == 307
        assert answer.headers["location"].endswith(f"/ports/{HTTP}/")

    check(inside, work)


@pytest.mark.parametrize("status", [204, 304, 201, 404, 500, 599])
def test_statuses(inside: Inside, status: int) -> None:
    async def work(f: Front) -> None:
        answer = await f.client.get(f.url(HTTP, f"/status?{status}"))
        assert (answer.status_code, answer.content) == (status, b"")
        assert answer.headers["etag"] == '"x"'

    check(inside, work)


def test_bodies_of_unknown_length_stream_both_ways_at_once(inside: Inside) -> None:
    """Each piece is answered before the next is sent, so nothing waits for a whole body."""

    async def work(f: Front) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", f.port)
        head = f"POST {f.url(HTTP, '/chat')} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n")
        for number in range(20):
            piece = b"piece %02d;" % number
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await asyncio.wait_for(reader.readuntil(piece), 10)
        writer.write(b"0\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"0\r\n\r\n")
        writer.close()

    check(inside, work)


def test_a_large_upload_and_a_large_answer(inside: Inside) -> None:
    async def work(f: Front) -> None:
        size = 48 << 20

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(size >> 18):
                yield bytes(1 << 18)

        found, headers = seen(await f.client.post(f.url(HTTP, "/up"), content=parts()))
        assert found["length"] == size and headers["transfer-encoding"] == "chunked"
        taken = 0
        async with f.client.stream("GET", f.url(HTTP, f"/big?{size}")) as answer:
            assert answer.headers["content-length"] == str(size)
            async for part in answer.aiter_bytes():
                taken += len(part)
        assert taken == size

    check(inside, work)


def test_a_client_that_reads_slowly_makes_the_server_wait(inside: Inside) -> None:
    async def work(f: Front) -> None:
        before = _resident()
        async with f.client.stream("GET", f.url(RAW, "/endless-body")) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            await asyncio.sleep(1.5)
            await anext(pieces)
            assert _resident() - before < 32 << 20

    check(inside, work)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_answer_before_the_end_of_the_upload(inside: Inside) -> None:
    async def work(f: Front) -> None:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(400):
                yield bytes(1 << 16)
                await asyncio.sleep(0)

        with contextlib.suppress(httpx.WriteError):
            answer = await f.client.post(f.url(HTTP, "/early"), content=parts())
            assert (answer.status_code, answer.text) == (413, "too much")

    check(inside, work)


def test_redirects_and_cookies_are_passed_on(inside: Inside) -> None:
    async def work(f: Front) -> None:
        answer = await f.client.get(f.url(HTTP, "/moved"))
        assert answer.status_code == 302
        assert answer.headers["location"] == "http://localhost:80/echo"
        assert answer.headers["set-cookie"] == "a=b"

    check(inside, work)


def test_many_at_once(inside: Inside) -> None:
    async def work(f: Front) -> None:
        async def one(number: int) -> None:
            found, _ = seen(await f.client.get(f.url(HTTP, f"/n{number}")))
            assert found["path"] == f"/n{number}"

        await asyncio.gather(*(one(n) for n in range(100)))
        assert f.edge.places <= 100 and f.edge.users == 0
        before = f.edge.places
        await one(0)
        assert f.edge.places == before

    check(inside, work)


def test_a_name_of_the_sandbox_serves_too(inside: Inside) -> None:
    async def work(f: Front) -> None:
        seen(await f.client.get(f"/v1/sandboxes/name/ports/{HTTP}/x"))
        answer = await f.client.get(f"/v1/sandboxes/nobody/ports/{HTTP}/x")
        assert (answer.status_code, answer.json()["type"]) == (404, "NoSuchSandbox")

    check(inside, work)


# -- tokens --------------------------------------------------------------------------------


def test_the_edges_token_stays_outside_and_others_go_in(inside: Inside) -> None:
    async def work(f: Front) -> None:
        mine = ("authorization", f"Bearer {TOKEN}")
        answer = await f.client.get(f.url(HTTP, "/x"))
        assert answer.status_code == 401
        found, headers = seen(await f.client.get(f.url(HTTP, "/x"), headers=[mine]))
        assert "authorization" not in headers and TOKEN not in json.dumps(found)
        odd = ("authorization", f"bEARER   {TOKEN}")
        found, _ = seen(await f.client.get(f.url(HTTP, "/x"), headers=[odd]))
        assert TOKEN not in json.dumps(found)
        both = [("authorization", "Bearer the server's"), mine]
        _, headers = seen(await f.client.get(f.url(HTTP, "/x"), headers=both))
        assert headers["authorization"] == "Bearer the server's"

    check(inside, work, token=TOKEN)


def test_without_a_token_every_authorization_is_the_servers(inside: Inside) -> None:
    async def work(f: Front) -> None:
        _, headers = seen(
            await f.client.get(f.url(HTTP, "/x"), headers={"authorization": "Bearer x"})
        )
        assert headers["authorization"] == "Bearer x"

    check(inside, work)


# -- whom it reaches -----------------------------------------------------------------------


def test_listeners_on_other_addresses(inside: Inside) -> None:
    async def work(f: Front) -> None:
        for port in (V6_ONLY, OTHER_ADDRESS):
            answer = await f.client.get(f.url(port, "/until-end"))
            assert (answer.status_code, answer.text) == (200, "to the end")

    check(inside, work)


def test_nothing_listens(inside: Inside) -> None:
    async def work(f: Front) -> None:
        with socket.create_server(("127.0.0.1", 0)) as outside:
            # The node's own listener is not the sandbox's.
            for port in (9, outside.getsockname()[1]):
                answer = await f.client.get(f.url(port))
                problem = answer.json()
                assert (answer.status_code, problem["type"]) == (502, "PortClosed")
                assert problem["hint"] and problem["recoverable"] and problem["sandbox_usable"]

    check(inside, work)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "99999999999999999999", "http", "1e3"])
def test_no_port(inside: Inside, port: str) -> None:
    async def work(f: Front) -> None:
        answer = await f.client.get(f"/v1/sandboxes/{ID}/ports/{port}/")
        assert (answer.status_code, answer.json()["field"]) == (422, "port")

    check(inside, work)


def test_a_path_that_hides_where_the_port_is(inside: Inside) -> None:
    async def work(f: Front) -> None:
        answer = await f.client.get(f"/v1%2Fsandboxes/{ID}/ports/{HTTP}/a/b")
        assert (answer.status_code, answer.json()["type"]) == (422, "BadInput")

    check(inside, work)


def test_a_server_that_accepts_nothing(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "CONNECT_S", 0.5)

    async def work(f: Front) -> None:
        answer = await f.client.get(f.url(FULL))
        assert (answer.status_code, answer.json()["type"]) == (504, "DeadlineExceeded")

    check(inside, work)


def test_another_process_under_the_same_id_is_not_entered(inside: Inside) -> None:
    async def work(f: Front) -> None:
        answer = await f.client.get(f.url(HTTP))
        assert (answer.status_code, answer.json()["type"]) == (410, "SandboxLost")

    check(inside, work, place=lambda: (inside.pid, inside.started + 1))
    check(inside, work, place=lambda: (2**22 - 3, 5))


def test_the_nodes_own_network_is_refused(inside: Inside) -> None:
    async def work(f: Front) -> None:
        answer = await f.client.get(f.url(HTTP))
        assert (answer.status_code, answer.json()["type"]) == (501, "Unsupported")

    check(inside, work, place=lambda: (os.getpid(), dial.start_time(os.getpid())))


def test_the_edge_stays_where_it_is(inside: Inside) -> None:
    """Threads that entered a namespace are gone; no descriptor of one is kept."""

    def work_of(f: Front) -> set[str]:
        return {os.readlink(f"/proc/self/task/{t}/ns/net") for t in os.listdir("/proc/self/task")}

    async def work(f: Front) -> None:
        for _ in range(20):
            await f.client.get(f.url(HTTP, "/x"))
        await until(lambda: work_of(f) == {os.readlink("/proc/self/ns/net")})
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        assert not [link for link in links if link.startswith("net:")]

    check(inside, work)


def test_what_is_remembered_is_bounded(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "MAX_KEPT", 3)

    async def run() -> None:
        dialler = dial.Dialler()
        asked: list[int] = []

        async def locate() -> tuple[int, int]:
            asked.append(1)
            return inside.pid, inside.started

        before = len(os.listdir("/proc/self/fd"))
        for number in range(10):
            async with dialler.connection(f"sandbox{number}", HTTP, locate):
                pass
        assert len(asked) == 10
        assert len(os.listdir("/proc/self/fd")) <= before + 3
        async with dialler.connection("sandbox9", HTTP, locate):
            pass
        assert len(asked) == 10
        monkeypatch.setattr(dial, "MAX_OPEN", 1)
        async with dialler.connection("sandbox9", HTTP, locate):
            with pytest.raises(Busy):
                async with dialler.connection("sandbox9", HTTP, locate):
                    pass
        dialler.close()

    asyncio.run(run())


def test_a_connection_to_itself_is_none(inside: Inside) -> None:
    """Without a listener, a client that happens to have the port it calls connects to itself."""

    async def run() -> None:
        dialler = dial.Dialler()

        async def locate() -> tuple[int, int]:
            return inside.pid, inside.started

        known = await dialler._find("sandbox", locate)
        port = 40001

        def bound(address: str) -> socket.socket:
            sock = socket.socket()
            sock.setblocking(False)
            sock.bind((address, port))
            return sock

        made = dial._socket
        try:
            dial._socket = bound
            assert await dialler._try(known, "127.0.0.1", port) is None
        finally:
            dial._socket = made
        dialler.close()

    asyncio.run(run())


# -- the end of either side ----------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "?begin"])
def test_a_client_that_goes_away_ends_the_connection_inside(inside: Inside, query: str) -> None:
    async def work(f: Front) -> None:
        async def counts() -> list[int]:
            found: list[int] = (await f.client.get(f.url(HTTP, "/waited"))).json()
            return found

        _, before = await counts()
        reader, writer = await asyncio.open_connection("127.0.0.1", f.port)
        path = f.url(HTTP, "/wait" + query)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        if query:
            await asyncio.wait_for(reader.readuntil(b"begun"), 10)
        for _ in range(100):
            if (await counts())[0]:
                break
            await asyncio.sleep(0.05)
        assert f.edge.users == 1
        writer.close()
        for _ in range(100):
            if await counts() == [0, before + 1]:
                break
            await asyncio.sleep(0.05)
        assert await counts() == [0, before + 1]
        await until(lambda: f.edge.users == 0)

    check(inside, work)


def test_a_sandbox_that_ends(lone: Inside) -> None:
    async def work(f: Front) -> None:
        seen(await f.client.get(f.url(HTTP, "/x")))
        silent = asyncio.create_task(f.client.get(f.url(RAW, "/silent")))
        async with f.client.stream("GET", f.url(RAW, "/quiet")) as answer:
            parts = answer.aiter_raw()
            assert await anext(parts) == b"first"
            await until(lambda: f.edge.users == 2)
            await asyncio.to_thread(lone.kill)
            # The kernel closes what a killed server had open, so this is its regular end.
            with contextlib.suppress(httpx.RemoteProtocolError, StopAsyncIteration):
                await anext(parts)
        assert (await silent).status_code in (502, 410)
        await until(lambda: not f.app.state.dialler._known)
        answer = await f.client.get(f.url(HTTP))
        assert (answer.status_code, answer.json()["type"]) == (410, "SandboxLost")

    pid, started = lone.pid, lone.started
    check(lone, work, place=lambda: (pid, started))


def test_a_stalled_client_does_not_keep_a_dead_namespace(lone: Inside) -> None:
    async def work(f: Front) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", f.port, limit=1 << 14)
        writer.write(f"GET {f.url(RAW, '/endless-body')} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await reader.readexactly(1)
        await asyncio.sleep(0.5)  # all buffers are full now
        await asyncio.to_thread(lone.kill)
        await until(lambda: f.edge.users == 0)
        writer.transport.abort()

    check(lone, work)


# -- hostile answers -----------------------------------------------------------------------

REFUSED = [
    *("/garbage", "/nothing", "/control", "/bare-cr", "/null", "/bad-name", "/status-999"),
    *("/status-42", "/negative", "/two-lengths", "/switch", "/endless-line", "/endless-header"),
    *("/endless-headers", "/endless-interim"),
]
CUT = ["/cut", "/bad-chunk", "/cut-chunk", "/endless-chunk-size", "/endless-trailers"]
WHOLE = {
    "/both": b"hello",
    "/second": b"hello",
    "/until-end": b"to the end",
    "/front": b"ok",
    "/old": b"old",
    "/interim": b"ok",
}


def test_every_hostile_answer_has_a_test() -> None:
    assert {*REFUSED, *CUT, *WHOLE, "/endless-body"} == {*RAW_ANSWERS, *ENDLESS}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_no_answer_becomes_a_problem(inside: Inside, path: str) -> None:
    async def work(f: Front) -> None:
        answer = await f.client.get(f.url(RAW, path))
        problem = answer.json()
        assert (answer.status_code, problem["type"]) == (502, "PortError")
        assert problem["sandbox_usable"] and len(problem["message"]) < 500
        assert "set-cookie" not in answer.headers and "x-a" not in answer.headers

    check(inside, work)


@pytest.mark.parametrize("path", CUT)
def test_an_answer_that_is_not_whole_is_cut(inside: Inside, path: str) -> None:
    async def work(f: Front) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            await f.client.get(f.url(RAW, path))

    check(inside, work)


@pytest.mark.parametrize("path", WHOLE)
def test_odd_answers_come_out_plain(inside: Inside, path: str) -> None:
    async def work(f: Front) -> None:
        answer = await f.client.get(f.url(RAW, path))
        assert (answer.status_code, answer.content) == (200, WHOLE[path])
        names = {name.lower() for name in answer.headers}
        dropped = "x-accel-redirect x-sendfile alt-svc clear-site-data x-hop x-second x-t link"
        assert not names & {*dropped.split(), "strict-transport-security", "keep-alive"}
        if path == "/front":
            assert answer.headers["x-mine"] == "1"
        assert len(answer.headers.get_list("date")) == 1

    check(inside, work)


def test_silence_is_a_timeout(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "SILENCE_S", 0.5)

    async def work(f: Front) -> None:
        answer = await f.client.get(f.url(RAW, "/silent"))
        assert (answer.status_code, answer.json()["type"]) == (504, "DeadlineExceeded")
        answer = await f.client.post(f.url(RAW, "/never-reads"), content=bytes(16 << 20))
        assert answer.status_code == 504

    check(inside, work)


def test_a_stream_that_falls_silent_is_cut(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "SILENCE_S", 0.5)
    monkeypatch.setattr(forward, "IDLE_S", 0.5)
    async def work(f: Front) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            await f.client.get(f.url(RAW, "/quiet"))

    check(inside, work)


# -- headers, without a network ------------------------------------------------------------

WAY = Way(80, "/v1/sandboxes/x/ports/80", b"/", "https", "192.0.2.1", b"secret secret")


def test_headers_that_stay_outside() -> None:
    given = [
        (b"Host", b"edge.example"),
        (b"Connection", b"keep-alive, X-Hop"),
        (b"X-Hop", b"1"),
        (b"Keep-Alive", b"1"),
        (b"Proxy-Authorization", b"Basic x"),
        (b"TE", b"trailers"),
        (b"Upgrade", b"h2c"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Content-Length", b"5"),
        (b"Expect", b"100-continue"),
        (b"Authorization", b"Bearer secret secret"),
        (b"Authorization", b"Basic eDp5"),
        (b"Origin", b"https://edge.example"),
        (b"X-Forwarded-For", b"198.51.100.1"),
        (b"X-Forwarded-Prefix", b"/evil"),
    ]
    assert inward(given, WAY) == [
        (b"host", b"localhost:80"),
        (b"authorization", b"Basic eDp5"),
        (b"origin", b"http://localhost:80"),
        (b"x-forwarded-for", b"198.51.100.1, 192.0.2.1"),
        (b"x-forwarded-host", b"edge.example"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-prefix", b"/v1/sandboxes/x/ports/80"),
    ]
    foreign = inward([(b"host", b"edge.example"), (b"origin", b"https://evil.example")], WAY)
    assert (b"origin", b"https://evil.example") in foreign


def test_what_is_a_token() -> None:
    assert is_token(b"Bearer secret", b"secret")
    assert is_token(b"bearer  secret ", b"secret")
    assert not is_token(b"Basic secret", b"secret")
    assert not is_token(b"Bearer secrets", b"secret")
    assert not is_token(b"Bearer ", b"")


def test_a_length_is_not_passed_on_beside_chunks() -> None:
    given = [(b"Content-Length", b"3"), (b"Transfer-Encoding", b"chunked"), (b"A", b"b")]
    assert outward(given, 200) == [(b"a", b"b")]
    assert outward([(b"Content-Length", b"3")], 200) == [(b"content-length", b"3")]
    assert outward([(b"Content-Length", b"3")], 304) == []


def test_addresses_in_the_kernels_table() -> None:
    assert dial._address("0708090A") == ADDRESS
    assert dial._address("00000000000000000000000001000000") == "::1"


def test_a_pidfd_keeps_no_process(lone: Inside) -> None:
    pidfd = pidfd_open(lone.pid)
    assert pidfd is not None
    lone.kill()
    os.close(pidfd)
