"""The log of a mount's processes: one file of bounded size, written by all of them.

What must hold: file and its predecessor together never take more than about twice the
limit; file descriptors 1 and 2 follow the file, so that what libfuse and a dying
interpreter print is in it too.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path


class BoundedFile(logging.Handler):
    """Appends to `path`; when it reaches `limit` bytes it becomes `<path>.1`."""

    def __init__(self, path: Path, limit: int, *, capture: bool) -> None:
        """With `capture`, descriptors 1 and 2 are redirected into the file."""
        super().__init__()
        self._path = path
        self._limit = limit
        self._capture = capture
        self._fd = -1
        self._open()

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        if self._capture:
            # Written through descriptor 2 itself: forked processes keep that one only.
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            os.close(fd)
            fd = 2
        elif self._fd >= 0:
            os.close(self._fd)
        self._fd = fd

    def _rotate(self) -> None:
        """Follow a file that another process has put aside, or put it aside."""
        mine = os.fstat(self._fd)
        try:
            current = os.stat(self._path)
        except FileNotFoundError:
            self._open()
            return
        if (current.st_dev, current.st_ino) == (mine.st_dev, mine.st_ino):
            if mine.st_size < self._limit:
                return
            os.replace(self._path, f"{self._path}.1")
        self._open()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._rotate()
            os.write(self._fd, (self.format(record) + "\n").encode(errors="backslashreplace"))
        except (OSError, ValueError, TypeError):
            # A full disk must not take the file system down with it.
            self.handleError(record)


def log_to(path: Path, limit: int, *, capture: bool, echo: bool = False) -> None:
    """Send everything logged in this process to `path`; with `echo` also to stderr."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    fmt = logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    handlers: list[logging.Handler] = [BoundedFile(path, limit, capture=capture and not echo)]
    if echo:
        handlers.append(logging.StreamHandler(sys.stderr))
    for handler in handlers:
        handler.setFormatter(fmt)
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.raiseExceptions = False
