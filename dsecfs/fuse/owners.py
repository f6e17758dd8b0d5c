"""Shifted owners: a tree as the container sees it that has a range of ids of its own.

The kernel does this with id-mapped mounts; FUSE mounts cannot be id-mapped, so a composed
tree can be shown shifted. What must hold: everything is as an id-mapped EROFS mount below an
overlay shows it (fs/posix_acl.c, security/commoncap.c of Linux 6.12):

    uid, gid        id + start; (uid)-1, which stat shows as the overflow id 65534, for ids
                    that the range does not have
    ACLs            named users and groups the same way, but for ids outside 2^32 - 2: FUSE
                    refuses an ACL with -1, and this one is nobody's in every container
    capabilities    the ids of the file's user namespace: revision 2 (root of the machine)
                    becomes revision 3 with the range's root, so that they count in the
                    container and nowhere else; a root outside the range is nobody's
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from dsecfs.fuse.spaces import Attributes

INVALID_ID = 0xFFFFFFFF
"""(uid_t)-1: no user or group has it."""
UNMAPPED_ACL_ID = 0xFFFFFFFE
ID_END = 0xFFFFFFFF
"""Ids are below."""

_ACL_NAMES = (b"system.posix_acl_access", b"system.posix_acl_default")
_ACL_VERSION = 2
_ACL_ENTRY = struct.Struct("<HHI")
"""Tag, permissions, id; behind a u32 version (include/uapi/linux/posix_acl_xattr.h)."""
_ACL_USER, _ACL_GROUP = 0x02, 0x08

_CAPABILITY = b"security.capability"
_CAP_V2 = struct.Struct("<5I")
_CAP_V3 = struct.Struct("<6I")
"""struct vfs_cap_data and vfs_ns_cap_data (include/uapi/linux/capability.h)."""
_CAP_REVISION, _CAP_REVISION_2, _CAP_REVISION_3 = 0xFF000000, 0x02000000, 0x03000000


@dataclass(frozen=True, slots=True)
class Owners:
    """Ids 0 to count - 1 of the layers are start to start + count - 1 on this machine."""

    start: int
    count: int

    @property
    def valid(self) -> bool:
        return self.start >= 0 and self.count > 0 and self.start + self.count <= ID_END

    def id(self, number: int) -> int:
        return self.start + number if number < self.count else INVALID_ID

    def attributes(self, a: Attributes) -> Attributes:
        return a._replace(uid=self.id(a.uid), gid=self.id(a.gid))

    def xattrs(self, found: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
        """The same attributes with the ids in them shifted. Values that the kernel would not
        understand stay as they are: it refuses them as it does unshifted."""
        shifted = dict(found)
        for name in _ACL_NAMES:
            if name in shifted:
                shifted[name] = self._acl(shifted[name])
        if _CAPABILITY in shifted:
            shifted[_CAPABILITY] = self._capability(shifted[_CAPABILITY])
        return shifted

    def _acl(self, value: bytes) -> bytes:
        if len(value) % _ACL_ENTRY.size != 4 or value[:4] != struct.pack("<I", _ACL_VERSION):
            return value
        out = bytearray(value[:4])
        for tag, permissions, number in _ACL_ENTRY.iter_unpack(value[4:]):
            if tag in (_ACL_USER, _ACL_GROUP):
                number = self.id(number)
                number = UNMAPPED_ACL_ID if number == INVALID_ID else number
            out += _ACL_ENTRY.pack(tag, permissions, number)
        return bytes(out)

    def _capability(self, value: bytes) -> bytes:
        if len(value) == _CAP_V2.size:
            magic, *sets = _CAP_V2.unpack(value)
            root = 0
            if magic & _CAP_REVISION != _CAP_REVISION_2:
                return value
        elif len(value) == _CAP_V3.size:
            magic, *sets, root = _CAP_V3.unpack(value)
            if magic & _CAP_REVISION != _CAP_REVISION_3:
                return value
        else:
            return value
        magic = magic & ~_CAP_REVISION | _CAP_REVISION_3
        return _CAP_V3.pack(magic, *sets, self.id(root))
