"""Changes to a sandbox's own files before it starts: a missing user, names of hosts.

What must hold: everything is opened below the tree's root (RESOLVE_IN_ROOT): an image with
symlinks leads nowhere else; what is made belongs to the sandbox's range of ids.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import stat
from collections.abc import Mapping

from dsec_runtime.errors import NoSuchUser, SandboxError
from dsec_runtime.users import User, find_user
from dsecfs.errors import BadInput
from dsecfs.kernel.syscalls import closing, open_in_root

_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}\Z")
_FIRST_UID = 1000
_LAST_UID = 60000


def ensure_user(tree: int, text: str, first_id: int) -> User:
    """Find a user; make one of that name, with a home below /home, if there is none.

    `first_id` is the start of the sandbox's range. NoSuchUser for a missing group, or a name that
    useradd would not take.
    """
    try:
        return find_user(tree, text)
    except NoSuchUser:
        name, sign, _ = text.partition(":")
        if sign or not _USER.match(name):
            raise
    uid = _free_uid(tree)
    home = f"/home/{name}"
    append(tree, "etc/passwd", f"{name}:x:{uid}:{uid}::{home}:/bin/sh\n", first_id)
    append(tree, "etc/group", f"{name}:x:{uid}:\n", first_id)
    for path, mode, owner in (("home", 0o755, 0), (home.lstrip("/"), 0o750, uid)):
        parent, base = os.path.split(path)
        with closing(open_in_root(tree, parent or ".", os.O_PATH | os.O_DIRECTORY)) as at:
            with contextlib.suppress(FileExistsError):
                os.mkdir(base, mode, dir_fd=at)
                os.chown(
                    base, first_id + owner, first_id + owner, dir_fd=at, follow_symlinks=False
                )
    return find_user(tree, text)


def _free_uid(tree: int) -> int:
    taken = set()
    with contextlib.suppress(OSError):
        for line in _read(tree, "etc/passwd").splitlines():
            with contextlib.suppress(ValueError, IndexError):
                taken.add(int(line.split(":")[2]))
    for uid in range(_FIRST_UID, _LAST_UID):
        if uid not in taken:
            return uid
    raise NoSuchUser("no free user id in the environment", hint="name a user that it has")


def add_hosts(tree: int, hosts: Mapping[str, str], first_id: int) -> None:
    """Append to /etc/hosts. BadInput for what is no address."""
    lines = []
    for name, address in hosts.items():
        try:
            lines.append(f"{ipaddress.ip_address(address)}\t{name}\n")
        except ValueError:
            raise BadInput(
                f"extra_hosts: {name}: {address[:60]!r} is no address", hint="e.g. 192.0.2.7"
            ) from None
    append(tree, "etc/hosts", "".join(lines), first_id)


def append(tree: int, path: str, text: str, first_id: int) -> None:
    """Append to a regular file, made with mode 0644 if it is missing. SandboxError."""
    parent, name = os.path.split(path)
    flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
    try:
        try:
            fd = open_in_root(tree, path, flags)
        except FileNotFoundError:
            with closing(open_in_root(tree, parent, os.O_PATH | os.O_DIRECTORY)) as at:
                fd = os.open(
                    name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=at
                )
                os.fchown(fd, first_id, first_id)
        with closing(fd):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SandboxError(f"/{path} of the environment is no regular file")
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                text = f"\n{text}"
            os.write(fd, text.encode())
    except OSError as e:
        raise SandboxError(f"append to /{path} of the sandbox: {e.strerror}") from None


def _read(tree: int, path: str) -> str:
    with closing(open_in_root(tree, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)) as fd:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        return os.read(fd, 4 << 20).decode(errors="replace")
