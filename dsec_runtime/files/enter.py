"""How a child becomes a user of the sandbox. Owns the order of the steps.

What must hold when `become` returns: the process is in the sandbox's user, mount and pid
namespaces and its root is the sandbox's; it has the user's ids and no capability, and can get
none; it has no descriptor but its socket, the root and /dev/null; its limits are set; it dies with
the server. What must hold at every moment: nobody in the sandbox can look into it (it is not
dumpable, and its memory belongs to the host's user namespace), and it imports nothing (a module's
path would be one of the sandbox).
"""

from __future__ import annotations

import os
import resource
import select
from dataclasses import dataclass
from typing import Any

from dsec_runtime.files import calls, wire
from dsec_runtime.files.paths import Refusal
from dsecfs.kernel.syscalls import CLONE_NEWNS, CLONE_NEWUSER, setns

CLONE_NEWPID = 0x20000000
_NAMESPACES = ("user", "mnt", "pid")
_MAX_ID = (1 << 32) - 2
"""Ids are 32 bits; the last one means "none"."""
MEMORY = 512 << 20
"""Bytes of address space. A child needs some 100 MiB; hostile archives would like more."""
MAX_GROUPS = 4096
"""Supplementary groups: what fits into a message. Linux allows 65536."""
FILES = 2048
CPU_S = 3600
"""Seconds of computing; waiting does not count. Terabytes need less."""


@dataclass(frozen=True, slots=True)
class Who:
    """Whom to become, checked."""

    pid: int
    started: int
    uid: int
    gid: int
    groups: tuple[int, ...]

    @staticmethod
    def parse(value: dict[str, Any]) -> Who:
        """WireError."""
        numbers = [value.get(key) for key in ("pid", "started", "uid", "gid")]
        groups = value.get("groups")
        if not isinstance(groups, list) or len(groups) > MAX_GROUPS:
            raise wire.WireError("groups")
        for number in (*numbers, *groups):
            if type(number) is not int or number < 0:
                raise wire.WireError("ids")
        pid, started, uid, gid = (int(n) for n in numbers if n is not None)
        if pid < 1 or max(uid, gid, *groups, 0) > _MAX_ID:
            raise wire.WireError("ids")
        return Who(pid, started, uid, gid, tuple(groups))


def started_at(pid: int) -> int | None:
    """Start time of a process, field 22 of /proc/PID/stat; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def check(who: Who, pidfd: int) -> None:
    """Refusal unless the process behind `pidfd` is the one that is meant, with own namespaces."""
    if started_at(who.pid) != who.started:
        raise Refusal(wire.GONE)
    same = True
    try:
        for name in _NAMESPACES:
            if os.stat(f"/proc/{who.pid}/ns/{name}").st_ino == _own(name):
                raise Refusal(wire.NO_NAMESPACE)
    except (FileNotFoundError, ProcessLookupError):
        same = False
    # All that was read by number was about the process behind `pidfd` if that one lives now.
    if not same or has_ended(pidfd):
        raise Refusal(wire.GONE)


def _own(name: str) -> int:
    found = _OWN.get(name)
    if found is None:
        found = _OWN[name] = os.stat(f"/proc/self/ns/{name}").st_ino
    return found


_OWN: dict[str, int] = {}


def become(who: Who, pidfd: int, sock: int, null: int, last_capability: int) -> int:
    """Enter and become. Returns the descriptor of the sandbox's root. OSError, Refusal.

    The pid namespace is entered by being forked into it; `pidfd` was checked.
    """
    root = os.open(f"/proc/{who.pid}/root", os.O_PATH | os.O_DIRECTORY)
    if has_ended(pidfd):
        raise Refusal(wire.GONE)
    setns(pidfd, CLONE_NEWUSER | CLONE_NEWNS)
    os.fchdir(root)
    os.chroot(".")
    _limit()
    calls.drop_bounding_set(last_capability)
    os.setgroups(who.groups)
    os.setresgid(who.gid, who.gid, who.gid)
    os.setresuid(who.uid, who.uid, who.uid)
    calls.drop_capabilities()
    calls.no_new_privileges()
    calls.hide_memory()
    calls.die_with_parent()
    os.umask(0)
    _close_others({sock, root}, null)
    return root


def _limit() -> None:
    for which, value in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, CPU_S),
    ):
        resource.setrlimit(which, (value, value))


def _close_others(keep: set[int], null: int) -> None:
    for number in range(3):
        os.dup2(null, number)
    at = 3
    for number in sorted(keep):
        os.closerange(at, number)
        at = number + 1
    os.closerange(at, 1 << 20)
