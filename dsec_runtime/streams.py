"""Standard streams of a container.

crun gives what it gets as standard streams to the container's root (fchown), so that
/dev/stdout can be opened inside. That is right for an anonymous pipe and for nothing else: the
root inside could chmod the host's /dev/null, read what is typed at the caller's terminal, or
connect a socket of the host's network to elsewhere. So everything else goes through a pipe.

What must hold: a container has no descriptor but of pipes; bytes arrive complete and in order
before `finish` returns, behind what others write to the same open file; a container that does
not read its input, or ended, keeps no thread waiting. So no splice(2) to files: it takes the
file's position before it waits for the pipe and puts it back afterwards, over whatever was
written meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from dsecfs.errors import DeadlineExceeded

T = TypeVar("T")

_CHUNK = 1 << 20
FINISH_S = 30.0
"""Longest wait for the last bytes to be written to the caller's file."""


class Streams:
    """The three descriptors that crun gets. `started` once it has them, then `finish`."""

    options: Sequence[str] = ()
    """Options for crun run."""
    inherited: Sequence[int] = ()
    """Descriptors that crun needs besides the streams."""

    def __init__(self, given: tuple[int | None, int | None, int | None], uid: int) -> None:
        """`given` are the caller's (None: this process's own); `uid` is who shall be able to
        open the container's pipes by name."""
        self.fds: list[int] = []
        self._pipes: list[int] = []
        self._inputs: list[tuple[int, int]] = []
        self._outputs: list[tuple[int, int]] = []
        self._opened: list[int] = []
        self._threads: list[threading.Thread] = []
        relayed: dict[tuple[int, int], int] = {}
        try:
            for number, stream in enumerate(given):
                fd = number if stream is None else stream
                if fd == subprocess.DEVNULL:
                    fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                    self._opened.append(fd)
                if _is_pipe(fd):
                    self.fds.append(fd)
                    _give(fd, uid)
                    continue
                found = os.fstat(fd)
                file = (found.st_dev, found.st_ino)
                if file in relayed and number != 0:
                    # Standard output and error to one file stay in order.
                    self.fds.append(relayed[file])
                else:
                    read, write = os.pipe2(os.O_CLOEXEC)
                    theirs = read if number == 0 else write
                    self._pipes.append(theirs)
                    self.fds.append(theirs)
                    if number == 0:
                        self._inputs.append((fd, write))
                    else:
                        self._outputs.append((read, fd))
                        relayed[file] = write
                _give(self.fds[-1], uid)
        except BaseException:
            self.abandon()
            raise

    def started(self) -> None:
        """crun has its copies: let go of ours and begin to move bytes."""
        self._close(self._pipes)
        for source, target in self._inputs:
            self._begin(_feed, source, target)
        for source, target in self._outputs:
            self._begin(_drain, source, target)

    def _begin(self, work: Callable[[int, int], None], source: int, target: int) -> None:
        thread = threading.Thread(
            target=work, args=(source, target), name=work.__name__, daemon=True
        )
        thread.start()
        if work is _drain:
            self._threads.append(thread)

    def resize(self) -> None:
        """There is no terminal."""

    def finish(self) -> None:
        """The container is gone: wait until the caller's files have all of its output."""
        for thread in self._threads:
            thread.join(FINISH_S)
            if thread.is_alive():
                raise DeadlineExceeded(
                    f"output of the container: not written within {FINISH_S:g} s",
                    hint="the file it goes to takes no more bytes",
                )
        self._close(self._opened)

    def abandon(self) -> None:
        """crun was not started: close everything of ours."""
        self._close(self._pipes)
        self._close([write for _, write in self._inputs])
        self._close([read for read, _ in self._outputs])
        self._close(self._opened)

    @staticmethod
    def _close(fds: list[int]) -> None:
        while fds:
            os.close(fds.pop())


def _is_pipe(fd: int) -> bool:
    """Whether the descriptor is an anonymous pipe, which has no name and no owner to keep."""
    named = not os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
    return stat.S_ISFIFO(os.fstat(fd).st_mode) and not named


def _give(fd: int, uid: int) -> None:
    """The container's user gets the pipe, and can then open it by name."""
    with contextlib.suppress(OSError):
        os.fchown(fd, uid, uid)


def _feed(source: int, target: int) -> None:
    """What the caller gives into the container's standard input."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(target, 0)  # POLLERR: nobody can read it any more
    with contextlib.suppress(OSError):  # EPIPE: the same, later
        while target not in dict(poll.poll()):
            if not _move(source, target):
                break
    os.close(target)


def _drain(source: int, target: int) -> None:
    """The container's output into the caller's file."""
    with contextlib.suppress(OSError):
        while _move(source, target):
            pass
    os.close(source)  # a full disk: the container gets EPIPE, as with a plain write error


def _move(source: int, target: int) -> int:
    """Move some bytes; 0 at the end. The caller's descriptors may be non-blocking."""
    data = _patiently(source, select.POLLIN, partial(os.read, source, _CHUNK))
    view = memoryview(data)
    while view:
        view = view[_patiently(target, select.POLLOUT, partial(os.write, target, view)) :]
    return len(data)


def _patiently(fd: int, event: int, call: Callable[[], T]) -> T:
    """What `call` returns once `fd` does not say "later"."""
    while True:
        try:
            return call()
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, event)
            poll.poll()
