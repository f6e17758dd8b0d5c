"""One command in a container, from preparation to the last clean-up.

`run_container` is `dsec run`: one command, signals passed on. `Runner` is the same for a
process that runs many: it keeps namespaces, threads and a few ranges of ids with their user
namespaces, so that a run costs little more than crun itself.

The steps, each undone if a later one fails:

    range of ids, user namespace     kept by the Runner between runs
    claim                            from here on a crash is cleared by `recover`
    layers                           acquired, cloned with shifted owners; in FUSE mode one
                                     composed tree with shifted owners
    upper                            made, owned by the container's root
    overlay                          unattached; user, program and directory are looked up in it
    config.json, crun                in a copy of the pinned namespace, with the overlay attached

What must hold: nothing of a run remains when `wait` returns or anything raises; what a
killed process leaves is removed by the next `recover`, which every Runner does first.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dsec_runtime import cgroups
from dsec_runtime.bundle import ROOT, Limits, Process, check_size, config
from dsec_runtime.cgroups import LimitWatch
from dsec_runtime.namespace import RunNamespace
from dsec_runtime.reaper import reaper
from dsec_runtime.running import GRACE_S, Clock, Running, RunResult, forwarding, terminal_kept
from dsec_runtime.sandbox import Sandboxes, new_id
from dsec_runtime.skeleton import HOSTNAME, skeleton
from dsec_runtime.streams import Streams
from dsec_runtime.uids import COUNT, FIRST, UidRange, UidRanges
from dsec_runtime.upper import UpperKind, open_upper
from dsec_runtime.users import User, check_directory, check_program, find_user
from dsecfs.errors import BadInput, Unsupported
from dsecfs.kernel.namespaces import user_namespace
from dsecfs.kernel.probe import Mode
from dsecfs.layers.environment import DEFAULT_PATH
from dsecfs.layers.local import LocalLayer
from dsecfs.locks import Claim
from dsecfs.mount import Holder, LayerMounts
from dsecfs.nodedirs import NodeDirs

if TYPE_CHECKING:
    from dsec_runtime.terminal import Terminal

IDLE_RANGES = 8
"""Ranges of ids a Runner keeps for its next runs."""
_INIT_PROGRAMS = ("/usr/bin/catatonit", "/usr/libexec/podman/catatonit")
_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
_HOSTNAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.")


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What to run, and in what."""

    layers: tuple[LocalLayer, ...]
    """Top first: toolkits, workspace, base."""
    args: tuple[str, ...]
    """The program and its arguments; found on PATH as execvp does."""
    env: Mapping[str, str] = field(default_factory=dict)
    """All of the environment; PATH, HOME, HOSTNAME and (with a terminal) TERM have defaults."""
    cwd: str = "/"
    user: str = ""
    """NAME, UID, NAME:GROUP or UID:GID in the environment; "" is root."""
    hostname: str = HOSTNAME
    tty: bool = False
    """Give it a terminal: standard input and output of this process must be one."""
    stdin: int | None = None
    """A descriptor; None is this process's own. The same for the other two."""
    stdout: int | None = None
    stderr: int | None = None
    limits: Limits = field(default_factory=Limits)
    upper: UpperKind = "disk"
    upper_limit: int | None = None
    """Bytes the container can write; for `tmpfs` and `image` uppers."""
    no_new_privileges: bool = False
    seccomp: bool = True
    timeout_s: float | None = None
    """End the container after so long. None: it may run as long as it likes."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A range of ids and a user namespace with its mapping, reused from run to run."""

    range: UidRange
    userns: int | None
    """None in FUSE mode, where nothing is id-mapped."""

    def close(self) -> None:
        if self.userns is not None:
            os.close(self.userns)
        self.range.release()


