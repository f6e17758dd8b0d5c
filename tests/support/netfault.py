"""A TCP proxy that is far away and sometimes breaks. Standard library only.

    with NetFault("127.0.0.1", port, latency_s=0.010) as proxy:
        … connect to proxy.port …
        proxy.fail(Fault("cut", after=1000))     # the next request's answer breaks off

    python -m tests.support.netfault --target 127.0.0.1:8333 --latency-ms 10   # prints its port

What is delayed is a request, not a packet: whenever a client speaks after the server did
(or for the first time), what it says waits one round trip (and one more on a new
connection, for its handshake), and then streams at full speed. That holds for every
protocol in which one side waits for the other, like HTTP/1.1 without pipelining.

One thread moves bytes with splice(2), so they never become Python objects. In a benchmark
run it as a process of its own: it would share the interpreter lock with the client.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import heapq
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

_PIPE_SIZE = 1 << 20
_SPLICE = 0x01 | 0x02  # SPLICE_F_MOVE | SPLICE_F_NONBLOCK
_F_SETPIPE_SZ = 1031
_AGAIN = (errno.EAGAIN, errno.EWOULDBLOCK)


@dataclass(frozen=True)
class Fault:
    """What happens to one request or its answer."""

    kind: Literal["cut", "stall"]
    """The connection is reset, or nothing moves for `seconds`."""
    after: int = 0
    """Bytes of the answer (or request) that still pass."""
    side: Literal["answer", "request"] = "answer"
    seconds: float = 1.0


class _Flow:
    """One direction of a connection: source → pipe → sink."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.read, self.write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Without the privilege for large pipes it is only slower.
        with contextlib.suppress(PermissionError):
            fcntl.fcntl(self.write, _F_SETPIPE_SZ, _PIPE_SIZE)
        self.held = 0
        self.not_before = 0.0
        self.ended = False
        self.shut = False
        self.budget: int | None = None
        """Bytes that may pass until `fault` strikes."""
        self.fault: Fault | None = None

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


class _Connection:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.up = _Flow(client, server)
        self.down = _Flow(server, client)
        self.server_spoke_last = True
        self.fresh = True
        self.open = True


