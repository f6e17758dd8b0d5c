"""The `3fs:` back end: a directory in a 3FS mount, used by the rules of that file system.

Facts this relies on (3FS design notes, src/fuse, src/lib/api/UsrbIo.md):
- rename replaces silently, and no lock reaches another host: link(2) is the only step
  that decides, also for content, and an object that is there with the right bytes stays;
- names are cached, absent ones for 5 s: a name just given is asked for again (settle_s);
- another client may see an old length until a file is closed: written, fsynced and closed
  before it gets its name; never appended to;
- large requests, many in flight, are fast: big write buffers, and USRBIO for big reads
  where its Python package is installed (store/usrbio.py); pread through FUSE elsewhere;
- extended attributes are refused: none are used.
"""

from __future__ import annotations

import contextlib
import os

from dsecfs.errors import NotFound
from dsecfs.store.base import Priority
from dsecfs.store.directory import DirectoryStore
from dsecfs.store.keys import check_range
from dsecfs.store.usrbio import open_reader

NEGATIVE_CACHE_S = 5.0
"""src/fuse/FuseConfig.h, negative_timeout."""

USRBIO_MIN = 512 * 1024
"""Bytes from which a read is worth a ring: below, the set-up costs more than FUSE does."""


class ThreeFsStore(DirectoryStore):
    """Objects as files in a 3FS mount. Any other directory works too, only slower."""

    scheme = "3fs"
    settle_s = NEGATIVE_CACHE_S + 0.5
    buffer_size = 8 << 20

    def __init__(self, root: str | os.PathLike[str], *, create: bool = False) -> None:
        super().__init__(root, create=create)
        self._usrbio = open_reader(self.root)

    def get_range(
        self, key: str, offset: int, length: int, *, priority: Priority = Priority.FOREGROUND
    ) -> bytes:
        check_range(key, offset, length)
        reader = self._usrbio
        if reader is None or not reader.usable or length < USRBIO_MIN:
            return super().get_range(key, offset, length, priority=priority)
        with self._doing("read", key), self._open_object(key) as (fd, size):
            if offset + length > size:
                raise self._short(key, offset, length, max(0, size - offset))
            # The reader owns its descriptor: an answer that never came keeps it open.
            data = reader.read(os.dup(fd), offset, length)
            if len(data) != length:
                raise self._short(key, offset, length, len(data))
            return data

    def close(self) -> None:
        if self._usrbio is not None:
            self._usrbio.close()
        super().close()

    def _place(self, tmp: int, name: str, key: str) -> None:
        if self._link(tmp, name, key):
            return
        with self._make_parent(key) as parent:
            base = key.rpartition("/")[2]
            with contextlib.suppress(FileNotFoundError):
                if self._equal(tmp, name, key):
                    # Readers hold it open; collection goes by its time.
                    os.utime(base, dir_fd=parent, follow_symlinks=False)
                    return
        # Damaged, or deleted this moment: put it (back) in place.
        super()._place(tmp, name, key)

    def _equal(self, tmp: int, name: str, key: str) -> bool:
        """Whether what is under `key` is what would take its place: publishing again must heal
        an object that has its length and other bytes."""
        mine = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=tmp)
        try:
            size = os.fstat(mine).st_size
            with self._open_object(key) as (there, length):
                return length == size and all(
                    self._pread(mine, at, self.buffer_size)
                    == self._pread(there, at, self.buffer_size)
                    for at in range(0, size, self.buffer_size)
                )
        except NotFound:
            return False  # something that is no file
        finally:
            os.close(mine)
