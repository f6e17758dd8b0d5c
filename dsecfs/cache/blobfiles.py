"""The open files of one blob in one process, and the words that say what is there.

Made by `open_files` (blob.py, which owns the files' headers and names). A word is
`generation << 2 | state`. What must hold:
- state VALID: the chunk's digest was checked in this boot and its bytes are in `data`;
- OLD: that was so in an earlier boot. After a power loss the kernel may have written
  the word and not the data, so the chunk is hashed again before its first use;
- a word is written only by who holds the chunk's lock (an OFD lock on the word's own four
  bytes), except at the first open after a boot, when nobody else has the blob open;
- the generation grows whenever a chunk is cleared, always *before* its data is punched:
  a reader that finds the same VALID word before and after its read has read the right bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import time
import weakref
from collections.abc import Iterator

from dsecfs.errors import Busy, CacheError
from dsecfs.layers.digest import chunk_count

HEADER = 128
"""Bytes before the first word of `present`."""

ABSENT, OLD, VALID = 0, 1, 2
STATE = 3
"""Mask of the state in a word."""
_GENERATION = 4
_WORD = 0xFFFFFFFF

_FLOCK = struct.Struct("hh4xqqi4x")  # struct flock of 64-bit Linux; l_pid must be 0 for OFD

_libc = ctypes.CDLL(None, use_errno=True)
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2  # linux/falloc.h
_TMPFS_MAGIC = 0x01021994  # linux/magic.h
_RWF_DONTCACHE = 0x80  # linux/fs.h, from 6.14 on; file systems may not know it


class Damaged(Exception):
    """The data file lost its end while it was open. Private to the cache."""


class BlobFiles:
    """The open files of one blob in one process. Made by `open_files`.

    Safe to use from several threads. Not to be used across fork: the child would share the
    lock owner (the open file description) with its parent. Files are closed when the last
    reference goes, never earlier: a reader in a system call must not meet a reused number.
    """

    def __init__(
        self, what: str, size: int, chunk_size: int, present_fd: int, data_fd: int, used_fd: int
    ) -> None:
        self.what = what
        self.size = size
        self.chunk_size = chunk_size
        self.count = chunk_count(size, chunk_size)
        self.volatile = data_fd < 0
        """Nothing could be created (no space, read-only disk): nothing is ever present."""
        self._pid = os.getpid()
        self._present_fd = present_fd
        self._data_fd = data_fd
        self.nowait_flag = 0
        self.can_nowait = True
        self._can_drop = True
        if self.volatile:
            self.words = memoryview(bytearray(4 * self.count)).cast("I")
            self.used = memoryview(bytearray(4 * self.count)).cast("I")
        else:
            self.words = memoryview(mmap.mmap(present_fd, HEADER + 4 * self.count))[HEADER:].cast(
                "I"
            )
            self.used = memoryview(mmap.mmap(used_fd, 4 * self.count)).cast("I")
            self.nowait_flag = 0 if _is_tmpfs(data_fd) else os.RWF_NOWAIT
            weakref.finalize(self, _close_all, present_fd, data_fd)

    # -- reading ---------------------------------------------------------------------

    def length(self, chunk: int) -> int:
        """Bytes of `chunk`; the last one may be short."""
        return min(self.chunk_size, self.size - chunk * self.chunk_size)

    def state(self, chunk: int) -> int:
        return self.words[chunk] & STATE

    def missing(self, first: int, last: int) -> list[int]:
        """Chunks of first..last (inclusive) that are not VALID."""
        words = self.words[first : last + 1].tolist()
        return [first + i for i, w in enumerate(words) if w & STATE != VALID]

    def read_valid(
        self, offset: int, size: int, *, nowait: bool, once: bool = False
    ) -> bytearray | None:
        """Exactly `size` > 0 bytes at `offset` (inside the blob), or None.

        None: a chunk is not VALID, went away during the read, the file is shorter than it
        should be, or (`nowait`) the bytes are not in memory. `once`: what must be read from
        the disk need not stay in memory. Raises OSError as the disk does.
        """
        first = offset // self.chunk_size
        last = (offset + size - 1) // self.chunk_size
        if nowait and not self.can_nowait:
            return None
        before = self.words[first : last + 1].tolist()
        for word in before:
            if word & STATE != VALID:
                return None
        buffer = bytearray(size)
        try:
            n = self._read(buffer, offset, nowait=nowait, once=once)
        except BlockingIOError:
            return None
        except OSError as e:
            if nowait and e.errno == errno.EOPNOTSUPP:
                self.can_nowait = False
                return None
            raise
        if n != size or self.words[first : last + 1].tolist() != before:
            return None
        return buffer

    def _read(self, buffer: bytearray, offset: int, *, nowait: bool, once: bool) -> int:
        if once and self._can_drop:
            try:
                return os.preadv(self._data_fd, [buffer], offset, _RWF_DONTCACHE)
            except OSError as e:
                if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                self._can_drop = False
        return os.preadv(self._data_fd, [buffer], offset, self.nowait_flag if nowait else 0)

    def read_unchecked(self, chunk: int) -> bytes:
        """The bytes of `chunk` as they are on disk, perhaps short: the caller hashes them."""
        return os.pread(self._data_fd, self.length(chunk), chunk * self.chunk_size)

    def touch(self, first: int, last: int) -> None:
        """Note the use of chunks first..last for the eviction order."""
        now = int(time.time()) & _WORD
        used = self.used
        for chunk in range(first, last + 1):
            if used[chunk] != now:
                used[chunk] = now

    def check_process(self) -> None:
        """CacheError in a child of the process that opened this: they would share the locks."""
        if os.getpid() != self._pid:
            raise CacheError(f"{self.what} was opened before a fork", hint="open it again")

    # -- locks -----------------------------------------------------------------------

    def lock(self, first: int, count: int = 1) -> bool:
        """Take the locks of `count` chunks, all or none, without waiting.

        Excludes other BlobFiles of the same blob, in any process; within one BlobFiles the
        fetcher's table does. The kernel lets go of it when the process dies.
        """
        return _try_lock(self._present_fd, fcntl.F_WRLCK, HEADER + 4 * first, 4 * count)

    def unlock(self, first: int, count: int = 1) -> None:
        _try_lock(self._present_fd, fcntl.F_UNLCK, HEADER + 4 * first, 4 * count)

    # -- changing (the caller holds the chunk's lock) -----------------------------------

    def fill(self, chunk: int, data: bytes, *, zeros: bool) -> None:
        """Put the verified bytes of an ABSENT chunk into the file, then mark it VALID.

        `zeros`: all bytes are 0, so a hole is enough. Raises OSError (ENOSPC…) with the chunk
        still absent, Damaged if the file was cut short.
        """
        offset = chunk * self.chunk_size
        if os.fstat(self._data_fd).st_size != self.size:
            # Writing here would turn what was cut off into zeros under VALID words.
            raise Damaged
        if zeros and self._punch(offset, len(data)):
            pass
        else:
            view = memoryview(data)
            while view:
                n = os.pwrite(self._data_fd, view, offset)
                view, offset = view[n:], offset + n
        self.words[chunk] = (self.words[chunk] & ~STATE) | VALID
        self.touch(chunk, chunk)

    def confirm(self, chunk: int) -> None:
        """OLD becomes VALID: the caller has hashed the bytes on disk in this boot."""
        self.words[chunk] = (self.words[chunk] & ~STATE) | VALID

    def clear(self, first: int, count: int = 1) -> None:
        """Chunks become ABSENT under a new generation. Their data stays until `punch`."""
        for chunk in range(first, first + count):
            self.words[chunk] = ((self.words[chunk] & ~STATE) + _GENERATION) & _WORD

    def punch(self, first: int, count: int = 1) -> bool:
        """Give the disk space of ABSENT chunks back. False if the file system cannot."""
        offset = first * self.chunk_size
        return self._punch(offset, min(count * self.chunk_size, self.size - offset))

    def can_punch(self) -> bool:
        """Whether the file system knows holes (tried behind the end, where it does nothing)."""
        return self._punch(-(-self.size // 4096) * 4096, 4096)

    def _punch(self, offset: int, length: int) -> bool:
        mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
        while _libc.fallocate(self._data_fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)):
            code = ctypes.get_errno()
            if code == errno.EOPNOTSUPP:
                return False
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        return True

    @contextlib.contextmanager
    def _own_lock(self, first: int, count: int) -> Iterator[bool]:
        """The locks of chunks under an owner of their own, so that they also exclude the
        fetches of this BlobFiles. Yields whether they were to be had."""
        fd = os.open(f"/proc/self/fd/{self._present_fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            yield _try_lock(fd, fcntl.F_WRLCK, HEADER + 4 * first, 4 * count)
        finally:
            os.close(fd)

    def repair(self) -> bool:
        """If the data file lost its end: forget every chunk, then give it its length again.

        What was cut off would read as zeros afterwards, so no word may stay. Needs the
        locks of all chunks at once; False if somebody holds one (try later).
        """
        with self._own_lock(0, self.count) as locked:
            if locked and os.fstat(self._data_fd).st_size != self.size:
                self.clear(0, self.count)
                os.ftruncate(self._data_fd, self.size)
            return locked

    def repair_if_short(self, wait_s: float) -> None:
        """`repair` at open, waiting for fetches of other processes. Busy after `wait_s`."""
        end = time.monotonic() + wait_s
        while os.fstat(self._data_fd).st_size != self.size and not self.repair():
            if time.monotonic() >= end:
                raise Busy(f"cache of {self.what}: cut short, and in use", hint="try again")
            time.sleep(0.005)

    def demote(self, first: int, count: int = 1) -> None:
        """VALID becomes OLD: hash it again before the next use. Locked chunks are passed over:
        they are being written or checked at this moment."""
        with self._own_lock(first, count) as locked:
            if locked:
                for chunk in range(first, first + count):
                    if self.state(chunk) == VALID:
                        self.words[chunk] = (self.words[chunk] & ~STATE) | OLD
                return
        if count > 1:
            self.demote(first, count // 2)
            self.demote(first + count // 2, count - count // 2)

    def allocated(self) -> int:
        """Bytes of disk that `data` takes."""
        return 0 if self.volatile else os.fstat(self._data_fd).st_blocks * 512

    def extents(self) -> Iterator[tuple[int, int]]:
        """(start, end) of every range of `data` that takes disk space."""
        end = 0
        while end < self.size:
            try:
                start = os.lseek(self._data_fd, end, os.SEEK_DATA)
            except OSError as e:
                if e.errno == errno.ENXIO:
                    return
                raise
            end = os.lseek(self._data_fd, start, os.SEEK_HOLE)
            yield start, end

    def sync(self) -> None:
        """Make the data durable; OSError tells that the disk lost some of it."""
        os.fdatasync(self._data_fd)


def _try_lock(fd: int, kind: int, start: int, length: int) -> bool:
    request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.EACCES, errno.ENOLCK):
            return False
        raise
    return True


def _close_all(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _is_tmpfs(fd: int) -> bool:
    """tmpfs has no RWF_NOWAIT, and needs none: its reads never wait for a disk."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, buffer):
        return False
    return int.from_bytes(buffer.raw[:8], "little") == _TMPFS_MAGIC
