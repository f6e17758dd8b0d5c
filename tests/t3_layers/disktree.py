"""Oracle: what is really on a file system, as the same plain values `listing` gives."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsecfs.layers.tree import Inode


def disk_listing(top: str, *, xattrs: bool = True) -> dict[bytes, tuple[Any, ...]]:
    """Everything below and including `top`. Whiteouts and opaque are what overlayfs uses."""
    base = os.fsencode(top)
    out: dict[bytes, tuple[Any, ...]] = {}
    first: dict[tuple[int, int], bytes] = {}
    todo = [b""]
    while todo:
        path = todo.pop()
        full = os.path.join(base, path) if path else base
        st = os.lstat(full)
        names: list[bytes] = sorted(os.listdir(full)) if stat.S_ISDIR(st.st_mode) else []
        # overlayfs lists whiteouts of a directory that it does not merge with another.
        names = [n for n in names if os.path.lexists(os.path.join(full, n))]
        attrs: dict[bytes, bytes] = {}
        if xattrs:
            for name in os.listxattr(full, follow_symlinks=False):
                attrs[name.encode()] = os.getxattr(full, name, follow_symlinks=False)
        opaque = attrs.pop(b"trusted.overlay.opaque", b"") == b"y"
        body = ""
        if stat.S_ISREG(st.st_mode):
            with open(full, "rb") as f:
                body = hashlib.sha256(f.read()).hexdigest()
        out[path] = (
            stat.filemode(st.st_mode),
            st.st_uid,
            st.st_gid,
            st.st_mtime_ns,
            st.st_rdev if stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode) else 0,
            os.readlink(full) if stat.S_ISLNK(st.st_mode) else b"",
            tuple(sorted(attrs.items())),
            body,
            path,
            opaque,
        )
        todo.extend(path + b"/" + n if path else n for n in reversed(names))
    # Hard links by the first path, in the order of a sorted walk.
    for path in walk_order(out):
        st = os.lstat(os.path.join(base, path) if path else base)
        if not stat.S_ISDIR(st.st_mode):
            earliest = first.setdefault((st.st_dev, st.st_ino), path)
            out[path] = (*out[path][:8], earliest, out[path][9])
    return out


def walk_order(paths: Any) -> list[bytes]:
    """Paths in the order `tree.walk` visits them: by components."""
    return sorted(paths, key=lambda p: p.split(b"/") if p else [])


def difference(ours: dict[bytes, Any], theirs: dict[bytes, Any]) -> list[str]:
    """Readable differences, at most 20; empty when equal."""
    lines = []
    for path in walk_order({*ours, *theirs}):
        a, b = ours.get(path), theirs.get(path)
        if a != b:
            lines.append(f"{path!r}: ours {a} theirs {b}")
    return lines[:20]


def write_tree(root: Inode, top: str, content: Callable[[Inode], bytes]) -> None:
    """Make a tree real below the existing directory `top`, in overlayfs's form."""
    first: dict[Inode, bytes] = {}
    todo: list[tuple[bytes, Inode, bool]] = [(os.fsencode(top), root, False)]
    while todo:
        path, inode, done = todo.pop()
        if not done:
            if inode in first:
                os.link(first[inode], path, follow_symlinks=False)
                continue
            first[inode] = path
            if inode.is_dir:
                if inode is not root:
                    os.mkdir(path)
                todo.append((path, inode, True))
                todo.extend((path + b"/" + n, c, False) for n, c in (inode.children or {}).items())
                continue
            if inode.is_reg:
                with open(path, "wb") as f:
                    f.write(content(inode))
            elif inode.is_symlink:
                os.symlink(inode.target, path)
            else:
                os.mknod(path, inode.mode, inode.rdev)
        os.chown(path, inode.uid, inode.gid, follow_symlinks=False)
        if not inode.is_symlink:
            os.chmod(path, inode.mode & 0o7777)
        for name, value in inode.xattrs.items():
            os.setxattr(path, name, value, follow_symlinks=False)
        if inode.opaque:
            os.setxattr(path, b"trusted.overlay.opaque", b"y")
        os.utime(path, ns=(0, inode.mtime_ns), follow_symlinks=False)


@contextlib.contextmanager
def overlay(layers: list[str], target: Path) -> Iterator[Path]:
    """A read-only overlay of directories, bottom first. Raises OSError if it cannot be made."""
    libc = ctypes.CDLL(None, use_errno=True)
    target.mkdir(exist_ok=True)
    options = "lowerdir=" + ":".join(reversed(layers)) + ",redirect_dir=nofollow"
    if libc.mount(b"overlay", bytes(target), b"overlay", 1, options.encode()):
        raise OSError(ctypes.get_errno(), f"overlay mount with {options}")
    try:
        yield target
    finally:
        if libc.umount2(bytes(target), 0):
            raise OSError(ctypes.get_errno(), "umount")