class Runner:
    """Runs containers on this node. Safe to use from several threads.

    Use it in `with`, or `close` it. The node's directories and FUSE daemon are the caller's.
    """

    def __init__(
        self,
        dirs: NodeDirs,
        *,
        mode: Mode = "kernel",
        cgroup_parent: str = "/dsec",
        first_uid: int = FIRST,
        uid_ranges: int = COUNT,
        mounts: LayerMounts | None = None,
    ) -> None:
        """Unsupported, with what to install, when crun or PID 1 is missing.

        `mounts` are the node's layer mounts, closed by the caller, and decide the mode; None
        makes them.
        """
        if os.geteuid() != 0:
            raise Unsupported("run a container: not root", hint="run it as root")
        self._dirs = NodeDirs(dirs.data.absolute(), dirs.run.absolute())
        self._crun = _program("crun", "apt-get install crun")
        self.init = _first(_INIT_PROGRAMS, "PID 1 (catatonit)", "apt-get install catatonit")
        self._own_mounts = mounts is None
        self.mounts = LayerMounts(self._dirs, mode=mode) if mounts is None else mounts
        # In FUSE mode a range that was used before has its trees in the kernel's caches.
        fuse = self.mounts.mode == "fuse"
        self._uids = UidRanges(self._dirs, first=first_uid, count=uid_ranges, lowest=fuse)
        self._lock = threading.Lock()
        self._namespace: RunNamespace | None = None
        self._idle: list[Slot] = []
        self.sandboxes = Sandboxes(
            self._dirs,
            self.mounts,
            self.in_namespace,
            crun=self._crun,
            cgroup_parent=cgroup_parent,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back what is kept between runs. Mounts stay for the next process."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()
            if self._namespace is not None:
                self._namespace.close()
                self._namespace = None
        if self._own_mounts:
            self.mounts.close()

    # -- preparation -------------------------------------------------------------------

    def prepare(self, ranges: int = 1) -> None:
        """Make now what the first runs would make: namespaces, threads, `ranges` of ids."""
        self.in_namespace()
        self.mounts.start()
        skeleton(self._dirs)
        slots = [self.take_slot() for _ in range(ranges)]
        for slot in slots:
            self.give_back(slot)

    def recover(self) -> list[str]:
        """Remove what killed processes left on this node; ids of their sandboxes."""
        cleared = self.sandboxes.recover()
        self._uids.recover(self.sandboxes.uid_starts())
        self.mounts.recover()
        if self.mounts.mode == "fuse":
            self.mounts.trees.recover()
        return cleared

    def in_namespace(self) -> RunNamespace:
        """The namespace in which crun runs, made at the first call."""
        with self._lock:
            if self._namespace is None:
                self._namespace = RunNamespace(self._dirs, (self._crun, self.init))
            return self._namespace

    def take_slot(self) -> Slot:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        taken = self._uids.acquire()
        if self.mounts.mode == "fuse":
            return Slot(taken, None)
        try:
            return Slot(taken, user_namespace(taken.ids))
        except BaseException:
            taken.release()
            raise

    def give_back(self, slot: Slot) -> None:
        with self._lock:
            if len(self._idle) < IDLE_RANGES:
                self._idle.append(slot)
                return
        slot.close()

    def free_range(self, start: int) -> None:
        """Free a range whose sandbox was cleared, and whose process is gone."""
        self._uids.free(start)

    # -- running -----------------------------------------------------------------------

    def run(self, spec: RunSpec) -> RunResult:
        """Run to the end. Errors as `start` and `Running.wait`."""
        return self.start(spec).wait()

    def start(self, spec: RunSpec) -> Running:
        """Start a container.

        ProgramNotFound, NotExecutable, NoSuchUser, SandboxError for what the environment
        lacks; BadInput for what no container can have; MountError, Busy from the mounts.
        """
        _check(spec)
        clock = Clock()
        with contextlib.ExitStack() as undo:
            slot = self.take_slot()
            # Not `give_back`: a range whose sandbox was not cleared must not be used again.
            undo.callback(slot.close)
            clock.lap("ids")

            sandbox = new_id()
            layers = (*spec.layers, skeleton(self._dirs))
            claim = self.claim(sandbox, layers, slot)
            undo.callback(self.sandboxes.clear, claim)
            watch = LimitWatch(self.sandboxes.cgroup(sandbox), spec.limits)
            undo.callback(watch.close)
            place = self.sandboxes.place(sandbox)
            (place / ROOT).mkdir(mode=0o700, parents=True)
            clock.lap("claim")

            with contextlib.ExitStack() as open_fds:
                tree = self.tree(
                    sandbox,
                    layers,
                    slot,
                    open_fds,
                    clock,
                    upper=spec.upper,
                    upper_limit=spec.upper_limit,
                )
                open_fds.callback(os.close, tree)
                process = _resolve(spec, tree)
                content = config(
                    process,
                    init=self.init,
                    hostname=spec.hostname,
                    ids=slot.range.ids,
                    cgroup=watch.group,
                    limits=watch.limits,
                    seccomp=spec.seccomp,
                )
                (place / "config.json").write_text(json.dumps(content))
                streams = _streams(spec, place, slot.range.ids.start + process.user.uid)
                undo.callback(streams.abandon)
                clock.lap("bundle")
                errors = place / "crun.log"
                command = self.sandboxes.command(
                    f"--log=file:{errors}", "run", *streams.options, "--bundle", str(place), sandbox
                )
                crun = self.in_namespace().start(
                    tree,
                    place / ROOT,
                    command,
                    streams=streams.fds,
                    inherited=streams.inherited,
                )
                clock.lap("spawn")
            undo.pop_all()
        streams.started()

        def clear() -> None:
            try:
                self.sandboxes.clear(claim, ended=True)
            except BaseException:
                claim.close()
                slot.close()
                raise
            self.give_back(slot)

        def kill() -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.in_namespace().run(
                    self.sandboxes.command("kill", "--all", sandbox, "KILL"), timeout_s=GRACE_S
                )
            cgroups.kill(self.sandboxes.cgroup(sandbox))  # should crun not have come that far

        return Running(sandbox, crun, streams, clear, kill, errors, clock, spec.timeout_s, watch)

    def claim(
        self,
        sandbox: str,
        layers: Sequence[LocalLayer],
        slot: Slot,
        *,
        more: Sequence[LocalLayer] = (),
        owner: str = "",
    ) -> Claim:
        """The claim of a sandbox of `layers`, with `more` layers mounted in it."""
        start, others = slot.range.ids.start, [layer.digest for layer in more]
        if self.mounts.mode == "fuse":
            tree = self.mounts.trees.name(layers, slot.range.ids)
            return self.sandboxes.claim(sandbox, others, start, tree, owner)
        digests = [layer.digest for layer in layers] + others
        return self.sandboxes.claim(sandbox, digests, start, owner=owner)

    def tree(
        self,
        sandbox: str,
        layers: tuple[LocalLayer, ...],
        slot: Slot,
        open_fds: contextlib.ExitStack,
        clock: Clock,
        *,
        upper: UpperKind,
        upper_limit: int | None,
    ) -> int:
        """The merged tree as an unattached mount, top layer first; its parts are closed with
        `open_fds`. The claim has been made."""
        holder = Holder(sandbox, self.sandboxes.record(sandbox))
        if self.mounts.mode == "fuse":
            ids, trees = slot.range.ids, self.mounts.trees
            lowers = [trees.acquire(trees.name(layers, ids), layers, ids, holder)]
        else:
            paths = [self.mounts.acquire(layer, holder) for layer in layers]
            clock.lap("layers")
            lowers = self.mounts.clone(paths, slot.userns)
        for fd in lowers:
            open_fds.callback(os.close, fd)
        clock.lap("clones")
        writes = open_upper(self._dirs, sandbox, upper, upper_limit, slot.range.ids, lowers[0])
        open_fds.callback(os.close, writes)
        clock.lap("upper")
        tree = self.mounts.overlay(
            lowers,
            writes,
            what=f"mount root of sandbox {sandbox}",
            place=self.sandboxes.place(sandbox),
            volatile=True,
        )
        clock.lap("overlay")
        return tree


def run_container(
    spec: RunSpec,
    dirs: NodeDirs,
    *,
    mode: Mode = "kernel",
    mounts: LayerMounts | None = None,
    tied: bool = True,
) -> RunResult:
    """Run one container to its end: what `dsec run` does. `mode` and `mounts` as in Runner.

    `tied`: if this process is killed, its container ends and is cleared, too.

    Called in the main thread, signals go to the program; those that ask for an end are
    followed by SIGKILL after GRACE_S, or when they come twice. Errors as `Runner.start`.
    """
    with Runner(dirs, mode=mode, mounts=mounts) as runner:
        runner.recover()
        _check(spec)  # a terminal that is none cannot be kept
        with (
            reaper(dirs) if tied else contextlib.nullcontext(),
            terminal_kept(spec.tty, spec.stdin),
            forwarding() as forward,
        ):
            running = runner.start(spec)
            forward(running)
            return running.wait()


def _check(spec: RunSpec) -> None:
    """What can be refused before anything is made."""
    if not spec.layers:
        raise BadInput("run a container: no layers", hint="name an environment or a base")
    if not spec.args or not spec.args[0]:
        raise BadInput("run a container: no program", hint="give one after --")
    if any("\0" in arg for arg in spec.args):
        raise BadInput("run a container: an argument has a NUL byte")
    name = spec.hostname
    if not 0 < len(name) <= 63 or not set(name) <= _HOSTNAME_CHARACTERS or name[0] in "-.":
        raise BadInput(f"host name {name[:80]!r}", hint="use letters, digits, - and ., at most 63")
    spec.limits.check()
    if spec.tty:
        fds = (0 if spec.stdin is None else spec.stdin, 1 if spec.stdout is None else spec.stdout)
        if not all(os.isatty(fd) for fd in fds):
            raise BadInput(
                "run a container with a terminal: standard input or output is none",
                hint="leave out -t",
            )


def _resolve(spec: RunSpec, tree: int) -> Process:
    """Look up user, directory and program in the merged tree."""
    user: User = find_user(tree, spec.user)
    env = {"PATH": DEFAULT_PATH, "HOME": user.home, "HOSTNAME": spec.hostname}
    if spec.tty:
        env["TERM"] = "xterm"
    env.update(spec.env)
    check_size(spec.args, env)
    check_directory(tree, spec.cwd)
    check_program(tree, spec.args[0], spec.cwd, env)
    console = None
    if spec.tty:
        size = os.get_terminal_size(0 if spec.stdin is None else spec.stdin)
        console = {"height": size.lines, "width": size.columns}
    return Process(spec.args, env, spec.cwd, user, console, spec.no_new_privileges)


def _streams(spec: RunSpec, place: Path, uid: int) -> Streams | Terminal:
    if not spec.tty:
        return Streams((spec.stdin, spec.stdout, spec.stderr), uid)
    # Only here: most runs have none.
    from dsec_runtime.terminal import Terminal

    stdin, stdout = (0 if spec.stdin is None else spec.stdin), spec.stdout
    return Terminal(place, stdin, 1 if stdout is None else stdout)


def _program(name: str, how: str) -> Path:
    found = shutil.which(name, path=_SYSTEM_PATH)
    if found is None:
        raise Unsupported(f"run a container: no {name} on this machine", hint=how)
    return Path(os.path.realpath(found))


def _first(paths: tuple[str, ...], what: str, how: str) -> Path:
    for path in paths:
        if os.access(path, os.X_OK):
            return Path(path)
    raise Unsupported(f"run a container: no {what} on this machine", hint=how)
