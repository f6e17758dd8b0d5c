"""Stands in for 3FS's `hf3fs_fuse.io`, and keeps its rules (3FS: src/lib/api/UsrbIo.md,
hf3fs_fuse/io.py, src/lib/py/usrbio_binding.cc). What the real one punishes by a crash, a hang
or wrong data is an AssertionError here, collected in `broken` because threads swallow it.

Real data path: a daemon thread preads into the shared memory that the caller named in
/dev/shm, some time after `prepare`, perhaps before `submit`, in any order.
"""

from __future__ import annotations

import datetime
import mmap
import os
import queue
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Slice:
    """What prepare takes and wait gives back."""

    iovec: IoVec
    start: int
    size: int
    result: int = 0
    userdata: Any = None


class IoVec:
    def __init__(self, memory: Any, block_size: int) -> None:
        # Mapped by name, as the FUSE process does: the name must still be there.
        path = Path("/dev/shm", memory.name)
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)
        self.size = len(self.map)
        self.block_size = block_size or self.size

    def __getitem__(self, at: slice) -> Slice:
        start, stop, step = at.indices(self.size)
        if step != 1:
            raise ValueError("step not 1 when slicing iovec")
        return Slice(self, start, stop - start)


class Ring:
    def __init__(self, module: StandIn, entries: int, for_read: bool, io_depth: int) -> None:
        self.module = module
        self.entries, self.for_read, self.io_depth = entries, for_read, io_depth
        self.pending = 0
        self.done: queue.SimpleQueue[Slice] = queue.SimpleQueue()
        self.user = threading.Lock()

    def prepare(self, piece: Slice, read: bool, fd: int, off: int, userdata: Any = None) -> Ring:
        self.module.check(self.user.acquire(blocking=False), "two threads use one ring")
        try:
            first, last = piece.start, piece.start + piece.size - 1
            block = piece.iovec.block_size
            self.module.check(read == self.for_read, "wrong direction for this ring")
            self.module.check(piece.size > 0, "nothing asked for")
            self.module.check(first // block == last // block, "an I/O crosses a block")
            self.module.check(fd in self.module.registered, "descriptor is not registered")
            if self.pending >= self.entries:
                raise OSError(11, "ring is full")
            piece.userdata = userdata
            self.pending += 1
            self.module.work.put((self, piece, fd, off))
        finally:
            self.user.release()
        return self

    def submit(self) -> Ring:
        self.module.check(
            self.io_depth <= 0 or self.pending % self.io_depth == 0,
            "a partial batch with io_depth > 0 is never sent",
        )
        return self

    def wait(
        self, *, max_results: int = 0, min_results: int = 0, timeout: Any = None
    ) -> list[Slice]:
        assert timeout is None or isinstance(timeout, datetime.timedelta)
        end = time.monotonic() + (timeout.total_seconds() if timeout is not None else 60)
        out: list[Slice] = []
        while len(out) < min_results:
            try:
                out.append(self.done.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                break
        self.pending -= len(out)
        return out


@dataclass
class StandIn:
    """Install with `sys.modules["hf3fs_fuse.io"] = StandIn(mount)`."""

    mount: str
    seed: int = 0
    broken: list[str] = field(default_factory=list)
    registered: dict[int, tuple[int, int]] = field(default_factory=dict)
    reads: int = 0
    bytes_read: int = 0
    silent: bool = False
    """Answers nothing, like a FUSE daemon that hangs."""
    fail_with: int = 0
    """−errno that every request gets."""

    def __post_init__(self) -> None:
        self.work: queue.SimpleQueue[tuple[Ring, Slice, int, int] | None] = queue.SimpleQueue()
        self._dice = random.Random(self.seed)
        self._thread = threading.Thread(target=self._serve, name="usrbio-standin", daemon=True)
        self._thread.start()

    # -- the interface ---------------------------------------------------------

    def extract_mount_point(self, path: str) -> str | None:
        return self.mount if path == self.mount or path.startswith(self.mount + "/") else None

    def make_iovec(self, shm: Any, mount: str, block_size: int = 0, numa: int = -1) -> IoVec:
        assert mount == self.mount
        return IoVec(shm, block_size)

    def make_ioring(
        self, mount: str, entries: int, for_read: bool = True, io_depth: int = 0, **_: Any
    ) -> Ring:
        assert mount == self.mount
        return Ring(self, entries, for_read, io_depth)

    def register_fd(self, fd: int) -> None:
        self.check(fd not in self.registered, "descriptor registered twice")
        info = os.fstat(fd)
        self.registered[fd] = (info.st_dev, info.st_ino)

    def deregister_fd(self, fd: int) -> None:
        was = self.registered.pop(fd, None)
        self.check(was is not None, "descriptor was not registered")
        info = os.fstat(fd)  # EBADF: closed before it was deregistered
        self.check(was == (info.st_dev, info.st_ino), "descriptor means another file now")

    # -- the daemon ------------------------------------------------------------

    def check(self, good: bool, rule: str) -> None:
        if not good:
            self.broken.append(rule)
            raise AssertionError(rule)

    def stop(self) -> None:
        self.work.put(None)
        self._thread.join(10)

    def _serve(self) -> None:
        while (first := self.work.get()) is not None:
            batch = [first]
            while not self.work.empty() and len(batch) < 8:
                item = self.work.get()
                if item is None:
                    return
                batch.append(item)
            self._dice.shuffle(batch)
            for ring, piece, fd, off in batch:
                if self.silent:
                    continue
                self._read(piece, fd, off)
                ring.done.put(piece)

    def _read(self, piece: Slice, fd: int, off: int) -> None:
        if self.fail_with:
            piece.result = self.fail_with
            return
        data = os.pread(fd, piece.size, off)
        piece.iovec.map[piece.start : piece.start + len(data)] = data
        piece.result = len(data)
        self.reads += 1
        self.bytes_read += len(data)
