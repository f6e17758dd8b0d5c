"""The OCI configuration (config.json) that crun gets.

What must hold:
- a container is alone: its own user, pid, ipc, uts, mount, cgroup and network namespaces; the
  network has nothing but a loopback device, and belongs to the container's user namespace;
- capabilities, masked and read-only paths are docker's, and more of /proc is hidden;
- nothing of ours is inside but PID 1, a static reaper bind-mounted read-only into the
  container's own /dev: no socket, no log, no path in the image, nothing in the upper;
- `no_new_privileges` is off unless asked for, as in docker: sudo and other setuid programs
  belong to many environments, and what they gain ends at the user namespace.
"""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsec_runtime.seccomp import profile
from dsec_runtime.users import User
from dsecfs.errors import BadInput
from dsecfs.kernel.namespaces import IdRange
from dsecfs.kernel.probe import cgroup_layout

OCI_VERSION = "1.0.2"
ROOT = "rootfs"
"""The mount point of the merged tree in the bundle. A relative path: crun looks it up when it
is the container's root already, who may not pass through our private directories."""
INIT = "/dev/init"
"""Where PID 1 appears: in the tmpfs that crun makes for /dev."""

CAPABILITIES = tuple(
    f"CAP_{name}"
    for name in (
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "NET_RAW",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    )
)
"""Docker's default set. They count in the container's user namespace only."""

MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/dynamic_debug",
    "/proc/interrupts",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/keys",
    "/proc/key-users",
    "/proc/kmsg",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/modules",
    "/proc/mtrr",
    "/proc/pagetypeinfo",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/slabinfo",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    "/sys/fs/selinux",
    "/sys/kernel",
)
"""Docker's list; the page files of /proc (reading kpagecgroup has crashed kernels); and what
tells about the host's kernel or makes its use easier to attack."""

READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

OPEN_FILES = (65536, 1 << 20)
"""Soft and hard RLIMIT_NOFILE, as far as our own hard limit allows."""
MAX_WORD = 32 * 4096
"""Bytes of one argument or variable and its NUL (MAX_ARG_STRLEN, uapi/linux/binfmts.h)."""
MAX_WORDS = 6 << 20
"""Bytes of all of them, and at most a quarter of the stack (execve(2))."""
SHM_BYTES = 64 << 20
CPU_PERIOD_US = 100_000
OOM_SCORE = 500
"""When the machine is out of memory, sandboxes go before its services."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a container may use at most. None: no limit."""

    memory: int | None = None
    """Bytes, swap included."""
    cpus: float | None = None
    """CPU time per time, e.g. 1.5."""
    pids: int | None = 4096
    """Processes and threads."""

    def check(self) -> None:
        """BadInput for values that no kernel takes."""
        if self.memory is not None and self.memory < 4 << 20:
            raise BadInput(f"memory limit of {self.memory} bytes", hint="use 4 MiB or more")
        if self.cpus is not None and not 0.01 <= self.cpus <= 4096:
            raise BadInput(f"CPU limit of {self.cpus:g}", hint="use 0.01 to 4096 CPUs")
        if self.pids is not None and not 2 <= self.pids <= 4 << 20:
            raise BadInput(f"limit of {self.pids} processes", hint="use 2 to 4194304")


@dataclass(frozen=True, slots=True)
class Process:
    """What runs first in a container, below PID 1."""

    args: tuple[str, ...]
    """Empty: PID 1 alone, which waits and collects what others leave."""
    env: Mapping[str, str]
    cwd: str
    user: User
    console: Mapping[str, int] | None
    """Size of its terminal as {"height", "width"} in characters; None without a terminal."""
    no_new_privileges: bool
    rlimits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Soft and hard limits besides the defaults, by name: RLIMIT_STACK …"""


def check_size(args: Sequence[str], env: Mapping[str, str]) -> None:
    """BadInput for what execve(2) would refuse, which only PID 1 could say: with exit code 1."""
    words = [*args, *(f"{name}={value}" for name, value in env.items())]
    sizes = [len(os.fsencode(word)) + 1 for word in words]
    for word, size in zip(words, sizes, strict=True):
        if size > MAX_WORD:
            raise BadInput(
                f"argument or variable {word[:40]!r}… of {size - 1} bytes",
                hint=f"the kernel takes {MAX_WORD - 1}; use a file",
            )
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    most = MAX_WORDS if stack == resource.RLIM_INFINITY else min(MAX_WORDS, stack // 4)
    # PID 1's own words come on top.
    needed = sum(sizes) + 8 * len(words) + 4096
    if needed > max(most, MAX_WORD):
        raise BadInput(
            f"arguments and variables of {needed} bytes in all",
            hint=f"the kernel takes {max(most, MAX_WORD)}; use a file",
        )


def environment(env: Mapping[str, str]) -> list[str]:
    """NAME=value strings for execve. BadInput for what it cannot take."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise BadInput(
                f"environment variable {name[:64]!r} cannot be set",
                hint='a name has no "=", and neither it nor the value a NUL',
            )
    return [f"{name}={value}" for name, value in env.items()]


