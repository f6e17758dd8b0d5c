"""Source: a directory of this machine, read as it stands.

What must hold: no symbolic link is ever followed below the directory, and every file is
checked to be, once open, the one that was listed, so a tree that somebody changes meanwhile
cannot lead outside; a file that changes while it is read is an error; the order in which
data reaches the sink depends on names only, so the same tree gives the same layer; at most
a handful of descriptors is open, whatever the depth.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from typing import NoReturn

from dsecfs.errors import BadInput, UnsafeArchive
from dsecfs.layers.sources.base import (
    DEFAULT_LIMITS,
    DataSink,
    Limits,
    Notes,
    Segment,
    SourceTree,
    align_segments,
    keep_xattrs,
    show,
    show_text,
)
from dsecfs.layers.sources.streams import Progress
from dsecfs.layers.tree import Extent, Inode

_MAX_SEGMENTS = 1 << 16
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OTHER = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def read_directory(
    path: str,
    sink: DataSink,
    *,
    limits: Limits = DEFAULT_LIMITS,
    root_owned: bool = False,
    cross_mounts: bool = False,
    progress: Progress | None = None,
) -> SourceTree:
    """The tree below the directory `path`.

    `root_owned` gives every file to 0:0 (a toolkit built by a developer). Mount points are
    left empty, with a note, unless `cross_mounts`. Sockets are left out with a note.

    Raises BadInput and UnsafeArchive that name the file, and OSError for `path` itself.
    """
    return DirectoryReader(
        path, sink, limits, root_owned=root_owned, cross_mounts=cross_mounts, progress=progress
    ).read()


class DirectoryReader:
    """One walk. `upper.py` changes what attributes and whiteouts mean."""

    def __init__(
        self,
        path: str,
        sink: DataSink,
        limits: Limits,
        *,
        root_owned: bool = False,
        cross_mounts: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._top = path
        self._sink = sink
        self._limits = limits
        self._root_owned = root_owned
        self._cross_mounts = cross_mounts
        self._progress = progress
        self._notes = Notes()
        self._path = b""  # of the current file, for messages
        self._links: dict[tuple[int, int], Inode] = {}
        self._entries = self._bytes = self._metadata = 0

    # What a subclass may see differently.

    def _owner(self, st: os.stat_result) -> tuple[int, int]:
        return (0, 0) if self._root_owned else (st.st_uid, st.st_gid)

    def _attributes(self, inode: Inode, found: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """The attributes to keep of those `found`; may change `inode`'s type or marks."""
        return keep_xattrs(found, self._label, self._notes)

    def _zero_device(self) -> None:
        """A character device 0:0 was met."""
        raise UnsafeArchive(
            f"{self._label()}: a character device 0:0, which overlayfs takes for a whiteout",
            hint="publish the upper directory of an overlay as upper:DIRECTORY",
        )

    # The walk.

    def read(self) -> SourceTree:
        fd = os.open(self._top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._device, self._mount = os.fstat(fd).st_dev, _mount_id(fd)
            root = self._inode(os.fstat(fd), fd)
            todo: list[tuple[list[bytes], Inode]] = [([], root)]
            while todo:
                parts, inode = todo.pop()
                here = self._open_directory(fd, parts, inode)
                if here is None:
                    continue
                try:
                    found = self._read_entries(here, parts, inode)
                finally:
                    os.close(here)
                todo.extend(reversed(found))
        finally:
            os.close(fd)
        return SourceTree(root, notes=self._notes.lines())

    def _label(self) -> str:
        top = show_text(self._top)
        return f"{top}/{show(self._path)}" if self._path else top

    def _fail(self, e: OSError) -> NoReturn:
        if e.errno in (errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            self._changed()
        raise BadInput(f"{self._label()}: cannot read it: {e.strerror}") from None

    def _changed(self) -> NoReturn:
        raise BadInput(
            f"{self._label()}: it changed while it was read",
            hint="publish again when nothing writes to the directory",
        )

    def _open_directory(self, top: int, parts: list[bytes], inode: Inode) -> int | None:
        """A descriptor of the directory, step by step from the top. None: a mount point."""
        self._path = b"/".join(parts)
        fd = os.dup(top)
        try:
            for part in parts:
                below = os.open(part, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = below
        except OSError as e:
            os.close(fd)
            self._fail(e)
        st = os.fstat(fd)
        if not self._cross_mounts and (st.st_dev != self._device or _mount_id(fd) != self._mount):
            os.close(fd)
            self._notes.add(f"{self._label()}: a mount point: its contents are left out")
            return None
        if parts:
            fresh = self._inode(st, fd)
            inode.mode, inode.uid, inode.gid = fresh.mode, fresh.uid, fresh.gid
            inode.mtime_ns, inode.xattrs, inode.opaque = fresh.mtime_ns, fresh.xattrs, fresh.opaque
        return fd

    def _read_entries(
        self, fd: int, parts: list[bytes], parent: Inode
    ) -> list[tuple[list[bytes], Inode]]:
        """Everything in one directory; its subdirectories are returned, to be read later."""
        later = []
        prefix = b"/".join(parts) + b"/" if parts else b""
        assert parent.children is not None
        for name in sorted(map(os.fsencode, os.listdir(fd))):
            self._path = prefix + name
            self._count(name)
            try:
                st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(st.st_mode):
                    if len(parts) >= self._limits.depth:
                        raise UnsafeArchive(
                            f"{self._label()}: deeper than {self._limits.depth} directories"
                        )
                    parent.children[name] = inode = Inode(st.st_mode, children={})
                    later.append(([*parts, name], inode))
                elif stat.S_ISSOCK(st.st_mode):
                    self._notes.add(f"{self._label()}: a socket: left out")
                else:
                    parent.children[name] = self._file(fd, name, st)
            except OSError as e:
                self._fail(e)
        return later

    def _count(self, name: bytes) -> None:
        self._entries += 1
        self._metadata += len(name)
        if self._entries > self._limits.entries or self._metadata > self._limits.metadata:
            raise UnsafeArchive(
                f"{self._label()}: more than {self._limits.entries} files or "
                f"{self._limits.metadata} bytes of names and attributes"
            )

    def _file(self, parent: int, name: bytes, listed: os.stat_result) -> Inode:
        """Anything but a directory."""
        key = (listed.st_dev, listed.st_ino)
        if listed.st_nlink > 1 and key in self._links:
            return self._links[key]
        regular = stat.S_ISREG(listed.st_mode)
        fd = os.open(name, _FILE if regular else _OTHER, dir_fd=parent)
        try:
            st = os.fstat(fd)
            if (st.st_dev, st.st_ino, stat.S_IFMT(st.st_mode)) != (
                *key,
                stat.S_IFMT(listed.st_mode),
            ):
                self._changed()
            inode = self._inode(st, fd)
            if inode.is_reg and st.st_size:
                inode.size = st.st_size
                inode.extents = self._data(fd, st)
            elif inode.is_symlink:
                inode.target = os.readlink(b"", dir_fd=fd)
                inode.size = len(inode.target)
        finally:
            os.close(fd)
        if st.st_nlink > 1:
            self._links[key] = inode
        return inode

    def _inode(self, st: os.stat_result, fd: int) -> Inode:
        uid, gid = self._owner(st)
        inode = Inode(st.st_mode, uid, gid, st.st_mtime_ns)
        if stat.S_ISDIR(st.st_mode):
            inode.children = {}
        elif stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode):
            inode.rdev = st.st_rdev
            if inode.is_whiteout:
                self._zero_device()
                return Inode(stat.S_IFCHR)
        inode.xattrs = self._attributes(inode, self._xattrs(fd, st))
        return inode

    def _xattrs(self, fd: int, st: os.stat_result) -> dict[bytes, bytes]:
        # A descriptor of O_PATH has no attributes of its own, but the link to it in /proc
        # leads to exactly that file, a symbolic link included.
        is_open = stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode)
        where: int | str = fd if is_open else f"/proc/self/fd/{fd}"
        try:
            found = {os.fsencode(n): os.getxattr(where, n) for n in os.listxattr(where)}
        except OSError as e:
            if e.errno in (errno.ENOTSUP, errno.ENOSYS):
                return {}
            if e.errno == errno.ENODATA:
                self._changed()
            raise
        cost = sum(len(k) + len(v) for k, v in found.items())
        self._metadata += cost
        if cost > self._limits.xattrs:
            raise UnsafeArchive(
                f"{self._label()}: {cost} bytes of attributes, "
                f"at most {self._limits.xattrs} are allowed"
            )
        return found

    # Data.

    def _data(self, fd: int, st: os.stat_result) -> tuple[Extent, ...]:
        size = st.st_size
        segments = [Segment(0, size)]
        if st.st_blocks * 512 < size:
            segments = _data_segments(fd, size)
        self._bytes += sum(s.length for s in segments)
        if size > self._limits.file_size or self._bytes > self._limits.bytes:
            raise UnsafeArchive(
                f"{self._label()}: more than {self._limits.file_size} bytes, "
                f"or {self._limits.bytes} in all"
            )
        extents: tuple[Extent, ...] = ()
        if segments:
            stream = _Segments(fd, segments, self._changed, self._progress)
            if segments == [Segment(0, size)]:
                extents = self._sink.add(stream, size)
            else:
                extents = self._sink.add_sparse(stream, size, segments)
        after = os.fstat(fd)
        if (after.st_size, after.st_mtime_ns, after.st_ctime_ns) != (
            st.st_size,
            st.st_mtime_ns,
            st.st_ctime_ns,
        ):
            self._changed()
        return extents


class _Segments:
    """The data of `segments` of an open file, back to back."""

    def __init__(
        self,
        fd: int,
        segments: list[Segment],
        short: Callable[[], NoReturn],
        progress: Progress | None,
    ) -> None:
        self._fd = fd
        self._segments = iter(segments)
        self._short = short
        self._progress = progress
        self._at = self._left = 0

    def read(self, n: int, /) -> bytes:
        if not self._left:
            segment = next(self._segments, None)
            if segment is None:
                return b""
            self._at, self._left = segment
        data = os.pread(self._fd, min(n, self._left), self._at)
        if not data:
            self._short()
        self._at += len(data)
        self._left -= len(data)
        if self._progress is not None:
            self._progress(len(data))
        return data


def _data_segments(fd: int, size: int) -> list[Segment]:
    """Where a file has data, widened to blocks (lseek(2), SEEK_DATA and SEEK_HOLE)."""
    found: list[Segment] = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        except OSError as e:
            if e.errno == errno.ENXIO:  # a hole up to the end
                break
            return [Segment(0, size)]  # the file system cannot tell
        if start < end:
            found.append(Segment(start, end - start))
        if len(found) > _MAX_SEGMENTS:
            return [Segment(0, size)]
    return align_segments(found, size)


def _mount_id(fd: int) -> int:
    """The mount an open file lies on (proc(5), fdinfo): tells bind mounts apart; 0 unknown."""
    try:
        with open(f"/proc/self/fdinfo/{fd}") as f:
            match = re.search(r"^mnt_id:\s*(\d+)", f.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0
