"""POSIX ACLs: from the text in archives (SCHILY.acl.*) to the attribute the kernel keeps.

Binary form: include/uapi/linux/posix_acl_xattr.h, version 2, entries sorted by tag and id.
"""

from __future__ import annotations

import struct

_VERSION = 2
_NO_ID = 0xFFFFFFFF
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 1, 2, 4, 8, 16, 32
_ENTRY = struct.Struct("<HHI")
_TAGS = {
    b"user": (_USER_OBJ, _USER), b"u": (_USER_OBJ, _USER),
    b"group": (_GROUP_OBJ, _GROUP), b"g": (_GROUP_OBJ, _GROUP),
    b"mask": (_MASK, None), b"m": (_MASK, None),
    b"other": (_OTHER, None), b"o": (_OTHER, None),
}  # fmt: skip
MAX_TEXT = 32 * 1024


def acl_from_text(text: bytes) -> bytes | None:
    """The value of system.posix_acl_access or _default for an ACL in text form.

    The text is acl_to_text(3)'s: entries `tag:qualifier:perms` separated by commas or new
    lines, comments after `#`; star adds the numeric id as a fourth field. None when it is
    not valid, or names a user without a number: names mean nothing on another machine.
    """
    if len(text) > MAX_TEXT:
        return None
    entries: dict[tuple[int, int], int] = {}
    for raw in text.replace(b",", b"\n").split(b"\n"):
        line = raw.partition(b"#")[0].strip()
        if not line:
            continue
        fields = [f.strip() for f in line.split(b":")]
        if fields[0] == b"default":  # a default ACL written with its prefix
            del fields[0]
        if len(fields) == 2:  # "mask:rwx", "other:r-x"
            fields.insert(1, b"")
        if len(fields) not in (3, 4) or fields[0] not in _TAGS:
            return None
        own, named = _TAGS[fields[0]]
        tag, number = own, _NO_ID
        if fields[1]:
            digits = fields[3] if len(fields) == 4 else fields[1]
            if named is None or not digits.isdigit() or len(digits) > 10 or int(digits) >= _NO_ID:
                return None
            tag, number = named, int(digits)
        perms = fields[2].replace(b"-", b"")
        if set(perms) - set(b"rwx") or (tag, number) in entries:
            return None
        entries[tag, number] = sum(
            bit for c, bit in ((b"r", 4), (b"w", 2), (b"x", 1)) if c in perms
        )
    tags = {tag for tag, _ in entries}
    if not {_USER_OBJ, _GROUP_OBJ, _OTHER} <= tags or (
        tags & {_USER, _GROUP} and _MASK not in tags
    ):
        return None
    body = (_ENTRY.pack(tag, entries[tag, number], number) for tag, number in sorted(entries))
    return struct.pack("<I", _VERSION) + b"".join(body)
