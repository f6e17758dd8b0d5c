"""The worker: starts commands, moves their output, keeps time, answers the edge. One thread.

What must hold: the holder has every descriptor before it is used; nothing here waits for a
command, a client or a disk longer than a write takes; when the worker is killed between any two
steps, the next one goes on from what the holder has.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from dsec_runtime.keeper import process
from dsec_runtime.keeper.command import MAX_STDIN, Command
from dsec_runtime.keeper.held import Held, Pair
from dsec_runtime.keeper.holder import Shared
from dsec_runtime.keeper.log import Ended
from dsec_runtime.keeper.protocol import Message, ProtocolError, Unpacker, pack
from dsec_runtime.nulldevice import NullDevice

log = logging.getLogger(__name__)

IDLE_END_S = 600.0
"""A keeper without commands and clients ends after so long."""
_MAX_OUT = 8 << 20
"""Bytes that wait for a client; it is dropped then."""


class Client:
    """A connection of an edge."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unpacker = Unpacker()
        self.out = bytearray()
        self.closed = False

    def send(self, value: dict[str, Any], data: bytes = b"") -> None:
        self.out += pack(value, data)


class Worker:
    """All commands of the node."""

    def __init__(self, shared: Shared, pair: Pair) -> None:
        self.shared = shared
        self.run = shared.run
        self._pair = pair
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[int], None]] = {}
        self._clients: dict[int, Client] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.commands: dict[str, Command] = {}
        self._quit = False
        self._last_used = time.monotonic()
        self.null = NullDevice()

    # -- the loop ----------------------------------------------------------------------

    def work(self) -> bool:
        """Until the holder is gone: True; False when a client said to end."""
        self.watch(self._pair.fileno(), self._told)
        self.shared.listener.setblocking(False)
        self.watch(self.shared.listener.fileno(), self._accept)
        for held in list(self.shared.held.values()):
            self.commands[held.id] = Command(self, held)
            self.commands[held.id].resume()
        self.at(time.monotonic() + IDLE_END_S, self._idle)
        try:
            while not self._quit:
                if not self._step():
                    return True
            with contextlib.suppress(OSError):
                self._pair.send({"op": "quit", "id": ""})
            return False
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            for command in self.commands.values():
                command.let_go()
            self._epoll.close()
            self.null.close()

    def _step(self) -> bool:
        """Wait for something and do it. False when the holder is gone."""
        wait = -1.0
        if self._timers:
            wait = max(0.0, self._timers[0][0] - time.monotonic())
        for fd, events in self._epoll.poll(wait):
            handler = self._ready.get(fd)
            if handler is not None:
                handler(events)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        self._flush()
        return self._pair is not _GONE

    def watch(self, fd: int, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        if fd in self._ready:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._ready[fd] = handler

    def unwatch(self, fd: int) -> None:
        if self._ready.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def at(self, when: float, work: Callable[[], None]) -> None:
        """Call `work` at a time of the monotonic clock, unless what it concerns is gone then."""
        heapq.heappush(self._timers, (when, next(self._number), work))

    def _idle(self) -> None:
        now = time.monotonic()
        if self.commands or self._clients:
            self._last_used = now
        elif now >= self._last_used + IDLE_END_S:
            self._quit = True
        self.at(now + IDLE_END_S / 4, self._idle)

    # -- the holder --------------------------------------------------------------------

    def tell(self, op: str, id: str, fds: list[int] | None = None, **more: Any) -> None:
        """Tell the holder. It may be gone: then this process becomes it, and knows already."""
        with contextlib.suppress(OSError):
            self._pair.send({"op": op, "id": id, **more}, fds)

    def _told(self, events: int) -> None:
        messages = self._pair.receive()
        if messages is None:
            self.unwatch(self._pair.fileno())
            self._pair = _GONE
            return
        for value, _ in messages:
            command = self.commands.get(value["id"])
            if command is not None:
                command.exited(value["status"])

    # -- clients -----------------------------------------------------------------------

    def _accept(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self.shared.listener.accept()
            sock.setblocking(False)
            client = Client(sock)
            self._clients[sock.fileno()] = client
            self.watch(sock.fileno(), lambda events: self._hear(client, events))

    def _hear(self, client: Client, events: int) -> None:
        if not events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            piece = client.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._drop(client)
            return
        try:
            for message in client.unpacker.feed(piece):
                self._answer(client, message)
        except ProtocolError as e:
            log.warning("a client is dropped: %s", e)
            self._drop(client)

    def _drop(self, client: Client) -> None:
        if not client.closed:
            client.closed = True
            self.unwatch(client.sock.fileno())
            del self._clients[client.sock.fileno()]
            client.sock.close()
            for command in self.commands.values():
                command.unfollow(client)

    def _flush(self) -> None:
        for client in list(self._clients.values()):
            if not client.out:
                continue
            try:
                sent = client.sock.send(client.out)
                del client.out[:sent]
            except BlockingIOError:
                pass
            except OSError:
                self._drop(client)
                continue
            if len(client.out) > _MAX_OUT:
                log.warning("a client does not read: it is dropped")
                self._drop(client)
            else:
                events = select.EPOLLIN | (select.EPOLLOUT if client.out else 0)
                fd = client.sock.fileno()
                self.watch(fd, self._ready[fd], events)

    def _answer(self, client: Client, message: Message) -> None:
        value, data = message
        number = value.pop("n", None)
        try:
            op = value.pop("op")
            result = getattr(self, f"op_{op}")(client, number, data, **value)
        except (TypeError, AttributeError, KeyError, ValueError) as e:
            log.exception("request")
            self.answer(client, number, error=f"bad request: {e}")
            return
        except OSError as e:
            self.answer(client, number, error=f"{e.filename or ''}: {e.strerror}".lstrip(": "))
            return
        if result is not None:
            self.answer(client, number, **result)

    @staticmethod
    def answer(client: Client, number: int | None, **value: Any) -> None:
        if number is not None and not client.closed:
            client.send({"n": number, **value})

    # -- requests: None means that the answer comes later --------------------------------

    def op_ping(self, client: Client, number: int, data: bytes) -> dict[str, Any]:
        return {"pid": os.getpid(), "holder": os.getppid(), "commands": len(self.commands)}

    def op_quit(self, client: Client, number: int, data: bytes) -> dict[str, Any]:
        self._quit = True
        return {}

    def op_start(self, client: Client, number: int, data: bytes, **meta: Any) -> dict[str, Any]:
        """Start a command; nothing happens if it is known already."""
        id = meta["id"]
        if id in self.commands:
            return {}
        meta["started_at"], meta["started"] = time.time(), time.monotonic()
        meta["before"] = process.read_counters(meta["counters"])
        held = Held(id, meta)
        command = Command(self, held)
        self.shared.held[id] = held
        self.commands[id] = command
        try:
            command.start()
        except BaseException:
            self.forget(command)
            raise
        return {}

    def op_stdin(
        self, client: Client, number: int, data: bytes, id: str
    ) -> dict[str, Any] | None:
        command = self.commands.get(id)
        if command is None or not command.write(client, number, data):
            return {"error": "its standard input is closed"}
        return None if command.waiting > MAX_STDIN else {}

    def op_close_stdin(self, client: Client, number: int, data: bytes, id: str) -> dict[str, Any]:
        if command := self.commands.get(id):
            command.close_stdin()
        return {}

    def op_signal(
        self, client: Client, number: int, data: bytes, id: str, signal: int
    ) -> dict[str, Any]:
        command = self.commands.get(id)
        if command is None or command.ended is not None:
            return {"error": "it has ended"}
        command.send(signal)
        return {}

    def op_resize(
        self, client: Client, number: int, data: bytes, id: str, rows: int, columns: int
    ) -> dict[str, Any]:
        if command := self.commands.get(id):
            command.resize(rows, columns)
        return {}

    def op_hold(self, client: Client, number: int, data: bytes, sandbox: str) -> dict[str, Any]:
        for command in self._of(sandbox):
            command.hold()
        return {}

    def op_release(self, client: Client, number: int, data: bytes, sandbox: str) -> dict[str, Any]:
        for command in self._of(sandbox):
            command.release()
        return {}

    def op_note(self, client: Client, number: int, data: bytes, sandbox: str) -> dict[str, Any]:
        for command in self._of(sandbox):
            command.note(data)
        return {}

    def op_forget(self, client: Client, number: int, data: bytes, sandbox: str) -> dict[str, Any]:
        """Kill all commands of a sandbox; they end, then they are let go."""
        for command in self._of(sandbox):
            command.orphan()
        return {}

    def op_wait(
        self, client: Client, number: int, data: bytes, id: str, place: str
    ) -> dict[str, Any] | None:
        """Answered when it ended. `known` is false if nobody can say how."""
        command = self.commands.get(id)
        if command is not None and command.ended is None:
            command.waiters.append((client, number))
            return None
        return {"known": command is not None}

    def op_follow(
        self, client: Client, number: int, data: bytes, id: str, at: list[int]
    ) -> dict[str, Any]:
        command = self.commands.get(id)
        if command is not None:
            command.follow(client, at)
        return {"known": command is not None}

    def op_at(self, client: Client, number: int, data: bytes, id: str, at: list[int]) -> None:
        if command := self.commands.get(id):
            command.follow(client, at)

    def op_unfollow(self, client: Client, number: int, data: bytes, id: str) -> None:
        if command := self.commands.get(id):
            command.unfollow(client)

    # -- commands ----------------------------------------------------------------------

    def _of(self, sandbox: str) -> list[Command]:
        return [c for c in self.commands.values() if c.meta["sandbox"] == sandbox]

    def forget(self, command: Command) -> None:
        """Nothing more will come of it."""
        command.let_go()
        self.tell("drop", command.held.id)
        self.commands.pop(command.held.id, None)
        self.shared.held.pop(command.held.id, None)
        command.held.close()

    def finished(self, command: Command, ended: Ended) -> None:
        """It is written down: tell whoever waits."""
        for client, number in command.waiters:
            self.answer(client, number, known=True)
        command.waiters.clear()
        for client in command.followers:
            client.send({"ended": command.held.id})
        self._last_used = time.monotonic()


_GONE = Pair(socket.socket(socket.AF_UNIX))
