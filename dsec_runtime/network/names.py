"""Host names: what they look like, and which ones a pattern names."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_MAX = 253
"""RFC 1035, 2.3.4, without the root's dot."""


def host_name(text: str) -> str | None:
    """The name in lower case without a dot at its end; None if it is no host name. Addresses are
    none: no top-level domain is a number."""
    name = text.lower().removesuffix(".")
    if not name or len(name) > _MAX or not name.isascii():
        return None
    labels = name.split(".")
    if labels[-1].isdigit() or not all(map(_LABEL.match, labels)):
        return None
    return name


def pattern(text: str) -> str | None:
    """A host name or "*." and one, in its plain form; None if it is neither. Names in other
    scripts are taken in their ASCII form (IDNA)."""
    star, rest = ("*.", text[2:]) if text.startswith("*.") else ("", text)
    if not rest.isascii():
        try:
            rest = rest.encode("idna").decode("ascii")
        except UnicodeError:
            return None
    name = host_name(rest)
    return None if name is None else star + name


def above(name: str) -> Iterator[str]:
    """Every domain that a name lies below: b.c and c for a.b.c."""
    while "." in name:
        name = name.partition(".")[2]
        yield name


def shown(text: str) -> str:
    """A name from a sandbox, fit for a message or a log."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:_MAX])
