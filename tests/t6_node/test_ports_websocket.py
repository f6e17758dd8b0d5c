"""WebSockets into a network namespace through the edge's API."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from dsec_runtime.ports import websocket
from tests.t6_node.portbox import Front, Inside, front, servers, until
from tests.t6_node.portserver import HTTP, RAW, WEBSOCKET

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


def opened(f: Front, path: str = "/", port: int = WEBSOCKET, **more: Any) -> connect:
    return connect(f.ws(port, path), proxy=None, **more)


async def said(connection: ClientConnection, text: str) -> Any:
    await connection.send(text)
    return await asyncio.wait_for(connection.recv(), 10)


def test_messages_of_both_kinds_both_ways(inside: Inside) -> None:
    async def work(f: Front) -> None:
        async with opened(f, max_size=None) as c:
            assert await said(c, "grüße") == "grüße"
            assert await said(c, "") == ""
            data = os.urandom(900_000)
            await c.send(data)
            assert await c.recv() == data
            await c.send(["in ", "three ", "parts"])
            assert await c.recv() == "in three parts"
            assert await said(c, "fragments") == "abc"
            assert await said(c, "size 3000000") == "x" * 3_000_000
            assert f.edge.users == 1
        await until(lambda: f.edge.users == 0)

    check(inside, work)


def test_what_the_server_sees(inside: Inside) -> None:
    async def work(f: Front) -> None:
        headers = {"authorization": "Bearer own", "cookie": "a=b", "x-mine": "1"}
        origin = f"http://127.0.0.1:{f.port}"
        async with opened(f, "/p%2Fq?x=%201", additional_headers=headers, origin=origin) as c:
            path, found = json.loads(await said(c, "headers"))
        assert path == "/p%2Fq?x=%201"
        names = [name.lower() for name, _ in found]
        seen = {name.lower(): value for name, value in found}
        assert seen["host"] == f"localhost:{WEBSOCKET}" and names.count("host") == 1
        assert names.count("sec-websocket-key") == 1 and names.count("upgrade") == 1
        assert seen["origin"] == f"http://localhost:{WEBSOCKET}"
        assert (seen["authorization"], seen["cookie"], seen["x-mine"]) == ("Bearer own", "a=b", "1")
        assert seen["x-forwarded-prefix"].endswith(f"/ports/{WEBSOCKET}")
        async with opened(f, "") as c:
            assert json.loads(await said(c, "headers"))[0] == "/"

    check(inside, work)


def test_the_edges_token_stays_outside(inside: Inside) -> None:
    async def work(f: Front) -> None:
        with pytest.raises(InvalidStatus):
            async with opened(f):
                pass
        async with opened(f, additional_headers={"authorization": f"Bearer {TOKEN}"}) as c:
            assert TOKEN not in await said(c, "headers")

    check(inside, work, token=TOKEN)


def test_the_server_chooses_the_subprotocol(inside: Inside) -> None:
    async def work(f: Front) -> None:
        async with opened(f, subprotocols=["first", "third"]) as c:
            assert c.subprotocol == "third"

    check(inside, work)


@pytest.mark.parametrize("code", [1000, 1001, 1011, 3000, 4321])
def test_how_the_server_closes(inside: Inside, code: int) -> None:
    async def work(f: Front) -> None:
        async with opened(f) as c:
            with pytest.raises(ConnectionClosed) as caught:
                await said(c, f"close {code}")
            assert caught.value.rcvd is not None
            assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (code, "as you like")

    check(inside, work)


@pytest.mark.parametrize("code", [1000, 1001, 3000, 4321])
def test_how_the_client_closes(inside: Inside, code: int) -> None:
    async def work(f: Front) -> None:
        async with opened(f) as c:
            await said(c, "x")
            await c.close(code, "bye")
        await until(lambda: f.edge.users == 0)
        async with opened(f) as c:
            assert (await said(c, "closed with")).endswith(f"{code}]")

    check(inside, work)


def test_a_client_that_vanishes(inside: Inside) -> None:
    async def work(f: Front) -> None:
        async with opened(f) as c:
            await said(c, "x")
            c.transport.abort()
            await until(lambda: f.edge.users == 0)
        async with opened(f) as c:
            assert (await said(c, "closed with")).endswith("1001]")

    check(inside, work)


def test_pings_of_both_sides_are_answered(inside: Inside) -> None:
    async def work(f: Front) -> None:
        async with opened(f) as c:
            assert await said(c, "ping") == "ponged"
            await asyncio.wait_for(await c.ping(b"edge?"), 10)

    check(inside, work)


def test_a_server_that_breaks_the_connection(inside: Inside) -> None:
    async def work(f: Front) -> None:
        async with opened(f) as c:
            with pytest.raises(ConnectionClosed) as caught:
                await said(c, "break")
            assert caught.value.rcvd is not None and caught.value.rcvd.code == 1014

    check(inside, work)


def test_a_sandbox_that_ends(lone: Inside) -> None:
    async def work(f: Front) -> None:
        async with opened(f) as c:
            await said(c, "x")
            await asyncio.to_thread(lone.kill)
            with pytest.raises(ConnectionClosed) as caught:
                await asyncio.wait_for(c.recv(), 10)
            assert caught.value.rcvd is not None and caught.value.rcvd.code in (1001, 1014)
        await until(lambda: f.edge.users == 0)

    check(lone, work)


def test_messages_are_bounded(inside: Inside) -> None:
    async def work(f: Front) -> None:
        async with opened(f, max_size=None) as c:
            with pytest.raises(ConnectionClosed) as caught:
                await said(c, f"size {websocket.MAX_MESSAGE + 1}")
            assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009

    check(inside, work)


def test_text_that_is_none(inside: Inside) -> None:
    async def work(f: Front) -> None:
        async with opened(f) as c:
            with pytest.raises(ConnectionClosed) as caught:
                await said(c, "not text")
            assert caught.value.rcvd is not None and caught.value.rcvd.code == 1007

    check(inside, work)


def test_a_server_that_refuses_answers_itself(inside: Inside) -> None:
    async def work(f: Front) -> None:
        with pytest.raises(InvalidStatus) as caught:
            async with opened(f, "/refused"):
                pass
        assert caught.value.response.status_code == 403
        assert caught.value.response.body == b"go away\n"

    check(inside, work)


def test_redirects_are_passed_on(inside: Inside) -> None:
    async def work(f: Front) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", f.port)
        writer.write(
            f"GET {f.url(WEBSOCKET, '/moved')} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 302 ")
        assert f"location: ws://localhost:{WEBSOCKET}/".encode() in head.lower()
        writer.close()

    check(inside, work)


@pytest.mark.parametrize(
    ("port", "path", "status", "kind"),
    [
        (9, "/", 502, "PortClosed"),
        (RAW, "/garbage", 502, "PortError"),
        (RAW, "/nothing", 502, "PortError"),
        (RAW, "/endless-line", 502, "PortError"),
        (RAW, "/endless-header", 502, "PortError"),
        (RAW, "/endless-headers", 502, "PortError"),
        (RAW, "/status-999", 502, "PortError"),
        (RAW, "/control", 502, "PortError"),
        (RAW, "/switch", 502, "PortError"),
        (RAW, "/silent", 504, "DeadlineExceeded"),
    ],
)
def test_what_is_no_websocket_becomes_a_problem(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, port: int, path: str, status: int, kind: str
) -> None:
    monkeypatch.setattr(websocket, "HANDSHAKE_S", 0.5 if kind == "DeadlineExceeded" else 10)

    async def work(f: Front) -> None:
        with pytest.raises(InvalidStatus) as caught:
            async with opened(f, path, port):
                pass
        assert caught.value.response.status_code == status
        assert json.loads(caught.value.response.body or b"")["type"] == kind

    check(inside, work)


def test_plain_http_where_no_websocket_is(inside: Inside) -> None:
    async def work(f: Front) -> None:
        with pytest.raises(InvalidStatus) as caught:
            async with opened(f, "/status?404", HTTP):
                pass
        assert caught.value.response.status_code == 404

    check(inside, work)


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_no_port(inside: Inside, port: str) -> None:
    async def work(f: Front) -> None:
        url = f.ws(1, "/").replace("/ports/1/", f"/ports/{port}/")
        with pytest.raises(InvalidStatus) as caught:
            async with connect(url, proxy=None):
                pass
        assert caught.value.response.status_code in (403, 422)

    check(inside, work)


def test_a_server_that_takes_nothing_makes_the_client_wait(inside: Inside) -> None:
    """What the edge holds for it is bounded."""

    async def work(f: Front) -> None:
        async with opened(f, close_timeout=0.5, compression=None) as c:

            async def push() -> None:
                while True:
                    await c.send(bytes(1 << 19))

            # The server echoes; nobody takes the echo, so at last nothing moves in any direction.
            pushing = asyncio.create_task(push())
            await asyncio.sleep(2)
            assert not pushing.done()
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)
            with open("/proc/self/statm") as file:
                assert int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") < 400 << 20
            c.transport.abort()
        await until(lambda: f.edge.users == 0)

    check(inside, work)
