"""The holder: parent of the worker, keeper of a copy of everything.

What must hold: it does next to nothing, so that nothing in it can fail; whatever the worker tells
is known here before the worker acts on it; a status is kept until the worker wrote it down.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsec_runtime.keeper.held import Held, Pair
from dsec_runtime.keeper.process import become_subreaper, children, peek, reap
from dsecfs.kernel.syscalls import pidfd_open


@dataclass(slots=True)
class Shared:
    """What both processes have."""

    run: Path
    """Directory for sockets of terminals."""
    listener: socket.socket
    """run/keeper.sock"""
    held: dict[str, Held] = field(default_factory=dict)


def keep(shared: Shared) -> None:
    """Be the holder; in the child, the worker, and the holder when that is gone. Ends when a
    client says so."""
    from dsec_runtime.keeper.worker import Worker

    while True:
        become_subreaper()
        ours, theirs = Pair.make()
        worker = os.fork()
        if worker == 0:
            ours.close()
            if not Worker(shared, theirs).work():
                sys.exit(0)
            theirs.close()
            continue
        theirs.close()
        if not _Holder(shared, ours, worker).hold():
            return
        ours.close()


class _Holder:
    def __init__(self, shared: Shared, pair: Pair, worker: int) -> None:
        self._shared = shared
        self._pair = pair
        self._worker = worker

    def hold(self) -> bool:
        """Until the worker is gone: True; False when it was told to end."""
        wake_in, wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(wake_in, select.POLLIN)
        poll.register(self._pair, select.POLLIN)
        try:
            self._look()
            while True:
                ready = dict(poll.poll())
                if wake_in in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_in, 4096)
                    self._look()
                if self._pair.fileno() in ready:
                    messages = self._pair.receive()
                    if messages is None:
                        break
                    for value, fds in messages:
                        if value["op"] == "quit":
                            return False
                        self._take(value, fds)
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            os.close(wake_in)
            os.close(wake_out)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._worker, 0)
        self._claim_unknown()
        return True

    def _take(self, value: dict[str, Any], fds: list[int]) -> None:
        op, id = value["op"], value["id"]
        if op == "hold":
            held = Held(id, value["meta"], dict(zip(value["names"], fds, strict=True)))
            self._shared.held[id] = held
            return
        held_or_none = self._shared.held.get(id)
        if held_or_none is None:
            for fd in fds:
                os.close(fd)
            return
        held = held_or_none
        if op == "pid":
            held.pid, held.pidfd = value["pid"], fds[0]
        elif op == "fds":
            held.fds.update(zip(value["names"], fds, strict=True))
        elif op == "meta":
            held.meta.update(value["meta"])
        elif op == "close":
            held.close(*value["names"])
        elif op == "ended":
            if held.pid:
                reap(held.pid)
            held.pid = 0
            held.meta["ended"] = True
        elif op == "drop":
            if held.pid:
                reap(held.pid)
            held.close()
            del self._shared.held[id]

    def _look(self) -> None:
        """Tell the worker which commands of an earlier worker ended; reap orphans."""
        known = set()
        for held in self._shared.held.values():
            known.add(held.pid)
            if held.pid and held.status is None:
                with contextlib.suppress(ChildProcessError):
                    held.status = peek(held.pid)
            if held.pid and held.status is not None:
                with contextlib.suppress(OSError):  # it is gone: the next one asks again
                    self._pair.send({"op": "ended", "id": held.id, "status": held.status})
        for pid in children(os.getpid()):
            if pid not in known and pid != self._worker:
                reap(pid)

    def _claim_unknown(self) -> None:
        """The worker was killed; if it had just started a command, that is a child of ours now."""
        waiting = [h for h in self._shared.held.values() if not h.pid and not h.meta.get("ended")]
        known = {held.pid for held in self._shared.held.values()}
        unknown = sorted(pid for pid in children(os.getpid()) if pid not in known)
        for held in waiting:
            pidfd = pidfd_open(unknown[-1]) if unknown else None
            if pidfd is not None:
                held.pid, held.pidfd = unknown.pop(), pidfd
            else:  # it was not started: whoever asked asks again
                held.close()
                del self._shared.held[held.id]
