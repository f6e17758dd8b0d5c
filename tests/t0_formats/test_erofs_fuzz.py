"""Damaged and hostile images: an error or an answer in bounded time, never anything else."""

from __future__ import annotations

import contextlib
import stat
import struct
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsecfs.errors import BadInput, FormatError
from dsecfs.layers.erofs import format as f
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.tree import BLOCK, Extent, Inode, directory, whiteout
from tests.support.trees import acl, symlink_to

DEVICES = [Device(b"a" * 64, 40 * BLOCK), Device(b"b" * 64, 9 * BLOCK)]


_LAST = Extent(0, 1, 7 * BLOCK, 2 * BLOCK)
"""The last two blocks of the second device."""


def _sample() -> bytes:
    """An image with a bit of everything, small enough that most bytes matter."""
    label = {b"security.selinux": b"system_u:object_r:usr_t:s0\0"}
    pieces = (
        Extent(0, 0, 0, BLOCK),
        Extent(2 * BLOCK, 1, BLOCK, BLOCK),
        Extent(3 * BLOCK, 0, 0, 9),
    )
    root = directory(mtime_ns=7)
    root.children = {
        b"one": Inode(stat.S_IFREG, size=9, extents=(Extent(0, 0, BLOCK, 9),), xattrs=label),
        b"two": Inode(stat.S_IFREG, size=3 * BLOCK + 9, extents=pieces, uid=70000, xattrs=label),
        b"link": symlink_to(b"one", xattrs=label),
        b"long": symlink_to(b"x" * 4095, xattrs={b"trusted.t": b"v"}),
        b"null": Inode(stat.S_IFCHR, rdev=0x103),
        b"gone": whiteout(),
        b"dir": directory(),
        b"wide": directory(),
    }
    inner, wide = root.children[b"dir"], root.children[b"wide"]
    inner.opaque = True
    inner.xattrs = {b"user.a": b"1", b"system.posix_acl_default": acl(3)}
    inner.children = {b"hard": root.children[b"one"], b"sub": directory()}
    wide.children = {b"%d" % i * 60: root.children[b"one"] for i in range(80)}
    return write_erofs(root, DEVICES)


SAMPLE = _sample()


