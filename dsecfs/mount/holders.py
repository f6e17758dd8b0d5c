"""Who uses something shared: one file per holder in a directory, naming the holder's record.

What must hold: a holder lives as long as its record exists; whoever removes the record has
dropped the holder before, or recovery does it later. No process id is believed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from dsecfs.errors import BadInput

_HOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}\Z")


class Holder(NamedTuple):
    """Who uses something. `name` is unique on the node; `record` exists as long as it does."""

    name: str
    record: Path


def add_holder(refs: Path, holder: Holder) -> None:
    """Note in the directory `refs` that `holder` uses what it stands for."""
    _place(refs, holder.name).write_bytes(os.fsencode(holder.record.absolute()))


def drop_holder(refs: Path, name: str) -> None:
    """No error if it was none."""
    _place(refs, name).unlink(missing_ok=True)


def holders(refs: Path) -> list[Path]:
    """The files of all holders."""
    try:
        return [refs / name for name in os.listdir(refs)]
    except FileNotFoundError:
        return []


def stale_holders(refs: Path) -> list[Path]:
    """The files of holders whose record is gone."""
    return [ref for ref in holders(refs) if not _lives(ref)]


def is_held(refs: Path) -> bool:
    """Whether any holder lives. Looks no further than the first one that does."""
    return any(map(_lives, holders(refs)))


def _place(refs: Path, name: str) -> Path:
    if not _HOLDER.match(name):
        raise BadInput(f"not a name of a holder: {name[:80]!r}", hint="use A-Z a-z 0-9 . _ -")
    return refs / name


def _lives(ref: Path) -> bool:
    try:
        record = ref.read_bytes()
    except FileNotFoundError:
        return False
    return bool(record) and os.path.lexists(record)
