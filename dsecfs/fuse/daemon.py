"""Starting and stopping the processes of a FUSE mount.

`start_daemon` runs `python -m dsecfs.fuse.daemon` detached and waits until a worker serves.
What must hold:
- one daemon per state directory: a lock on fs.lock is taken by who starts it and shared by all
  its processes, so it is held exactly as long as one of them lives. Who gets the lock may clean
  up whatever a dead predecessor left;
- every wait is bounded; a daemon that cannot start says why to whoever started it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dsecfs.errors import (
    Busy,
    Conflict,
    DeadlineExceeded,
    DsecfsError,
    MountError,
    NotFound,
)
from dsecfs.fuse.config import CGROUP, FsConfig
from dsecfs.fuse.control import FsClient, listen
from dsecfs.fuse.mountpoint import fuse_device, recover_stale, tune
from dsecfs.fuse.session import FSTYPE
from dsecfs.kernel.cgroups import enter, leave_behind
from dsecfs.kernel.mountinfo import mount_at
from dsecfs.locks import try_lock_file

log = logging.getLogger("dsecfs.fuse.daemon")

START_S = 40.0
STOP_S = 30.0
PROBED_S = 0.2
"""Somebody who only looks whether a daemon lives holds its lock for a moment."""
OOM_SCORE = -900
"""The node's file system should be among the last to go (proc(5), oom_score_adj)."""


# -- for callers -----------------------------------------------------------------------


def start_daemon(config: FsConfig, *, timeout_s: float = START_S) -> FsClient:
    """Mount and serve in the background; returns when reads are answered.

    Busy if a daemon with this state directory runs already, MountError if it cannot mount,
    DeadlineExceeded after `timeout_s`.
    """
    lock_fd = _lock(config.lock, PROBED_S)
    if lock_fd is None:
        raise Busy(f"FUSE daemon: another one runs for {config.state}", hint="stop it first")
    read_end, write_end = os.pipe()
    fds = [write_end, lock_fd]
    try:
        with config.log.open("ab") as output:
            os.chmod(config.log, 0o600)
            subprocess.run(
                [sys.executable, "-P", "-m", "dsecfs.fuse.daemon", "--detach", *map(str, fds)],
                input=config.to_json().encode(),
                stdout=output,
                stderr=output,
                pass_fds=fds,
                start_new_session=True,
                env=environment(),
                timeout=timeout_s,
                check=False,
            )
        while fds:
            os.close(fds.pop())
        said = _read_until_end(read_end, timeout_s)
    except subprocess.TimeoutExpired:
        said = None
    finally:
        for fd in (read_end, *fds):
            os.close(fd)
    hint = f"see {config.log}"
    if said is None:
        raise DeadlineExceeded(f"FUSE daemon: not ready in {timeout_s:g} s", hint=hint)
    if said == "ready\n":
        return FsClient(config.control)
    why = said.removeprefix("failed ").strip() or "it ended without a word"
    raise MountError(f"FUSE daemon: {why}", hint=hint)


def ensure_daemon(config: FsConfig, *, timeout_s: float = START_S) -> FsClient:
    """A daemon that serves `config.mountpoint` from `config.store`: the running one or a new
    one. Conflict if one runs with another store or mount point."""
    deadline = time.monotonic() + timeout_s
    client = FsClient(config.control)
    while True:
        try:
            status = client.call("status", timeout_s=max(0.1, deadline - time.monotonic()))
        except NotFound:
            try:
                return start_daemon(config, timeout_s=max(0.1, deadline - time.monotonic()))
            except Busy:
                # Somebody else starts it, or its predecessor is on its way out.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
                continue
        for key in ("store", "mountpoint", "tree"):
            if status[key] != getattr(config, key):
                raise Conflict(
                    f"FUSE daemon: one runs for {key} {status[key]!r}, not "
                    f"{getattr(config, key)!r}",
                    hint="dsec fs stop ends it when nothing uses it; or set another run_dir",
                )
        if status["draining"]:
            raise Busy(
                "FUSE daemon: the old one is detached and still in use",
                hint="end the sandboxes that use it",
            )
        return client


def stop_daemon(
    config: FsConfig | Path, *, mode: str = "refuse", timeout_s: float = STOP_S
) -> bool:
    """End the daemon of `config`, or of a state directory. False if none ran. With `config`,
    what a daemon left whose processes were all killed is cleared, its dead mount too: True.

    mode "refuse": Busy if its files are in use. "drain": detach now, end with the last user;
    returns at once if there are users. "force": whoever uses it gets errors.
    """
    state = config if isinstance(config, Path) else Path(config.state)
    client = FsClient(state / "fs.sock")
    try:
        done = client.call("stop", mode=mode, timeout_s=timeout_s)
    except NotFound:
        return isinstance(config, FsConfig) and _clear_dead(config)
    except DeadlineExceeded:
        if mode != "force":
            raise
        done = {"stopped": True}
    if done["stopped"]:
        _wait_unlocked(state / "fs.lock", timeout_s)
        if os.geteuid() == 0:
            leave_behind(CGROUP if isinstance(config, Path) else config.cgroup)
    return True


def _clear_dead(config: FsConfig) -> bool:
    """Whether there was a dead mount."""
    if not config.lock.exists() or (lock_fd := _lock(config.lock)) is None:
        return False  # never started, or just starting
    try:
        config.control.unlink(missing_ok=True)
        found = mount_at(Path(config.mountpoint))
        ours = found is not None and found.fstype == FSTYPE
        return ours and recover_stale(Path(config.mountpoint))
    finally:
        os.close(lock_fd)


