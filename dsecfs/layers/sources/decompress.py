"""Decompression of an untrusted stream: format by magic, bounded output, exact end.

What must hold: a truncated or damaged stream is a BadInput, never short data; no read
returns more than it was asked for, so a bomb costs no memory; the ratio of `Limits` is
checked while reading, so a bomb costs no more than `ratio_from` bytes of work either.
"""

from __future__ import annotations

import bz2
import lzma
import time
import zlib
from collections.abc import Callable
from typing import Protocol

import zstandard

from dsecfs.errors import BadInput, DeadlineExceeded, UnsafeArchive
from dsecfs.layers.sources.base import ByteStream, Limits

_INPUT = 256 * 1024
"""Compressed bytes taken at a time: small enough that what a codec leaves is cheap to copy."""

_MAX_WINDOW = 128 << 20
"""Largest zstd window: what `zstd -d` takes without --long (ZSTD_WINDOWLOG_LIMIT_DEFAULT)."""

_ZSTD_BLOCK = 128 << 10
"""Most bytes of a zstd block, before and after (RFC 8878 §3.1.1.2.4)."""

_XZ_MEMORY = 256 << 20
"""Most memory for xz; `xz -9` needs 65 MiB."""


class _Codec(Protocol):
    """The interface that bz2, lzma and lz4.frame decompressors share."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes | None: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gzip:
    """zlib's gzip decoder (RFC 1952) with the interface of the others."""

    def __init__(self) -> None:
        self._z = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._z.eof

    @property
    def needs_input(self) -> bool:
        return not self._z.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._z.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        tail = self._z.unconsumed_tail
        return self._z.decompress(tail + data if tail else data, max_length)


def _lz4() -> _Codec:
    import lz4.frame

    codec: _Codec = lz4.frame.LZ4FrameDecompressor()
    return codec


def _xz() -> _Codec:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)


