"""What a sandbox has mounted besides its tree: layers, scratch space, paths of the node.

What must hold: paths of the node come from the allow list (node_host_mounts) after symlinks were
resolved, and what is opened is what was checked; everything is nosuid and nodev.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsec_runtime.edge.model import Mount
from dsec_runtime.run import Slot
from dsecfs.errors import BadInput, Unsupported
from dsecfs.kernel.syscalls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    closing,
    idmap_mount,
    mount_setattr,
    open_tree,
)
from dsecfs.layers.local import LocalLayer
from dsecfs.layers.names import LAYER_KINDS
from dsecfs.mount import Holder, LayerMounts
from dsecfs.node import Node

_FORBIDDEN = ("/", "/proc", "/sys", "/dev")


@dataclass(slots=True)
class Extra:
    """Mounts to attach below the bundle, and how crun shall bind them."""

    attach: list[tuple[int, Path]] = field(default_factory=list)
    config: list[dict[str, Any]] = field(default_factory=list)


def local_layer(node: Node, name: str, platform: str) -> LocalLayer:
    """The layer that a mount names, on this node. Errors as of `Catalog` and `LocalLayers`."""
    layer = node.local.ensure(node.catalog.resolve(name, LAYER_KINDS).digest)
    wanted = platform or node.platform
    if layer.manifest.platform not in (wanted, "any"):
        raise BadInput(f"mount {name[:80]}: it is for {layer.manifest.platform}, not for {wanted}")
    return layer


def open_mounts(
    wanted: Sequence[Mount],
    layers: Mapping[str, LocalLayer],
    *,
    mounts: LayerMounts,
    holder: Holder,
    slot: Slot,
    place: Path,
    allowed: Sequence[str],
    undo: contextlib.ExitStack,
) -> Extra:
    """Descriptors of unattached mounts (closed by `undo`) and their part of config.json."""
    extra = Extra()
    for number, mount in enumerate(wanted):
        _check_target(mount.at)
        if mount.scratch_mb:
            options = ["nosuid", "nodev", "mode=1777", f"size={mount.scratch_mb}m"]
            extra.config.append(
                {"destination": mount.at, "type": "tmpfs", "source": "tmpfs", "options": options}
            )
            continue
        if slot.userns is None:
            raise Unsupported(
                f"mount {mount.at}: not possible in FUSE mode", hint="use a scratch mount"
            )
        if mount.layer:
            path = mounts.acquire(layers[mount.layer], holder)
            fd = mounts.clone([path], slot.userns)[0]
            read_only = True
        else:
            fd = _host(mount, allowed, slot.userns)
            read_only = mount.read_only
        undo.callback(os.close, fd)
        at = place / f"mount-{number}"
        at.mkdir(mode=0o700)
        extra.attach.append((fd, at))
        options = ["bind", "nosuid", "nodev", "ro" if read_only else "rw"]
        extra.config.append(
            {"destination": mount.at, "type": "bind", "source": str(at), "options": options}
        )
    return extra


def _check_target(at: str) -> None:
    path = os.path.normpath(at)
    if path in _FORBIDDEN or path.startswith(("/proc/", "/sys/", "/dev/")) or ".." in at.split("/"):
        raise BadInput(f"mount at {at[:80]!r}: not possible there", hint="e.g. /data")


def _host(mount: Mount, allowed: Sequence[str], userns: int) -> int:
    """A path of the node. BadInput if the allow list does not have it."""
    real = os.path.realpath(mount.host)
    if not any(
        real == place or real.startswith(f"{place.rstrip('/')}/")
        for place in map(os.path.realpath, filter(None, allowed))
    ):
        raise BadInput(
            f"mount {mount.host[:80]!r}: this node does not allow it",
            hint="node_host_mounts has the paths that may be mounted",
        )
    try:
        found = os.open(real, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise BadInput(f"mount {mount.host[:80]!r}: {e.strerror}") from None
    with closing(found):
        # Somebody may have exchanged a part of the path since it was resolved.
        if os.readlink(f"/proc/self/fd/{found}") != real:
            raise BadInput(f"mount {mount.host[:80]!r}: it changed while it was mounted")
        fd = open_tree("", at=found)
    try:
        flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
        mount_setattr(fd, flags | (MOUNT_ATTR_RDONLY if mount.read_only else 0))
        idmap_mount(fd, userns)
    except BaseException:
        os.close(fd)
        raise
    return fd
