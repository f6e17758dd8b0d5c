"""What the gate makes inside of a sandbox's network namespace, and its sockets there.

In the namespace every address there is counts as local (a default route of type local on lo), and
nftables' tproxy hands what is sent to any of them, but for the sandbox's own, to the gate's
listeners, which see the original destination. Nothing leaves by itself: there is no other device.

What must hold: a sandbox owns its namespace and may do there what it likes: it can only cut
itself off, or send the gate destinations, and those are what a policy judges. The sockets belong
to the gate; a process of ours is in the namespace only while this module is called.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TypeVar

from dsec_runtime.errors import GateError, SandboxLost
from dsec_runtime.network.addresses import Address
from dsec_runtime.network.netlink import set_up_loopback
from dsecfs.errors import Unsupported
from dsecfs.kernel.namespaces import NamespaceThread
from dsecfs.kernel.syscalls import setns

T = TypeVar("T")

RESOLVER = "192.0.0.1"
"""Where sandboxes find their resolver: for /etc/resolv.conf. Every other address will do, too."""
OWN = "192.0.0.2"
"""A sandbox's own address besides 127.0.0.1. 192.0.0.0/29 is for the ends of translators on a
host (RFC 7335), so no network has it."""
_RESOLVER_6, _OWN_6 = "fd64:5ec::1", "fd64:5ec::2"
_PORT = 1
"""Of the gate's listeners inside. Reserved for tcpmux (RFC 1078), which nobody runs."""
_BACKLOG = 128
_DATAGRAMS = 256 << 10
"""Bytes of datagrams that wait for the gate; more are dropped."""

CLONE_NEWNET = 0x40000000
_IP_PKTINFO = 8
_IP_TRANSPARENT, _IPV6_TRANSPARENT = 19, 75
_IP_RECVORIGDSTADDR, _IPV6_RECVORIGDSTADDR = 20, 74
"""include/uapi/linux/in.h, in6.h"""
NFT = "/usr/sbin/nft"
_NFT_S = 20.0

_RULES = f"""\
table inet dsec
delete table inet dsec
table inet dsec {{
  chain out {{
    type filter hook prerouting priority mangle; policy drop;
    ip daddr {{ 127.0.0.0/8, {OWN} }} accept
    ip6 daddr {{ ::1, {_OWN_6} }} accept
    ip protocol tcp tproxy ip to {RESOLVER}:{_PORT} accept
    ip protocol udp udp dport 53 tproxy ip to {RESOLVER}:53 accept
    ip protocol udp tproxy ip to {RESOLVER}:{_PORT} accept
    ip6 nexthdr tcp tproxy ip6 to [{_RESOLVER_6}]:{_PORT} accept
    ip6 nexthdr udp udp dport 53 tproxy ip6 to [{_RESOLVER_6}]:53 accept
    ip6 nexthdr udp tproxy ip6 to [{_RESOLVER_6}]:{_PORT} accept
    meta l4proto tcp reject with tcp reset
    reject
  }}
}}
"""
"""Fixed. While no gate listens tproxy finds no socket, and connections are reset."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """The gate's sockets in one namespace, not blocking."""

    tcp: tuple[socket.socket, ...]
    dns: tuple[socket.socket, ...]
    """UDP to port 53."""
    udp: tuple[socket.socket, ...]
    """UDP to other ports."""

    def close(self) -> None:
        for sock in (*self.tcp, *self.dns, *self.udp):
            sock.close()


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None if there is no such process, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def open_namespace(pid: int, started: int) -> int:
    """A descriptor of the process's network namespace. SandboxLost if that process has ended;
    GateError if the namespace is our own: it would be the host's."""
    try:
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise SandboxLost(f"network: process {pid} has ended") from None
    try:
        # Checked after opening: what was opened was the namespace of that very process.
        if start_time(pid) != started:
            raise SandboxLost(f"network: process {pid} has ended")
        here = os.stat("/proc/self/ns/net")
        found = os.fstat(fd)
        if (here.st_dev, here.st_ino) == (found.st_dev, found.st_ino):
            raise GateError(f"network: process {pid} has no network namespace of its own")
    except BaseException:
        os.close(fd)
        raise
    return fd


