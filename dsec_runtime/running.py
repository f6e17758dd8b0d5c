"""A container that runs: waiting for its end, signals, the terminal.

What must hold: `wait` cleans up whatever happens; a container that was asked to end is killed
after a grace, and one that does not die of that is reported, not waited for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dsec_runtime.cgroups import Limit, LimitWatch
from dsec_runtime.errors import SandboxError
from dsec_runtime.streams import Streams
from dsecfs.errors import DeadlineExceeded
from dsecfs.kernel.syscalls import pidfd_open

if TYPE_CHECKING:
    from dsec_runtime.terminal import Terminal

GRACE_S = 10.0
"""Between a signal that asks the container to end and SIGKILL."""
KILLED_S = 30.0
"""Longest wait for crun after the container was killed."""
KILL_AGAIN_S = 0.25
"""Between two attempts to kill: crun may have been on its way to start the container."""
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended."""

    sandbox: str
    exit_code: int
    """Of the program; 128 + n if a signal n ended it."""
    timed_out: bool
    limits_hit: frozenset[Limit]
    """Limits because of which the kernel ended ("memory") or refused ("pids") processes."""
    phases: Mapping[str, float]
    """Seconds spent in each step, in order."""


class Clock:
    """Seconds per step."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.phases[name] = self.phases.get(name, 0.0) + now - self._last
        self._last = now


class Running:
    """A container that runs. `wait` must be called, once."""

    def __init__(
        self,
        sandbox: str,
        process: subprocess.Popen[bytes],
        streams: Streams | Terminal,
        clear: Callable[[], None],
        kill: Callable[[], None],
        errors: Path,
        clock: Clock,
        timeout_s: float | None,
        watch: LimitWatch,
    ) -> None:
        self.sandbox = sandbox
        self._process = process
        self._streams = streams
        self._clear = clear
        self._kill = kill
        self._errors = errors
        self._clock = clock
        self._watch = watch
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._end_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._timed_out = False
        self._kill_at: float | None = None
        self._killed = False
        self._ended = False

    @property
    def pid(self) -> int:
        """The crun process."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program. May be called from a signal handler.

        SIGKILL kills the container; SIGSTOP, which crun cannot pass on, does nothing. Nor does
        anything once the program has ended: crun's process id may be another's by then.
        """
        if self._ended:
            return
        if number == signal.SIGKILL:
            self._kill_at = time.monotonic()
            os.eventfd_write(self._wake, 1)
            return
        if number == signal.SIGSTOP:
            return
        if number == signal.SIGWINCH:
            self._streams.resize()  # the program is told by its own terminal
            return
        # crun passes signals on to PID 1 of the container, and that to the program.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def stop(self, number: signal.Signals = signal.SIGTERM, grace_s: float = GRACE_S) -> None:
        """Ask the program to end; after `grace_s` (at once when asked again) it is killed."""
        if self._ended:
            return
        now = time.monotonic()
        self._kill_at = now + grace_s if self._kill_at is None else now
        self.send(number)
        os.eventfd_write(self._wake, 1)

    def wait(self) -> RunResult:
        """Wait for the end, clean up, say how it was.

        SandboxError if the container could not be started; then no program ran.
        """
        hit: frozenset[Limit] = frozenset()
        try:
            code = self._wait()
            self._ended = True
            hit = self._watch.hit()
            if code < 0:
                self._kill()  # crun was killed, and left its container
            self._streams.finish()
            self._clock.lap("run")
            said = ""
            with contextlib.suppress(FileNotFoundError):
                said = self._errors.read_text(errors="replace").strip()
        except BaseException:
            self._kill()
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the error that led here counts
                self._process.wait(KILLED_S)
            raise
        finally:
            self._ended = True
            self._watch.close()
            self._clear()
            os.close(self._wake)
            self._clock.lap("clear")
        if code < 0:
            raise SandboxError(
                f"sandbox {self.sandbox}: crun was killed by signal {-code}", hint="run it again"
            )
        if code and said and self._killed:
            code = 128 + signal.SIGKILL  # before its program ran: crun has an error to tell
        elif code and said and not self._timed_out and self._kill_at is None:
            raise SandboxError(f"sandbox {self.sandbox}: crun: {said.replace(chr(10), '; ')}")
        return RunResult(self.sandbox, code, self._timed_out, hit, self._clock.phases)

    def _wait(self) -> int:
        pidfd = pidfd_open(self._process.pid)
        if pidfd is None:
            return self._process.wait(KILLED_S)
        killed_at: float | None = None
        kill_again_at = 0.0
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while True:
                now = time.monotonic()
                if killed_at is not None and now > killed_at + KILLED_S:
                    raise DeadlineExceeded(
                        f"sandbox {self.sandbox}: not ended {KILLED_S:g} s after SIGKILL",
                        hint="its processes wait for a file system or a device",
                    )
                if self._kill_at is not None and now >= max(self._kill_at, kill_again_at):
                    killed_at = killed_at or now
                    self._killed = True
                    self._kill()
                    kill_again_at = time.monotonic() + KILL_AGAIN_S
                if self._end_at is not None and now >= self._end_at and self._kill_at is None:
                    self._timed_out = True
                    self.stop()
                times = [
                    t
                    for t in (
                        self._end_at if self._kill_at is None else None,
                        self._kill_at if killed_at is None else kill_again_at,
                    )
                    if t is not None
                ]
                wait = max(0.0, min(times) - now) * 1000 + 1 if times else None
                events = dict(poll.poll(wait))
                if pidfd in events:
                    return self._process.wait(KILLED_S)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
        finally:
            os.close(pidfd)


@contextlib.contextmanager
def forwarding() -> Iterator[Callable[[Running], None]]:
    """Pass signals on once the block has called what it gets with the container.

    Signals that come before that are passed on then.
    """
    target: list[Running] = []
    early: list[signal.Signals] = []

    def send(number: signal.Signals) -> None:
        if number in _ENDING:
            target[0].stop(number)
        else:
            target[0].send(number)

    def handle(number: int, frame: FrameType | None) -> None:
        if target:
            send(signal.Signals(number))
        else:
            early.append(signal.Signals(number))

    def begin(running: Running) -> None:
        target.append(running)
        while early:
            send(early.pop(0))

    if threading.current_thread() is not threading.main_thread():
        yield lambda running: None
        return
    before = {number: signal.signal(number, handle) for number in _FORWARDED}
    try:
        yield begin
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def terminal_kept(tty: bool, stdin: int | None) -> Iterator[None]:
    """While it is passed through a terminal is raw; give it back as it was, whatever happens."""
    if not tty:
        yield
        return
    fd = 0 if stdin is None else stdin
    before = termios.tcgetattr(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
