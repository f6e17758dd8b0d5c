"""Watching a file or a directory with inotify(7). Called in a child.

A PART {"events": []} says that it watches; then PARTs with what happens, until the edge goes or
what is watched is gone (RESULT). What must hold: watches are put on descriptors that were opened
without following links below the top; what is made in a new directory before it is watched is told
too; events that the kernel had to drop are told as "overflow".
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from typing import Any

from dsec_runtime.files import calls, trees, wire
from dsec_runtime.files.link import Link
from dsec_runtime.files.paths import Place
from dsecfs.kernel.syscalls import closing

MAX_DIRECTORIES = 8192
_EVENT = struct.Struct("=iIII")
_BUFFER = 64 << 10
_TOLD = 64 << 10
"""Bytes of names in a frame: six times as many as JSON, when they are odd."""
_PASSED_OVER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG)
"""A directory that is gone again, or that the user may not read, or whose path is too long."""
_NAMES = {
    calls.IN_CREATE: "create",
    calls.IN_MODIFY: "modify",
    calls.IN_CLOSE_WRITE: "close-write",
    calls.IN_ATTRIB: "attributes",
    calls.IN_DELETE: "delete",
    calls.IN_MOVED_FROM: "moved-from",
    calls.IN_MOVED_TO: "moved-to",
}
_MASK = (
    sum(_NAMES)
    | calls.IN_DELETE_SELF
    | calls.IN_MOVE_SELF
    | calls.IN_DONT_FOLLOW
    | calls.IN_EXCL_UNLINK
)


def watch(place: Place, link: Link, request: dict[str, Any]) -> dict[str, Any]:
    path = place.follow(place.absolute(request["path"])) if _has_name(request["path"]) else b"/"
    with closing(place.open(path, os.O_PATH)) as seen:
        is_tree = stat.S_ISDIR(os.fstat(seen).st_mode)
    watcher = _Watcher(link, bool(request["recursive"]) and is_tree)
    if is_tree:
        with closing(place.open_directory(path)) as top:
            watcher.watch_tree(top)
            return watcher.run(top)
    with place.parent(path) as (above, name):
        os.fchdir(above)
        watcher.add(name, b"", 0)
        return watcher.run(-1)


def _has_name(path: str) -> bool:
    return path.rstrip("/").rpartition("/")[2] not in ("", ".", "..")


class _Watcher:
    def __init__(self, link: Link, recursive: bool) -> None:
        self._link = link
        self._recursive = recursive
        self._fd = calls.inotify_init()
        self._paths: dict[int, bytes] = {}
        self._top = -1
        self._events: list[dict[str, Any]] = []
        self._size = 0

    def add(self, name: bytes, path: bytes, flags: int) -> int:
        """Watch `name` in the working directory. OSError: ENOSPC when there are too many."""
        if len(self._paths) >= MAX_DIRECTORIES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        number = calls.inotify_add_watch(self._fd, name, _MASK | flags)
        self._paths[number] = path
        if self._top < 0:
            self._top = number
        return number

    def watch_tree(self, top: int) -> None:
        os.fchdir(top)
        self.add(b".", b"", calls.IN_ONLYDIR)
        if self._recursive:
            self._below(top, b"", tell=False)

    def _below(self, top: int, path: bytes, *, tell: bool) -> None:
        """Watch the directories below `path`; with `tell`, what is there is new."""
        try:
            with closing(trees.open_below(top, path)) as fd:
                for step in trees.walk(fd, denied_too=False):
                    if step.event == trees.LEAVE:
                        continue
                    full = path + b"/" + step.path if path else step.path
                    if step.event == trees.ENTER:
                        os.fchdir(step.fd)
                        self.add(b".", full, calls.IN_ONLYDIR)
                        step.skip = calls.is_kernel_tree(step.fd)
                    if tell:
                        self._note("create", full, step.event == trees.ENTER)
        except OSError as e:
            if e.errno not in _PASSED_OVER:
                raise

    def run(self, top: int) -> dict[str, Any]:
        self._link.send_json(wire.PART, {"events": []})
        while True:
            self._link.wait(self._fd)
            data = os.read(self._fd, _BUFFER)
            gone = self._take(top, data)
            self._flush()
            if gone:
                return {"gone": True}

    def _take(self, top: int, data: bytes) -> bool:
        """True when what is watched is gone."""
        at = 0
        while at < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            name = data[at : at + length].rstrip(b"\0")
            at += length
            if mask & calls.IN_Q_OVERFLOW:
                self._note("overflow", b"", False)
                continue
            if number not in self._paths:
                continue
            if mask & calls.IN_IGNORED:
                del self._paths[number]
            ends = calls.IN_IGNORED | calls.IN_DELETE_SELF | calls.IN_MOVE_SELF | calls.IN_UNMOUNT
            if number == self._top and mask & ends:
                return True
            self._happened(top, self._paths.get(number, b""), mask, name)
        return False

    def _happened(self, top: int, above: bytes, mask: int, name: bytes) -> None:
        path = above + b"/" + name if above and name else above or name
        is_tree = bool(mask & calls.IN_ISDIR)
        for bit, word in _NAMES.items():
            if mask & bit:
                self._note(word, path, is_tree)
        if not (self._recursive and is_tree and name):
            return
        if mask & calls.IN_MOVED_FROM:
            for number, at in list(self._paths.items()):
                if at == path or at.startswith(path + b"/"):
                    del self._paths[number]
                    calls.inotify_rm_watch(self._fd, number)
        elif mask & (calls.IN_CREATE | calls.IN_MOVED_TO):
            try:
                with closing(trees.open_below(top, path)) as fd:
                    os.fchdir(fd)
                    self.add(b".", path, calls.IN_ONLYDIR)
            except OSError as e:
                if e.errno not in _PASSED_OVER:
                    raise
                return
            self._below(top, path, tell=True)

    def _note(self, word: str, path: bytes, is_tree: bool) -> None:
        event = {"type": word, "path": os.fsdecode(path), "directory": is_tree}
        if self._events and self._events[-1] == event:
            return
        self._events.append(event)
        self._size += len(path) + 64
        if self._size >= _TOLD:
            self._flush()

    def _flush(self) -> None:
        if self._events:
            self._link.send_json(wire.PART, {"events": self._events})
            self._events = []
            self._size = 0