def within(namespace: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread that is in the namespace. Blocks."""
    thread = NamespaceThread(lambda: setns(namespace, CLONE_NEWNET), "network namespace")
    try:
        return thread.call(work)
    finally:
        thread.close()


def prepare(namespace: int) -> Sockets:
    """Lead everything to the gate. Can be repeated. GateError, Unsupported. Blocks."""
    return within(namespace, _prepare)


def _prepare() -> Sockets:
    set_up_loopback([IPv4Address(OWN), IPv6Address(_OWN_6)])
    made = contextlib.ExitStack()
    with made:
        families = [(socket.AF_INET, RESOLVER)]
        if Path("/proc/thread-self/net/if_inet6").exists():
            families.append((socket.AF_INET6, _RESOLVER_6))
        tcp, dns, udp = [], [], []
        for family, address in families:
            tcp.append(made.enter_context(_socket(family, socket.SOCK_STREAM, address, _PORT)))
            tcp[-1].listen(_BACKLOG)
            dns.append(made.enter_context(_socket(family, socket.SOCK_DGRAM, address, 53)))
            udp.append(made.enter_context(_socket(family, socket.SOCK_DGRAM, address, _PORT)))
        # Last: what it leads here finds somebody who listens.
        _load_rules()
        made.pop_all()
    return Sockets(tuple(tcp), tuple(dns), tuple(udp))


def _socket(family: int, kind: int, address: str, port: int) -> socket.socket:
    """A bound socket that may have any address."""
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        if family == socket.AF_INET:
            sock.setsockopt(socket.SOL_IP, _IP_TRANSPARENT, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_TRANSPARENT, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if kind == socket.SOCK_DGRAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _DATAGRAMS)
            if family == socket.AF_INET:
                sock.setsockopt(socket.SOL_IP, _IP_RECVORIGDSTADDR, 1)
            else:
                sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVORIGDSTADDR, 1)
        sock.bind((address, port))
    except OSError as e:
        sock.close()
        raise GateError(
            f"network: listen on {address} port {port} in the sandbox: {e.strerror}",
            hint="a program in it may have taken the address",
        ) from None
    return sock


def _load_rules() -> None:
    if not os.access(NFT, os.X_OK):
        raise Unsupported(f"network: no {NFT}", hint="apt-get install nftables")
    try:
        done = subprocess.run(
            [NFT, "-f", "-"],
            input=_RULES.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={},
            timeout=_NFT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise GateError(f"network: nft: no end in {_NFT_S:g} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise GateError(
            f"network: nft: {said[:200]}",
            hint="the kernel needs nftables with tproxy (CONFIG_NFT_TPROXY)",
        )


def original(ancillary: list[tuple[int, int, bytes]]) -> tuple[Address, int] | None:
    """Where a datagram was sent to, from what recvmsg(2) gave."""
    for _, kind, data in ancillary:
        if kind == _IP_RECVORIGDSTADDR and len(data) >= 8:
            return IPv4Address(data[4:8]), struct.unpack_from("!H", data, 2)[0]
        if kind == _IPV6_RECVORIGDSTADDR and len(data) >= 24:
            return IPv6Address(data[8:24]), struct.unpack_from("!H", data, 2)[0]
    return None


def sent_from(address: Address) -> tuple[int, int, bytes]:
    """Ancillary data for sendmsg(2): a datagram that comes from that address."""
    if address.version == 4:
        data = struct.pack("=I4s4s", 0, address.packed, b"\0" * 4)
        return socket.SOL_IP, _IP_PKTINFO, data
    data = address.packed + struct.pack("=I", 0)
    return socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, data


def as_if(namespace: int, source: tuple[Address, int], to: tuple[Address, int]) -> socket.socket:
    """A UDP socket in the namespace that speaks as `source` (any address) with `to` alone.
    GateError. Blocks."""
    family = socket.AF_INET if source[0].version == 4 else socket.AF_INET6

    def make() -> socket.socket:
        sock = _socket(family, socket.SOCK_DGRAM, str(source[0]), source[1])
        try:
            sock.connect((str(to[0]), to[1]))
        except OSError:
            sock.close()
            raise
        return sock

    return within(namespace, make)
