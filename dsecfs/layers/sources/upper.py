"""Source: the upper directory of an overlay mount that is not in use any more.

Marks as in Documentation/filesystems/overlayfs.rst and fs/overlayfs/overlayfs.h: whiteouts
are character devices 0:0 or, in a directory marked opaque=x, empty files with the attribute
`overlay.whiteout`; opaque=y hides lower contents. What must hold: only marks with the prefix
that the mount obeyed are marks (what a sandbox wrote under the other one is data, and is
escaped); a mark that moves data or names elsewhere (redirect, metacopy) is an error that
names the file, never a wrong tree.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass

from dsecfs.errors import BadInput, Unsupported
from dsecfs.layers.sources.base import (
    DEFAULT_LIMITS,
    DataSink,
    Limits,
    SourceTree,
    keep_xattrs,
    show,
)
from dsecfs.layers.sources.directory import DirectoryReader
from dsecfs.layers.sources.streams import Progress
from dsecfs.layers.tree import Inode

_IGNORED = (b"origin", b"impure", b"nlink", b"upper", b"uuid")
"""Marks by which overlayfs finds its way back to a lower file: they change no content."""

_CAPABILITY = b"security.capability"
_CAP_V3 = struct.Struct("<IIIIII")
_CAP_REVISION = 0xFF000000
_ACL_ENTRY = struct.Struct("<HHI")
_ACL_USER, _ACL_GROUP = 2, 8


@dataclass(frozen=True, slots=True)
class IdRange:
    """The ids of a user namespace: `base` on disk is 0 inside, `count` of them."""

    base: int
    count: int = 65536

    def inside(self, number: int) -> int | None:
        return number - self.base if self.base <= number < self.base + self.count else None


def read_upper(
    path: str,
    sink: DataSink,
    *,
    limits: Limits = DEFAULT_LIMITS,
    ids: IdRange | None = None,
    userxattr: bool = False,
    progress: Progress | None = None,
) -> SourceTree:
    """The difference that the upper directory `path` holds.

    `ids`: the files belong to a sandbox's id range, which is taken off (also in ACLs and
    capabilities); an owner outside of it is an error. `userxattr`: the overlay was mounted
    with that option, so its marks are `user.overlay.*`. Raises BadInput, Unsupported and
    UnsafeArchive that name the file, and OSError for `path` itself.
    """
    return UpperReader(path, sink, limits, ids, userxattr, progress).read()


class UpperReader(DirectoryReader):
    """One walk; `dsec_runtime/snapshots` makes several of one upper."""

    def __init__(
        self,
        path: str,
        sink: DataSink,
        limits: Limits,
        ids: IdRange | None,
        userxattr: bool,
        progress: Progress | None,
    ) -> None:
        super().__init__(path, sink, limits, progress=progress)
        self._ids = ids
        self._prefix = b"user.overlay." if userxattr else b"trusted.overlay."

    def _owner(self, st: os.stat_result) -> tuple[int, int]:
        if stat.S_ISCHR(st.st_mode) and st.st_rdev == 0:
            return 0, 0  # a whiteout; its owner means nothing
        return self._shifted(st.st_uid), self._shifted(st.st_gid)

    def _shifted(self, number: int) -> int:
        if self._ids is None:
            return number
        inside = self._ids.inside(number)
        if inside is None:
            raise BadInput(
                f"{self._label()}: id {number} is outside the sandbox's range "
                f"{self._ids.base}+{self._ids.count}"
            )
        return inside

    def _zero_device(self) -> None:
        pass  # a whiteout

    def _attributes(self, inode: Inode, found: dict[bytes, bytes]) -> dict[bytes, bytes]:
        marks = {}
        plain = {}
        nested = self._prefix + b"overlay."
        escaped = {}
        for name, value in found.items():
            if name.startswith(nested):
                escaped[name] = value  # overlayfs escaped it already
            elif name.startswith(self._prefix):
                marks[name[len(self._prefix) :]] = value
            else:
                plain[name] = self._shift_ids(name, value)
        for mark, value in marks.items():
            self._mark(inode, mark, value)
        return {**keep_xattrs(plain, self._label, self._notes), **escaped}

    def _mark(self, inode: Inode, mark: bytes, value: bytes) -> None:
        if mark == b"opaque" and inode.is_dir and value in (b"y", b"x"):
            # "x" only says that whiteouts in it may be attributes.
            inode.opaque = value == b"y"
        elif mark == b"whiteout" and inode.is_reg:
            inode.mode, inode.rdev, inode.uid, inode.gid = stat.S_IFCHR, 0, 0, 0
            inode.mtime_ns = 0
        elif mark == b"protattr":
            self._notes.add(f"{self._label()}: flags (chattr) left out: {show(value)}")
        elif mark not in _IGNORED:
            raise Unsupported(
                f"{self._label()}: overlay mark {show(self._prefix + mark)!r}: the upper alone "
                "does not hold this file",
                hint="mount overlays with redirect_dir=nofollow,metacopy=off,index=off",
            )

    def _shift_ids(self, name: bytes, value: bytes) -> bytes:
        """Ids inside an attribute, taken into the range's view."""
        if self._ids is None:
            return value
        if name == _CAPABILITY and len(value) == _CAP_V3.size:
            # Version 3 names the root of the user namespace that may use it; seen from
            # inside that is 0, which is version 2 (linux/capability.h).
            magic, *sets, rootid = _CAP_V3.unpack(value)
            if magic & _CAP_REVISION == 0x03000000 and self._shifted(rootid) == 0:
                return struct.pack("<IIIII", 0x02000000 | magic & ~_CAP_REVISION, *sets)
        elif name.startswith(b"system.posix_acl_") and len(value) >= 4 and len(value) % 8 == 4:
            parts = [value[:4]]
            for tag, perms, number in _ACL_ENTRY.iter_unpack(value[4:]):
                if tag in (_ACL_USER, _ACL_GROUP):
                    number = self._shifted(number)
                parts.append(_ACL_ENTRY.pack(tag, perms, number))
            return b"".join(parts)
        return value
