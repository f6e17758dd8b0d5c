"""Two files of a git repository: its index and its configuration.

Index: Documentation/gitformat-index.txt of git 2.39, versions 2 to 4 with SHA-1 names. Only
stat data is ever changed, in place, so that offsets and extensions stay what they were.
Configuration: git-config(1), "Syntax". What must hold: bytes that are not understood to the
last one raise FormatError, so that the caller leaves the file as it is.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from dsecfs.errors import FormatError

INDEX_MAGIC = b"DIRC"
_HEADER = struct.Struct(">4sII")
_STAT = struct.Struct(">10I20sH")
"""ctime s and ns, mtime s and ns, dev, ino, mode, uid, gid, size, object name, flags."""
_CHECKSUM = 20
_SMALLEST = _STAT.size + 2
_LENGTH_MASK, _STAGE_MASK, _EXTENDED, _ASSUME_VALID = 0x0FFF, 0x3000, 0x4000, 0x8000
_SKIP_WORKTREE, _INTENT_TO_ADD = 0x4000, 0x2000
_KNOWN_MANDATORY = (b"sdir",)
"""Extensions whose names begin with a small letter must be understood. `sdir` says that some
entries are directories, which have no stat data. `link` (split index) has its entries elsewhere."""

U32 = 0xFFFFFFFF


class IndexEntry(NamedTuple):
    """One file of an index."""

    at: int
    """Where it begins."""
    mtime_s: int
    mode: int
    size: int
    oid: bytes
    path: bytes
    settled: bool
    """git compares the file with it: not in a merge, not assumed valid, not left out."""


class GitIndex:
    """An index that was understood whole. `set_stat` and `smudge` change it."""

    def __init__(self, data: bytes) -> None:
        self._data = bytearray(data)
        body = len(data) - _CHECKSUM
        if body < _HEADER.size:
            raise FormatError("truncated")
        magic, self.version, count = _HEADER.unpack_from(data)
        if magic != INDEX_MAGIC or not 2 <= self.version <= 4:
            raise FormatError(f"version {self.version} is not known")
        # With index.skipHash the checksum is zeros.
        self._hashed = any(data[body:])
        if self._hashed and hashlib.sha1(data[:body]).digest() != data[body:]:
            raise FormatError("its SHA-1 checksum is wrong (damaged, or SHA-256 names)")
        if count * _SMALLEST > body:
            raise FormatError(f"too short for {count} entries")
        self.entries: list[IndexEntry] = []
        at = _HEADER.size
        path = b""
        for _ in range(count):
            at, path = self._entry(data, at, body, path)
        _check_extensions(data, at, body)

    def _entry(self, data: bytes, at: int, body: int, before: bytes) -> tuple[int, bytes]:
        """Read the entry at `at`; where the next one begins, and the entry's path."""
        if at + _SMALLEST > body:
            raise FormatError("truncated in an entry")
        _, _, mtime_s, _, _, _, mode, _, _, size, oid, flags = _STAT.unpack_from(data, at)
        settled = not flags & (_STAGE_MASK | _ASSUME_VALID)
        start = at + _STAT.size
        if flags & _EXTENDED:
            if self.version < 3:
                raise FormatError("extended flags in version 2")
            more = int.from_bytes(data[start : start + 2], "big")
            settled = settled and not more & (_SKIP_WORKTREE | _INTENT_TO_ADD)
            start += 2
        kept = b""
        if self.version == 4:
            strip, start = _varint(data, start, body)
            if strip > len(before):
                raise FormatError("a path cuts more than there is")
            kept = before[: len(before) - strip]
        nul = data.find(b"\0", start, body)
        if nul < 0:
            raise FormatError("truncated in a path")
        path = kept + data[start:nul]
        if not path:
            raise FormatError("an entry without a path (a split index)")
        if min(len(path), _LENGTH_MASK) != flags & _LENGTH_MASK:
            raise FormatError("a path has another length than its entry says")
        end = nul + 1
        if self.version < 4:
            # 1 to 8 NULs, so that the entry has a multiple of 8 bytes.
            end = at + (nul - at + 8) // 8 * 8
            if end > body or any(data[nul:end]):
                raise FormatError("an entry is not padded")
        self.entries.append(IndexEntry(at, mtime_s, mode, size, oid, path, settled))
        return end, path

    def set_stat(self, entry: IndexEntry, mtime_ns: int, uid: int, gid: int, size: int) -> None:
        """Give an entry the stat data of a file. Device and inode are 0: nobody knows them."""
        second, nanosecond = divmod(mtime_ns, 10**9)
        times = (second & U32, nanosecond) * 2
        struct.pack_into(">6I", self._data, entry.at, *times, 0, 0)
        struct.pack_into(">3I", self._data, entry.at + 28, uid & U32, gid & U32, size & U32)

    def smudge(self, entry: IndexEntry) -> None:
        """Have git read the file: size 0, as git itself marks entries it must not trust
        (Documentation/technical/racy-git.txt)."""
        struct.pack_into(">I", self._data, entry.at + 36, 0)

    def to_bytes(self) -> bytes:
        if self._hashed:
            body = memoryview(self._data)[:-_CHECKSUM]
            self._data[-_CHECKSUM:] = hashlib.sha1(body).digest()
        return bytes(self._data)


