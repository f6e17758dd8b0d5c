"""merge against the kernel's overlayfs, on made-up layers, and by hand where it differs."""

from __future__ import annotations

import copy
import io
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsecfs.errors import BadInput, FormatError, UnsafeArchive
from dsecfs.layers.merge import LayerTree, hidden, merge, provider
from dsecfs.layers.sources.tar import read_tar
from dsecfs.layers.tree import Extent, Inode, directory, walk, whiteout
from tests.t3_layers.disktree import difference, disk_listing, overlay, write_tree
from tests.t3_layers.memsink import MemorySink, listing
from tests.t3_layers.test_sources_tar import archive, get, member


def overlay_works() -> str:
    """Why the kernel cannot be the oracle here; "" if it can."""
    if os.geteuid() != 0:
        return "needs root to mount overlayfs"
    try:
        with tempfile.TemporaryDirectory() as d:
            for name in ("a", "b"):
                Path(d, name).mkdir()
            with overlay([f"{d}/a", f"{d}/b"], Path(d, "m")):
                return ""
    except OSError as e:
        return f"no overlayfs: {e}"


why_not = overlay_works()
kernel = pytest.mark.skipif(bool(why_not), reason=why_not or "overlayfs")


def file(body: bytes) -> Inode:
    return Inode(stat.S_IFREG | 0o644, size=len(body), extents=(Extent(0, 0, 0, len(body)),))


def tree(**children: Inode) -> Inode:
    root = directory()
    root.children = {name.encode(): child for name, child in children.items()}
    return root


# Layers from hypothesis. A file's content is its size: enough to tell files apart.

NAMES = st.sampled_from([b"a", b"b", b"c", b"d"])


def _leaf() -> st.SearchStrategy[Inode]:
    return st.one_of(
        st.builds(
            lambda n, t: Inode(stat.S_IFREG | 0o600 | n, uid=n, size=n, mtime_ns=t),
            st.integers(0, 40),
            st.integers(-(10**9), 10**9),
        ),
        st.builds(
            lambda t: Inode(stat.S_IFLNK | 0o777, target=t, size=len(t)),
            st.sampled_from([b"a", b"/b", b"../c/d", b"nowhere"]),
        ),
        st.just(Inode(stat.S_IFIFO | 0o644)).map(copy.copy),
        st.builds(whiteout),
        st.builds(whiteout),
    )


def _directory(children: st.SearchStrategy[Inode]) -> st.SearchStrategy[Inode]:
    def make(entries: dict[bytes, Inode], opaque: bool, mode: int, link: bool) -> Inode:
        made = directory(mode)
        made.mtime_ns, made.opaque, made.children = mode * 10**9, opaque, entries
        files = [c for c in entries.values() if c.is_reg]
        if link and files:
            entries[b"link"] = files[0]
        return made

    return st.builds(
        make,
        st.dictionaries(NAMES, children, max_size=4),
        st.booleans(),
        st.integers(0o700, 0o777),
        st.booleans(),
    )


TREES = _directory(st.recursive(_leaf(), _directory, max_leaves=12))


@st.composite
def stacks(draw: st.DrawFn) -> list[Inode]:
    roots = draw(st.lists(TREES, min_size=2, max_size=4))
    for root in roots:
        root.opaque = False
    return roots


def stack(roots: Sequence[Inode]) -> list[LayerTree[str]]:
    return [LayerTree(root, [f"blob{i}"]) for i, root in enumerate(roots)]


def body(inode: Inode) -> bytes:
    return b"x" * inode.size


class Bodies(MemorySink):
    def content(self, inode: Inode) -> bytes:
        return body(inode)


def on_disk(roots: Sequence[Inode], top: Path) -> list[str]:
    paths = []
    for i, root in enumerate(roots):
        path = top / f"layer{i}"
        path.mkdir()
        write_tree(root, str(path), body)
        paths.append(str(path))
    if len(paths) == 1:  # a read-only overlay wants two
        (top / "none").mkdir()
        paths.insert(0, str(top / "none"))
    return paths


SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@kernel
@SETTINGS
@given(stacks())
def test_same_as_overlayfs(roots: list[Inode]) -> None:
    before = [listing(r, Bodies()) for r in roots]
    merged = merge(stack(roots))
    assert [listing(r, Bodies()) for r in roots] == before
    assert not any(i.is_whiteout or i.opaque for _, i in walk(merged.root))
    with tempfile.TemporaryDirectory() as d:
        paths = on_disk(roots, Path(d))
        with overlay(paths, Path(d, "m")) as m:
            want = disk_listing(str(m))
    assert difference(listing(merged.root, Bodies()), want) == []


@kernel
@SETTINGS
@given(stacks(), st.integers(0, 1), st.integers(2, 4))
def test_collapsed_layers_stand_for_themselves(roots: list[Inode], start: int, end: int) -> None:
    """Any consecutive layers can be replaced by their merge with whiteouts kept."""
    part = merge(stack(roots)[start:end], keep_whiteouts=True)
    replaced = [*roots[:start], part.root, *roots[end:]]
    whole = listing(merge(stack(roots)).root, Bodies())
    assert difference(listing(merge(stack(replaced)).root, Bodies()), whole) == []
    with (
        tempfile.TemporaryDirectory() as d,
        overlay(on_disk(replaced, Path(d)), Path(d, "m")) as m,
    ):
        assert difference(whole, disk_listing(str(m))) == []


