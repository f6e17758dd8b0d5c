"""Shifted owners of composed trees, against what the kernel's id-mapped mounts show."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsecfs.errors import BadInput, FormatError
from dsecfs.fuse.owners import UNMAPPED_ACL_ID, Owners
from dsecfs.fuse.spaces import Attributes
from dsecfs.fuse.trees import read_tree, write_tree
from dsecfs.kernel.namespaces import IdRange, user_namespace
from dsecfs.kernel.syscalls import closing, idmap_mount, move_mount, open_tree, umount
from dsecfs.layers.digest import Digest
from dsecfs.layers.tree import Inode, directory
from dsecfs.mount.overlay import overlay_root
from tests.support.mounts import mounted, needs_erofs
from tests.support.trees import acl, blob_of_blocks
from tests.t4_fuse.family import family, why_no_resend
from tests.t4_fuse.layering import BLOCKS, CAPABILITY, digest_of, layers, shown
from tests.t4_fuse.test_tree_mount import Layers

START, COUNT = 1 << 20, 65536
OWNERS = Owners(START, COUNT)
needs_fuse = pytest.mark.skipif(bool(why_no_resend()), reason=why_no_resend() or "it works")

ACL = "system.posix_acl_access"


def namespaced(root: int) -> bytes:
    """CAPABILITY, given by the root `root` of a user namespace (revision 3)."""
    return bytes.fromhex("01000003") + CAPABILITY[4:] + struct.pack("<I", root)


@pytest.fixture(scope="module")
def served() -> Iterator[Layers]:
    with family() as f:
        yield Layers(f)


@contextmanager
def attached(lowers: list[int], target: Path) -> Iterator[Path]:
    """The overlay of unattached mounts at `target`."""
    target.mkdir(exist_ok=True)
    with closing(overlay_root(lowers, None, what="test")) as tree:
        move_mount(tree, target)
    try:
        yield target
    finally:
        umount(target, detach=True)


@contextmanager
def both(served: Layers, roots: list[Inode]) -> Iterator[tuple[Path, Path]]:
    """Overlays of the shifted tree and of id-mapped mounts of the same layers."""
    f = served.family
    with ExitStack() as stack:
        digests, lowers = [], []
        userns = stack.enter_context(closing(user_namespace(IdRange(START, COUNT))))
        for root in roots:
            digest, _ = served.new_blob()
            blob = blob_of_blocks(f.dirs.blobs / digest / "data", BLOCKS)
            layer = served.add(root, digest, blob)
            digests.append(layer)
            place = stack.enter_context(mounted(f.dirs.meta(layer), [blob.path]))
            lowers.append(stack.enter_context(closing(open_tree(place))))
            idmap_mount(lowers[-1], userns)
        name = f"shifted{served.count}"
        write_tree(f.dirs.trees, name, digests, OWNERS)
        tree = stack.enter_context(closing(open_tree(f.dirs.fs / "trees" / name)))
        yield (
            stack.enter_context(attached([tree], f.top / "fuse")),
            stack.enter_context(attached(lowers[::-1], f.top / "kernel")),
        )


@needs_fuse
@needs_erofs
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
@given(st.lists(layers(), min_size=1, max_size=3))
def test_the_same_as_id_mapped_mounts(served: Layers, roots: list[Inode]) -> None:
    with both(served, roots) as (ours, kernels):
        assert shown(ours) == shown(kernels)


@needs_fuse
@needs_erofs
def test_ids_in_attributes(served: Layers) -> None:
    root = directory()
    assert root.children is not None
    for name, xattrs in {
        b"acl": {ACL.encode(): acl(0, 5)},
        b"v2": {b"security.capability": CAPABILITY},
        b"v3": {b"security.capability": namespaced(5)},
        b"v3-outside": {b"security.capability": namespaced(COUNT)},
    }.items():
        root.children[name] = Inode(0o100755, xattrs=xattrs)
    root.children[b"default"] = directory()
    root.children[b"default"].xattrs = {b"system.posix_acl_default": acl(7)}
    with both(served, [root]) as (ours, kernels):
        for path in ("acl", "v2", "v3", "default"):
            found = [
                {name: os.getxattr(top / path, name) for name in os.listxattr(top / path)}
                for top in (ours, kernels)
            ]
            assert found[0] == found[1] and found[0], path
        assert os.getxattr(ours / "acl", ACL) == acl(START, START + 5)
        assert os.getxattr(ours / "v2", "security.capability") == namespaced(START)
        assert os.getxattr(ours / "v3", "security.capability") == namespaced(START + 5)
        for top in (ours, kernels):
            with pytest.raises(OSError, match="too large"):
                os.getxattr(top / "v3-outside", "security.capability")


@needs_fuse
@needs_erofs
def test_an_acl_of_an_id_that_is_not_mapped(served: Layers) -> None:
    """The one thing that differs on the host; inside a container both show no id."""
    root = directory()
    assert root.children is not None
    root.children[b"f"] = Inode(0o100644, xattrs={ACL.encode(): acl(70000)})
    with both(served, [root]) as (ours, kernels):
        assert os.getxattr(ours / "f", ACL) == acl(UNMAPPED_ACL_ID)
        assert os.getxattr(kernels / "f", ACL) == acl(0xFFFFFFFF)


def test_ids_at_the_borders() -> None:
    a = OWNERS.attributes(Attributes(0o100644, uid=COUNT - 1, gid=COUNT))
    assert (a.uid, a.gid) == (START + COUNT - 1, 0xFFFFFFFF)


@given(st.binary(max_size=40), st.sampled_from([ACL.encode(), b"security.capability"]))
def test_values_that_are_no_acl_or_capability_stay(value: bytes, name: bytes) -> None:
    (found,) = OWNERS.xattrs({name: value}).values()
    assert found == value or len(found) in (len(value), len(value) + 4)
    assert OWNERS.xattrs({b"user.x": value}) == {b"user.x": value}


def test_descriptions(tmp_path: Path) -> None:
    layer = Digest(digest_of("layer"))
    write_tree(tmp_path, "t", [layer], OWNERS)
    assert read_tree(tmp_path, "t") == ((layer,), OWNERS)
    write_tree(tmp_path, "t", [layer])
    assert read_tree(tmp_path, "t") == ((layer,), None)
    for bad in (Owners(-1, 5), Owners(0, 0), Owners(1 << 32, 1), Owners(1, 0xFFFFFFFF)):
        with pytest.raises(BadInput, match="cannot be described"):
            write_tree(tmp_path, "t", [layer], bad)
    text = (tmp_path / "t.json").read_text()
    for shift in ('{"start": 1}', '{"start": 0, "count": 0}', "5", '{"start": "x", "count": 1}'):
        (tmp_path / "t.json").write_text(text.replace("null", shift))
        with pytest.raises(FormatError):
            read_tree(tmp_path, "t")
