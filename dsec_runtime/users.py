"""Users, groups, directories and programs of an image, looked up without trusting it.

Everything is opened relative to a descriptor of the merged tree with RESOLVE_IN_ROOT: a
symlink in the image, absolute or not, cannot lead out of it. Only regular files are read,
never more than MAX_FILE bytes, and opening never waits (a fifo named /etc/passwd).
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsec_runtime.errors import NoSuchUser, NotExecutable, ProgramNotFound, SandboxError
from dsec_runtime.uids import RANGE
from dsecfs.kernel.syscalls import closing, open_in_root

MAX_FILE = 4 << 20
"""Bytes of /etc/passwd or /etc/group that are read."""

_PT_INTERP = 3
_MAX_HEADERS = 64
"""Program headers that are looked at; linkers put PT_INTERP among the first."""
_KERNEL_TREES = {"proc", "sys", "dev"}
"""What the container has there is not what the image has."""


@dataclass(frozen=True, slots=True)
class User:
    """Who a process is."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    """Supplementary groups."""
    home: str


def _read(root: int, path: str) -> list[list[str]]:
    """Lines of a colon-separated file; [] if it is missing or no regular file."""
    try:
        fd = open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return []
    with closing(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        data = b""
        while len(data) < MAX_FILE and (more := os.read(fd, 65536)):
            data += more
    return [line.split(":") for line in data.decode(errors="surrogateescape").splitlines()]


def _number(text: str) -> int | None:
    """An id that is mapped in a sandbox."""
    if text.isascii() and text.isdigit() and len(text) < 11:
        value = int(text)
        if value < RANGE:
            return value
        raise NoSuchUser(
            f"user or group {text} is outside of a sandbox's ids", hint=f"use 0 to {RANGE - 1}"
        )
    return None


def _field(fields: Sequence[str], index: int) -> int | None:
    try:
        return _number(fields[index])
    except (IndexError, NoSuchUser):
        return None


def find_user(root: int, text: str) -> User:
    """Resolve NAME, UID, NAME:GROUP or UID:GID as docker does; "" is root. NoSuchUser."""
    name, _, group = (text or "0").partition(":")
    passwd = _read(root, "etc/passwd")
    uid = _number(name)
    entry = next((e for e in passwd if e[0] == name and _field(e, 2) is not None), None)
    if entry is None and uid is not None:
        entry = next((e for e in passwd if _field(e, 2) == uid), None)
    if entry is None and uid is None:
        raise NoSuchUser(
            f"no user {name[:64]!r} in the environment's /etc/passwd",
            hint="use a number, or a name that the base has",
        )
    gid, home = 0, "/"
    if entry is not None:
        uid = _field(entry, 2)
        gid = _field(entry, 3) or 0
        home = entry[5] if len(entry) > 5 and entry[5].startswith("/") else "/"
    assert uid is not None
    groups = _read(root, "etc/group") if group or entry is not None else []
    if group:
        found = _number(group)
        if found is None:
            found = next((_field(g, 2) for g in groups if g[0] == group), None)
        if found is None:
            raise NoSuchUser(
                f"no group {group[:64]!r} in the environment's /etc/group", hint="use a number"
            )
        return User(uid, found, (), home)
    more = {
        number
        for g in groups
        if entry is not None and len(g) > 3 and entry[0] in g[3].split(",")
        if (number := _field(g, 2)) is not None
    }
    return User(uid, gid, tuple(sorted(more - {gid})), home)


def _is_kernels(path: str) -> bool:
    return os.path.normpath(path).lstrip("/").partition("/")[0] in _KERNEL_TREES


def check_directory(root: int, path: str) -> None:
    """SandboxError unless `path` is an absolute path of a directory in the tree."""
    if not path.startswith("/"):
        raise SandboxError(f"working directory {path!r}: not an absolute path")
    if _is_kernels(path):
        return
    try:
        os.close(open_in_root(root, path, os.O_PATH | os.O_DIRECTORY))
    except OSError as e:
        raise SandboxError(
            f"working directory {path}: {e.strerror}", hint="it must exist in the environment"
        ) from None


def check_program(root: int, program: str, cwd: str, env: Mapping[str, str]) -> None:
    """Find `program` as execvp would. ProgramNotFound, NotExecutable.

    Asked before the start, because PID 1 could only say that it failed.
    """
    if "/" in program:
        candidates = [os.path.join(cwd, program)]
    else:
        path = env.get("PATH", "/usr/local/bin:/usr/bin:/bin")
        candidates = [os.path.join(cwd, part or ".", program) for part in path.split(":")]
    refused = ""
    for candidate in candidates:
        if _is_kernels(candidate):
            return
        try:
            fd = open_in_root(root, candidate)
        except OSError:
            continue
        with closing(fd):
            mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode) and mode & 0o111:
            _check_interpreter(root, candidate)
            return
        refused = candidate
    if refused:
        raise NotExecutable(f"{refused}: not an executable file in the environment")
    where = "" if "/" in program else " in $PATH"
    raise ProgramNotFound(
        f"no program {program[:200]!r}{where} of the environment",
        hint="check its name, or add the toolkit that has it",
    )


def _check_interpreter(root: int, program: str) -> None:
    """NotExecutable if what the kernel starts a script or a dynamic program with is missing:
    execve(2) then says that there is no such file, which is puzzling."""
    try:
        fd = open_in_root(root, program, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return  # execve(2) shall say what it thinks of it
    with closing(fd):
        try:
            name = _interpreter(fd)
        except (OSError, struct.error, OverflowError):
            return
    if not name.startswith("/") or _is_kernels(name):
        return
    try:
        os.close(open_in_root(root, name))
    except OSError as e:
        if e.errno == errno.ENOENT:
            raise NotExecutable(
                f"{program}: its interpreter {name[:200]!r} is not in the environment",
                hint="take an environment or a toolkit that has it",
            ) from None


def _interpreter(fd: int) -> str:
    """What follows `#!`, or the PT_INTERP of an ELF file (elf(5)) of this machine; "" if none."""
    head = os.pread(fd, 256, 0)
    if head.startswith(b"#!"):
        words = head[2:].partition(b"\n")[0].split(None, 1)
        return os.fsdecode(words[0]) if words else ""
    if head[:6] not in (b"\x7fELF\2\1", b"\x7fELF\1\1"):
        return ""
    if wide := head[4] == 2:
        (table,), (size, count) = (
            struct.unpack_from("<Q", head, 32),
            struct.unpack_from("<HH", head, 54),
        )
    else:
        (table,), (size, count) = (
            struct.unpack_from("<I", head, 28),
            struct.unpack_from("<HH", head, 42),
        )
    for number in range(min(count, _MAX_HEADERS)):
        header = os.pread(fd, 56, table + number * size)
        (kind,) = struct.unpack_from("<I", header)
        if kind == _PT_INTERP:
            at, length = (
                struct.unpack_from("<Q16xQ", header, 8)
                if wide
                else struct.unpack_from("<I8xI", header, 4)
            )
            return os.fsdecode(os.pread(fd, min(length, 4096), at).partition(b"\0")[0])
    return ""
