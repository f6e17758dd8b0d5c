"""A composed tree at a directory of the host: `dsec mount ENV DIR` in kernel and loop mode.

    run/mounts/<hash>.kernel    the mount's claim: target and layers; the layers' holder record

What must hold: the mount is nosuid and nodev (owners are not shifted, so an image's setuid
programs would be the host's); the claim exists before layers are acquired and goes after
they are released, so a crash at any point is cleared by `recover_mounts`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dsecfs.errors import BadInput, Busy, Conflict, NotFound
from dsecfs.kernel.mountinfo import mount_at, mounts_here
from dsecfs.kernel.syscalls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    closing,
    move_mount,
    open_tree,
    umount,
)
from dsecfs.layers.digest import Digest, parse_digest
from dsecfs.layers.local import LocalLayer
from dsecfs.locks import Claim, read_claim
from dsecfs.mount.holders import Holder
from dsecfs.mount.layers import LayerMounts
from dsecfs.mount.overlay import UPPER, WORK, needs_attached_layers, overlay_root
from dsecfs.nodedirs import NodeDirs

CLAIM_FORMAT = 1
_SUFFIX = ".kernel"


def _place(target: Path) -> Path:
    """The target without symlinks on the way; the last component must not be one."""
    if target.name == "..":
        return Path(os.path.realpath(target))
    return Path(os.path.realpath(target.parent), target.name)


def _claim_path(dirs: NodeDirs, target: Path) -> Path:
    name = hashlib.sha256(os.fsencode(_place(target))).hexdigest()[:16]
    return dirs.run.absolute() / "mounts" / f"{name}{_SUFFIX}"


def _is_mounted(content: dict[str, Any]) -> bool:
    """Whether the mount that a claim speaks of is the one at its target."""
    target, device = content.get("target"), content.get("device")
    if not isinstance(target, str) or not isinstance(device, str):
        return False
    found = mount_at(Path(target))
    return found is not None and found.device == device


@contextlib.contextmanager
def _using(dirs: NodeDirs, mounts: LayerMounts | None) -> Iterator[LayerMounts]:
    if mounts is not None:
        yield mounts
        return
    own = LayerMounts(dirs)
    try:
        yield own
    finally:
        own.close()


def mount_env(
    dirs: NodeDirs,
    layers: Sequence[LocalLayer],
    target: Path,
    *,
    upper: Path | None = None,
    mounts: LayerMounts | None = None,
) -> None:
    """Mount `layers` (top first) as one tree on the directory `target` of the host.

    Read-only, unless `upper` is a directory that takes what is written; it is made if it is
    missing and belongs to the caller. `mounts` says how layers are mounted (default: from
    files). Conflict if something of ours is mounted there, BadInput if `target` is no
    directory, MountError.
    """
    with _using(dirs, mounts) as used:
        _mount_env(used, dirs, layers, target, upper)


def _mount_env(
    mounts: LayerMounts,
    dirs: NodeDirs,
    layers: Sequence[LocalLayer],
    target: Path,
    upper: Path | None,
) -> None:
    if not layers:
        raise BadInput(f"mount on {target}: no layers", hint="name an environment or a layer")
    with closing(_open_target(target)) as place:
        _mount_at(place, mounts, dirs, layers, target, upper)


def _open_target(target: Path) -> int:
    """The directory itself: who may write above it could put a link there before it is used."""
    try:
        fd = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise BadInput(f"mount on {target}: not a directory", hint="make it first") from None
    if os.readlink(f"/proc/self/fd/{fd}") != str(_place(target)):
        os.close(fd)
        raise Conflict(f"mount on {target}: it was moved meanwhile", hint="try again")
    return fd


def _mount_at(
    place: int,
    mounts: LayerMounts,
    dirs: NodeDirs,
    layers: Sequence[LocalLayer],
    target: Path,
    upper: Path | None,
) -> None:
    path = _claim_path(dirs, target)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (stale := Claim.take(path)) is not None:
        if _is_mounted(stale.read()):
            stale.close()
        else:
            _clear(mounts, stale, path)
    content = {
        "format": CLAIM_FORMAT,
        "target": str(_place(target)),
        "layers": [layer.digest for layer in layers],
    }
    try:
        claim = Claim.make(path, content)
    except Conflict:
        raise Conflict(
            f"mount on {target}: an environment is mounted there already",
            hint=f"dsec umount {target}",
        ) from None
    try:
        holder = Holder(path.stem, path)
        clones = mounts.clone([mounts.acquire(layer, holder) for layer in layers])
        with contextlib.ExitStack() as stack:
            for fd in clones:
                stack.callback(os.close, fd)
            top = None if upper is None else stack.enter_context(_upper(upper))
            tree = overlay_root(
                clones,
                top,
                what=f"mount environment on {target}",
                attributes=MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID,
                attach=path.with_suffix(".attach") if needs_attached_layers() else None,
            )
            stack.callback(os.close, tree)
            device = os.fstat(tree).st_dev
            claim.write({**content, "device": f"{os.major(device)}:{os.minor(device)}"})
            move_mount(tree, "", at=place)
    except BaseException:
        _release(mounts, claim)
        raise
    claim.close()


@contextlib.contextmanager
def _upper(path: Path) -> Iterator[int]:
    for part in (path, path / UPPER, path / WORK):
        part.mkdir(mode=0o755, exist_ok=True)
    with closing(open_tree(path)) as fd:
        yield fd


def umount_env(
    dirs: NodeDirs, target: Path, *, detach: bool = False, mounts: LayerMounts | None = None
) -> None:
    """Undo `mount_env`. NotFound if nothing of ours is mounted there; Busy if it is in use
    (with `detach` it leaves the name space now and goes with its last user)."""
    path = _claim_path(dirs, target)
    claim = Claim.take(path)
    if claim is None:
        if path.exists():
            raise Busy(f"unmount {target}: it is being mounted or unmounted", hint="try again")
        raise NotFound(
            f"unmount {target}: no environment is mounted there",
            hint="dsec mount shows what is mounted",
        )
    try:
        if _is_mounted(claim.read()):
            umount(_place(target), detach=detach)
    except BaseException:
        claim.close()
        raise
    with _using(dirs, mounts) as used:
        _release(used, claim)


def mounted_envs(dirs: NodeDirs) -> dict[Path, list[Digest]]:
    """Targets of `mount_env` on this node, each with its layers, top first."""
    found = {}
    for path in _claims(dirs):
        content = read_claim(path)
        with contextlib.suppress(KeyError, TypeError, BadInput):
            found[Path(content["target"])] = [parse_digest(d) for d in content["layers"]]
    return found


def recover_mounts(dirs: NodeDirs, *, mounts: LayerMounts | None = None) -> list[Path]:
    """Release the layers of mounts that are gone (unmounted by others, lost in a crash).

    Returns their claims' paths. Live mounts are left alone.
    """
    cleared = []
    with contextlib.ExitStack() as stack:
        for path in _claims(dirs):
            claim = Claim.take(path)
            if claim is None or _is_mounted(claim.read()):
                if claim is not None:
                    claim.close()
                continue
            mounts = stack.enter_context(_using(dirs, mounts))
            _clear(mounts, claim, path)
            cleared.append(path)
    return cleared


def _claims(dirs: NodeDirs) -> list[Path]:
    place = dirs.run.absolute() / "mounts"
    try:
        return sorted(place / name for name in os.listdir(place) if name.endswith(_SUFFIX))
    except FileNotFoundError:
        return []


def _clear(mounts: LayerMounts, claim: Claim, path: Path) -> None:
    """Release a claim we hold whose mount is gone."""
    # Older kernels: layers that were attached for a moment when its maker died.
    attach = path.with_suffix(".attach")
    for found in reversed(mounts_here()):
        if found.point.is_relative_to(attach):
            umount(found.point, detach=True)
    if attach.is_dir():
        for child in attach.iterdir():
            child.rmdir()
        attach.rmdir()
    _release(mounts, claim)


def _release(mounts: LayerMounts, claim: Claim) -> None:
    for layer in claim.read().get("layers", []):
        mounts.release(parse_digest(layer), claim.path.stem)
    claim.release()
