"""The merge of layers without FUSE: against layers.merge, and without memory."""

from __future__ import annotations

import stat
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsecfs.errors import BadInput, FormatError, NotFound
from dsecfs.fuse.blobs import Blob as OpenBlob
from dsecfs.fuse.spaces import Bounded
from dsecfs.fuse.trees import MergedTree, TreeSpace
from dsecfs.layers.digest import Digest
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.merge import LayerTree, merge
from dsecfs.layers.tree import Extent, Inode, directory, walk, whiteout
from tests.t4_fuse.layering import BLOCKS, digest_of, layers

SETTINGS = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def tree_of(roots: list[Inode]) -> MergedTree:
    """The merge of layers, bottom first, through their images."""
    images = [
        ErofsImage(
            write_erofs(r, [Device(digest_of(f"blob{i}").encode(), BLOCKS * 4096)]), f"layer {i}"
        )
        for i, r in enumerate(roots)
    ]
    return MergedTree(images[::-1])


def walked(tree: MergedTree) -> dict[bytes, int]:
    """Path to node."""
    out = {b"": tree.root}
    todo = [b""]
    while todo:
        path = todo.pop()
        for name, node in tree.entries(out[path]):
            below = path + b"/" + name if path else name
            assert below not in out
            out[below] = node
            assert tree.lookup(out[path], name) == node
            if stat.S_ISDIR(tree.attributes(node).mode):
                todo.append(below)
    return out


@SETTINGS
@given(st.lists(layers(), min_size=1, max_size=4))
def test_same_as_merge(roots: list[Inode]) -> None:
    tree = tree_of(roots)
    nodes = walked(tree)
    wanted = dict(walk(merge([LayerTree(r, [f"b{i}"]) for i, r in enumerate(roots)]).root))
    assert sorted(nodes) == sorted(wanted)
    groups: dict[int, int] = {}
    for path, node in nodes.items():
        inode, a = wanted[path], tree.attributes(node)
        assert (a.mode, a.uid, a.gid, a.mtime_ns) == (
            inode.mode,
            inode.uid,
            inode.gid,
            inode.mtime_ns,
        )
        assert a.rdev == (inode.rdev if stat.S_ISCHR(inode.mode) else 0)
        assert tree.xattrs(node) == inode.xattrs
        if inode.is_reg:
            assert a.size == inode.size
        if inode.is_symlink:
            assert tree.readlink(node) == inode.target
        if inode.children is None:
            # Names of one inode have one node, and no others have it.
            assert groups.setdefault(node, id(inode)) == id(inode)


@SETTINGS
@given(st.lists(layers(), min_size=1, max_size=4), st.randoms())
def test_numbers_mean_the_same_to_a_tree_that_never_gave_them(roots: list[Inode], rng: Any) -> None:
    nodes = list(walked(tree := tree_of(roots)).values())
    rng.shuffle(nodes)
    fresh = tree_of(roots)
    for node in nodes:
        assert fresh.attributes(node) == tree.attributes(node)
        if stat.S_ISDIR(tree.attributes(node).mode):
            assert fresh.parts(node) == tree.parts(node)
            assert fresh.entries(node) == tree.entries(node)


def test_a_hidden_directory_is_not_found_by_number() -> None:
    low, top = directory(), directory()
    assert low.children is not None and top.children is not None
    low.children[b"d"] = directory()
    top.children[b"d"] = whiteout()
    alone = tree_of([low])
    node = alone.lookup(alone.root, b"d")
    assert node is not None
    with pytest.raises(NotFound):
        tree_of([low, top]).entries(node)


def test_a_node_of_no_layer() -> None:
    tree = tree_of([directory()])
    with pytest.raises(NotFound):
        tree.attributes(5 << 28 | 36)
    with pytest.raises(FormatError):
        tree.attributes(1 << 27)
    with pytest.raises(BadInput):
        MergedTree([])


def test_deep_and_wide() -> None:
    """A path of 1,000 directories, found again by number; and 5,000 entries in one."""
    root = directory()
    here = root
    for _ in range(1000):
        assert here.children is not None
        here.children[b"d"] = directory()
        here = here.children[b"d"]
    assert here.children is not None
    here.children.update({b"%05d" % i: Inode(stat.S_IFREG | 0o644) for i in range(5000)})
    other = directory()
    assert other.children is not None
    other.children[b"d"] = directory()
    tree = tree_of([root, other])
    node = tree.root
    for _ in range(1000):
        found = tree.lookup(node, b"d")
        assert found is not None
        node = found
    fresh = tree_of([root, other])
    assert len(fresh.entries(node)) == 5000
    assert fresh.lookup(node, b"04999") is not None


class _Pattern:
    """A blob whose every byte says where it lies."""

    size = 1 << 20

    def read_nowait(self, offset: int, size: int) -> bytes | None:
        return bytes((offset + i) // 4096 % 251 for i in range(size))

    async def aread(self, offset: int, size: int) -> bytes:
        raise AssertionError("not reached")


@SETTINGS
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=6),
    st.integers(0, 3 * 4096),
    st.integers(0, 40 * 4096),
    st.integers(0, 20 * 4096),
)
def test_data_with_holes(
    pieces: list[tuple[int, int]], tail: int, offset: int, size: int
) -> None:
    extents, at, physical = [], 0, 0
    model = bytearray()
    blob = _Pattern()
    for gap, blocks in pieces:
        at += gap * 4096
        physical += 4096  # never contiguous, so extents stay apart
        extents.append(Extent(at, 0, physical, blocks * 4096))
        model += bytes(at - len(model)) + (blob.read_nowait(physical, blocks * 4096) or b"")
        at += blocks * 4096
        physical += blocks * 4096
    model += bytes(tail)
    root = directory()
    assert root.children is not None
    root.children[b"f"] = Inode(
        stat.S_IFREG | 0o644, size=len(model), extents=tuple(extents)
    )
    image = ErofsImage(write_erofs(root, [Device(digest_of("x").encode(), blob.size)]))

    def open_blob(digest: Digest) -> OpenBlob:
        assert digest == digest_of("x")
        return blob

    tree = MergedTree([image])
    space = TreeSpace(tree, 1 << 40, open_blob)
    node = tree.lookup(tree.root, b"f")
    assert node is not None
    assert space.read_nowait(node, offset, size) == model[offset : offset + size]


def test_bounded_forgets_the_oldest() -> None:
    kept: Bounded[int, str] = Bounded(10, len)
    kept.keep(1, "aaaa")
    kept.keep(2, "bbbb")
    assert kept.use(1) == "aaaa"
    kept.keep(3, "cccc")
    assert list(kept) == [1, 3]
    kept.keep(1, "a")
    kept.keep(4, "dddd")
    assert sorted(kept) == [1, 3, 4]
    kept.keep(5, "e" * 100)
    assert list(kept) == [5]
