"""Walks of an upper: some while the sandbox runs, the last while it stands still.

    Copier.look()       a walk while the sandbox runs: sets data aside, forgives what changes
    Copier.settle()     the last, frozen: stats every file, and copies again what changed
    read_still()        one walk of a copy that nothing changes: data goes to the sink at once

What must hold:
- a file that the last walk takes as it was set aside has not changed since: its times, size and
  inode are those from before it was read, it was not written just then (times have a
  resolution), and its pages were clean, so that a store through a mapping changed its times;
- nothing is opened through a symbolic link, nor outside the upper (openat2), only regular files
  are read, and nothing is written: the sandbox changes all of it at will;
- every walk ends: by `check`, by the number of files a file system has, by the bytes it can hold.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from dsec_runtime.errors import SnapshotFailed
from dsec_runtime.snapshots.model import Scrub
from dsec_runtime.snapshots.scrub import SCANNED, Report, Rule, Rules
from dsec_runtime.snapshots.spool import Kept, Spool
from dsecfs.errors import DsecfsError
from dsecfs.kernel.syscalls import (
    RESOLVE_BENEATH,
    RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_SYMLINKS,
    RESOLVE_NO_XDEV,
    openat2,
    sync_pages,
)
from dsecfs.layers.sources.base import DataSink, Limits, SourceTree, show
from dsecfs.layers.sources.upper import IdRange, UpperReader
from dsecfs.layers.tree import Extent, Inode

RACY_NS = 100_000_000
"""A file that changed so shortly before it was looked at may change again without a trace: the
kernel's file times go by the timer tick, 10 ms at most."""
_INSIDE = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MAX_PATH = 4000
"""Longest path that one openat2 takes (PATH_MAX is 4096)."""
_ESCAPED = b"user.overlay.overlay."

Check = Callable[[], None]
"""Called again and again; raises when the work shall end."""


class Moved(Exception):
    """What is being read changed. A walk of a running sandbox goes on with the next file."""


@dataclass(slots=True)
class _Known:
    """What an earlier walk found under an inode number."""

    identity: tuple[int, ...]
    inode: Inode
    kept: Kept | None
    secret: Rule | None
    """Why it must not be published, by what is in it."""


def _identity(st: os.stat_result) -> tuple[int, ...]:
    # The change time is set by the kernel alone, and every change of content, attributes or
    # owner sets it.
    return (st.st_ino, st.st_mode, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_nlink)


