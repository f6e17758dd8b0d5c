"""What the keeper holds of each command: descriptors and the description, in both processes.

Passed from worker to holder over a socket pair, before a command is started and when it changes;
a process that is forked has all of it by the fork.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

_LENGTH = struct.Struct("<I")
MAX_FDS = 8
_MAX_META = 16 << 20


@dataclass(slots=True)
class Held:
    """A command. `fds` are owned by the process that has this object."""

    id: str
    meta: dict[str, Any]
    """What was asked for, as in meta.json."""
    fds: dict[str, int] = field(default_factory=dict)
    """stdin (write end), out, err (read ends), console (listening), pty, pipe_r, pipe_w."""
    pid: int = 0
    """Of the host command; 0 before it is started."""
    pidfd: int = -1
    status: int | None = None
    """Exit code, or -n after signal n, once it ended."""

    def close(self, *names: str) -> None:
        """Close descriptors; all of them without names."""
        for name in names or tuple(self.fds):
            fd = self.fds.pop(name, None)
            if fd is not None:
                os.close(fd)
        if not names and self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Pair:
    """One end of the socket pair between worker and holder. Messages with descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._held = bytearray()
        self._fds: list[int] = []

    @staticmethod
    def make() -> tuple[Pair, Pair]:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Pair(one), Pair(other)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, value: dict[str, Any], fds: list[int] | None = None) -> None:
        """Send all of it; OSError when the other end is gone."""
        text = json.dumps({**value, "fds": len(fds or ())}).encode()
        data = memoryview(_LENGTH.pack(len(text)) + text)
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        )
        # Descriptors travel with the first byte; the rest may take several calls.
        sent = self.sock.sendmsg([data], rights)
        while sent < len(data):
            sent += self.sock.send(data[sent:])

    def receive(self) -> list[tuple[dict[str, Any], list[int]]] | None:
        """Messages that are there; waits for one. None when the other end is gone."""
        room = socket.CMSG_SPACE(MAX_FDS * 4)
        try:
            piece, rights, _, _ = self.sock.recvmsg(1 << 16, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds += fds
        if not piece:
            return None
        self._held += piece
        found = []
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack(self._held[: _LENGTH.size])
            assert length <= _MAX_META
            end = _LENGTH.size + length
            if len(self._held) < end:
                break
            value = json.loads(bytes(self._held[_LENGTH.size : end]))
            del self._held[:end]
            count = value.pop("fds")
            found.append((value, self._fds[:count]))
            del self._fds[:count]
        return found

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        with contextlib.suppress(OSError):
            self.sock.close()
