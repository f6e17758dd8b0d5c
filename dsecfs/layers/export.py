"""A layer as a tar archive: what other tools can unpack, and what `publish` reads back.

PAX format, entries in the order of paths. Whiteouts and opaque marks are written as an OCI
image layer has them (`.wh.NAME`, `.wh..wh..opq`); extended attributes as SCHILY.xattr
records, as GNU tar does, overlay marks without the escape that publishing gives them; the
second name of a file is a hard link. Holes become zeros. Bytes do not depend on the machine.
"""

from __future__ import annotations

import os
import stat
import tarfile
from typing import IO

from dsecfs.errors import BadInput
from dsecfs.layers.content import LayerContent
from dsecfs.layers.sources.base import show, unescape_xattr
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
_NAME_MAX = 100
_ID_MAX, _SIZE_MAX = 0o7777777, 0o77777777777
"""What fields of a ustar header hold (POSIX.1-2017, pax, "ustar Interchange Format")."""
_RECORD = tarfile.RECORDSIZE


def export_tar(content: LayerContent, out: IO[bytes]) -> int:
    """Write the layer to `out`, which need not be seekable. Number of entries.

    Sockets are left out: an archive cannot hold them. Raises BadInput for a name that would
    mean a whiteout, and what reading raises.
    """
    first: dict[Inode, bytes] = {}
    count = written = 0

    def put(data: bytes) -> None:
        nonlocal written
        written += len(data)
        out.write(data)

    def mark(path: bytes) -> None:
        put(_header(path, Inode(stat.S_IFREG)))

    for path, inode in walk(content.root):
        name = path.rpartition(b"/")[2]
        if name.startswith(WHITEOUT):
            raise BadInput(f"cannot export {show(path)!r}: in an archive it means a whiteout")
        if stat.S_ISSOCK(inode.mode):
            continue
        if inode.is_whiteout:
            mark(path[: len(path) - len(name)] + WHITEOUT + name)
        elif inode in first:
            put(_header(path, inode, link=first[inode]))
        else:
            if not inode.is_dir:
                first[inode] = path
            put(_header(path or b".", inode))
            if inode.is_reg:
                for piece in content.pieces(inode):
                    put(piece)
                put(bytes(-inode.size % tarfile.BLOCKSIZE))
        if inode.opaque:
            mark(path + b"/" + OPAQUE if path else OPAQUE)
            count += 1
        count += 1
    put(bytes(2 * tarfile.BLOCKSIZE))
    put(bytes(-written % _RECORD))
    return count


def _header(path: bytes, inode: Inode, *, link: bytes | None = None) -> bytes:
    """The header of an entry, and what does not fit into it as PAX records in front."""
    kind = stat.S_IFMT(inode.mode)
    records: list[tuple[bytes, bytes]] = []

    def fit(key: bytes, value: int, largest: int) -> int:
        if 0 <= value <= largest:
            return value
        records.append((key, b"%d" % value))
        return 0

    def name(key: bytes, value: bytes) -> str:
        if len(value) > _NAME_MAX:
            records.append((key, value))
        return _text(value[:_NAME_MAX])

    entry = tarfile.TarInfo(name(b"path", path))
    entry.linkname = name(b"linkpath", link if link is not None else inode.target)
    entry.type = tarfile.LNKTYPE if link is not None else _TYPES[kind]
    entry.mode = stat.S_IMODE(inode.mode)
    entry.uid, entry.gid = fit(b"uid", inode.uid, _ID_MAX), fit(b"gid", inode.gid, _ID_MAX)
    seconds, rest = divmod(inode.mtime_ns, 10**9)
    if rest or not 0 <= seconds <= _SIZE_MAX:
        records.append((b"mtime", _decimal(inode.mtime_ns)))
    else:
        entry.mtime = seconds
    entry.devmajor, entry.devminor = os.major(inode.rdev), os.minor(inode.rdev)
    if link is None:
        entry.size = fit(b"size", inode.size if kind == stat.S_IFREG else 0, _SIZE_MAX)
        for key, value in sorted(inode.xattrs.items()):
            # GNU tar's escapes (xheader.c): "=" ends a keyword.
            plain = unescape_xattr(key).replace(b"%", b"%25").replace(b"=", b"%3D")
            records.append((b"SCHILY.xattr." + plain, value))
    header = entry.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
    return _extended(records) + header if records else header


def _extended(records: list[tuple[bytes, bytes]]) -> bytes:
    """A PAX extended header. Records are bytes as they are, and say so where it matters."""
    if not all(_is_utf8(part) for record in records for part in record):
        records = [(b"hdrcharset", b"BINARY"), *records]
    body = b"".join(_record(b" %b=%b\n" % record) for record in records)
    entry = tarfile.TarInfo("././@PaxHeader")
    entry.type, entry.size = tarfile.XHDTYPE, len(body)
    header = entry.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    return header + body + bytes(-len(body) % tarfile.BLOCKSIZE)


def _record(rest: bytes) -> bytes:
    """A record behind its length, which counts its own digits."""
    length = len(rest)
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d%b" % (length, rest)


def _decimal(ns: int) -> bytes:
    """Nanoseconds as seconds without rounding."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 10**9}.{ns % 10**9:09d}".encode()


def _text(name: bytes) -> str:
    # Not os.fsdecode: what is written must not depend on the locale.
    return name.decode("utf-8", "surrogateescape")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
