"""The network of one sandbox, as the gate has it: its sockets, its policy, what goes on.

What must hold: an outlet acts by its own policy for what comes from its own sockets, and knows of
no other sandbox; a flood in one sandbox is left waiting in that sandbox's sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable

from dsec_runtime.network.addresses import Address, parse_address
from dsec_runtime.network.bounds import Bucket, Room
from dsec_runtime.network.denials import Denials
from dsec_runtime.network.flow import Flow, drop
from dsec_runtime.network.inside import Sockets, original
from dsec_runtime.network.lookups import Lookups
from dsec_runtime.network.policy import Policy
from dsec_runtime.network.resolver import Resolver
from dsec_runtime.network.udp import Relay

log = logging.getLogger(__name__)

MAX_FLOWS = 512
"""Connections of one sandbox; more are reset."""
_DNS = 53
_DESCRIPTORS = 2
"""Of a connection."""
_AT_ONCE = 16
_CONNECTIONS = (200.0, 600.0)
_QUESTIONS = (200.0, 500.0)
_DATAGRAMS = (2000.0, 4000.0)
"""A second, and at once. What is more waits; what does not fit there is dropped by the kernel."""
_PAUSE_S = 0.2
"""Without descriptors or memory for another connection."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Outlet:
    """One sandbox's way out. Made when its sockets are; `close` takes everything away."""

    def __init__(
        self,
        policy: Policy,
        denials: Denials,
        resolver: Resolver,
        namespace: int,
        sockets: Sockets,
        room: Room,
    ) -> None:
        """Owns `namespace` (a descriptor) and `sockets`."""
        self.policy = policy
        self.denials = denials
        self._namespace = namespace
        self._sockets = sockets
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._lookups = Lookups(self, resolver)
        self._relay = Relay(self, lambda: os.dup(self._namespace), room)
        self._flows: set[Flow] = set()
        self._dns: set[asyncio.Task[None]] = set()
        self._closed = False
        buckets = Bucket(*_CONNECTIONS), Bucket(*_QUESTIONS), Bucket(*_DATAGRAMS)
        takers = self._accept, self._question, self._datagram
        kinds = sockets.tcp, sockets.dns, sockets.udp
        for bucket, take, kind in zip(buckets, takers, kinds, strict=True):
            for sock in kind:
                self._watch(sock, bucket, take)

    def names_of(self, address: Address) -> list[str]:
        return self._lookups.given.names(address)

    def deny(self, host: str, port: int, protocol: str = "tcp", why: str = "") -> None:
        self.denials.add(host, port, protocol, why)

    def update(self, policy: Policy) -> int:
        """Replace the policy in one step. Connections that it does not allow are cut: how many."""
        self.policy = policy
        cut = self._relay.review()
        for flow in list(self._flows):
            if flow.established and not flow.allowed():
                flow.cut()
                cut += 1
        return cut

    def sweep(self) -> None:
        """Cut what has been idle for too long."""
        self._relay.sweep()
        for flow in list(self._flows):
            if flow.idle():
                flow.cut()

    def close(self) -> None:
        self._closed = True
        self._lookups.close()
        self._relay.close()
        for flow in list(self._flows):
            flow.cut()
        for task in self._dns:
            task.cancel()
        for sock in (*self._sockets.tcp, *self._sockets.dns, *self._sockets.udp):
            drop(self._loop, sock, reset=False)
        os.close(self._namespace)

    # -- what comes --------------------------------------------------------------------

    def _watch(
        self, sock: socket.socket, bucket: Bucket, take: Callable[[socket.socket], bool]
    ) -> None:
        """Call `take` for what comes, as fast as the bucket allows. It says whether to go on."""

        def again() -> None:
            if not self._closed:
                self._loop.add_reader(sock, ready)

        def ready() -> None:
            for _ in range(_AT_ONCE):
                if not bucket.take():
                    self._loop.remove_reader(sock)
                    self._loop.call_later(max(bucket.wait_s(), 0.01), again)
                    return
                try:
                    if not take(sock):
                        return
                except BlockingIOError:
                    return
                except OSError as e:
                    if e.errno in _SHORT:
                        self._loop.remove_reader(sock)
                        self._loop.call_later(_PAUSE_S, again)
                    else:
                        log.debug("a socket in a sandbox: %s", e)
                    return

        self._loop.add_reader(sock, ready)

    def _accept(self, sock: socket.socket) -> bool:
        client, _ = sock.accept()
        client.setblocking(False)
        host, port = client.getsockname()[:2]
        address = parse_address(host)
        if address is None:
            drop(self._loop, client, reset=True)
        elif len(self._flows) + len(self._dns) >= MAX_FLOWS or not self._room.take(_DESCRIPTORS):
            self.deny(str(address), port, why="limit")
            drop(self._loop, client, reset=True)
        elif port == _DNS:
            task = self._loop.create_task(self._serve_dns(client))
            self._dns.add(task)
            task.add_done_callback(self._dns.discard)
        else:
            flow = Flow(self, client, address, port)
            self._flows.add(flow)
            flow.start(self._ended)
        return True

    def _ended(self, flow: Flow) -> None:
        self._flows.discard(flow)
        self._room.give(_DESCRIPTORS)

    async def _serve_dns(self, client: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):  # it breaks, or is idle for too long
                await self._lookups.serve(client)
        finally:
            drop(self._loop, client, reset=False)
            self._room.give(_DESCRIPTORS)

    def _question(self, sock: socket.socket) -> bool:
        data, ancillary, _, client = sock.recvmsg(4096, 256)
        self._lookups.take(sock, data, ancillary, client)
        return True

    def _datagram(self, sock: socket.socket) -> bool:
        data, ancillary, _, client = sock.recvmsg(65535, 256)
        to, source = original(ancillary), parse_address(client[0])
        if to is not None and source is not None:
            self._relay.take(data, (source, client[1]), to)
        return True