class _Secret(Exception):
    """The file in hand has something in it that must not get out."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.text)
        self.rule = rule


class _Reader(UpperReader):
    """One walk; what differs between them is in the subclasses."""

    def __init__(
        self, fd: int, sink: DataSink, rules: Rules, limits: Limits, ids: IdRange, check: Check
    ) -> None:
        super().__init__(f"/proc/self/fd/{fd}", sink, limits, ids, False, lambda _: check())
        self._rules = rules
        self._check = check
        self._covered: dict[Inode, Rule] = {}
        """Directories of which everything is left out."""
        self._secrets: set[tuple[int, int]] = set()
        """Inodes that must not get out, under whatever name."""
        self._unwanted: set[Inode] = set()
        self._seen_ns = 0
        """When the present entry was listed, or a moment before."""
        self.report = Report()

    def read(self) -> SourceTree:
        tree = super().read()
        self._prune(tree.root)
        return tree

    # What the walk says of what it meets.

    def _label(self) -> str:
        return f"/{show(self._path)}"

    def _fail(self, e: OSError) -> NoReturn:
        raise Moved(f"{self._label()}: {e.strerror}")

    def _changed(self) -> NoReturn:
        raise Moved(f"{self._label()}: it changed while it was read")

    def _attributes(self, inode: Inode, found: dict[bytes, bytes]) -> dict[bytes, bytes]:
        # A mark of the kind that our overlays do not obey, which an earlier snapshot escaped:
        # it is data, and stays as it is instead of gaining an escape with every snapshot.
        escaped = {name: value for name, value in found.items() if name.startswith(_ESCAPED)}
        rest = {name: value for name, value in found.items() if name not in escaped}
        return {**super()._attributes(inode, rest), **escaped}

    # The walk.

    def _open_directory(self, top: int, parts: list[bytes], inode: Inode) -> int | None:
        path = b"/".join(parts)
        if not parts or len(path) > _MAX_PATH:
            return super()._open_directory(top, parts, inode)
        self._path = path
        try:
            fd = openat2(top, path, _DIRECTORY, resolve=_INSIDE)
        except OSError as e:
            self._fail(e)
        try:
            fresh = self._inode(os.fstat(fd), fd)
        except OSError as e:
            os.close(fd)
            self._fail(e)
        except BaseException:
            os.close(fd)
            raise
        inode.mode, inode.uid, inode.gid = fresh.mode, fresh.uid, fresh.gid
        inode.mtime_ns, inode.xattrs, inode.opaque = fresh.mtime_ns, fresh.xattrs, fresh.opaque
        return fd

    def _read_entries(
        self, fd: int, parts: list[bytes], parent: Inode
    ) -> list[tuple[list[bytes], Inode]]:
        later: list[tuple[list[bytes], Inode]] = []
        assert parent.children is not None
        prefix = b"/".join(parts) + b"/" if parts else b""
        covered = self._covered.get(parent)
        for name in sorted(map(os.fsencode, os.listdir(fd))):
            self._check()
            self._path = prefix + name
            self._count(name)
            self._seen_ns = time.time_ns()
            try:
                try:
                    st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    found = self._entry(fd, parts, name, st, covered)
                except OSError as e:
                    self._fail(e)
            except (Moved, DsecfsError) as e:
                self._spoiled(e)
                continue
            if found is not None:
                parent.children[name] = found
                if found.children is not None:
                    later.append(([*parts, name], found))
        return later

    def _entry(
        self, fd: int, parts: list[bytes], name: bytes, st: os.stat_result, covered: Rule | None
    ) -> Inode | None:
        """None: it is left out."""
        rule = covered or (self._rules.match([*parts, name]) if self._rules else None)
        if stat.S_ISDIR(st.st_mode):
            if len(parts) >= self._limits.depth:
                raise SnapshotFailed(
                    f"snapshot: {self._label()}: deeper than {self._limits.depth} directories"
                )
            inode = Inode(st.st_mode, children={})
            if rule is not None:
                self._covered[inode] = rule
            return inode
        if stat.S_ISSOCK(st.st_mode):
            self._notes.add(f"{self._label()}: a socket: left out")
            return None
        if rule is not None and not (stat.S_ISCHR(st.st_mode) and st.st_rdev == 0):
            self._leave_out(rule, st)
            return None
        try:
            return self._file(fd, name, st)
        except _Secret as e:
            self._leave_out(e.rule, st)
            return None

    def _leave_out(self, rule: Rule, st: os.stat_result) -> None:
        self.report.add(self._path, rule, st.st_size if stat.S_ISREG(st.st_mode) else 0)
        if rule.secret and st.st_nlink > 1:
            self._secrets.add((st.st_dev, st.st_ino))

    def _spoiled(self, error: Moved | DsecfsError) -> None:
        """An entry could not be read."""
        raise error

    def _prune(self, root: Inode) -> None:
        """Take out other names of secrets, and directories that are empty because of a rule."""
        unwanted = {self._links[key] for key in self._secrets if key in self._links}
        self._unwanted = unwanted
        if not unwanted and not self._covered:
            return
        # Parents before their children; so backwards, what is in a directory is done before it.
        order = [root]
        for node in order:
            children = node.children or {}
            order.extend(c for c in children.values() if c.children is not None)
        for node in reversed(order):
            assert node.children is not None
            for name, child in list(node.children.items()):
                empty = child in self._covered and not child.children and not child.opaque
                if empty or child in unwanted:
                    del node.children[name]


class _Staging(_Reader):
    """Sets data aside, and takes what an earlier walk set aside when it did not change."""

    def __init__(
        self,
        fd: int,
        spool: Spool,
        known: dict[int, _Known],
        rules: Rules,
        limits: Limits,
        ids: IdRange,
        check: Check,
        *,
        running: bool,
    ) -> None:
        super().__init__(fd, spool, rules, limits, ids, check)
        self._spool = spool
        self._known = known
        self._running = running
        self._data_kept: Kept | None = None
        self.copied = 0
        """Bytes that were set aside by this walk."""
        self.unsettled = 0
        """Bytes of files that changed too shortly before it."""
        self.visited: set[int] = set()
        self.data: dict[Inode, Kept] = {}
        """What was set aside of which file, in the order of the walk."""

    def _file(self, parent: int, name: bytes, listed: os.stat_result) -> Inode:
        key = (listed.st_dev, listed.st_ino)
        if listed.st_nlink > 1 and key in self._links:
            return self._links[key]
        self.visited.add(listed.st_ino)
        identity = _identity(listed)
        known = self._known.get(listed.st_ino)
        if known is not None and known.identity == identity:
            if known.secret is not None:
                raise _Secret(known.secret)
            if listed.st_nlink > 1:
                self._links[key] = known.inode
            if known.kept is not None:
                self.data[known.inode] = known.kept
            return known.inode
        if known is not None:
            del self._known[listed.st_ino]
            if known.kept is not None:
                self._spool.drop(known.kept)
        if self._running and self._seen_ns - listed.st_ctime_ns < RACY_NS:
            self.unsettled += listed.st_blocks * 512
            raise Moved(f"{self._label()}: it was changed just now")
        self._data_kept = None
        secret = None
        try:
            inode = super()._file(parent, name, listed)
        except _Secret as e:
            inode, secret = Inode(listed.st_mode), e.rule
        except BaseException:
            self._drop_data()
            raise
        if secret is not None:
            self._drop_data()
        kept = self._data_kept
        self._known[listed.st_ino] = _Known(identity, inode, kept, secret)
        if secret is not None:
            raise _Secret(secret)
        if kept is not None:
            self.data[inode] = kept
        return inode

    def wanted(self) -> dict[Inode, Kept]:
        """The data of what is in the tree, in the order of the walk."""
        return {i: kept for i, kept in self.data.items() if i not in self._unwanted}

    def _drop_data(self) -> None:
        if self._data_kept is not None:
            self._spool.drop(self._data_kept)
            self._data_kept = None

    def _data(self, fd: int, st: os.stat_result) -> tuple[Extent, ...]:
        if self._running:
            sync_pages(fd)
        self._spool.last = None
        try:
            extents = super()._data(fd, st)
        finally:
            # It may be kept, and the file have changed meanwhile.
            self._data_kept = self._spool.last
        kept = self._data_kept
        if kept is not None:
            self.copied += kept.length
            if self._rules.contents and (rule := self._rules.scan(
                self._spool.start_of(kept, SCANNED)
            )):
                raise _Secret(rule)
        return extents

    def _spoiled(self, error: Moved | DsecfsError) -> None:
        if not self._running or isinstance(error, SnapshotFailed):
            raise error

    def _open_directory(self, top: int, parts: list[bytes], inode: Inode) -> int | None:
        try:
            return super()._open_directory(top, parts, inode)
        except (Moved, DsecfsError) as e:
            self._spoiled(e)
            return None


class Copier:
    """Sets aside what an upper holds, by several walks."""

    def __init__(self, fd: int, spool: Spool, rules: Rules, limits: Limits, ids: IdRange) -> None:
        """`fd` is the directory of the upper; the caller keeps it open."""
        self._fd = fd
        self._spool = spool
        self._rules = rules
        self._limits = limits
        self._ids = ids
        self._known: dict[int, _Known] = {}

    def look(self, check: Check) -> int:
        """A walk while the sandbox runs. How many bytes changed since the one before."""
        reader = self._reader(check, running=True)
        reader.read()
        for number in [n for n in self._known if n not in reader.visited]:
            kept = self._known.pop(number).kept
            if kept is not None:
                self._spool.drop(kept)
        return reader.copied + reader.unsettled

    def settle(self, check: Check) -> tuple[SourceTree, dict[Inode, Kept], Report]:
        """The last walk, of a sandbox that stands still: the tree, its data in the spool in
        order, what was left out. Moved if something changes all the same."""
        reader = self._reader(check, running=False)
        tree = reader.read()
        return tree, reader.wanted(), reader.report

    def _reader(self, check: Check, *, running: bool) -> _Staging:
        return _Staging(
            self._fd,
            self._spool,
            self._known,
            self._rules,
            self._limits,
            self._ids,
            check,
            running=running,
        )


def read_still(fd: int, sink: DataSink, limits: Limits, ids: IdRange, check: Check) -> SourceTree:
    """The tree of an upper that nothing changes any more, all of it. (With rules a copier is
    needed: what has to be left out under all its names must not reach the sink before.)"""
    return _Reader(fd, sink, Rules(Scrub()), limits, ids, check).read()
