"""The supervisors of one FUSE mount: mount it, keep a worker serving it, survive each other.

The process that mounts runs pyfuse3 until the kernel's INIT is answered and no further, then
forks a standby copy of itself and a worker (docs/fuse-takeover.md). Both supervisors can fork
workers, and each watches the other by pidfd. When both are gone the worker has new ones made
(rescue.py).

What must hold:
- supervisors never read a request but INIT, have one thread, and import no client library;
- forked processes hold no descriptor but those in `Inherited`, 0, 1 and 2;
- any process may die at any moment; only the loss of all of them takes the mount down;
- an unmounted or aborted connection shows as POLLERR on the FUSE descriptor in all
  processes: that, and nothing else, ends the family.
"""

from __future__ import annotations

import enum
import errno
import importlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dsecfs.errors import Busy, DsecfsError
from dsecfs.fuse.config import FsConfig
from dsecfs.fuse.mountpoint import unmount
from dsecfs.fuse.shared import (
    POINTS_CRASH,
    POINTS_KILLED,
    Inherited,
    Process,
    SharedPage,
    connection_over,
)

log = logging.getLogger("dsecfs.fuse.supervisor")

EXIT_OVER = 0
"""A worker saw the end of the connection."""
EXIT_DRAINED = 3
"""A worker finished its requests because it was asked to."""
EXIT_NOT_NEEDED = 4
"""A worker found another one serving."""

FREE_RESTARTS = 3
"""Quick deaths in a row that are answered with an immediate restart."""
QUICK_S = 2.0
"""A worker that lived for less died quickly."""
BACKOFF_S = 0.1
BACKOFF_MAX_S = 5.0
BACKOFF_KILLED_S = 0.2
"""The longest pause after a kill from outside, which says nothing about the next worker."""
FIRST_TRIES = 3
"""Workers of a new mount that may fail before the mount is given up."""


class Role(enum.Enum):
    ACTIVE = enum.auto()
    STANDBY = enum.auto()
    WORKER = enum.auto()


class _Forked(BaseException):
    """Unwinds the stack of a forked process, so that it starts its role at the bottom."""

    def __init__(self, role: Role) -> None:
        self.role = role


class Silence:
    """How long a beat has not changed, counting only time in which we ran ourselves: after a
    freeze of the whole family the other one gets its chance first."""

    def __init__(self) -> None:
        self._beat = -1
        self._silent_s = 0.0
        self._looked = time.monotonic()

    def since(self, beat: int) -> float:
        """Look at the beat; seconds since it last changed. Call it about once a second."""
        now = time.monotonic()
        self._silent_s += min(now - self._looked, 2.0)
        self._looked = now
        if beat != self._beat:
            self._beat, self._silent_s = beat, 0.0
        return self._silent_s


