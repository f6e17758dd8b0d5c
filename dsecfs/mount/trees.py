"""Composed trees as roots of containers: FUSE mode.

The node's FUSE file system merges the layers and shifts their owners (dsecfs/fuse); what it
shows is the one lower of an overlay. One tree per layers and range of ids, kept when nobody
uses it: its inode numbers, and with them what the kernel has cached of it, are those of the
next container with the same layers and range.

    run/trees/own-<hash>.json           what the tree is made of; makes run/fs/trees/… appear
    run/trees/own-<hash>.refs/<name>    one file per holder: the path of its own record
    run/trees/.lock                     held while any of that changes

What must hold, as for layer mounts: a holder lives as long as the record it names exists; a
tree with holders keeps its description, because a new worker reads it again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsecfs.errors import MountError, NotFound
from dsecfs.fuse.owners import Owners
from dsecfs.fuse.trees import write_tree
from dsecfs.kernel.namespaces import IdRange
from dsecfs.kernel.syscalls import open_tree
from dsecfs.layers.local import LocalLayer
from dsecfs.locks import locked_file
from dsecfs.mount.holders import Holder, add_holder, drop_holder, holders, stale_holders
from dsecfs.nodedirs import NodeDirs

IDLE_KEPT = 128
"""Trees without holders that keep their description."""
_NAME = re.compile(r"(?:rec-[0-9a-f]{16}\.)?own-[0-9a-f]{32}\Z")


class RootTrees:
    """The trees of a node's containers. Safe to use from several threads and processes."""

    def __init__(self, dirs: NodeDirs, *, recording: str = "") -> None:
        """With a `recording` (mount/record.py) trees are its own, and what is read of them is
        written down; the kernel's read-ahead of the node's FUSE file system, too."""
        self._dirs = dirs
        self._prefix = f"{recording}." if recording else ""

    def name(self, layers: Sequence[LocalLayer], ids: IdRange) -> str:
        """What the tree of these layers (top first) with that range of owners is called."""
        text = "\n".join([f"{ids.start} {ids.size}", *(layer.digest for layer in layers)])
        return f"{self._prefix}own-{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def acquire(
        self, name: str, layers: Sequence[LocalLayer], ids: IdRange, holder: Holder
    ) -> int:
        """Describe the tree if it is not there, note that `holder` uses it, and return a
        descriptor of an unattached mount of it. The caller closes it.

        MountError if the node's FUSE file system does not serve it.
        """
        with self._locked():
            refs = self._refs(name)
            refs.mkdir(mode=0o700, exist_ok=True)
            add_holder(refs, holder)
            made = not (self._dirs.trees / f"{name}.json").exists()
            if made:
                self._describe(name, layers, ids)
        if made:
            self.trim()
        return self.open(name)

    def open(self, name: str) -> int:
        """A descriptor of an unattached mount of a tree that is described."""
        path = self._dirs.fs / "trees" / name
        try:
            return open_tree(path)
        except MountError as e:
            if e.errno not in (errno.ENOENT, errno.ENOTCONN, errno.ECONNABORTED):
                raise
            raise MountError(
                f"mount tree {path}: the node's FUSE file system does not show it",
                hint="dsec fs start starts it; its log is run/fs.log",
                errno=e.errno,
            ) from None

    def _describe(self, name: str, layers: Sequence[LocalLayer], ids: IdRange) -> None:
        bottom_up = [layer.digest for layer in reversed(layers)]
        write_tree(self._dirs.trees, name, bottom_up, Owners(ids.start, ids.size))

    def release(self, name: str, holder: str) -> None:
        """`holder` no longer uses a tree. No error if it did not."""
        if _NAME.match(name):
            drop_holder(self._refs(name), holder)

    # -- keeping order -----------------------------------------------------------------

    def recover(self) -> list[str]:
        """Drop holders whose record is gone; their names. Forgets what is idle too long."""
        dropped = []
        with self._locked():
            for name in self._names():
                for ref in stale_holders(self._refs(name)):
                    ref.unlink(missing_ok=True)
                    dropped.append(ref.name)
        self.trim()
        return dropped

    def trim(self, keep: int = IDLE_KEPT) -> int:
        """Forget trees without holders but for the `keep` last used; how many it were."""
        if not self._dirs.trees.is_dir():
            return 0
        with self._locked():
            idle = []
            for name in self._names():
                refs = self._refs(name)
                if not holders(refs):
                    with contextlib.suppress(FileNotFoundError):
                        idle.append((refs.stat().st_mtime, name))
            gone = sorted(idle)[: max(0, len(idle) - keep)]
            for _, name in gone:
                # The holders' directory last: it is what the tree is found by.
                (self._dirs.trees / f"{name}.json").unlink(missing_ok=True)
                self._refs(name).rmdir()
            return len(gone)

    def described(self) -> dict[str, list[str]]:
        """For each tree the names of its holders."""
        return {n: sorted(ref.name for ref in holders(self._refs(n))) for n in self._names()}

    def _refs(self, name: str) -> Path:
        if not _NAME.match(name):
            raise NotFound(f"no tree {name[:80]!r} of a container")
        return self._dirs.trees / f"{name}.refs"

    def _names(self) -> list[str]:
        try:
            found = os.listdir(self._dirs.trees)
        except FileNotFoundError:
            return []
        return sorted(n[:-5] for n in found if n.endswith(".refs") and _NAME.match(n[:-5]))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        place = self._dirs.trees
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked_file(place / ".lock", "trees of containers"):
            yield
