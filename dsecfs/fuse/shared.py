"""What the processes of one FUSE mount share: a page of memory and a set of descriptors.

A mount is served by three processes (docs/fuse-takeover.md): an active and a standby
supervisor and a worker. They talk through one page of shared memory (a memfd), which lives
as long as any of them: who is who, whether the worker is alive, and which requests it is
handling, so that a request that kills workers can be told from the innocent.

What must hold:
- every number is one aligned 64-bit word written in one store; no reader trusts a pair of
  words to belong together, a pid is only believed with the start time of its process;
- `worker` is written by the holder of the worker lock alone, the note table too;
- code of two versions may look at the same page (the worker is upgraded by restarting it),
  so the layout changes only together with VERSION, and `SharedPage` refuses another one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import signal
import struct
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from dsecfs.errors import TooNew
from dsecfs.fuse.config import FsConfig
from dsecfs.fuse.session import Session, resend

VERSION = 2
PAGE_SIZE = 128 * 1024

_ACTIVE, _STANDBY, _WORKER = 1, 3, 5
"""Word numbers of (pid, start time) pairs; word 0 is VERSION."""
(
    _PREPARED,
    _BEAT,
    _SERVED,
    _GENERATION,
    _DEATHS,
    _UPGRADES_FAILED,
    _RESEND,
    _RESTART,
    _FORCE,
    _ACTIVE_BEAT,
    _MOUNTED_AT,
    _DRAINING,
    _TAKEOVERS,
) = range(7, 20)

_NOTES = 4096
NOTE_SLOTS = 1024
"""Requests that can be noted at once; more are handled without a note."""
_NOTE = struct.Struct("=6Q")
_SUSPECTS = _NOTES + NOTE_SLOTS * _NOTE.size
SUSPECT_SLOTS = 1024
_SUSPECT = struct.Struct("=6Q")

POINTS_CRASH = 16
"""Blame for a request that was being handled when a worker crashed or got stuck."""
POINTS_KILLED = 1
"""Blame when the worker was killed from outside: more likely an operator than the request."""
POINTS_LIMIT = 32
"""From here on a request is answered with EIO: two crashes in a row, or 32 kills."""
SUSPECT_S = 300.0
"""Seconds after which a suspicion is forgotten."""


class RequestKey(NamedTuple):
    """What tells one request from another across its repetitions.

    The kernel's own number of a request is not visible through pyfuse3, so it is the
    operation and its arguments (`b` is a size or the crc32 of a name).
    """

    op: int
    ino: int
    a: int
    b: int


class Process:
    """A process of the family, held by a pidfd so that its pid cannot come to mean another."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self.fd = fd
        self.since = time.monotonic()

    @staticmethod
    def open(pid: int, start: int) -> Process | None:
        """The living process `pid` if it started at `start`, else None."""
        if pid <= 0:
            return None
        try:
            fd = os.pidfd_open(pid)
        except (ProcessLookupError, OSError):
            return None
        if start_time(pid) != start:
            os.close(fd)
            return None
        return Process(pid, fd)

    @property
    def alive(self) -> bool:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not poll.poll(0)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; no error if the process has ended."""
        try:
            signal.pidfd_send_signal(self.fd, number)
        except ProcessLookupError:
            pass

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, at most `timeout_s` seconds; whether it did."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(max(0, int(timeout_s * 1000))))

    def reap(self) -> int | None:
        """Collect an ended process: exit code, or minus the signal; None if not our child."""
        try:
            result = os.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            result = None
        os.close(self.fd)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def start_time(pid: int) -> int:
    """Start of a process in clock ticks since boot (proc(5), field 22); 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            text = f.read()
    except OSError:
        return 0
    fields = text[text.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


class SharedPage:
    """Typed access to the page. Make one with `create`; forks inherit the mapping, others get
    the descriptor and `map` it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        if self._words[0] != VERSION:
            raise TooNew(
                f"FUSE mount: shared page of version {self._words[0]}, this code knows {VERSION}",
                hint="stop the daemon and start it again",
            )

    @staticmethod
    def create() -> int:
        """A memfd with an empty page."""
        fd = os.memfd_create("dsec-page", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_SIZE)
        os.pwrite(fd, struct.pack("=Q", VERSION), 0)
        return fd

    @staticmethod
    def map(fd: int) -> mmap.mmap:
        """The mapping must live as long as the process: mmap keeps a descriptor of its own,
        which processes that are forked later close as one they do not know."""
        return mmap.mmap(fd, PAGE_SIZE)

    # -- who is who

    def _identify(self, word: int, pid: int) -> None:
        self._words[word] = 0
        self._words[word + 1] = start_time(pid) if pid else 0
        self._words[word] = pid

    def _open(self, word: int) -> Process | None:
        return Process.open(self._words[word], self._words[word + 1])

    def set_active(self) -> None:
        self._identify(_ACTIVE, os.getpid())

    def set_standby(self, pid: int) -> None:
        self._identify(_STANDBY, pid)

    def set_worker(self) -> None:
        """Called by a worker that holds the lock."""
        self._identify(_WORKER, os.getpid())
        self._words[_BEAT] = time.monotonic_ns()

    def serving(self) -> None:
        """Called by the worker when it reads requests."""
        self._words[_GENERATION] += 1

    def open_worker(self) -> Process | None:
        """The worker that serves now, if it is alive."""
        return self._open(_WORKER)

    def supervisors(self) -> int:
        """How many supervisors are alive: 2, for a moment 1, or 0: the next death is final."""
        living = 0
        for word in (_ACTIVE, _STANDBY):
            found = self._open(word)
            if found is not None:
                living += 1
                os.close(found.fd)
        return living

    @property
    def active_pid(self) -> int:
        return self._words[_ACTIVE]

    @property
    def standby_pid(self) -> int:
        return self._words[_STANDBY]

    @property
    def worker_pid(self) -> int:
        return self._words[_WORKER]

    # -- life signs, counters and wishes

    def beat(self) -> None:
        self._words[_BEAT] = time.monotonic_ns()

    @property
    def beat_ns(self) -> int:
        """CLOCK_MONOTONIC of the serving worker's last sign of life."""
        return self._words[_BEAT]

    def active_beat(self) -> None:
        self._words[_ACTIVE_BEAT] = time.monotonic_ns()

    @property
    def active_beat_ns(self) -> int:
        return self._words[_ACTIVE_BEAT]

    @property
    def generation(self) -> int:
        """How many workers have served this mount."""
        return self._words[_GENERATION]

    @property
    def prepared(self) -> int:
        """pid of the worker that is ready to take the lock (an upgrade's second half)."""
        return self._words[_PREPARED]

    @prepared.setter
    def prepared(self, pid: int) -> None:
        self._words[_PREPARED] = pid

    @property
    def deaths(self) -> int:
        """Workers that ended other than by request."""
        return self._words[_DEATHS]

    @deaths.setter
    def deaths(self, value: int) -> None:
        self._words[_DEATHS] = value

    @property
    def takeovers(self) -> int:
        """How often a standby became the active supervisor."""
        return self._words[_TAKEOVERS]

    @takeovers.setter
    def takeovers(self, value: int) -> None:
        self._words[_TAKEOVERS] = value

    @property
    def upgrades_failed(self) -> int:
        return self._words[_UPGRADES_FAILED]

    @upgrades_failed.setter
    def upgrades_failed(self, value: int) -> None:
        self._words[_UPGRADES_FAILED] = value

    @property
    def resend(self) -> bool:
        """Whether the kernel knows FUSE_NOTIFY_RESEND."""
        return bool(self._words[_RESEND])

    @resend.setter
    def resend(self, value: bool) -> None:
        self._words[_RESEND] = value

    @property
    def restart(self) -> bool:
        """Somebody wants a new worker with the code that is on disk now."""
        return bool(self._words[_RESTART])

    @restart.setter
    def restart(self, value: bool) -> None:
        self._words[_RESTART] = value

    @property
    def force(self) -> bool:
        """Somebody wants the mount gone now, whoever uses it."""
        return bool(self._words[_FORCE])

    @force.setter
    def force(self, value: bool) -> None:
        self._words[_FORCE] = value

    @property
    def draining(self) -> bool:
        """The mount point is detached; the last user's last close ends the family."""
        return bool(self._words[_DRAINING])

    @draining.setter
    def draining(self, value: bool) -> None:
        self._words[_DRAINING] = value

    @property
    def mounted_at_ns(self) -> int:
        return self._words[_MOUNTED_AT]

    @mounted_at_ns.setter
    def mounted_at_ns(self, value: int) -> None:
        self._words[_MOUNTED_AT] = value

    # -- requests in flight

    def note(self, slot: int, op: int, ino: int, a: int, b: int) -> None:
        """Record that a request is being handled. `slot` is the worker's to choose."""
        _NOTE.pack_into(self._memory, _NOTES + slot * 48, 1, op, ino, a, b, 0)

    def unnote(self, slot: int) -> None:
        self._words[(_NOTES + slot * 48) >> 3] = 0

    def clear_notes(self) -> None:
        for slot in range(NOTE_SLOTS):
            self.unnote(slot)

    def noted(self) -> list[RequestKey]:
        """The requests that were being handled."""
        found = []
        for slot in range(NOTE_SLOTS):
            state, *key, _ = _NOTE.unpack_from(self._memory, _NOTES + slot * 48)
            if state:
                found.append(RequestKey(*key))
        return found

    def pending(self) -> bool:
        """Whether any request is being handled."""
        return any(self._words[(_NOTES + slot * 48) >> 3] for slot in range(NOTE_SLOTS))

    # -- requests under suspicion

    def suspects(self) -> dict[RequestKey, int]:
        """Requests with their points of blame."""
        now = time.monotonic_ns()
        found = {}
        for i in range(SUSPECT_SLOTS):
            points, at, *key = _SUSPECT.unpack_from(self._memory, _SUSPECTS + i * 48)
            if points and now - at < SUSPECT_S * 1e9:
                found[RequestKey(*key)] = points
        return found

    def set_suspects(self, suspects: dict[RequestKey, int]) -> None:
        """Replace the table; the most blamed are kept when there are too many."""
        ranked = sorted(suspects.items(), key=lambda item: -item[1])[:SUSPECT_SLOTS]
        now = time.monotonic_ns()
        for i in range(SUSPECT_SLOTS):
            if i < len(ranked):
                key, points = ranked[i]
                _SUSPECT.pack_into(self._memory, _SUSPECTS + i * 48, points, now, *key)
            else:
                self._words[(_SUSPECTS + i * 48) >> 3] = 0

    def blame(self, points: int) -> list[RequestKey]:
        """A worker ended: blame what it was handling, empty the notes, return the condemned."""
        suspects = self.suspects()
        noted = self.noted()
        for key in noted:
            suspects[key] = suspects.get(key, 0) + points
        self.set_suspects(suspects)
        self.clear_notes()
        return [key for key in noted if suspects[key] >= POINTS_LIMIT]

    def acquit(self, key: RequestKey) -> None:
        """A suspected request was answered after all."""
        suspects = self.suspects()
        if suspects.pop(key, None) is not None:
            self.set_suspects(suspects)


@dataclass
class Inherited:
    """What a worker gets from its supervisor by being its child.

    Plain values only: the supervisor may be of an older version than the worker.
    """

    version: int
    config: dict[str, Any]
    """The mount's `FsConfig` as JSON."""
    fuse_fd: int
    memory: mmap.mmap
    memory_fd: int
    """The memfd that `memory` maps."""
    slots_fd: int
    """A memfd: the registry of inode number slots, and what the worker lock is taken on."""
    command_fd: int
    """An eventfd: written to make the active supervisor look at the page."""
    control_fd: int
    """The listening control socket, or -1."""
    lock_fd: int
    """Holds the lock of the state directory."""
    init: bytes
    """`Session.init`."""
    shell: Any
    """The pyfuse3.Operations object that pyfuse3.init was given."""
    successor: bool = False
    """This worker is to follow one that still serves: it waits for the lock."""

    def descriptors(self) -> dict[str, int]:
        """What a process of the family holds, by name of the field."""
        fds = {name: getattr(self, name) for name in FD_FIELDS}
        return {name: fd for name, fd in fds.items() if fd >= 0}


FD_FIELDS = ("fuse_fd", "memory_fd", "slots_fd", "command_fd", "control_fd", "lock_fd")


def share(session: Session, config: FsConfig, control_fd: int, lock_fd: int) -> Inherited:
    """What the processes of a new mount have in common."""
    memory_fd = SharedPage.create()
    memory = SharedPage.map(memory_fd)
    page = SharedPage(memory)
    page.resend = resend(session.fuse_fd) and not config.no_resend
    page.mounted_at_ns = time.monotonic_ns()
    return Inherited(
        version=VERSION,
        config=asdict(config),
        fuse_fd=session.fuse_fd,
        memory=memory,
        memory_fd=memory_fd,
        slots_fd=os.memfd_create("dsec-slots", os.MFD_CLOEXEC),
        command_fd=os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK),
        control_fd=control_fd,
        lock_fd=lock_fd,
        init=session.init,
        shell=session.shell,
    )


def connection_over(fuse_fd: int) -> bool:
    """Whether the kernel has ended the FUSE connection: unmounted for good, or aborted."""
    poll = select.poll()
    poll.register(fuse_fd, 0)
    return bool(poll.poll(0))


def lock_worker(slots_fd: int, timeout_s: float) -> int | None:
    """Become the one worker of the mount: the lock's descriptor, or None after `timeout_s`.

    The kernel drops the lock when the holder dies. Descriptors inherited by fork share one
    lock, so the file is opened anew.
    """
    fd = os.open(f"/proc/self/fd/{slots_fd}", os.O_RDWR | os.O_CLOEXEC)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
            time.sleep(0.005)