def config(
    process: Process,
    *,
    init: Path,
    hostname: str,
    ids: IdRange,
    cgroup: str,
    limits: Limits,
    seccomp: bool = True,
    shm_bytes: int = SHM_BYTES,
    mounts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The configuration of one container whose merged tree is at `rootfs` in its bundle.
    `mounts` come after ours."""
    mapping = [{"containerID": 0, "hostID": ids.start, "size": ids.size}]
    return {
        "ociVersion": OCI_VERSION,
        "process": process_config(process, init=True),
        "root": {"path": ROOT, "readonly": False},
        "hostname": hostname,
        "mounts": [*_mounts(init, shm_bytes), *mounts],
        "linux": {
            "namespaces": [
                {"type": kind}
                for kind in ("user", "pid", "ipc", "uts", "mount", "cgroup", "network")
            ],
            "uidMappings": mapping,
            "gidMappings": mapping,
            "cgroupsPath": cgroup,
            "resources": _resources(limits),
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
            **({"seccomp": profile()} if seccomp else {}),
        },
    }


def process_config(process: Process, *, init: bool = False) -> dict[str, Any]:
    """The `process` object of a container's first process (`init`), or of a later one."""
    user = process.user
    args = list(process.args)
    if init:
        args = [INIT, "--", *args] if args else [INIT, "-P"]
    # As docker does: a user who is not root starts with nothing but the bounding set, so a
    # setuid program can still get what is in it.
    held = list(CAPABILITIES) if user.uid == 0 else []
    soft, hard = _open_files()
    rlimits = {"RLIMIT_NOFILE": (soft, hard), "RLIMIT_CORE": (0, 0), **process.rlimits}
    # crun passes on changes of the size, and only those.
    size = {"consoleSize": process.console} if process.console else {}
    return {
        "terminal": process.console is not None,
        **size,
        "user": {"uid": user.uid, "gid": user.gid, "additionalGids": list(user.groups)},
        "args": args,
        "env": environment(process.env),
        "cwd": process.cwd,
        "capabilities": {
            "bounding": list(CAPABILITIES),
            "effective": held,
            "permitted": held,
            "inheritable": [],
            "ambient": [],
        },
        "rlimits": [
            {"type": name, "soft": low, "hard": high} for name, (low, high) in rlimits.items()
        ],
        "noNewPrivileges": process.no_new_privileges,
        "oomScoreAdj": OOM_SCORE,
    }


def _open_files() -> tuple[int, int]:
    _, ours = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = OPEN_FILES[1] if ours == resource.RLIM_INFINITY else min(ours, OPEN_FILES[1])
    return min(OPEN_FILES[0], hard), hard


def _mounts(init: Path, shm_bytes: int) -> list[dict[str, Any]]:
    def mount(at: str, kind: str, *options: str) -> dict[str, Any]:
        return {"destination": at, "type": kind, "source": kind, "options": list(options)}

    safe = ("nosuid", "noexec", "nodev")
    mounts = [
        mount("/proc", "proc", *safe),
        mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=64k"),
        mount(
            "/dev/pts",
            "devpts",
            "nosuid",
            "noexec",
            "newinstance",
            "ptmxmode=0666",
            "mode=0620",
            "gid=5",
        ),
        mount("/dev/shm", "tmpfs", *safe, "mode=1777", f"size={shm_bytes}"),
        mount("/dev/mqueue", "mqueue", *safe),
        mount("/sys", "sysfs", *safe, "ro"),
    ]
    if control_groups() == "v2":
        # Version 1 is left out: one mount per controller, and nothing reads its limits there.
        mounts.append(mount("/sys/fs/cgroup", "cgroup", *safe, "relatime", "ro"))
    mounts.append(
        {
            "destination": INIT,
            "type": "bind",
            "source": str(init),
            "options": ["bind", "ro", "nosuid", "nodev"],
        }
    )
    return mounts


@functools.cache
def control_groups() -> str:
    """How control groups are mounted here: v2, v1, hybrid or none. That does not change."""
    return cgroup_layout()[0]


def counts_swap() -> bool:
    """Whether a limit on memory and swap together can be set."""
    if control_groups() == "v2":
        return True
    return os.path.exists("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes")


def _resources(limits: Limits) -> dict[str, Any]:
    limits.check()
    resources: dict[str, Any] = {}
    if limits.memory is not None:
        resources["memory"] = {"limit": limits.memory}
        if counts_swap():
            resources["memory"]["swap"] = limits.memory
    if limits.cpus is not None:
        quota = max(1000, int(limits.cpus * CPU_PERIOD_US))
        resources["cpu"] = {"quota": quota, "period": CPU_PERIOD_US}
    if limits.pids is not None:
        # PID 1 is ours.
        resources["pids"] = {"limit": limits.pids + 1}
    return resources
