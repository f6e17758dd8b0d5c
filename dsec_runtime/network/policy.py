"""What one sandbox may reach, in the form that the gate asks.

It comes as JSON from rules.py in the edge. What must hold: what no rule names is not allowed; a
policy never changes, it is replaced.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsec_runtime.network.addresses import Address, Range
from dsec_runtime.network.names import above, pattern

Wire = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CidrRule:
    """A range, the ports in it (none: all) and the protocol."""

    range: Range
    ports: frozenset[int]
    protocol: str


@dataclass(frozen=True, slots=True)
class Policy:
    """What is allowed. Names are in their plain form (names.py)."""

    internet: bool = False
    exact: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Host name to TCP ports."""
    below: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Domain to TCP ports of every name below it."""
    cidrs: tuple[CidrRule, ...] = ()

    def resolves(self, name: str) -> bool:
        """Whether the name may be looked up."""
        return self.internet or bool(self._ports(name))

    def allows_name(self, name: str, port: int) -> bool:
        """Whether a TCP connection to that host and port is allowed."""
        return self.internet or port in self._ports(name)

    def allows_address(self, address: Address, port: int, protocol: str) -> bool:
        """Whether it is allowed whatever name it has."""
        if self.internet:
            return True
        return any(
            rule.protocol == protocol
            and (not rule.ports or port in rule.ports)
            and address.version == rule.range.version
            and address in rule.range
            for rule in self.cidrs
        )

    def _ports(self, name: str) -> frozenset[int]:
        ports = self.exact.get(name, frozenset())
        if self.below:
            for domain in above(name):
                ports |= self.below.get(domain, frozenset())
        return ports

    @staticmethod
    def parse(wire: Wire) -> Policy:
        """From the JSON. ValueError, KeyError, TypeError, AttributeError if it is none."""
        exact: dict[str, frozenset[int]] = {}
        below: dict[str, frozenset[int]] = {}
        for text, ports in wire["hosts"].items():
            if pattern(text) != text:
                raise ValueError(f"host {text[:80]!r}")
            place = below if text.startswith("*.") else exact
            place[text.removeprefix("*.")] = _ports(ports)
        cidrs = []
        for text, ports, protocol in wire["cidrs"]:
            if protocol not in ("tcp", "udp"):
                raise ValueError(f"protocol {protocol!r:.20}")
            cidrs.append(CidrRule(ipaddress.ip_network(text), _ports(ports), protocol))
        if not isinstance(wire["internet"], bool):
            raise TypeError("internet is no boolean")
        return Policy(wire["internet"], exact, below, tuple(cidrs))


def _ports(value: Any) -> frozenset[int]:
    ports = frozenset(value)
    if not all(type(port) is int and 1 <= port <= 65535 for port in ports):
        raise ValueError("ports")
    return ports
