"""One blob's part of the node's cache: its files, the words that say what is there, locks.

Owns data/blobs/<hex>/ (docs/cache-protocol.md has the whole protocol and its crash analysis):

    chunks    size, chunk size and all chunk digests; proves itself by the blob's digest
    layout    the newest layout that was fetched (owned by layouts.py)
    data      sparse file of the blob's size
    present   header, then one 32-bit word per chunk, mapped shared by every process
    used      one 32-bit word per chunk: seconds since 1970 of its last use, approximate
    pins/     one file per pin; a pinned blob is never evicted

A word is `generation << 2 | state`. What must hold:
- state VALID: the chunk's digest was checked in this boot and its bytes are in `data`;
- OLD: that was so in an earlier boot. After a power loss the kernel may have written
  the word and not the data, so the chunk is hashed again before its first use;
- a word is written only by who holds the chunk's lock (an OFD lock on the word's own four
  bytes), except at the first open after a boot, when nobody else has the blob open;
- the generation grows whenever a chunk is cleared, always *before* its data is punched:
  a reader that finds the same VALID word before and after its read has read the right bytes;
- `present` names the inode of its `data`; a pair that does not match is replaced as a pair,
  so two processes never share one of the two files and not the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import struct
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from dsecfs.errors import BadInput, Busy, CacheError, Corrupt, FormatError, NotFound, TooNew
from dsecfs.layers.digest import (
    DIGEST_LEN,
    MAX_BLOB_SIZE,
    Digest,
    blob_digest,
    check_chunk_size,
    chunk_count,
)
from dsecfs.layers.manifest import BlobRef
from dsecfs.nodedirs import NodeDirs, boot_id

CHUNKS_MAGIC = b"DSECBLOB"
CHUNKS_VERSION = 1
_CHUNKS = struct.Struct("<8sIIQ8x")

PRESENT_MAGIC = b"DSECPRES"
PRESENT_VERSION = 1
_PRESENT = struct.Struct("<8sIIQQ36s")
HEADER = 128
"""Bytes before the first word of `present`."""

ABSENT, OLD, VALID = 0, 1, 2
STATE = 3
"""Mask of the state in a word."""
_GENERATION = 4
_WORD = 0xFFFFFFFF

SETUP_WAIT_S = 10.0
"""Longest wait for another process that is setting up or evicting from the same blob."""

_PIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_FLOCK = struct.Struct("hh4xqqi4x")  # struct flock of 64-bit Linux; l_pid must be 0 for OFD
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENFILE)

_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

_libc = ctypes.CDLL(None, use_errno=True)
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2  # linux/falloc.h
_TMPFS_MAGIC = 0x01021994  # linux/magic.h


class ChunkList(NamedTuple):
    """What a blob is made of, as `chunks` has it; verified against the blob's name."""

    size: int
    chunk_size: int
    digests: bytes


def write_chunk_list(dirs: NodeDirs, ref: BlobRef, digests: bytes) -> None:
    """Give the cache the chunk digests of blob `ref` (from a verified head). Idempotent.

    Atomic: a reader sees the old file or the new one. Not synced: the file proves itself,
    and the next mount writes it again if a power loss took it. Raises Corrupt when
    `digests` are not those of the blob, CacheError when the disk refuses.
    """
    check_chunk_size(ref.chunk_size)
    if blob_digest(ref.size, ref.chunk_size, digests) != ref.digest:
        raise Corrupt(
            f"chunk list of blob {ref.digest[:12]}: has another digest",
            hint="the layer's head is damaged: fetch it again",
        )
    data = _CHUNKS.pack(CHUNKS_MAGIC, CHUNKS_VERSION, ref.chunk_size, ref.size) + digests
    path = dirs.blob(ref.digest)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if (path / "chunks").read_bytes() == data:
                return
        with setup_lock(path):
            replace_file(path / "chunks", data)
    except OSError as e:
        raise CacheError(
            f"chunk list of blob {ref.digest[:12]}: cannot write {path}: {e.strerror}",
            hint="free space, or move the cache to another disk",
        ) from None


