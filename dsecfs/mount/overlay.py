"""The overlay: layers as lowers, a local upper, one mount.

What must hold:
- every option is explicit, so that a distribution's module parameters change nothing:
  redirect_dir=nofollow (an image may carry `trusted.overlay.redirect`; it must not be
  obeyed), index=off, metacopy=off, xino=on, uuid=null;
- metacopy is off by decision: with it a chown of a large file writes 2 KB instead of a copy,
  but the upper then holds files without data that point at lowers by path, and a snapshot of
  the upper would have to resolve every one of them against layers it may no longer have;
- layers are handed over as descriptors of their own clones, top first, and named by them
  (/proc/self/fd/N): no path of ours or of a user ever stands in an option, so there is nothing
  to escape in the classic `lowerdir=a:b:c` of older kernels, and it stays short.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsecfs.errors import MountError
from dsecfs.kernel.probe import OVERLAY_APPEND_VERSION, version
from dsecfs.kernel.syscalls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_RDONLY,
    FsContext,
    closing,
    idmap_mount,
    mount,
    move_mount,
    open_tree,
    umount,
)
from dsecfs.mount.erofs import LAYER_ATTRIBUTES

DETACHED_VERSION = (6, 15)
"""First Linux whose overlayfs takes layers that are attached nowhere."""
_UUID_VERSION = (6, 6)
"""First Linux that knows uuid=null, and that would otherwise mark an upper."""
_PAGE = 4096
"""Options of mount(2) have to fit in, with their NUL, whatever the page size is."""

_SOURCE = "dsec"
UPPER, WORK = "upper", "work"
"""Names of the two directories inside what `overlay_root` gets as `upper`."""

_OPTIONS = (
    ("redirect_dir", "nofollow"),
    ("index", "off"),
    ("metacopy", "off"),
    # Inode numbers are those of the layers, tagged with the layer: stable and one st_dev.
    ("xino", "on"),
)
_NO_UUID = ("uuid", "null")
"""No `trusted.overlay.uuid` in the upper: it would be in every snapshot."""


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
    Linux before 6.8 takes about 200 layers at most. MountError with the kernel's words.
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
            stack.callback(_remove_if_empty, attach)
            for number, fd in enumerate((*lowers, *(() if upper is None else (upper,)))):
                stack.enter_context(_attached(fd, attach / str(number)))
        options: list[tuple[str, str]] = []
        if upper is not None:
            options.append(("upperdir", f"/proc/self/fd/{upper}/{UPPER}"))
            options.append(("workdir", f"/proc/self/fd/{upper}/{WORK}"))
            if volatile:
                options.append(("volatile", ""))
        options += _OPTIONS
        if version() >= _UUID_VERSION:
            options.append(_NO_UUID)
        names = [f"/proc/self/fd/{fd}" for fd in lowers]
        if attach is not None and not takes_layers_one_by_one():
            return _classic(names, options, what, attributes, attach / "tree")
        with FsContext("overlay", what) as fs:
            fs.set("source", _SOURCE)
            for name in names:
                fs.set("lowerdir+", name)
            for key, value in options:
                if value:
                    fs.set(key, value)
                else:
                    fs.flag(key)
            return fs.mount(attributes)


def _classic(
    lowers: Sequence[str],
    options: Sequence[tuple[str, str]],
    what: str,
    attributes: int,
    point: Path,
) -> int:
    """The overlay by mount(2), attached at `point` for a moment: before Linux 6.8, fsconfig(2)
    takes all layers in one value, and no value longer than 255 bytes."""
    words = [("lowerdir", ":".join(lowers)), *options]
    data = ",".join(f"{key}={value}" if value else key for key, value in words)
    if len(data) >= _PAGE:
        raise MountError(
            f"{what}: the names of {len(lowers)} layers do not fit in one page",
            hint="use fewer layers, or Linux 6.8, which takes them one by one",
        )
    point.mkdir(mode=0o700, parents=True)
    try:
        # These attributes have the same numbers as the flags of mount(2).
        try:
            mount(_SOURCE, point, "overlay", attributes, data)
        except MountError as e:
            raise MountError(f"{what}: {os.strerror(e.errno)}", errno=e.errno) from None
        try:
            return open_tree(point)
        finally:
            umount(point, detach=True)
    finally:
        point.rmdir()


def takes_layers_one_by_one() -> bool:
    """Whether this kernel's overlayfs knows `lowerdir+`."""
    return version() >= OVERLAY_APPEND_VERSION


def needs_attached_layers() -> bool:
    """Whether this kernel's overlayfs refuses unattached layers."""
    return version() < DETACHED_VERSION


def _empty_mount() -> int:
    with FsContext("tmpfs", "mount an empty layer") as fs:
        fs.set("size", "4k")
        fs.set("mode", "755")
        return fs.mount(LAYER_ATTRIBUTES)


def _remove_if_empty(place: Path) -> None:
    with contextlib.suppress(OSError):
        place.rmdir()


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
