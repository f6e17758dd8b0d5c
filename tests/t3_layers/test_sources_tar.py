"""Tar source against GNU tar: what `tar -x` makes of an archive is what the tree holds."""

from __future__ import annotations

import gzip
import io
import os
import socket
import stat
import struct
import subprocess
import tarfile
import threading
import tracemalloc
from pathlib import Path

import pytest

from dsecfs.errors import BadInput, DeadlineExceeded, DsecfsError, UnsafeArchive
from dsecfs.layers.sources.base import Limits, SourceTree
from dsecfs.layers.sources.streams import ReadAhead
from dsecfs.layers.sources.tar import read_tar, read_tar_file
from dsecfs.layers.sources.tarformat import TarReader
from dsecfs.layers.tree import Inode
from tests.t3_layers.disktree import difference, disk_listing
from tests.t3_layers.memsink import MemorySink, listing

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for owners and devices")


def load(data: bytes, **options: object) -> tuple[SourceTree, MemorySink]:
    sink = MemorySink()
    return read_tar(io.BytesIO(data), sink, "archive", **options), sink  # type: ignore[arg-type]


def get(root: Inode, path: str) -> Inode:
    node = root
    for part in path.split("/"):
        assert node.children is not None
        node = node.children[part.encode()]
    return node


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: object) -> bytes:
    """One archive member by Python's tarfile; a second writer beside GNU tar."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return (
        info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + data + bytes(-len(data) % 512)
    )


def archive(*members: bytes) -> bytes:
    return b"".join(members) + bytes(1024)


def populate(top: Path) -> None:
    """One of everything that GNU tar can hold."""
    (top / "dir" / "sub").mkdir(parents=True)
    (top / "empty").write_bytes(b"")
    (top / "dir/file").write_bytes(b"content\n" * 1000)
    (top / "dir/big").write_bytes(os.urandom(3 << 20))
    os.link(top / "dir/file", top / "dir/sub/hard")
    os.symlink("../dir/file", top / "dir/sub/soft")
    os.link(top / "dir/sub/soft", top / "hard-soft", follow_symlinks=False)
    os.symlink("x" * 300, top / "long-soft")
    (top / ("n" * 250)).write_bytes(b"long name")
    deep = top / ("d" * 120) / ("e" * 120) / ("f" * 120)
    deep.mkdir(parents=True)
    (deep / "g").write_bytes(b"deep")
    os.link(deep / "g", top / "hard-deep")
    with open(os.fsencode(top) + b"/caf\xe9 \xff\n\\\x01", "wb") as f:
        f.write(b"not UTF-8")
    (top / "grüße").write_bytes(b"UTF-8")
    (top / "setuid").write_bytes(b"#!")
    os.chown(top / "setuid", 0, 50)
    os.chmod(top / "setuid", 0o6755)
    (top / "sticky").mkdir()
    os.chmod(top / "sticky", 0o1777)
    os.mkfifo(top / "fifo", 0o640)
    os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(top / "block", stat.S_IFBLK | 0o600, os.makedev(259, 70000))
    (top / "owner").write_bytes(b"x")
    os.chown(top / "owner", 70000, 4_000_000_000)
    (top / "old").write_bytes(b"x")
    os.utime(top / "old", ns=(0, -1_500_000_000_000_000_001))
    (top / "future").write_bytes(b"x")
    os.utime(top / "future", ns=(0, 9_000_000_000_123_456_789))
    os.utime(top / "dir", ns=(0, 1_234_567_890_123_456_789))
    with open(top / "sparse", "wb") as f:
        f.write(b"head")
        f.seek(1 << 20)
        f.write(b"middle" * 1000)
        f.seek(5 << 20)
        f.write(b"tail")
        f.truncate(9_000_001)
    with open(top / "holes", "wb") as f:
        for i in range(40):  # more segments than a GNU header holds
            f.seek(i * 65536)
            f.write(b"%d" % i * 700)
    with open(top / "all-hole", "wb") as f:
        f.truncate(1 << 24)


def add_xattrs(top: Path) -> None:
    os.setxattr(top / "empty", "user.plain", b"value")
    os.setxattr(top / "empty", "user.bin=ary%3D", b"\0\n=\xff" * 20)
    os.setxattr(top / "dir", "trusted.note", b"")
    # A version 2 capability: cap_net_bind_service, effective (linux/capability.h).
    capability = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
    os.setxattr(top / "setuid", "security.capability", capability)


FORMATS = {
    "pax": ["--format=pax"],
    "pax-deleted-times": ["--format=pax", "--pax-option=delete=atime,delete=ctime"],
    "pax-sparse-0.0": ["--format=pax", "--sparse", "--sparse-version=0.0"],
    "pax-sparse-0.1": ["--format=pax", "--sparse", "--sparse-version=0.1"],
    "pax-sparse-1.0": ["--format=pax", "--sparse", "--sparse-version=1.0"],
    "gnu": ["--format=gnu"],
    "gnu-sparse": ["--format=gnu", "--sparse"],
    "gnu-incremental": ["--format=gnu", "--incremental"],
    "oldgnu-sparse": ["--format=oldgnu", "--sparse"],
    "absolute-names": ["--format=pax", "--transform=s,^\\.,/./,"],
}


@root_only
@pytest.mark.parametrize("name", FORMATS)
def test_same_as_gnu_tar(name: str, tmp_path: Path) -> None:
    source, target, file = tmp_path / "source", tmp_path / "target", tmp_path / "a.tar"
    source.mkdir()
    target.mkdir()
    populate(source)
    if "pax" in name:
        add_xattrs(source)
    options = FORMATS[name] + (["--xattrs", "--xattrs-include=*"] if "pax" in name else [])
    if "sparse" not in name:
        (source / "all-hole").unlink()
    subprocess.run(
        ["tar", *options, "-cf", file, "-C", source, "."], check=True, capture_output=True
    )
    subprocess.run(
        [
            "tar",
            "-x",
            "-p",
            "--same-owner",
            "--xattrs",
            "--xattrs-include=*",
            "-f",
            file,
            "-C",
            target,
        ],
        check=True,
        capture_output=True,
    )
    sink = MemorySink()
    tree = read_tar_file(str(file), sink)
    assert tree.notes == ()
    assert tree.self_contained
    assert difference(listing(tree.root, sink), disk_listing(str(target))) == []
    if "sparse" in name:
        assert len(sink.data) < 4_500_000
        assert get(tree.root, "all-hole").extents == ()


@root_only
@pytest.mark.parametrize("old", ["v7", "ustar"])
def test_old_formats(old: str, tmp_path: Path) -> None:
    source, target, file = tmp_path / "source", tmp_path / "target", tmp_path / "a.tar"
    (source / "a" / ("x" * (20 if old == "v7" else 99)) / "b").mkdir(parents=True)
    target.mkdir()
    for i in range(3):
        path = next((source / "a").iterdir()) / "b" / f"file{i}"
        path.write_bytes(bytes(i * 700))
        os.chown(path, i, 100 + i)
    os.link(path, source / "hard")
    subprocess.run(
        ["tar", f"--format={old}", "-cf", file, "-C", source, "."], check=True, capture_output=True
    )
    subprocess.run(["tar", "-xpf", file, "-C", target], check=True)
    sink = MemorySink()
    tree = read_tar_file(str(file), sink)
    assert difference(listing(tree.root, sink), disk_listing(str(target))) == []


@root_only
def test_acl_text_becomes_the_attribute(tmp_path: Path) -> None:
    source, file = tmp_path / "source", tmp_path / "a.tar"
    (source / "d").mkdir(parents=True)
    try:
        rules = "u:123456:rw-,g:99999:r--,u:71234:---,m::rwx"
        subprocess.run(["setfacl", "-m", rules, source / "d"], check=True, capture_output=True)
        subprocess.run(
            ["setfacl", "-d", "-m", rules, source / "d"], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no setfacl, or a file system without ACLs: {e}")
    want = {n.encode(): os.getxattr(source / "d", n) for n in os.listxattr(source / "d")}
    assert sorted(want) == [b"system.posix_acl_access", b"system.posix_acl_default"]
    subprocess.run(["tar", "--acls", "--numeric-owner", "-cf", file, "-C", source, "."], check=True)
    tree = read_tar_file(str(file), MemorySink())
    assert get(tree.root, "d").xattrs == want


def test_acl_with_names_is_left_out_with_a_note() -> None:
    text = "user::rwx,user:alice:rwx,group::r-x,mask::rwx,other::r--"
    tree, _ = load(archive(member("f", pax_headers={"SCHILY.acl.access": text})))
    assert get(tree.root, "f").xattrs == {}
    assert any("alice" in note for note in tree.notes)


COMPRESSORS = {
    "gzip": ["gzip", "-c"],
    "bzip2": ["bzip2", "-c"],
    "xz": ["xz", "-c", "-T1"],
    "zstd": ["zstd", "-c"],
    "lz4": ["lz4", "-c"],
    "none": ["cat"],
}


@pytest.mark.parametrize("name", COMPRESSORS)
def test_compressions(name: str) -> None:
    # Two streams back to back are one, as for `gzip -d` and the others.
    body = os.urandom(1 << 20) + bytes(3 << 20)
    plain = archive(member("f", data=body), member("g", data=b"x"))
    packed = b""
    for part in (plain[:1_000_000], plain[1_000_000:]):
        done = subprocess.run(COMPRESSORS[name], input=part, capture_output=True, check=True)
        packed += done.stdout
    read = _compressed(packed)
    assert read[0].content(get(read[1].root, "f")) == body
    if name == "none":
        return
    whole = subprocess.run(COMPRESSORS[name], input=plain, capture_output=True, check=True).stdout
    for cut in (3, 9, 100, len(whole) // 2, len(whole) - 3, len(whole) - 1):
        with pytest.raises(BadInput):
            _compressed(whole[:cut])
    with pytest.raises(BadInput):
        _compressed(whole + b"rubbish behind the data")
    for at in (30, len(whole) // 3, len(whole) - 6):
        damaged = bytearray(whole)
        damaged[at] ^= 0x55
        try:
            sink, tree = _compressed(bytes(damaged))
        except DsecfsError:
            continue
        # Some bits (a time stamp, a file name) mean nothing for the data.
        assert sink.content(get(tree.root, "f")) == body


def _compressed(data: bytes, limits: Limits | None = None) -> tuple[MemorySink, SourceTree]:
    from dsecfs.layers.sources.decompress import decompressed

    sink = MemorySink()
    limits = limits or Limits()
    stream = decompressed(io.BytesIO(data), limits, "archive a")
    return sink, read_tar(stream, sink, "archive a", limits=limits)


@pytest.mark.parametrize("name", ["gzip", "zstd", "xz", "lz4", "bzip2"])
def test_bomb_is_stopped_by_its_ratio(name: str) -> None:
    plain = archive(member("zeros", data=bytes(64 << 20)))
    packed = subprocess.run(COMPRESSORS[name], input=plain, capture_output=True, check=True).stdout
    limits = Limits(ratio=20, ratio_from=1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(UnsafeArchive, match="archive a: .* to 1"):
            _compressed(packed, limits)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    sink, _ = _compressed(packed)
    assert len(sink.data) == 64 << 20


def test_not_a_tar() -> None:
    for text in (b"#!/bin/sh\n", b"\x7fELF\2\1\1", b"PK\3\4"):
        with pytest.raises(BadInput, match="no tar header"):
            load(text * 200)
    with pytest.raises(BadInput, match="no tar header"):
        load(gzip.compress(archive(member("f"))) + bytes(512))
    for size in (1, 511, 513):
        with pytest.raises(BadInput, match="truncated"):
            load(archive(member("f", data=b"x" * 600))[:size])


def test_end_of_archive() -> None:
    assert load(b"")[0].notes != ()
    assert load(bytes(512))[0].notes == ()
    assert load(bytes(10240))[0].root.children == {}
    tree, _ = load(member("f"))
    assert "truncated" in tree.notes[0]
    # The last entry may lack its padding, all of it or some (umoci insert writes such layers).
    whole = member("f", data=b"one\n")
    for size in (516, 517, 1023):
        tree, sink = load(whole[:size])
        assert bytes(sink.data).startswith(b"one\n") and "truncated" in tree.notes[0]
    with pytest.raises(BadInput, match="truncated inside the data"):
        load(whole[:515])
    # What follows the end mark is not part of the archive.
    tree, _ = load(archive(member("f")) + b"rubbish" * 1000)
    assert tree.root.children is not None and list(tree.root.children) == [b"f"]


def test_last_entry_wins() -> None:
    d = tarfile.DIRTYPE
    tree, sink = load(
        archive(
            member("f", data=b"one"),
            member("hard", tarfile.LNKTYPE, linkname="f"),
            member("f", data=b"two"),
            member("d", d, mode=0o700),
            member("d/x", data=b"x"),
            member("d", d, mode=0o750, uid=5),
            member("gone", d),
            member("gone/y", data=b"y"),
            member("gone", data=b"a file now"),
            member("back", tarfile.SYMTYPE, linkname="d"),
            member("back", d),
            member("back/z", data=b"z"),
        )
    )
    root = tree.root
    assert sink.content(get(root, "f")) == b"two"
    assert sink.content(get(root, "hard")) == b"one"
    assert get(root, "d").mode == stat.S_IFDIR | 0o750 and get(root, "d").uid == 5
    assert sink.content(get(root, "d/x")) == b"x"
    assert sink.content(get(root, "gone")) == b"a file now"
    assert sink.content(get(root, "back/z")) == b"z"
    assert list(get(root, "d").children or ()) == [b"x"]


def test_parents_later_or_missing() -> None:
    tree, _ = load(
        archive(
            member("a/b/c", data=b"c"),
            member("a", tarfile.DIRTYPE, mode=0o711, uid=3),
            member("m/n", data=b"n"),
        )
    )
    assert get(tree.root, "a").mode == stat.S_IFDIR | 0o711 and get(tree.root, "a").uid == 3
    assert get(tree.root, "a/b").mode == stat.S_IFDIR | 0o755
    assert tree.implied == {tree.root, get(tree.root, "a/b"), get(tree.root, "m")}


def test_parent_is_a_symlink_stays_in_the_root() -> None:
    tree, sink = load(
        archive(
            member("bin", tarfile.SYMTYPE, linkname="usr/bin"),
            member("bin/sh", data=b"sh"),
            member("abs", tarfile.SYMTYPE, linkname="/etc"),
            member("abs/passwd", data=b"root"),
            member("up", tarfile.SYMTYPE, linkname="../../../../tmp/../var"),
            member("up/log", data=b"log"),
            member("chain", tarfile.SYMTYPE, linkname="abs/../up"),
            member("chain/more", data=b"more"),
            member("hard", tarfile.LNKTYPE, linkname="bin/sh"),
        )
    )
    root = tree.root
    assert sorted(root.children or ()) == sorted(
        [b"bin", b"usr", b"abs", b"etc", b"up", b"var", b"tmp", b"chain", b"hard"]
    )
    assert sink.content(get(root, "usr/bin/sh")) == b"sh"
    assert sink.content(get(root, "etc/passwd")) == b"root"
    assert sink.content(get(root, "var/log")) == b"log"
    assert sink.content(get(root, "var/more")) == b"more"
    assert get(root, "hard") is get(root, "usr/bin/sh")


HOSTILE = {
    "leaves the root": (archive(member("a/../../etc/passwd")), "'a/../../etc/passwd'.*outside"),
    "only dots": (archive(member("..")), "outside"),
    "whole path of dots": (archive(member("../x", tarfile.DIRTYPE)), "outside"),
    "link target outside": (
        archive(member("x", tarfile.LNKTYPE, linkname="../etc/shadow")),
        "'x'.*outside",
    ),
    "loop of symlinks": (
        archive(
            member("a", tarfile.SYMTYPE, linkname="b"),
            member("b", tarfile.SYMTYPE, linkname="a"),
            member("a/f"),
        ),
        "'a/f'.*loop",
    ),
    "symlink to itself with a tail": (
        archive(member("a", tarfile.SYMTYPE, linkname="a/b/c/d"), member("a/f")),
        "loop",
    ),
    "cycle of hard links": (
        archive(
            member("a", tarfile.LNKTYPE, linkname="b"), member("b", tarfile.LNKTYPE, linkname="a")
        ),
        "'a': hard link to 'b'",
    ),
    "hard link to nothing": (archive(member("a", tarfile.LNKTYPE, linkname="")), "'a'"),
    "hard link to a directory": (
        archive(member("d", tarfile.DIRTYPE), member("a", tarfile.LNKTYPE, linkname="d")),
        "directory 'd'",
    ),
    "file as a parent": (archive(member("f"), member("f/g")), "'f/g'.*'f'.*not a directory"),
    "long name": (archive(member("n" * 256)), "256"),
    "deep": (archive(member("a/" * 1100 + "f")), "1101 deep"),
    "long path": (archive(member("./" * 40000 + "f")), "80001 bytes"),
    "root as a file": (archive(member(".")), "root must be a directory"),
    "symlink to nothing": (archive(member("s", tarfile.SYMTYPE, linkname="")), "'s'"),
    "whiteout device": (archive(member("w", tarfile.CHRTYPE)), "'w'.*whiteout"),
    "device number": (archive(member("w", tarfile.CHRTYPE, devmajor=70000)), "70000:0"),
    "multi-volume": (archive(member("m", b"M")), "'M'.*not supported"),
    "uid": (archive(member("u", pax_headers={"uid": "4294967295"})), "32 bits"),
    "negative uid": (archive(member("u", pax_headers={"uid": "-1"})), "uid is no number"),
    "huge time": (archive(member("t", pax_headers={"mtime": "9" * 20})), "64 bits"),
    "no time": (archive(member("t", pax_headers={"mtime": "1_0"})), "mtime is no number"),
    "huge size": (archive(member("t", pax_headers={"size": str(1 << 60)})), "'t': a size of"),
    "huge attribute": (
        archive(member("t", pax_headers={"SCHILY.xattr.user.a": "x" * 70000})),
        "'t'.*attributes",
    ),
    "attribute without a name": (
        archive(member("t", pax_headers={"SCHILY.xattr.": "x"})),
        "attribute name",
    ),
    "base64": (archive(member("t", pax_headers={"LIBARCHIVE.xattr.user.x": "!"})), "base64"),
    "huge extended header": (
        archive(member("t", pax_headers={"comment": "x" * (1 << 20)})),
        "extended headers",
    ),
    "sparse outside": (
        archive(member("t", pax_headers={"GNU.sparse.map": "0,512", "GNU.sparse.size": "5"})),
        "sparse segment",
    ),
    "sparse without data": (
        archive(member("t", pax_headers={"GNU.sparse.map": "0,512", "GNU.sparse.size": "512"})),
        "sparse segments of 512 bytes for 0",
    ),
    "sparse order": (
        archive(
            member(
                "t",
                data=b"x" * 20,
                pax_headers={"GNU.sparse.map": "10,10,0,10", "GNU.sparse.size": "99"},
            )
        ),
        "overlaps",
    ),
    "sparse huge": (
        archive(member("t", pax_headers={"GNU.sparse.map": "", "GNU.sparse.size": str(1 << 50)})),
        "a size of",
    ),
    "sparse version": (
        archive(
            member("t", pax_headers={"GNU.sparse.major": "7", "GNU.sparse.realsize": "7"}),
        ),
        "7.0",
    ),
    "global path": (
        member("g", tarfile.XGLTYPE, data=b"12 path=a/b\n") + archive(member("t")),
        "global",
    ),
    "pax record": (member("g", tarfile.XHDTYPE, data=b"99 path=a\n") + archive(member("t")), "pax"),
    "headers without an entry": (
        member("g", tarfile.XHDTYPE, data=b"10 path=a\n") + bytes(1024),
        "without an entry",
    ),
}


MEANT = ("whiteout device", "cycle of hard links")
"""Cases that mean something in a layer of an image."""


@pytest.mark.parametrize(
    ("case", "whiteouts"),
    [(c, w) for c in HOSTILE for w in (False, True) if not (w and c in MEANT)],
)
def test_hostile(case: str, whiteouts: bool) -> None:
    data, message = HOSTILE[case]
    with pytest.raises(BadInput, match=message):
        load(data, whiteouts=whiteouts)


def test_limits() -> None:
    def refused(data: bytes, words: str, **limits: int) -> None:
        with pytest.raises(UnsafeArchive, match=words):
            load(data, limits=Limits(**limits))

    refused(archive(*(member(f"f{i}") for i in range(20))), "'f10'.*10 entries", entries=10)
    refused(archive(member("a/" * 20 + "f")), "10 entries", entries=10)
    refused(archive(member("a", data=bytes(99)), member("b", data=bytes(2))), "'b'.*100", bytes=100)
    refused(archive(member("n" * 90), member("m" * 90)), "names", metadata=100)
    attributes = {"SCHILY.xattr.user.a": "x" * 90}
    refused(archive(member("n", pax_headers=attributes)), "attributes", metadata=90)
    with pytest.raises(DeadlineExceeded):
        _compressed(archive(member("f")), Limits(seconds=-1.0))


def test_overlay_attributes_are_escaped_and_foreign_ones_left_out() -> None:
    names = ["trusted.overlay.redirect", "user.overlay.opaque", "trusted.overlay.overlay.x"]
    names += ["user.ok", "system.nfs4_acl", "btrfs.compression", "user."]
    tree, _ = load(
        archive(
            member("d", tarfile.DIRTYPE, pax_headers={f"SCHILY.xattr.{n}": "/etc" for n in names})
        )
    )
    assert sorted(get(tree.root, "d").xattrs) == [
        b"trusted.overlay.overlay.overlay.x",
        b"trusted.overlay.overlay.redirect",
        b"user.ok",
        b"user.overlay.overlay.opaque",
    ]
    assert not get(tree.root, "d").opaque
    assert len(tree.notes) == 6 and all("'d/'" in note for note in tree.notes)


def test_libarchive_attributes() -> None:
    tree, _ = load(archive(member("f", pax_headers={"LIBARCHIVE.xattr.user.a%3Db%FF": "AP8K"})))
    assert get(tree.root, "f").xattrs == {b"user.a=b\xff": b"\x00\xff\n"}


def test_whiteouts_only_in_layers() -> None:
    data = archive(
        member("d/.wh.gone"),
        member("d/.wh..wh..opq"),
        member(".wh.both"),
        member("both", data=b"stays"),
        member("dir/x"),
        member(".wh.dir"),
        member(".wh.dir2"),
        member("dir2", tarfile.DIRTYPE),
        member(".wh.imp"),
        member("imp/x"),
        member(".wh..wh.plnk/1.2"),
        member("dev", tarfile.CHRTYPE),
    )
    tree, sink = load(data, whiteouts=True)
    root = tree.root
    assert sorted(root.children or ()) == [b"both", b"d", b"dev", b"dir", b"dir2", b"imp"]
    assert get(root, "d/gone").is_whiteout and get(root, "d").opaque
    assert sink.content(get(root, "both")) == b"stays"
    assert get(root, "dir").opaque and get(root, "dir2").opaque and get(root, "imp").opaque
    assert get(root, "dev").is_whiteout
    assert "aufs" in tree.notes[0]
    plain, _ = load(data[: -2 * 512 - 512] + bytes(1024))
    assert sorted(get(plain.root, "d").children or ()) == [b".wh..wh..opq", b".wh.gone"]
    for name in (".wh.", ".wh..", ".wh...", "d/.wh.x/y"):
        with pytest.raises(BadInput, match=name):
            load(archive(member(name)), whiteouts=True)


def test_hard_link_to_a_lower_layer_waits_for_it() -> None:
    data = archive(member("new", tarfile.LNKTYPE, linkname="/usr/bin/old"))
    tree, _ = load(data, whiteouts=True)
    assert tree.links == {get(tree.root, "new"): b"/usr/bin/old"}
    assert not tree.self_contained
    with pytest.raises(BadInput, match="'new'.*'/usr/bin/old'"):
        load(data)


def test_a_replaced_link_does_not_wait() -> None:
    data = archive(member("new", tarfile.LNKTYPE, linkname="old"), member("new", data=b"x"))
    tree, _ = load(data, whiteouts=True)
    assert tree.links == {} and tree.self_contained


def test_names_in_another_character_set() -> None:
    # tarfile says hdrcharset=BINARY for names that are no UTF-8, as libarchive does.
    raw = member("caf\udce9/" + "x" * 120, linkname="")
    assert b"hdrcharset=BINARY" in raw
    tree, _ = load(archive(raw))
    assert list(tree.root.children or ()) == [b"caf\xe9"]


def test_read_ahead_passes_everything_on_and_ends_its_thread() -> None:
    body = os.urandom(5 << 20)
    before = threading.active_count()
    ahead = ReadAhead(io.BytesIO(body), depth=2)
    assert b"".join(iter(lambda: ahead.read(300_001), b"")) == body
    assert ahead.read(1) == b""
    ahead.close()

    class Breaks(io.BytesIO):
        def read(self, n: int | None = -1, /) -> bytes:
            if self.tell() > 2 << 20:
                raise BadInput("broken")
            return super().read(n)

    ahead = ReadAhead(Breaks(body), depth=2)
    got = 0
    with pytest.raises(BadInput, match="broken"):
        while data := ahead.read(1 << 20):
            got += len(data)
    assert got >= 2 << 20
    ahead.close()
    ahead = ReadAhead(io.BytesIO(body), depth=1)  # nobody reads: it must not hang
    ahead.close()
    assert threading.active_count() == before


def test_short_data_names_the_entry() -> None:
    with pytest.raises(BadInput, match="truncated inside the data of 'file'"):
        load(member("file", data=bytes(100_000))[:50_000])


def test_sockets_do_not_get_into_archives(tmp_path: Path) -> None:
    """GNU tar leaves sockets out, so there is no type for them to refuse."""
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "s"))
        done = subprocess.run(["tar", "-C", tmp_path, "-c", "s"], capture_output=True, check=False)
    assert load(done.stdout)[0].root.children == {}


def test_links_cannot_make_every_path_costly() -> None:
    """40 links of 2,000 components each are within every other limit."""
    chain = [
        member(f"l{i}", tarfile.SYMTYPE, linkname="./" * 2000 + f"l{i + 1}") for i in range(10)
    ]
    with pytest.raises(UnsafeArchive, match=r"'l0/file'.*more than 8192 components"):
        load(archive(*chain, member("l10/", tarfile.DIRTYPE), member("l0/file")))


def test_global_records_cost_entries_nothing() -> None:
    """What is of no meaning to any entry is not kept, however much there is of it."""
    records = b"".join(b"14 k%07d=1\n" % i for i in range(60_000))
    header = tarfile.TarInfo("global")
    header.type, header.size = tarfile.XGLTYPE, len(records)
    tree, _ = load(
        archive(
            header.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512),
            *(member(f"f{i}") for i in range(2000)),
        )
    )
    assert len(tree.root.children or ()) == 2000
    reader = TarReader(io.BytesIO(b""), Limits(), "archive")
    world: dict[bytes, bytes] = {}
    reader._set_world(world, [(b"comment", b"x"), (b"uid", b"7"), (b"SCHILY.xattr.user.a", b"1")])
    assert world == {b"uid": b"7", b"SCHILY.xattr.user.a": b"1"}
