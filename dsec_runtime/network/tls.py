"""The server name in a TLS ClientHello (RFC 8446, 4.1.2; RFC 6066, 3).

Pure and for hostile bytes: at most MAX_HELLO of them are looked at. What it cannot see: a name
inside an encrypted hello (ECH) or in requests within the connection. Both reach only other hosts
of whoever serves the visible name.
"""

from __future__ import annotations

from dsec_runtime.network.names import host_name

MAX_HELLO = 16 << 10
_MAX_RECORDS = 16
"""A hello in more pieces is nobody's but somebody's who wants to cost us time."""
_HANDSHAKE = 22
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_HOST_NAME = 0
_MAX_RECORD = 16384


class NotTls(Exception):
    """Not the start of a TLS connection that names its server."""


class _Short(Exception):
    """More bytes are needed."""


class _Bytes:
    """A cursor."""

    def __init__(self, data: bytes, short: type[Exception]) -> None:
        self._data, self._at, self._short = data, 0, short

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if self.left < count:
            raise self._short("short")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> _Bytes:
        """What a length of `size` bytes says; it must lie within."""
        return _Bytes(self.take(self.number(size)), NotTls)


def server_name(data: bytes) -> str | None:
    """The name, in its plain form; None if more bytes are needed. NotTls."""
    try:
        hello = _hello(data)
    except _Short:
        if len(data) >= MAX_HELLO:
            raise NotTls("hello too long") from None
        return None
    return _name_in(hello)


def _hello(data: bytes) -> _Bytes:
    """The body of the ClientHello, from as many records as it takes."""
    records = _Bytes(data, _Short)
    message = b""
    count = 0
    while len(message) < 4 or len(message) < 4 + int.from_bytes(message[1:4], "big"):
        if (count := count + 1) > _MAX_RECORDS:
            raise NotTls("hello in too many records")
        if records.number(1) != _HANDSHAKE or records.number(1) != 3:
            raise NotTls("no handshake")
        records.take(1)
        length = records.number(2)
        if not 0 < length <= _MAX_RECORD:
            raise NotTls("record")
        # Judge by what is there before waiting for the rest.
        message += records.take(length)
        if message[0] != _CLIENT_HELLO:
            raise NotTls("no hello")
        if len(message) > MAX_HELLO:
            raise NotTls("hello too long")
    return _Bytes(message[4 : 4 + int.from_bytes(message[1:4], "big")], NotTls)


def _name_in(hello: _Bytes) -> str:
    hello.take(2 + 32)
    hello.vector(1)  # session
    hello.vector(2)  # ciphers
    hello.vector(1)  # compression
    if not hello.left:
        raise NotTls("no server name")
    extensions = hello.vector(2)
    found: str | None = None
    while extensions.left:
        kind = extensions.number(2)
        body = extensions.vector(2)
        if kind != _SERVER_NAME:
            continue
        names = body.vector(2)
        if found is not None or names.number(1) != _HOST_NAME:
            raise NotTls("server names")
        raw = names.vector(2)
        if names.left or body.left:
            raise NotTls("server names")
        found = host_name(raw.take(raw.left).decode("latin-1"))
        if found is None:
            raise NotTls("server name")
    if found is None:
        raise NotTls("no server name")
    return found
