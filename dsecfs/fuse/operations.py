"""The FUSE handlers: requests of the kernel to spaces, errors to errno.

What must hold:
- handlers keep no state the next worker would miss: numbers say everything (slots.py);
- a read that the cache can answer is answered in the event loop, without a thread;
- nothing but FUSEError (and a cancellation) leaves a handler: anything else would end the
  mount. What is unexpected is logged with its traceback and answered with EIO;
- every request that is being handled is noted in the shared page; one that has killed
  workers is answered with EIO, one that is suspected is handled alone among suspects.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FUSEError, InodeT

from dsecfs.errors import (
    BadInput,
    Busy,
    DsecfsError,
    FormatError,
    NotFound,
    Unsupported,
)
from dsecfs.fuse.shared import NOTE_SLOTS, POINTS_LIMIT, RequestKey, SharedPage
from dsecfs.fuse.spaces import FOREVER, Data, Space
from dsecfs.fuse.top import Spaces, split_ino
from dsecfs.layers.tree import BLOCK, NAME_MAX

log = logging.getLogger("dsecfs.fuse.operations")

WAITING_BYTES = 48 << 20
"""Bytes of reads that wait for the store at once: many enough to keep a distant one busy, few
enough for the memory of a worker."""
ISOLATION_S = 5.0
"""How long a suspected request waits for the one before it to be proven innocent."""

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

HANDLERS = (
    "lookup", "forget", "getattr", "readlink", "open", "read", "release",
    "opendir", "readdir", "releasedir", "statfs", "getxattr", "listxattr",
)  # fmt: skip
"""What a worker puts over the supervisor's empty handlers. All else answers ENOSYS (after one
ENOSYS to a flush the kernel sends no more of them) or, on a read-only mount, never comes."""


class QuietLog:
    """Lets a burst of one kind of message through, then counts."""

    def __init__(self, limit: int = 10, window_s: float = 10.0) -> None:
        self._limit = limit
        self._window_s = window_s
        self._since = 0.0
        self._count = 0

    def allows(self) -> bool:
        now = time.monotonic()
        if now - self._since > self._window_s:
            if self._count > self._limit:
                log.error("%d more errors were not logged", self._count - self._limit)
            self._since, self._count = now, 0
        self._count += 1
        return self._count <= self._limit


class ByteBudget:
    """At most so many bytes are being waited for; first come, first served."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._turn = trio.StrictFIFOLock()
        self._freed = trio.lowlevel.ParkingLot()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Wait for room. A single request that is larger than all of it passes alone."""
        async with self._turn:
            while self._used and self._used + size > self._limit:
                await self._freed.park()
            self._used += size
        try:
            yield
        finally:
            self._used -= size
            self._freed.unpark_all()


def errno_of(error: DsecfsError, *, reading: bool) -> int:
    """What a caller of read(2) or open(2) sees. Missing data in a known file is EIO."""
    if isinstance(error, NotFound):
        return errno.EIO if reading else errno.ENOENT
    if isinstance(error, BadInput):
        return errno.EINVAL
    if isinstance(error, Busy):
        return errno.EBUSY
    if isinstance(error, Unsupported):
        return errno.EOPNOTSUPP
    return errno.EIO


def _guarded(number: int) -> Callable[[F], F]:
    """Note the request, handle it, and let only FUSEError out. `number` tells operations
    apart in the page and never changes."""

    def decorate(handler: F) -> F:
        @wraps(handler)
        async def call(self: Handlers, ino: int, *args: Any) -> Any:
            a = args[0] if args else 0
            b = args[1] if len(args) > 1 else 0
            a = zlib.crc32(a) if type(a) is bytes else a if type(a) is int else 0
            b = b if type(b) is int else 0
            turn = None
            if self.suspects and (number, ino, a, b) in self.suspects:
                key = RequestKey(number, ino, a, b)
                self.waiting += 1
                try:
                    turn = await self.take_turn(key)
                finally:
                    self.waiting -= 1
            slot = self.free_notes.pop() if self.free_notes else -1
            if slot >= 0:
                self.page.note(slot, number, ino, a, b)
            try:
                try:
                    return await handler(self, ino, *args)
                except FormatError:
                    # A layer's image was damaged on this node, and is mended by now.
                    if not self.reopened(ino):
                        raise
                    return await handler(self, ino, *args)
            except FUSEError:
                raise
            except Exception as e:
                raise FUSEError(self.explain(e, handler.__name__, ino)) from e
            finally:
                if slot >= 0:
                    self.page.unnote(slot)
                    self.free_notes.append(slot)
                if turn is not None:
                    self.acquit(key, turn)

        return cast(F, call)

    return decorate


class Handlers(pyfuse3.Operations):
    """Serves one mount. `root` is the inode number that FUSE's root number 1 stands for."""

    def __init__(
        self, spaces: Spaces, page: SharedPage, root: int, request_limit_s: float
    ) -> None:
        self._spaces = spaces
        self._root = root
        self._limit_s = request_limit_s
        self._quiet = QuietLog()
        self._isolation = trio.Lock()
        self._waiting_bytes = ByteBudget(WAITING_BYTES)
        self.page = page
        self.free_notes = list(range(NOTE_SLOTS))
        self.suspects = page.suspects()
        self.reads = 0
        self.waited_reads = 0
        self.waiting = 0
        """Requests that wait for something right now."""
        self.errors = 0

    # -- guarding

    def explain(self, error: Exception, what: str, ino: int) -> int:
        """Log an error that a handler met and return its errno."""
        self.errors += 1
        slot, node = split_ino(ino)
        if isinstance(error, DsecfsError):
            code = errno_of(error, reading=what in ("read", "open"))
            if code != errno.ENOENT and self._quiet.allows():
                log.error("%s of %d:%d: %s", what, slot, node, error)
            return code
        if isinstance(error, trio.TooSlowError):
            if self._quiet.allows():
                log.error("%s of %d:%d took longer than %g s", what, slot, node, self._limit_s)
            return errno.EIO
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            if self._quiet.allows():
                log.error("%s of %d:%d: %s", what, slot, node, error)
            return error.errno
        if self._quiet.allows():
            log.error("%s of %d:%d: unexpected", what, slot, node, exc_info=error)
        return errno.EIO

    async def take_turn(self, key: RequestKey) -> bool:
        """A request that was being handled when a worker died: one of them at a time, so
        that the next death names the culprit. Whether the turn was got in time."""
        if self.suspects[key] >= POINTS_LIMIT:
            if self._quiet.allows():
                log.error("%s: refused, it ended workers repeatedly", key)
            raise FUSEError(errno.EIO)
        with trio.move_on_after(ISOLATION_S):
            await self._isolation.acquire()
            return True
        return False

    def acquit(self, key: RequestKey, turn: bool) -> None:
        """A suspected request was answered and we are still here."""
        if turn:
            self._isolation.release()
        if self.suspects.pop(key, None) is not None:
            self.page.acquit(key)

    def _split(self, ino: int) -> tuple[int, int]:
        return split_ino(self._root if ino == pyfuse3.ROOT_INODE else ino)

    def reopened(self, ino: int) -> bool:
        """Whether what `ino` belongs to has other files on disk than were open."""
        return self._spaces.reopen(self._split(ino)[0])

    def _find(self, ino: int) -> tuple[Space, int]:
        slot, node = self._split(ino)
        return self._spaces.get(slot), node

    def _entry(self, ino: int, space: Space, node: int) -> EntryAttributes:
        a = space.attributes(node)
        entry = EntryAttributes()
        entry.st_ino = InodeT(ino)
        entry.st_mode = pyfuse3.ModeT(a.mode)
        entry.st_size = a.size
        entry.st_nlink = a.nlink
        entry.st_uid = a.uid
        entry.st_gid = a.gid
        entry.st_rdev = a.rdev
        entry.st_blksize = BLOCK
        entry.st_blocks = -(-a.size // BLOCK) * (BLOCK // 512)
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = a.mtime_ns
        entry.attr_timeout = FOREVER
        return entry

    # -- handlers

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """Nothing is kept per inode."""

    async def release(self, fh: FileHandleT) -> None:
        """Nothing is kept per open file."""

    async def releasedir(self, fh: FileHandleT) -> None:
        """Nothing is kept per open directory."""

    @_guarded(1)
    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: Any) -> EntryAttributes:
        space, node = self._find(parent_inode)
        if len(name) > NAME_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        ino = space.lookup(node, name)
        if ino:
            child, child_node = self._find(ino)
            entry = self._entry(ino, child, child_node)
        else:
            # Remembered by the kernel: programs look for a module in many directories.
            entry = EntryAttributes()
            entry.st_ino = InodeT(0)
        entry.entry_timeout = space.names_hold(node)
        return entry

    @_guarded(2)
    async def getattr(self, inode: InodeT, ctx: Any) -> EntryAttributes:
        space, node = self._find(inode)
        return self._entry(inode, space, node)

    @_guarded(3)
    async def readlink(self, inode: InodeT, ctx: Any) -> bytes:
        space, node = self._find(inode)
        return space.readlink(node)

    @_guarded(4)
    async def open(self, inode: InodeT, flags: int, ctx: Any) -> FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise FUSEError(errno.EROFS)
        self._find(inode)
        return FileInfo(fh=FileHandleT(inode), keep_cache=True)

    @_guarded(5)
    async def read(self, fh: FileHandleT, off: int, size: int) -> Data:  # type: ignore[override]
        space, node = self._find(fh)
        self.reads += 1
        data = space.read_nowait(node, off, size)
        if data is None:
            self.waited_reads += 1
            self.waiting += 1
            try:
                with trio.fail_after(self._limit_s):
                    async with self._waiting_bytes.hold(size):
                        data = await space.aread(node, off, size)
            finally:
                self.waiting -= 1
        return data

    @_guarded(6)
    async def opendir(self, inode: InodeT, ctx: Any) -> FileHandleT:
        space, node = self._find(inode)
        if not stat.S_ISDIR(space.attributes(node).mode):
            raise FUSEError(errno.ENOTDIR)
        return FileHandleT(inode)

    @_guarded(7)
    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        space, node = self._find(fh)
        hold = space.names_hold(node)
        for cookie, name, ino in space.listing(node, start_id):
            child, child_node = self._find(ino)
            entry = self._entry(ino, child, child_node)
            entry.entry_timeout = hold
            if not pyfuse3.readdir_reply(token, name, entry, cookie):
                break

    @_guarded(8)
    async def getxattr(self, inode: InodeT, name: bytes, ctx: Any) -> bytes:
        space, node = self._find(inode)
        value = space.xattrs(node).get(name)
        if value is None:
            raise FUSEError(errno.ENODATA)
        return value

    @_guarded(9)
    async def listxattr(self, inode: InodeT, ctx: Any) -> Sequence[bytes]:
        space, node = self._find(inode)
        # As every file system does: `trusted.` is shown to the administrator only.
        names = space.xattrs(node)
        return sorted(n for n in names if ctx.uid == 0 or not n.startswith(b"trusted."))

    async def statfs(self, ctx: Any) -> pyfuse3.StatvfsData:
        """A file system that is full and read-only; overlayfs on top needs an answer."""
        s = pyfuse3.StatvfsData()
        s.f_bsize = s.f_frsize = BLOCK
        s.f_namemax = NAME_MAX
        return s
