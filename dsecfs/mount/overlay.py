"""The overlay: layers as lowers, a local upper, one mount.

What must hold:
- every option is explicit, so that a distribution's module parameters change nothing:
  redirect_dir=nofollow (an image may carry `trusted.overlay.redirect`; it must not be
  obeyed), index=off, metacopy=off, xino=on, uuid=null;
- metacopy is off by decision: with it a chown of a large file writes 2 KB instead of a copy,
  but the upper then holds files without data that point at lowers by path, and a snapshot of
  the upper would have to resolve every one of them against layers it may no longer have;
- layers are handed over as descriptors of their own clones, top first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsecfs.kernel.probe import version
from dsecfs.kernel.syscalls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_RDONLY,
    FsContext,
    closing,
    idmap_mount,
    move_mount,
    open_tree,
    umount,
)
from dsecfs.mount.erofs import LAYER_ATTRIBUTES

DETACHED_VERSION = (6, 15)
"""First Linux whose overlayfs takes layers that are attached nowhere."""

UPPER, WORK = "upper", "work"
"""Names of the two directories inside what `overlay_root` gets as `upper`."""

_OPTIONS = (
    ("redirect_dir", "nofollow"),
    ("index", "off"),
    ("metacopy", "off"),
    # Inode numbers are those of the layers, tagged with the layer: stable and one st_dev.
    ("xino", "on"),
    # No `trusted.overlay.uuid` in the upper: it would be in every snapshot.
    ("uuid", "null"),
)


def clone_mounts(paths: Sequence[Path], userns: int | None = None) -> list[int]:
    """Descriptors of clones of the mounts at `paths`, attached nowhere, in the same order.

    With `userns` their owners are shifted by that user namespace's mapping. Runs in the
    namespace the mounts are in.
    """
    clones: list[int] = []
    try:
        for path in paths:
            clones.append(open_tree(path))
            if userns is not None:
                idmap_mount(clones[-1], userns)
    except BaseException:
        for fd in clones:
            os.close(fd)
        raise
    return clones


def overlay_root(
    lowers: Sequence[int],
    upper: int | None,
    *,
    what: str,
    attributes: int = MOUNT_ATTR_NODEV,
    volatile: bool = False,
    attach: Path | None = None,
) -> int:
    """A descriptor of a new overlay, attached nowhere.

    `lowers` are unattached mounts, top first, at least one. `upper` is an unattached mount
    whose root holds the directories `upper` and `work`; None makes a read-only overlay.
    `what` names it in errors. nodev is always part of `attributes`: device nodes in an image
    must not become devices of this machine. `volatile` is for uppers that are thrown away:
    nothing is ever synced, neither by fsync(2) inside nor (the whole disk!) at unmount.

    Linux before 6.15 wants layers that are attached in the calling thread's namespace: there
    (or when `attach` is given) they are attached below `attach` while the overlay is made.
    MountError with the kernel's words.
    """
    attributes |= MOUNT_ATTR_NODEV
    lowers = list(lowers)
    with contextlib.ExitStack() as stack:
        if upper is None:
            attributes |= MOUNT_ATTR_RDONLY
            if len(lowers) == 1:
                # A read-only overlay needs two layers; an empty one below changes nothing.
                lowers.append(stack.enter_context(closing(_empty_mount())))
        if attach is not None:
            for number, fd in enumerate((*lowers, *(() if upper is None else (upper,)))):
                stack.enter_context(_attached(fd, attach / str(number)))
        fs = stack.enter_context(FsContext("overlay", what))
        fs.set("source", "dsec")
        for fd in lowers:
            fs.set("lowerdir+", f"/proc/self/fd/{fd}")
        if upper is not None:
            fs.set("upperdir", f"/proc/self/fd/{upper}/{UPPER}")
            fs.set("workdir", f"/proc/self/fd/{upper}/{WORK}")
            if volatile:
                fs.flag("volatile")
        for key, value in _OPTIONS:
            fs.set(key, value)
        return fs.mount(attributes)


def needs_attached_layers() -> bool:
    """Whether this kernel's overlayfs refuses unattached layers."""
    return version() < DETACHED_VERSION


def _empty_mount() -> int:
    with FsContext("tmpfs", "mount an empty layer") as fs:
        fs.set("size", "4k")
        fs.set("mode", "755")
        return fs.mount(LAYER_ATTRIBUTES)


@contextlib.contextmanager
def _attached(fd: int, point: Path) -> Iterator[None]:
    point.mkdir(mode=0o700, parents=True)
    try:
        move_mount(fd, point)
        try:
            yield
        finally:
            umount(point, detach=True)
    finally:
        point.rmdir()