def _wait_unlocked(path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fd = try_lock_file(path)
        except FileNotFoundError:
            return  # cleared already
        if fd is not None:
            os.close(fd)
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"FUSE daemon: its processes did not end in {timeout_s:g} s")
        time.sleep(0.01)


def _lock(path: Path, wait_s: float = 0.0) -> int | None:
    deadline = time.monotonic() + wait_s
    while True:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # cleared between the two steps
            fd = try_lock_file(path)
            if fd is not None or time.monotonic() >= deadline:
                return fd
        time.sleep(0.01)


def _read_until_end(fd: int, timeout_s: float) -> str | None:
    deadline = time.monotonic() + timeout_s
    said = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while poll.poll(max(0, int((deadline - time.monotonic()) * 1000))):
        part = os.read(fd, 4096)
        if not part:
            return said.decode(errors="replace")
        said += part
    return None


def environment() -> dict[str, str]:
    """The caller's, with our own package importable wherever the daemon's cwd is."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    absolute = [str(Path(p).absolute()) for p in paths]
    return {
        # Each of some 40 threads would keep the largest buffers it ever used (mallopt(3)).
        "MALLOC_ARENA_MAX": "2",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(absolute)),
    }


# -- the daemon itself -----------------------------------------------------------------


def run(
    config: FsConfig,
    announce: Callable[[str], None],
    *,
    lock_fd: int | None = None,
    foreground: bool = False,
) -> int:
    """Mount, and supervise in this process until the end. Called again in every process
    that is forked; the caller must end the process with the exit code that is returned.

    `lock_fd` holds the lock already; None takes it."""
    # Heavy imports happen here, before the forks, so that their memory is shared.
    from dsecfs.fuse.logfile import log_to
    from dsecfs.fuse.session import mount
    from dsecfs.fuse.shared import share
    from dsecfs.fuse.supervisor import Supervisor

    lock_fd = _lock(config.lock, PROBED_S) if lock_fd is None else lock_fd
    if lock_fd is None:
        announce(f"another one runs for {config.state}")
        return Busy.exit_code
    log_to(config.log, config.log_bytes, capture=not foreground, echo=foreground)
    if not foreground and config.cgroup and os.geteuid() == 0:
        # A service manager that runs us in the foreground has given us a group already.
        for failure in enter(config.cgroup):
            log.info("stays in the control group of its caller: %s", failure)
    mountpoint = Path(config.mountpoint)
    try:
        if recover_stale(mountpoint):
            log.warning("%s was still mounted without anybody to serve it", mountpoint)
        mountpoint.mkdir(mode=0o755, parents=True, exist_ok=True)
        control_fd = listen(config.control).detach()
        session = mount(config)
    except DsecfsError as e:
        log.error("%s", e)
        announce(f"failed {e}")
        return e.exit_code
    except OSError as e:
        log.error("%s: %s", mountpoint, e)
        announce(f"failed {mountpoint}: {e.strerror}")
        return 1
    failed = tune(mountpoint, Path(config.state), config.read_ahead_kib)
    if failed and os.geteuid() == 0:
        log.warning("%s: cannot set %s", mountpoint, ", ".join(failed))
    _protect()
    gc.collect()
    gc.freeze()

    def announced(failure: str) -> None:
        announce(f"failed {failure}" if failure else "ready")

    log.info("%s is mounted, device %s", mountpoint, fuse_device(mountpoint))
    return Supervisor(config, share(session, config, control_fd, lock_fd), announced).run()


def _protect() -> None:
    """More files, and a low place on the list of the out-of-memory killer."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if os.geteuid() != 0:
        return
    try:
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    except OSError as e:
        log.info("cannot lower oom_score_adj: %s", e.strerror)


def main() -> None:
    """`python -m dsecfs.fuse.daemon [--foreground | --detach READY LOCK | --adopt] < JSON`."""
    from dsecfs.fuse.rescue import adopt
    from dsecfs.fuse.supervisor import exit_now

    arguments = sys.argv[1:]
    ready_fd, lock_fd = -1, None
    numbers = [int(word) for word in arguments[1:] if word.isdigit()]
    if arguments[:1] == ["--detach"] and len(numbers) == len(arguments) - 1 == 2:
        ready_fd, lock_fd = numbers
        for fd in (ready_fd, lock_fd):
            os.set_inheritable(fd, False)
    elif arguments not in ([], ["--foreground"], ["--adopt"]):
        print("usage: python -m dsecfs.fuse.daemon [--foreground] < config.json", file=sys.stderr)
        sys.exit(2)
    adopting = arguments == ["--adopt"]
    foreground = not adopting and ready_fd < 0
    text = sys.stdin.read()
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    # Whoever started us reaps this process at once; init gets the real one.
    if not foreground and os.fork():
        exit_now(0)
    os.chdir("/")
    os.umask(0o077)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def announce(word: str) -> None:
        nonlocal ready_fd
        if ready_fd >= 0:
            try:
                os.write(ready_fd, word.replace("\n", " ").encode() + b"\n")
            except BrokenPipeError:
                pass
            os.close(ready_fd)
            ready_fd = -1
        elif word != "ready":
            print(word, file=sys.stderr)

    code = 1
    try:
        if adopting:
            code = adopt(text)
        else:
            config = FsConfig.from_json(text)
            code = run(config, announce, lock_fd=lock_fd, foreground=foreground)
    except DsecfsError as e:
        log.error("%s", e)
        announce(f"failed {e}")
        code = e.exit_code
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        # Any process of the family; there is nobody above to tell.
        log.exception("process %d ends", os.getpid())
    exit_now(code)


if __name__ == "__main__":
    main()
