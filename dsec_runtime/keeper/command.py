"""One command in the worker: its pipes, its time, its end.

What must hold: its end is written down (exit.json) before its process is reaped; what it wrote
before its end is in the log by then; processes it leaves behind can write on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import socket
import struct
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_runtime import cgroups
from dsec_runtime.keeper import process
from dsec_runtime.keeper.held import Held
from dsec_runtime.keeper.log import (
    FULL,
    MAX_STATE,
    STATE,
    STDERR,
    STDOUT,
    Ended,
    Writer,
    read_ended,
)
from dsecfs.kernel.syscalls import pidfd_open

if TYPE_CHECKING:
    from dsec_runtime.keeper.worker import Client, Worker

KEEP = 16 << 20
"""Bytes of each stream that are kept besides its first segment."""
MAX_STDIN = 1 << 20
"""Bytes that wait for a command to read its input; whoever sends more waits."""
BEHIND = 256 << 20
"""Bytes that a follower may be behind before the command waits for it."""
PATIENCE_S = 30.0
"""A follower so far behind that takes nothing for so long is dropped."""
RATE = 32 << 20
"""Bytes per second that a command may write once its ring is full. `yes` costs no more."""
BURST = 128 << 20
"""Bytes that it may write at full speed first, and after it was quiet."""
TELL_S = 1.0
"""How long the holder may take to tell that a child of its ended."""
_TAKE = 1 << 20
_EPOLLIN, _EPOLLOUT, _EPOLLHUP = 1, 4, 16


class Command:
    """A command that was started, or is about to be."""

    def __init__(self, worker: Worker, held: Held) -> None:
        self._worker = worker
        self.held = held
        self.meta: dict[str, Any] = held.meta
        self.place = Path(self.meta["place"])
        self.ended: Ended | None = None
        self.waiters: list[tuple[Client, int]] = []
        self.followers: dict[Client, list[int]] = {}
        self._moved_at: dict[Client, float] = {}
        self._quiet: set[Client] = set()
        self._writers = {
            STDOUT: Writer(self.place, STDOUT, KEEP),
            STDERR: Writer(self.place, STDERR, KEEP),
            STATE: Writer(self.place, STATE, KEEP),
        }
        self._stopped: set[str] = set()
        self._tokens = float(BURST)
        self._filled = time.monotonic()
        self._input = bytearray()
        self._input_ends = False
        self._senders: list[tuple[Client, int]] = []
        self._gone = False

    # -- start -------------------------------------------------------------------------

    def start(self) -> None:
        """OSError if it cannot be started."""
        meta, fds = self.meta, self.held.fds
        theirs: list[int] = []
        listener: Path | None = None
        try:
            if meta["tty"] is None:
                fds["out"], out = os.pipe2(os.O_CLOEXEC)
                theirs.append(out)
                fds["err"], err = os.pipe2(os.O_CLOEXEC)
                theirs.append(err)
            else:
                # What the terminal says goes through a pipe that the holder has, too.
                fds["out"], fds["inner"] = os.pipe2(os.O_CLOEXEC)
                listener = self._worker.run / f"tty-{self.held.id}"
                fds["console"] = _listen(listener)
                theirs.append(out := self._worker.null.open())
                # crun itself may have something to say.
                fds["err"], err = os.pipe2(os.O_CLOEXEC)
                theirs.append(err)
            if meta["stdin"] == "pipe" and meta["tty"] is None:
                stdin, fds["stdin"] = os.pipe2(os.O_CLOEXEC)
            else:
                stdin = self._worker.null.open()
            theirs.append(stdin)
            extra = []
            if meta["state"] is not None:
                state = os.open(meta["state"], os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                theirs.append(state)
                fds["state"], new = os.pipe2(os.O_CLOEXEC)
                theirs.append(new)
                extra = [state, new]
            for fd in fds.values():
                os.set_blocking(fd, False)
            names = list(fds)
            self._worker.tell(
                "hold", self.held.id, [fds[n] for n in names], names=names, meta=meta
            )
            argv = [
                word.replace("{console}", str(listener)).replace("{place}", str(self.place))
                for word in meta["argv"]
            ]
            self.held.pid = process.start(argv, (stdin, out, err), extra)
        finally:
            for fd in theirs:
                os.close(fd)
        pidfd = pidfd_open(self.held.pid)
        assert pidfd is not None  # a child of ours is there until it is reaped
        self.held.pidfd = pidfd
        self._worker.tell("pid", self.held.id, [pidfd], pid=self.held.pid)
        self._watch()

    def resume(self) -> None:
        """Go on with a command of an earlier worker."""
        if self.meta.get("ended"):
            self.ended = read_ended(self.place)
        self._watch()

    def _watch(self) -> None:
        worker, fds = self._worker, self.held.fds
        for name, stream in (("out", STDOUT), ("err", STDERR)):
            if name in fds:
                self._watch_output(name, stream)
        if "state" in fds:
            worker.watch(fds["state"], lambda events: self._take_state())
        if "console" in fds:
            worker.watch(fds["console"], self._got_console)
        if "pty" in fds:
            worker.watch(fds["pty"], self._pump)
        if self.ended is not None:
            return
        if self.held.pidfd >= 0:
            worker.watch(self.held.pidfd, self._process_ended)
        if self.meta.get("kill_at") is not None:
            worker.at(self.meta["kill_at"], self._kill_late)
        elif self.meta["timeout_s"] is not None:
            worker.at(self._deadline(), self._time_is_up)

    def let_go(self) -> None:
        """Stop looking after it; its descriptors stay open."""
        self._gone = True
        for fd in (*self.held.fds.values(), self.held.pidfd):
            if fd >= 0:
                self._worker.unwatch(fd)
        for writer in self._writers.values():
            writer.close()

    # -- output ------------------------------------------------------------------------

    def _watch_output(self, name: str, stream: int) -> None:
        self._worker.watch(self.held.fds[name], lambda events: self._output(name, stream))

    def _output(self, name: str, stream: int) -> None:
        if name not in self.held.fds:
            return
        moved = self._take(name, stream)
        if not moved:
            return
        self._tell_grown()
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._filled) * RATE) - moved
        self._filled = now
        if self._tokens < 0 and self.ended is None:
            self._stop_output(name)
            self._worker.at(now + 0.05 - self._tokens / RATE, lambda: self._go_on(name, stream))
        elif self._behind(stream) > BEHIND:
            self._stop_output(name)
            self._worker.at(now + PATIENCE_S, lambda: self._lose_patience(name, stream))

    def _take(self, name: str, stream: int) -> int:
        """Move what is in a pipe to the log. Bytes that were moved; 0 if there were none."""
        writer, pipe = self._writers[stream], self.held.fds[name]
        try:
            moved = writer.take(pipe, _TAKE)
        except BlockingIOError:
            return 0
        except OSError as e:
            if e.errno not in FULL:
                raise
            # The node's disk is full: the command goes on, its output does not.
            with contextlib.suppress(BlockingIOError):
                return writer.discard(pipe, _TAKE)
            return 0
        if not moved:
            self._close(name)
            self._maybe_done()
            return 0
        if stream == STATE:
            return moved
        unread = [at[stream - 1] for at in self.followers.values()]
        writer.trim(min(unread, default=writer.end))
        return moved

    def _take_state(self) -> None:
        """More than MAX_STATE is counted, and thrown away."""
        writer = self._writers[STATE]
        if "state" not in self.held.fds:
            return
        if writer.end <= MAX_STATE:
            self._take("state", STATE)
            return
        with contextlib.suppress(BlockingIOError):
            if not writer.discard(self.held.fds["state"], _TAKE):
                self._close("state")

    def _stop_output(self, name: str) -> None:
        self._stopped.add(name)
        self._worker.unwatch(self.held.fds[name])

    def _go_on(self, name: str, stream: int) -> None:
        if name in self._stopped and not self._gone and name in self.held.fds:
            self._stopped.discard(name)
            self._watch_output(name, stream)

    def _behind(self, stream: int) -> int:
        unread = [at[stream - 1] for at in self.followers.values()]
        return self._writers[stream].end - min(unread) if unread else 0

    def _lose_patience(self, name: str, stream: int) -> None:
        if self._gone or name not in self._stopped:
            return
        now = time.monotonic()
        for client, moved in list(self._moved_at.items()):
            if now - moved >= PATIENCE_S:
                client.send({"dropped": self.held.id})
                self.unfollow(client)
        if self._behind(stream) > BEHIND:
            self._worker.at(now + PATIENCE_S, lambda: self._lose_patience(name, stream))
        else:
            self._go_on(name, stream)

    def note(self, data: bytes) -> None:
        """A line of ours on its standard error."""
        if self.ended is None and self.meta["tty"] is None:
            with contextlib.suppress(OSError):
                self._writers[STDERR].add(data)
                self._tell_grown()

    # -- followers ---------------------------------------------------------------------

    def follow(self, client: Client, at: list[int]) -> None:
        """A client reads the log and has come to `at`."""
        self.followers[client] = at
        self._moved_at[client] = time.monotonic()
        self._quiet.discard(client)
        if any(self._writers[s].end > at[s - 1] for s in (STDOUT, STDERR)):
            self._tell_grown()
        for name, stream in (("out", STDOUT), ("err", STDERR)):
            if name in self._stopped and self._tokens >= 0 and self._behind(stream) <= BEHIND:
                self._go_on(name, stream)

    def unfollow(self, client: Client) -> None:
        self.followers.pop(client, None)
        self._moved_at.pop(client, None)
        self._quiet.discard(client)

    def _tell_grown(self) -> None:
        for client in self.followers:
            if client not in self._quiet:
                self._quiet.add(client)  # until it says where it is
                client.send({"grown": self.held.id})

    # -- input -------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._input)

    def write(self, client: Client, number: int, data: bytes) -> bool:
        """Send to its input. False if that is closed."""
        closed = self._input_ends or not {"stdin", "pty"} & set(self.held.fds)
        # Before crun has sent the terminal, input waits.
        if closed and (self.meta["tty"] is None or self.ended is not None):
            return False
        self._input += data
        if len(self._input) > MAX_STDIN:
            self._senders.append((client, number))
        self._feed()
        return True

    def close_stdin(self) -> None:
        self._input_ends = True
        if self.meta["tty"] is not None:
            self._input += b"\4"  # ^D
        self._feed()

    def _feed(self, events: int = 0) -> None:
        name = "stdin" if self.meta["tty"] is None else "pty"
        fd = self.held.fds.get(name)
        if fd is None:
            return
        try:
            while self._input:
                del self._input[: os.write(fd, self._input[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:  # EPIPE, EIO: nobody reads any more
            self._input.clear()
            self._input_ends = True
        if len(self._input) <= MAX_STDIN:
            for client, number in self._senders:
                self._worker.answer(client, number)
            self._senders.clear()
        if name == "pty":
            wanted = _EPOLLIN | (_EPOLLOUT if self._input else 0)
            self._worker.watch(fd, self._pump, wanted)
        elif self._input:
            self._worker.watch(fd, self._feed, _EPOLLOUT)
        else:
            self._worker.unwatch(fd)
            if self._input_ends:
                self._close("stdin")

    # -- terminal ----------------------------------------------------------------------

    def _got_console(self, events: int) -> None:
        """crun sends the terminal's master (runtime-spec, --console-socket)."""
        fds = self.held.fds
        sock = socket.socket(fileno=os.dup(fds["console"]))
        try:
            peer, _ = sock.accept()
        except BlockingIOError:
            return
        finally:
            sock.close()
        with peer:
            peer.settimeout(1.0)  # crun has connected: it sends at once
            try:
                _, found, _, _ = socket.recv_fds(peer, 4096, 1)
            except OSError:
                found = []
        self._close("console")
        (self._worker.run / f"tty-{self.held.id}").unlink(missing_ok=True)
        if not found:
            return
        fds["pty"] = found[0]
        os.set_blocking(found[0], False)
        os.set_inheritable(found[0], False)
        self._worker.tell("fds", self.held.id, [found[0]], names=["pty"])
        rows, columns = self.meta["tty"]
        self.resize(rows, columns)
        self._worker.watch(found[0], self._pump)
        self._feed()

    def _pump(self, events: int) -> None:
        """From the terminal into the pipe."""
        fds = self.held.fds
        if "pty" not in fds:
            return
        if events & _EPOLLOUT and self._input:
            self._feed()
        try:
            while True:
                self._output("out", STDOUT)  # so that there is room
                if not os.splice(fds["pty"], fds["inner"], 1 << 15, flags=os.SPLICE_F_NONBLOCK):
                    raise OSError(errno.EIO, "end of file")
        except BlockingIOError:
            self._output("out", STDOUT)
            if events & _EPOLLHUP and not events & _EPOLLIN:
                self._close_terminal()
        except OSError:  # EIO: no process has it any more
            self._close_terminal()

    def _close_terminal(self) -> None:
        self._close("pty", "inner")
        self._output("out", STDOUT)

    def resize(self, rows: int, columns: int) -> None:
        self.meta["tty"] = [rows, columns] if self.meta["tty"] is not None else None
        if "pty" in self.held.fds:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.held.fds["pty"], termios.TIOCSWINSZ, size)

    # -- signals and time --------------------------------------------------------------

    def send(self, number: int) -> None:
        """SIGKILL ends all of its processes; others go to the program."""
        if number == signal.SIGKILL:
            self._kill_all()
        else:
            for pid in process.children(self.held.pid):
                process.send([pid], number)

    def _ask(self) -> None:
        """SIGTERM to everything it started."""
        if group := self.meta["cgroup"]:
            cgroups.send(group, signal.SIGTERM)
        elif self.held.pid:
            process.signal_tree(self.held.pid, signal.SIGTERM)

    def _kill_all(self) -> None:
        if group := self.meta["cgroup"]:
            cgroups.kill(group)
        elif self.held.pid:
            process.signal_tree(self.held.pid, signal.SIGKILL)
        self._worker.at(time.monotonic() + 1.0, self._kill_again)

    def _kill_again(self) -> None:
        """It may have been on its way to start something."""
        if not self._gone and self.ended is None:
            if self.held.pid:
                process.signal_tree(self.held.pid, signal.SIGKILL)
            self._kill_all()

    def _deadline(self) -> float:
        end: float = self.meta["started"] + self.meta["timeout_s"] + self.meta.get("held_s", 0.0)
        return end

    def _note_meta(self, **values: Any) -> None:
        self.meta.update(values)
        self._worker.tell("meta", self.held.id, meta=values)

    def _time_is_up(self) -> None:
        if self._gone or self.ended is not None or self.meta.get("held_since") is not None:
            return
        now = time.monotonic()
        if now < self._deadline():
            self._worker.at(self._deadline(), self._time_is_up)
            return
        self._note_meta(timed_out=True, kill_at=now + self.meta["grace_s"])
        if self.meta["grace_s"] > 0:
            self._ask()
        self._worker.at(self.meta["kill_at"], self._kill_late)

    def _kill_late(self) -> None:
        if not self._gone and self.ended is None and self.meta.get("held_since") is None:
            self._kill_all()

    def hold(self) -> None:
        """Its sandbox is paused: its time stands still."""
        if self.ended is None and self.meta.get("held_since") is None:
            self._note_meta(held_since=time.monotonic())

    def release(self) -> None:
        since = self.meta.get("held_since")
        if self.ended is None and since is not None:
            passed = time.monotonic() - since
            self._note_meta(held_since=None, held_s=self.meta.get("held_s", 0.0) + passed)
            if self.meta.get("kill_at") is not None:
                self._worker.at(time.monotonic(), self._kill_late)
            elif self.meta["timeout_s"] is not None:
                self._worker.at(self._deadline(), self._time_is_up)

    # -- the end -----------------------------------------------------------------------

    def _process_ended(self, events: int) -> None:
        try:
            status = process.peek(self.held.pid)
        except ChildProcessError:
            # An earlier worker's: the holder tells in a moment. If that holder is gone, too,
            # the kernel may.
            self._worker.unwatch(self.held.pidfd)
            self._worker.at(time.monotonic() + TELL_S, self._ask_kernel)
            return
        if status is not None:
            self.exited(status)

    def _ask_kernel(self) -> None:
        if self.ended is None and not self._gone:
            self.exited(process.exit_of(self.held.pidfd))

    def exited(self, status: int | None) -> None:
        """The host command ended with an exit code, -signal, or nobody knows how."""
        if self.ended is not None:
            return
        self._worker.unwatch(self.held.pidfd)
        self._drain()
        meta, now = self.meta, time.monotonic()
        if meta.get("timed_out") and (status is None or status < 0):
            status = 128 + signal.SIGKILL  # by us
        lost = status is None or status < 0  # killed itself: it cannot tell
        if lost or meta.get("timed_out"):
            self._kill_all()
        after = process.read_counters(meta["counters"])
        grown = {n.partition(".")[0] for n, v in after.items() if v > meta["before"].get(n, 0)}
        held_s = meta.get("held_s", 0.0)
        if meta.get("held_since") is not None:
            held_s += now - meta["held_since"]
        code = None if lost else status
        self.ended = Ended(
            code=code,
            signal=code - 128 if code is not None and 128 < code < 193 else None,
            timed_out=bool(meta.get("timed_out")),
            started_at=meta["started_at"],
            ended_at=time.time(),
            duration_s=max(0.0, now - meta["started"] - held_s),
            limits=tuple(sorted(grown)),
            lost=lost,
            error=self._runtime_said() if code else "",
            written={str(s): self._writers[s].end for s in (STDOUT, STDERR)},
        )
        try:
            self.ended.write(self.place)
        except OSError:
            # Its place is gone, or the disk is full: whoever waits finds nothing, so it is lost.
            self.ended = Ended.unknown(meta["started_at"], time.time())
        meta["ended"] = True
        self._worker.tell("ended", self.held.id)
        process.reap(self.held.pid)
        self.held.pid = 0
        self._close("stdin", "console", "state")
        (self._worker.run / f"tty-{self.held.id}").unlink(missing_ok=True)
        if group := meta["cgroup"]:
            cgroups.discard(group)
        if meta["scratch"] is not None:
            shutil.rmtree(meta["scratch"], ignore_errors=True)  # it goes with its sandbox, too
        self._worker.finished(self, self.ended)
        self._maybe_done()

    def _runtime_said(self) -> str:
        if (scratch := self.meta["scratch"]) is not None:
            with contextlib.suppress(OSError):
                return (Path(scratch) / "log").read_text(errors="replace").strip()[:2000]
        return ""

    def _drain(self) -> None:
        """Take what is there when it ends."""
        if "pty" in self.held.fds:
            self._pump(_EPOLLIN)
        for name, stream in (("out", STDOUT), ("err", STDERR), ("state", STATE)):
            taken = 0
            while name in self.held.fds and taken < BURST:
                if stream == STATE and taken > MAX_STATE:
                    break
                moved = self._take(name, stream)
                if not moved:
                    break
                taken += moved

    def _maybe_done(self) -> None:
        """Nothing more can come: let go of it."""
        if self.ended is not None and not self._gone and not {"out", "err"} & set(self.held.fds):
            self._worker.forget(self)

    def orphan(self) -> None:
        """Its sandbox goes: end everything of it, and do not wait for what it left behind."""
        if self.ended is None:
            self._kill_all()
            self._close("stdin", "console")
        else:
            self._worker.forget(self)

    def _close(self, *names: str) -> None:
        there = [name for name in names if name in self.held.fds]
        for name in there:
            self._worker.unwatch(self.held.fds[name])
        if there:
            self.held.close(*there)
            self._worker.tell("close", self.held.id, names=there)


def _listen(path: Path) -> int:
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        sock.listen(1)
        return sock.detach()
    except BaseException:
        sock.close()
        raise
