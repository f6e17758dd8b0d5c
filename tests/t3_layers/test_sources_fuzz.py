"""Damaged and made-up archives: a valid tree or an error of ours, in bounded memory."""

from __future__ import annotations

import functools
import io
import subprocess
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dsecfs.errors import DsecfsError
from dsecfs.layers.merge import LayerTree, merge
from dsecfs.layers.sources.acl import acl_from_text
from dsecfs.layers.sources.base import Limits, SourceTree
from dsecfs.layers.sources.decompress import decompressed
from dsecfs.layers.sources.tar import read_tar
from dsecfs.layers.tree import BLOCK, walk
from tests.t3_layers.memsink import MemorySink
from tests.t3_layers.test_sources_tar import archive, member

FUZZ = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])

LIMITS = Limits(entries=2000, bytes=1 << 22, metadata=1 << 20, depth=64, path=4096)


@functools.cache
def samples() -> list[bytes]:
    """Archives of all dialects by GNU tar, small, with everything that has a parser."""
    made = []
    with tempfile.TemporaryDirectory() as d:
        top = Path(d)
        (top / "dir").mkdir()
        (top / "dir/file").write_bytes(b"x" * 700)
        (top / "link").symlink_to("dir")
        (top / "hard").hardlink_to(top / "dir/file")
        (top / ("n" * 120)).write_bytes(b"long")
        with open(top / "sparse", "wb") as f:
            for i in range(30):
                f.seek(i * 8192)
                f.write(b"data")
        for options in (
            "--format=pax --sparse --sparse-version=1.0",
            "--format=pax --sparse --sparse-version=0.1",
            "--format=pax --sparse --sparse-version=0.0",
            "--format=gnu --sparse",
            "--format=ustar --exclude=n*",
        ):
            command = ["tar", *options.split(), "--sort=name", "-C", d, "-c", "."]
            made.append(subprocess.run(command, capture_output=True, check=True).stdout)
    made.append(
        archive(
            member("a/.wh.b"),
            member("a/.wh..wh..opq"),
            member("l", b"1", linkname="lower/file"),
            member("p", pax_headers={"SCHILY.xattr.user.a": "v", "mtime": "-1.5", "uid": "77"}),
            member("c", b"3", devmajor=1, devminor=3),
        )
    )
    return made


def check(data: bytes, whiteouts: bool) -> None:
    """Read it; if that works, the tree must be sound."""
    sink = MemorySink()
    try:
        tree = read_tar(io.BytesIO(data), sink, "fuzzed", whiteouts=whiteouts, limits=LIMITS)
    except DsecfsError as e:
        assert str(e).startswith("fuzzed") and "\n" not in str(e)
        return
    sound(tree, sink)


def sound(tree: SourceTree, sink: MemorySink) -> None:
    count = 0
    for path, inode in walk(tree.root):
        count += 1
        for name in path.split(b"/") if path else ():
            assert 0 < len(name) <= 255 and name not in (b".", b"..") and b"\0" not in name
        assert 0 <= inode.uid < 2**32 and 0 <= inode.gid < 2**32
        assert -(2**63) <= inode.mtime_ns // 10**9 < 2**63
        assert inode.is_dir == (inode.children is not None)
        end = 0
        for logical, _, physical, length in inode.extents:
            assert inode.is_reg and logical % BLOCK == 0 == physical % BLOCK
            assert logical >= end and length > 0
            end = logical + length
            assert end <= inode.size and physical + length <= len(sink.data)
    assert count <= LIMITS.entries + 1
    try:
        merge([LayerTree.of(tree, ["b"]), LayerTree.of(tree, ["b"])])
    except DsecfsError:
        assert tree.links or tree.implied


def fix_checksums(data: bytearray) -> bytes:
    """Make every block that may be a header one with a right checksum."""
    for at in range(0, len(data) - 511, 512):
        block = data[at : at + 512]
        if block[257:262] == b"ustar":
            total = sum(block) - sum(block[148:156]) + 256
            data[at + 148 : at + 156] = b"%06o\0 " % total
    return bytes(data)


PIECES = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.sampled_from(
        [
            b"\x80" + b"\xff" * 11,
            b"\xff" * 12,
            b"77777777777\0",
            b"99999",
            b"-1",
            b"\0" * 12,
            b"../../..",
            b"/" * 9,
        ]
    ),
)


