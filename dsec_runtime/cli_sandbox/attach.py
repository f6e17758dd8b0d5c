"""A command in a sandbox, attached to this process: its output here, our input and signals there.

    output      one answer of the API, read by the main thread
    input       a thread reads standard input and posts what it got, piece by piece: the edge's
                answer to one comes before the next is read, so a slow command slows its writer
    control     a thread posts signals and sizes of the terminal

Why HTTP and not the WebSocket: both directions have a bound, and after a restart of the edge
output goes on at the byte where it stopped. What must hold: no byte of output is lost or twice;
what is typed after the command's end is left for whoever reads the terminal next; the terminal is
raw in between and then as it was before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import signal
import struct
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from types import FrameType
from typing import Any

from dsec_runtime.cli_sandbox.common import Answer
from dsec_runtime.edge.client import STDERR, STDOUT, EdgeClient, sandbox_path
from dsec_runtime.errors import NoEdge, NoSuchSandbox, WrongState
from dsecfs.cli.output import note
from dsecfs.errors import DsecfsError

AGAIN_S = 60.0
"""How long we wait for an edge that went away while the command runs on."""
RESULT_S = 60.0
"""Longest wait for the result once the output has ended."""
_PIECE = 1 << 16
_NAMES = ((STDOUT, "stdout"), (STDERR, "stderr"))
_PASSED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that go to the command as they are; SIGINT too, and the second one kills."""


class Attached:
    """One command, from its start to its result."""

    def __init__(self, client: EdgeClient, sandbox: str, *, stdin: bool, terminal: bool) -> None:
        """`terminal`: standard input is a terminal that shall be the command's."""
        self._client = client
        self._sandbox = sandbox
        self._stdin = stdin
        self._terminal = terminal
        self._exec = ""
        self._todo: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._at = {STDOUT: 0, STDERR: 0}
        """Bytes of each stream that are written here."""
        self._interrupts = 0
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)

    def run(self, spec: Answer) -> Answer:
        """Start it, be it, and give its `ExecResult`.

        Errors of the start; SandboxLost; NoEdge when the edge stays away.
        """
        with self._signals():
            started = self._client.post(
                sandbox_path(self._sandbox, "execs"), spec, again_s=AGAIN_S
            )
            self._exec = started["id"]
            # By its id: the name may be another's before we are done.
            self._sandbox = started["sandbox"]
            threads = [threading.Thread(target=self._control, name="control", daemon=True)]
            if self._stdin:
                threads.append(threading.Thread(target=self._input, name="input", daemon=True))
            with self._raw():
                for thread in threads:
                    thread.start()
                try:
                    self._output()
                except BrokenPipeError:
                    # Whoever read our output has seen enough: as SIGPIPE would, but for it all.
                    self._client.delete(self._path(), again_s=AGAIN_S)
                    raise
                finally:
                    os.eventfd_write(self._stop, 1)
                    self._todo.put(("stop", None))
            found: Answer = self._client.get(
                self._path("result"), {"wait_s": RESULT_S}, wait_s=RESULT_S + 10, again_s=AGAIN_S
            )
            if any(self._at[number] < found[name]["total"] for number, name in _NAMES):
                self._output()  # the stream ended before the command did: a restart of the edge
            return found

    def _path(self, *parts: str) -> str:
        return sandbox_path(self._sandbox, "execs", self._exec, *parts)

    # -- output --------------------------------------------------------------------------

    def _output(self) -> None:
        at = self._at
        deadline = 0.0
        while True:
            try:
                with follow(self._client, self._path("output"), at) as frames:
                    deadline = 0.0
                    for stream, start, data in frames:
                        write_all(stream, data)
                        at[stream] = start + len(data)
                return
            except NoEdge as e:
                deadline = deadline or time.monotonic() + AGAIN_S
                if time.monotonic() > deadline:
                    raise NoEdge(
                        f"command {self._exec}: runs on, and its edge is gone: {e.message}",
                        hint=f"dsec sandbox logs {self._sandbox} {self._exec} shows the rest",
                    ) from None
                time.sleep(0.2)

    # -- input and control (threads) -----------------------------------------------------

    def _input(self) -> None:
        client = self._client.another()
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        with contextlib.closing(client), self._quietly("its standard input"):
            while True:
                if self._stop in dict(poll.poll()):
                    return
                data = os.read(0, _PIECE)
                if not data:
                    break
                client.post(self._path("stdin"), data)
            client.post(self._path("stdin"), query={"close": "true"})

    def _control(self) -> None:
        client = self._client.another()
        with contextlib.closing(client):
            while True:
                what, value = self._todo.get()
                if what == "stop":
                    return
                with self._quietly(what):
                    if what == "kill":
                        client.delete(self._path())
                    else:
                        client.post(self._path(what), value)

    @contextlib.contextmanager
    def _quietly(self, what: str) -> Iterator[None]:
        """The command may have ended meanwhile; other trouble is told, and it goes on."""
        try:
            yield
        except (WrongState, NoSuchSandbox):
            pass
        except (DsecfsError, OSError) as e:
            note(f"{what}: {e}")

    # -- this process's signals and terminal ---------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._pass_on) for number in _PASSED}
        before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        if self._terminal:
            before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, self._resize)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if not self._exec:
            raise KeyboardInterrupt
        self._todo.put(("signal", {"signal": number}))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if not self._exec or self._interrupts > 2:
            raise KeyboardInterrupt
        self._todo.put(("kill", None) if self._interrupts > 1 else ("signal", {"signal": number}))

    def _resize(self, number: int, frame: FrameType | None) -> None:
        rows, columns = terminal_size()
        self._todo.put(("resize", {"rows": rows, "columns": columns}))

    @contextlib.contextmanager
    def _raw(self) -> Iterator[None]:
        if not self._terminal:
            yield
            return
        before = termios.tcgetattr(0)
        tty.setraw(0, termios.TCSADRAIN)
        try:
            yield
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextlib.contextmanager
def follow(
    client: EdgeClient, path: str, at: dict[int, int], *, live: bool = True
) -> Iterator[Iterator[tuple[int, int, bytes]]]:
    """Frames of a command's output from the bytes `at` of each stream on; to its end if `live`,
    else what there is."""
    query = {"stdout": at[STDOUT], "stderr": at[STDERR], "live": None if live else "false"}
    with client.stream("GET", path, query) as answer:
        yield client.frames(answer)


def write_all(stream: int, data: bytes) -> None:
    """Write to our standard output or error, all of it."""
    fd = 2 if stream == STDERR else 1
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()


def terminal_size() -> tuple[int, int]:
    """Rows and columns of the terminal at standard input; 24 and 80 if it does not say."""
    try:
        found = fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8))
    except OSError:
        return 24, 80
    rows, columns, _, _ = struct.unpack("4H", found)
    return (rows, columns) if 0 < rows <= 4096 and 0 < columns <= 4096 else (24, 80)


def on_terminal() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and os.isatty(0)
