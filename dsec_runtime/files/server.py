"""The server: one thread, loaded once, forks a child for every operation. Owns the children.

Messages on the control socket (SOCK_SEQPACKET, JSON), from the edge:

    {"start": N, "pid": …, "started": …, "uid": …, "gid": …, "groups": […], "cwd": …}  and one
                    descriptor: the child's end of the operation's socket
    {"kill": N}     its socket was closed, so it should end by itself; SIGTERM after NOTICE_S, so
                    that it can remove what is half written; SIGKILL after GRACE_S more

and to it {"ended": N} when the child of operation N is gone.

What must hold: the server itself touches nothing of a sandbox but numbers in /proc, so nothing in
a sandbox can block it; it ends with its edge, and its children with it; it is always in its own
namespaces but for the fork itself, of which the child shall be born in the sandbox's pid namespace.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from dsec_runtime.files import calls, child, wire
from dsec_runtime.files.enter import CLONE_NEWPID, Who, check
from dsec_runtime.files.paths import Refusal
from dsecfs.errors import MountError
from dsecfs.kernel.syscalls import pidfd_open, setns

NOTICE_S = 0.3
GRACE_S = 2.0
MAX_MESSAGE = 1 << 20


def serve(control: int) -> NoReturn:
    """Serve until the edge closes its end."""
    Server(socket.socket(fileno=control)).run()


class Server:
    """The loop and what it knows of its children."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, int] = {}
        """Process id to number of the operation."""
        self._kill_at: dict[int, tuple[float, signal.Signals]] = {}
        """Process id to when it gets which signal."""
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
            self._last_capability = int(file.read())
        self._woken, wake = socket.socketpair()
        self._woken.setblocking(False)
        wake.setblocking(False)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda number, at: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def run(self) -> NoReturn:
        calls.hide_memory()
        calls.hide_arguments()
        calls.set_name(b"dsec-files")
        _import_no_more()
        os.chdir("/")
        gc.collect()
        gc.freeze()
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            # An operation that comes in goes before what has ended.
            ready = dict(poll.poll(self._timeout_ms()))
            if self._control.fileno() in ready and not self._message():
                for pid in self._children:
                    _send(pid, signal.SIGKILL)
                os._exit(0)
            if self._woken.fileno() in ready:
                self._drain()
            self._reap()
            self._kill_late()

    def _timeout_ms(self) -> float | None:
        if not self._kill_at:
            return None
        return max(0.0, min(self._kill_at.values())[0] - time.monotonic()) * 1000 + 1

    def _drain(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _message(self) -> bool:
        """False at the end."""
        try:
            data, fds, flags, _ = socket.recv_fds(self._control, MAX_MESSAGE, 1)
        except ConnectionResetError:  # the edge went away with something unread
            return False
        if not data or flags & socket.MSG_TRUNC:
            return False
        value: dict[str, Any] = json.loads(data)
        if "start" in value:
            with socket.socket(fileno=fds[0]) as sock:
                self._start(int(value["start"]), value, sock)
        elif "kill" in value:
            for pid, number in self._children.items():
                if number == value["kill"] and pid not in self._kill_at:
                    self._kill_at[pid] = (time.monotonic() + NOTICE_S, signal.SIGTERM)
        return True

    def _start(self, number: int, value: dict[str, Any], sock: socket.socket) -> None:
        try:
            self._children[self._fork(Who.parse(value), str(value["cwd"]), sock)] = number
            return
        except Refusal as e:
            error: dict[str, Any] = {"reason": e.reason}
        except (OSError, MountError) as e:
            error = {"errno": e.errno}
        sock.setblocking(False)
        try:
            sock.send(wire.frame_json(wire.ERROR, error))
        except OSError:
            pass  # whoever asked has gone
        self._tell_ended(number)

    def _fork(self, who: Who, cwd: str, sock: socket.socket) -> int:
        pidfd = pidfd_open(who.pid)
        if pidfd is None:
            raise Refusal(wire.GONE)
        try:
            check(who, pidfd)
            setns(pidfd, CLONE_NEWPID)
            try:
                pid = os.fork()
                if pid == 0:
                    child.live(who, cwd, pidfd, sock, self._null, self._last_capability)
            except OSError as e:
                # The kernel says ENOMEM when the namespace's first process is gone.
                raise Refusal(wire.GONE) from e
            finally:
                setns(self._own_pids, CLONE_NEWPID)
            return pid
        finally:
            os.close(pidfd)

    def _reap(self) -> None:
        while self._children:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._kill_at.pop(pid, None)
            number = self._children.pop(pid, None)
            if number is not None:
                self._tell_ended(number)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for pid, (at, number) in list(self._kill_at.items()):
            if at <= now:
                _send(pid, number)
                # After SIGKILL it is in the kernel's hands, and reaped when it is gone.
                self._kill_at[pid] = (now + GRACE_S, signal.SIGKILL)

    def _tell_ended(self, number: int) -> None:
        try:
            self._control.send(json.dumps({"ended": number}).encode())
        except BrokenPipeError:
            pass  # the edge is gone: the next read finds out


def _send(pid: int, number: signal.Signals) -> None:
    """To a child that was not waited for yet: the number is still its own."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _import_no_more() -> None:
    """From here on an import of a file is an error: after chroot(2) it would be the sandbox's."""
    for name in ("encodings.ascii", "encodings.latin_1", "encodings.utf_8"):
        __import__(name)
    sys.path[:] = []
    sys.path_hooks[:] = []
    sys.path_importer_cache.clear()
    builtin = [finder for finder in sys.meta_path if "Builtin" in str(finder)]
    sys.meta_path[:] = builtin
