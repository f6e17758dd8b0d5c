"""Inode numbers that mean something without any table in the process that made them.

The kernel keeps inode numbers and file handles while workers come and go. A number is

    slot << 40 | node

where the slot names *what* (a blob, a tree, a trace) and the node *where in it*, a number
that follows from the content alone. Slots are entered in a registry before their number
is given to the kernel. The registry is a memfd that all processes of a mount inherit: it
lives exactly as long as the mount. Only the holder of the worker lock writes it.

    0   u64 bytes in use, this header included
    8   records: u32 length, key

What must hold: a record is whole before the header covers it, and is never changed.
"""

from __future__ import annotations

import os
import struct

from dsecfs.errors import BadInput, FormatError, NotFound

NODE_BITS = 40
NODE_MASK = (1 << NODE_BITS) - 1
MAX_SLOTS = 1 << (63 - NODE_BITS)
MAX_KEY = 1 << 20

_USED = struct.Struct("=Q")
_LENGTH = struct.Struct("=I")


class Slots:
    """The registry. Slot 0 is never given out: it holds the fixed top of a mount."""

    def __init__(self, fd: int) -> None:
        """Read what earlier workers entered in the file `fd`, which may be empty."""
        self._fd = fd
        self._keys: list[bytes] = [b""]
        self._slots: dict[bytes, int] = {}
        head = os.pread(fd, _USED.size, 0)
        self._used = _USED.unpack(head)[0] if len(head) == _USED.size else _USED.size
        self._used = max(self._used, _USED.size)
        at = _USED.size
        data = os.pread(fd, self._used, 0)
        if len(data) < self._used and self._used != _USED.size:
            raise FormatError("FUSE slots: truncated")
        while at < self._used:
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            if at + length > self._used:
                raise FormatError("FUSE slots: a record is cut off")
            self._enter(data[at : at + length])
            at += length

    def _enter(self, key: bytes) -> int:
        slot = len(self._keys)
        self._keys.append(key)
        self._slots[key] = slot
        return slot

    def number(self, key: bytes) -> int:
        """The slot of `key`, entered now if it has none."""
        slot = self._slots.get(key)
        if slot is not None:
            return slot
        if len(key) > MAX_KEY or len(self._keys) >= MAX_SLOTS:
            raise BadInput("FUSE slots: no room for another blob or tree", hint="mount again")
        record = _LENGTH.pack(len(key)) + key
        if os.pwrite(self._fd, record, self._used) != len(record):
            raise FormatError("FUSE slots: short write")
        self._used += len(record)
        os.pwrite(self._fd, _USED.pack(self._used), 0)
        return self._enter(key)

    def key(self, slot: int) -> bytes:
        """What `slot` stands for. NotFound if it was never given out."""
        if not 0 < slot < len(self._keys):
            raise NotFound(f"FUSE slot {slot} was never given out")
        return self._keys[slot]
