"""What this machine can do for dsec, what is missing, and how to get it.

Each check tries or reads the thing itself and never raises for what it finds. `needed` marks
what `dsec run` cannot do without.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsecfs.errors import DsecfsError, StoreDenied
from dsecfs.kernel.probe import FUSE_RESEND_MINOR, KernelInfo, probe, quick_mode
from dsecfs.node import Node
from dsecfs.store.open import check_store

State = Literal["ok", "warning", "missing"]
_COMMAND_S = 10
_STORE_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    area: str
    name: str
    state: State
    found: str
    hint: str = ""
    """What to do; "" if all is well."""
    needed: bool = False
    """`dsec run` does not work while this is missing."""


def examine(node: Node) -> Iterator[Finding]:
    """All findings, in the order in which people should read them."""
    scratch = next(p for p in (node.dirs.data, *node.dirs.data.parents) if p.is_dir())
    info = probe(scratch)
    yield from _kernel(node, info)
    yield from _programs()
    yield from _limits()
    yield from _space(node, scratch)
    yield _store(node)
    yield from _daemon(node)


def works(findings: list[Finding]) -> bool:
    """Whether `dsec run` can work on this machine."""
    return not any(f.needed and f.state == "missing" for f in findings)


def _device(path: str = "/dev/fuse") -> Finding:
    """Whether this user may open it, where mounting could not be tried."""
    if not os.path.exists(path):
        return Finding("kernel", "FUSE", "missing", f"no {path}", "modprobe fuse", True)
    if not os.access(path, os.R_OK | os.W_OK):
        found, hint = f"this user may not open {path}", f"as root: chmod 0666 {path}"
        return Finding("kernel", "FUSE", "missing", found, hint, True)
    return Finding("kernel", "FUSE", "ok", f"{path} is there", "", True)


def _kernel(node: Node, info: KernelInfo) -> Iterator[Finding]:
    yield from _mode(node, info)
    if not info.root:
        yield Finding("kernel", "root", "missing", "not root", "run dsec as root", True)
    if info.fuse_minor is not None:
        resend = info.fuse_minor >= FUSE_RESEND_MINOR
        yield Finding(
            "kernel",
            "FUSE",
            "ok" if resend else "warning",
            f"protocol 7.{info.fuse_minor}"
            + ("" if resend else ": reads fail when a worker dies (no RESEND)"),
            "" if resend else "Linux 6.9 or newer keeps reads alive",
        )
    else:
        yield _device()
    yield Finding(
        "kernel",
        "user namespaces",
        "ok" if info.userns else "missing",
        "allowed" if info.userns else info.reasons.get("userns", "none"),
        "" if info.userns else "sysctl user.max_user_namespaces=100000",
        True,
    )
    controllers = ", ".join(info.cgroup_controllers)
    yield Finding(
        "kernel",
        "control groups",
        "ok" if info.cgroups in ("v2", "v1", "hybrid") else "warning",
        f"{info.cgroups}: {controllers}" if controllers else "none: containers have no limits",
        "" if controllers else "mount cgroup2 on /sys/fs/cgroup",
    )


def _mode(node: Node, info: KernelInfo) -> Iterator[Finding]:
    best = info.best_mode()
    why = info.reasons.get("kernel") or info.reasons.get("idmap") or quick_mode()[1]
    if best is None:
        yield Finding(
            "kernel",
            "mount mode",
            "missing",
            "none: " + "; ".join(info.reasons.values()),
            "load the modules erofs, overlay and fuse (docs/kernels.md)",
            True,
        )
    elif best == "kernel":
        yield Finding("kernel", "mount mode", "ok", f"kernel, on Linux {info.release}")
    else:
        hint = "Linux 6.12 or newer is faster" if info.root else "only root can mount more"
        found = f"{best}, on Linux {info.release}; not kernel mode: {why}"
        yield Finding("kernel", "mount mode", "warning", found, f"{hint} (docs/kernels.md)")
    if node.settings.mode != "auto":
        error, name = _try(node.mode), "mode that is set"
        if error is None:
            yield Finding("kernel", name, "ok", node.settings.mode)
        else:
            yield Finding("kernel", name, "missing", error.message, error.hint, True)
    if info.root:
        yield Finding(
            "kernel",
            "overlayfs",
            "ok" if info.overlay else "missing",
            "the root of a container" if info.overlay else info.reasons.get("overlay", "none"),
            "" if info.overlay else "modprobe overlay; without it only dsec mount works",
            True,
        )


_PROGRAMS: tuple[tuple[str, tuple[str, ...], str, bool, str], ...] = (
    ("crun", ("crun",), "crun", True, "runs containers"),
    (
        "catatonit",
        ("/usr/bin/catatonit", "/usr/libexec/podman/catatonit"),
        "catatonit",
        True,
        "PID 1 of containers",
    ),
    ("lxcfs", ("lxcfs",), "lxcfs", False, "a sandbox's limits in its /proc"),
    ("fusermount3", ("fusermount3",), "fuse3", False, "FUSE mounts without root"),
    ("skopeo", ("skopeo",), "skopeo", False, "images from registries (docker://)"),
    ("mkfs.ext4", ("mkfs.ext4",), "e2fsprogs", False, "uppers of kind image"),
    ("mmdebstrap", ("mmdebstrap",), "mmdebstrap", False, "builds Debian bases"),
    ("fsck.erofs", ("fsck.erofs",), "erofs-utils", False, "checks metadata images in tests"),
)


def _programs() -> Iterator[Finding]:
    system = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
    for name, places, package, needed, what_for in _PROGRAMS:
        path = next((p for place in places if (p := shutil.which(place, path=system))), None)
        if path is None:
            yield Finding(
                "programs",
                name,
                "missing" if needed else "warning",
                f"not installed ({what_for})",
                f"apt-get install {package}",
                needed,
            )
        else:
            yield Finding("programs", name, "ok", _version(path))


def _version(path: str) -> str:
    """The first line of `--version`, or where the program is."""
    option = "-V" if path.endswith(("mkfs.ext4", "fsck.erofs")) else "--version"
    try:
        done = subprocess.run(
            [path, option], capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return path
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return lines[0][:80] if lines else path


_SYSCTLS: tuple[tuple[str, int, str], ...] = (
    ("fs.mount-max", 100_000, "mounts in one namespace"),
    ("kernel.pid_max", 65_536, "processes and threads"),
    ("kernel.threads-max", 60_000, "threads"),
    ("user.max_user_namespaces", 10_000, "one for each container"),
    ("fs.inotify.max_user_instances", 1024, "watchers of files"),
    ("fs.inotify.max_user_watches", 65_536, "watched files"),
    ("fs.file-max", 1_000_000, "open files of all processes"),
    ("vm.max_map_count", 65_530, "memory mappings of a process"),
)


def _limits() -> Iterator[Finding]:
    for name, least, what in _SYSCTLS:
        path = Path("/proc/sys") / name.replace(".", "/")
        try:
            value = int(path.read_text())
        except (OSError, ValueError):
            yield Finding("limits", name, "warning", f"cannot be read ({what})")
            continue
        enough = value >= least
        yield Finding(
            "limits",
            name,
            "ok" if enough else "warning",
            f"{value} ({what})",
            "" if enough else f"sysctl {name}={least} for many containers",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard >= 65_536 or hard == resource.RLIM_INFINITY
    yield Finding(
        "limits",
        "open files",
        "ok" if enough else "warning",
        f"{soft} soft, {hard} hard (of one process)",
        "" if enough else "raise nofile in /etc/security/limits.conf or the service's unit",
    )


def _space(node: Node, scratch: Path) -> Iterator[Finding]:
    disk = os.statvfs(scratch)
    free = disk.f_bavail * disk.f_frsize
    least = max(node.settings.cache_min_free * 2, 1 << 30)
    yield Finding(
        "disk",
        str(node.dirs.data),
        "ok" if free >= least else "warning",
        f"{free >> 20} MiB free for cache and containers, the cache may take "
        f"{node.settings.cache_options()['max_bytes'] >> 20} MiB",
        "" if free >= least else "free space, or set data_dir to a larger disk",
    )


def _store(node: Node) -> Finding:
    url = node.settings.store_url
    if not node.settings.store and not Path(url.removeprefix("file:")).exists():
        return Finding("store", url, "warning", "not made yet", "dsec store init")
    try:
        store = node.settings.open_store(_STORE_S)
    except DsecfsError as e:
        return Finding("store", url, "missing", e.message, e.hint or "check its address", True)
    with contextlib.closing(store):
        error = _try(lambda: next(iter(store.list("refs/")), None))
        if error is not None:
            hint = error.hint or "check its address"
            return Finding("store", url, "missing", error.message, hint, True)
        error = _try(lambda: check_store(store))
    if isinstance(error, StoreDenied):
        return Finding("store", url, "ok", "answers; this node may not write to it")
    if error is not None:
        return Finding("store", url, "missing", error.message, error.hint or "use another store")
    return Finding("store", url, "ok", "answers, and keeps what dsec relies on (docs/stores.md)")


def _daemon(node: Node) -> Iterator[Finding]:
    try:
        client = node.fs_client()
        lease = client.chores().get("lease", {}) if client is not None else {}
    except DsecfsError as e:
        hint = "dsec fs stop --force, then dsec fs start"
        yield Finding("daemon", "dsec fs", "warning", e.message, hint)
        return
    if client is None:
        found = "does not run; it is started when it is needed"
        yield Finding("daemon", "dsec fs", "ok", found)
        return
    yield Finding("daemon", "dsec fs", "ok", f"serves {node.dirs.fs}")
    if lease.get("error"):
        yield Finding(
            "daemon",
            "lease",
            "warning",
            f"layers in use here are not protected from collection: {lease['error']}",
            "let this node write below leases/ (docs/stores.md)",
        )
    elif lease.get("state") == "held":
        yield Finding("daemon", "lease", "ok", f"keeps {lease['layers']} layers in the store")


def _try(work: Callable[[], object]) -> DsecfsError | None:
    try:
        work()
    except DsecfsError as e:
        return e
    return None
