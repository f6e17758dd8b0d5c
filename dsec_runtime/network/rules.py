"""The rules of the API, checked and put into the form that the gate takes (edge only).

What must hold: a rule that passes here names something that can be reached; what it says is all
that it allows.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Mapping

from dsec_runtime.edge.model import Network, NetworkRule
from dsec_runtime.errors import BadNetwork
from dsec_runtime.network.addresses import has_public, is_public
from dsec_runtime.network.names import above, pattern
from dsec_runtime.network.policy import Wire
from dsec_runtime.network.services import DEFAULT_PORTS, Service

MAX_PATTERNS = 16384
"""Host patterns of one policy, services resolved."""


def compile_policy(network: Network, services: Mapping[str, Service]) -> Wire:
    """The policy as JSON. BadNetwork: which rule breaks what."""
    hosts: dict[str, set[int]] = {}
    cidrs: list[tuple[str, list[int], str]] = []
    for number, rule in enumerate(network.allow):
        place = f"network.allow.{number}"
        if rule.cidr:
            cidrs.append((_cidr(rule, place), sorted(set(rule.ports)), rule.protocol))
            continue
        if rule.protocol != "tcp":
            raise BadNetwork(
                f"{place}: protocol {rule.protocol} for a {'host' if rule.host else 'service'}",
                field=f"{place}.protocol",
                hint="names are checked in TCP connections only; udp goes with a cidr",
            )
        if rule.service:
            service = _service(rule.service, services, place)
            patterns, ports = service.hosts, rule.ports or service.ports
        else:
            patterns, ports = (_host(rule.host, place),), rule.ports or DEFAULT_PORTS
        for one in patterns:
            hosts.setdefault(one, set()).update(ports)
    if len(hosts) > MAX_PATTERNS:
        raise BadNetwork(
            f"network.allow: {len(hosts)} host names", field="network.allow",
            hint=f"at most {MAX_PATTERNS}, those of services counted",
        )
    return {
        "internet": network.internet,
        "hosts": {host: sorted(ports) for host, ports in hosts.items()},
        "cidrs": cidrs,
    }


def _service(name: str, services: Mapping[str, Service], place: str) -> Service:
    found = services.get(name)
    if found is None:
        near = difflib.get_close_matches(name[:64], services, n=1)
        known = f"did you mean {near[0]}?" if near else "known: " + ", ".join(sorted(services))
        raise BadNetwork(
            f"{place}: no service {name[:64]!r} on this node", field=f"{place}.service", hint=known
        )
    return found


def _host(text: str, place: str) -> str:
    found = pattern(text)
    if found is None:
        hint = 'expected a name, or "*.example.org" for every name below example.org'
        if text in ("*", "*."):
            hint = "internet: true allows everything public"
        else:
            try:
                ipaddress.ip_network(text, strict=False)
                hint = "give addresses as cidr"
            except ValueError:
                pass
        message = f"{place}: {text[:80]!r} is no host name"
        raise BadNetwork(message, field=f"{place}.host", hint=hint)
    return found


def _cidr(rule: NetworkRule, place: str) -> str:
    field = f"{place}.cidr"
    try:
        found = ipaddress.ip_network(rule.cidr)
    except ValueError as e:
        raise BadNetwork(
            f"{place}: {rule.cidr[:80]!r} is no range of addresses: {str(e)[:120]}",
            field=field,
            hint="expected e.g. 93.184.216.0/24, with no bits set behind the prefix",
        ) from None
    if isinstance(found, ipaddress.IPv6Network) and found.network_address.ipv4_mapped:
        raise BadNetwork(f"{place}: {rule.cidr[:80]!r}", field=field, hint="write it as IPv4")
    if not has_public(found):
        raise BadNetwork(
            f"{place}: {rule.cidr[:80]} is never reachable",
            field=field,
            hint="private, local, multicast, metadata and reserved ranges are not",
        )
    return str(found)


def advice(host: str, port: int, protocol: str, services: Mapping[str, Service]) -> str:
    """What would allow it: `allow with network={"pypi": true}`. `host` is a name or an address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        if not is_public(address):
            return "it is never reachable"
        more = ', "protocol": "udp"' if protocol == "udp" else ""
        return f'allow with network={{"allow": [{{"cidr": "{address}"{more}}}]}}'
    if protocol != "tcp":
        return "only TCP goes by host names"
    for name, service in services.items():
        wanted = [host, *(f"*.{domain}" for domain in above(host))]
        if port in service.ports and any(one in service.hosts for one in wanted):
            return f'allow with network={{"{name}": true}}'
    more = "" if port in DEFAULT_PORTS else f', "ports": [{port}]'
    return f'allow with network={{"allow": [{{"host": "{host}"{more}}}]}}'
