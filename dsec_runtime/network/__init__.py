"""The network of sandboxes: default deny, and a gate for what a policy allows.

A sandbox has a network namespace with a loopback device and nothing else. One without rules stays
like that. For one with rules the *gate*, a process of its own that outlives the edge, opens
listeners inside of that namespace, to which the kernel there delivers every connection and
datagram, whatever its destination. The gate decides and, if the policy allows it, dials from the
host. So there are no interfaces, addresses or firewall rules on the host; no sandbox has a way to
another one or to the host; and what is not allowed fails inside.

What must hold (each is a test in tests/t6_node/test_network*.py):
- nothing is reachable but what the policy names; private, local, multicast, metadata addresses
  and the host's own never are, whatever the policy or a name server says;
- a host rule opens that name, not its address: other names at the same address (a CDN) are denied
  by TLS server name and HTTP Host; the gate is the only resolver;
- a policy is replaced in one step, and connections it does not allow any more are cut;
- connections outlive the edge. They end with the gate; a new one gets all policies from the edge,
  and until then nothing is reachable.

    rules.py      rules of the API → what the gate enforces, and advice for denials (edge)
    services.py   named services
    client.py     the edge's side; start.py starts the gate
    gate.py       the process: outlets and requests
    outlet.py     the network of one sandbox
    inside.py     in the sandbox's namespace: routes, rules, sockets; netlink.py
    flow.py       a TCP connection; tls.py, http.py: whom it is for
    lookups.py    the resolver that sandboxes see; resolver.py asks the host's; dns.py
    udp.py        UDP
    policy.py, addresses.py, names.py, denials.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec_runtime.network.inside import RESOLVER

if TYPE_CHECKING:
    from dsec_runtime.network.client import Denial, Gate

__all__ = ["RESOLVER", "Denial", "Gate"]


def __getattr__(name: str) -> object:
    """The edge's side is imported when it is asked for: the gate's process does without."""
    if name in ("Denial", "Gate"):
        from dsec_runtime.network import client

        return getattr(client, name)
    raise AttributeError(name)
