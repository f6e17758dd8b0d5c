"""What can remain of a run on this node, and its one remover.

    run/sandboxes/<id>.json     claim of the process that runs it
    run/sandboxes/<id>/         bundle: config.json, rootfs (mount point), crun.log
    run/crun/<id>/              crun's own state
    /sys/fs/cgroup/…/dsec/<id>  its control group
    data/uppers/<id>/           its upper

What must hold: the claim is there before everything else and goes last. `clear` removes all
the rest, whatever is there of it, and can be repeated. Whoever holds the claim may clear:
the process that ran it, or `recover` when that process is dead; of the edge's sandboxes, the edge.
docs/artifacts.md is the table of all of it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dsec_runtime import cgroups
from dsec_runtime.errors import SandboxError
from dsec_runtime.namespace import RunNamespace
from dsec_runtime.upper import is_claimed, remove_tree, remove_upper
from dsecfs.errors import DsecfsError
from dsecfs.kernel.syscalls import pidfd_open, pidfd_send_signal
from dsecfs.layers.digest import Digest, parse_digest
from dsecfs.locks import Claim, read_claim
from dsecfs.mount import LayerMounts
from dsecfs.nodedirs import NodeDirs

log = logging.getLogger("dsec_runtime.sandbox")

CLAIM_FORMAT = 1
EDGE = "edge"
"""Owner of the sandboxes of `dsec node`: the edge alone clears them, also after it was killed."""
CRUN_S = 30.0
"""Longest wait for a crun command that only cleans up."""

_ID = re.compile(r"[a-z0-9]{12}\Z")


def new_id() -> str:
    """A name for a sandbox: 12 hex digits, safe as a path, a holder and a control group."""
    return os.urandom(6).hex()


class Sandboxes:
    """The sandboxes of a node and how they are cleared."""

    def __init__(
        self,
        dirs: NodeDirs,
        layers: LayerMounts,
        namespace: Callable[[], RunNamespace],
        *,
        crun: Path,
        cgroup_parent: str,
    ) -> None:
        self._dirs = dirs
        self._layers = layers
        self._namespace = namespace
        self.crun = crun
        self.cgroup_parent = cgroup_parent

    @property
    def state(self) -> Path:
        """crun's --root."""
        return self._dirs.run / "crun"

    def place(self, sandbox: str) -> Path:
        return self._dirs.sandboxes / sandbox

    def record(self, sandbox: str) -> Path:
        return self._dirs.sandboxes / f"{sandbox}.json"

    def cgroup(self, sandbox: str) -> str:
        return f"{self.cgroup_parent}/{sandbox}"

    def command(self, *args: str) -> list[str]:
        """A crun command line with our global options."""
        return [str(self.crun), "--root", str(self.state), "--cgroup-manager=cgroupfs", *args]

    def claim(
        self,
        sandbox: str,
        layers: Sequence[Digest],
        uid_start: int,
        tree: str = "",
        owner: str = "",
    ) -> Claim:
        """The first trace of a new sandbox on this node. `tree` is its root in FUSE mode.
        `owner`: EDGE if the sandbox outlives this process."""
        self._dirs.sandboxes.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = {
            "format": CLAIM_FORMAT,
            "pid": os.getpid(),
            "uid_start": uid_start,
            "cgroup": self.cgroup(sandbox),
            "layers": list(layers),
            "tree": tree,
            "owner": owner,
        }
        return Claim.make(self.record(sandbox), content)

    def all(self) -> list[str]:
        """Ids of the sandboxes that have a claim."""
        try:
            names = sorted(os.listdir(self._dirs.sandboxes))
        except FileNotFoundError:
            return []
        return [n[:-5] for n in names if n.endswith(".json") and _ID.match(n[:-5])]

    def owner(self, sandbox: str) -> str:
        """EDGE for sandboxes that live on when the process that made them ends."""
        return str(read_claim(self.record(sandbox)).get("owner", ""))

    def uid_starts(self) -> set[int]:
        """Starts of the uid ranges that sandboxes with a claim use."""
        found = {read_claim(self.record(sandbox)).get("uid_start") for sandbox in self.all()}
        return {start for start in found if isinstance(start, int)}

    # -- removing ----------------------------------------------------------------------

    def clear(self, claim: Claim, *, ended: bool = False) -> None:
        """Remove everything of a sandbox whose claim we hold.

        `ended` says that its crun process ended by itself. SandboxError if something cannot
        be removed; the claim then stays for `recover`.
        """
        sandbox = claim.path.stem
        content = claim.read()
        if not ended:
            self._kill_crun(sandbox)
        if (self.state / sandbox).exists():
            self._delete(sandbox)
        cgroup = content.get("cgroup")
        if isinstance(cgroup, str):
            cgroups.remove(cgroup)
        place = self.place(sandbox)
        if not ended:
            self._layers.detach_below(place)
        for layer in content.get("layers", []):
            self._layers.release(parse_digest(layer), sandbox)
        if tree := content.get("tree"):
            self._layers.trees.release(str(tree), sandbox)
        try:
            remove_upper(self._dirs, sandbox)
            remove_tree(place)
        except OSError as e:
            raise SandboxError(
                f"sandbox {sandbox}: cannot remove {e.filename}: {e.strerror}",
                hint="dsec doctor lists what is left; the next run tries again",
            ) from None
        claim.release()

    def recover(self) -> list[str]:
        """Clear the sandboxes of dead processes. Returns their ids; failures are logged and
        tried again by the next recovery."""
        cleared = []
        for sandbox in self.all():
            if self.owner(sandbox) == EDGE:
                continue
            claim = Claim.take(self.record(sandbox))
            if claim is None:
                continue
            if claim.read().get("owner") == EDGE:  # it was just being written
                claim.close()
                continue
            try:
                self.clear(claim)
                cleared.append(sandbox)
            except DsecfsError as e:
                claim.close()
                log.warning("sandbox %s is not cleared: %s", sandbox, e)
        self._forget_orphans()
        return cleared

    def _forget_orphans(self) -> None:
        """Bundles and uppers that have no claim: of an earlier boot, or a lost run directory."""
        for parent in (self._dirs.sandboxes, self._dirs.uppers):
            for name in os.listdir(parent) if parent.is_dir() else []:
                # Claims come first: whoever is just starting has one already.
                if not _ID.match(name) or self.record(name).exists():
                    continue
                if parent != self._dirs.uppers or not is_claimed(parent / name):
                    remove_tree(parent / name)

    def _kill_crun(self, sandbox: str) -> None:
        """Kill crun processes of this sandbox: one that is still starting would go on."""
        wanted = os.fsencode(str(self.state))
        for pid in _processes():
            if not _is_crun(pid, wanted, sandbox.encode()):
                continue
            pidfd = pidfd_open(pid)
            if pidfd is None:
                continue
            try:
                if _is_crun(pid, wanted, sandbox.encode()):  # still the same process
                    pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)

    def _delete(self, sandbox: str) -> None:
        """Have crun kill and forget a container it knows."""
        said = ""
        try:
            done = self._namespace().run(
                self.command("delete", "--force", sandbox), timeout_s=CRUN_S
            )
            said = done.stderr.decode(errors="replace").strip()
        except subprocess.TimeoutExpired:
            said = f"no end in {CRUN_S:g} s"
        if (self.state / sandbox).exists():
            # A state that crun cannot read (its maker was killed in between): the control
            # group has the processes.
            log.info("sandbox %s: crun delete: %s", sandbox, said)
            shutil.rmtree(self.state / sandbox, ignore_errors=True)


def _processes() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def _is_crun(pid: int, state: bytes, sandbox: bytes) -> bool:
    try:
        args = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return state in args and sandbox in args and b"run" in args
