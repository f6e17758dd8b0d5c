"""A child's side of its socket to the edge (blocking)."""

from __future__ import annotations

import select
import socket
from typing import Any

from dsec_runtime.files import wire


class LinkLost(Exception):
    """The edge, or whoever it asked for, has gone. Not an OSError: no file is to blame."""


class Link:
    """Frames to and from the edge. Every method may raise LinkLost."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ended = False
        self._rest = b""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: int, data: bytes | memoryview = b"") -> None:
        try:
            self._sock.sendall(wire.HEADER.pack(kind, len(data)))
            if data:
                self._sock.sendall(data)
        except OSError as e:
            raise LinkLost from e

    def send_json(self, kind: int, value: dict[str, Any]) -> None:
        try:
            self._sock.sendall(wire.frame_json(kind, value))
        except OSError as e:
            raise LinkLost from e

    def _take(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                piece = self._sock.recv(size - len(parts))
            except OSError as e:
                raise LinkLost from e
            if not piece:
                raise LinkLost
            parts += piece
        return bytes(parts)

    def _frame(self) -> tuple[int, bytes]:
        kind, length = wire.parse_header(self._take(wire.HEADER.size))
        return kind, self._take(length)

    def request(self) -> dict[str, Any]:
        kind, data = self._frame()
        if kind != wire.REQUEST:
            raise wire.WireError(f"frame of kind {kind}")
        return wire.parse_json(data)

    def upload(self) -> bytes:
        """The next piece of what is uploaded; b"" at its end."""
        while not self._ended:
            kind, data = self._frame()
            if kind == wire.END:
                self._ended = True
            elif kind != wire.DATA:
                raise wire.WireError(f"frame of kind {kind}")
            elif data:
                return data
        return b""

    def read(self, size: int) -> bytes:
        """What is uploaded, as a file for `tarfile`: exactly `size` bytes but at the end."""
        found = bytearray(self._rest[:size])
        self._rest = self._rest[size:]
        while len(found) < size and (piece := self.upload()):
            need = size - len(found)
            found += piece[:need]
            self._rest = piece[need:]
        return bytes(found)

    def wait(self, other: int, timeout_ms: int | None = None) -> bool:
        """Wait for the descriptor `other`; False after the time. LinkLost when the edge goes."""
        poll = select.poll()
        poll.register(other, select.POLLIN)
        poll.register(self._sock, select.POLLIN)
        ready = dict(poll.poll(timeout_ms))
        if self._sock.fileno() in ready:
            raise LinkLost
        return other in ready
