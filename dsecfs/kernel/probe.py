"""What this kernel can, and which way of mounting is the best here.

What must hold: `probe` leaves nothing behind; it tries things in a private mount namespace
of a thread that ends. `quick_mode` costs under a millisecond and looks only at version
numbers and /proc/filesystems (and has the kernel load a module that is missing there); it
never claims more than `probe` would.

docs/kernels.md has the same facts as a table by kernel version.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dsecfs.errors import DsecfsError
from dsecfs.kernel.loop import attach_loop
from dsecfs.kernel.namespaces import (
    IdRange,
    NamespaceThread,
    new_private_namespace,
    user_namespace,
)
from dsecfs.kernel.syscalls import (
    MOUNT_ATTR_NODEV,
    FsContext,
    closing,
    idmap_mount,
    move_mount,
    open_tree,
    umount,
)

Mode = Literal["kernel", "loop", "fuse"]
CgroupLayout = Literal["v2", "v1", "hybrid", "none"]

EROFS_FILE_VERSION = (6, 12)
"""First Linux whose EROFS mounts plain files (CONFIG_EROFS_FS_BACKED_BY_FILE)."""
LOOP_VERSION = (5, 19)
"""First Linux whose EROFS can be id-mapped and whose overlayfs takes such layers."""
OVERLAY_APPEND_VERSION = (6, 8)
"""First Linux whose overlayfs takes layers one by one (`lowerdir+`; overlayfs.rst)."""
FUSE_RESEND_MINOR = 40
"""FUSE protocol 7.40 (Linux 6.9) can ask unanswered requests again."""


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """Facts found out by `probe`. `reasons` says in one line each why a mode is not there."""

    release: str
    root: bool
    erofs_file: bool
    erofs_loop: bool
    erofs_idmap: bool
    overlay: bool
    overlay_append: bool
    """Overlayfs takes layers one by one (from 6.8), so that there can be hundreds."""
    overlay_detached: bool
    """Overlayfs takes layers that are attached nowhere (from 6.15)."""
    fuse_minor: int | None
    """The kernel's FUSE protocol is 7.this; None without FUSE or without the right to look."""
    userns: bool
    cgroups: CgroupLayout
    cgroup_controllers: tuple[str, ...]
    reasons: dict[str, str] = field(default_factory=dict)
    """Mode ("kernel", "loop", "fuse") or ability -> why it is missing."""

    def best_mode(self) -> Mode | None:
        """The fastest way of mounting that works here; None if none does."""
        can = self.overlay and self.root and self.erofs_idmap
        if self.erofs_file and can:
            return "kernel"
        if self.erofs_loop and can:
            return "loop"
        return "fuse" if self.fuse_minor is not None or os.path.exists("/dev/fuse") else None


def version() -> tuple[int, int]:
    """(major, minor) of the running kernel."""
    match = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def filesystems() -> frozenset[str]:
    """File systems that are built in or loaded (/proc/filesystems)."""
    return frozenset(
        line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()
    )


def quick_mode() -> tuple[Mode, str]:
    """The mode to use and the reason, without trying any mount."""
    here = os.uname().release
    if os.geteuid() != 0:
        return "fuse", "not root: kernel mounts need root"
    known = filesystems()
    missing = [n for n in ("erofs", "overlay") if n not in known and not _loads(n)]
    if missing:
        return "fuse", f"Linux {here} has no {' and no '.join(missing)}"
    if version() >= EROFS_FILE_VERSION:
        return "kernel", f"Linux {here} mounts EROFS from files"
    if version() < LOOP_VERSION:
        return "fuse", f"Linux {here} is older than 5.19, it cannot shift owners of EROFS mounts"
    if not os.path.exists("/dev/loop-control"):
        return "fuse", f"Linux {here} mounts EROFS from block devices only, and has no loop driver"
    return "loop", f"Linux {here} mounts EROFS from loop devices only (files from 6.12)"


def _loads(fstype: str) -> bool:
    """Whether the kernel knows a file system after all: asked for it, it loads the module."""
    try:
        FsContext(fstype, f"look for {fstype}").close()
    except DsecfsError:
        return False
    return True


def cgroup_layout() -> tuple[CgroupLayout, tuple[str, ...]]:
    """How control groups are mounted at /sys/fs/cgroup, and the controllers that limit."""
    base = Path("/sys/fs/cgroup")
    try:
        v2 = (base / "cgroup.controllers").read_text().split()
        return "v2", tuple(v2)
    except OSError:
        pass
    names = {"memory", "pids", "cpu", "cpuset", "blkio", "freezer", "devices", "cpuacct"}
    v1 = tuple(sorted(p.name for p in base.glob("*") if p.name in names and p.is_dir()))
    if not v1:
        return "none", ()
    return ("hybrid" if (base / "unified" / "cgroup.procs").exists() else "v1"), v1


def probe(scratch: Path = Path("/var/tmp")) -> KernelInfo:
    """Try everything that matters. Takes some milliseconds. Never raises for what is missing.

    `scratch` is a directory on the disk that will hold the metadata images: EROFS cannot
    mount files of every file system (it cannot those of tmpfs).
    """
    reasons: dict[str, str] = {}
    found: dict[str, bool] = {}
    root = os.geteuid() == 0
    fuse_minor: int | None = None
    if root:
        try:
            thread = NamespaceThread(new_private_namespace, "probe")
        except DsecfsError as e:
            reasons["kernel"] = reasons["loop"] = str(e)
        else:
            try:
                fuse_minor = thread.call(lambda: _try_mounts(scratch, found, reasons))
            except DsecfsError as e:
                reasons["kernel"] = str(e)
            finally:
                thread.close()
    else:
        reasons["kernel"] = reasons["loop"] = "not root: kernel mounts need root"
    if not os.path.exists("/dev/fuse"):
        reasons["fuse"] = "no /dev/fuse: load the module fuse"
    layout, controllers = cgroup_layout()
    return KernelInfo(
        release=os.uname().release,
        root=root,
        erofs_file=found.get("erofs_file", False),
        erofs_loop=found.get("erofs_loop", False),
        erofs_idmap=found.get("erofs_idmap", False),
        overlay=found.get("overlay", False),
        overlay_append=found.get("overlay_append", False),
        overlay_detached=found.get("overlay_detached", False),
        fuse_minor=fuse_minor,
        userns=_userns(reasons),
        cgroups=layout,
        cgroup_controllers=controllers,
        reasons=reasons,
    )


