"""What the kernel shows of an image we wrote is the tree it was written from."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings

from dsecfs.layers.erofs import format as f
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.tree import BLOCK, Extent, Inode, directory, whiteout
from tests.support.mounts import mounted, needs_erofs, needs_erofs_utils
from tests.support.trees import (
    Blob,
    acl,
    blob_of_blocks,
    describe,
    differences,
    file_of,
    symlink_to,
    tree_from_directory,
    trees,
)

pytestmark = [needs_erofs, needs_erofs_utils]


def devices_of(blobs: Sequence[Blob]) -> list[Device]:
    return [Device(f"{i:064x}".encode(), blob.size) for i, blob in enumerate(blobs)]


def check(root: Inode, blobs: Sequence[Blob], where: Path) -> None:
    """Write `root`; compare with the kernel's view, by devices, directio and flat."""
    image = where / "image.erofs"
    meta = write_erofs(root, devices_of(blobs))
    image.write_bytes(meta)
    paths = [blob.path for blob in blobs]
    with mounted(image, paths) as mount:
        assert differences(root, mount, paths) == []
    with mounted(image, paths, ["directio"]) as mount:
        assert differences(root, mount, paths) == []
    flat = where / "flat.erofs"
    with flat.open("wb") as file:
        file.write(meta)
        for path in paths:
            file.write(path.read_bytes())
    with mounted(flat) as mount:
        assert differences(root, mount, paths) == []
    assert describe(ErofsImage(meta).load_tree()) == describe(root)
    fsck = ["fsck.erofs", *(f"--device={path}" for path in paths), str(image)]
    subprocess.run(fsck, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def blobs() -> Iterator[list[Blob]]:
    with tempfile.TemporaryDirectory(prefix="blobs-") as where:
        yield [blob_of_blocks(Path(where, f"blob{i}"), n) for i, n in enumerate((40, 9))]


@settings(max_examples=40, deadline=None)
@given(root=trees((40, 9)))
def test_random_trees(blobs: list[Blob], root: Inode) -> None:
    with tempfile.TemporaryDirectory(prefix="image-") as where:
        image = Path(where, "image")
        image.write_bytes(write_erofs(root, devices_of(blobs)))
        paths = [blob.path for blob in blobs]
        with mounted(image, paths) as mount:
            assert differences(root, mount, paths) == []


def test_every_kind_of_inode(tmp_path: Path) -> None:
    blob = Blob(tmp_path / "blob")
    root = directory(0o1777, uid=3, gid=70000, mtime_ns=1_600_000_000_123_456_789)
    root.children = {
        b"empty": file_of(blob, b"", mtime_ns=5),
        b"one": file_of(blob, b"1", mode=0o4755),
        b"block": file_of(blob, os.urandom(BLOCK)),
        b"big": file_of(blob, os.urandom(3_000_001)),
        b"link": symlink_to(b"one"),
        b"long link": symlink_to(b"x/" * 2047 + b"x"),
        b"fifo": Inode(stat.S_IFIFO | 0o600),
        b"socket": Inode(stat.S_IFSOCK | 0o600),
        b"char": Inode(stat.S_IFCHR | 0o600, rdev=os.makedev(4095, 1048575)),
        b"block device": Inode(stat.S_IFBLK | 0o600, rdev=os.makedev(8, 300)),
        b"gone": whiteout(),
        b"dir": directory(0o700),
    }
    root.children[b"hard"] = root.children[b"one"]
    inner = root.children[b"dir"]
    inner.opaque = True
    assert inner.children is not None
    inner.children[b"again"] = root.children[b"one"]
    check(root, [blob], tmp_path)


@pytest.mark.parametrize("count", [80, 5_000])
def test_large_directories(count: int, tmp_path: Path) -> None:
    blob = Blob(tmp_path / "blob")
    root = directory()
    assert root.children is not None
    shared = file_of(blob, b"data")
    for i in range(count):
        name = f"{i:0255d}".encode() if i % 2 else b"!%d" % i
        root.children[name] = shared if i % 3 else directory(mtime_ns=i)
    check(root, [blob], tmp_path)


def test_times_beyond_every_border(tmp_path: Path) -> None:
    blob = Blob(tmp_path / "blob")
    root = directory()
    seconds = [-(2**63), -(2**32), -1, 0, 2**31 - 1, 2**31, 2**34, 2**63 - 1]
    root.children = {
        b"%d.%d" % (s, ns): file_of(blob, b"", mtime_ns=s * 10**9 + ns)
        for s in seconds
        for ns in (0, 1, 999_999_999)
    }
    root.children[b"data"] = file_of(blob, b"d")
    check(root, [blob], tmp_path)


@pytest.mark.parametrize("when", [-(2**40) * 10**9 - 7, 1_700_000_000_000_000_001, 2**40 * 10**9])
def test_compact_inodes_take_the_time_of_the_image(when: int, tmp_path: Path) -> None:
    blob = Blob(tmp_path / "blob")
    root = directory(mtime_ns=when)
    root.children = {b"%d" % i: file_of(blob, b"%d" % i, mtime_ns=when) for i in range(20)}
    root.children[b"extended"] = file_of(blob, b"e", mtime_ns=when + 1)
    root.children[b"uid"] = file_of(blob, b"e", mtime_ns=when, uid=65536)
    check(root, [blob], tmp_path)
    image = (tmp_path / "image.erofs").read_bytes()
    root_at = struct.unpack_from("<H", image, 1024 + 14)[0] * 32
    assert image[root_at] & 1 == 0  # the root is compact


def test_more_links_than_a_compact_inode_counts(tmp_path: Path) -> None:
    blob = Blob(tmp_path / "blob")
    popular = file_of(blob, b"popular")
    root = directory()
    root.children = {b"%d" % i: popular for i in range(66_000)}
    image = tmp_path / "image"
    image.write_bytes(write_erofs(root, devices_of([blob])))
    with mounted(image, [blob.path]) as mount:
        assert (mount / "65999").stat().st_nlink == 66_000


def test_holes_and_pieces(blobs: list[Blob], tmp_path: Path) -> None:
    def at(block: int, blob: int, physical: int, count: int, cut: int = 0) -> Extent:
        return Extent(block * BLOCK, blob, physical * BLOCK, count * BLOCK - cut)

    maps = {
        b"all hole": (50_000_000, ()),
        b"hole first": (9 * BLOCK, (at(8, 0, 3, 1),)),
        b"hole last": (9 * BLOCK + 1, (at(0, 0, 3, 1),)),
        b"odd": (20 * BLOCK, (at(1, 0, 3, 3), at(7, 1, 0, 2), at(9, 1, 5, 1), at(13, 0, 39, 1))),
        b"even": (64 * BLOCK - 100, (at(16, 0, 1, 16), at(48, 0, 17, 16, 100))),
        b"joined": (8 * BLOCK, (at(0, 0, 1, 3), at(3, 0, 4, 5))),
        b"backwards": (4 * BLOCK, (at(0, 0, 9, 2), at(2, 0, 7, 2))),
        b"same block twice": (2 * BLOCK, (at(0, 1, 4, 1), at(1, 1, 4, 1))),
    }
    root = directory()
    assert root.children is not None
    for name, (size, extents) in maps.items():
        root.children[name] = Inode(stat.S_IFREG | 0o644, size=size, extents=extents)
    check(root, blobs, tmp_path)


def test_sizes_beyond_32_bits(tmp_path: Path) -> None:
    blob = Blob(tmp_path / "blob")
    tail = blob.append(b"the end")
    with blob.path.open("r+b") as file:
        file.truncate(5 << 30)
    blob.size = 5 << 30
    size = (1 << 33) + 7
    root = directory()
    root.children = {
        b"5 GiB": Inode(stat.S_IFREG, size=5 << 30, extents=(Extent(0, 0, 0, 5 << 30),)),
        b"sparse": Inode(stat.S_IFREG, size=size, extents=(Extent(1 << 33, 0, tail, 7),)),
        b"huge": Inode(stat.S_IFREG, size=(1 << 62) + 1),
    }
    image = tmp_path / "image"
    image.write_bytes(write_erofs(root, devices_of([blob])))
    with mounted(image, [blob.path]) as mount:
        assert differences(root, mount, [blob.path]) == []
        with (mount / "sparse").open("rb") as file:
            file.seek((1 << 33) - 100)
            assert file.read() == bytes(100) + b"the end"
        with (mount / "5 GiB").open("rb") as file:
            assert file.read(9) == b"the end\0\0"
            file.seek((5 << 30) - 5)
            assert file.read() == bytes(5)
        with (mount / "huge").open("rb") as file:
            file.seek(1 << 62)
            assert file.read() == b"\0"


def test_attributes(tmp_path: Path) -> None:
    blob = Blob(tmp_path / "blob")
    label = {b"security.selinux": b"system_u:object_r:usr_t:s0\0"}
    capability = {b"security.capability": bytes.fromhex("0100000200200000000000000000000000000000")}
    root = directory()
    root.children = {b"label%d" % i: file_of(blob, b"", xattrs=label) for i in range(300)}
    root.children |= {
        b"ping": file_of(blob, b"#!", xattrs=capability | label),
        b"acl": file_of(blob, b"a", xattrs={b"system.posix_acl_access": acl(1000, 70000)}),
        b"large": file_of(
            blob, b"l", xattrs={b"user.big": os.urandom(65535), b"trusted.big": os.urandom(30000)}
        ),
        b"many": file_of(blob, b"m", xattrs={b"user.%d" % i: b"%99d" % i for i in range(300)}),
        b"many again": file_of(
            blob, b"m", xattrs={b"user.%d" % i: b"%99d" % i for i in range(299)}
        ),
        b"name": file_of(blob, b"n", xattrs={b"user." + b"n" * 250: b""}),
        b"link": symlink_to(b"t" * 3000, xattrs={b"trusted.t": b"v" * 2000}),
        b"long link": symlink_to(b"t" * 4095, xattrs={b"trusted.t": b"v"}),
        b"escaped": directory(),
        b"default": directory(),
    }
    root.children[b"escaped"].xattrs = {b"trusted.overlay.overlay.opaque": b"y"}
    root.children[b"default"].xattrs = {b"system.posix_acl_default": acl(5), b"user.d": b"1"}
    root.children[b"default"].opaque = True
    check(root, [blob], tmp_path)


def test_many_devices(tmp_path: Path) -> None:
    blobs = [Blob(tmp_path / f"blob{i}") for i in range(200)]
    root = directory()
    root.children = {
        b"%d" % i: file_of(blob, b"data of %d" % i * 1000, i) for i, blob in enumerate(blobs)
    }
    check(root, blobs, tmp_path)
    assert ErofsImage((tmp_path / "image.erofs").read_bytes()).devices[199].size == blobs[199].size


def test_overlay_obeys_whiteouts_and_opaque_marks(tmp_path: Path) -> None:
    blob = Blob(tmp_path / "blob")
    lower, upper = directory(), directory()
    below = directory()
    below.children = {b"old": file_of(blob, b"old")}
    lower.children = {b"dir": below, b"file": file_of(blob, b"lower"), b"kept": directory()}
    above = directory()
    above.children = {b"new": file_of(blob, b"new")}
    above.opaque = True
    upper.children = {b"dir": above, b"file": whiteout()}
    for name, tree in (("lower", lower), ("upper", upper)):
        (tmp_path / name).write_bytes(write_erofs(tree, devices_of([blob])))
    with (
        mounted(tmp_path / "lower", [blob.path]) as one,
        mounted(tmp_path / "upper", [blob.path]) as two,
    ):
        target = tmp_path / "merged"
        target.mkdir()
        options = f"lowerdir={two}:{one}"
        subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", options, str(target)],
            check=True, timeout=30,
        )  # fmt: skip
        try:
            assert sorted(os.listdir(target)) == ["dir", "kept"]
            assert os.listdir(target / "dir") == ["new"]
        finally:
            subprocess.run(["umount", str(target)], check=True, timeout=30)


