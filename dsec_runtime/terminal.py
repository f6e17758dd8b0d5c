"""The terminal of a container: a pseudoterminal of its own, passed through to the caller's.

crun makes the pseudoterminal and hands us its master over a socket; bytes pass through two
threads of ours. (crun's own passing through loses what a program wrote just before it ended.)

    run/sandboxes/<id>/console.sock     where crun sends the master; gone with the bundle

What must hold: output arrives complete before `finish` returns; what is typed after the end is
left for whoever reads the terminal next; the caller's terminal is raw in between and then as it
was before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import termios
import threading
import tty
from pathlib import Path

from dsecfs.errors import DeadlineExceeded
from dsecfs.kernel.syscalls import closing

FINISH_S = 30.0
"""Longest wait for the last output to be written to the caller's terminal."""
_CONNECT_S = 10.0
_CHUNK = 65536
_SOCKET = "console.sock"


class Terminal:
    """Instead of `Streams`, for a container with a terminal."""

    def __init__(self, place: Path, stdin: int, stdout: int) -> None:
        """`place` is the bundle's directory; the other two are the caller's terminal."""
        # Not /dev/null: crun would give the host's to the container's root (streams.py).
        read, write = os.pipe2(os.O_CLOEXEC)
        self.fds = [read, write, write]
        """What crun gets as standard streams: it needs none."""
        self._in, self._out = stdin, stdout
        self._before = termios.tcgetattr(stdin)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._master = -1
        self._lock = threading.Lock()
        """Held while the master is closed or resized."""
        self._place = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # By descriptor: the path of the directory may be too long for an address.
        self._listener.bind(f"/proc/self/fd/{self._place}/{_SOCKET}")
        self._listener.listen(1)
        self._threads: list[threading.Thread] = []

    @property
    def options(self) -> list[str]:
        """Options for crun run."""
        return [f"--console-socket=/proc/self/fd/{self._place}/{_SOCKET}"]

    @property
    def inherited(self) -> tuple[int, ...]:
        """Descriptors that crun needs besides the streams."""
        return (self._place,)

    def started(self) -> None:
        """crun runs: begin to pass bytes through."""
        self._close_streams()
        tty.setraw(self._in, termios.TCSADRAIN)
        thread = threading.Thread(target=self._serve, name="terminal", daemon=True)
        self._threads.append(thread)
        thread.start()

    def resize(self) -> None:
        """The caller's terminal has another size. May be called from a signal handler."""
        if self._lock.acquire(blocking=False):
            try:
                if self._master >= 0:
                    _copy_size(self._in, self._master)
            finally:
                self._lock.release()

    def finish(self) -> None:
        """The container is gone: wait until all of its output is on the caller's terminal."""
        os.eventfd_write(self._stop, 1)
        late = False
        for thread in self._threads:
            thread.join(FINISH_S)
            late |= thread.is_alive()
        if late:
            # The threads go on with their descriptors, which therefore stay open.
            termios.tcsetattr(self._in, termios.TCSANOW, self._before)
            raise DeadlineExceeded(
                f"output of the container: not written to the terminal within {FINISH_S:g} s",
                hint="the terminal takes no more output",
            )
        termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)
        self.abandon()

    def abandon(self) -> None:
        """Close everything of ours: nothing runs any more, or was never started."""
        self._close_streams()
        self._listener.close()
        self._close_master()
        for fd in (self._place, self._stop):
            os.close(fd)

    def _close_streams(self) -> None:
        for fd in set(self.fds):
            os.close(fd)
        self.fds = []

    # -- threads -------------------------------------------------------------------------

    def _serve(self) -> None:
        master = self._receive()
        if master is None:
            return
        self._master = master
        self.resize()
        typing = threading.Thread(target=self._pass_input, name="terminal input", daemon=True)
        typing.start()
        # EIO: nobody has the other end open any more, and all it wrote was read; or the
        # caller's terminal was hung up, and then the container's is, too.
        with contextlib.suppress(OSError):
            while data := os.read(master, _CHUNK):
                _write(self._out, data)
        os.eventfd_write(self._stop, 1)
        self._close_master()
        typing.join(FINISH_S)

    def _receive(self) -> int | None:
        """The master from crun; None if crun ended before it had one."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        poll.poll()
        self._listener.settimeout(0)
        # What crun sent before it ended counts.
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            with peer:
                peer.settimeout(_CONNECT_S)
                _, fds, _, _ = socket.recv_fds(peer, 4096, 1)
                for fd in fds:
                    os.set_inheritable(fd, False)
                    return fd
        return None

    def _pass_input(self) -> None:
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        with contextlib.suppress(OSError):
            with closing(os.dup(self._master)) as master:
                while self._stop not in (ready := dict(poll.poll())):
                    data = os.read(self._in, _CHUNK) if self._in in ready else b""
                    if not data:
                        return
                    _write(master, data)

    def _close_master(self) -> None:
        with self._lock:
            if self._master >= 0:
                os.close(self._master)
                self._master = -1


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _copy_size(source: int, target: int) -> None:
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)
