"""Source: a tar archive, plain or compressed, or one layer of an OCI image.

What must hold: the archive is read once, front to back, and never unpacked; hard links are
shared `Inode` objects; `.wh.` names become whiteouts and opaque marks only in layers; the
tree equals what `tar -x` as root into an empty directory would give, except where container
runtimes agree on something else:
- a parent that is a symbolic link is followed, as in a chroot; a directory entry over a link
  or file, and anything over a directory, replaces it;
- `a/../b` is `b`; a path or link target that leaves the root is refused, not shortened;
- entries of unknown type are refused, not written as files.
Attributes: user, trusted, security and POSIX ACLs are kept; `overlay.*` marks are escaped.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from dsecfs.errors import BadInput, UnsafeArchive
from dsecfs.layers.sources.acl import acl_from_text
from dsecfs.layers.sources.base import (
    DEFAULT_LIMITS,
    ByteStream,
    DataSink,
    Limits,
    Notes,
    Segment,
    SourceTree,
    Widened,
    align_segments,
    keep_xattrs,
    show,
    show_text,
)
from dsecfs.layers.sources.build import TreeBuilder
from dsecfs.layers.sources.decompress import decompressed, is_compressed
from dsecfs.layers.sources.streams import Counting, Progress, ReadAhead
from dsecfs.layers.sources.tarformat import BLK, CHR, DIR, FIFO, LINK, REG, SYM, TarEntry, TarReader
from dsecfs.layers.tree import Extent, Inode, walk

_TYPES: Final = {
    REG: stat.S_IFREG,
    SYM: stat.S_IFLNK,
    CHR: stat.S_IFCHR,
    BLK: stat.S_IFBLK,
    DIR: stat.S_IFDIR,
    FIFO: stat.S_IFIFO,
}

WHITEOUT: Final = b".wh."
WHITEOUT_META: Final = b".wh..wh."
OPAQUE: Final = b".wh..wh..opq"
"""OCI image specification v1.1, "Image Layer Filesystem Changeset", section "Whiteouts"."""

MAX_MAJOR, MAX_MINOR = 0xFFF, 0xFFFFF
"""Linux has 12 and 20 bits for them (include/linux/kdev_t.h)."""


def read_tar_file(
    path: str,
    sink: DataSink,
    *,
    whiteouts: bool = False,
    limits: Limits = DEFAULT_LIMITS,
    progress: Progress | None = None,
) -> SourceTree:
    """The tree of the archive at `path` ("-" is standard input), whatever its compression.

    `progress` counts compressed bytes. Raises OSError for the path itself, otherwise as
    `read_tar`.
    """
    what = "standard input" if path == "-" else f"archive {show_text(path)}"
    with open(0 if path == "-" else path, "rb", buffering=0, closefd=path != "-") as file:
        raw = file if progress is None else Counting(file, progress)
        stream = decompressed(raw, limits, what)
        if not is_compressed(stream):
            return read_tar(stream, sink, what, whiteouts=whiteouts, limits=limits)
        ahead = ReadAhead(stream)
        try:
            return read_tar(ahead, sink, what, whiteouts=whiteouts, limits=limits)
        finally:
            ahead.close()


def read_tar(
    stream: ByteStream,
    sink: DataSink,
    what: str,
    *,
    whiteouts: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> SourceTree:
    """The tree of an uncompressed tar `stream`, read to its end.

    With `whiteouts` it is a layer of an image: `.wh.` names mean what the OCI specification
    says, and links and directories may depend on lower layers (see `SourceTree`). Raises
    BadInput and UnsafeArchive that name the entry, and what `stream` and `sink` raise.
    """
    return _Loader(stream, sink, what, whiteouts, limits).load()


class _Loader:
    def __init__(
        self, stream: ByteStream, sink: DataSink, what: str, whiteouts: bool, limits: Limits
    ) -> None:
        self._reader = TarReader(stream, limits, what)
        self._builder = TreeBuilder(limits, self._reader.label)
        self._sink = sink
        self._what = what
        self._whiteouts = whiteouts
        self._limits = limits
        self._notes = Notes()
        self._links: dict[Inode, bytes] = {}
        self._bytes = 0

    def load(self) -> SourceTree:
        for entry in self._reader:
            if self._whiteouts and WHITEOUT in entry.name and self._mark(entry):
                continue
            if entry.type == LINK:
                self._link(entry)
            else:
                self._builder.place(entry.name, self._inode(entry))
        if not self._reader.complete:
            self._notes.add(f"{self._what}: no end mark: it may have been truncated")
        if self._links:  # some may have been replaced by a later entry
            there = {inode for _, inode in walk(self._builder.root)}
            self._links = {node: to for node, to in self._links.items() if node in there}
        return SourceTree(
            self._builder.root,
            frozenset(self._builder.implied),
            self._links,
            self._notes.lines(),
        )

    def _mark(self, entry: TarEntry) -> bool:
        """Handle an entry whose name has a whiteout prefix. False if it is ordinary."""
        head, _, name = entry.name.rstrip(b"/").rpartition(b"/")
        parts = head.split(b"/")
        if any(p.startswith(WHITEOUT_META) for p in (*parts, name)) and name != OPAQUE:
            # Bookkeeping of the aufs driver (.wh..wh.plnk, .wh..wh.aufs); docker drops it too.
            self._notes.add(f"{self._reader.label()}: left out (aufs bookkeeping)")
            return True
        if any(p.startswith(WHITEOUT) for p in parts):
            raise BadInput(f"{self._reader.label()}: a file in a whiteout")
        if name == OPAQUE:
            self._builder.directory(head).opaque = True
        elif name.startswith(WHITEOUT):
            hidden = name[len(WHITEOUT) :]
            if hidden in (b"", b".", b".."):
                raise UnsafeArchive(f"{self._reader.label()}: a whiteout of {show(hidden)!r}")
            self._builder.place_whiteout(head + b"/" + hidden)
        else:
            return False
        return True

    def _link(self, entry: TarEntry) -> None:
        if not entry.linkname:
            raise BadInput(f"{self._reader.label()}: a hard link to nothing")
        target = self._builder.find(entry.linkname)
        if target is None or target.is_whiteout:
            if not self._whiteouts:
                raise BadInput(
                    f"{self._reader.label()}: hard link to {show(entry.linkname)!r}, "
                    "which is not in the archive before it"
                )
            target = Inode(stat.S_IFREG)
            self._links[target] = entry.linkname
        elif target.is_dir:
            raise BadInput(
                f"{self._reader.label()}: hard link to the directory {show(entry.linkname)!r}"
            )
        self._builder.place(entry.name, target)

    def _inode(self, entry: TarEntry) -> Inode:
        inode = Inode(_TYPES[entry.type] | entry.mode, entry.uid, entry.gid, entry.mtime_ns)
        if entry.type == REG:
            if entry.size:
                inode.size = entry.size
                inode.extents = self._data(entry)
        elif entry.type == DIR:
            inode.children = {}
        elif entry.type == SYM:
            self._check_target(entry)
            inode.mode = stat.S_IFLNK | 0o777
            inode.target = entry.linkname
            inode.size = len(entry.linkname)
        elif entry.type != FIFO:
            if entry.major > MAX_MAJOR or entry.minor > MAX_MINOR:
                raise BadInput(
                    f"{self._reader.label()}: no device number: {entry.major}:{entry.minor}"
                )
            inode.rdev = os.makedev(entry.major, entry.minor)
            if inode.is_whiteout and not self._whiteouts:
                raise UnsafeArchive(
                    f"{self._reader.label()}: a character device 0:0, "
                    "which overlayfs takes for a whiteout",
                    hint="publish the upper directory of an overlay as upper:DIRECTORY",
                )
        if entry.xattrs or entry.acls:
            inode.xattrs = self._xattrs(entry)
        return inode

    def _check_target(self, entry: TarEntry) -> None:
        # symlink(2): not empty, shorter than PATH_MAX.
        if not entry.linkname or len(entry.linkname) > 4095 or b"\0" in entry.linkname:
            raise BadInput(
                f"{self._reader.label()}: a symbolic link's target of {len(entry.linkname)} bytes, "
                "expected 1 to 4095 without NUL"
            )

    def _data(self, entry: TarEntry) -> tuple[Extent, ...]:
        reader = self._reader
        self._bytes += reader.left
        if self._bytes > self._limits.bytes:
            raise UnsafeArchive(
                f"{reader.label()}: more than {self._limits.bytes} bytes of data in all"
            )
        if entry.segments is None:
            extents = self._sink.add(reader, entry.size)
        else:
            segments = align_segments(entry.segments, entry.size)
            if not segments:
                return ()
            stream = Widened(reader, entry.segments, segments)
            if segments == [Segment(0, entry.size)]:
                extents = self._sink.add(stream, entry.size)
            else:
                extents = self._sink.add_sparse(stream, entry.size, segments)
        if reader.left:
            raise BadInput(f"{reader.label()}: the sink left {reader.left} bytes unread")
        return extents

    def _xattrs(self, entry: TarEntry) -> dict[bytes, bytes]:
        found = dict(entry.xattrs)
        for kind, text in entry.acls.items():
            if not text:  # GNU tar writes empty ones
                continue
            value = acl_from_text(text) if kind in (b"access", b"default") else None
            if value is None:
                self._notes.add(f"{self._reader.label()}: ACL left out: {show(text)}")
            else:
                found.setdefault(b"system.posix_acl_" + kind, value)
        return keep_xattrs(found, self._reader.label, self._notes)
