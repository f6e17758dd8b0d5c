"""Servers inside a network namespace of their own, kind ones and hostile ones. Run by portbox.py.

Prints "ready" when all of them listen. Knows nothing of the edge.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import socket
import struct
import subprocess
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import uvicorn
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

HTTP, WEBSOCKET, RAW, V6_ONLY, OTHER_ADDRESS, FULL, OLD = 80, 8001, 8002, 8003, 8004, 8005, 8006
ADDRESS = "10.9.8.7"

_disconnects = 0
_waiting = 0


def lo_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(sock, 0x8914, request)  # SIOCSIFFLAGS


# -- an ordinary application ---------------------------------------------------------------


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    global _disconnects, _waiting
    path = scope["path"]
    if path == "/chat":
        await _start(send, 200)
        while True:
            message = await receive()
            if body := message.get("body"):
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if not message.get("more_body"):
                break
        await send({"type": "http.response.body", "body": b""})
    elif path == "/wait":
        _waiting += 1
        if scope["query_string"] == b"begin":
            await _start(send, 200)
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        _waiting -= 1
        _disconnects += 1
    elif path == "/waited":
        await _answer(send, json.dumps([_waiting, _disconnects]).encode())
    elif path == "/big":
        left = int(scope["query_string"])
        await _start(send, 200, [(b"content-length", b"%d" % left)])
        while left:
            part = bytes(min(left, 1 << 18))
            left -= len(part)
            await send({"type": "http.response.body", "body": part, "more_body": bool(left)})
    elif path == "/early":
        await _answer(send, b"too much", 413)
    elif path == "/moved":
        headers = [(b"location", b"http://localhost:80/echo"), (b"set-cookie", b"a=b")]
        await _start(send, 302, headers)
        await send({"type": "http.response.body", "body": b""})
    elif path == "/status":
        await _start(send, int(scope["query_string"]), [(b"etag", b'"x"')])
        await send({"type": "http.response.body", "body": b""})
    else:
        digest, length = hashlib.sha256(), 0
        while True:
            message = await receive()
            digest.update(message.get("body", b""))
            length += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        found = {
            "method": scope["method"],
            "path": scope["raw_path"].decode(),
            "query": scope["query_string"].decode(),
            "headers": [[n.decode(), v.decode("latin-1")] for n, v in scope["headers"]],
            "sha256": digest.hexdigest(),
            "length": length,
        }
        await _answer(send, json.dumps(found).encode())


async def _start(send: Any, status: int, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers or []})


async def _answer(send: Any, body: bytes, status: int = 200) -> None:
    await _start(send, status, [(b"content-length", b"%d" % len(body))])
    await send({"type": "http.response.body", "body": body})


# -- WebSockets ----------------------------------------------------------------------------


async def websocket(connection: ServerConnection) -> None:
    request = connection.request
    assert request is not None
    try:
        async for message in connection:
            if message == "headers":
                found = [[n, v] for n, v in request.headers.raw_items()]
                await connection.send(json.dumps([request.path, found]))
            elif message == "ping":
                waiter = await connection.ping(b"are you there")
                await waiter
                await connection.send("ponged")
            elif message == "break":
                connection.transport.abort()
            elif isinstance(message, str) and message.startswith("close "):
                await connection.close(int(message.split()[1]), "as you like")
            elif isinstance(message, str) and message.startswith("size "):
                await connection.send("x" * int(message.split()[1]))
            elif message == "fragments":
                await connection.send(["a", "b", "c"])
            elif message == "not text":
                await connection.send(b"\xff\xfe", text=True)
            elif message == "closed with":
                await connection.send(str(_closed))
            else:
                await connection.send(message)
    finally:
        _closed.append(connection.close_code)


_closed: list[int | None] = []


def refuse(connection: ServerConnection, request: Request) -> Response | None:
    if request.path.startswith("/refused"):
        return connection.respond(HTTPStatus.FORBIDDEN, "go away\n")
    if request.path.startswith("/moved"):
        answer = connection.respond(HTTPStatus.FOUND, "elsewhere\n")
        answer.headers["Location"] = f"ws://localhost:{WEBSOCKET}/"
        return answer
    return None


def choose(connection: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    return Subprotocol("third") if "third" in offered else None


# -- hostile ones --------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\n"
RAW_ANSWERS: dict[str, bytes] = {
    "/garbage": b"SSH-2.0-OpenSSH_9.2\r\n",
    "/nothing": b"",
    "/control": OK + b"X-A: a\x01b\r\nContent-Length: 0\r\n\r\n",
    "/bare-cr": OK + b"X-A: a\rSet-Cookie: evil=1\r\nContent-Length: 0\r\n\r\n",
    "/null": OK + b"X-A: a\x00b\r\nContent-Length: 0\r\n\r\n",
    "/bad-name": OK + b"X A: a\r\nContent-Length: 0\r\n\r\n",
    "/status-999": b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    "/status-42": b"HTTP/1.1 42 Odd\r\nContent-Length: 0\r\n\r\n",
    "/negative": OK + b"Content-Length: -5\r\n\r\nhello",
    "/two-lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "/switch": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "/cut": OK + b"Content-Length: 100\r\n\r\n0123456789",
    "/bad-chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzzzz\r\n",
    "/cut-chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "/both": OK
    + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-T: 1\r\n\r\n",
    "/second": OK + b"Content-Length: 5\r\n\r\nhelloHTTP/1.1 200 OK\r\nX-Second: 1\r\n\r\n",
    "/until-end": OK + b"\r\nto the end",
    "/front": OK + b"X-Accel-Redirect: /etc/passwd\r\nX-Sendfile: /etc/passwd\r\nAlt-Svc: x\r\n"
    b"Clear-Site-Data: *\r\nStrict-Transport-Security: max-age=9\r\nX-Mine: 1\r\n"
    b"Keep-Alive: 5\r\nConnection: X-Hop\r\nX-Hop: 1\r\nContent-Length: 2\r\n\r\nok",
    "/old": b"HTTP/1.0 200 OK\r\nX-Mine: 1\r\n\r\nold",
    "/interim": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
}
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "/endless-line": (b"HTTP/1.1 200 ", b"a" * 4096),
    "/endless-header": (OK + b"X-A: ", b"a" * 4096),
    "/endless-headers": (OK, b"X-A: a\r\n" * 512),
    "/endless-interim": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 64),
    "/endless-chunk-size": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"0" * 4096),
    "/endless-trailers": (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-A: a\r\n" * 512),
    "/endless-body": (OK + b"\r\n", b"b" * 65536),
}


async def raw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        line = await reader.readuntil(b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        path = line.split()[1].decode()
        if path in ENDLESS:
            first, then = ENDLESS[path]
            writer.write(first)
            while True:
                writer.write(then)
                await writer.drain()
        elif path == "/silent":
            await reader.read()
        elif path == "/quiet":
            writer.write(OK + b"\r\nfirst")
            await reader.read()
        elif path == "/never-reads":
            writer.write(b"")
            await asyncio.sleep(3600)
        else:
            writer.write(RAW_ANSWERS[path])
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def main() -> None:
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", lifespan="off", loop="asyncio", ws="none")
    )
    listener = socket.create_server(("0.0.0.0", HTTP))
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    await asyncio.start_server(raw, "127.0.0.1", RAW)
    v6 = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    v6.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    v6.bind(("::1", V6_ONLY))
    await asyncio.start_server(raw, sock=v6)
    await asyncio.start_server(raw, ADDRESS, OTHER_ADDRESS)
    full = socket.create_server(("127.0.0.1", FULL), backlog=0)
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        try:
            filler.connect(("127.0.0.1", FULL))
        except BlockingIOError:
            pass
        fillers.append(filler)
    async with serve(
        websocket,
        "127.0.0.1",
        WEBSOCKET,
        process_request=refuse,
        select_subprotocol=choose,
        max_size=8 << 20,
    ):
        print("ready", flush=True)
        await serving
    full.close()


if __name__ == "__main__":
    lo_up()
    subprocess.run(["ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"], check=True)
    asyncio.run(main())
