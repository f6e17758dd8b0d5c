"""A composed tree at a directory of the host through FUSE: `dsec mount ENV DIR` without kernel
mounts, also without root.

    run/trees/mnt-<hash>.json     the layers
    run/mounts/<hash>/            state of the mount's daemon: socket, lock, log, and `target`
    run/mounts/<hash>.lock        held while the mount is made, undone or cleared

What must hold: the daemon's own lock says whether the mount lives; whoever finds it free may
clear. The description stays as long as the daemon, whose workers read it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dsecfs.errors import BadInput, Busy, Conflict, NotFound
from dsecfs.fuse.config import mount_state, tree_config
from dsecfs.fuse.control import FsClient
from dsecfs.fuse.daemon import start_daemon, stop_daemon
from dsecfs.fuse.mountpoint import fuse_device, recover_stale
from dsecfs.fuse.trees import read_tree, write_tree
from dsecfs.layers.digest import Digest
from dsecfs.layers.local import LocalLayer
from dsecfs.locks import locked_file, try_lock_file
from dsecfs.nodedirs import NodeDirs

STARTING_S = 30.0
"""Longest wait for a daemon that starts, before it can be told to end."""
_TARGET = "target"


class TreeMount(NamedTuple):
    """A mount of ours."""

    target: Path
    layers: tuple[Digest, ...]
    """Top first."""
    serving: bool
    """False: it is detached, or its processes are gone."""


def mount_tree(
    dirs: NodeDirs, layers: Sequence[LocalLayer], target: Path, store: str, **settings: Any
) -> FsClient:
    """Mount `layers` (top first) as one read-only tree on the directory `target`.

    `store` is the URL their data comes from; `settings` are further fields of FsConfig.
    Conflict if something of ours is mounted there, BadInput if `target` is no directory,
    MountError, DeadlineExceeded.
    """
    state = mount_state(dirs, target)
    with _locked(state):
        # First of all: a dead mount makes every look at its directory fail.
        if _clear_dead(dirs, state) is None:
            raise Conflict(
                f"mount on {target}: an environment is mounted there already",
                hint=f"dsec umount {target}",
            )
        if target.is_symlink() or not target.is_dir():
            raise BadInput(f"mount on {target}: not a directory", hint="make it first")
        if not layers:
            raise BadInput(f"mount on {target}: no layers", hint="name an environment or a layer")
        config = tree_config(dirs, store, _tree(state), target, **settings)
        state.mkdir(mode=0o700, parents=True)
        try:
            (state / _TARGET).write_bytes(os.fsencode(config.mountpoint))
            write_tree(dirs.trees, _tree(state), [layer.digest for layer in reversed(layers)])
            return start_daemon(config)
        except BaseException:
            _clear_dead(dirs, state)
            raise


def umount_tree(dirs: NodeDirs, target: Path, *, mode: str = "refuse") -> None:
    """Undo `mount_tree`. `mode` as for `stop_daemon`. NotFound if nothing of ours is mounted
    there; Busy if its files are in use."""
    state = mount_state(dirs, target)
    if not state.is_dir():
        raise NotFound(
            f"unmount {target}: no environment is mounted there",
            hint="dsec mount shows what is mounted",
        )
    with _locked(state):
        deadline = time.monotonic() + STARTING_S
        # A daemon that lives and does not listen is starting: its maker was killed.
        while not stop_daemon(state, mode=mode) and _clear_dead(dirs, state) is None:
            if time.monotonic() > deadline:
                raise Busy(f"unmount {target}: its daemon is starting", hint="try again")
            time.sleep(0.05)
        _clear_dead(dirs, state)


def mounted_trees(dirs: NodeDirs) -> list[TreeMount]:
    """Mounts of `mount_tree` on this node, dead ones too."""
    found = []
    for state in _states(dirs):
        with contextlib.suppress(NotFound, OSError):
            target = Path(os.fsdecode((state / _TARGET).read_bytes()))
            layers = read_tree(dirs.trees, _tree(state)).layers
            serving = _lives(state) and fuse_device(target) is not None
            found.append(TreeMount(target, layers[::-1], serving))
    return found


def recover_trees(dirs: NodeDirs) -> list[Path]:
    """Clear what mounts left whose processes are gone, dead mount points too. Their targets."""
    cleared = []
    for state in _states(dirs):
        with contextlib.suppress(Busy), _locked(state, wait_s=0):
            target = _clear_dead(dirs, state)
            if target is not None:
                cleared.append(target)
    return cleared


def _tree(state: Path) -> str:
    return f"mnt-{state.name}"


def _states(dirs: NodeDirs) -> list[Path]:
    place = dirs.run.absolute() / "mounts"
    try:
        return sorted(p for p in place.iterdir() if (p / _TARGET).exists())
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def _locked(state: Path, *, wait_s: float = 60.0) -> Iterator[None]:
    state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked_file(state.with_suffix(".lock"), f"mount {state.name}", wait_s=wait_s):
        yield


def _lives(state: Path) -> bool:
    """Whether a process of the mount's daemon lives: all of them hold its lock."""
    try:
        fd = os.open(state / "fs.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _clear_dead(dirs: NodeDirs, state: Path) -> Path | None:
    """Remove everything of a mount that does not live; its target, or the state's own path if
    there was none. None: it lives."""
    lock = -1
    with contextlib.suppress(FileNotFoundError):
        if (held := try_lock_file(state / "fs.lock")) is None:
            return None
        lock = held  # a daemon that is just starting must not begin in what is removed
    try:
        target = state
        with contextlib.suppress(FileNotFoundError):
            target = Path(os.fsdecode((state / _TARGET).read_bytes()))
            recover_stale(target)
        (dirs.trees / f"{_tree(state)}.json").unlink(missing_ok=True)
        if state.is_dir():
            shutil.rmtree(state)
        return target
    finally:
        if lock >= 0:
            os.close(lock)