def _check_extensions(data: bytes, at: int, body: int) -> None:
    while at < body:
        if at + 8 > body:
            raise FormatError("bytes that are no extension")
        name = data[at : at + 4]
        if not name[:1].isupper() and name not in _KNOWN_MANDATORY:
            raise FormatError(
                "a split index" if name == b"link" else f"extension {name!r} is not known"
            )
        at += 8 + int.from_bytes(data[at + 4 : at + 8], "big")
    if at != body:
        raise FormatError("an extension is truncated")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """git's offset encoding (varint.c); the value and where it ends."""
    value = -1
    while True:
        if at >= end or value > U32:
            raise FormatError("truncated in a number")
        byte = data[at]
        at += 1
        value = (value + 1) << 7 | byte & 0x7F
        if not byte & 0x80:
            return value, at


Config = dict[bytes, bytes]
"""Keys as `section.key` or `section.subsection.key` -> the last value ("" without one)."""

_WHITE = b" \t\r"
_ESCAPES = {0x6E: b"\n", 0x74: b"\t", 0x62: b"\b", 0x22: b'"', 0x5C: b"\\"}


def parse_config(data: bytes) -> Config:
    """The values of a configuration file, keys in lower case. Included files are not read."""
    found: Config = {}
    section = b""
    data = data.removeprefix(b"\xef\xbb\xbf")
    if b"\0" in data:
        raise FormatError("a NUL")
    at = 0
    while at < len(data):
        c = data[at : at + 1]
        if c in b" \t\r\n":
            at += 1
        elif c in b"#;":
            at = _line_end(data, at)
        elif c == b"[":
            section, at = _section(data, at + 1)
        else:
            key_end = at
            while data[key_end : key_end + 1].isalnum() or data[key_end : key_end + 1] == b"-":
                key_end += 1
            key = data[at:key_end]
            if not section or not key[:1].isalpha():
                raise FormatError(f"no setting at byte {at}")
            at = key_end
            while data[at : at + 1] in (b" ", b"\t"):
                at += 1
            value = b""
            if data[at : at + 1] == b"=":
                value, at = _value(data, at + 1)
            elif data[at : at + 1] not in (b"", b"\n") and data[at : at + 2] != b"\r\n":
                raise FormatError(f"no value at byte {at}")
            found[section + b"." + key.lower()] = value
    return found


def _line_end(data: bytes, at: int) -> int:
    end = data.find(b"\n", at)
    return len(data) if end < 0 else end


def _section(data: bytes, at: int) -> tuple[bytes, int]:
    """`name]`, `name "subsection"]`: its key prefix and where it ends."""
    end = at
    while data[end : end + 1].isalnum() or data[end : end + 1] in (b"-", b"."):
        end += 1
    name = data[at:end].lower()
    at = end
    while data[at : at + 1] in (b" ", b"\t"):
        at += 1
    if at > end:
        if data[at : at + 1] != b'"':
            raise FormatError("a section's name does not end")
        sub = bytearray()
        at += 1
        while (c := data[at : at + 1]) != b'"':
            if c == b"\\":
                at += 1
                c = data[at : at + 1]
            if c in (b"", b"\n"):
                raise FormatError("a section's name does not end")
            sub += c
            at += 1
        at += 1
        name += b"." + bytes(sub)
    if not name or data[at : at + 1] != b"]":
        raise FormatError("a section's name does not end")
    return name, at + 1


def _value(data: bytes, at: int) -> tuple[bytes, int]:
    """The value behind `=` and where it ends."""
    out = bytearray()
    kept = 0
    """Length without white space at the end."""
    quoted = False
    while at < len(data):
        c = data[at]
        at += 1
        if c == 0x0A:
            if quoted:
                raise FormatError("a quoted value does not end")
            at -= 1
            break
        if c == 0x5C:
            after = data[at : at + 2]
            if after[:1] == b"\n" or after == b"\r\n":
                at += 1 if after[:1] == b"\n" else 2
                continue
            if not after or after[0] not in _ESCAPES:
                raise FormatError("an escape that does not exist")
            out += _ESCAPES[after[0]]
            at += 1
            kept = len(out)
        elif c == 0x22:
            quoted = not quoted
            kept = len(out)
        elif not quoted and c in b"#;":
            at = _line_end(data, at)
            break
        elif quoted or c not in _WHITE:
            out.append(c)
            kept = len(out)
        elif out:
            out.append(c)
    if quoted:
        raise FormatError("a quoted value does not end")
    if data[at - 1 : at] == b"\n" and at == len(data) and data[at - 2 : at] == b"\\\n":
        raise FormatError("ends in the middle of a value")
    return bytes(out[:kept]), at
