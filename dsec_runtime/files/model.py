"""What is told of files. Names in a sandbox are bytes: where a text cannot hold them, the field
beside it has them in base64 and the text has replacement characters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsec_runtime.edge.model import Model

Count = Annotated[int, Field(ge=0, lt=1 << 64)]


class Entry(Model):
    """A file, directory or anything else that has a name. Ids are those inside the sandbox."""

    path: str
    path_base64: str | None
    """None when `path` is exact."""
    type: Literal[
        "file",
        "directory",
        "symlink",
        "fifo",
        "socket",
        "char-device",
        "block-device",
        "unknown",
    ]
    size: Count
    mode: Annotated[int, Field(ge=0, le=0o7777)]
    uid: Count
    gid: Count
    mtime: float
    links: Count
    inode: Count
    target: str | None
    """Of a symlink."""
    target_base64: str | None


class Listing(Model):
    entries: list[Entry]
    """Paths are relative to the directory, level by level."""
    truncated: bool
    """There is more than `limit`; what is left out is arbitrary."""


class Written(Model):
    entry: Entry
    replaced: bool


class Made(Model):
    entry: Entry
    made: bool
    """False: the directory was there."""


class Moved(Model):
    entry: Entry


class Removed(Model):
    removed: Count


class Unpacked(Model):
    entries: Count
    bytes: Count
    """Of files' contents."""


class Change(Model):
    """Something that happened to what is watched."""

    type: Literal[
        "create",
        "modify",
        "close-write",
        "attributes",
        "delete",
        "moved-from",
        "moved-to",
        "overflow",
        "gone",
    ]
    """overflow: events were lost, look again. gone: what was watched is gone; the last one."""
    path: str
    """Relative to what is watched; "" is itself."""
    path_base64: str | None
    directory: bool
