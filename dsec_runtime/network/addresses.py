"""Which addresses may be reached at all. Owns the list of those that never may.

What must hold: an address that embeds another one (v4-mapped, 6to4, NAT64, Teredo) is judged by
what it embeds or refused; only addresses of the public internet pass, and of those only ones that
the host's kernel would send away: its own addresses, whatever they are, do not.
"""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from dsec_runtime.network.netlink import goes_out

Address = IPv4Address | IPv6Address
Range = IPv4Network | IPv6Network

_NEVER_4 = [
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; a cloud's metadata at 100.100.100.200
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's metadata and agent address, in a public range
        "169.254.0.0/16",  # link-local; metadata at 169.254.169.254 and 169.254.170.2
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
]
"""IANA's special-purpose registry for IPv4 (RFC 6890 and updates), and metadata addresses."""
_PUBLIC_6 = IPv6Network("2000::/3")
"""All that IANA gives out as global unicast. NAT64, mapped, local and multicast lie outside."""
_NEVER_6 = [
    IPv6Network(text)
    for text in (
        "2001::/23",  # Teredo, ORCHID, benchmarks
        "2001:db8::/32",
        "2002::/16",  # 6to4: embeds an IPv4 address
        "2620:4f:8000::/48",
        "3fff::/20",
    )
]


def plain(address: Address) -> Address:
    """The IPv4 address that a v4-mapped one stands for; others as they are."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def parse_address(text: str) -> Address | None:
    """None if it is no address. Zones (fe80::1%eth0) are none."""
    try:
        return plain(ipaddress.ip_address(text)) if "%" not in text else None
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether it belongs to the public internet, by the registries."""
    address = plain(address)
    if isinstance(address, IPv4Address):
        return not any(address in never for never in _NEVER_4)
    return address in _PUBLIC_6 and not any(address in never for never in _NEVER_6)


def has_public(found: Range) -> bool:
    """Whether anything in a range can be public."""
    if isinstance(found, IPv4Network):
        return not any(found.subnet_of(never) for never in _NEVER_4)
    inside = found.subnet_of(_PUBLIC_6) or _PUBLIC_6.subnet_of(found)
    return inside and not any(found.subnet_of(never) for never in _NEVER_6)


def may_reach(address: Address) -> bool:
    """Whether it is public and this host would send packets for it away. Asks the kernel, so
    that every address the host has, also one just added, counts as its own."""
    address = plain(address)
    return is_public(address) and goes_out(address)
