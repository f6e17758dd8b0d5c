"""A layer as a tar archive: what other tools can unpack, and what `publish` reads back.

PAX format, entries in the order of paths. Whiteouts and opaque marks are written as an OCI
image layer has them (`.wh.NAME`, `.wh..wh..opq`); extended attributes as SCHILY.xattr
records, as GNU tar does; the second name of a file is a hard link. Holes become zeros.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from typing import IO

from dsecfs.errors import BadInput
from dsecfs.layers.content import LayerContent
from dsecfs.layers.sources.base import show
from dsecfs.layers.tree import Inode, walk

WHITEOUT, OPAQUE = b".wh.", b".wh..wh..opq"
"""OCI image specification, "Layer Filesystem Changeset", whiteouts."""

_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}


def export_tar(content: LayerContent, out: IO[bytes]) -> int:
    """Write the layer to `out`, which need not be seekable. Number of entries.

    Sockets are left out: an archive cannot hold them. Raises BadInput for a name that would
    mean a whiteout, and what reading raises.
    """
    first: dict[Inode, bytes] = {}
    count = 0
    with tarfile.open(
        fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8",
        errors="surrogateescape",
    ) as tar:
        for path, inode in walk(content.root):
            name = path.rpartition(b"/")[2]
            if name.startswith(WHITEOUT):
                raise BadInput(f"cannot export {show(path)!r}: in an archive it means a whiteout")
            if stat.S_ISSOCK(inode.mode):
                continue
            entry = _entry(path or b".", inode)
            if inode.is_whiteout:
                entry = tarfile.TarInfo(os.fsdecode(_beside(path, WHITEOUT + name)))
                tar.addfile(entry)
            elif inode in first and not inode.is_dir:
                entry.type, entry.linkname = tarfile.LNKTYPE, os.fsdecode(first[inode])
                entry.pax_headers = {}
                tar.addfile(entry)
            elif inode.is_reg:
                first[inode] = path
                entry.size = inode.size
                tar.addfile(entry, _Reader(content.pieces(inode)))
            else:
                first[inode] = path
                tar.addfile(entry)
            if inode.opaque:
                tar.addfile(tarfile.TarInfo(os.fsdecode(path + b"/" + OPAQUE if path else OPAQUE)))
                count += 1
            count += 1
    return count


def _entry(path: bytes, inode: Inode) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(os.fsdecode(path))
    entry.type = _TYPES[stat.S_IFMT(inode.mode)]
    entry.mode = stat.S_IMODE(inode.mode)
    entry.uid, entry.gid = inode.uid, inode.gid
    entry.mtime = inode.mtime_ns // 10**9
    entry.linkname = os.fsdecode(inode.target)
    entry.devmajor, entry.devminor = os.major(inode.rdev), os.minor(inode.rdev)
    records = {
        f"SCHILY.xattr.{os.fsdecode(name)}": os.fsdecode(value)
        for name, value in inode.xattrs.items()
    }
    if inode.mtime_ns % 10**9 or inode.mtime_ns < 0:
        records["mtime"] = _decimal(inode.mtime_ns)
    entry.pax_headers = records
    return entry


def _decimal(ns: int) -> str:
    """Nanoseconds as seconds without rounding."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 10**9}.{ns % 10**9:09d}"


def _beside(path: bytes, name: bytes) -> bytes:
    parent = path.rpartition(b"/")[0]
    return parent + b"/" + name if parent else name


class _Reader(io.RawIOBase):
    """Pieces as a file that tarfile can copy from."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        parts = []
        wanted = size if size is not None and size >= 0 else 1 << 62
        while wanted:
            if not self._left:
                self._left = next(self._pieces, b"")
                if not self._left:
                    break
            part, self._left = self._left[:wanted], self._left[wanted:]
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)
