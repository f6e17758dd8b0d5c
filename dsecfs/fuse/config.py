"""What one FUSE mount is told at its start. Plain data, passed as JSON to the daemon."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dsecfs.errors import BadInput
from dsecfs.nodedirs import NodeDirs

DEFAULT_ENTRY = "dsecfs.fuse.worker:main"
CGROUP = "/dsec/fs"


@dataclass(frozen=True)
class FsConfig:
    """Settings of one mount. All paths absolute."""

    data: str
    """NodeDirs.data: cache and metadata."""
    run: str
    """NodeDirs.run: `trees/` and `traces/` are read here."""
    state: str
    """Directory of this mount's fs.sock, fs.lock and fs.log."""
    mountpoint: str
    store: str
    """URL of the store that blobs come from."""
    tree: str = ""
    """Serve only run/trees/<tree>.json, as the root; "" serves the whole node mount."""
    allow_other: bool = True
    cache: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chunk cache."""
    housekeeping: dict[str, Any] = field(default_factory=dict)
    """What the worker does beside serving: settings of `fuse.chores.Chores`."""
    read_ahead_kib: int = 1024
    """Read-ahead of files in the mount; needs root to count. A FUSE request holds at most
    1 MiB (FUSE_MAX_MAX_PAGES is 256)."""
    request_limit_s: float = 120.0
    """A request that takes longer is answered with EIO."""
    stuck_s: float = 20.0
    """A worker with work and no sign of life for so long is ended."""
    supervisor_stuck_s: float = 30.0
    """The standby ends an active supervisor without a sign of life for so long."""
    drain_s: float = 15.0
    """How long a worker that is replaced may finish requests."""
    start_s: float = 60.0
    """How long a worker may take until it serves."""
    log_bytes: int = 4 << 20
    """Size at which fs.log becomes fs.log.1."""
    cgroup: str = CGROUP
    """Control group of the daemon's processes, if root starts it detached: what ends or limits
    the group of whoever started it does not reach them. "" leaves them where they are."""
    no_resend: bool = False
    """Behave as on a kernel without FUSE_NOTIFY_RESEND."""
    entry: str = DEFAULT_ENTRY
    """module:function that serves, imported in the worker."""

    @property
    def dirs(self) -> NodeDirs:
        return NodeDirs(Path(self.data), Path(self.run))

    @property
    def control(self) -> Path:
        return Path(self.state, "fs.sock")

    @property
    def lock(self) -> Path:
        return Path(self.state, "fs.lock")

    @property
    def log(self) -> Path:
        return Path(self.state, "fs.log")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> FsConfig:
        """Raises BadInput for unknown or missing keys."""
        try:
            value = json.loads(text)
        except ValueError as e:
            raise BadInput(f"FUSE daemon: its settings are not JSON: {e}") from None
        known = {f.name: f for f in fields(FsConfig)}
        if not isinstance(value, dict) or not set(value) <= set(known):
            raise BadInput("FUSE daemon: its settings have unknown keys")
        try:
            return FsConfig(**value)
        except TypeError as e:
            raise BadInput(f"FUSE daemon: its settings are incomplete: {e}") from None


def node_config(dirs: NodeDirs, store: str, **settings: Any) -> FsConfig:
    """The node's one mount at run/fs. `settings` are further fields of FsConfig."""
    settings.setdefault("allow_other", os.geteuid() == 0)
    return FsConfig(
        data=str(dirs.data.absolute()),
        run=str(dirs.run.absolute()),
        state=str(dirs.run.absolute()),
        mountpoint=str(dirs.fs.absolute()),
        store=store,
        **settings,
    )


def _place(mountpoint: Path) -> Path:
    return Path(os.path.realpath(mountpoint.parent), mountpoint.name)


def mount_state(dirs: NodeDirs, mountpoint: Path) -> Path:
    """Directory of the socket, lock and log of a single tree's mount at `mountpoint`."""
    name = hashlib.sha256(os.fsencode(_place(mountpoint))).hexdigest()[:16]
    return dirs.run.absolute() / "mounts" / name


def tree_config(
    dirs: NodeDirs, store: str, tree: str, mountpoint: Path, **settings: Any
) -> FsConfig:
    """A mount of one composed tree at `mountpoint`, with a daemon of its own."""
    settings.setdefault("allow_other", os.geteuid() == 0)
    return FsConfig(
        data=str(dirs.data.absolute()),
        run=str(dirs.run.absolute()),
        state=str(mount_state(dirs, mountpoint)),
        mountpoint=str(_place(mountpoint)),
        store=store,
        tree=tree,
        **settings,
    )
