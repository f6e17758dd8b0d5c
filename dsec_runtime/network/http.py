"""The host of every request on an HTTP/1 connection (RFC 9112), and where each request ends.

`Requests` gets what the client sends and gives back what may be forwarded, byte for byte. What
must hold: no byte of a request is forwarded before its host was allowed; what two servers might
take apart in different ways (bare line ends, two lengths, folded lines) is refused: else a second
request to another host could hide in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from dsec_runtime.network.names import host_name

MAX_HEAD = 32 << 10
_MAX_CHUNK_LINE = 1024
_REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/1\.([01])\Z")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)\Z")
_STRANGE = re.compile(
    rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r[^\n]|[^\r]\n|\A[^!#$%&'*+.^_`|~0-9A-Za-z-]"
)
_HOST = re.compile(rb"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?\Z")
_LENGTH = re.compile(rb"\d{1,18}\Z")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\Z")


class NotHttp(Exception):
    """Not an HTTP/1 request that we can take apart without doubt."""


class HostDenied(Exception):
    """A request to a host that is not allowed."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.host = host


class _At(Enum):
    HEAD = auto()
    BODY = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    UPGRADE = auto()
    TUNNEL = auto()


class Requests:
    """The client's side of one connection."""

    def __init__(self, allows: Callable[[str], bool]) -> None:
        """`allows` is asked about the host of every request."""
        self._allows = allows
        self._held = bytearray()
        self._at = _At.HEAD
        self._left = 0
        """Bytes of the body or chunk that are still to come."""
        self._chunked = False
        self._count = 0
        self._searched = 0
        """Bytes of the head in which its end is not."""
        self.hosts: set[str] = set()

    @property
    def upgrading(self) -> bool:
        """A request for another protocol was forwarded: the answer decides (`upgraded`)."""
        return self._at is _At.UPGRADE

    def upgraded(self, yes: bool) -> bytes:
        """Whether the server changed the protocol. What can be forwarded now."""
        if self._at is _At.UPGRADE:
            self._at = _At.TUNNEL if yes else _At.HEAD
        return self.feed(b"")

    def feed(self, data: bytes) -> bytes:
        """What may be forwarded now. NotHttp, HostDenied: the connection has to be cut."""
        self._held += data
        out = bytearray()
        while self._held and self._at is not _At.UPGRADE:
            piece = self._step()
            if piece is None:
                break
            out += piece
        if len(self._held) > MAX_HEAD + len(data):
            raise NotHttp("more was sent than is taken")
        return bytes(out)

    def _step(self) -> bytes | None:
        """The next part that is whole; None if more is needed."""
        if self._at is _At.TUNNEL:
            return self._take(len(self._held))
        if self._at is _At.BODY:
            piece = self._take(min(self._left, len(self._held)))
            self._left -= len(piece)
            if not self._left:
                self._at = _At.CHUNK_END if self._chunked else _At.HEAD
            return piece
        if self._at is _At.HEAD:
            return self._take_head()
        end = self._held.find(b"\r\n", 0, _MAX_CHUNK_LINE)
        if end < 0:
            if len(self._held) >= _MAX_CHUNK_LINE:
                raise NotHttp("chunk")
            return None
        line = bytes(self._held[:end])
        if self._at is _At.CHUNK_END:
            if line:
                raise NotHttp("chunk")
            self._at = _At.CHUNK
        elif self._at is _At.TRAILER:
            if not line:
                self._at = _At.HEAD
            elif not _HEADER.match(line):
                raise NotHttp("trailer")
        else:
            match = _CHUNK.match(line)
            if not match:
                raise NotHttp("chunk")
            self._left = int(match[1], 16)
            self._at = _At.BODY if self._left else _At.TRAILER
        return self._take(end + 2)

    def _take(self, count: int) -> bytes:
        piece = bytes(self._held[:count])
        del self._held[:count]
        return piece

    def _take_head(self) -> bytes | None:
        end = self._held.find(b"\r\n\r\n", self._searched, MAX_HEAD)
        if end < 0:
            self._suspect()
            self._searched = max(0, len(self._held) - 3)
            return None
        self._searched = 0
        lines = bytes(self._held[:end]).split(b"\r\n")
        self._check(lines)
        self._count += 1
        return self._take(end + 4)

    def _suspect(self) -> None:
        """Do not wait for the end of what cannot become a request."""
        if len(self._held) >= MAX_HEAD:
            raise NotHttp("head too long")
        if _STRANGE.search(self._held, max(0, self._searched - 1)):
            raise NotHttp("bytes that are in no request")

    def _check(self, lines: list[bytes]) -> None:
        request = _REQUEST.match(lines[0])
        if not request:
            raise NotHttp("request line")
        method, target, minor = request.groups()
        headers: dict[bytes, list[bytes]] = {}
        for line in lines[1:]:
            match = _HEADER.match(line)
            if not match:
                raise NotHttp("header")
            headers.setdefault(match[1].lower(), []).append(match[2].strip(b" \t"))
        host = self._host(method, target, headers)
        if not self._allows(host):
            raise HostDenied(host)
        self.hosts.add(host)
        self._frame(headers, minor == b"1")

    def _host(self, method: bytes, target: bytes, headers: dict[bytes, list[bytes]]) -> str:
        values = headers.get(b"host", [])
        if len(values) != 1 or method == b"CONNECT":
            raise NotHttp("host")
        name = _plain(values[0])
        if target.lower().startswith(b"http://"):
            authority = re.split(rb"[/?#]", target[7:], maxsplit=1)[0]
            if _plain(authority) != name:
                raise NotHttp("two hosts")
        elif not target.startswith(b"/") and target != b"*":
            raise NotHttp("target")
        return name

    def _frame(self, headers: dict[bytes, list[bytes]], modern: bool) -> None:
        """Where the request ends, and what comes then."""
        lengths = headers.get(b"content-length", [])
        codings = headers.get(b"transfer-encoding", [])
        upgrades = headers.get(b"upgrade", [])
        if len(lengths) + len(codings) > 1:
            raise NotHttp("two lengths")
        self._chunked = bool(codings)
        if codings:
            if codings[0].lower() != b"chunked" or not modern:
                raise NotHttp("transfer coding")
            self._at = _At.CHUNK
        elif lengths:
            if not _LENGTH.match(lengths[0]):
                raise NotHttp("length")
            self._left = int(lengths[0])
            self._at = _At.BODY if self._left else _At.HEAD
        if upgrades:
            # Only as the first request is it certain which answer belongs to it. h2c would hide
            # the hosts of what follows.
            plain = self._at is _At.HEAD and not self._count
            if upgrades != [upgrades[0]] or upgrades[0].lower() != b"websocket" or not plain:
                raise NotHttp("upgrade")
            self._at = _At.UPGRADE


def _plain(authority: bytes) -> str:
    """The host of HOST[:PORT] in its plain form. NotHttp."""
    match = _HOST.match(authority)
    if not match:
        raise NotHttp("host")
    text = match[1].decode("ascii")
    name = host_name(text)
    # An address is allowed only where the address is, and then nobody looks here.
    return name if name is not None else text.lower()