def test_the_same_tree_as_tar_unpacks(tmp_path: Path) -> None:
    """A real tree, packed and unpacked by tar, then seen through the kernel's EROFS."""
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    stdlib = Path(sysconfig.get_path("stdlib"))
    for package in ("email", "json", "encodings"):
        shutil.copytree(stdlib / package, source / package)
    (source / "link").symlink_to("json/__init__.py")
    os.link(source / "json" / "__init__.py", source / "hard")
    os.mkfifo(source / "fifo")
    os.mknod(source / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mkdir(source / "sticky", 0o1777)
    os.chown(source / "link", 70000, 12, follow_symlinks=False)
    os.setxattr(source / "hard", "user.note", b"value")
    os.setxattr(source / "sticky", "trusted.t", b"")
    with (source / "sparse").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(300_000)
        file.write(b"island")
    unpacked.mkdir()
    archive = tmp_path / "archive.tar"
    flags = ["--xattrs", "--xattrs-include=*", "--numeric-owner"]
    subprocess.run(
        ["tar", "-C", source, "--format=posix", "--sparse", *flags, "-cf", archive, "."],
        check=True, timeout=60,
    )  # fmt: skip
    subprocess.run(["tar", "-C", unpacked, *flags, "-xpf", archive], check=True, timeout=60)
    blob = Blob(tmp_path / "blob")
    root = tree_from_directory(unpacked, blob)
    assert differences(root, unpacked, [blob.path]) == []
    check(root, [blob], tmp_path)


def test_reader_understands_what_mkfs_makes(tmp_path: Path) -> None:
    """The other direction: mkfs.erofs writes, we read, the kernel is the judge."""
    source = tmp_path / "source"
    shutil.copytree(Path(sysconfig.get_path("stdlib")) / "json", source / "json")
    (source / "link").symlink_to("json")
    (source / "big").write_bytes(os.urandom(700_001))
    os.link(source / "big", source / "hard")
    os.mkfifo(source / "fifo")
    for i in range(600):
        (source / f"{i}-{'n' * 100}").symlink_to(str(i))
    for name in ("big", "link"):
        os.setxattr(source / name, "trusted.same", b"value", follow_symlinks=False)
    image, blob = tmp_path / "image", tmp_path / "blob"
    subprocess.run(
        ["mkfs.erofs", "-x1", "--chunksize=4096", f"--blobdev={blob}", image, source],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    blocks = -(-blob.stat().st_size // BLOCK)
    with blob.open("r+b") as file:
        file.truncate(blocks * BLOCK)
    # mkfs.erofs 1.5 leaves the size of the device 0; later ones and we fill it in.
    data = bytearray(image.read_bytes())
    slot = f.SUPER.unpack_from(data, f.SUPER_OFFSET)[17] * f.DEVICE.size
    struct.pack_into("<I", data, slot + f.TAG_MAX, blocks)
    struct.pack_into("<I", data, f.CHECKSUM_AT, f.superblock_checksum(data))
    image.write_bytes(data)
    with mounted(image, [blob]) as mount, ErofsImage.open(image) as read:
        root = read.load_tree()
        assert differences(root, mount, [blob]) == []
        assert root.children is not None and len(root.children) == 605
        assert root.children[b"big"] is root.children[b"hard"]
