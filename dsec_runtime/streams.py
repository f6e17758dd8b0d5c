"""Standard streams of a container.

crun gives what it gets as standard streams to the container's root (fchown), so that
/dev/stdout can be opened inside. That is right for pipes of ours and wrong for a file of the
caller (`dsec run … > out.txt`): its owner must not change. So files go through a pipe.

What must hold: bytes arrive complete and in order before `finish` returns, behind what others
write to the same open file; a container that does not read its input, or ended, keeps no
thread waiting. So no splice(2) to files: it takes the file's position before it waits for the
pipe and puts it back afterwards, over whatever was written meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import threading
from collections.abc import Callable, Sequence

from dsecfs.errors import DeadlineExceeded

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
        self._threads: list[threading.Thread] = []
        relayed: dict[tuple[int, int], int] = {}
        try:
            for number, stream in enumerate(given):
                fd = number if stream is None else stream
                if not _is_file(fd):
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

    def abandon(self) -> None:
        """crun was not started: close everything of ours."""
        self._close(self._pipes)
        self._close([write for _, write in self._inputs])
        self._close([read for read, _ in self._outputs])

    @staticmethod
    def _close(fds: list[int]) -> None:
        while fds:
            os.close(fds.pop())


def _is_file(fd: int) -> bool:
    """Whether the descriptor is something with an owner that must stay: a file, a named pipe."""
    if fd in (subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT):
        return False
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        return not os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _give(fd: int, uid: int) -> None:
    """An anonymous pipe belongs to the container's user, who can then open it by name."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
            os.fchown(fd, uid, uid)


def _feed(source: int, target: int) -> None:
    """The caller's file into the container's standard input."""
    with contextlib.suppress(OSError):  # EPIPE: nobody reads any more
        while _move(source, target):
            pass
    os.close(target)


def _drain(source: int, target: int) -> None:
    """The container's output into the caller's file."""
    with contextlib.suppress(OSError):
        while _move(source, target):
            pass
    os.close(source)  # a full disk: the container gets EPIPE, as with a plain write error


def _move(source: int, target: int) -> int:
    """Move some bytes; 0 at the end."""
    data = os.read(source, _CHUNK)
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
    return len(data)