def read_chunk_list(dirs: NodeDirs, blob: Digest) -> ChunkList:
    """The verified chunk list of `blob`. NotFound if there is none; FormatError, TooNew."""
    what = f"chunk list of blob {blob[:12]}"
    mount_again = "mount its layer again to write it anew"
    path = dirs.blob(blob) / "chunks"
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{what}: not on this node", hint="mount a layer that uses it") from None
    except OSError as e:
        raise CacheError(f"{what}: cannot read {path}: {e.strerror}") from None
    if len(data) < _CHUNKS.size or data[:8] != CHUNKS_MAGIC:
        raise FormatError(f"{what}: {path} is not a chunk list", hint=mount_again)
    _, version, chunk_size, size = _CHUNKS.unpack_from(data)
    if version > CHUNKS_VERSION:
        raise TooNew(
            f"{what}: version {version} is newer than this program knows ({CHUNKS_VERSION})",
            hint="upgrade dsec",
        )
    digests = data[_CHUNKS.size :]
    if size > MAX_BLOB_SIZE or blob_digest(size, chunk_size, digests) != blob:
        raise Corrupt(f"{what}: {path} has another digest", hint=mount_again)
    check_chunk_size(chunk_size)
    if len(digests) != chunk_count(size, chunk_size) * DIGEST_LEN:
        raise FormatError(f"{what}: {len(digests)} bytes of digests for {size} bytes")
    return ChunkList(size, chunk_size, digests)


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` by rename. Call under `setup_lock`: the temporary name is fixed,
    so a crash leaves at most one such file, which the next writer takes over."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with open(fd, "wb") as f:
        f.write(data)
    temporary.rename(path)


@contextlib.contextmanager
def setup_lock(path: Path, wait_s: float = SETUP_WAIT_S) -> Iterator[None]:
    """Hold the blob directory `path` against every other set-up, eviction and pinning.

    Raises Busy after `wait_s`. The kernel lets go of it when the holder dies.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise Busy(
                        f"cache of blob {path.name[:12]}: locked by another process for {wait_s} s",
                        hint="try again",
                    ) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def pin(dirs: NodeDirs, blob: Digest, name: str) -> None:
    """Protect `blob` from eviction until `unpin(name)`. Idempotent. Busy, CacheError.

    Once this returns, no chunk of the blob leaves the cache; what has left before is
    missing, so look at `complete` after pinning, never before.
    """
    path = dirs.blob(blob)
    try:
        with setup_lock(path):
            (path / "pins").mkdir(mode=0o700, exist_ok=True)
            (path / "pins" / _pin_name(name)).touch(mode=0o600)
    except OSError as e:
        raise CacheError(f"cannot pin blob {blob[:12]}: {path}: {e.strerror}") from None


def unpin(dirs: NodeDirs, blob: Digest, name: str) -> None:
    """Let go of a pin. No error if there is none."""
    (dirs.blob(blob) / "pins" / _pin_name(name)).unlink(missing_ok=True)


def pins(dirs: NodeDirs, blob: Digest) -> list[str]:
    """Names of the pins of `blob`, sorted."""
    try:
        return sorted(os.listdir(dirs.blob(blob) / "pins"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _pin_name(name: str) -> str:
    if not _PIN.match(name):
        raise BadInput(f"not a pin name: {name[:80]!r}", hint="use A-Z a-z 0-9 . _ -")
    return name


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

    def read_valid(self, offset: int, size: int, *, nowait: bool) -> bytearray | None:
        """Exactly `size` > 0 bytes at `offset` (inside the blob), or None.

        None: a chunk is not VALID, went away during the read, the file is shorter than it
        should be, or (`nowait`) the bytes are not in memory. Raises OSError as the disk does.
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
            n = os.preadv(self._data_fd, [buffer], offset, self.nowait_flag if nowait else 0)
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


def open_files(dirs: NodeDirs, blob: Digest, size: int, chunk_size: int) -> BlobFiles:
    """Open, and where needed create or convert, the cache files of a blob.

    A full or read-only disk gives `volatile` files: reads then go through to the store.
    Raises Busy, TooNew, or CacheError (not a directory of ours).
    """
    path = dirs.blob(blob)
    try:
        with setup_lock(path):
            return open_files_locked(path, blob, size, chunk_size)
    except OSError as e:
        if e.errno in _NO_SPACE:
            return BlobFiles(f"blob {blob[:12]}", size, chunk_size, -1, -1, -1)
        raise CacheError(f"cache of blob {blob[:12]}: {path}: {e.strerror}") from None


def open_files_locked(path: Path, blob: Digest, size: int, chunk_size: int) -> BlobFiles:
    """`open_files` for who holds the `setup_lock`; OSError as it comes."""
    what = f"blob {blob[:12]}"
    count = chunk_count(size, chunk_size)
    with contextlib.ExitStack() as opened:

        def opening(name: str, flags: int = 0) -> int:
            fd = os.open(path / name, flags | _OPEN, 0o600)
            opened.callback(os.close, fd)
            return fd

        try:
            present, data = opening("present"), opening("data")
            header = os.pread(present, _PRESENT.size, 0)
            same = _check_header(header, what, size, chunk_size, os.fstat(data).st_ino)
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            same = False  # missing, or somebody's symlink
        if not same or os.fstat(present).st_size != HEADER + 4 * count:
            present, data = _create_pair(path, size, chunk_size, opening)
        elif header[-36:].decode("ascii", "replace") != boot_id():
            _set_boot(present, count)
        used = os.open(path / "used", os.O_CREAT | _OPEN, 0o600)
        try:
            if count:
                os.posix_fallocate(used, 0, 4 * count)
                files = BlobFiles(what, size, chunk_size, present, data, used)
                opened.pop_all()
                files.repair_if_short(SETUP_WAIT_S)
                return files
        finally:
            os.close(used)
    return BlobFiles(what, size, chunk_size, -1, -1, -1)  # an empty blob


def _check_header(header: bytes, what: str, size: int, chunk_size: int, inode: int) -> bool:
    """Whether `present` belongs to this blob and this data file. TooNew for a newer format."""
    if len(header) < _PRESENT.size or header[:8] != PRESENT_MAGIC:
        return False
    _, version, its_chunk_size, its_size, its_inode, _ = _PRESENT.unpack(header)
    if version > PRESENT_VERSION:
        raise TooNew(
            f"cache of {what}: version {version} is newer than this program knows "
            f"({PRESENT_VERSION})",
            hint="upgrade dsec, or clear the cache",
        )
    return (version, its_chunk_size, its_size, its_inode) == (
        PRESENT_VERSION,
        chunk_size,
        size,
        inode,
    )


def _create_pair(path: Path, size: int, chunk_size: int, opening: _Opening) -> tuple[int, int]:
    """New `present` and `data`, both new inodes: who has the old pair open keeps a pair."""
    for name in ("present", "data"):
        (path / name).unlink(missing_ok=True)
    data = opening("data", os.O_CREAT | os.O_EXCL)
    os.ftruncate(data, size)
    present = opening("present", os.O_CREAT | os.O_EXCL)
    # Allocated at once: a store into a mapped hole of a full disk would be a SIGBUS.
    os.posix_fallocate(present, 0, HEADER + 4 * chunk_count(size, chunk_size))
    header = _PRESENT.pack(
        PRESENT_MAGIC,
        PRESENT_VERSION,
        chunk_size,
        size,
        os.fstat(data).st_ino,
        boot_id().encode(),
    )
    os.pwrite(present, header, 0)
    return present, data


def _set_boot(present: int, count: int) -> None:
    """First open after a boot: VALID becomes OLD, then the boot id is written.

    The id is last, so a crash in between makes the next opener do it again.
    """
    with mmap.mmap(present, HEADER + 4 * count) as mapped, memoryview(mapped) as whole:
        words = whole[HEADER:].cast("I")
        for i, word in enumerate(words.tolist()):
            if word & STATE:
                words[i] = (word & ~STATE) | OLD
        words.release()
    os.pwrite(present, boot_id().encode(), _PRESENT.size - 36)


class _Opening(Protocol):
    """Opens a file below the blob's directory."""

    def __call__(self, name: str, flags: int = 0) -> int: ...


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
