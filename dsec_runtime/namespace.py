"""The pinned mount namespace in which crun runs (run/ns/mnt).

What must hold:
- it holds the few mounts that crun needs and none of ours: copying it, which crun does for
  every container, costs the same however many sandboxes and layers there are;
- on hosts with both versions of control groups, version 2 is unmounted in it: crun refuses
  such hybrids, and version 1 has the controllers there. crun then makes plain directories
  where it was, and removes them never: every container gets a tmpfs of its own for them;
- a sandbox's root is attached only in a copy made for its crun process, so it goes away
  with the container, whatever kills us.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dsec_runtime.bundle import control_groups
from dsecfs.kernel.namespaces import (
    NamespaceThread,
    enter_namespace,
    pin_namespace,
    prune_mounts,
)
from dsecfs.kernel.syscalls import (
    CLONE_NEWNS,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    mount,
    move_mount,
    setns,
    umount,
    unshare,
)
from dsecfs.nodedirs import NodeDirs

_UNIFIED = Path("/sys/fs/cgroup/unified")
_CGROUP_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC


class RunNamespace:
    """A thread of ours in the namespace. Calls from several threads go one after another."""

    def __init__(self, dirs: NodeDirs, programs: Sequence[Path]) -> None:
        """`programs` are what is executed or bind-mounted from the host: crun, PID 1."""
        needed = [dirs.run.absolute(), dirs.data.absolute(), *programs]
        needed += [Path(p) for p in ("/usr/lib", "/lib", "/lib64", "/etc") if os.path.exists(p)]
        kernel = [Path("/proc"), Path("/sys"), Path("/dev")]

        def prepare() -> None:
            prune_mounts(needed, kernel)
            umount(_UNIFIED, detach=True)

        self._hybrid = control_groups() == "hybrid"
        place = dirs.namespace.absolute()
        pin_namespace(place, prepare)
        self._fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._thread = NamespaceThread(lambda: enter_namespace(place), "crun")
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        self._thread.close()
        os.close(self._fd)

    def start(
        self,
        root: int,
        at: Path,
        argv: Sequence[str],
        *,
        streams: Sequence[int],
        inherited: Sequence[int],
        more: Sequence[tuple[int, Path]] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a program in a copy of the namespace with the mount `root` attached `at`, and
        `more` mounts at their places.

        `streams` are its standard input, output and error, `inherited` the other descriptors
        it gets. It has a process group of its own: a terminal's signals reach it only through us.
        """

        def work() -> subprocess.Popen[bytes]:
            unshare(CLONE_NEWNS)
            try:
                move_mount(root, at)
                for fd, path in more:
                    move_mount(fd, path)
                if self._hybrid:
                    mount("dsec", _UNIFIED, "tmpfs", _CGROUP_FLAGS, "mode=700,size=64k")
                return subprocess.Popen(
                    argv,
                    stdin=streams[0],
                    stdout=streams[1],
                    stderr=streams[2],
                    cwd="/",
                    env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                    process_group=0,
                    pass_fds=inherited,
                )
            finally:
                setns(self._fd, CLONE_NEWNS)

        return self._thread.call(work)

    def run(self, argv: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        """Run a program in the namespace and collect what it says."""
        return self._thread.call(
            lambda: subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                cwd="/",
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                check=False,
            ),
            timeout_s=timeout_s + 5,
        )
