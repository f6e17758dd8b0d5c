"""A command's process: starting it, its exit status, ending its whole tree."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dsecfs.kernel.syscalls import pidfd_open, pidfd_send_signal

PR_SET_CHILD_SUBREAPER = 36
"""include/uapi/linux/prctl.h"""
_PIDFD_GET_INFO = 0xC040FF0B
"""_IOWR(PIDFS_IOCTL_MAGIC 0xFF, 11, struct pidfd_info of 64 bytes): include/uapi/linux/pidfd.h"""
_PIDFD_INFO_EXIT = 1 << 3
_INFO = struct.Struct("<QQ" + "I" * 11 + "i")
_EXIT_CODE = 13
"""Index of `exit_code` in that struct: after mask, cgroupid and eleven ids."""
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def become_subreaper() -> None:
    """From now on orphans below this process become its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def start(argv: list[str], stdio: tuple[int, int, int], extra: list[int]) -> int:
    """Start a program with these standard streams, and `extra` as descriptors 3 and up; its
    process id. OSError when there is no such program."""
    actions = [
        (os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((*stdio, *extra))
    ]
    path = argv[0] if "/" in argv[0] else f"/usr/bin/{argv[0]}"
    return os.posix_spawn(
        path,
        argv,
        _ENV,
        file_actions=actions,
        setpgroup=0,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGCHLD],
    )


def exit_of(pidfd: int) -> int | None:
    """Exit code, or -n after signal n, of a process that somebody else reaped; None if the kernel
    does not tell (before Linux 6.15)."""
    buffer = bytearray(_INFO.size)
    struct.pack_into("<Q", buffer, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    found = _INFO.unpack(buffer)
    if not found[0] & _PIDFD_INFO_EXIT:
        return None
    return os.waitstatus_to_exitcode(found[_EXIT_CODE])


def peek(pid: int) -> int | None:
    """Exit code, or -n after signal n, of a child, which stays a zombie; None while it runs.

    ChildProcessError if it is not a child of ours.
    """
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def reap(pid: int) -> None:
    """Let go of a child that ended; nothing happens otherwise."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def children(pid: int) -> list[int]:
    """Children of a process, of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                found += map(int, text.split())
    return found


def tree(pid: int) -> list[int]:
    """A process and all below it; the process first."""
    found, at = [pid], 0
    while at < len(found):
        found += [child for child in children(found[at]) if child not in found]
        at += 1
    return found


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def signal_tree(pid: int, number: int) -> None:
    """Send a signal to a process and all below it, the last first."""
    for one in reversed(tree(pid)):
        pidfd = pidfd_open(one)
        if pidfd is not None:
            pidfd_send_signal(pidfd, signal.Signals(number))
            os.close(pidfd)


def read_counters(counters: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Numbers after KEY in files with lines "KEY NUMBER"; what is not there is left out."""
    found = {}
    for name, (path, key) in counters.items():
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                word, _, number = line.partition(" ")
                if word == key:
                    found[name] = int(number)
    return found
