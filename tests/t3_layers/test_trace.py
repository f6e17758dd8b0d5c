"""Traces: from reads of blobs to file ranges, through the store, to chunks again."""

from __future__ import annotations

import os
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dsecfs.errors import DsecfsError, FormatError
from dsecfs.layers import trace as traces
from dsecfs.layers.digest import Digest, sha256
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.manifest import BlobRef
from dsecfs.layers.trace import (
    MAX_RUNS,
    Access,
    PathIndex,
    Touch,
    Trace,
    TracedLayer,
    _Ranges,
    decode_trace,
    encode_trace,
    keep_trace,
    list_traces,
    load_traces,
    make_trace,
    merge_traces,
    read_trace,
    save_trace,
    trace_chunks,
)
from dsecfs.layers.tree import Extent, Inode, directory, whiteout
from dsecfs.store.base import trace_prefix
from dsecfs.store.directory import DirectoryStore

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


def test_what_the_kernel_reads_ahead_is_foreseen_up_to_the_end_of_the_file() -> None:
    size = 3 * CHUNK
    base = layer("base", {b"a": file(0, size), b"b": file(size, 2 * CHUNK)})
    blob = base.blobs[0].digest

    def chunks(*accesses: Access, ahead: int) -> list[int]:
        return [c for b, c in trace_chunks(accesses, [base], ahead=ahead) if b == blob]

    assert chunks(Access(b"a", 0, 1), ahead=CHUNK - 1) == [0]
    assert chunks(Access(b"a", 0, 1), ahead=CHUNK) == [0, 1]
    assert chunks(Access(b"a", 2 * CHUNK, 1), ahead=1 << 40) == [2]
    assert chunks(Access(b"b", 0, 1), Access(b"a", 2 * CHUNK, 1), ahead=CHUNK) == [3, 4, 2]


def test_files_with_holes_need_the_chunks_behind_them_only() -> None:
    far = 1 << 30
    extents = (
        Extent(0, 0, 0, 4096),
        Extent(CHUNK, 0, 4 * CHUNK, CHUNK),
        Extent(far, 0, 8 * CHUNK, 10),
    )
    inode = Inode(stat.S_IFREG | 0o644, size=far + 10, extents=extents)
    base = layer("base", {b"holes": inode})
    found = [
        [c for _, c in trace_chunks([Access(b"holes", offset, length)], [base])]
        for offset, length in ((0, 1 << 40), (4096, 1000), (CHUNK, 1), (far - 1, 2), (5000, CHUNK))
    ]
    assert found == [[0, 4, 8], [], [4], [8], [4]]


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


# -- where traces are --------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store", create=True)


def run(name: bytes, count: int = 1) -> Trace:
    return Trace(ENV, tuple(Access(name, 8192 * i, 4096) for i in range(count)))


def test_the_newest_runs_count(store: DirectoryStore, tmp_path: Path) -> None:
    for number in range(MAX_RUNS + 3):
        key = save_trace(store, run(b"f%d" % number))
        os.utime(tmp_path / "store" / key, (number, number))
    names = [t.accesses[0].path for t in load_traces(store, ENV)]
    assert names == [b"f%d" % n for n in range(MAX_RUNS + 2, 2, -1)]
    assert load_traces(store, sha256(b"no runs")) == []


def test_bad_traces_are_logged_and_left_out(
    store: DirectoryStore, expect_log: Callable[[str], None]
) -> None:
    good = run(b"good")
    save_trace(store, good)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    deep = zstandard.ZstdCompressor().compress(b"[" * 100_000)
    for data in (b"", b"junk", encode_trace(Trace(sha256(b"other"), ())), bomb, deep):
        store.put_content(trace_prefix(ENV) + sha256(data), data)
    expect_log("claims 268435456 bytes")
    expect_log("not valid JSON")
    expect_log("belongs to another environment")
    expect_log("does not decompress|claims -1 bytes")
    assert load_traces(store, ENV) == [good]


def test_many_ranges_are_bounded_when_traces_are_loaded(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "MAX_RANGES", 100)
    for number in range(3):
        key = save_trace(store, run(b"f%d" % number, 60))
        os.utime(tmp_path / "store" / key, (number, number))
    assert [t.accesses[0].path for t in load_traces(store, ENV)] == [b"f2"]
    long = run(b"long", 500)
    stored = decode_trace(encode_trace(long), ENV)
    assert stored.accesses == long.accesses[:100], "what is used last is left out"


def test_traces_with_long_names_stay_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_TRACE", 100_000)
    name = b"\xff" * 200
    wide = Trace(ENV, tuple(Access(name + b"%d" % i, 1 << 61, 1 << 61) for i in range(900)))
    stored = decode_trace(encode_trace(wide), ENV)
    assert 50 < len(stored.accesses) < 900
    assert stored.accesses == wide.accesses[: len(stored.accesses)]


def test_traces_kept_on_the_node_count_there(store: DirectoryStore, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    paths = [keep_trace(kept, run(b"f%d" % n)) for n in range(MAX_RUNS + 2)]
    for number, path in enumerate(paths):
        if path.exists():
            os.utime(path, (number, number))
    (kept / ENV / "no trace").write_text("ignored")
    assert len(os.listdir(kept / ENV)) == MAX_RUNS + 1
    found = load_traces(store, ENV, kept)
    assert len(found) == MAX_RUNS
    assert load_traces(store, ENV) == []
    # Once it is stored it counts once.
    save_trace(store, found[0])
    listed = list_traces(store, ENV, kept)
    assert len(listed) == MAX_RUNS
    assert sum(t.file is None for t in listed) == 1
    assert {read_trace(store, ENV, t).accesses for t in listed} == {t.accesses for t in found}


def test_a_small_trace_cannot_take_much_memory() -> None:
    body = b'{"format":1,"env":"%b","files":[["a",[%b]]]}' % (
        ENV.encode(),
        b",".join([b"[1,1]"] * 1_300_000),
    )
    stored = zstandard.compress(body)
    assert len(stored) < 4096
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="more than 200000 ranges"):
            decode_trace(stored, ENV)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()


def test_a_trace_over_a_shattered_file_is_bounded(
    monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> None:
    """Each range is looked up for what it covers; all ranges together for so much and no more."""
    blocks = 2000
    shattered = Inode(
        stat.S_IFREG,
        size=blocks * 8192,
        extents=tuple(Extent(i * 8192, 0, i * 4096, 4096) for i in range(blocks)),
    )
    top = layer("a", {b"f": shattered}, blocks * 4096)
    some = [Access(b"f", i * 8192, 4096) for i in range(0, blocks, 100)]
    assert [c for _, c in trace_chunks(some, [top])] == sorted(
        {i * 4096 // CHUNK for i in range(0, blocks, 100)}
    )
    every = [Access(b"f", 0, blocks * 8192)] * 50
    monkeypatch.setattr(traces, "_MOST_PIECES", 10 * blocks)
    expect_log("asks for more than")
    assert len(trace_chunks(every, [top])) == blocks * 4096 // CHUNK
