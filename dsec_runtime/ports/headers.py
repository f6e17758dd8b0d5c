"""Which headers pass between a client of the edge and a server in a sandbox.

In: what concerns one connection only (RFC 9110, section 7.6.1) stays out, and so does the edge's
own token: an Authorization header goes in unless it *is* that token, compared in constant time;
where the edge has no token (its Unix socket) every Authorization header is meant for the server.
Cookies are the server's: the edge has none. Host is localhost:PORT, and an Origin that is the
edge's becomes that, too, so that servers that compare both are content.

Out: the answer's framing is made anew, so nothing can be hidden in it. Left out is what speaks for
the whole origin of the edge or to a web server before it, and not for one server in a sandbox.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dsec_runtime.errors import PortError

Headers = list[tuple[bytes, bytes]]

_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_MADE_ANEW = frozenset(b"host content-length expect x-forwarded-prefix".split())
_ORIGIN_WIDE = frozenset(
    b"alt-svc clear-site-data date public-key-pins service-worker-allowed "
    b"strict-transport-security x-lighttpd-send-file x-sendfile".split()
)
"""`date` only because the edge's server writes one into every answer."""
_TO_A_FRONT = b"x-accel-"
"""nginx obeys such headers of a server behind it: X-Accel-Redirect names a file of its own."""
_WEBSOCKET = b"sec-websocket-"
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*\Z")


@dataclass(frozen=True, slots=True)
class Way:
    """From whom to where a request goes."""

    port: int
    prefix: str
    """The part of the path that the server does not see: /v1/sandboxes/ID/ports/PORT"""
    target: bytes
    """The rest of it, escaped as it came, with the query."""
    scheme: str
    """http or https: how the client reached the edge."""
    client: str
    """Its address; "" on a Unix socket."""
    token: bytes
    """The edge's own bearer token; empty if it has none."""


def is_token(value: bytes, token: bytes) -> bool:
    """Whether an Authorization header is the edge's own bearer token."""
    kind, _, given = value.strip().partition(b" ")
    return bool(token) and kind.lower() == b"bearer" and hmac.compare_digest(given.strip(), token)


def inward(headers: Iterable[tuple[bytes, bytes]], way: Way) -> Headers:
    """Headers of a request as the server in the sandbox gets them, without framing."""
    given = [(name.lower(), value) for name, value in headers]
    dropped = _HOP | _MADE_ANEW | _named(given)
    found = dict(given)
    asked = found.get(b"host", b"")
    here = b"localhost:%d" % way.port
    kept: Headers = [(b"host", here)]
    said: dict[bytes, list[bytes]] = {}
    for name, value in given:
        if name in dropped or name.startswith(_WEBSOCKET):
            continue
        if name == b"authorization" and is_token(value, way.token):
            continue
        if name == b"origin" and asked and value.partition(b"://")[2] == asked:
            value = b"http://" + here
        if name in (b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto"):
            said.setdefault(name, []).append(value)
            continue
        kept.append((name, value))
    # Who may call the edge is believed about whom it calls for.
    chain = said.get(b"x-forwarded-for", [])
    if way.client:
        chain = [*chain, way.client.encode("ascii", "replace")]
    if chain:
        kept.append((b"x-forwarded-for", b", ".join(chain)))
    if hosts := said.get(b"x-forwarded-host") or ([asked] if asked else []):
        kept.append((b"x-forwarded-host", hosts[-1]))
    kept.append((b"x-forwarded-proto", said.get(b"x-forwarded-proto", [way.scheme.encode()])[-1]))
    kept.append((b"x-forwarded-prefix", way.prefix.encode("ascii", "replace")))
    return kept


def framing(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """How the body of a request that the edge's server took is sent on."""
    found = {name.lower(): value for name, value in headers}
    if b"transfer-encoding" in found:
        return [(b"transfer-encoding", b"chunked")]
    if b"content-length" in found:
        return [(b"content-length", found[b"content-length"])]
    return []


def outward(headers: Iterable[tuple[bytes, bytes]], status: int) -> Headers:
    """Headers of an answer as the client gets them. PortError for what no answer may have."""
    given = [(name.lower(), value) for name, value in headers]
    dropped = _HOP | _ORIGIN_WIDE | _named(given)
    if status in (204, 304) or any(name == b"transfer-encoding" for name, _ in given):
        dropped |= {b"content-length"}
    kept = []
    for name, value in given:
        if not _NAME.match(name) or not _VALUE.match(value):
            raise PortError(
                f"the server in the sandbox sent a malformed header {name[:40].decode('latin-1')!r}"
            )
        if name not in dropped and not name.startswith((_TO_A_FRONT, _WEBSOCKET)):
            kept.append((name, value))
    return kept


def _named(headers: Headers) -> frozenset[bytes]:
    """What the Connection header says to be of this connection only."""
    said = b",".join(value for name, value in headers if name == b"connection")
    return frozenset(word.strip().lower() for word in said.split(b","))