_MAGICS = (
    (b"\x1f\x8b\x08", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x04\x22\x4d\x18", "lz4"),
)
_CODECS: dict[str, Callable[[], _Codec]] = {
    "gzip": _Gzip,
    "bzip2": bz2.BZ2Decompressor,
    "xz": _xz,
    "lz4": _lz4,
}


def detect(start: bytes) -> str:
    """The compression of a stream that begins with `start`; "" for none that we know."""
    for magic, name in _MAGICS:
        if start.startswith(magic):
            return name
    # A zstd stream may begin with skippable frames (RFC 8878 §3.1.2): pzstd writes one.
    if len(start) >= 4 and start[1:4] == b"\x2a\x4d\x18" and start[0] & 0xF0 == 0x50:
        return "zstd"
    return ""


class _Counted:
    """The raw stream: gives back what was looked at, counts, keeps the deadline."""

    def __init__(self, raw: ByteStream, limits: Limits, what: str) -> None:
        self._raw = raw
        self._what = what
        self._end = None if limits.seconds is None else time.monotonic() + limits.seconds
        self._seconds = limits.seconds
        self.count = 0
        self._start = b""

    def peek(self, n: int) -> bytes:
        while len(self._start) < n and (data := self._raw.read(n - len(self._start))):
            self._start += data
        return self._start

    def push_back(self, data: bytes) -> None:
        self._start = data + self._start
        self.count -= len(data)

    def read(self, n: int, /) -> bytes:
        if self._end is not None and time.monotonic() > self._end:
            raise DeadlineExceeded(f"{self._what}: not read within {self._seconds:g} s")
        if self._start:
            data, self._start = self._start[:n], self._start[n:]
        else:
            data = self._raw.read(n)
        self.count += len(data)
        return data


class _Decoder:
    """What both kinds of decompressors share: the check of the ratio."""

    def __init__(self, raw: _Counted, limits: Limits, what: str) -> None:
        self._raw = raw
        self._limits = limits
        self._what = what
        self._produced = 0

    def _check(self, data: bytes) -> bytes:
        self._produced += len(data)
        if (
            self._produced > self._limits.ratio_from
            and self._produced > self._limits.ratio * self._raw.count
        ):
            raise UnsafeArchive(
                f"{self._what}: {self._raw.count} compressed bytes became more than "
                f"{self._produced}: over {self._limits.ratio} to 1"
            )
        return data


class _Members(_Decoder):
    """One or more members or frames back to back, by a `_Codec` each."""

    def __init__(self, raw: _Counted, name: str, limits: Limits, what: str) -> None:
        super().__init__(raw, limits, what)
        self._name = name
        self._codec: _Codec | None = _CODECS[name]()

    def read(self, n: int, /) -> bytes:
        while self._codec is not None:
            data = b""
            if self._codec.needs_input:
                data = self._raw.read(_INPUT)
                if not data:
                    raise BadInput(f"{self._what}: the {self._name} data is truncated")
            try:
                out = self._codec.decompress(data, n)
                if self._codec.eof:
                    self._next(self._codec.unused_data or b"")
            except (zlib.error, OSError, lzma.LZMAError, EOFError, RuntimeError, ValueError) as e:
                raise BadInput(f"{self._what}: damaged {self._name} data: {e}") from None
            if out:
                return self._check(out)
        return b""

    def _next(self, rest: bytes) -> None:
        """Start on the next member, if any; zero padding may stand between and after."""
        while True:
            rest = rest.lstrip(b"\0")
            if rest:
                break
            rest = self._raw.read(_INPUT)
            if not rest:
                self._codec = None
                return
        while len(rest) < 8 and (more := self._raw.read(8)):
            rest += more
        if detect(rest) != self._name:
            raise BadInput(f"{self._what}: something that is not {self._name} follows the data")
        self._raw.push_back(rest)
        self._codec = _CODECS[self._name]()


class _Zstd(_Decoder):
    """zstd frames (RFC 8878), fed to the library one block at a time.

    A block gives at most 128 KiB, whatever it claims; and only who walks the blocks knows
    whether the stream ended where it should: the library's stream reader takes the end of
    its input for the end of the data.
    """

    def __init__(self, raw: _Counted, limits: Limits, what: str) -> None:
        super().__init__(raw, limits, what)
        self._library = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._checksum = 0
        self._out = b""
        self._pos = 0

    def read(self, n: int, /) -> bytes:
        while self._pos >= len(self._out):
            try:
                block = self._next_block() if self._frame else self._next_frame()
            except zstandard.ZstdError as e:
                raise BadInput(f"{self._what}: damaged zstd data: {e}") from None
            if block is None:
                return b""
            self._out, self._pos = self._check(block), 0
        piece = self._out[self._pos : self._pos + n]
        self._pos += len(piece)
        return piece

    def _exact(self, n: int) -> bytes:
        data = self._raw.read(n)
        while len(data) < n:
            more = self._raw.read(n - len(data))
            if not more:
                raise BadInput(f"{self._what}: the zstd data is truncated")
            data += more
        return data

    def _next_frame(self) -> bytes | None:
        """Take a frame's header, or a whole skippable frame. None at the end."""
        start = self._raw.read(1)
        if not start:
            return None
        magic = start + self._exact(3)
        if detect(magic) != "zstd":
            raise BadInput(f"{self._what}: something that is not zstd follows the data")
        if magic[0] & 0xF0 == 0x50:
            left = int.from_bytes(self._exact(4), "little")
            while left:
                left -= len(self._exact(min(left, _INPUT)))
            return b""
        descriptor = self._exact(1)
        flags = descriptor[0]
        single = flags >> 5 & 1
        size = (0 if single else 1) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
        self._checksum = 4 if flags & 4 else 0
        self._frame = self._library.decompressobj()
        return self._frame.decompress(magic + descriptor + (self._exact(size) if size else b""))

    def _next_block(self) -> bytes:
        assert self._frame is not None
        header = self._exact(3)
        word = int.from_bytes(header, "little")
        last, kind, size = word & 1, word >> 1 & 3, word >> 3
        if kind == 3 or size > _ZSTD_BLOCK:
            raise BadInput(f"{self._what}: damaged zstd data: impossible block header")
        stored = (1 if kind == 1 else size) + (self._checksum if last else 0)
        out = self._frame.decompress(header + (self._exact(stored) if stored else b""))
        if last:
            self._frame = None
        return out


def decompressed(raw: ByteStream, limits: Limits, what: str) -> ByteStream:
    """`raw` without its compression (gzip, bzip2, xz, zstd, lz4 or none, told by magic).

    Raises BadInput for damaged data, UnsafeArchive for a bomb and DeadlineExceeded, all
    from `read`. `what` names the source in messages.
    """
    counted = _Counted(raw, limits, what)
    name = detect(counted.peek(8))
    if not name:
        return counted
    if name == "zstd":
        return _Zstd(counted, limits, what)
    return _Members(counted, name, limits, what)


def is_compressed(stream: ByteStream) -> bool:
    """Whether a stream that `decompressed` gave does any work."""
    return not isinstance(stream, _Counted)
