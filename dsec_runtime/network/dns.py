"""DNS messages (RFC 1035): questions of sandboxes, our answers to them, answers of resolvers.

Pure functions of bytes, all of which may be hostile. What must hold: every function ends after a
number of steps that the length of the message bounds, and raises nothing but `BadMessage`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from dsec_runtime.network.addresses import Address

A, NS, CNAME, AAAA, OPT = 1, 2, 5, 28, 41
NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = 0, 1, 2, 3, 4, 5
_IN = 1
_HEADER = struct.Struct("!HHHHHH")
_RESPONSE, _RECURSE, _CAN_RECURSE, _TRUNCATED = 0x8000, 0x0100, 0x0080, 0x0200
_MAX_NAME = 255
_MAX_JUMPS = 32
_MAX_RECORDS = 512
MAX_UDP = 512
"""What every client takes (RFC 1035, 4.2.1); 24 IPv4 addresses fit behind most names."""
_EDNS_SIZE = 1232
"""What we take from resolvers by UDP: does not fragment anywhere."""


class BadMessage(Exception):
    """Bytes that are no DNS message that we understand."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a client asks."""

    number: int
    flags: int
    name: str
    """As it was sent, in lower case; unprintable bytes as \\xNN. It need not be a host name."""
    kind: int
    raw: bytes
    """The question section, to be echoed."""

    @property
    def opcode(self) -> int:
        return self.flags >> 11 & 15


def parse_question(message: bytes) -> Question:
    """BadMessage unless it is a query with one question of class IN."""
    if len(message) < _HEADER.size:
        raise BadMessage("short")
    number, flags, count, _, _, _ = _HEADER.unpack_from(message)
    if flags & _RESPONSE or count != 1:
        raise BadMessage("no query")
    name, at = _name(message, _HEADER.size)
    if at + 4 > len(message):
        raise BadMessage("short")
    kind, class_ = struct.unpack_from("!HH", message, at)
    if class_ != _IN:
        raise BadMessage("class")
    return Question(number, flags, name, kind, message[_HEADER.size : at + 4])


def reply(
    question: Question,
    code: int,
    addresses: Sequence[Address] = (),
    ttl: int = 0,
    most: int = 65535,
) -> bytes:
    """An answer with as many of the addresses as fit into `most` bytes."""
    records = b""
    count = 0
    room = most - _HEADER.size - len(question.raw)
    for address in addresses:
        kind = A if address.version == 4 else AAAA
        # 0xC00C points to the name in the question.
        record = struct.pack("!HHHIH", 0xC00C, kind, _IN, ttl, len(address.packed))
        record += address.packed
        if len(records) + len(record) > room:
            break
        records += record
        count += 1
    flags = _RESPONSE | question.flags & (0x7800 | _RECURSE) | _CAN_RECURSE | code
    return _HEADER.pack(question.number, flags, 1, count, 0, 0) + question.raw + records


def query(number: int, name: str, kind: int) -> bytes:
    """A question to a resolver. `name` is a host name in its plain form."""
    encoded = b"".join(bytes([len(label)]) + label.encode("ascii") for label in name.split("."))
    option = b"\0" + struct.pack("!HHIH", OPT, _EDNS_SIZE, 0, 0)
    head = _HEADER.pack(number, _RECURSE, 1, 0, 0, 1)
    return head + encoded + b"\0" + struct.pack("!HH", kind, _IN) + option


@dataclass(frozen=True, slots=True)
class Answer:
    """What a resolver said about a name."""

    code: int
    addresses: tuple[Address, ...] = ()
    ttl: int = 0
    """Least of all records that count, in seconds."""
    truncated: bool = False


def parse_answer(message: bytes, number: int, name: str, kind: int) -> Answer:
    """The answer to `query(number, name, kind)`: addresses at the end of the chain of CNAMEs that
    begins at the name. BadMessage if it is none."""
    if len(message) < _HEADER.size:
        raise BadMessage("short")
    found, flags, questions, answers, _, _ = _HEADER.unpack_from(message)
    if found != number or not flags & _RESPONSE or questions != 1 or answers > _MAX_RECORDS:
        raise BadMessage("not the answer")
    asked, at = _name(message, _HEADER.size)
    if at + 4 > len(message) or asked != name:
        raise BadMessage("not the question")
    if struct.unpack_from("!HH", message, at) != (kind, _IN):
        raise BadMessage("not the question")
    at += 4
    code = flags & 15
    if flags & _TRUNCATED:
        return Answer(code, truncated=True)
    aliases: dict[str, tuple[str, int]] = {}
    addresses: dict[str, list[tuple[Address, int]]] = {}
    for _ in range(answers):
        owner, at = _name(message, at)
        if at + 10 > len(message):
            raise BadMessage("short")
        what, class_, ttl, length = struct.unpack_from("!HHIH", message, at)
        at += 10
        if at + length > len(message):
            raise BadMessage("short")
        data = message[at : at + length]
        if class_ == _IN and what == CNAME:
            aliases[owner] = (_name(message, at)[0], ttl)
        elif class_ == _IN and what == kind:
            addresses.setdefault(owner, []).append((_address(kind, data), ttl))
        at += length
    return _chain(code, name, aliases, addresses)


def _chain(
    code: int,
    name: str,
    aliases: dict[str, tuple[str, int]],
    addresses: dict[str, list[tuple[Address, int]]],
) -> Answer:
    ttls: list[int] = []
    for _ in range(_MAX_JUMPS):
        if name in addresses:
            ttls += [ttl for _, ttl in addresses[name]]
            return Answer(code, tuple(a for a, _ in addresses[name]), min(ttls))
        if name not in aliases:
            return Answer(code, (), min(ttls, default=0))
        name, ttl = aliases[name]
        ttls.append(ttl)
    raise BadMessage("aliases in a circle")


def _address(kind: int, data: bytes) -> Address:
    if kind == A and len(data) == 4:
        return IPv4Address(data)
    if kind == AAAA and len(data) == 16:
        return IPv6Address(data)
    raise BadMessage("address")


def _name(message: bytes, at: int) -> tuple[str, int]:
    """A name and where what follows it begins."""
    labels: list[str] = []
    end = -1
    size = jumps = 0
    while True:
        if at >= len(message):
            raise BadMessage("short")
        length = message[at]
        if length >= 0xC0:
            if at + 2 > len(message) or (jumps := jumps + 1) > _MAX_JUMPS:
                raise BadMessage("pointer")
            if end < 0:
                end = at + 2
            at = (length & 0x3F) << 8 | message[at + 1]
            continue
        if length >= 0x40:
            raise BadMessage("label")
        at += 1
        if length == 0:
            break
        size += length + 1
        if at + length > len(message) or size >= _MAX_NAME:
            raise BadMessage("name")
        labels.append(_label(message[at : at + length]))
        at += length
    return ".".join(labels), at if end < 0 else end


def _label(raw: bytes) -> str:
    """A dot in a label is shown as \\x2e: two different names never look the same."""
    return "".join(
        chr(c).lower() if 33 <= c <= 126 and c not in b".\\" else f"\\x{c:02x}" for c in raw
    )
