"""Layers for tests of composed trees: drawn, written as images, shown by the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.tree import Extent, Inode, directory, whiteout
from tests.support.mounts import mounted
from tests.support.trees import Blob, read_xattrs

_libc = ctypes.CDLL(None, use_errno=True)
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")
"""cap_net_bind_service+ep (struct vfs_cap_data, revision 2)."""
ESCAPED: dict[bytes, bytes] = {
    b"trusted.overlay.overlay.redirect": b"/elsewhere",
    b"trusted.overlay.overlay.overlay.opaque": b"y",
    b"user.overlay.overlay.metacopy": b"",
}
"""Marks of a foreign overlay as layers hold them."""
NAMES = [b"a", b"b", b"c", b"d", b"\xff\xfe"]
BLOCKS = 32


@st.composite
def layers(draw: st.DrawFn, blob_blocks: int = BLOCKS) -> Inode:
    """One layer: few names, so that layers meet; every type; data in one blob."""

    def leaf() -> Inode:
        kind = draw(st.sampled_from("fffhlwwpcs"))
        made: Inode
        if kind == "w":
            return whiteout()
        if kind == "l":
            made = Inode(stat.S_IFLNK | 0o777, target=draw(st.sampled_from([b"a", b"../b", b"/c"])))
        elif kind in "pcs":
            mode = {"p": stat.S_IFIFO, "c": stat.S_IFCHR, "s": stat.S_IFSOCK}[kind]
            made = Inode(mode | 0o640, rdev=os.makedev(1, 3) if kind == "c" else 0)
        else:
            made = Inode(stat.S_IFREG | draw(st.sampled_from([0o644, 0o4755, 0o600])))
            blocks = draw(st.integers(0, 3))
            at = draw(st.integers(0, blob_blocks - 4))
            extents = []
            if blocks:
                extents.append(Extent(0, 0, at * 4096, blocks * 4096))
            if kind == "h":  # a hole, and data behind it
                extents.append(Extent((blocks + 2) * 4096, 0, (at + 3) * 4096, 100))
            made.extents = tuple(extents)
            made.size = extents[-1].logical + extents[-1].length if extents else 0
            made.xattrs = dict(
                draw(
                    st.sampled_from(
                        [{}, {b"user.x": b"1"}, {b"security.capability": CAPABILITY}, ESCAPED]
                    )
                )
            )
        made.uid = draw(st.sampled_from([0, 1000, 70000]))
        made.gid = draw(st.sampled_from([0, 1000]))
        made.mtime_ns = draw(st.sampled_from([0, 1_700_000_000_123_456_789, -5_000_000_000]))
        return made

    def fill(depth: int) -> Inode:
        here = directory(draw(st.sampled_from([0o755, 0o1777, 0o700])))
        here.uid = draw(st.sampled_from([0, 1000]))
        here.mtime_ns = draw(st.sampled_from([0, 10**18]))
        here.xattrs = draw(st.sampled_from([{}, {b"user.d": b"dir"}, ESCAPED]))
        assert here.children is not None
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4)):
            if depth and draw(st.booleans()):
                here.children[name] = fill(depth - 1)
                here.children[name].opaque = draw(st.sampled_from([False, False, True]))
            else:
                here.children[name] = leaf()
        files = [c for c in here.children.values() if c.is_reg]
        linked: bool = draw(st.booleans())
        if files and linked:
            here.children[b"link"] = files[0]
        return here

    return fill(3)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def image_of(root: Inode, blob: Blob, number: int) -> bytes:
    """The image of a layer whose only blob is called after `number`."""
    tag = digest_of(f"blob{number}").encode()
    return write_erofs(root, [Device(tag, blob.size)], uuid_salt=bytes([number]))


REFUSED = b"refused"
"""What root cannot read either: files whose owner is mapped to nobody."""


def _xattrs(path: bytes) -> dict[bytes, bytes]:
    try:
        return read_xattrs(path)
    except PermissionError:
        return {REFUSED: b""}


def shown(
    top: Path, *, skip: Collection[bytes] = (), blocks: bool = True
) -> dict[bytes, tuple[Any, ...]]:
    """Everything the kernel shows below `top` but for the paths `skip`; names of one inode by
    their first. `blocks`: all blocks of a file are counted, also those of holes."""
    out: dict[bytes, tuple[Any, ...]] = {}
    first: dict[tuple[int, int], bytes] = {}
    todo = [b""]
    base = os.fsencode(top)
    while todo:
        path = todo.pop()
        full = base + b"/" + path if path else base
        info = os.lstat(full)
        is_dir = stat.S_ISDIR(info.st_mode)
        body = b""
        if stat.S_ISREG(info.st_mode):
            try:
                with open(full, "rb") as f:
                    body = hashlib.sha256(f.read()).digest()
            except PermissionError:
                body = REFUSED
            assert not blocks or info.st_blocks == -(-info.st_size // 4096) * 8, path
        out[path] = (
            stat.filemode(info.st_mode),
            oct(info.st_mode),
            info.st_uid,
            info.st_gid,
            info.st_mtime_ns,
            info.st_rdev if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode) else 0,
            0 if is_dir else info.st_size,
            os.readlink(full) if stat.S_ISLNK(info.st_mode) else b"",
            tuple(sorted(_xattrs(full).items())),
            body,
            path if is_dir else first.setdefault((info.st_dev, info.st_ino), path),
        )
        if is_dir:
            # overlayfs lists whiteouts of a directory that it does not merge with another.
            names = sorted(n for n in os.listdir(full) if os.path.lexists(full + b"/" + n))
            inner = (path + b"/" + n if path else n for n in reversed(names))
            todo.extend(p for p in inner if p not in skip)
    return out


@contextlib.contextmanager
def kernel_overlay(
    images: Sequence[Path], blobs: Sequence[Path], target: Path
) -> Iterator[Path]:
    """What the kernel makes of the layers (bottom first): EROFS mounts under an overlay."""
    with contextlib.ExitStack() as mounts:
        lowers = [
            mounts.enter_context(mounted(image, [blob]))
            for image, blob in zip(images, blobs, strict=True)
        ]
        if len(lowers) == 1:  # a read-only overlay wants two
            empty = target.parent / "empty"
            empty.mkdir(exist_ok=True)
            lowers.insert(0, empty)
        target.mkdir(exist_ok=True)
        options = "lowerdir=" + ":".join(str(p) for p in reversed(lowers)) + ",xino=off"
        if _libc.mount(b"overlay", bytes(target), b"overlay", 1, options.encode()):
            raise OSError(ctypes.get_errno(), f"overlay mount with {options}")
        mounts.callback(_libc.umount2, bytes(target), 2)
        yield target