def exercise(data: bytes) -> None:
    """Call everything; only the errors that the reader promises may come out."""
    try:
        image = ErofsImage(data)
    except FormatError:
        return
    for whole in (image.load_tree, lambda: image.referenced_ranges(0), lambda: list(image.walk())):
        with contextlib.suppress(FormatError):
            whole()
    for nid in range(image.block_count * BLOCK // f.SLOT):
        try:
            info = image.stat(nid)
        except FormatError:
            continue
        for one in (image.xattrs, image.is_opaque, image.readlink):
            with contextlib.suppress(FormatError, BadInput):
                one(nid)
        with contextlib.suppress(FormatError, BadInput):
            for logical, blob, physical, length in image.extents(nid):
                assert 0 <= logical < logical + length <= info.size
                assert 0 <= physical < physical + length <= image.devices[blob].size
        if stat.S_ISDIR(info.mode):
            for name in (b"", b".", b"..", b"dir", b"one", b"7" * 60, b"\xff"):
                with contextlib.suppress(FormatError):
                    image.lookup(nid, name)
            for start in (0, 3):
                with contextlib.suppress(FormatError):
                    for _ in image.entries(nid, start):
                        pass


def sealed(data: bytearray) -> bytes:
    """The image with a superblock checksum that fits."""
    struct.pack_into("<I", data, f.CHECKSUM_AT, f.superblock_checksum(data))
    return bytes(data)


# Where there is something to damage: bytes that are not zero, and those next to them.
INTERESTING = sorted(
    {at + d for at, byte in enumerate(SAMPLE) if byte for d in (0, 1) if at + d < len(SAMPLE)}
)
positions = st.one_of(
    st.integers(f.SUPER_OFFSET, f.DEVICE_TABLE + 2 * f.DEVICE.size - 1),
    st.sampled_from(INTERESTING),
    st.integers(0, len(SAMPLE) - 1),
)
edits = st.lists(
    st.tuples(
        positions,
        st.one_of(
            st.binary(min_size=1, max_size=12),
            st.sampled_from([b"\xff", b"\xff" * 2, b"\xff" * 4, b"\xff" * 8, bytes(4), bytes(8)]),
            st.integers(0, 200).map(lambda nid: nid.to_bytes(8, "little")),
        ),
    ),
    max_size=6,
)


@settings(max_examples=250, deadline=None)
@given(edits=edits, flip=st.integers(0, len(SAMPLE) * 8 - 1), cut=st.none() | st.integers(0, 10))
@example(edits=[], flip=0, cut=None)
def test_damaged_images(edits: list[tuple[int, bytes]], flip: int, cut: int | None) -> None:
    data = bytearray(SAMPLE)
    data[flip // 8] ^= 1 << flip % 8
    for at, raw in edits:
        data[at : at + len(raw)] = raw[: len(data) - at]
    if cut is not None:
        del data[cut * BLOCK :]
    if len(data) >= BLOCK:
        exercise(sealed(data))
    exercise(bytes(data))


@settings(max_examples=50, deadline=None)
@given(raw=st.binary(max_size=300), at=st.integers(0, BLOCK))
def test_noise(raw: bytes, at: int) -> None:
    data = bytearray(2 * BLOCK)
    data[f.SUPER_OFFSET : f.SUPER_OFFSET + f.SUPER.size] = SAMPLE[1024 : 1024 + f.SUPER.size]
    data[at : at + len(raw)] = raw
    exercise(sealed(data))


def test_every_cut_is_noticed() -> None:
    for length in range(0, len(SAMPLE), 509):
        with pytest.raises(FormatError, match="truncated"):
            ErofsImage(SAMPLE[:length])


def test_every_bit_of_the_superblock_counts() -> None:
    for bit in range(f.SUPER_OFFSET * 8, (f.DEVICE_TABLE + 2 * f.DEVICE.size) * 8):
        data = bytearray(SAMPLE)
        data[bit // 8] ^= 1 << bit % 8
        if bit // 8 in range(f.SUPER_OFFSET + 8, f.SUPER_OFFSET + 9) and bit % 8 == 0:
            continue  # the flag that there is a checksum
        with pytest.raises(FormatError):
            ErofsImage(bytes(data))


class Forger:
    """Makes images that no writer makes: inodes and entries put where one likes."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.inodes = BLOCK
        self.end = size
        self.super(root=BLOCK // f.SLOT)

    def super(self, root: int) -> None:
        f.SUPER.pack_into(
            self.data, f.SUPER_OFFSET, f.MAGIC, 0, 1, 12, 0, root, 1, 0, 0, len(self.data) // BLOCK,
            0, 0, bytes(16), b"", f.INCOMPAT_CHUNKED_FILE, 0, 0, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip

    def block(self, entries: list[tuple[bytes, int, int]]) -> int:
        """A directory block at the end of the image; its number."""
        self.end -= BLOCK
        offset = len(entries) * f.DIRENT.size
        at = self.end
        for i, (name, nid, ftype) in enumerate(entries):
            f.DIRENT.pack_into(self.data, at + i * f.DIRENT.size, nid, offset, ftype, 0)
            self.data[at + offset : at + offset + len(name)] = name
            offset += len(name)
        return at // BLOCK

    def inode(self, mode: int, size: int, info: int, layout: int = f.FLAT_PLAIN) -> int:
        nid = self.inodes // f.SLOT
        f.COMPACT.pack_into(
            self.data, self.inodes, layout << 1, 0, mode, 2, size, info, 1, 0, 0
        )  # fmt: skip
        self.inodes += f.SLOT
        return nid

    def image(self) -> ErofsImage:
        return ErofsImage(sealed(self.data))


def test_directory_loops_are_noticed() -> None:
    forger = Forger(8 * BLOCK)
    root = BLOCK // f.SLOT
    block = forger.block([(b".", root, 2), (b"..", root, 2), (b"again", root, 2)])
    forger.inode(stat.S_IFDIR, BLOCK, block)
    image = forger.image()
    assert image.lookup(root, b"again") == root
    for whole in (image.load_tree, lambda: list(image.walk())):
        with pytest.raises(FormatError, match="loop"):
            whole()


def test_directories_that_share_their_blocks_do_not_multiply() -> None:
    """Many directories over one large list of names would be quadratic work."""
    forger = Forger(512 * BLOCK)
    root = BLOCK // f.SLOT
    directories = [root + 1 + i for i in range(2000)]
    leaf = root + 1 + len(directories)
    leaves = [
        forger.block([(b"%06d" % (i * 200 + j), leaf, 1) for j in range(200)])
        for i in reversed(range(100))
    ]
    tops = [
        forger.block(
            [(b"d%04d" % i, directories[i], 2) for i in range(first, min(first + 200, 2000))]
        )
        for first in reversed(range(0, 2000, 200))
    ]
    forger.inode(stat.S_IFDIR, len(tops) * BLOCK, tops[-1])
    for _ in directories:
        forger.inode(stat.S_IFDIR, len(leaves) * BLOCK, leaves[-1])
    assert forger.inode(stat.S_IFREG, 0, 0) == leaf
    image = forger.image()
    seen = 0
    with pytest.raises(FormatError, match="share bytes"):
        for _ in image.walk():
            seen += 1
    assert seen <= len(forger.data) // f.DIRENT.size


def _files_with_attributes(forger: Forger, bodies: list[tuple[int, int, list[int]]]) -> None:
    """A root of files, each of (slots to the next one, attribute words, shared ids)."""
    names = []
    nid = BLOCK // f.SLOT + 1
    for i, (slots, words, ids) in enumerate(bodies):
        names.append((b"%05d" % i, nid, 1))
        at = nid * f.SLOT
        f.COMPACT.pack_into(forger.data, at, 0, 1 + words, stat.S_IFREG, 1, 0, 0, 1, 0, 0)
        f.XATTR_HEADER.pack_into(forger.data, at + 32, 0, len(ids))
        for j, number in enumerate(ids):
            struct.pack_into("<I", forger.data, at + 44 + 4 * j, number)
        nid += slots
    groups = [names[i : i + 200] for i in range(0, len(names), 200)]
    blocks = [forger.block(group) for group in reversed(groups)]
    forger.inode(stat.S_IFDIR, len(blocks) * BLOCK, blocks[-1])


def test_shared_attributes_that_overlap_do_not_multiply() -> None:
    """Every four bytes of the shared area begin an attribute of 60,000 bytes."""
    forger = Forger(256 * BLOCK)
    struct.pack_into("<I", forger.data, f.SUPER_OFFSET + 44, 200)
    for at in range(200 * BLOCK, 208 * BLOCK, 4):
        f.XATTR_ENTRY.pack_into(forger.data, at, 4, 1, 60000)
    _files_with_attributes(forger, [(2, 1, [i]) for i in range(1800)])
    image = forger.image()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="share bytes"):
            image.load_tree()
        assert tracemalloc.get_traced_memory()[1] < 2 * len(forger.data)
    finally:
        tracemalloc.stop()


def test_attribute_bodies_that_overlap_do_not_multiply() -> None:
    """Many inodes in one large attribute value: each claims the same bytes behind it."""
    forger = Forger(64 * BLOCK)
    words = 40_000 // 4
    _files_with_attributes(forger, [(2, words, []) for _ in range(100)])
    at = (BLOCK // f.SLOT + 1) * f.SLOT
    for i in range(100):
        f.XATTR_ENTRY.pack_into(forger.data, at + i * 64 + 44, 1, 1, 40_000 - 5)
        forger.data[at + i * 64 + 48] = ord("a")
    assert len(ErofsImage(sealed(forger.data)).xattrs(BLOCK // f.SLOT + 1)[b"user.a"]) == 39_995
    with pytest.raises(FormatError, match="share bytes"):
        forger.image().load_tree()


@pytest.fixture
def forged() -> Iterator[Forger]:
    forger = Forger(8 * BLOCK)
    root = BLOCK // f.SLOT
    block = forger.block([(b".", root, 2), (b"..", root, 2), (b"f", root + 1, 1)])
    forger.inode(stat.S_IFDIR, BLOCK, block)
    yield forger


def test_data_outside_of_every_blob(forged: Forger) -> None:
    forged.inode(stat.S_IFREG, 100, f.CHUNK_INDEXES, f.CHUNK_BASED)
    f.CHUNK_INDEX.pack_into(forged.data, forged.inodes, 0, 1, 0)
    with pytest.raises(FormatError, match="outside of its blobs"):
        forged.image().load_tree()


def test_data_behind_the_end_of_a_blob() -> None:
    """An index that is changed by one block: refused, never read."""
    root = directory()
    root.children = {b"f": Inode(stat.S_IFREG, size=2 * BLOCK, extents=(_LAST,))}
    image = bytearray(write_erofs(root, DEVICES))
    nid = ErofsImage(bytes(image)).resolve(b"f")
    assert ErofsImage(bytes(image)).extents(nid) == (_LAST,)
    at = image.index(f.CHUNK_INDEX.pack(0, 2, 7))
    f.CHUNK_INDEX.pack_into(image, at, 0, 2, 8)
    with pytest.raises(FormatError, match="outside of its blobs"):
        ErofsImage(sealed(image)).extents(nid)


def test_data_inside_of_the_image_is_not_ours(forged: Forger) -> None:
    forged.inode(stat.S_IFREG, 100, 2, f.FLAT_PLAIN)
    with pytest.raises(FormatError, match="not supported"):
        forged.image().load_tree()


def test_more_indexes_than_the_image_has(forged: Forger) -> None:
    forged.inode(stat.S_IFREG, 0xFFFFFFFF, f.CHUNK_INDEXES, f.CHUNK_BASED)
    with pytest.raises(FormatError, match="outside"):
        forged.image().load_tree()


def test_type_that_the_directory_contradicts(forged: Forger) -> None:
    forged.inode(stat.S_IFIFO, 0, 0)
    with pytest.raises(FormatError, match="type"):
        forged.image().load_tree()


def test_attributes_that_overlayfs_would_obey() -> None:
    escaped = b"trusted.overlay.overlay.redirect"
    root = directory()
    root.xattrs = {escaped: b"/etc"}
    image = write_erofs(root, [])
    assert ErofsImage(image).load_tree().xattrs == {escaped: b"/etc"}
    # The same length, no longer escaped.
    forged = image.replace(b"overlay.overlay.redirect", b"overlay.redirect-to-etc-")
    assert forged != image
    with pytest.raises(FormatError, match="must not have"):
        ErofsImage(sealed(bytearray(forged))).load_tree()
