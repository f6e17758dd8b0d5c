"""The tar format, all dialects met in practice, as a stream of entries.

Formats: POSIX.1-2017 pax and ustar (pax(1), "EXTENDED DESCRIPTION"), GNU tar 1.34 (its
manual, "Tar Internals", and src/tar.h), star's base-256 numbers and SCHILY.* records,
libarchive's LIBARCHIVE.xattr records (tar(5)), Solaris `X` headers, v7.

What must hold: any input gives entries or a DsecfsError, never another exception; every
allocation is bounded by a checked length; names, targets and attributes stay raw bytes.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn
from urllib.parse import unquote_to_bytes

from dsecfs.errors import BadInput, UnsafeArchive
from dsecfs.layers.sources.base import PIECE, ByteStream, Limits, Segment, show

BLOCK = 512
MAX_EXTENDED = 1 << 20
"""Most bytes of a pax header, a GNU long name or a sparse map (Go's archive/tar: the same)."""
MAX_SEGMENTS = 1 << 16

REG, LINK, SYM, CHR, BLK, DIR, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
_HEADER_ONLY = frozenset((LINK, SYM, CHR, BLK, DIR, FIFO))
"""Types whose size field means nothing: no data follows (as Go's archive/tar does)."""

_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12s")
_DIGITS = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_DECIMAL = re.compile(rb"\d{1,20}")
_TIME = re.compile(rb"(-?)(\d{1,20})(?:\.(\d*))?")
_ZEROS = bytes(BLOCK)
_KNOWN_RECORDS = (b"uid", b"gid", b"mtime")
_KNOWN_PREFIXES = (b"SCHILY.xattr.", b"SCHILY.acl.", b"LIBARCHIVE.xattr.")
"""Records that may stand for all entries."""
_MAX_ID = 0xFFFFFFFE
"""uid_t and gid_t have 32 bits, and -1 means "no change" to chown(2)."""


@dataclass(slots=True)
class TarEntry:
    """One member. `size` is the file's; `stored` what follows the header in the archive."""

    name: bytes
    type: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    stored: int
    linkname: bytes
    major: int = 0
    minor: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    acls: dict[bytes, bytes] = field(default_factory=dict)
    """b"access" and b"default" -> ACL as text (SCHILY.acl.*)."""
    segments: list[Segment] | None = None
    """Where the stored bytes lie in a sparse file: any alignment, sorted."""


class TarReader:
    """Entries of an uncompressed tar stream, and the data of the current one.

    Iterate; between two steps `read` gives the current entry's stored data and raises
    when the archive ends inside it. What is left of the data is skipped.
    """

    def __init__(
        self,
        raw: ByteStream,
        limits: Limits,
        what: str,
        *,
        jump: Callable[[int], int] | None = None,
    ) -> None:
        """`jump(n)`, if `raw` can do it, goes forward up to `n` bytes and says how far."""
        self._raw = raw
        self._jump = jump
        self._limits = limits
        self._what = what
        self._buffer = b""
        self._pos = 0
        self._taken = 0  # bytes taken from `raw`
        self._left = 0
        self._padding = 0
        self._entry: TarEntry | None = None
        self.complete = False
        """Whether the archive had an end mark (two zero blocks, POSIX; we accept one)."""

    # Data of the current entry.

    def read(self, n: int, /) -> bytes:
        """Up to `n` bytes of the current entry's data; b"" after the last."""
        if n > self._left:
            n = self._left
            if not n:
                return b""
        data = self._upto(n)
        if not data:
            self._truncated(f"inside the data of {show(self._entry.name)!r}" if self._entry else "")
        self._left -= len(data)
        return data

    @property
    def left(self) -> int:
        """Bytes of the current entry that were not read yet."""
        return self._left

    @property
    def offset(self) -> int:
        """Where in the archive the next byte of the current entry's data lies."""
        return self._taken - (len(self._buffer) - self._pos)

    def label(self) -> str:
        """What to call the current entry in messages."""
        return f"{self._what}: entry {show(self._entry.name)!r}" if self._entry else self._what

    # Input.

    def _upto(self, n: int) -> bytes:
        pos, buffer = self._pos, self._buffer
        if pos < len(buffer):
            data = buffer[pos : pos + n]
            self._pos = pos + len(data)
            return data
        if n >= PIECE:
            data = self._raw.read(n)
            self._taken += len(data)
            return data
        self._buffer = buffer = self._raw.read(PIECE)
        self._taken += len(buffer)
        data = buffer[:n]
        self._pos = len(data)
        return data

    def _exact(self, n: int) -> bytes:
        """`n` bytes, fewer only at the end of the input."""
        data = self._upto(n)
        while len(data) < n:
            more = self._upto(n - len(data))
            if not more:
                break
            data += more
        return data

    def _skip(self, n: int) -> None:
        ahead = len(self._buffer) - self._pos
        if self._jump is not None and n > ahead:
            n -= ahead
            self._pos = len(self._buffer)
            jumped = self._jump(n)
            self._taken += jumped
            if jumped < n:
                self._truncated("inside skipped data")
            return
        while n:
            data = self._upto(min(n, PIECE))
            if not data:
                self._truncated("inside skipped data")
            n -= len(data)

    def _block(self, where: str) -> bytes:
        block = self._exact(BLOCK)
        if len(block) < BLOCK:
            self._truncated(where)
        return block

    def _truncated(self, where: str) -> NoReturn:
        raise BadInput(f"{self._what}: the archive is truncated {where}", hint="get it again")

    def _bad(self, why: str) -> NoReturn:
        raise BadInput(f"{self.label()}: {why}")

    # Entries.

    def __iter__(self) -> Iterator[TarEntry]:
        world: dict[bytes, bytes] = {}  # global pax records
        while (entry := self._next(world)) is not None:
            yield entry
        # Everything behind the end mark is padding; a digest may want to see it.
        while self._raw.read(PIECE):
            pass

    def _next(self, world: dict[bytes, bytes]) -> TarEntry | None:
        self._skip(self._left)
        # Go's archive/tar, and so every container engine, reads a last entry without padding,
        # and umoci writes some; `complete` says that there was no end mark.
        self._exact(self._padding)
        self._left = self._padding = 0
        pax: list[tuple[bytes, bytes]] = []
        long_name = long_link = None
        extended = 0
        while True:
            block = self._exact(BLOCK)
            if not block:
                if extended:
                    self._truncated("after an extended header")
                return None
            if len(block) < BLOCK:
                self._truncated("inside a header")
            if block == _ZEROS:
                if extended:
                    self._bad("an extended header without an entry")
                self.complete = True
                return None
            fields = _HEADER.unpack(block)
            self._check_sum(block, fields[6])
            kind = fields[7]
            if kind == b"V":  # GNU volume label
                self._skip(self._padded(self._number(fields[4], "size")))
                continue
            if kind not in b"xgXLK":
                break
            size = self._number(fields[4], "size")
            extended += size
            if extended > MAX_EXTENDED:
                self._bad(
                    f"extended headers of {extended} bytes, at most {MAX_EXTENDED} are allowed"
                )
            data = self._exact(size)
            if len(data) < size:
                self._truncated("inside an extended header")
            self._skip(-size % BLOCK)
            if kind == b"L":
                long_name = data.rstrip(b"\0")
            elif kind == b"K":
                long_link = data.rstrip(b"\0")
            elif kind == b"g":
                self._set_world(world, self._records(data))
            else:
                pax.extend(self._records(data))
            extended += BLOCK
        return self._entry_of(block, fields, [*world.items(), *pax], long_name, long_link)

    @staticmethod
    def _padded(size: int) -> int:
        return -(-size // BLOCK) * BLOCK

    def _check_sum(self, block: bytes, stored: bytes) -> None:
        total = sum(block) - sum(stored) + 8 * 32
        digits = _DIGITS.fullmatch(stored)
        wanted = int(digits[1], 8) if digits and digits[1] else -1
        if total != wanted:
            # Some old tars summed signed characters.
            total -= 256 * sum(1 for i, c in enumerate(block) if c > 127 and not 148 <= i < 156)
            if total != wanted or wanted < 0:
                after = f" after {show(self._entry.name)!r}" if self._entry else ""
                raise BadInput(
                    f"{self._what}: no tar header{after} (wrong checksum)",
                    hint="expected a tar archive, plain or with gzip, bzip2, xz, zstd or lz4",
                )

    def _number(self, raw: bytes, what: str) -> int:
        """An octal or base-256 field that is not negative."""
        value = self._signed(raw, what)
        if value < 0:
            self._bad(f"negative {what} {value}")
        return value

    def _signed(self, raw: bytes, what: str) -> int:
        if raw[0] & 0x80:  # GNU and star: big-endian two's complement, first bit a mark
            value = int.from_bytes(raw, "big")
            bits = 8 * len(raw)
            return value - (1 << bits) if raw[0] & 0x40 else value - (1 << (bits - 1))
        digits = _DIGITS.fullmatch(raw)
        if digits is None:
            # Old tars leave rubbish behind the NUL that ends the number.
            digits = _DIGITS.fullmatch(raw.partition(b"\0")[0])
            if digits is None:
                self._bad(f"{what} is no number: {show(raw)!r}")
        return int(digits[1] or b"0", 8)

    def _records(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Split pax records, "%d %s=%s\\n" with the length of the whole."""
        records = []
        pos = 0
        while pos < len(data):
            if data[pos] == 0 and not data[pos:].strip(b"\0"):
                break  # some writers pad with NULs
            space = data.find(b" ", pos, pos + 21)
            digits = data[pos:space] if space > 0 else b""
            length = int(digits) if _DECIMAL.fullmatch(digits) else 0
            end = pos + length
            equals = data.find(b"=", space + 1, end)
            if not length or end > len(data) or data[end - 1] != 0x0A or equals < 0:
                self._bad(f"damaged pax record at byte {pos} of its header")
            records.append((data[space + 1 : equals], data[equals + 1 : end - 1]))
            pos = end
        return records

    def _set_world(self, world: dict[bytes, bytes], records: list[tuple[bytes, bytes]]) -> None:
        for key, value in records:
            if key in (b"path", b"linkpath", b"size") or key.startswith(b"GNU.sparse."):
                self._bad(f"a global pax header sets {show(key)!r}")
            # Others mean nothing to us, and every entry would pay for them.
            if key in _KNOWN_RECORDS or key.startswith(_KNOWN_PREFIXES):
                world[key] = value
        if sum(len(k) + len(v) for k, v in world.items()) > MAX_EXTENDED:
            self._bad(f"global pax headers of more than {MAX_EXTENDED} bytes")

    def _entry_of(
        self,
        block: bytes,
        fields: tuple[bytes, ...],
        pax: list[tuple[bytes, bytes]],
        long_name: bytes | None,
        long_link: bytes | None,
    ) -> TarEntry:
        name, mode, uid, gid, size, mtime, _, kind, link, magic, _, _, major, minor, prefix, _ = (
            fields
        )
        name = name.partition(b"\0")[0]
        if prefix[0] and magic == b"ustar\x0000":
            if block[508:512] == b"tar\0":  # star: times follow a shorter prefix
                prefix = prefix[:131]
            name = prefix.partition(b"\0")[0] + b"/" + name
        if long_name is not None:
            name = long_name
        entry = TarEntry(
            name=name,
            type=kind,
            mode=0,
            uid=0,
            gid=0,
            mtime_ns=0,
            size=0,
            stored=0,
            linkname=link.partition(b"\0")[0] if long_link is None else long_link,
        )
        self._entry = entry
        found = dict(pax)
        if found:
            entry.name = found.get(b"path") or name
            entry.linkname = found.get(b"linkpath") or entry.linkname
        entry.mode = self._number(mode, "mode") & 0o7777
        entry.uid = self._id(found.get(b"uid"), uid, "uid")
        entry.gid = self._id(found.get(b"gid"), gid, "gid")
        entry.mtime_ns = self._time(found.get(b"mtime"), mtime)
        if kind in (CHR, BLK):
            entry.major = self._number(major, "device major number")
            entry.minor = self._number(minor, "device minor number")
        elif kind in (b"\0", b"0", b"7"):
            # v7 marked a directory by a slash at the end of its name.
            entry.type = DIR if kind == b"\0" and entry.name.endswith(b"/") else REG
        elif kind == b"S":
            entry.type = REG
        elif kind == b"D":  # GNU incremental: a directory with a list of its files as data
            entry.type = DIR
        elif kind not in _HEADER_ONLY:
            self._bad(f"entries of type {show(kind)!r} are not supported")
        if entry.type == REG or kind == b"D":
            claimed = found.get(b"size")
            entry.stored = self._decimal(claimed, "size") if claimed else self._number(size, "size")
            if entry.stored > self._limits.file_size:
                raise UnsafeArchive(
                    f"{self.label()}: a size of {entry.stored} bytes, "
                    f"at most {self._limits.file_size} are allowed"
                )
            self._left, self._padding = entry.stored, -entry.stored % BLOCK
        if entry.type == REG:
            entry.size = entry.stored
        if found:
            self._set_xattrs(entry, found)
        if kind == b"S":
            self._old_sparse(entry, block)
        elif found and entry.type == REG and any(k.startswith(b"GNU.sparse.") for k in found):
            self._pax_sparse(entry, found, pax)
        return entry

    def _decimal(self, raw: bytes, what: str) -> int:
        if not _DECIMAL.fullmatch(raw):
            self._bad(f"{what} is no number: {show(raw)!r}")
        return int(raw)

    def _id(self, pax: bytes | None, raw: bytes, what: str) -> int:
        value = self._decimal(pax, what) if pax else self._number(raw, what)
        if value > _MAX_ID:
            self._bad(f"{what} {value} does not fit 32 bits")
        return value

    def _time(self, pax: bytes | None, raw: bytes) -> int:
        if not pax:
            seconds = self._signed(raw, "mtime")
            nanos = seconds * 1_000_000_000
        else:
            match = _TIME.fullmatch(pax)
            if match is None:
                self._bad(f"mtime is no number: {show(pax)!r}")
            whole, fraction = int(match[2]), (match[3] or b"")
            nanos = whole * 1_000_000_000 + int((fraction + b"000000000")[:9])
            if match[1]:
                # Round towards the past, as for positive times.
                nanos = -nanos - (1 if fraction[9:].strip(b"0") else 0)
            seconds = nanos // 1_000_000_000
        if not -(1 << 63) <= seconds < 1 << 63:
            self._bad(f"mtime {seconds} does not fit 64 bits")
        return nanos

    def _set_xattrs(self, entry: TarEntry, found: dict[bytes, bytes]) -> None:
        for key, value in found.items():
            if key.startswith(b"SCHILY.xattr."):
                # GNU tar escapes what would break a record (xheader.c, xattr_encode_keyword).
                name = key[13:].replace(b"%3D", b"=").replace(b"%25", b"%")
            elif key.startswith(b"LIBARCHIVE.xattr."):
                name = unquote_to_bytes(key[17:])
                try:
                    value = base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
                except binascii.Error:
                    self._bad(f"attribute {show(name)!r} is not in base64")
            elif key.startswith(b"SCHILY.acl."):
                entry.acls[key[11:]] = value
                continue
            else:
                continue
            if not name or b"\0" in name or len(name) > 255:
                self._bad(f"impossible attribute name {show(name)!r}")
            entry.xattrs[name] = value
        cost = sum(len(k) + len(v) for k, v in entry.xattrs.items())
        if cost > self._limits.xattrs:
            raise UnsafeArchive(
                f"{self.label()}: {cost} bytes of attributes, "
                f"at most {self._limits.xattrs} are allowed"
            )

    # Sparse members: three pax dialects and the old GNU one.

    def _old_sparse(self, entry: TarEntry, block: bytes) -> None:
        """GNU tar's `S` type: a map in the header and in extension blocks behind it."""
        pairs = [block[386 + 12 * i : 398 + 12 * i] for i in range(8)]
        more = block[482]
        entry.size = self._number(block[483:495], "real size")
        while more:
            if len(pairs) > 2 * MAX_SEGMENTS:
                self._bad(f"more than {MAX_SEGMENTS} data segments")
            block = self._block("inside a sparse map")
            pairs.extend(block[12 * i : 12 * i + 12] for i in range(42))
            more = block[504]
        numbers = [self._number(p, "sparse map") for p in pairs if p[0]]
        self._set_segments(entry, numbers)

    def _pax_sparse(
        self, entry: TarEntry, found: dict[bytes, bytes], pax: list[tuple[bytes, bytes]]
    ) -> None:
        entry.name = found.get(b"GNU.sparse.name") or entry.name
        real = found.get(b"GNU.sparse.realsize") or found.get(b"GNU.sparse.size")
        if real is None:
            self._bad("a sparse file without its real size")
        entry.size = self._decimal(real, "real size")
        version = (found.get(b"GNU.sparse.major", b"0"), found.get(b"GNU.sparse.minor", b"0"))
        if version == (b"1", b"0"):
            numbers = self._map_in_data()
            entry.stored = self._left
        elif version[0] == b"0" and b"GNU.sparse.map" in found:
            numbers = self._map(found[b"GNU.sparse.map"].split(b","))
        elif version[0] == b"0":
            wanted = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
            numbers = self._map([value for key, value in pax if key in wanted])
        else:
            self._bad(f"sparse format {show(b'.'.join(version))} is not supported")
        self._set_segments(entry, numbers)

    def _map(self, raw: list[bytes]) -> list[int]:
        return [self._decimal(x, "sparse map") for x in raw if x]

    def _map_in_data(self) -> list[int]:
        """Format 1.0: the map is text in front of the data, padded to a block."""
        text = bytearray()
        wanted = 1
        lines: list[bytes] = []
        while len(lines) < wanted:
            if self._left < BLOCK or len(text) > MAX_EXTENDED:
                self._bad("damaged sparse map")
            text += self._block("inside a sparse map")
            self._left -= BLOCK
            lines = (
                bytes(text).split(b"\n")[:-1] if wanted == 1 or text.count(b"\n") >= wanted else []
            )
            if lines and wanted == 1:
                wanted = 1 + 2 * self._decimal(lines[0], "sparse map")
                if wanted > 2 * MAX_SEGMENTS:
                    self._bad(f"more than {MAX_SEGMENTS} data segments")
        return self._map(lines[1:wanted])

    def _set_segments(self, entry: TarEntry, numbers: list[int]) -> None:
        if len(numbers) % 2 or len(numbers) > 2 * MAX_SEGMENTS:
            self._bad(f"a sparse map of {len(numbers)} numbers")
        if entry.size > self._limits.file_size:
            raise UnsafeArchive(
                f"{self.label()}: a size of {entry.size} bytes, "
                f"at most {self._limits.file_size} are allowed"
            )
        segments = []
        end = total = 0
        for offset, length in zip(numbers[::2], numbers[1::2], strict=True):
            if offset < end or offset + length > entry.size:
                self._bad(f"sparse segment {offset}+{length} overlaps or leaves the file")
            end = offset + length
            total += length
            if length:
                segments.append(Segment(offset, length))
        if total != self._left:
            self._bad(f"sparse segments of {total} bytes for {self._left} bytes of data")
        entry.segments = segments