def _userns(reasons: dict[str, str]) -> bool:
    try:
        limit = int(Path("/proc/sys/user/max_user_namespaces").read_text())
    except (OSError, ValueError):
        reasons["userns"] = "this kernel has no user namespaces (CONFIG_USER_NS)"
        return False
    if limit == 0:
        reasons["userns"] = "user.max_user_namespaces is 0"
    return limit > 0


def _attempt(
    key: str, mode: str, found: dict[str, bool], reasons: dict[str, str], work: Callable[[], None]
) -> None:
    try:
        work()
        found[key] = True
    except (DsecfsError, OSError) as e:
        found[key] = False
        reasons.setdefault(mode, str(e))


def _try_mounts(scratch: Path, found: dict[str, bool], reasons: dict[str, str]) -> int | None:
    """Runs in a private mount namespace, which ends with its thread; so do its mounts."""
    import tempfile  # here, since every command imports this module

    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory("", "dsec-probe-", scratch)))
        image = place / "empty.erofs"
        image.write_bytes(_empty_image())

        def from_file() -> None:
            with FsContext("erofs", "mount EROFS from a file") as fs:
                fs.flag("ro")
                fs.set("source", image)
                lower.append(fs.mount(MOUNT_ATTR_NODEV))

        def from_loop() -> None:
            with (
                closing(attach_loop(image, direct_io=False)) as device,
                FsContext("erofs", "mount EROFS from a loop device") as fs,
            ):
                fs.flag("ro")
                fs.set("source", f"/proc/self/fd/{device}")
                lower.append(fs.mount(MOUNT_ATTR_NODEV))

        lower: list[int] = []
        _attempt("erofs_file", "kernel", found, reasons, from_file)
        _attempt("erofs_loop", "loop", found, reasons, from_loop)
        for fd in lower:
            stack.callback(os.close, fd)
        if lower:
            _attempt("erofs_idmap", "idmap", found, reasons, lambda: _try_idmap(lower[-1]))
        else:
            with FsContext("tmpfs", "mount tmpfs") as fs:
                lower.append(fs.mount(MOUNT_ATTR_NODEV))
            stack.callback(os.close, lower[0])
        _try_overlay(lower[0], place, found, reasons)
        fuse: list[int] = []
        _attempt("fuse", "fuse", found, reasons, lambda: fuse.append(_fuse_minor()))
        return fuse[0] if fuse else None


def _try_idmap(lower: int) -> None:
    with (
        closing(open_tree("", at=lower)) as clone,
        closing(user_namespace(IdRange(1 << 29, 65536))) as userns,
    ):
        idmap_mount(clone, userns)


def _try_overlay(lower: int, place: Path, found: dict[str, bool], reasons: dict[str, str]) -> None:
    second = place / "lower"
    second.mkdir()

    def overlay(first: str, *, one_by_one: bool = True) -> None:
        with (
            closing(os.open(second, os.O_PATH | os.O_CLOEXEC)) as other,
            FsContext("overlay", "mount overlay") as fs,
        ):
            lowers = [first, f"/proc/self/fd/{other}"]
            for name in lowers if one_by_one else [":".join(lowers)]:
                fs.set("lowerdir+" if one_by_one else "lowerdir", name)
            os.close(fs.mount())

    here = f"/proc/self/fd/{lower}"
    _attempt("overlay_detached", "detached", found, reasons, lambda: overlay(here))
    attached = place / "attached"
    attached.mkdir()
    move_mount(lower, attached)
    _attempt("overlay_append", "append", found, reasons, lambda: overlay(here))
    _attempt("overlay", "overlay", found, reasons, lambda: overlay(here, one_by_one=False))
    if not found["overlay"]:
        for mode in ("kernel", "loop"):
            reasons.setdefault(mode, reasons["overlay"])
    umount(attached, detach=True)


def _empty_image() -> bytes:
    # Imported here: dsec run does not probe, and the writer is not needed to mount.
    from dsecfs.layers.erofs.writer import write_erofs
    from dsecfs.layers.tree import directory

    return write_erofs(directory(), [])


def _fuse_minor() -> int:
    """The minor version in the FUSE_INIT request that the kernel sends at mount.

    struct fuse_in_header is 40 bytes; fuse_init_in starts with major, minor
    (include/uapi/linux/fuse.h). Nothing is answered: closing the device ends it.
    """
    with (
        closing(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)) as device,
        FsContext("fuse", "mount FUSE") as fs,
    ):
        fs.set("source", "dsec-probe")
        fs.set("fd", str(device))
        fs.set("rootmode", "40000")
        fs.set("user_id", "0")
        fs.set("group_id", "0")
        with closing(fs.mount()):
            if not select.select([device], [], [], 2)[0]:
                raise OSError(0, "FUSE sent no INIT request")
            request = os.read(device, 1 << 17)
    minor: int = struct.unpack_from("=II", request, 40)[1]
    return minor
