"""Who provides a path, what hides what and how much it matters, and whether contents are equal."""

from __future__ import annotations

import random
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from dsecfs.errors import BadInput, NotFound
from dsecfs.layers.content import LayerContent, same_content
from dsecfs.layers.inspect import check, classify, explain, lookup
from dsecfs.layers.names import parse_name
from dsecfs.layers.publish import BlobOptions, Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.layers.tree import Inode, whiteout
from dsecfs.store.directory import DirectoryStore


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store", create=True)


def layer(
    store: DirectoryStore, place: Path, files: dict[str, bytes | str], number: int = 0
) -> LayerContent:
    """A layer of files (bytes) and symbolic links (text)."""
    archive = place / f"{number}.tar"
    with tarfile.open(archive, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, BytesIO(content))
    with open_image(f"tar:{archive}", platform="linux/amd64") as image:
        published = publish_source(
            store,
            image.layers[0],
            parse_name(f"base/test:{number}"),
            Meta("base", "linux/amd64"),
            options=BlobOptions(chunk_size=65536),
        )
    return LayerContent(store, published.digest)


def hide(content: LayerContent, path: str) -> None:
    """Put a whiteout into a tree that was read: no archive can bring one along here."""
    parent, _, name = path.rpartition("/")
    node = lookup(content.root, parent.encode())
    assert node is not None and node.children is not None
    node.children[name.encode()] = whiteout()


def test_the_topmost_layer_provides(store: DirectoryStore, tmp_path: Path) -> None:
    base = layer(store, tmp_path, {"etc/a": b"1", "etc/b": b"1", "bin": "usr/bin"}, 0)
    top = layer(store, tmp_path, {"etc/a": b"2", "usr/bin/x": b"x"}, 1)
    found = explain([base, top], b"/etc/a")
    assert found.provider == 1
    assert [(s.layer, s.what, s.shows) for s in found.stands] == [
        (1, "file", True),
        (0, "file", False),
    ]
    assert explain([base, top], b"etc/b").provider == 0
    merged = explain([base, top], b"etc")
    assert [(s.layer, s.shows) for s in merged.stands] == [(1, True), (0, True)]
    through = explain([base, top], b"/bin/../bin/x")
    assert (through.path, through.provider) == (b"usr/bin/x", 1)


def test_whiteouts_opaque_directories_and_files_in_the_way(
    store: DirectoryStore, tmp_path: Path
) -> None:
    base = layer(store, tmp_path, {"a/gone": b"1", "a/kept": b"2", "d/x": b"3"}, 0)
    top = layer(store, tmp_path, {"a/new": b"4", "d": b"a file"}, 1)
    hide(top, "a/gone")
    found = explain([base, top], b"a/gone")
    assert found.provider is None
    assert [(s.what, s.shows) for s in found.stands] == [("whiteout", False), ("file", False)]
    assert explain([base, top], b"d/x").provider is None
    directory = lookup(top.root, b"a")
    assert directory is not None
    directory.opaque = True
    assert explain([base, top], b"a/kept").provider is None
    assert [s.shows for s in explain([base, top], b"a").stands] == [True, False]
    hidden = {h.path: (h.upper, h.lower, h.removed) for h in check([base, top])}
    assert hidden == {
        b"a/gone": (1, 0, True),
        b"a/kept": (1, 0, True),
        b"d/x": (1, 0, True),
    }


def test_loops_and_paths_that_nobody_has(store: DirectoryStore, tmp_path: Path) -> None:
    only = layer(store, tmp_path, {"a": "b", "b": "a"})
    assert explain([only], b"a").provider == 0  # the link itself
    with pytest.raises(BadInput, match="too many symbolic links"):
        explain([only], b"a/x")
    with pytest.raises(NotFound, match="no layer has /nothing"):
        explain([only], b"nothing")


def test_check_puts_the_worst_first_and_leaves_out_what_is_equal(
    store: DirectoryStore, tmp_path: Path
) -> None:
    files: dict[str, bytes | str] = {
        "etc/passwd": b"root",
        "etc/group": b"same",
        "var/lib/dpkg/status": b"Package: a",
        "usr/lib/libx.so.1": b"x",
        "srv/data": b"1",
    }
    base = layer(store, tmp_path, files, 0)
    top = layer(store, tmp_path, {**dict.fromkeys(files, b"other"), "etc/group": b"same"}, 1)
    found = [(h.risk, h.path) for h in check([base, top])]
    assert found == [
        ("high", b"etc/passwd"),
        ("high", b"var/lib/dpkg/status"),
        ("medium", b"usr/lib/libx.so.1"),
        ("low", b"srv/data"),
    ]


@pytest.mark.parametrize(
    ("path", "risk"),
    [
        (b"etc/shadow", "high"),
        (b"var/lib/dpkg/status.d/base", "high"),
        (b"usr/lib/x86_64-linux-gnu/libc.so.6", "high"),
        (b"lib64/ld-linux-x86-64.so.2", "high"),
        (b"usr/bin/python3", "medium"),
        (b"usr/lib/python3/dist-packages/x/y.py", "medium"),
        (b"etc/motd", "medium"),
        (b"home/u/etc/passwd", "low"),
        (b"usr/share/doc/x", "low"),
        (b"etc/\xff\n", "low"),
    ],
)
def test_risks(path: bytes, risk: str) -> None:
    assert classify(path)[0] == risk


def test_equal_and_different_content_of_every_size(store: DirectoryStore, tmp_path: Path) -> None:
    rng = random.Random(3)
    sizes = (0, 1, 4096, 65535, 65536, 65537, 200_000, 5_000_000)
    data = {f"f{size}": rng.randbytes(size) for size in sizes}
    one = layer(store, tmp_path, {**data}, 0)
    # Other files before them: everything lies at another place of the blob.
    two = layer(store, tmp_path, {"before": b"x" * 70_000, **data}, 1)
    changed = {k: v[:-1] + bytes([v[-1] ^ 1]) if v else b"1" for k, v in data.items()}
    three = layer(store, tmp_path, {**changed}, 2)
    for name, content in data.items():
        nodes = [lookup(c.root, name.encode()) for c in (one, two, three)]
        a, b, c = [n for n in nodes if isinstance(n, Inode)]
        assert b"".join(one.pieces(a)) == content
        assert b"".join(two.pieces(b)) == content
        assert same_content(one, a, two, b)
        assert not same_content(one, a, three, c)
