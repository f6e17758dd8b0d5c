"""The few requests to the kernel's routing (rtnetlink(7)) that the gate needs.

`goes_out` asks about the network namespace of the calling thread; `set_up_loopback` changes it.
Structures: include/uapi/linux/{netlink,rtnetlink,if_addr,if_link}.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address

from dsec_runtime.errors import GateError

_REQUEST, _ACK, _REPLACE, _CREATE = 0x1, 0x4, 0x100, 0x400
_NEWLINK, _NEWADDR, _NEWROUTE, _GETROUTE = 16, 20, 24, 26
_ERROR = 2
_UNICAST, _LOCAL = 1, 2
"""RTN_UNICAST, RTN_LOCAL"""
_TABLE_LOCAL = 255
_PROTOCOL_STATIC = 4
_NODAD = 0x02
"""IFA_F_NODAD"""
_UP = 1
_LO = 1
"""The loopback device has this index in every network namespace."""
_SCOPE_HOST = 254
_DST, _OIF, _PREFSRC, _RTA_UNSPEC_SRC = 1, 4, 7, 2
_HEADER = struct.Struct("=IHHII")
_ROUTE = struct.Struct("=BBBBBBBBI")
_WAIT_S = 5.0

Address = IPv4Address | IPv6Address


def _attribute(kind: int, value: bytes) -> bytes:
    text = struct.pack("=HH", 4 + len(value), kind) + value
    return text + b"\0" * (-len(text) % 4)


def _family(address: Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _open() -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
    sock.settimeout(_WAIT_S)
    return sock


def _ask(sock: socket.socket, kind: int, flags: int, body: bytes) -> tuple[int, bytes]:
    """Type and body of the answer. OSError with the kernel's errno."""
    sock.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | flags, 1, 0) + body)
    answer = sock.recv(1 << 16)
    length, found, _, _, _ = _HEADER.unpack_from(answer)
    body = answer[_HEADER.size : length]
    if found == _ERROR:
        (code,) = struct.unpack_from("=i", body)
        if code:
            raise OSError(-code, os.strerror(-code))
    return found, body


def goes_out(address: Address) -> bool:
    """Whether packets for it leave this host: there is a route, and it is no address of ours, no
    broadcast and no multicast."""
    with _open() as sock:
        route = _ROUTE.pack(_family(address), address.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
        try:
            kind, body = _ask(sock, _GETROUTE, 0, route + _attribute(_DST, address.packed))
        except OSError as e:
            if e.errno in (
                errno.ENETUNREACH,
                errno.EHOSTUNREACH,
                errno.EACCES,
                errno.EINVAL,
                errno.EAFNOSUPPORT,
                errno.EOPNOTSUPP,
            ):
                return False
            raise
    return kind == _NEWROUTE and body[7] == _UNICAST and _device(body) != _LO


def _device(body: bytes) -> int:
    """Index of the device that a route leads to; 0 if it does not say."""
    at = _ROUTE.size
    while at + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, at)
        if length < 4:
            break
        if kind == _OIF:
            (index,) = struct.unpack_from("=I", body, at + 4)
            return int(index)
        at += length + (-length % 4)
    return 0


def set_up_loopback(addresses: Iterable[Address]) -> None:
    """In the calling thread's namespace: the loopback device is up and has these addresses, and
    packets for every address there is are delivered to the namespace itself.

    Can be repeated. GateError. A family that the kernel does not have is left out.
    """
    with _open() as sock:
        link = struct.pack("=BxHiII", 0, 0, _LO, _UP, _UP)
        _change(sock, "set lo up", _NEWLINK, 0, link)
        for address in addresses:
            family, size = _family(address), address.max_prefixlen
            head = struct.pack("=BBBBI", family, size, _NODAD, _SCOPE_HOST, _LO)
            body = _attribute(1, address.packed) + _attribute(2, address.packed)
            try:
                _change(sock, f"give lo {address}", _NEWADDR, _CREATE | _REPLACE, head + body)
            except OSError as e:
                if address.version == 6 and e.errno in (errno.EOPNOTSUPP, errno.EACCES):
                    continue  # no IPv6 here, or switched off for lo
                raise GateError(f"network: give lo {address}: {e.strerror}") from None
            route = _ROUTE.pack(
                family, 0, 0, 0, _TABLE_LOCAL, _PROTOCOL_STATIC, _SCOPE_HOST, _LOCAL, 0
            )
            body = _attribute(_OIF, struct.pack("=I", _LO)) + _attribute(_PREFSRC, address.packed)
            _change(sock, f"route to {address}", _NEWROUTE, _CREATE | _REPLACE, route + body)


def _change(sock: socket.socket, what: str, kind: int, flags: int, body: bytes) -> None:
    try:
        _ask(sock, kind, _ACK | flags, body)
    except OSError as e:
        if kind == _NEWADDR:
            raise
        raise GateError(f"network: {what}: {e.strerror}") from None
