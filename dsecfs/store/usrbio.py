"""Reads through USRBIO, the shared-memory rings of 3FS.

Facts (3FS: hf3fs_fuse/io.py, src/lib/api/UsrbIo.md): a ring has one direction and one
user at a time; a request may not cross a block of its buffer; `io_depth` > 0 waits for a
full batch for ever, so it is 0 here; a descriptor is registered before use and
deregistered before it is closed.

What must hold: a lane (ring + buffer) is used by one thread at a time; a lane whose answer
did not come in time is never used again and its memory and descriptor stay, because the
3FS daemon may still write there. After MAX_LOST such lanes the reader is not `usable`
any more, and the store reads through FUSE.
"""

from __future__ import annotations

import datetime
import errno
import importlib
import logging
import mmap
import os
import queue
import threading
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

from dsecfs.errors import StoreUnavailable

log = logging.getLogger(__name__)

BLOCK = 1 << 20
"""Bytes per request, and the buffer's block size."""
DEPTH = 8
"""Requests in flight per lane."""
MAX_LANES = 16
MAX_LOST = 8
TIMEOUT_S = 10.0
"""Limit of one batch of DEPTH requests, and of waiting for a free lane."""


class _SharedMemory:
    """A file in /dev/shm with the two members of SharedMemory that make_iovec uses.

    Not multiprocessing.shared_memory: that starts a tracker process of its own.
    """

    def __init__(self, size: int) -> None:
        self.name = f"dsec-{uuid.uuid4().hex}"
        fd = os.open(f"/dev/shm/{self.name}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, size)
            self.map = mmap.mmap(fd, size)
        except OSError:
            self.unlink()
            raise
        finally:
            os.close(fd)
        self.buf = memoryview(self.map)

    def unlink(self) -> None:
        os.unlink(f"/dev/shm/{self.name}")


class _Lane:
    """One ring and its buffer of DEPTH blocks."""

    def __init__(self, io: ModuleType, mount: str) -> None:
        self.memory = _SharedMemory(BLOCK * DEPTH)
        try:
            self.iovec = io.make_iovec(self.memory, mount, BLOCK, -1)
        finally:
            # Both sides have it mapped now; without a name nothing can be left behind.
            self.memory.unlink()
        self.ring = io.make_ioring(mount, DEPTH, True, 0)

        self.pending = 0
        """Requests that the 3FS daemon may still be working on."""

    def read(self, fd: int, offset: int, length: int) -> bytes:
        """Up to DEPTH blocks from `offset`; fewer bytes at the end of the file.

        Raises OSError. The lane may be used again only if `pending` is 0 afterwards.
        """
        sizes = [min(BLOCK, length - at) for at in range(0, length, BLOCK)]
        for i, size in enumerate(sizes):
            piece = self.iovec[i * BLOCK : i * BLOCK + size]
            self.ring.prepare(piece, True, fd, offset + i * BLOCK, userdata=i)
            # From here on it may run, submitted or not.
            self.pending += 1
        self.ring.submit()
        results: dict[int, int] = {}
        limit = datetime.timedelta(seconds=TIMEOUT_S)
        while self.pending:
            count = self.pending
            done: list[Any] = self.ring.wait(
                max_results=count, min_results=count, timeout=limit
            )
            if not done:
                raise TimeoutError(errno.ETIMEDOUT, f"{count} requests unanswered")
            results.update((piece.userdata, piece.result) for piece in done)
            self.pending -= len(done)
        got = 0
        for i, size in enumerate(sizes):
            if results[i] < 0:
                raise OSError(-results[i], os.strerror(-results[i]))
            got += results[i]
            if results[i] < size:
                break
        return bytes(self.memory.buf[:got])


class UsrbioReader:
    """A pool of lanes over one 3FS mount."""

    def __init__(self, io: ModuleType, mount: str) -> None:
        self._io = io
        self._mount = mount
        self._lock = threading.Lock()
        self._made = 0
        self._free: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        self._lost: list[_Lane] = []
        self.usable = True

    def read(self, fd: int, offset: int, length: int) -> bytes:
        """Read and close `fd`. Fewer bytes only at the end of the file.

        Raises OSError, or StoreUnavailable when no lane or no answer came in time.
        """
        lane = None
        try:
            lane = self._take()
            return self._read(lane, fd, offset, length)
        except TimeoutError as e:
            raise StoreUnavailable(f"3fs:{self._mount}: USRBIO: {e.strerror}") from None
        finally:
            if lane is None or not lane.pending:
                os.close(fd)
            if lane is not None:
                self._give_back(lane)

    def _read(self, lane: _Lane, fd: int, offset: int, length: int) -> bytes:
        parts = []
        self._io.register_fd(fd)
        try:
            for at in range(0, length, BLOCK * DEPTH):
                want = min(BLOCK * DEPTH, length - at)
                parts.append(lane.read(fd, offset + at, want))
                if len(parts[-1]) < want:
                    break
        finally:
            if not lane.pending:
                self._io.deregister_fd(fd)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Let go of idle lanes. Lost ones stay mapped until the process ends."""
        self.usable = False
        while True:
            try:
                self._free.get_nowait()
            except queue.Empty:
                return

    def _take(self) -> _Lane:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            make = self._made < MAX_LANES
            self._made += make
        if make:
            try:
                return _Lane(self._io, self._mount)
            except BaseException:
                with self._lock:
                    self._made -= 1
                raise
        try:
            return self._free.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise StoreUnavailable(f"3fs:{self._mount}: all {MAX_LANES} lanes are busy") from None

    def _give_back(self, lane: _Lane) -> None:
        if not lane.pending:
            self._free.put(lane)
            return
        with self._lock:
            self._lost.append(lane)
            self._made -= 1
            give_up = self.usable and len(self._lost) >= MAX_LOST
            if give_up:
                self.usable = False
        if give_up:
            log.warning(
                "3fs:%s: USRBIO lost %d rings; reading through FUSE until a restart",
                self._mount, MAX_LOST,
            )  # fmt: skip


def open_reader(root: Path) -> UsrbioReader | None:
    """A reader for the 3FS mount that holds `root`; None without package or mount."""
    try:
        io = importlib.import_module("hf3fs_fuse.io")  # built from source, rarely there
    except ImportError:
        return None
    mount = io.extract_mount_point(str(root))
    return UsrbioReader(io, mount) if mount else None
