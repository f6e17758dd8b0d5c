"""Names of layers and environments as people type them.

    [KIND/]NAME:VERSION      toolkit/dsh:1.5   swe/django:1   debian:12
    [KIND/]NAME@CHANNEL      toolkit/dsh@stable
    sha256:HEX               a digest

What must hold: a `Name` that exists is safe as a path and as a store key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsecfs.errors import BadInput

LAYER_KINDS = ("base", "workspace", "toolkit", "snapshot", "disk")
"""Kinds of layers (design §2). `disk` holds a block image, the others file trees."""

KINDS = (*LAYER_KINDS, "env")
"""First components that are reserved: they say the kind and are not part of the name."""

_COMPONENT = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*\Z")
_VERSION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Name:
    """A checked name. Exactly one of `version` and `channel` is set; `kind` may be ""."""

    kind: str
    name: str
    version: str = ""
    channel: str = ""

    def __str__(self) -> str:
        prefix = f"{self.kind}/" if self.kind and self.kind != "env" else ""
        tail = f":{self.version}" if self.version else f"@{self.channel}"
        return f"{prefix}{self.name}{tail}"

    def with_kind(self, kind: str) -> Name:
        return Name(kind, self.name, self.version, self.channel)


def parse_name(text: str, *, default_kind: str = "") -> Name:
    """Parse and check a name. Raises BadInput that says which part is wrong.

    A first component that is one of KINDS is the kind; otherwise `default_kind`.
    """
    shown = text[:120]

    def bad(why: str) -> BadInput:
        return BadInput(
            f"not a name: {shown!r}: {why}",
            hint="expected NAME:VERSION or NAME@CHANNEL, e.g. toolkit/dsh:1.5 or dsh@stable",
        )

    path, sep, tail = text.rpartition("@") if "@" in text else text.rpartition(":")
    if not sep:
        raise bad("no :VERSION or @CHANNEL")
    if not _VERSION.match(tail):
        raise bad(f"version or channel {tail[:40]!r} may hold only A-Z a-z 0-9 _ . -")
    parts = path.split("/")
    kind = default_kind
    if len(parts) > 1 and parts[0] in KINDS:
        kind = parts.pop(0)
        if len(parts) > 1 and parts[0] in KINDS:
            # It would read as another kind's name wherever the prefix is left out.
            raise bad(f"it has two kinds, {kind!r} and {parts[0]!r}")
    if len(path) > MAX_NAME:
        raise bad(f"longer than {MAX_NAME} characters")
    for part in parts:
        if not _COMPONENT.match(part):
            raise bad(f"{part[:40]!r} may hold only a-z 0-9, with . _ - between them")
    name = "/".join(parts)
    return Name(kind, name, channel=tail) if sep == "@" else Name(kind, name, version=tail)
