"""Writing one file: whole or not at all. Called in a child.

What must hold: readers of the path see the old file or the new one; what is half written is
removed when the upload is cut off, the disk is full or we are told to end; a file that is replaced
keeps its owner, group and mode, or is not replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from typing import Any

from dsec_runtime.files import wire
from dsec_runtime.files.link import Link
from dsec_runtime.files.paths import Place, Refusal, entry, split

DEFAULT_MODE = 0o644
_TEMPORARY = b".dsec-%s.part"
_TRIES = 8


def write(place: Place, link: Link, request: dict[str, Any]) -> dict[str, Any]:
    """The upload becomes the content of `path`; through symlinks, as open(2) would."""
    path = place.absolute(request["path"])
    if request["make_parents"]:
        place.make_directories(split(path)[0], 0o755)
    path = place.follow(path)
    with place.parent(path) as (fd, name):
        with_mode = request["mode"]
        old = _replaced(fd, name)
        if old is None and with_mode is None:
            with_mode = DEFAULT_MODE
        part, file = make_temporary(fd)
        try:
            try:
                while data := link.upload():
                    write_all(file, data)
                keep(file, old, with_mode)
                if request["sync"]:
                    os.fsync(file)
                found = os.fstat(file)
            finally:
                os.close(file)  # may be the first to say that the disk is full
            os.rename(part, name, src_dir_fd=fd, dst_dir_fd=fd)
        except BaseException:
            # What went wrong first is what counts, also when the sandbox has taken the file away.
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=fd)
            raise
        if request["sync"]:
            _sync_directory(place, path)
        return {"entry": entry(found, path), "replaced": old is not None}


def _replaced(fd: int, name: bytes) -> os.stat_result | None:
    """What would be replaced. Refusal or IsADirectoryError if that must not be."""
    try:
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise Refusal(wire.NOT_REGULAR)
    if not os.access(name, os.W_OK, dir_fd=fd, effective_ids=True):
        # Who may write to the directory could replace it; who protects a file means it.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return found


def make_temporary(fd: int) -> tuple[bytes, int]:
    """A new file in the directory `fd`, for us alone: its name, and itself open for writing."""
    for _ in range(_TRIES):
        name = _TEMPORARY % secrets.token_hex(8).encode()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return name, os.open(name, flags, 0o600, dir_fd=fd)
        except FileExistsError:
            continue
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def keep(file: int, old: os.stat_result | None, mode: int | None) -> None:
    """Give the new file what the old one had. Refusal if its owner cannot be kept.

    As after any write by its user, set-user-ID and set-group-ID are gone unless `mode` has them.
    """
    if old is not None:
        new = os.fstat(file)
        if old.st_uid != new.st_uid:
            raise Refusal(wire.OWNER)
        if old.st_gid != new.st_gid:
            try:
                os.fchown(file, -1, old.st_gid)
            except PermissionError:
                raise Refusal(wire.OWNER) from None
        if mode is None:
            mode = stat.S_IMODE(old.st_mode) & 0o1777
    if mode is not None:
        os.fchmod(file, mode)


def _sync_directory(place: Place, path: bytes) -> None:
    fd = place.open_directory(split(path)[0])
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