class Supervisor:
    """One process of the pair. `run` returns in every forked process with its exit code."""

    def __init__(
        self,
        config: FsConfig,
        shared: Inherited,
        announce: Callable[[str], None],
    ) -> None:
        """`announce` is called once: with "" when a worker serves, else with what failed."""
        self._config = config
        self._inherited = shared
        self._page = SharedPage(shared.memory)
        self._announce: Callable[[str], None] | None = announce
        self._mountpoint = Path(config.mountpoint)
        self._peer: Process | None = None
        self._worker: Process | None = None
        self._successor: Process | None = None
        self._drained: Process | None = None
        self._terminations = 0
        self._quick_deaths = 0
        self._not_before = 0.0
        self._peer_not_before = 0.0
        self._silence = Silence()
        self._was_stuck = False
        self._failure = ""

    # -- processes

    def run(self) -> int:
        """Supervise until the connection ends. In a worker: serve. Returns an exit code."""
        role = Role.ACTIVE
        while True:
            try:
                if role is Role.ACTIVE:
                    return self._be_active()
                if role is Role.STANDBY:
                    role = self._be_standby()
                else:
                    return self._be_worker()
            except _Forked as forked:
                role = forked.role

    def _fork(self, role: Role) -> Process:
        myself = os.pidfd_open(os.getpid())
        pid = os.fork()
        if pid:
            os.close(myself)
            return Process(pid, os.pidfd_open(pid))
        if self._announce is not None:
            self._announce = None
        keep = {0, 1, 2, *self._inherited.descriptors().values()}
        parent = os.getppid()
        self._peer = self._worker = self._successor = None
        if role is Role.STANDBY:
            keep.add(myself)
            self._peer = Process(parent, myself)
        _close_others(keep)
        raise _Forked(role)

    def _be_worker(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # Whatever of ours the supervisor had imported is as old as the supervisor.
        for name in [n for n in sys.modules if n.split(".")[0] in ("dsecfs", "dsec_runtime")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        module, _, function = str(self._inherited.config["entry"]).partition(":")
        return int(getattr(importlib.import_module(module), function)(self._inherited))

    def _be_standby(self) -> Role:
        """Watch the active supervisor; return when its role has to be taken over."""
        self._install_signals()
        peer = self._peer
        assert peer is not None
        silence = Silence()
        while True:
            poll = select.poll()
            poll.register(peer.fd, select.POLLIN)
            poll.register(self._inherited.fuse_fd, 0)
            ready = dict(poll.poll(1000))
            if self._inherited.fuse_fd in ready and peer.fd not in ready:
                # The active supervisor collects everybody, us first.
                peer.wait(30)
            if silence.since(self._page.active_beat_ns) > self._config.supervisor_stuck_s:
                log.error("active supervisor %d gives no sign of life: ended", peer.pid)
                peer.signal(signal.SIGKILL)
                peer.wait(10)
            if not peer.alive:
                log.warning("supervisor %d is gone, supervisor %d goes on", peer.pid, os.getpid())
                peer.reap()
                self._peer = None
                self._peer_not_before = 0.0
                self._page.set_standby(0)
                self._page.takeovers += 1
                return Role.ACTIVE

    # -- the active supervisor

    def _be_active(self) -> int:
        self._page.set_active()
        self._page.active_beat()
        self._install_signals()
        self._worker = self._page.open_worker()
        if self._worker is not None:
            log.info("worker %d goes on serving", self._worker.pid)
        while True:
            self._page.active_beat()
            self._fork_missing()
            ready = self._poll()
            if self._inherited.fuse_fd in ready:
                return self._finish()
            if self._peer is not None and self._peer.fd in ready:
                log.warning("standby supervisor %d is gone", self._peer.pid)
                self._peer.reap()
                self._peer = None
            if self._worker is not None and self._worker.fd in ready:
                worker, self._worker = self._worker, None
                if not self._worker_ended(worker):
                    return self._give_up()
            if self._inherited.command_fd in ready:
                os.eventfd_read(self._inherited.command_fd)
            self._look_at_wishes()
            if self._page.force or self._failure:
                return self._give_up()
            self._look_at_worker()

    def _fork_missing(self) -> None:
        now = time.monotonic()
        try:
            if self._worker is None and now >= self._not_before:
                self._inherited.successor = False
                self._worker = self._fork(Role.WORKER)
            if self._peer is None and now >= self._peer_not_before:
                self._peer_not_before = now + 0.2
                self._peer = self._fork(Role.STANDBY)
                self._page.set_standby(self._peer.pid)
        except OSError as e:
            log.error("cannot fork: %s; trying again", e.strerror)
            self._not_before = self._peer_not_before = now + 1.0

    def _poll(self) -> dict[int, int]:
        poll = select.poll()
        poll.register(self._inherited.fuse_fd, 0)
        poll.register(self._inherited.command_fd, select.POLLIN)
        for process in (self._peer, self._worker, self._successor):
            if process is not None:
                poll.register(process.fd, select.POLLIN)
        # Until it is known that a worker serves, look often: somebody waits for that.
        wait = 1.0 if self._announce is None and self._successor is None else 0.02
        now = time.monotonic()
        if self._worker is None:
            wait = min(wait, self._not_before - now)
        if self._peer is None:
            wait = min(wait, self._peer_not_before - now)
        return dict(poll.poll(max(0, int(wait * 1000) + 1)))

    def _worker_ended(self, worker: Process) -> bool:
        """Account for the end of `worker`. False if the mount cannot go on."""
        status = worker.reap()
        lived = time.monotonic() - worker.since
        if status == EXIT_OVER and connection_over(self._inherited.fuse_fd):
            return True
        if status == EXIT_NOT_NEEDED:
            self._worker = self._page.open_worker()
            return True
        drained = status == EXIT_DRAINED or (status is None and worker is self._drained)
        if self._successor is not None:
            # An upgrade: the prepared one takes the lock and asks for what was left.
            self._worker, self._successor = self._successor, None
        if drained:
            return True
        self._page.deaths += 1
        how = "ended" if status is None else f"ended with {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        log.error("worker %d %s after %.1f s", worker.pid, how, lived)
        crashed = self._was_stuck or status not in (None, -signal.SIGKILL)
        self._was_stuck = False
        for key in self._page.blame(POINTS_CRASH if crashed else POINTS_KILLED):
            log.error("request %s ended workers repeatedly: answered with EIO from now on", key)
        if not self._page.resend:
            log.error("this kernel cannot ask lost requests again (needs Linux 6.9): unmounting")
            return False
        quick = lived < QUICK_S
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        if self._announce is not None and self._quick_deaths >= FIRST_TRIES:
            self._failure = f"the worker {how}; see {self._config.log}"
        over = self._quick_deaths - FREE_RESTARTS
        most = BACKOFF_MAX_S if crashed else BACKOFF_KILLED_S
        delay = min(most, BACKOFF_S * 2.0 ** min(over, 10)) if over > 0 else 0.0
        self._not_before = time.monotonic() + delay
        return True

    def _look_at_wishes(self) -> None:
        if self._terminations:
            self._terminate()
        successor = self._successor
        if self._page.restart:
            self._page.restart = False
            if successor is None and self._worker is not None and self._page.resend:
                self._page.prepared = 0
                self._inherited.successor = True
                try:
                    self._successor = self._fork(Role.WORKER)
                    return
                except OSError as e:
                    log.error("cannot fork: %s", e.strerror)
            log.error("the worker is not replaced now")
            self._page.upgrades_failed += 1
        if successor is None:
            return
        if self._page.prepared == successor.pid and self._worker is not None:
            self._page.set_suspects({})
            old = self._worker
            log.info("worker %d follows worker %d", successor.pid, old.pid)
            old.signal(signal.SIGUSR1)
            if old.wait(self._config.drain_s + 1):
                self._drained = old
            else:
                log.error("worker %d did not drain: ended", old.pid)
                old.signal(signal.SIGKILL)
        elif not successor.alive or time.monotonic() - successor.since > self._config.start_s:
            log.error("the new worker %d did not start; the old one goes on", successor.pid)
            successor.signal(signal.SIGKILL)
            successor.wait(10)
            successor.reap()
            self._successor = None
            self._page.upgrades_failed += 1

    def _look_at_worker(self) -> None:
        """End a worker that does not start, or that has work and does nothing."""
        worker = self._worker
        if worker is None:
            return
        now = time.monotonic()
        if self._page.worker_pid != worker.pid:
            if now - worker.since > self._config.start_s:
                log.error("worker %d does not start: ended", worker.pid)
                worker.signal(signal.SIGKILL)
            return
        if self._announce is not None and self._page.generation:
            announce, self._announce = self._announce, None
            announce("")
        silent_s = self._silence.since(self._page.beat_ns)
        if silent_s < self._config.stuck_s or not self._has_work():
            return
        log.error("worker %d is stuck: ended", worker.pid)
        self._silence, self._was_stuck = Silence(), True
        worker.signal(signal.SIGABRT)  # faulthandler writes where it is stuck to the log
        if not worker.wait(2):
            worker.signal(signal.SIGKILL)

    def _has_work(self) -> bool:
        poll = select.poll()
        poll.register(self._inherited.fuse_fd, select.POLLIN)
        return self._page.pending() or bool(poll.poll(0))

    # -- the end

    def _install_signals(self) -> None:
        def stop(*_: object) -> None:
            self._terminations += 1
            os.eventfd_write(self._inherited.command_fd, 1)

        def restart(*_: object) -> None:
            self._page.restart = True
            os.eventfd_write(self._inherited.command_fd, 1)

        def pass_on(*_: object) -> None:
            # A standby's SIGTERM: most likely all of the group got it; the active one acts.
            pass

        active = self._page.active_pid == os.getpid()
        signal.signal(signal.SIGTERM, stop if active else pass_on)
        signal.signal(signal.SIGINT, stop if active else pass_on)
        signal.signal(signal.SIGHUP, restart)

    def _terminate(self) -> None:
        if self._terminations > 1:
            log.warning("asked to end twice: whoever uses the mount gets errors")
            self._page.force = True
        elif not self._page.draining:
            try:
                unmount_or_drain(self._mountpoint, self._inherited.fuse_fd, self._page)
            except DsecfsError as e:
                log.error("%s", e)

    def _give_up(self) -> int:
        """Take the mount away from its users: errors instead of a hang."""
        try:
            unmount(self._mountpoint, detach=True)
        except DsecfsError as e:
            log.error("%s", e)
        for process in (self._worker, self._successor, self._peer):
            if process is not None:
                process.signal(signal.SIGKILL)
        # The kernel aborts the connection when the last descriptor of it is closed.
        os.close(self._inherited.fuse_fd)
        self._collect()
        if self._announce is not None:
            self._announce(self._failure or "it was asked to end")
        return 0 if self._page.force else 1

    def _finish(self) -> int:
        """The connection is over: collect everybody."""
        log.info("%s is unmounted", self._mountpoint)
        self._collect()
        try:
            # An aborted connection leaves its mount behind.
            unmount(self._mountpoint, detach=True)
        except DsecfsError as e:
            log.error("%s", e)
        if self._announce is not None:
            self._announce("it was unmounted")
        return 0

    def _collect(self) -> None:
        deadline = time.monotonic() + 10
        # The standby waits for our end; it has nothing left to do.
        if self._peer is not None:
            self._peer.signal(signal.SIGKILL)
        for process in (self._worker, self._successor, self._peer):
            if process is None:
                continue
            if not process.wait(deadline - time.monotonic()):
                log.error("process %d did not end by itself", process.pid)
                process.signal(signal.SIGKILL)
                process.wait(5)
            process.reap()
        self._worker = self._successor = self._peer = None
        if self._inherited.control_fd >= 0:
            self._config.control.unlink(missing_ok=True)


def unmount_or_drain(mountpoint: Path, fuse_fd: int, page: SharedPage) -> None:
    """Unmount. Who still uses the mount, by open files or from another mount namespace, is
    served to the end; the page then says that the mount is draining."""
    try:
        unmount(mountpoint)
    except Busy:
        page.draining = True
        unmount(mountpoint, detach=True)
    page.draining = not connection_over(fuse_fd)
    if page.draining:
        log.warning("%s is detached; its last user's end is ours", mountpoint)


def _close_others(keep: set[int]) -> None:
    """Close every descriptor that is not in `keep`."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd not in keep:
            try:
                os.close(fd)
            except OSError as e:
                if e.errno != errno.EBADF:
                    raise


def exit_now(code: int) -> NoReturn:
    """End a forked process without the interpreter's clean-up, which belongs to its parent."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