@SETTINGS
@given(stacks())
def test_provider_and_hidden_agree_with_merge(roots: list[Inode]) -> None:
    layers = stack(roots)
    # Every file of every layer is told apart by its owner, so its way can be followed.
    for i, root in enumerate(roots):
        for _, inode in walk(root):
            inode.gid = i
    shown = {path: inode.gid for path, inode in walk(merge(layers).root)}
    for root in roots:
        for path, _ in walk(root):
            assert provider(layers, path) == shown.get(path)
    lost = {(path, low) for path, _, low in hidden(layers)}
    for i, root in enumerate(roots):
        for path, inode in walk(root):
            if not inode.is_dir and not inode.is_whiteout:
                assert ((path, i) in lost) == (shown.get(path) != i)
    for path, high, low in hidden(layers):
        assert high > low
        between = layers[low : high + 1]
        # The hider hides it, and nothing nearer does.
        assert provider(between, path) != 0
        assert provider(layers[low:high], path) == 0


def test_blobs_are_listed_once_and_only_if_used() -> None:
    a, b, c = file(b"a"), file(b"b"), file(b"c")
    b.extents = (Extent(0, 1, 0, 1),)
    c.extents = (Extent(0, 2, 4096, 1), Extent(8192, 0, 0, 1))
    merged = merge(
        [
            LayerTree(tree(x=a), ["one", "unused"]),
            LayerTree(tree(y=b), ["gone", "two"]),
            LayerTree(tree(z=c, x=file(b"new")), ["two", "one", "three"]),
        ]
    )
    assert merged.blobs == ["two", "three"]
    assert get(merged.root, "y").extents == (Extent(0, 0, 0, 1),)
    assert get(merged.root, "z").extents == (Extent(0, 1, 4096, 1), Extent(8192, 0, 0, 1))
    assert b.extents == (Extent(0, 1, 0, 1),)
    with pytest.raises(FormatError, match="layer 1 of 1"):
        merge([LayerTree(tree(x=c), ["one"])])


def layer(*members: bytes, blob: str) -> LayerTree[str]:
    sink = MemorySink()
    return LayerTree.of(read_tar(io.BytesIO(archive(*members)), sink, blob, whiteouts=True), [blob])


SYM, DIR, LNK = b"2", b"5", b"1"


def test_hard_link_to_a_lower_layer() -> None:
    low = layer(
        member("usr/bin/python3.11", data=b"elf"),
        member("usr/bin/python3", LNK, linkname="usr/bin/python3.11"),
        member("bin", SYM, linkname="usr/bin"),
        blob="low",
    )
    high = layer(
        member("opt/python", LNK, linkname="bin/python3"),
        member(".wh.bin"),
        member("usr/bin/python3", data=b"other"),
        member("later", LNK, linkname="usr/bin/python3"),
        blob="high",
    )
    root = merge([low, high]).root
    assert get(root, "opt/python") is get(root, "usr/bin/python3.11")
    assert get(root, "later") is get(root, "usr/bin/python3")
    assert get(root, "opt/python") is not get(root, "later")
    assert b"bin" not in (root.children or {})
    # Collapsed without the base the link waits; on the base it is found.
    part = merge([high, layer(member("x"), blob="x")], keep_whiteouts=True)
    assert list(part.links.values()) == [b"bin/python3"]
    assert get(merge([low, part]).root, "opt/python").size == 3
    with pytest.raises(BadInput, match="layer 1 of 1: entry 'opt/python'.*'bin/python3'"):
        merge([high])


def test_implied_directories_keep_the_lower_attributes_and_follow_links() -> None:
    low = layer(
        member("usr/lib", DIR, mode=0o751, uid=7),
        member("lib", SYM, linkname="/usr/lib"),
        member("lost", SYM, linkname="not/there"),
        member("file", data=b"x"),
        blob="low",
    )
    high = layer(
        member("lib/new.so", data=b"so"),
        member("usr/lib/other.so", data=b"so"),
        member("lost/found", data=b"f"),
        member("lib/.wh.old.so"),
        blob="high",
    )
    root = merge([low, high]).root
    assert get(root, "lib").is_symlink and get(root, "lost").is_symlink
    assert get(root, "usr/lib").mode & 0o777 == 0o751 and get(root, "usr/lib").uid == 7
    assert sorted(get(root, "usr/lib").children or ()) == [b"new.so", b"other.so"]
    assert get(root, "not/there/found").size == 1
    named = layer(member("lib", DIR), member("lib/x"), blob="named")
    assert get(merge([low, named]).root, "lib").is_dir
    loop = layer(member("p", SYM, linkname="q"), member("q", SYM, linkname="p"), blob="loop")
    with pytest.raises(UnsafeArchive, match="'p'.*loop"):
        merge([loop, layer(member("p/x"), blob="x")])


def test_whiteouts_under_an_opaque_directory_are_not_kept() -> None:
    inner = tree(w=whiteout(), d=tree(w=whiteout(), f=file(b"f")))
    inner.opaque = True
    part = merge([LayerTree(tree(o=inner, w=whiteout()), ["b"])], keep_whiteouts=True).root
    assert get(part, "w").is_whiteout and get(part, "o").opaque
    assert list(get(part, "o").children or ()) == [b"d"]
    assert list(get(part, "o/d").children or ()) == [b"f"]


def test_deep_trees_do_not_recurse() -> None:
    root = node = directory()
    for _ in range(5000):
        below = directory()
        assert node.children is not None
        node.children[b"d"] = below
        node = below
    merged = merge([LayerTree(root, ["a"]), LayerTree(root, ["b"])])
    assert sum(1 for _ in walk(merged.root)) == 5001
    assert list(hidden([LayerTree(root, ["a"]), LayerTree(root, ["b"])])) == []
