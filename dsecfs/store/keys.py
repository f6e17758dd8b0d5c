"""Which keys exist at all. Every back end checks here before it touches anything.

What must hold: a checked key is a relative path of plain names. It cannot leave a
directory, start an option, need quoting in a URL, or differ between back ends.
"""

from __future__ import annotations

import re

from dsecfs.errors import BadInput

MAX_KEY = 900
"""Bytes. S3 allows 1024 for a whole object key; the rest is for the store's own prefix."""

MAX_COMPONENT = 255
"""Bytes: NAME_MAX of Linux file systems."""

_COMPONENT = re.compile(r"[A-Za-z0-9._-]+\Z")


def check_key(key: str) -> str:
    """Return `key` if it is one. Raises BadInput that says which part is wrong."""
    # Length first: nothing below costs more than it may.
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY:
        raise _bad(key, f"a key has 1 to {MAX_KEY} characters")
    for part in key.split("/"):
        if part in ("", ".", ".."):
            raise _bad(key, f"{part!r} is not a name")
        if len(part) > MAX_COMPONENT:
            raise _bad(key, f"a component has more than {MAX_COMPONENT} characters")
        if not _COMPONENT.match(part):
            raise _bad(key, f"{part[:40]!r} may hold only A-Z a-z 0-9 . _ -")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` as "" or with exactly one "/" at its end. Raises BadInput."""
    if prefix == "":
        return ""
    return check_key(prefix.removesuffix("/")) + "/"


def is_key(text: str) -> bool:
    """Whether a name found in a store is one of ours; others' files are left alone."""
    try:
        check_key(text)
    except BadInput:
        return False
    return True


def check_range(key: str, offset: int, length: int) -> None:
    """Raise BadInput unless 0 <= offset and 0 < length: no store is asked for nothing."""
    if offset < 0 or length <= 0:
        raise BadInput(f"bad range of {key[:120]}: {length} bytes from {offset}")


def _bad(key: object, why: str) -> BadInput:
    return BadInput(f"not a store key: {str(key)[:120]!r}: {why}")
