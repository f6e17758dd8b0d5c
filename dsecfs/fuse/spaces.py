"""The small interface that everything in a mount is read through.

A *space* is a set of files behind one slot: one blob, one composed tree, one trace, the
fixed top. Its nodes are numbers below 2**40 that follow from its content. The FUSE
handlers know nothing else.

Methods run in the event loop and must be quick; only `aread` may wait. They raise errors
of dsecfs.errors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

FOREVER = 365 * 86400.0
"""Seconds the kernel may believe what cannot change."""
SOON = 1.0
"""Seconds the kernel may believe what a name stands for that can be given anew."""


Data = bytes | bytearray
"""File content that is handed to the kernel as it is."""


class Attributes(NamedTuple):
    """What stat(2) shows."""

    mode: int
    size: int = 0
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    mtime_ns: int = 0


class DirEntry(NamedTuple):
    """One entry of a listing."""

    cookie: int
    """A listing that is continued with `start=cookie` goes on behind this entry."""
    name: bytes
    ino: int


class Space(Protocol):
    """Files behind one slot. Attributes and data of a node never change."""

    def names_hold(self, node: int) -> float:
        """Seconds for which the kernel may believe names in directory `node`."""

    def attributes(self, node: int) -> Attributes: ...

    def lookup(self, node: int, name: bytes) -> int:
        """The inode number of `name` in directory `node`. NotFound if there is none; 0 if the
        kernel may believe that as long as it believes names."""

    def listing(self, node: int, start: int) -> Iterator[DirEntry]:
        """Entries of directory `node` behind cookie `start` (0 from the beginning)."""

    def readlink(self, node: int) -> bytes: ...

    def xattrs(self, node: int) -> Mapping[bytes, bytes]: ...

    def read_nowait(self, node: int, offset: int, size: int) -> Data | None:
        """Bytes of a file (short only at its end), None if that would have to wait."""

    async def aread(self, node: int, offset: int, size: int) -> Data:
        """The same, waiting for the store if need be."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Bounded(OrderedDict[K, V]):
    """A dictionary that forgets what was used longest ago when it weighs too much."""

    def __init__(self, limit: int, weigh: Callable[[V], int] = lambda _: 1) -> None:
        super().__init__()
        self._limit = limit
        self._weigh = weigh
        self._weight = 0

    def use(self, key: K) -> V | None:
        """The value of `key`, which is thereby the last to be forgotten."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

    def keep(self, key: K, value: V) -> V:
        """Enter a value; what was used longest ago may be forgotten."""
        self.drop(key)
        self[key] = value
        self._weight += self._weigh(value)
        while self._weight > self._limit and len(self) > 1:
            _, oldest = self.popitem(last=False)
            self._weight -= self._weigh(oldest)
        return value

    def drop(self, key: K) -> None:
        """Forget a value, if there is one."""
        old = self.pop(key, None)
        if old is not None:
            self._weight -= self._weigh(old)


def numbered(entries: Iterable[tuple[bytes, int]], start: int) -> Iterator[DirEntry]:
    """Entries with their places as cookies, those up to `start` left out."""
    for place, (name, ino) in enumerate(entries, 1):
        if place > start:
            yield DirEntry(place, name, ino)
