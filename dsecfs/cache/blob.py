"""One blob's part of the node's cache: the files in its directory, and how they are set up.

Owns data/blobs/<hex>/ (docs/cache-protocol.md has the whole protocol and its crash analysis):

    chunks    size, chunk size and all chunk digests; proves itself by the blob's digest
    layout    the newest layout that was fetched (owned by layouts.py)
    data      sparse file of the blob's size
    present   header, then one 32-bit word per chunk (blobfiles.py), mapped by every process
    used      one 32-bit word per chunk: seconds since 1970 of its last use, approximate
    pins/     one file per pin; a pinned blob is never evicted
    scrubbed  empty; its time says when all chunks were last hashed (owned by scrub.py)

What must hold:
- `present` names the inode of its `data`; a pair that does not match is replaced as a pair,
  so two processes never share one of the two files and not the other;
- who has the pair open holds a shared flock(2) on `present`; a directory goes only while
  nobody does, nothing pins it, and nobody has lately been told that the blob is here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from dsecfs.cache.blobfiles import ABSENT, HEADER, OLD, STATE, BlobFiles
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
from dsecfs.nodedirs import NodeDirs, age_s, boot_id

log = logging.getLogger(__name__)

CHUNKS_MAGIC = b"DSECBLOB"
CHUNKS_VERSION = 1
_CHUNKS = struct.Struct("<8sIIQ8x")

PRESENT_MAGIC = b"DSECPRES"
PRESENT_VERSION = 1
_PRESENT = struct.Struct("<8sIIQQ36s")

SETUP_WAIT_S = 10.0
"""Longest wait for another process that is setting up or evicting from the same blob."""

_PIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENFILE)

_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

_STATES = bytes(i & STATE for i in range(256))
"""The state in the lowest byte of a word …"""
_OLD_STATES = bytes(OLD if i & STATE else ABSENT for i in range(256))
"""… and what it is worth in a later boot."""

_SAY_AGAIN_S = 60.0
_said_at = -_SAY_AGAIN_S
"""When it was last logged that this process has too many open files."""


class ChunkList(NamedTuple):
    """What a blob is made of, as `chunks` has it; verified against the blob's name."""

    size: int
    chunk_size: int
    digests: bytes


def write_chunk_list(dirs: NodeDirs, ref: BlobRef, digests: bytes) -> None:
    """Give the cache the chunk digests of blob `ref` (from a verified head). Idempotent.

    Atomic: a reader sees the old file or the new one. Not synced: the file proves itself,
    and the next mount writes it again if a power loss took it. The blob then counts as just
    used (`forget_blob`). Raises Corrupt when `digests` are not those of the blob, Busy,
    CacheError when the disk refuses.
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
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            # Not `exist_ok`: that looks again, and may find that it was forgotten meanwhile.
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            try:
                with setup_lock(path):
                    _put_chunk_list(path / "chunks", data)
                return
            except FileNotFoundError:
                continue  # forgotten between the two steps
    except OSError as e:
        raise CacheError(
            f"chunk list of blob {ref.digest[:12]}: cannot write {path}: {e.strerror}",
            hint="free space, or move the cache to another disk",
        ) from None


def _put_chunk_list(path: Path, data: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == data:
            os.utime(path)
            return
    replace_file(path, data)


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

    Raises Busy after `wait_s`, FileNotFoundError if there is no such directory (any more).
    The kernel lets go of it when the holder dies.
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
        if os.stat(path, follow_symlinks=False).st_ino != os.fstat(fd).st_ino:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
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


def stored_states(dirs: NodeDirs, blob: Digest) -> bytes | None:
    """The state of each chunk as the files say it now, VALID of an earlier boot as OLD.

    Opens nothing for longer than a read, so it is cheap for a look at many blobs. None if
    there is no usable `present`.
    """
    try:
        content = (dirs.blob(blob) / "present").read_bytes()
    except OSError:
        return None
    if content[:12] != _PRESENT.pack(PRESENT_MAGIC, PRESENT_VERSION, 0, 0, 0, b"")[:12]:
        return None
    here = content[_PRESENT.size - 36 : _PRESENT.size] == boot_id().encode()
    return content[HEADER::4].translate(_STATES if here else _OLD_STATES)


def forget_blob(dirs: NodeDirs, blob: Digest, idle_s: float) -> bool:
    """Remove all that this node has of `blob`, cached data included. False, and nothing is
    done, if it is pinned, open, being set up, or its chunk list was given (`write_chunk_list`)
    within the last `idle_s` seconds: somebody may be about to mount it. CacheError.
    """
    path = dirs.blob(blob)
    gone = dirs.gone / blob
    try:
        gone.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(setup_lock(path, 0.0))
            except (Busy, FileNotFoundError):
                return False
            if pins(dirs, blob) or not _is_idle(path / "chunks", idle_s):
                return False
            with contextlib.suppress(FileNotFoundError):
                present = os.open(path / "present", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                stack.callback(os.close, present)
                try:
                    fcntl.flock(present, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            if gone.exists():
                shutil.rmtree(gone)
            path.rename(gone)
        shutil.rmtree(gone)
    except OSError as e:
        raise CacheError(f"forget blob {blob[:12]}: {path}: {e.strerror}") from None
    return True


def _is_idle(path: Path, idle_s: float) -> bool:
    try:
        return age_s(path.stat()) >= idle_s
    except FileNotFoundError:
        return True


def _pin_name(name: str) -> str:
    if not _PIN.match(name):
        raise BadInput(f"not a pin name: {name[:80]!r}", hint="use A-Z a-z 0-9 . _ -")
    return name


def open_files(dirs: NodeDirs, blob: Digest, size: int, chunk_size: int) -> BlobFiles:
    """Open, and where needed create or convert, the cache files of a blob.

    A full or read-only disk gives `volatile` files: reads then go through to the store.
    Raises Busy, TooNew, NotFound (forgotten), or CacheError (not a directory of ours).
    """
    path = dirs.blob(blob)
    try:
        with setup_lock(path):
            return open_files_locked(path, blob, size, chunk_size)
    except FileNotFoundError:
        raise NotFound(
            f"cache of blob {blob[:12]}: not on this node", hint="mount a layer that uses it"
        ) from None
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            _say_no_files(e)
        if e.errno in _NO_SPACE:
            return BlobFiles(f"blob {blob[:12]}", size, chunk_size, -1, -1, -1)
        raise CacheError(f"cache of blob {blob[:12]}: {path}: {e.strerror}") from None


def _say_no_files(error: OSError) -> None:
    """Not at every read: each blob is tried again every few seconds."""
    global _said_at
    if time.monotonic() - _said_at > _SAY_AGAIN_S:
        _said_at = time.monotonic()
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        log.error(
            "blobs are read through, nothing is kept: %s (limits of open files: %d, %d)",
            error.strerror, soft, hard,
        )  # fmt: skip


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
        # Says that it is in use (`forget_blob`); for as long as `present` is open.
        fcntl.flock(present, fcntl.LOCK_SH | fcntl.LOCK_NB)
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
