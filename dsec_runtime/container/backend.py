"""Sandboxes as containers: PID 1 that only waits, in a bundle that crun started detached.

The steps of `create`, each undone if a later one fails:

    range of ids        claimed; given back when the sandbox is destroyed
    claim               owner "edge": nobody else's recovery touches the sandbox
    layers, upper, tree as `dsec run` does it (dsec_runtime/run.py)
    bundle, crun        detached: PID 1 becomes init's child and lives on without us

What must hold: `destroy` needs nothing but the id and what is on the node; a process id is
believed only together with its start time.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dsec_runtime.bundle import (
    ROOT,
    Limits,
    Process,
    check_size,
    config,
    process_config,
)
from dsec_runtime.container.groups import Group
from dsec_runtime.container.inside import add_hosts, ensure_user
from dsec_runtime.container.lxcfs import Lxcfs
from dsec_runtime.container.mounts import Extra, local_layer, open_mounts
from dsec_runtime.edge.backend import Command, HostCommand, Place, Record
from dsec_runtime.edge.model import SandboxSpec, Stats
from dsec_runtime.errors import SandboxError, SandboxLost
from dsec_runtime.nulldevice import NullDevice
from dsec_runtime.run import Runner, Slot
from dsec_runtime.running import Clock
from dsec_runtime.sandbox import EDGE
from dsec_runtime.skeleton import skeleton
from dsec_runtime.upper import cloned_upper, live_upper
from dsec_runtime.users import User, check_directory, check_program, find_user
from dsecfs.errors import BadInput, Busy, Unsupported
from dsecfs.kernel.syscalls import closing, pidfd_open
from dsecfs.layers.local import LocalLayer
from dsecfs.locks import Claim, read_claim
from dsecfs.mount import Holder
from dsecfs.node import Node, Prepared

MIB = 1 << 20
CRUN_S = 60.0
"""Longest wait for crun to start a container."""
CLAIM_S = 10.0
"""Longest wait for somebody who looks at a claim."""
_RLIMITS = str.split(
    "as core cpu data fsize locks memlock msgqueue nice nofile nproc rss rtprio rttime sigpending "
    "stack"
)


class ContainerBackend:
    """All containers of the node's edge. Safe to use from several threads. Close it in the end."""

    name = "container"

    def __init__(self, node: Node) -> None:
        """Unsupported, with what to install, when crun or PID 1 is missing."""
        self._node = node
        self._dirs = node.dirs
        mode, _ = node.mode()
        self._mounts = node.layer_mounts()
        try:
            self._runner = Runner(node.dirs, mode=mode, mounts=self._mounts)
            self._runner.recover()
            self._runner.prepare()
        except BaseException:
            self._mounts.close()
            raise
        self._lxcfs = Lxcfs(node.dirs)
        self._lxcfs.start()
        self._sandboxes = self._runner.sandboxes
        self._lock = threading.Lock()
        self._slots: dict[str, Slot] = {}

    def close(self) -> None:
        """Sandboxes go on. Their ranges of ids stay claimed by their sandboxes' claims."""
        with self._lock:
            for slot in self._slots.values():
                if slot.userns is not None:
                    os.close(slot.userns)
                slot.range.claim.close()
            self._slots.clear()
        self._runner.close()
        self._mounts.close()

    # -- create ------------------------------------------------------------------------

    def create(self, sandbox: str, spec: SandboxSpec, prepared: Prepared) -> Record:
        """Make and start it. Errors as `Runner.start`."""
        if spec.oci_runtime != "crun":
            raise Unsupported(
                f"oci_runtime {spec.oci_runtime}: not on this node", hint="leave it out"
            )
        rlimits = _rlimits(spec)
        more = {
            mount.layer: local_layer(self._node, mount.layer, spec.platform)
            for mount in spec.mounts
            if mount.layer
        }
        clock = Clock()
        with contextlib.ExitStack() as undo:
            slot = self._runner.take_slot()
            undo.callback(slot.close)
            clock.lap("ids")
            layers = (*prepared.top_first, skeleton(self._dirs))
            claim = self._runner.claim(
                sandbox, layers, slot, more=tuple(more.values()), owner=EDGE
            )
            undo.callback(self._sandboxes.clear, claim)
            place = self._sandboxes.place(sandbox)
            (place / ROOT).mkdir(mode=0o700, parents=True)
            clock.lap("claim")
            record = self._start(
                sandbox, spec, prepared, layers, more, slot, place, rlimits, clock
            )
            undo.pop_all()
        claim.close()
        with self._lock:
            self._slots[sandbox] = slot
        record["phases"] = {name: round(took, 5) for name, took in clock.phases.items()}
        return record

    def _start(
        self,
        sandbox: str,
        spec: SandboxSpec,
        prepared: Prepared,
        layers: tuple[LocalLayer, ...],
        more: dict[str, LocalLayer],
        slot: Slot,
        place: Path,
        rlimits: dict[str, tuple[int, int]],
        clock: Clock,
    ) -> Record:
        ids = slot.range.ids
        group = f"{self._sandboxes.cgroup(sandbox)}/box"
        defaults = prepared.environment.process
        with contextlib.ExitStack() as open_fds:
            tree = self._runner.tree(
                sandbox,
                layers,
                slot,
                open_fds,
                clock,
                upper="image",
                upper_limit=spec.limits.disk_mb * MIB,
            )
            open_fds.callback(os.close, tree)
            if spec.extra_hosts:
                add_hosts(tree, spec.extra_hosts, ids.start)
            who = spec.user or defaults.user
            user = ensure_user(tree, who, ids.start)
            cwd = spec.cwd or defaults.cwd or "/"
            check_directory(tree, cwd)
            env = prepared.process_environment(
                {"LANG": "C.UTF-8", "HOSTNAME": spec.hostname, **spec.variables}
            )
            extra = self._extra(sandbox, spec, more, slot, place, open_fds)
            content = config(
                Process((), {"PATH": env["PATH"]}, "/", User(0, 0, (), "/"), None, True),
                init=self._runner.init,
                hostname=spec.hostname,
                ids=ids,
                cgroup=group,
                limits=Limits(spec.limits.memory_mb * MIB, spec.limits.cpus, spec.limits.pids),
                shm_bytes=spec.shm_mb * MIB,
                mounts=extra.config,
            )
            content["process"]["capabilities"] = {}  # it collects orphans, and nothing else
            (place / "config.json").write_text(json.dumps(content))
            clock.lap("bundle")
            self._crun(sandbox, tree, place, extra)
            clock.lap("crun")
        Group(group).prepare()
        pid = int((place / "pid").read_text())
        return {
            "pid": pid,
            "started": _start_time(pid),
            "uid_start": ids.start,
            "cgroup": group,
            "env": env,
            "cwd": cwd,
            "user": who,
            "home": user.home,
            "rlimits": rlimits,
            "memory_limit": spec.limits.memory_mb * MIB,
        }

    def _extra(
        self,
        sandbox: str,
        spec: SandboxSpec,
        more: dict[str, LocalLayer],
        slot: Slot,
        place: Path,
        open_fds: contextlib.ExitStack,
    ) -> Extra:
        extra = open_mounts(
            spec.mounts,
            more,
            mounts=self._mounts,
            holder=Holder(sandbox, self._sandboxes.record(sandbox)),
            slot=slot,
            place=place,
            allowed=self._node.settings.node_host_mounts.split(":"),
            undo=open_fds,
        )
        if self._lxcfs.answers() or self._lxcfs.start():
            fd = self._lxcfs.open()
            open_fds.callback(os.close, fd)
            at = place / "lxcfs"
            at.mkdir(mode=0o700)
            extra.attach.append((fd, at))
            extra.config += self._lxcfs.mounts(at)
        for path, size in spec.tmpfs.items():
            options = ["nosuid", "nodev", "mode=1777", f"size={size}m"]
            extra.config.append(
                {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": options}
            )
        return extra

    def _crun(self, sandbox: str, tree: int, place: Path, extra: Extra) -> None:
        log = place / "crun.log"
        command = self._sandboxes.command(
            f"--log=file:{log}",
            *("run", "--detach", f"--pid-file={place / 'pid'}", "--bundle", str(place), sandbox),
        )
        device = NullDevice()
        try:
            with closing(device.open()) as null:
                crun = self._runner.in_namespace().start(
                    tree,
                    place / ROOT,
                    command,
                    streams=(null, null, null),
                    inherited=(),
                    more=extra.attach,
                )
        finally:
            device.close()
        try:
            code = crun.wait(CRUN_S)
        except subprocess.TimeoutExpired:
            crun.kill()
            crun.wait()
            raise SandboxError(
                f"sandbox {sandbox}: crun did not start it in {CRUN_S:g} s"
            ) from None
        if code:
            said = ""
            with contextlib.suppress(FileNotFoundError):
                said = log.read_text(errors="replace").strip().replace("\n", "; ")
            raise SandboxError(f"sandbox {sandbox}: crun: {said or f'exit code {code}'}")

    # -- life --------------------------------------------------------------------------

    def adopt(self, sandbox: str, record: Record) -> str:
        """running, paused or gone."""
        if not self._sandboxes.record(sandbox).exists() or not _lives(record):
            return "gone"
        return "paused" if Group(record["cgroup"]).is_frozen() else "running"

    def watch(self, sandbox: str, record: Record) -> int:
        pidfd = pidfd_open(record["pid"])
        if pidfd is None or not _lives(record):
            if pidfd is not None:
                os.close(pidfd)
            raise SandboxLost(f"sandbox {sandbox}: its first process is gone")
        return pidfd

    @contextlib.contextmanager
    def _root(self, sandbox: str, record: Record) -> Iterator[int]:
        """The root as the sandbox sees it, mounts of its own included."""
        try:
            fd = os.open(f"/proc/{record['pid']}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            fd = -1
        if fd < 0 or not _lives(record):
            if fd >= 0:
                os.close(fd)
            raise SandboxLost(f"sandbox {sandbox}: its first process is gone")
        with closing(fd):
            yield fd

    def command(self, sandbox: str, record: Record, command: Command) -> HostCommand:
        """crun exec with a process description of its own, in a control group of its own."""
        with self._root(sandbox, record) as root:
            user = find_user(root, record["user"] if command.user is None else command.user)
            env = {"HOME": user.home, **record["env"]}
            if command.tty:
                env.setdefault("TERM", "xterm-256color")
            env.update(command.variables)
            cwd = command.cwd or record["cwd"]
            check_size(command.args, env)
            check_directory(root, cwd)
            check_program(root, command.args[0], cwd, env)
        process = Process(
            args=command.args,
            env=env,
            cwd=cwd,
            user=user,
            console={"height": command.rows, "width": command.columns} if command.tty else None,
            no_new_privileges=False,
            rlimits={name: (low, high) for name, (low, high) in record["rlimits"].items()},
        )
        inner = f"exec-{os.urandom(6).hex()}"
        group = Group(record["cgroup"])
        group.make_inner(inner)
        scratch = self._sandboxes.place(sandbox) / inner
        self._exec_state(sandbox, scratch, f"{record['cgroup']}/{inner}")
        (scratch / "process.json").write_text(json.dumps(process_config(process)))
        options = ["--console-socket={console}", "--tty"] if command.tty else []
        if command.extra_fds:
            options.append(f"--preserve-fds={command.extra_fds}")
        argv = (
            *(str(self._sandboxes.crun), "--root", str(scratch), "--cgroup-manager=cgroupfs"),
            *(f"--log=file:{scratch / 'log'}", "exec", f"--process={scratch / 'process.json'}"),
            *(*options, sandbox),
        )
        return HostCommand(
            argv=argv,
            console=command.tty,
            cgroup=f"{record['cgroup']}/{inner}",
            counters=group.counters(inner),
            scratch=scratch,
        )

    def _exec_state(self, sandbox: str, scratch: Path, cgroup: str) -> None:
        """crun's state of the container once more, with another control group in it: that is
        where crun exec puts the command. (--cgroup does it in version 2 alone, and in version 1
        puts the command into no group of the sandbox at all.)"""
        state = self._sandboxes.state / sandbox
        try:
            status = json.loads((state / "status").read_text())
            names = os.listdir(state)
        except (OSError, ValueError) as e:
            raise SandboxLost(f"sandbox {sandbox}: crun's state of it: {e}") from None
        if "cgroup-path" not in status:
            raise SandboxError(f"sandbox {sandbox}: crun's state names no control group")
        status["cgroup-path"] = cgroup
        copy = scratch / sandbox
        scratch.mkdir(mode=0o700)
        copy.mkdir(mode=0o700)
        for name in names:
            if name == "status":
                (copy / name).write_text(json.dumps(status))
            else:
                (copy / name).symlink_to(state / name)

    def place(self, sandbox: str, record: Record, user: str | None = None) -> Place:
        with self._root(sandbox, record) as root:
            found = find_user(root, record["user"] if user is None else user)
        return Place(
            pid=record["pid"],
            started=record["started"],
            uid=found.uid,
            gid=found.gid,
            groups=found.groups,
            cwd=record["cwd"],
        )

    # -- pause -------------------------------------------------------------------------

    def pause(self, sandbox: str, record: Record, *, deadline_s: float) -> None:
        Group(record["cgroup"]).freeze(f"sandbox {sandbox}", deadline_s)

    def resume(self, sandbox: str, record: Record) -> None:
        Group(record["cgroup"]).thaw()
        if not _lives(record):
            raise SandboxLost(f"sandbox {sandbox}: its first process is gone")

    def reclaim(self, sandbox: str, record: Record) -> int:
        """Not where others use the same layers: the kernel counts pages of the shared base for
        who read them first, and would take those, too."""
        layers = read_claim(self._sandboxes.record(sandbox)).get("layers", [])
        if any(self._shared(str(layer), sandbox) for layer in layers):
            return 0
        return Group(record["cgroup"]).reclaim()

    def _shared(self, layer: str, sandbox: str) -> bool:
        holders = {h for g in self._mounts.mounted().get(layer, ()) for h in g}  # type: ignore[call-overload]
        return bool(holders - {sandbox})

    def stats(self, sandbox: str, record: Record) -> Stats:
        usage = Group(record["cgroup"]).usage()
        with self._root(sandbox, record) as root:
            found = os.statvfs(f"/proc/self/fd/{root}")
            disk = (found.f_blocks - found.f_bfree) * found.f_frsize
        return Stats(
            memory_bytes=usage.memory,
            memory_peak_bytes=usage.memory_peak,
            memory_limit_bytes=record["memory_limit"],
            cpu_s=usage.cpu_s,
            pids=max(0, usage.pids - 1),
            disk_bytes=disk,
            # What the file system's own tables take of the limit, and what it keeps for itself,
            # cannot be written.
            disk_limit_bytes=(found.f_blocks - found.f_bfree + found.f_bavail) * found.f_frsize,
            execs=0,
        )

    # -- its files, from outside -------------------------------------------------------

    def upper(self, sandbox: str, record: Record) -> tuple[int, int]:
        return live_upper(self._dirs, sandbox), record["uid_start"]

    def clone_upper(self, sandbox: str, record: Record) -> int | None:
        return cloned_upper(self._dirs, sandbox)

    def lower(self, sandbox: str, record: Record, prepared: Prepared) -> int:
        layers = (*prepared.top_first, skeleton(self._dirs))
        with contextlib.ExitStack() as open_fds:
            if self._mounts.mode == "fuse":
                tree = read_claim(self._sandboxes.record(sandbox)).get("tree", "")
                lowers = [self._mounts.trees.open(str(tree))]
            else:
                holder = Holder(sandbox, self._sandboxes.record(sandbox))
                lowers = self._mounts.clone(
                    [self._mounts.acquire(layer, holder) for layer in layers]
                )
            for fd in lowers:
                open_fds.callback(os.close, fd)
            what = f"mount the layers of sandbox {sandbox}"
            return self._mounts.overlay(
                lowers, None, what=what, place=self._sandboxes.place(sandbox), volatile=False
            )

    # -- the end -----------------------------------------------------------------------

    def destroy(self, sandbox: str, record: Record | None) -> None:
        """SandboxError if something cannot be removed: the claim stays, for another try."""
        path = self._sandboxes.record(sandbox)
        claim = self._take(path)
        if claim is None:
            return
        start = claim.read().get("uid_start")
        try:
            self._sandboxes.clear(claim)
        except BaseException:
            claim.close()
            raise
        with self._lock:
            slot = self._slots.pop(sandbox, None)
        if slot is not None:
            self._runner.give_back(slot)
        elif isinstance(start, int):
            self._runner.free_range(start)

    @staticmethod
    def _take(path: Path) -> Claim | None:
        """The claim; None if it is gone. Busy if somebody else has it for long."""
        deadline = time.monotonic() + CLAIM_S
        while path.exists():
            claim = Claim.take(path)
            if claim is not None:
                return claim
            if time.monotonic() > deadline:
                raise Busy(f"{path}: held by another process for {CLAIM_S:g} s", hint="try again")
            time.sleep(0.01)
        return None

    def all(self) -> list[str]:
        return [s for s in self._sandboxes.all() if self._sandboxes.owner(s) == EDGE]


def _rlimits(spec: SandboxSpec) -> dict[str, tuple[int, int]]:
    """BadInput for a limit that Linux does not have; Unsupported for one above what this process
    may give (it need not have CAP_SYS_RESOURCE)."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = spec.limits.open_files
    if most != resource.RLIM_INFINITY:
        files = min(files, most)
    found = {"RLIMIT_NOFILE": (files, files)}
    for name, limit in spec.ulimits.items():
        if name not in _RLIMITS:
            raise BadInput(f"ulimits: no limit {name!r}", hint=f"one of {', '.join(_RLIMITS)}")
        if limit.soft > limit.hard:
            raise BadInput(f"ulimits.{name}: the soft limit is above the hard one")
        kind = getattr(resource, f"RLIMIT_{name.upper()}", None)  # Python does not know all
        most = resource.RLIM_INFINITY if kind is None else resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY and limit.hard > most:
            raise Unsupported(
                f"ulimits.{name}: {limit.hard} is more than this node may give",
                hint=f"use {most} or less",
            )
        found[f"RLIMIT_{name.upper()}"] = (limit.soft, limit.hard)
    return found


def _start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat: with it a process id cannot be mistaken for another's."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[19])


def _lives(record: Record) -> bool:
    try:
        text = Path(f"/proc/{record['pid']}/stat").read_text()
    except OSError:
        return False
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) == record["started"] and fields[0] not in "ZX"
