"""Where everything of one node lies on the local disk. Owns paths, creates directories.

Two roots. `data` outlives a reboot (default /var/lib/dsec); `run` does not count after
one (default /run/dsec): what it says is about mounts and processes of this boot.

    data/blobs/<hex>/       chunk cache of one blob: chunks, layout, data, present, used, pins/
    data/gone/              what is being removed; empty but for what a crash left
    data/cache.stats        counters of the cache; data/evict.lock: who evicts
    data/heads/<hex>        verified layer heads, as the store has them; .ok says in which boot
    data/meta/<hex>.erofs   EROFS metadata images, ready to mount
    data/refs/              refs and environments that were resolved once (they never change)
    data/uppers/<sandbox>/  upper and work directory of a sandbox
    data/traces/<env>/      access traces that could not be stored
    run/fs                  mount point of the node's FUSE file system
    run/fs.sock             control socket of its worker
    run/fs.log              log of its supervisors and workers
    run/trees/<id>.json     composed trees that run/fs/trees shows
    run/traces/<id>.json    recordings that run/fs/traced shows; <id>.log the reads, <id>.claim
    run/mounts/<hash>/      sockets, locks and logs of mounts of single trees
    run/ns/mnt              the pinned mount namespace in which crun runs
    run/layers/<hex>/<gen>/ EROFS mounts, one per layer and generation
    run/sandboxes/<id>/     bundle, root mount point and record of one `dsec run`
    run/uids/               uid ranges in use
    data/edge.db            journal of the edge
    data/sandboxes/<id>/    what the edge keeps of a sandbox: execs/<exec>/ has a command's output
    run/edge.sock           the edge's API
    run/keeper.sock         the keeper: who owns the commands in sandboxes
    run/gate.sock           the gate: the network of sandboxes
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from dsecfs.errors import BadInput
from dsecfs.layers.digest import Digest


def boot_id() -> str:
    """The kernel's random id of this boot (random(4), /proc/sys/kernel/random/boot_id)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def age_s(found: os.stat_result) -> float:
    """Seconds since a file was last written. A time that lies more than a day ahead says
    nothing (the clock was wrong then): such a file is old."""
    age = time.time() - found.st_mtime
    return age if age > -86400 else float("inf")


@dataclass(frozen=True, slots=True)
class NodeDirs:
    """Paths under the two roots. Every method is pure; `create` makes directories."""

    data: Path
    run: Path

    @staticmethod
    def default() -> NodeDirs:
        """/var/lib/dsec and /run/dsec for root, XDG directories for everybody else."""
        if os.geteuid() == 0:
            return NodeDirs(Path("/var/lib/dsec"), Path("/run/dsec"))
        home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
        run = os.environ.get("XDG_RUNTIME_DIR")
        place = Path(run, "dsec") if run else Path(f"/tmp/dsec-{os.geteuid()}")
        return NodeDirs(Path(home, "dsec"), place)

    def create(self) -> None:
        """Make both roots, private to their owner. BadInput if one is somebody else's (anybody
        can make a directory in /tmp) or anybody may write to it."""
        for path in (self.data, self.run):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
            owners = {found.st_uid, path.lstat().st_uid}
            if not owners <= {0, os.geteuid()} or found.st_mode & stat.S_IWOTH:
                raise BadInput(
                    f"{path}: others can write there",
                    hint="it must be a directory of your own, or name another one (dsec config)",
                )

    @property
    def blobs(self) -> Path:
        return self.data / "blobs"

    def blob(self, blob: Digest) -> Path:
        return self.blobs / blob

    @property
    def gone(self) -> Path:
        return self.data / "gone"

    def head(self, layer: Digest) -> Path:
        return self.data / "heads" / layer

    def meta(self, layer: Digest) -> Path:
        return self.data / "meta" / f"{layer}.erofs"

    @property
    def refs(self) -> Path:
        return self.data / "refs"

    @property
    def kept_traces(self) -> Path:
        return self.data / "traces"

    @property
    def uppers(self) -> Path:
        return self.data / "uppers"

    @property
    def fs(self) -> Path:
        return self.run / "fs"

    @property
    def control(self) -> Path:
        return self.run / "fs.sock"

    @property
    def trees(self) -> Path:
        return self.run / "trees"

    @property
    def traces(self) -> Path:
        return self.run / "traces"

    @property
    def layers(self) -> Path:
        return self.run / "layers"

    @property
    def namespace(self) -> Path:
        return self.run / "ns" / "mnt"

    @property
    def sandboxes(self) -> Path:
        return self.run / "sandboxes"

    @property
    def uids(self) -> Path:
        return self.run / "uids"

    @property
    def journal(self) -> Path:
        return self.data / "edge.db"

    def kept(self, sandbox: str) -> Path:
        """What the edge keeps of a sandbox until it is removed."""
        return self.data / "sandboxes" / sandbox

    def exec(self, sandbox: str, exec_id: str) -> Path:
        return self.kept(sandbox) / "execs" / exec_id

    @property
    def edge(self) -> Path:
        return self.run / "edge.sock"

    @property
    def keeper(self) -> Path:
        return self.run / "keeper.sock"

    @property
    def gate(self) -> Path:
        return self.run / "gate.sock"
