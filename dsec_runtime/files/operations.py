"""stat, list, mkdir, move, remove, read: one function each, called in a child.

What must hold: everything is bounded by what the request says or by a constant; directories and
files may change at any moment, so what vanishes between two calls is left out or is an error,
never a wrong answer.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from typing import Any

from dsec_runtime.files import trees, wire
from dsec_runtime.files.calls import rename_noreplace
from dsec_runtime.files.link import Link
from dsec_runtime.files.paths import Place, Refusal, entry, open_regular, read_link, split
from dsecfs.kernel.syscalls import closing

BATCH = 256
"""Entries in a frame: each is at most some 15 KB of JSON (a path of 4096 bytes, escaped, twice)."""
_BATCH_BYTES = 512 << 10


def stat_(place: Place, link: Link, request: dict[str, Any]) -> dict[str, Any]:
    path = place.absolute(request["path"])
    flags = os.O_PATH if request["follow"] else os.O_PATH | os.O_NOFOLLOW
    with closing(place.open(path, flags)) as fd:
        found = os.fstat(fd)
        target = read_link(b"", fd) if stat.S_ISLNK(found.st_mode) else None
        return entry(found, path, target)


def list_(place: Place, link: Link, request: dict[str, Any]) -> dict[str, Any]:
    """Entries as PARTs, level by level; names in order within a directory that was read whole."""
    top = place.absolute(request["path"])
    left = int(request["limit"])
    batch: list[dict[str, Any]] = []
    size = 0
    truncated = False
    levels: deque[tuple[bytes, int]] = deque([(b"", 1)])
    with closing(place.open_directory(top)) as root:
        while levels and not truncated:
            below, depth = levels.popleft()
            try:
                fd = trees.open_below(root, below)
            except OSError:
                continue  # gone, or not ours to read: its own entry says that it is there
            with closing(fd), os.scandir(fd) as entries:
                names: list[bytes] = []
                for found in entries:
                    if len(names) >= left:
                        truncated = True
                        break
                    names.append(os.fsencode(found.name))
                for name in sorted(names):
                    try:
                        seen = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    path = below + b"/" + name if below else name
                    target = read_link(name, fd) if stat.S_ISLNK(seen.st_mode) else None
                    batch.append(entry(seen, path, target))
                    size += len(path) + len(target or b"") + 256
                    left -= 1
                    if len(batch) >= BATCH or size * 6 > _BATCH_BYTES:
                        link.send_json(wire.PART, {"entries": batch})
                        batch, size = [], 0
                    if stat.S_ISDIR(seen.st_mode) and depth < request["depth"]:
                        levels.append((path, depth + 1))
    if batch:
        link.send_json(wire.PART, {"entries": batch})
    return {"truncated": truncated}


def mkdir(place: Place, link: Link, request: dict[str, Any]) -> dict[str, Any]:
    path = place.absolute(request["path"])
    if request["parents"]:
        above, _ = split(path)
        place.make_directories(above, 0o755)
    with place.parent(path) as (fd, name):
        made = True
        try:
            os.mkdir(name, request["mode"], dir_fd=fd)
            if request["mode"] & 0o6000:  # mkdir(2) leaves these out
                os.chmod(name, request["mode"], dir_fd=fd)
        except FileExistsError:
            if not request["parents"]:
                raise
            made = False
        with closing(place.open(path, os.O_PATH | os.O_DIRECTORY)) as new:
            return {"made": made, "entry": entry(os.fstat(new), path)}


def move(place: Place, link: Link, request: dict[str, Any]) -> dict[str, Any]:
    """rename(2); what cannot be renamed (another file system, a directory of the image) is copied
    and then removed."""
    source, target = place.absolute(request["source"]), place.absolute(request["target"])
    with place.parent(source) as (from_fd, from_name), place.parent(target) as (to_fd, to_name):
        try:
            if request["replace"]:
                os.rename(from_name, to_name, src_dir_fd=from_fd, dst_dir_fd=to_fd)
            else:
                rename_noreplace(from_fd, from_name, to_fd, to_name)
        except OSError as e:
            if e.errno != errno.EXDEV:
                raise
            trees.move_by_copy(from_fd, from_name, to_fd, to_name, replace=request["replace"])
        found = os.stat(to_name, dir_fd=to_fd, follow_symlinks=False)
    return {"entry": entry(found, target)}


def remove(place: Place, link: Link, request: dict[str, Any]) -> dict[str, Any]:
    """A file, an empty directory, or with `recursive` a tree. Symlinks are not followed."""
    with place.parent(place.absolute(request["path"])) as (fd, name):
        try:
            os.unlink(name, dir_fd=fd)
            return {"removed": 1}
        except (IsADirectoryError, PermissionError) as e:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                raise e from None
        if request["recursive"]:
            return {"removed": trees.remove(fd, name)}
        os.rmdir(name, dir_fd=fd)
        return {"removed": 1}


def read(place: Place, link: Link, request: dict[str, Any]) -> dict[str, Any]:
    """A PART that says what comes, the bytes as DATA.

    The length is fixed when it starts: what a file grows by is left out, and one that gets shorter
    is an error. Files of /proc and /sys say that they are empty: they are read to their end.
    """
    path = place.absolute(request["path"])
    with closing(open_regular(place, path)) as fd:
        found = os.fstat(fd)
        size, first, last = found.st_size, request["first"], request["last"]
        if size == 0 and first is None and last is None:
            link.send_json(wire.PART, {"entry": entry(found, path), "start": 0, "length": None})
            while data := os.read(fd, wire.MAX_DATA):
                link.send(wire.DATA, data)
            return {}
        start, length = extent(size, first, last)
        link.send_json(wire.PART, {"entry": entry(found, path), "start": start, "length": length})
        send_file(link, fd, start, length)
        return {}


def extent(size: int, first: int | None, last: int | None) -> tuple[int, int]:
    """Start and length of a range of RFC 9110, 14.1.2: `last` is inclusive; without `first` it is
    how many bytes from the end. Refusal if nothing of it is there."""
    if first is None and last is None:
        return 0, size
    if first is None:
        start, end = max(0, size - (last or 0)), size
    else:
        start, end = first, size if last is None else min(size, last + 1)
    if start >= end:
        raise Refusal(wire.RANGE)
    return start, end - start


def send_file(link: Link, fd: int, start: int, length: int) -> None:
    """Exactly `length` bytes as DATA. Refusal when the file has become shorter."""
    buffer = memoryview(bytearray(wire.MAX_DATA))
    at, end = start, start + length
    while at < end:
        count = os.preadv(fd, [buffer[: min(len(buffer), end - at)]], at)
        if count == 0:
            raise Refusal(wire.CHANGED)
        link.send(wire.DATA, buffer[:count])
        at += count
