"""The `file:` back end: any POSIX directory, local or shared by all nodes.

Objects are plain files named by their keys. What must hold:
- a file gets its name in one step and only when its bytes are on disk: written in `~tmp`
  (no key can be called that), fsynced, closed, then link(2) or rename(2), and then the
  directory is fsynced;
- link(2) decides `put_if_absent`: it fails with EEXIST and replaces nothing;
- nothing outside the root is opened (store/beneath.py), nothing but regular files is read;
- one call is one attempt; errors are classified here and retried in store/retry.py.

What is left in `~tmp` by writers that died is removed by a later writer after STALE_S.
The root must exist: a store that appears by itself where a mount was missing would take
publishes that nobody ever sees.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from dsecfs.errors import (
    Conflict,
    DsecfsError,
    FormatError,
    NotFound,
    ShortRead,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from dsecfs.store.base import ObjectInfo, Priority
from dsecfs.store.beneath import open_beneath
from dsecfs.store.keys import MAX_KEY, check_key, check_prefix, check_range, is_key

STALE_S = 24 * 3600
"""Age at which a temporary file has no living writer any more."""

_TMP = "~tmp"
_DIR = os.O_RDONLY | os.O_DIRECTORY
# O_NONBLOCK: a fifo under a key must not stop a reader for good.
_READ = os.O_RDONLY | os.O_NONBLOCK
# A parent directory can be pruned by a delete between its making and the link in it.
_RACES = 100
_REMEMBERED = 1024

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_TRANSIENT = {
    errno.EIO,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EREMOTEIO,
}
# The file system behind the root went away; after it is mounted again the path works.
_GONE = {errno.ESTALE, errno.ENOTCONN}


class DirectoryStore:
    """Objects as files below `root`. Thread-safe; safe to share between processes.

    With `create` the root is made if it is missing; otherwise that is NotFound.
    """

    scheme = "file"
    settle_s = 0.0
    buffer_size = 1 << 20
    """Bytes written at a time from a stream."""

    def __init__(self, root: str | os.PathLike[str], *, create: bool = False) -> None:
        self.root = Path(os.path.abspath(root))
        self.url = f"{self.scheme}:{self.root}"
        self._lock = threading.Lock()
        self._retired: list[int] = []
        self._swept = False
        # Ids of puts that created their key, for callers that did not hear the answer.
        self._won: OrderedDict[str, str] = OrderedDict()
        try:
            if create:
                self.root.mkdir(parents=True, exist_ok=True)
            self._fd = self._open_root()
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(
                f"store {self.url}: no such directory",
                hint="check that it is mounted, or make it with `dsec store init`",
            ) from None
        except OSError as e:
            raise StoreDenied(f"store {self.url}: cannot open: {e.strerror}") from None
        self._is_mount = os.path.ismount(self.root)

    # -- reading ---------------------------------------------------------------

    def get(self, key: str, *, max_size: int = 1 << 30) -> bytes:
        with self._doing("read", key), self._open_object(key) as (fd, size):
            if size > max_size:
                raise FormatError(
                    f"{self.url}: {key} has {size} bytes, more than the {max_size} expected"
                )
            data = self._pread(fd, 0, size) if size else b""
            if len(data) != size or os.pread(fd, 1, size):
                raise ShortRead(f"{self.url}: {key} changed while it was read ({size} bytes)")
            return data

    def get_range(
        self, key: str, offset: int, length: int, *, priority: Priority = Priority.FOREGROUND
    ) -> bytes:
        check_range(key, offset, length)
        with self._doing("read", key), self._open_object(key) as (fd, size):
            # Known before it is read: a length from outside must not cost its memory.
            if offset + length > size:
                raise self._short(key, offset, length, max(0, size - offset))
            data = self._pread(fd, offset, length)
            if len(data) != length:
                raise self._short(key, offset, length, len(data))
            return data

    def stat(self, key: str) -> ObjectInfo:
        with self._doing("stat", key), self._open_object(key) as (fd, size):
            return ObjectInfo(key, size, os.fstat(fd).st_mtime)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        yield from self._list(check_prefix(prefix), after)

    # -- writing ---------------------------------------------------------------

    def put_if_absent(self, key: str, data: bytes, *, put_id: str = "") -> bool:
        check_key(key)
        if put_id and self._won.get(put_id) == key:
            return True
        with self._doing("create", key), self._tmp() as tmp:
            name = put_id or uuid.uuid4().hex
            # An earlier attempt may have linked and then failed to say so.
            if not (put_id and self._same(tmp, name, key)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=tmp)
                try:
                    self._write(tmp, name, data)
                    linked = self._link(tmp, name, key)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=tmp)
                    raise
                if not linked:
                    os.unlink(name, dir_fd=tmp)
                    return False
            # Only now is the temporary name, which proves that we won, given up.
            self._sync_parent(key)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=tmp)
            if put_id:
                with self._lock:
                    self._won[put_id] = key
                    if len(self._won) > _REMEMBERED:
                        self._won.popitem(last=False)
            return True

    def put_content(self, key: str, data: bytes | memoryview | BinaryIO) -> None:
        check_key(key)
        with self._doing("store", key), self._tmp() as tmp:
            name = uuid.uuid4().hex
            try:
                self._write(tmp, name, data)
                self._place(tmp, name, key)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=tmp)
            self._sync_parent(key)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._doing("delete", key):
            *parents, name = key.split("/")
            try:
                with self._open("/".join(parents) or ".", _DIR) as directory:
                    os.unlink(name, dir_fd=directory)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return  # no object, perhaps a directory of others
            while parents:
                name = parents.pop()
                try:
                    with self._open("/".join(parents) or ".", _DIR) as directory:
                        os.rmdir(name, dir_fd=directory)
                except OSError:
                    # Not empty, or somebody else prunes or fills it. rmdir(2) decides;
                    # an empty directory that stays is no object and costs nothing.
                    return

    def close(self) -> None:
        with self._lock:
            retired, self._retired = [*self._retired, self._fd], []
            self._fd = -1
        for fd in retired:
            if fd >= 0:
                os.close(fd)

    # -- how -------------------------------------------------------------------

    def _open_root(self) -> int:
        return os.open(self.root, _DIR | os.O_CLOEXEC)

    @contextlib.contextmanager
    def _doing(self, verb: str, key: str) -> Iterator[None]:
        """Turn what the kernel says into the error tree."""
        root = self._fd
        if root < 0:
            raise StoreError(f"{self.url}: cannot {verb} {key}: the store is closed")
        try:
            yield
        except OSError as e:
            if e.errno in _GONE:
                self._reopen(root)
            raise self._error(e, verb, key) from None

    def _error(self, e: OSError, verb: str, key: str) -> DsecfsError:
        what = f"{self.url}: cannot {verb} {key}: {e.strerror or e}"
        if e.errno == errno.ENOENT and verb in ("read", "stat"):
            return NotFound(f"{self.url}: no object {key}")
        if e.errno == errno.ENOTDIR and verb in ("read", "stat"):
            return NotFound(f"{self.url}: no object {key}")
        if e.errno in _DENIED:
            return StoreDenied(what, hint="check owner and mode of the store's directory")
        if e.errno in _FULL:
            return StoreError(what, hint="make room in the store, or collect garbage")
        if e.errno in _TRANSIENT or e.errno == errno.ENOENT:
            return StoreUnavailable(what)
        if e.errno == errno.ELOOP:
            return StoreError(what, hint="the store holds a symbolic link; remove it")
        if e.errno in (errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY):
            return Conflict(what, hint="one key is a directory of another")
        return StoreError(what)

    def _reopen(self, failed: int) -> None:
        """Look the root up again after its file system went away under `failed`.

        The old descriptor stays open until close(): other threads may be using it, and its
        number must not come to mean something else meanwhile.
        """
        with self._lock:
            if self._fd != failed:
                return
            try:
                if self._is_mount and not os.path.ismount(self.root):
                    return
                fd = self._open_root()
            except OSError:
                return
            self._retired.append(failed)
            self._fd = fd

    @contextlib.contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        fd = open_beneath(self._fd, path, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _open_object(self, key: str) -> Iterator[tuple[int, int]]:
        """Descriptor and size of the regular file that holds `key`."""
        with self._open(check_key(key), _READ) as fd:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise NotFound(f"{self.url}: no object {key}")
            yield fd, info.st_size

    def _pread(self, fd: int, offset: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""
        data = os.pread(fd, length, offset)
        if len(data) == length or not data:
            return data
        parts = [data]
        got = len(data)
        while got < length and (data := os.pread(fd, length - got, offset + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def _short(self, key: str, offset: int, length: int, got: int) -> ShortRead:
        return ShortRead(f"{self.url}: {key}: {got} of {length} bytes at {offset}")

    def _list(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        for name, info in self._entries(prefix):
            key = prefix + name
            if name.endswith("/"):
                # All keys below compare with `after` alike, unless it lies among them.
                if len(key) < MAX_KEY and (key > after or after.startswith(key)):
                    yield from self._list(key, after)
            elif key > after and is_key(key):
                yield ObjectInfo(key, info.st_size, info.st_mtime)

    def _entries(self, prefix: str) -> Sequence[tuple[str, os.stat_result]]:
        """What lies directly below `prefix`, in the order of whole keys.

        A directory is named with "/", because that is how its keys compare with siblings:
        "a-b" < "a/…" < "a0".
        """
        found = []
        with self._doing("list", prefix or "it"):
            try:
                with self._open(prefix.rstrip("/") or ".", _DIR) as fd, os.scandir(fd) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):
                            info = entry.stat(follow_symlinks=False)
                            if stat.S_ISDIR(info.st_mode) and is_key(entry.name):
                                found.append((entry.name + "/", info))
                            elif stat.S_ISREG(info.st_mode):
                                found.append((entry.name, info))
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(found, key=lambda pair: pair[0])

    @contextlib.contextmanager
    def _tmp(self) -> Iterator[int]:
        with contextlib.suppress(FileExistsError):
            os.mkdir(_TMP, dir_fd=self._fd)
        with self._open(_TMP, _DIR) as tmp:
            if not self._swept:
                self._swept = True
                self._sweep(tmp)
            yield tmp

    def _sweep(self, tmp: int) -> None:
        """Remove what dead writers left. Ages are measured by the store's own clock."""
        os.utime(tmp)
        now = os.fstat(tmp).st_mtime
        with os.scandir(tmp) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if now - entry.stat(follow_symlinks=False).st_mtime > STALE_S:
                        os.unlink(entry.name, dir_fd=tmp)

    def _write(self, tmp: int, name: str, data: bytes | memoryview | BinaryIO) -> None:
        """A new temporary file whose bytes are on disk and which is closed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o644, dir_fd=tmp)
        try:
            if isinstance(data, (bytes, memoryview)):
                _write_all(fd, memoryview(data).cast("B"))
            else:
                while piece := data.read(self.buffer_size):
                    _write_all(fd, memoryview(piece))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _link(self, tmp: int, name: str, key: str) -> bool:
        """Give the temporary file its key as well. False if the key is taken."""
        base = key.rpartition("/")[2]
        for _ in range(_RACES):
            with self._make_parent(key) as parent:
                try:
                    os.link(name, base, src_dir_fd=tmp, dst_dir_fd=parent, follow_symlinks=False)
                    return True
                except FileExistsError:
                    # NFS repeats a request whose answer was lost and then finds its own link.
                    return self._same(tmp, name, key)
                except FileNotFoundError:
                    continue
        raise StoreUnavailable(f"{self.url}: cannot create {key}: its directory keeps vanishing")

    def _place(self, tmp: int, name: str, key: str) -> None:
        """Move the temporary file to `key`, whatever is there: it has the same content."""
        base = key.rpartition("/")[2]
        for _ in range(_RACES):
            with self._make_parent(key) as parent, contextlib.suppress(FileNotFoundError):
                os.rename(name, base, src_dir_fd=tmp, dst_dir_fd=parent)
                return
        raise StoreUnavailable(f"{self.url}: cannot store {key}: its directory keeps vanishing")

    def _same(self, tmp: int, name: str, key: str) -> bool:
        """Whether the temporary name and the key are one file."""
        try:
            ours = os.stat(name, dir_fd=tmp, follow_symlinks=False)
            with self._open(key, os.O_PATH) as fd:
                return os.path.samestat(ours, os.fstat(fd))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def _make_parent(self, key: str) -> Iterator[int]:
        """The directory of `key`, made and made durable as far as it was missing."""
        parents = key.split("/")[:-1]
        for _ in range(_RACES):
            try:
                fd = open_beneath(self._fd, "/".join(parents) or ".", _DIR)
                break
            except FileNotFoundError:
                self._make_directories(parents)
        else:
            raise StoreUnavailable(f"{self.url}: the directory of {key} keeps vanishing")
        try:
            yield fd
        finally:
            os.close(fd)

    def _make_directories(self, parents: Sequence[str]) -> None:
        for depth, name in enumerate(parents):
            try:
                with self._open("/".join(parents[:depth]) or ".", _DIR) as above:
                    try:
                        os.mkdir(name, dir_fd=above)
                    except FileExistsError:
                        pass  # perhaps made this moment by somebody who has not synced it
                    os.fsync(above)
            except FileNotFoundError:
                return  # pruned meanwhile; the caller begins again

    def _sync_parent(self, key: str) -> None:
        try:
            with self._open(key.rpartition("/")[0] or ".", _DIR) as fd:
                os.fsync(fd)
        except FileNotFoundError:
            return  # put and already deleted by somebody: nothing to make durable


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]
