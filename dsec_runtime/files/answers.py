"""What a child says, checked, and what its errors mean to callers.

What must hold: a child may be in a hostile sandbox's hands; nothing it says gets further unless it
has the form expected here, and no text of it is in our messages but names, shortened and quoted.
"""

from __future__ import annotations

import base64
import errno
import os
from typing import Any

from pydantic import ValidationError

from dsec_runtime.errors import (
    BadRange,
    FileDenied,
    FileExists,
    FileProblem,
    FilesError,
    NoSpace,
    NoSuchFile,
    SandboxError,
    SandboxLost,
)
from dsec_runtime.files import wire
from dsec_runtime.files.model import Change, Entry
from dsecfs.errors import BadInput, Busy, DsecfsError, UnsafeArchive

_KINDS: dict[int, tuple[type[DsecfsError], str]] = {
    errno.ENOENT: (NoSuchFile, ""),
    errno.EEXIST: (FileExists, ""),
    errno.ENOTEMPTY: (FileExists, "use recursive to remove what is in it"),
    errno.EACCES: (FileDenied, "name a user who may (user=)"),
    errno.EPERM: (FileDenied, "name a user who may (user=)"),
    errno.EROFS: (FileDenied, "it lies on a read-only mount"),
    errno.ENOSPC: (NoSpace, "remove files, or make the sandbox with a larger limits.disk_mb"),
    errno.EDQUOT: (NoSpace, "remove files, or make the sandbox with a larger limits.disk_mb"),
    errno.EBUSY: (Busy, "it is a mount point, or in use"),
    errno.EAGAIN: (Busy, "somebody in the sandbox has it locked"),
    errno.ESRCH: (SandboxLost, ""),
    errno.ENOMEM: (FilesError, ""),
    errno.EMFILE: (FilesError, ""),
    errno.ENFILE: (FilesError, ""),
    errno.ENXIO: (FileProblem, "only regular files are read and written"),
}
"""Other numbers are a FileProblem."""

_REASONS: dict[str, tuple[type[DsecfsError], str, str]] = {
    wire.NOT_REGULAR: (FileProblem, "not a regular file", "only those are read and written"),
    wire.NOT_DIRECTORY: (FileProblem, "not a directory", ""),
    wire.BAD_NAME: (BadInput, "the path does not end in a name", ""),
    wire.OWNER: (
        FileDenied,
        "the file's owner or group cannot be kept",
        "do it as its owner (user=)",
    ),
    wire.RANGE: (BadRange, "the range lies outside of the file", ""),
    wire.CHANGED: (FileProblem, "it changed while it was read", "try again"),
    wire.DEEP: (FileProblem, "too many directories in each other", "use a command in the sandbox"),
    wire.ARCHIVE: (BadInput, "the upload is no whole tar archive", "plain, gzip, bzip2 or xz"),
    wire.UNSAFE: (
        UnsafeArchive,
        "the archive has an entry that is not made",
        "names must stay inside; files, directories, symlinks and hard links only",
    ),
    wire.MEMORY: (FilesError, "it takes too much memory", ""),
    wire.GONE: (SandboxLost, "the sandbox is gone", ""),
    wire.NO_NAMESPACE: (SandboxError, "the sandbox has no namespaces of its own", ""),
    wire.ABORTED: (FilesError, "it was ended", ""),
    wire.INTERNAL: (FilesError, "a fault of the files helper", ""),
}


def error_of(doing: str, value: dict[str, Any]) -> DsecfsError:
    """The error that a child's ERROR frame stands for. `doing` is e.g. "read /x"."""
    number, reason = value.get("errno"), value.get("reason")
    entry = value.get("entry")
    at = f" at {entry[:400]!a}" if isinstance(entry, str) else ""
    if isinstance(number, int) and not isinstance(number, bool) and number in errno.errorcode:
        kind, hint = _KINDS.get(number, (FileProblem, ""))
        if number == errno.ENOSPC and doing.startswith("watch"):
            return NoSpace(f"{doing}: too many directories", hint="watch fewer, or not recursive")
        return kind(f"{doing}: {os.strerror(number)}{at}", hint=hint)
    if isinstance(reason, str) and reason in _REASONS:
        kind, words, hint = _REASONS[reason]
        return kind(f"{doing}: {words}{at}", hint=hint)
    return FilesError(f"{doing}: the files helper gave no answer")


def text_of(value: object) -> tuple[str, str | None]:
    """A name as text, and in base64 if the text cannot hold it. WireError."""
    if not isinstance(value, str) or len(value) > 256 << 10:
        raise wire.WireError("name")
    try:
        raw = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise wire.WireError("name") from None
    text = raw.decode("utf-8", "replace")
    exact = text.encode() == raw
    return text, None if exact else base64.b64encode(raw).decode()


def entry_of(value: object) -> Entry:
    """WireError."""
    if not isinstance(value, dict):
        raise wire.WireError("entry")
    path, path_base64 = text_of(value.get("path"))
    target, target_base64 = (
        (None, None) if value.get("target") is None else text_of(value["target"])
    )
    told = value | {
        "path": path,
        "path_base64": path_base64,
        "target": target,
        "target_base64": target_base64,
    }
    try:
        return Entry.model_validate(told, strict=True)
    except ValidationError:
        raise wire.WireError("entry") from None


def change_of(value: object) -> Change:
    """WireError."""
    if not isinstance(value, dict):
        raise wire.WireError("event")
    path, path_base64 = text_of(value.get("path"))
    try:
        return Change.model_validate(
            value | {"path": path, "path_base64": path_base64}, strict=True
        )
    except ValidationError:
        raise wire.WireError("event") from None


def list_of(value: dict[str, Any], key: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list):
        raise wire.WireError(key)
    return found


def number_of(value: dict[str, Any], key: str) -> int:
    found = value.get(key)
    if type(found) is not int or not 0 <= found < 1 << 63:
        raise wire.WireError(key)
    return found


def flag_of(value: dict[str, Any], key: str) -> bool:
    found = value.get(key)
    if type(found) is not bool:
        raise wire.WireError(key)
    return found
