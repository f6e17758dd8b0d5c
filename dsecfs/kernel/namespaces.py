"""Mount namespaces that outlive us, threads that live in them, and user namespaces.

A *pinned* namespace is a bind mount of a thread's ns/mnt on a file below run/ns: it lives
until that file is unmounted, with no process in it. What must hold:
- run/ns is a private tmpfs of the host's namespace: a namespace file may not lie on a mount
  that propagates into the namespace it names;
- a pinned namespace is private (nothing propagates in or out) and *pruned*: it keeps only
  the mounts that needed paths lie on. So its size, and with it the cost of
  copying it for every container, does not grow with the host, and it keeps no foreign file
  system busy. Whatever it needs later is handed in as an open descriptor;
- only a `NamespaceThread` ever enters another namespace; the calling thread never does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from dsecfs.errors import DeadlineExceeded, MountError
from dsecfs.kernel.mountinfo import mount_at, mounts_here
from dsecfs.kernel.syscalls import (
    CLONE_FS,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    CLONE_VM,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    closing,
    failed,
    mount,
    setns,
    umount,
    unshare,
)
from dsecfs.locks import locked_file

T = TypeVar("T")

CALL_S = 30.0
"""Longest wait for a call in a namespace thread: mounts take milliseconds."""
_CHILD_STACK = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


# -- threads in a namespace ----------------------------------------------------------------


class _Job(Generic[T]):
    """One call on its way to a thread and its answer on the way back."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.done = threading.Event()
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value.append(self._work())
        except BaseException as e:  # handed to the caller, who raises it
            self._error = e
        finally:
            self.done.set()

    def answer(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value[0]


class NamespaceThread:
    """A thread that `enter`s another namespace once and then runs calls there, one at a time.

    Calls must not import modules or follow paths of the caller's namespace. Descriptors
    and memory are shared with the other threads.
    """

    def __init__(self, enter: Callable[[], None], name: str) -> None:
        """Raises what `enter` raises."""
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._name = name
        entering: _Job[None] = _Job(enter)
        self._thread = threading.Thread(
            target=self._serve, args=(entering,), name=name, daemon=True
        )
        self._thread.start()
        if not entering.done.wait(CALL_S):
            raise DeadlineExceeded(f"{name}: namespace not entered in {CALL_S:g} s")
        entering.answer()

    def _serve(self, entering: _Job[None]) -> None:
        entering.run()
        if entering._error is not None:
            return
        while (job := self._jobs.get()) is not None:
            job.run()

    def call(self, work: Callable[[], T], *, timeout_s: float = CALL_S) -> T:
        """Run `work` there and return its result or raise its error. DeadlineExceeded."""
        job: _Job[T] = _Job(work)
        self._jobs.put(job)  # type: ignore[arg-type]  # the queue does not look at results
        if not job.done.wait(timeout_s):
            raise DeadlineExceeded(
                f"{self._name}: no answer in {timeout_s:g} s",
                hint="a file system below may be stuck; dsec doctor shows its state",
            )
        return job.answer()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(CALL_S)


def new_private_namespace() -> None:
    """Give the calling thread a copy of its mount namespace that nothing propagates to."""
    unshare(CLONE_FS | CLONE_NEWNS)
    mount("none", "/", "", MS_REC | MS_PRIVATE)


def enter_namespace(path: Path) -> None:
    """Move the calling thread into the mount namespace pinned at `path`."""
    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        unshare(CLONE_FS)
        setns(fd, CLONE_NEWNS)


def prune_mounts(needed: Iterable[Path], trees: Iterable[Path] = ()) -> None:
    """Unmount in the calling thread's private namespace what it does not need.

    Kept: mounts that a path in `needed` lies on, and those below a path in `trees`.
    """
    below = [Path(os.path.realpath(path)) for path in trees]
    paths = [Path(os.path.realpath(path)) for path in needed] + below
    for found in reversed(mounts_here()):
        point = found.point
        if any(path.is_relative_to(point) for path in paths):
            continue
        if not any(point.is_relative_to(tree) for tree in below):
            umount(point, detach=True)


# -- pinned namespaces ---------------------------------------------------------------------


@functools.cache
def _nsfs_device() -> int:
    return os.stat("/proc/self/ns/mnt").st_dev


def is_pinned(path: Path) -> bool:
    """Whether a namespace is mounted at `path` (all namespace files share one device)."""
    try:
        return path.stat().st_dev == _nsfs_device()
    except FileNotFoundError:
        return False


def pin_namespace(path: Path, prepare: Callable[[], None]) -> bool:
    """Make sure that a mount namespace is pinned at `path`; True if this call made it.

    A new one is a private copy of the caller's in which `prepare` ran first. Callers of
    all processes may race; one makes it. MountError, Busy.
    """
    if is_pinned(path):
        return False
    place = path.parent
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked_file(place.parent / f"{place.name}.lock", f"namespace {path}"):
        if is_pinned(path):
            return False
        place.mkdir(mode=0o700, exist_ok=True)
        if mount_at(place) is None:
            mount("dsec-ns", place, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=700,size=64k")
            mount("none", place, "", MS_PRIVATE)

        def enter() -> None:
            new_private_namespace()
            prepare()

        thread = NamespaceThread(enter, f"make {path.name}")
        try:
            own = thread.call(
                lambda: f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/mnt"
            )
            path.touch(mode=0o600)
            mount(own, path, "", MS_BIND)
        finally:
            thread.close()
    return True


def unpin_namespaces(place: Path) -> None:
    """Let go of every namespace pinned in the directory `place` and of the directory's tmpfs.

    Mounts in them vanish once nothing else uses them. No error if there are none.
    """
    if mount_at(place) is None:
        return
    for path in place.iterdir():
        umount(path, detach=True)
    umount(place, detach=True)
    with contextlib.suppress(OSError):
        place.rmdir()


# -- user namespaces -----------------------------------------------------------------------


class IdRange(NamedTuple):
    """Users and groups 0..size-1 inside are start..start+size-1 on the host."""

    start: int
    size: int


def user_namespace(ids: IdRange) -> int:
    """A descriptor of a new user namespace with that mapping, for id-mapped mounts.

    A process with threads cannot enter one itself, so a child makes it. The child shares our
    memory and runs nothing but libc's getpid(2) on a stack of its own, with all signals blocked:
    a child that ran Python could wait for a lock that another thread held when it was made. It
    ends at once, since it has copies of our descriptors: would it outlive us, what we have locked
    would stay locked. A process that has ended has its namespace until it is waited for.
    """
    stack = mmap.mmap(-1, _CHILD_STACK)
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + _CHILD_STACK
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        child = _libc.clone(
            _libc.getpid,
            ctypes.c_void_p(top),
            CLONE_NEWUSER | CLONE_VM | signal.SIGCHLD,
            None,
        )
        code = ctypes.get_errno()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if child < 0:
        raise failed(
            "make a user namespace",
            code,
            hint="check user.max_user_namespaces and kernel.unprivileged_userns_clone",
        )
    try:
        line = f"0 {ids.start} {ids.size}"
        for name in ("uid_map", "gid_map"):
            _write_map(child, name, line)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        # Its stack is ours until it is gone.
        os.waitpid(child, 0)


def _write_map(pid: int, name: str, line: str) -> None:
    try:
        Path(f"/proc/{pid}/{name}").write_text(line)
    except OSError as e:
        raise MountError(
            f"make a user namespace: {name} {line!r}: {e.strerror}",
            hint="the range must be mapped in our own user namespace, and we must be root in it",
            errno=e.errno or 0,
        ) from None
