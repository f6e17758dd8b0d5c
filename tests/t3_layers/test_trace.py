"""Traces: from reads of blobs to file ranges, through the store, to chunks again."""

from __future__ import annotations

import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecfs.errors import DsecfsError, FormatError
from dsecfs.layers.digest import Digest, sha256
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.manifest import BlobRef
from dsecfs.layers.trace import (
    Access,
    PathIndex,
    Touch,
    Trace,
    TracedLayer,
    _Ranges,
    decode_trace,
    encode_trace,
    make_trace,
    merge_traces,
    trace_chunks,
)
from dsecfs.layers.tree import Extent, Inode, directory, whiteout

ENV = sha256(b"an environment")
CHUNK = 65536


def layer(name: str, files: dict[bytes, Inode], size: int = 1 << 20) -> TracedLayer:
    blob = BlobRef(sha256(name.encode()), size, CHUNK)
    root = directory()
    for path, inode in files.items():
        at = root
        *parents, last = path.split(b"/")
        for part in parents:
            assert at.children is not None
            at = at.children.setdefault(part, directory())
        assert at.children is not None
        at.children[last] = inode
    image = ErofsImage(write_erofs(root, [Device(blob.digest.encode(), size)]))
    return TracedLayer([blob], image)


def file(physical: int, size: int) -> Inode:
    return Inode(stat.S_IFREG | 0o644, size=size, extents=(Extent(0, 0, physical, size),))


def test_reads_of_a_blob_become_ranges_of_files_in_order_of_first_use() -> None:
    one = layer("one", {b"bin/a": file(0, 100), b"bin/b": file(4096, 70_000)})
    blob = one.blobs[0].digest
    touches = [
        Touch(blob, 4096, 4096),
        Touch(blob, 8192, 8192),  # continues: joined
        Touch(blob, 0, 8192),  # covers a, its padding, and what was seen of b
        Touch(blob, 4096, 4096),  # seen
        Touch(blob, 500_000, 4096),  # nobody's
        Touch(sha256(b"elsewhere"), 0, 4096),
    ]
    trace = make_trace(ENV, touches, PathIndex([one]))
    assert trace.accesses == (Access(b"bin/b", 0, 12288), Access(b"bin/a", 0, 100))
    assert trace.total == 12388


def test_chunks_of_a_trace_follow_the_file_to_the_layer_that_provides_it_now() -> None:
    base = layer(
        "base", {b"x": file(0, 4096), b"y": file(CHUNK, 3 * CHUNK), b"z": file(1 << 19, 10)}
    )
    top = layer("top", {b"x": file(8192, 4096), b"z": whiteout()})
    accesses = [Access(b"y", CHUNK - 1, 2), Access(b"x", 0, 4096), Access(b"gone", 0, 1),
                Access(b"z", 0, 10), Access(b"y", CHUNK, 10), Access(b"../y", 0, 1)]  # fmt: skip
    b, t = base.blobs[0].digest, top.blobs[0].digest
    assert trace_chunks(accesses, [top, base]) == [(b, 1), (b, 2), (t, 0)]
    assert trace_chunks(accesses, [base]) == [(b, 1), (b, 2), (b, 0), (b, 8)]


def test_merged_runs_hold_each_byte_once_in_relative_order() -> None:
    first = Trace(ENV, (Access(b"a", 0, 10), Access(b"c", 0, 10)))
    second = Trace(ENV, (Access(b"a", 5, 10), Access(b"b", 0, 10), Access(b"c", 0, 10)))
    merged = merge_traces([first, second])
    assert merged.accesses == (
        Access(b"a", 0, 10), Access(b"a", 10, 5), Access(b"b", 0, 10), Access(b"c", 0, 10),
    )  # fmt: skip


accesses = st.builds(
    Access,
    st.binary(min_size=1, max_size=20).filter(lambda p: b"\0" not in p),
    st.integers(0, 1 << 62),
    st.integers(1, 1 << 40),
)


@given(st.lists(accesses, max_size=20))
def test_a_stored_trace_reads_back_equal(items: list[Access]) -> None:
    trace = Trace(ENV, tuple(items))
    assert decode_trace(encode_trace(trace), ENV) == trace


@given(st.binary(max_size=200), st.integers(0, 100), st.integers(0, 255))
def test_a_damaged_trace_is_an_error_of_ours(junk: bytes, at: int, byte: int) -> None:
    data = bytearray(encode_trace(Trace(ENV, (Access(b"a/b", 0, 4096),))))
    data[at % len(data)] ^= byte
    for hostile in (junk, bytes(data), bytes(data[:at])):
        try:
            decode_trace(hostile, ENV)
        except DsecfsError:
            pass


def test_a_trace_of_another_environment_is_refused() -> None:
    with pytest.raises(FormatError, match="another environment"):
        decode_trace(encode_trace(Trace(ENV, ())), Digest("0" * 64))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=30))
def test_ranges_report_each_new_byte_once(adds: list[tuple[int, int]]) -> None:
    ranges, seen = _Ranges(), set[int]()
    for offset, length in adds:
        want = set(range(offset, offset + length))
        fresh: list[int] = []
        for low, count in ranges.add(b"f", offset, length):
            fresh.extend(range(low, low + count))
        assert len(fresh) == len(set(fresh))
        assert set(fresh) == want - seen
        seen |= want


def test_names_that_are_not_utf8_survive() -> None:
    trace = Trace(ENV, (Access(os.fsencode("ä") + b"\xff", 0, 1),))
    assert decode_trace(encode_trace(trace), ENV) == trace
