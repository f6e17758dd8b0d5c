"""Lock files: waiting with a limit, and claims that end with the process that made them.

A *claim* is a file that its maker keeps locked (flock(2)) for as long as it lives: the kernel
lets go of it at the process's death, however it dies, and no process id has to be believed.
What must hold: a claim is made before the first of the things it stands for and removed
after the last; whoever can `take` a claim owns those things, and its maker is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsecfs.errors import Busy, Conflict

LOCK_S = 10.0
"""Longest wait for a lock file."""


@contextlib.contextmanager
def locked(fd: int, what: str, *, shared: bool = False, wait_s: float = LOCK_S) -> Iterator[None]:
    """Hold flock(2) on `fd`. Busy after `wait_s`; `what` names it in the error."""
    deadline = time.monotonic() + wait_s
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    pause = 0.0005
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Busy(
                    f"{what}: locked by another process for {wait_s:g} s", hint="try again"
                ) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked_file(path: Path, what: str, *, wait_s: float = LOCK_S) -> Iterator[None]:
    """Hold the lock file `path`, made when missing. It may be unlinked by who holds it."""
    deadline = time.monotonic() + wait_s
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with locked(fd, what, wait_s=max(0.0, deadline - time.monotonic())):
                if _is_at(fd, path):
                    yield
                    return
        finally:
            os.close(fd)


def try_lock_file(path: Path) -> int | None:
    """A descriptor that holds the lock file `path`, made when missing, until it and its copies
    are closed; None if somebody else holds it. OSError, so if its directory is gone."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if _is_at(fd, path):
            return fd
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether `path` still names the open file `fd` (it may have been removed, or made anew)."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


class Claim:
    """A claim this process holds. `release` removes the file, `close` only stops holding it."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @staticmethod
    def make(path: Path, content: object) -> Claim:
        """Create `path` with JSON `content` and hold it. Conflict if it exists; Busy if somebody
        who took it for a dead process's keeps it for LOCK_S; OSError, and then it is gone."""
        deadline = time.monotonic() + LOCK_S
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                fd = os.open(path, flags, 0o600)
            except FileExistsError:
                raise Conflict(f"{path} is taken") from None
            # Between these two steps somebody may take it for a dead process's, and remove it
            # in a moment: until then its name is not free, and it is not ours.
            claim = Claim._lock(path, fd, deadline)
            if claim is None:
                continue
            try:
                claim.write(content)
            except BaseException:
                claim.release()
                raise
            return claim

    @staticmethod
    def take(path: Path) -> Claim | None:
        """Hold the claim of a process that is gone. None: its maker lives, or it is gone too."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            return Claim._lock(path, fd)
        except Busy:
            return None

    @staticmethod
    def _lock(path: Path, fd: int, deadline: float = 0.0) -> Claim | None:
        """None if it is no longer at `path`; Busy if somebody else holds it until `deadline`.
        `fd` is closed then."""
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise Busy(f"{path}: taken by another process", hint="try again") from None
                    time.sleep(0.001)
            if _is_at(fd, path):
                return Claim(path, fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def read(self) -> dict[str, Any]:
        """The content; {} if its maker died before it was written."""
        return read_claim(self.path)

    def write(self, content: object) -> None:
        os.pwrite(self._fd, json.dumps(content).encode() + b"\n", 0)

    def release(self) -> None:
        """Everything it stood for is gone: remove it."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Stop holding it and leave it for others to take."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_claim(path: Path) -> dict[str, Any]:
    """The content of a claim, whoever holds it; {} if it has none (any more)."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text().partition("\n")[0])
        if isinstance(value, dict):
            return value
    return {}