class NetFault:
    """A proxy on 127.0.0.1:`port`. Counts `requests` and bytes in both directions."""

    def __init__(self, host: str, port: int, *, latency_s: float = 0.0) -> None:
        self.latency_s = latency_s
        """One round trip. May be changed while it runs."""
        self.requests = 0
        self.connections = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self._target = (host, port)
        self._faults: deque[Fault] = deque()
        self._refuse = False
        self._open: set[_Connection] = set()
        self._timers: list[tuple[float, int, _Connection]] = []
        self._number = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="netfault", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        os.write(self._wake_write, b"x")
        self._thread.join(10)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def fail(self, *faults: Fault) -> None:
        """The next requests get these faults, one each, in this order."""
        self._faults.extend(faults)

    def forget(self) -> None:
        """Drop faults that have not struck yet."""
        self._faults.clear()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Inside, all connections are reset and new ones too: the server is gone."""
        self._refuse = True
        os.write(self._wake_write, b"x")
        try:
            yield
        finally:
            self._refuse = False

    # -- the loop --------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop:
                timeout = None
                if self._timers:
                    timeout = max(0.0, self._timers[0][0] - time.monotonic())
                for key, events in self._selector.select(timeout):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is None:
                        os.read(self._wake_read, 64)
                        if self._refuse:
                            for connection in list(self._open):
                                self._reset(connection)
                    else:
                        self._ready(key.data, key.fileobj, events)
                now = time.monotonic()
                while self._timers and self._timers[0][0] <= now:
                    self._move(heapq.heappop(self._timers)[2])
        finally:
            for connection in list(self._open):
                self._reset(connection)
            self._selector.close()
            self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError as e:
                if e.errno in _AGAIN:
                    return
                raise
            try:
                if self._refuse:
                    raise ConnectionRefusedError
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                _reset_socket(client)
                continue
            connection = _Connection(client, server)
            for side in (client, server):
                side.setblocking(False)
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(side, selectors.EVENT_READ, connection)
            self._open.add(connection)
            self.connections += 1

    def _ready(self, connection: _Connection, side: object, events: int) -> None:
        if not connection.open:
            return
        if side is connection.client and events & selectors.EVENT_READ:
            self._heard_client(connection)
        self._move(connection)

    def _heard_client(self, connection: _Connection) -> None:
        """The client says something; after an answer that begins a new request."""
        if not connection.server_spoke_last:
            return
        if _at_end(connection.client):
            return
        connection.server_spoke_last = False
        self.requests += 1
        trips = 2 if connection.fresh else 1
        connection.fresh = False
        self._hold(connection, connection.up, self.latency_s * trips)
        for flow in (connection.up, connection.down):
            flow.fault = flow.budget = None
        if self._faults:
            fault = self._faults.popleft()
            flow = connection.down if fault.side == "answer" else connection.up
            flow.fault, flow.budget = fault, fault.after

    def _hold(self, connection: _Connection, flow: _Flow, seconds: float) -> None:
        if seconds > 0:
            flow.not_before = time.monotonic() + seconds
            self._number += 1
            heapq.heappush(self._timers, (flow.not_before, self._number, connection))

    def _move(self, connection: _Connection) -> None:
        """Move what can be moved, then watch exactly what can move next."""
        if not connection.open:
            return
        try:
            self.bytes_up += self._pump(connection, connection.up)
            if connection.open:  # a fault may have struck
                down = self._pump(connection, connection.down)
                self.bytes_down += down
                connection.server_spoke_last |= down > 0
        except OSError:
            self._reset(connection)
            return
        if not connection.open:
            return
        if connection.up.shut and connection.down.shut:
            self._close(connection)
            return
        self._watch(connection, connection.client, connection.up, connection.down)
        self._watch(connection, connection.server, connection.down, connection.up)

    def _watch(
        self, connection: _Connection, side: socket.socket, reads: _Flow, writes: _Flow
    ) -> None:
        now = time.monotonic()
        events = 0
        if not reads.ended and reads.held == 0 and reads.not_before <= now:
            events |= selectors.EVENT_READ
        if writes.held and writes.not_before <= now:
            events |= selectors.EVENT_WRITE
        try:
            known = self._selector.get_key(side).events
        except KeyError:
            known = 0
        if events == known:
            return
        if not known:
            self._selector.register(side, events, connection)
        elif events:
            self._selector.modify(side, events, connection)
        else:
            # Not left in the set: a hang-up is always reported and would spin.
            self._selector.unregister(side)

    def _pump(self, connection: _Connection, flow: _Flow) -> int:
        """Splice until something blocks. Returns the bytes that reached the sink."""
        moved = 0
        while flow.not_before <= time.monotonic():
            if flow.held:
                room = flow.held if flow.budget is None else min(flow.held, flow.budget)
                if room == 0:
                    self._strike(connection, flow)
                    if not connection.open:
                        return moved
                    continue
                try:
                    count = os.splice(flow.read, flow.sink.fileno(), room, flags=_SPLICE)
                except OSError as e:
                    if e.errno in _AGAIN:
                        return moved
                    raise
                flow.held -= count
                moved += count
                if flow.budget is not None:
                    flow.budget -= count
                continue
            if flow.ended:
                if not flow.shut:
                    flow.shut = True
                    with contextlib.suppress(OSError):
                        flow.sink.shutdown(socket.SHUT_WR)
                return moved
            try:
                count = os.splice(flow.source.fileno(), flow.write, _PIPE_SIZE, flags=_SPLICE)
            except OSError as e:
                if e.errno in _AGAIN:
                    return moved
                raise
            flow.held += count
            flow.ended = count == 0
        return moved

    def _strike(self, connection: _Connection, flow: _Flow) -> None:
        fault, flow.fault, flow.budget = flow.fault, None, None
        if fault is None or fault.kind == "cut":
            self._reset(connection)
        else:
            self._hold(connection, flow, fault.seconds)

    def _reset(self, connection: _Connection) -> None:
        for side in (connection.client, connection.server):
            with contextlib.suppress(OSError):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        connection.open = False
        self._open.discard(connection)
        for side in (connection.client, connection.server):
            with contextlib.suppress(KeyError):
                self._selector.unregister(side)
            side.close()
        connection.up.close()
        connection.down.close()


def _at_end(side: socket.socket) -> bool:
    """Whether a readable socket has only its end to tell."""
    try:
        return side.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def _reset_socket(side: socket.socket) -> None:
    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    side.close()


def main() -> None:
    """Run until standard input ends: a proxy never outlives who started it.

    Prints its port, and at the end what has passed, as JSON.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="HOST:PORT")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    options = parser.parse_args()
    host, _, port = options.target.rpartition(":")
    with NetFault(host, int(port), latency_s=options.latency_ms / 1000) as proxy:
        print(proxy.port, flush=True)
        sys.stdin.read()
        print(
            json.dumps(
                {
                    "connections": proxy.connections,
                    "requests": proxy.requests,
                    "bytes_up": proxy.bytes_up,
                    "bytes_down": proxy.bytes_down,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