@FUZZ
@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 511), st.integers(0, 60), PIECES), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_mutated_headers(
    which: int, changes: list[tuple[int, int, bytes]], fix: bool, whiteouts: bool
) -> None:
    data = bytearray(samples()[which])
    for offset, block, piece in changes:
        at = min(block * 512 + offset, len(data) - len(piece))
        data[at : at + len(piece)] = piece
    check(fix_checksums(data) if fix else bytes(data), whiteouts)


@FUZZ
@given(st.integers(0, 5), st.integers(0, 60), st.integers(0, 40), st.booleans())
def test_blocks_that_moved(which: int, start: int, length: int, whiteouts: bool) -> None:
    data = samples()[which]
    cut, end = start * 512, (start + length) * 512
    check(data[:cut] + data[end:], whiteouts)
    check(data[: end or 1] + data[cut:], whiteouts)
    check(data[: end + 100], whiteouts)


KEYS = st.one_of(
    st.sampled_from(
        [
            "path", "linkpath", "size", "uid", "gid", "mtime", "GNU.sparse.map", "GNU.sparse.size",
            "GNU.sparse.major", "GNU.sparse.minor", "GNU.sparse.name", "GNU.sparse.realsize",
            "GNU.sparse.offset", "GNU.sparse.numbytes", "SCHILY.xattr.user.x", "SCHILY.acl.access",
            "LIBARCHIVE.xattr.user.y", "LIBARCHIVE.xattr.%", "SCHILY.xattr.trusted.overlay.opaque",
        ]
    ),
    st.text(min_size=1, max_size=8).filter(lambda k: "=" not in k),
)  # fmt: skip
VALUES = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.decimals(allow_nan=True, allow_infinity=True).map(str),
    st.lists(st.integers(0, 3000), max_size=6).map(lambda xs: ",".join(map(str, xs))),
    st.sampled_from(
        ["", "1", "0", ".wh.x", "a/.wh..wh..opq", "../x", "user::rwx,group::r--,other::---"]
    ),
    st.text(max_size=20),
)


@FUZZ
@given(
    st.lists(st.dictionaries(KEYS, VALUES, max_size=5), min_size=1, max_size=4),
    st.sampled_from([b"0", b"1", b"2", b"5", b"S", b"D"]),
    st.integers(0, 1500),
    st.booleans(),
)
@example([{"mtime": "-0.0000000001"}], b"0", 0, False)
@example([{"path": "\0"}], b"0", 0, False)
def test_pax_records(
    records: list[dict[str, str]], kind: bytes, size: int, whiteouts: bool
) -> None:
    members = [
        member(f"m{i}", kind, data=b"1\n" * size, linkname=f"m{i - 1}", pax_headers=pax)
        for i, pax in enumerate(records)
    ]
    check(archive(*members), whiteouts)


PATHS = st.lists(
    st.sampled_from(["a", "b", "c", ".", "..", "", ".wh.a", ".wh..wh..opq"]), min_size=1, max_size=5
).map("/".join)


@FUZZ
@given(
    st.lists(
        st.tuples(PATHS, st.sampled_from([b"0", b"1", b"2", b"5"]), PATHS), min_size=1, max_size=12
    ),
    st.booleans(),
)
def test_links_and_paths_of_all_shapes(
    entries: list[tuple[str, bytes, str]], whiteouts: bool
) -> None:
    members = [
        member(path, kind, linkname=target, data=path.encode() if kind == b"0" else b"")
        for path, kind, target in entries
    ]
    check(archive(*members), whiteouts)


@FUZZ
@given(
    st.sampled_from(
        [
            b"\x1f\x8b\x08",
            b"BZh9",
            b"\xfd7zXZ\0",
            b"\x28\xb5\x2f\xfd",
            b"\x50\x2a\x4d\x18",
            b"\x04\x22\x4d\x18",
        ]
    ),
    st.binary(max_size=300),
)
def test_compressed_rubbish(magic: bytes, data: bytes) -> None:
    stream = decompressed(io.BytesIO(magic + data), Limits(), "fuzzed")
    try:
        while piece := stream.read(1 << 16):
            assert len(piece) <= 1 << 16
    except DsecfsError as e:
        assert str(e).startswith("fuzzed")


@FUZZ
@given(
    st.one_of(
        st.binary(max_size=60), st.text("ugmorwx:-,\n#0123456789", max_size=80).map(str.encode)
    )
)
def test_acl_text(text: bytes) -> None:
    value = acl_from_text(text)
    assert value is None or (len(value) % 8 == 4 and value[:4] == b"\2\0\0\0")
