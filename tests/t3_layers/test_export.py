"""Export: what is written, tar unpacks and publish reads back as the same tree."""

from __future__ import annotations

import io
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from dsecfs.layers.content import LayerContent
from dsecfs.layers.export import export_tar
from dsecfs.layers.sources.tar import read_tar
from dsecfs.layers.tree import Inode, directory, walk
from tests.t3_layers.memsink import MemorySink


class Content:
    """A tree whose files are full of the letter x."""

    def __init__(self, root: Inode) -> None:
        self.root = root

    def pieces(self, inode: Inode) -> Iterator[bytes]:
        if inode.size:
            yield b"x" * inode.size


def exported(root: Inode) -> bytes:
    out = io.BytesIO()
    export_tar(cast(LayerContent, Content(root)), out)
    return out.getvalue()


def values(root: Inode) -> dict[bytes, object]:
    return {
        path: (i.mode, i.uid, i.gid, i.mtime_ns, i.rdev, i.size, i.target, i.xattrs, i.opaque)
        for path, i in walk(root)
    }


names = st.binary(min_size=1, max_size=255).filter(
    lambda n: not {0, 47} & set(n) and n not in (b".", b"..") and not n.startswith(b".wh.")
)
ids = st.sampled_from([0, 1000, 0o7777777, 0o10000000, 0xFFFFFFFE])
times = st.sampled_from([0, -1, 1, 10**9, -(10**18), (1 << 62) * 10**9, 0o100000000000 * 10**9])
xattrs = st.dictionaries(
    st.builds(
        lambda prefix, rest: prefix + rest,
        st.sampled_from([b"user.", b"trusted.", b"trusted.overlay.overlay."]),
        st.text(alphabet="a=%25 3D", min_size=1, max_size=9).map(str.encode)
        | st.binary(min_size=1, max_size=9).filter(lambda n: 0 not in n and n[-1:] != b"."),
    ),
    st.binary(max_size=40),
    max_size=3,
)


@st.composite
def inodes(draw: st.DrawFn) -> Inode:
    kind = draw(st.sampled_from([stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR]))
    inode = Inode(kind | draw(st.integers(0, 0o7777)), draw(ids), draw(ids), draw(times))
    inode.xattrs = draw(xattrs)
    if kind == stat.S_IFREG:
        inode.size = draw(st.sampled_from([0, 1, 512, 5000]))
    elif kind == stat.S_IFLNK:
        inode.mode = kind | 0o777
        inode.target = draw(names)
        inode.size = len(inode.target)
    elif kind == stat.S_IFCHR:
        inode.rdev = os.makedev(draw(st.integers(1, 0xFFF)), draw(st.integers(0, 0xFFFFF)))
    return inode


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(names, inodes(), max_size=4), st.dictionaries(names, inodes(), max_size=3))
def test_a_tree_reads_back_as_it_was(top: dict[bytes, Inode], inner: dict[bytes, Inode]) -> None:
    root = directory()
    below = directory(0o1777, uid=0xFFFFFFFE)
    below.children = dict(inner)
    root.children = {**top, b"d" * 200: below}
    again = read_tar(io.BytesIO(exported(root)), MemorySink(), "export")
    assert values(again.root) == values(root)


def test_marks_links_and_names_that_no_locale_has(tmp_path: Path) -> None:
    root = directory()
    file = Inode(0o100644, size=3, mtime_ns=1)
    hidden = directory()
    hidden.opaque = True
    root.children = {b"\xff": file, b"link": file, b"gone": Inode(stat.S_IFCHR), b"o": hidden}
    archive = exported(root)
    again = read_tar(io.BytesIO(archive), MemorySink(), "export", whiteouts=True).root.children
    assert again is not None
    assert again[b"\xff"] is again[b"link"]
    assert again[b"gone"].is_whiteout
    assert again[b"o"].opaque
    # The oracle: GNU tar.
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archive, check=True, timeout=60)
    assert sorted(os.listdir(os.fsencode(tmp_path))) == [b".wh.gone", b"link", b"o", b"\xff"]
    assert (tmp_path / "link").read_bytes() == b"xxx"
    assert (tmp_path / "link").stat().st_mtime_ns == 1
    assert len(archive) % 10240 == 0
