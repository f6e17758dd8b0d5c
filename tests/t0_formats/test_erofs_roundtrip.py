"""Written and read again is the same tree; what cannot be stored is refused by name."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecfs.errors import BadInput, FormatError, NotFound
from dsecfs.layers.erofs import format as f
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.tree import BLOCK, Extent, Inode, directory, walk, whiteout
from tests.support.mounts import needs_erofs_utils
from tests.support.trees import describe, symlink_to, trees

DEVICES = [Device(b"a" * 64, 40 * BLOCK), Device(b"b" * 64, 9 * BLOCK)]


def regular(size: int = 0, *extents: Extent, **fields: Any) -> Inode:
    return Inode(stat.S_IFREG | 0o644, size=size, extents=extents, **fields)


def tree_of(**children: Inode) -> Inode:
    root = directory()
    root.children = {name.encode(): inode for name, inode in children.items()}
    return root


def shuffled(root: Inode) -> Inode:
    """An equal tree whose dicts were filled the other way round."""
    made: dict[int, Inode] = {}
    for _, inode in walk(root):
        made[id(inode)] = Inode(
            inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.rdev, inode.size, inode.target,
            dict(reversed(inode.xattrs.items())), inode.extents[::-1],
            None if inode.children is None else {}, inode.opaque,
        )  # fmt: skip
    for _, inode in walk(root):
        if inode.children is not None:
            copy = made[id(inode)].children
            assert copy is not None
            copy.update((name, made[id(c)]) for name, c in reversed(inode.children.items()))
    return made[id(root)]


@settings(deadline=None, max_examples=150)
@given(root=trees())
def test_random_trees(root: Inode) -> None:
    image = write_erofs(root, DEVICES)
    assert write_erofs(shuffled(root), DEVICES) == image
    wanted = describe(root)
    with ErofsImage(image) as read:
        assert describe(read.load_tree()) == wanted
        assert [path for path, _ in read.walk()] == [path for path, _ in walk(root)]
        for path, inode in walk(root):
            nid = read.resolve(path)
            info = read.stat(nid)
            assert (info.mode, info.mtime_ns) == (inode.mode, inode.mtime_ns)
            assert read.xattrs(nid) == inode.xattrs
            if inode.children is not None:
                assert read.is_opaque(nid) == inode.opaque
                listed = list(read.entries(nid))
                assert [name for name, _, _ in listed] == sorted(inode.children)
                for start in range(len(listed) + 2):
                    assert list(read.entries(nid, start)) == listed[start:]
            elif inode.is_symlink:
                assert read.readlink(nid) == inode.target
        assert read.inode_count == len({id(inode) for _, inode in walk(root)})


def test_entries_continue_anywhere_in_a_large_directory() -> None:
    root = directory()
    names = [b"!%05d" % i for i in range(700)] + [b"x%05d" % i for i in range(700)]
    root.children = dict.fromkeys(names, regular())
    read = ErofsImage(write_erofs(root, []))
    assert read.stat(read.root_nid).size > 4 * BLOCK
    listed = [name for name, _, _ in read.entries(read.root_nid)]
    assert listed == sorted(names)
    for start in (1, 699, 700, 701, 702, 1399, 1400, 9999):
        assert [n for n, _, _ in read.entries(read.root_nid, start)] == sorted(names)[start:]
    for name in names:
        assert read.lookup(read.root_nid, name) is not None
    for name in (b"", b"!", b"-", b"m", b"x", b"x00699x", b"~"):
        assert read.lookup(read.root_nid, name) is None


def test_uuid_names_the_content() -> None:
    a, b = tree_of(a=regular()), tree_of(b=regular())
    images = [
        write_erofs(a, DEVICES), write_erofs(b, DEVICES), write_erofs(a, DEVICES[::-1]),
        write_erofs(a, DEVICES, uuid_salt=b"x"), write_erofs(directory(), []),
    ]  # fmt: skip
    uuids = {ErofsImage(image).uuid for image in images}
    assert len(uuids) == len(images) and bytes(16) not in uuids
    assert ErofsImage(write_erofs(a, DEVICES)).uuid == ErofsImage(images[0]).uuid


def test_one_index_for_a_contiguous_file() -> None:
    devices = [Device(b"d", 1 << 40)]
    for size in (1, BLOCK, BLOCK + 1, 3 * BLOCK, (1 << 39) + 1):
        read = ErofsImage(write_erofs(tree_of(f=regular(size, Extent(0, 0, BLOCK, size))), devices))
        nid = read.resolve(b"f")
        assert read.indexes_of(read.stat(nid))[1] == 1
        assert read.extents(nid) == (Extent(0, 0, BLOCK, size),)


def test_no_inode_crosses_a_block() -> None:
    root = directory()
    root.children = {
        b"%d" % i: regular(mtime_ns=i % 3, xattrs={b"user.%d" % i: b"v" * (i % 50)})
        for i in range(2000)
    }
    read = ErofsImage(write_erofs(root, []))
    sizes = set()
    for _, info in read.walk():
        at = info.nid * f.SLOT
        sizes.add(info.xattrs_at - at)
        assert at // BLOCK == (info.xattrs_at - 1) // BLOCK
    assert sizes == {f.COMPACT.size, f.EXTENDED.size}


def test_same_attributes_are_stored_once() -> None:
    label = {b"security.selinux": b"l" * 1000}
    many = write_erofs(
        tree_of(**{f"f{i}": Inode(stat.S_IFREG, xattrs=label) for i in range(99)}), []
    )
    assert many.count(b"l" * 1000) == 1
    alone = write_erofs(tree_of(f=Inode(stat.S_IFREG, xattrs=label)), [])
    assert alone.count(b"l" * 1000) == 1


def test_devices_follow_the_metadata_in_a_flat_file() -> None:
    image = write_erofs(directory(), DEVICES)
    one, two = ErofsImage(image).devices
    assert (one.tag, one.size, one.mapped) == (b"a" * 64, 40 * BLOCK, len(image))
    assert (two.tag, two.size, two.mapped) == (b"b" * 64, 9 * BLOCK, len(image) + 40 * BLOCK)


def test_referenced_ranges() -> None:
    shared = regular(2 * BLOCK, Extent(0, 0, 8 * BLOCK, 2 * BLOCK))
    root = tree_of(
        a=regular(3 * BLOCK, Extent(0, 0, 20 * BLOCK, BLOCK), Extent(BLOCK, 0, 0, BLOCK + 1)),
        b=regular(10, Extent(0, 0, 2 * BLOCK, 10)),
        c=shared,
        d=shared,
        e=regular(3 * BLOCK, Extent(0, 0, 9 * BLOCK, 3 * BLOCK)),
    )
    read = ErofsImage(write_erofs(root, DEVICES))
    wanted = [(0, 3 * BLOCK), (8 * BLOCK, 4 * BLOCK), (20 * BLOCK, BLOCK)]
    assert read.referenced_ranges(0) == wanted
    assert read.referenced_ranges(1) == []


def test_deep_trees_do_not_recurse() -> None:
    root = here = directory()
    for _ in range(5000):
        below = directory()
        here.children = {b"d": below}
        here = below
    read = ErofsImage(write_erofs(root, []))
    assert describe(read.load_tree()) == describe(root)


def test_many_subdirectories_exceed_a_compact_link_count() -> None:
    root = directory()
    root.children = {b"%d" % i: directory() for i in range(65_534)}
    read = ErofsImage(write_erofs(root, []))
    assert read.stat(read.root_nid).nlink == 65_536


def _cycle() -> Inode:
    root, inner = directory(), directory()
    root.children = {b"inner": inner}
    inner.children = {b"back": root}
    return root


def _two_names() -> Inode:
    inner = directory()
    return tree_of(a=inner, b=inner)


def _deep() -> Inode:
    root = here = directory()
    for _ in range(70):
        here.children = {b"n" * 255: directory()}
        here = here.children[b"n" * 255]
    return root


def _named(name: bytes, inode: Inode) -> Inode:
    root = directory()
    root.children = {name: inode}
    return root


def _linked(*names: bytes) -> Inode:
    root = directory()
    root.children = dict.fromkeys(names, regular())
    return root


def _xattr(name: bytes, value: bytes = b"") -> Inode:
    return tree_of(f=Inode(stat.S_IFREG, xattrs={name: value}))


def _fine_map() -> Inode:
    pieces = tuple(Extent(i * 2 * BLOCK, 0, 0, BLOCK) for i in (0, 1, 1 << 22))
    return tree_of(f=regular((1 << 22) * 2 * BLOCK + BLOCK, *pieces))


REFUSED = {
    "empty name": (_named(b"", regular()), "a name of 0 bytes"),
    "long name": (_named(b"n" * 256, regular()), "a name of 256 bytes"),
    "dot": (_named(b".", regular()), "/.*not a file name"),
    "dots": (_named(b"..", regular()), "/...*not a file name"),
    "slash": (_named(b"a/b", regular()), "/a/b.*not a file name"),
    "nul": (_named(b"a\0b", regular()), "not a file name"),
    "bad link name": (_linked(b"a", b"b/c"), "/b/c.*not a file name"),
    "long path": (_deep(), "path is longer"),
    "cycle": (_cycle(), "/inner/back.*directories have one name"),
    "two names": (_two_names(), "/b.*also /a;"),
    "no type": (_named(b"f", Inode(0o644)), "/f.*no known file type"),
    "wide mode": (_named(b"f", Inode(1 << 16 | stat.S_IFREG)), "/f.*no known file type"),
    "uid": (_named(b"f", regular(uid=2**32 - 1)), "/f.*owner"),
    "gid": (_named(b"f", regular(gid=-1)), "/f.*owner"),
    "time": (_named(b"f", regular(mtime_ns=2**63 * 10**9)), "/f.*64 bits"),
    "old time": (_named(b"f", regular(mtime_ns=-(2**63) * 10**9 - 1)), "/f.*64 bits"),
    "size": (_named(b"f", regular(1 << 63)), "/f.*63 bits"),
    "negative": (_named(b"f", regular(-1)), "/f.*63 bits"),
    "root file": (regular(), "the root of a tree must be a directory"),
    "file with entries": (_named(b"f", Inode(stat.S_IFREG, children={})), "/f.*has entries"),
    "directory without": (_named(b"f", Inode(stat.S_IFDIR)), "/f.*has entries"),
    "opaque file": (_named(b"f", Inode(stat.S_IFREG, opaque=True)), "/f.*opaque"),
    "empty target": (_named(b"f", symlink_to(b"")), "/f.*target of 0 bytes"),
    "long target": (_named(b"f", symlink_to(b"t" * 4096)), "/f.*target of 4096 bytes"),
    "nul target": (_named(b"f", symlink_to(b"t\0")), "/f.*target"),
    "major": (_named(b"f", Inode(stat.S_IFCHR, rdev=os.makedev(4096, 0))), "/f.*device number"),
    "minor": (_named(b"f", Inode(stat.S_IFBLK, rdev=os.makedev(0, 1 << 20))), "/f.*device num"),
    "data of empty": (_named(b"f", regular(0, Extent(0, 0, 0, 1))), "/f.*has data"),
    "data of fifo": (
        _named(b"f", Inode(stat.S_IFIFO, extents=(Extent(0, 0, 0, 1),))), "/f.*has data"
    ),
    "beyond file": (_named(b"f", regular(9, Extent(0, 0, 0, 10))), "/f.*leaves the file"),
    "overlap": (
        _named(b"f", regular(9 * BLOCK, Extent(0, 0, 0, 2 * BLOCK), Extent(BLOCK, 0, 0, BLOCK))),
        "/f.*overlaps",
    ),
    "unaligned": (_named(b"f", regular(9, Extent(0, 0, 7, 9))), "/f.*aligned"),
    "short inner": (
        _named(b"f", regular(9 * BLOCK, Extent(0, 0, 0, 5), Extent(BLOCK, 0, 0, BLOCK))),
        "/f.*aligned",
    ),
    "no blob": (_named(b"f", regular(1, Extent(0, 2, 0, 1))), "/f.*blobs"),
    "negative blob": (_named(b"f", regular(1, Extent(0, -1, 0, 1))), "/f.*blobs"),
    "beyond blob": (_named(b"f", regular(1, Extent(0, 1, 9 * BLOCK, 1))), "/f.*blobs"),
    "fine map": (_fine_map(), "/f.*indexes"),
    "unknown attribute": (_xattr(b"nfs4.acl"), "/f.*attribute b'nfs4.acl'"),
    "bare prefix": (_xattr(b"user."), "/f.*attribute"),
    "acl with more": (_xattr(b"system.posix_acl_accessory"), "/f.*attribute"),
    "nul attribute": (_xattr(b"user.a\0b"), "/f.*attribute"),
    "long attribute": (_xattr(b"user." + b"n" * 256), "/f.*name of 261 bytes"),
    "large attribute": (_xattr(b"user.a", bytes(65536)), "/f.*has 65536 bytes"),
    "overlay mark": (_xattr(b"trusted.overlay.redirect", b"/etc"), "/f.*overlayfs would obey"),
    "user overlay mark": (_xattr(b"user.overlay.opaque", b"y"), "/f.*overlayfs would obey"),
    "too many attributes": (
        tree_of(f=Inode(stat.S_IFREG, xattrs={b"user.%d" % i: bytes(65000) for i in range(5)})),
        "/f.*take",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stored_is_refused_by_name(case: str) -> None:
    root, words = REFUSED[case]
    with pytest.raises(BadInput, match=f"cannot store.*{words}"):
        write_erofs(root, DEVICES)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([Device(b"", BLOCK)], "tag"),
        ([Device(b"t" * 65, BLOCK)], "tag"),
        ([Device(b"t", 0)], "size"),
        ([Device(b"t", 100)], "size"),
        ([Device(b"t", 1 << 44)], "32-bit address"),
        ([Device(b"t", BLOCK)] * 4097, "at most"),
    ],
)
def test_bad_devices(devices: list[Device], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        write_erofs(directory(), devices)


def test_asking_for_what_is_not_there() -> None:
    read = ErofsImage(write_erofs(tree_of(f=regular(), l=symlink_to(b"f"), w=whiteout()), []))
    nid = read.resolve(b"//f/./")
    for call in (read.lookup, lambda n, _: list(read.entries(n)), lambda n, _: read.readlink(n)):
        with pytest.raises(BadInput):
            call(nid, b"x")
    with pytest.raises(BadInput):
        read.extents(read.root_nid)
    with pytest.raises(BadInput):
        read.resolve(b"f/../f")
    for path in (b"g", b"f/g", b"l/g", b"w/x"):
        with pytest.raises(NotFound):
            read.resolve(path)
    for bad in (-1, 1 << 20, 1 << 64):
        with pytest.raises(FormatError):
            read.stat(bad)


def test_opening_files(tmp_path: Path) -> None:
    path = tmp_path / "image"
    with pytest.raises(NotFound):
        ErofsImage.open(path)
    image = write_erofs(tree_of(f=regular()), DEVICES)
    for cut in (0, 1, 1024, BLOCK - 1):
        path.write_bytes(image[:cut])
        with pytest.raises(FormatError, match="truncated"):
            ErofsImage.open(path)
    path.write_bytes(image + b"blobs of a flat device")
    with ErofsImage.open(path) as read:
        assert read.resolve(b"f") and read.block_count * BLOCK == len(image)


@needs_erofs_utils
def test_dump_erofs_agrees(tmp_path: Path) -> None:
    """What dump.erofs says of the superblock and of a file is what we meant to write."""
    image, blob = tmp_path / "image", tmp_path / "blob"
    blob.write_bytes(bytes(40 * BLOCK))
    data = write_erofs(tree_of(f=regular(9000, Extent(0, 0, 5 * BLOCK, 9000))), DEVICES[:1])
    image.write_bytes(data)

    def dump(*args: str) -> str:
        done = subprocess.run(
            ["dump.erofs", f"--device={blob}", *args, image],
            check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.stdout

    words = " ".join(dump("-s").split())
    assert "inode count: 2" in words
    assert "sb_csum mtime chunked_file device_table" in words
    assert ErofsImage(data).uuid.hex() in words.replace("-", "")
    words = " ".join(dump("-e", "--path=/f").split())
    assert "Size: 9000" in words and "Layout: 4" in words
    assert f"{5 * BLOCK}.." in words.replace(" ", "")


@given(major=st.integers(0, 0xFFF), minor=st.integers(0, 0xFFFFF))
def test_device_numbers(major: int, minor: int) -> None:
    rdev = os.makedev(major, minor)
    encoded = f.encode_rdev(rdev)
    assert encoded is not None and encoded < 1 << 32
    assert f.decode_rdev(encoded) == rdev


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(1, BLOCK),
    st.integers(0, 41 * BLOCK),
    st.integers(0, 41 * BLOCK),
)
def test_extents_of_a_range_are_those_that_touch_it(
    blocks: list[bool], tail: int, begin: int, length: int
) -> None:
    size = (len(blocks) - 1) * BLOCK + tail
    extents = tuple(
        Extent(i * BLOCK, 0, (2 * i % 41) * BLOCK, min(BLOCK, size - i * BLOCK))
        for i, there in enumerate(blocks)
        if there
    )
    root = directory()
    root.children = {b"file": Inode(stat.S_IFREG, size=size, extents=extents)}
    image = ErofsImage(write_erofs(root, [Device(b"a" * 64, 64 * BLOCK)]))
    info = image.stat(image.resolve(b"file"))

    def mapped(found: tuple[Extent, ...]) -> dict[int, int]:
        return {
            e.logical + at: e.physical + at
            for e in found
            for at in range(0, e.length, 512)
            if begin <= e.logical + at < begin + length
        }

    assert mapped(image.extents_of(info, begin, begin + length)) == mapped(image.extents_of(info))
