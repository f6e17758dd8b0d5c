"""File data becomes a blob: what is stored, what is shared, what identity depends on."""

from __future__ import annotations

import io
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsecfs.errors import BadInput, FormatError, StoreUnavailable
from dsecfs.layers.blobwriter import SMALL, BlobResult, BlobWriter
from dsecfs.layers.layout import LZ4, RAW, ZERO, ZSTD
from dsecfs.layers.sources.base import Segment
from dsecfs.layers.tree import BLOCK, Extent
from dsecfs.store.directory import DirectoryStore
from tests.t3_layers.readback import read_blob

CHUNK = 64 * 1024


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    store = DirectoryStore(tmp_path / "store", create=True)
    yield store
    store.close()


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


class Dribble:
    """A stream that gives odd pieces, as sockets and decompressors do."""

    def __init__(self, data: bytes, most: int) -> None:
        self._raw = io.BytesIO(data)
        self._most = most

    def read(self, n: int, /) -> bytes:
        return self._raw.read(min(n, self._most))


def write(store: Any, files: Sequence[bytes], **options: Any) -> tuple[
    list[tuple[Extent, ...]], BlobResult
]:
    options = {"chunk_size": CHUNK, **options}
    with BlobWriter(store, **options) as writer:
        extents = [writer.add(io.BytesIO(data), len(data)) for data in files]
        result = writer.finish()
    assert result is not None
    return extents, result


def content(blob: bytes, extents: tuple[Extent, ...], size: int) -> bytes:
    out = bytearray(size)
    for logical, _, physical, length in extents:
        assert physical % BLOCK == 0 and logical % BLOCK == 0
        out[logical : logical + length] = blob[physical : physical + length]
    return bytes(out)


def read(store: DirectoryStore, result: BlobResult) -> bytes:
    return read_blob(store, result.ref, result.chunk_digests, result.layout)


@pytest.mark.parametrize("codec", ["lz4", "zstd", "raw"])
def test_every_codec_gives_the_same_blob_back(store: DirectoryStore, codec: str) -> None:
    files = [
        b"x",
        b"text " * 50_000,
        noise(3 * CHUNK + 5),
        bytes(2 * CHUNK),
        noise(SMALL + 7 * BLOCK + 1),
        b"after",
        b"long text " * 900_000,
    ]
    extents, result = write(store, files, codec=codec, object_size=1 << 20)
    blob = read(store, result)
    for data, where in zip(files, extents, strict=True):
        assert content(blob, where, len(data)) == data
    assert result.layout is not None
    codecs = {p.codec for p in result.layout.places}
    assert codecs == {ZERO, RAW} | {{"lz4": LZ4, "zstd": ZSTD, "raw": RAW}[codec]}
    assert len(result.layout.objects) > 3
    _, other = write(store, files, codec="raw", workers=1, uploads=1)
    assert other.ref == result.ref


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    files=st.lists(
        st.tuples(st.integers(1, 40_000), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
    ),
    most=st.integers(1, 70_000),
)
def test_any_sizes_and_pieces(
    store: DirectoryStore, files: list[tuple[int, int, bool]], most: int
) -> None:
    datas = [noise(size, seed) if dense else bytes(size) for size, seed, dense in files]
    with BlobWriter(store, chunk_size=4096 * 2) as writer:
        extents = [writer.add(Dribble(d, most), len(d)) for d in datas]
        result = writer.finish()
    assert result is not None
    blob = read(store, result)
    for data, where in zip(datas, extents, strict=True):
        assert content(blob, where, len(data)) == data
    distinct = dict(zip(datas, extents, strict=True))
    assert len(set(distinct.values())) == len(distinct)
    assert [distinct[d] for d in datas] == extents
    assert result.ref.size == sum(-(-len(d) // BLOCK) * BLOCK for d in distinct)


def test_equal_files_have_one_extent(store: DirectoryStore) -> None:
    small, large = noise(5000), noise(SMALL + 3 * CHUNK + 11, 1)
    extents, result = write(store, [small, large, b"between", large, small])
    assert extents[0] == extents[4] and extents[1] == extents[3]
    _, once = write(store, [small, large, b"between"])
    assert once.ref == result.ref and once.chunk_digests == result.chunk_digests


def test_large_files_that_differ_late_are_two(store: DirectoryStore) -> None:
    first = noise(SMALL + 3 * CHUNK + 11)
    files = [first, first[:-1] + b"!", first[:-CHUNK] + noise(CHUNK, 5), first + b"?", first]
    extents, result = write(store, files)
    assert len(set(extents)) == 4 and extents[4] == extents[0]
    blob = read(store, result)
    for data, where in zip(files, extents, strict=True):
        assert content(blob, where, len(data)) == data
    # They share all chunks but the last ones.
    assert result.stored < len(first) + 5 * CHUNK


def test_large_files_start_on_a_chunk_whatever_comes_before(store: DirectoryStore) -> None:
    large = noise(SMALL + 1, 3)
    (_, where), result = write(store, [b"a", large])
    assert where[0].physical == CHUNK
    assert result.stored < len(large) + 2 * CHUNK


def test_zeros_take_no_space(store: DirectoryStore) -> None:
    _, result = write(store, [bytes(SMALL + 10 * CHUNK)])
    assert result.stored == 0 and result.layout is not None and result.layout.objects == ()
    assert read(store, result) == bytes(result.ref.size)


def test_holes_stay_holes(store: DirectoryStore) -> None:
    size = 1 << 30
    segments = [Segment(0, BLOCK), Segment(10 * BLOCK, 2 * BLOCK), Segment(size - 4096, 4096)]
    data = noise(4 * BLOCK)
    with BlobWriter(store, chunk_size=CHUNK) as writer:
        sparse = writer.add_sparse(io.BytesIO(data), size, segments)
        dense = writer.add(io.BytesIO(data), len(data))
        again = writer.add_sparse(io.BytesIO(data), size, segments)
        longer = writer.add_sparse(io.BytesIO(data), size + 1, segments)
        result = writer.finish()
    assert result is not None and result.ref.size == 3 * len(data)
    assert again == sparse and longer != sparse and dense != sparse
    assert [(e.logical, e.length) for e in sparse] == [tuple(s) for s in segments]
    blob = read(store, result)
    assert b"".join(blob[e.physical : e.physical + e.length] for e in sparse) == data


def test_large_sparse_files_are_shared_too(store: DirectoryStore) -> None:
    data = noise(SMALL + 5 * BLOCK)
    segments = [Segment(0, SMALL), Segment(2 * SMALL, 5 * BLOCK)]
    with BlobWriter(store, chunk_size=CHUNK) as writer:
        first = writer.add_sparse(io.BytesIO(data), 4 * SMALL, segments)
        second = writer.add_sparse(io.BytesIO(data), 4 * SMALL, segments)
        moved = writer.add_sparse(
            io.BytesIO(data), 4 * SMALL, [segments[0], Segment(3 * SMALL, 5 * BLOCK)]
        )
        result = writer.finish()
    assert result is not None
    assert first == second and moved != first
    # Other holes, same data: other addresses, but no chunk is stored twice.
    assert result.stored < len(data) + 2 * CHUNK


def test_nothing_gives_no_blob(store: DirectoryStore) -> None:
    with BlobWriter(store) as writer:
        assert writer.finish() is None
    assert list(store.list("")) == []


def test_objects_are_bounded(store: DirectoryStore) -> None:
    write(store, [noise(5 << 20)], object_size=1 << 20)
    sizes = [info.size for info in store.list("objects/")]
    assert len(sizes) >= 5 and max(sizes) <= 1 << 20


def test_a_stream_that_ends_early_is_an_error(store: DirectoryStore) -> None:
    for size in (100, SMALL + 100):
        with BlobWriter(store) as writer, pytest.raises(FormatError, match="ended"):
            writer.add(io.BytesIO(bytes(size - 1)), size)


def test_more_than_a_blob_can_hold_is_refused_before_reading(store: DirectoryStore) -> None:
    with BlobWriter(store) as writer, pytest.raises(BadInput, match="split it"):
        writer.add(io.BytesIO(b""), 1 << 44)


def test_bad_chunk_sizes_are_refused(store: DirectoryStore) -> None:
    for bad in (0, 4095, 12288, 1 << 25):
        with pytest.raises(BadInput):
            BlobWriter(store, chunk_size=bad)


class Failing(DirectoryStore):
    """Fails from the second object on."""

    puts = 0

    def put_content(self, key: str, data: Any) -> None:
        self.puts += 1
        if self.puts > 1:
            raise StoreUnavailable("the store went away")
        super().put_content(key, data)


def test_a_failing_store_ends_the_write_and_all_threads(tmp_path: Path) -> None:
    store = Failing(tmp_path, create=True)
    with pytest.raises(StoreUnavailable, match="went away"):
        write(store, [noise(9 << 20)], object_size=1 << 20)
    store.close()
    assert not [t for t in threading.enumerate() if t.name.startswith(("pack", "upload"))]


_STREAM = """
import resource, sys
from dsecfs.layers.blobwriter import BlobWriter
from dsecfs.store.directory import DirectoryStore

class Stream:
    # Zeros, text and noise by turns; every piece is new.
    def __init__(self): self.at = 0
    def read(self, n):
        self.at += 1
        seed = self.at.to_bytes(8, "big")
        kind = self.at % 3
        return bytes(n) if not kind else (seed * (n // 8 + 1))[:n] if kind == 1 else noise(n)

pool = __import__("os").urandom(2 << 20)
def noise(n):
    start = (stream.at * 7919) % (1 << 20)
    return pool[start : start + n]

stream = Stream()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with BlobWriter(DirectoryStore(sys.argv[1], create=True)) as writer:
    writer.add(stream, int(sys.argv[2]))
    result = writer.finish()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, result.ref.size)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    size = 1 << 30
    done = subprocess.run(
        [sys.executable, "-c", _STREAM, str(tmp_path), str(size)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    grown, written = map(int, done.stdout.split())
    assert written == size
    # ru_maxrss is in KiB: three objects of 32 MiB, the queue, and what allocators keep.
    assert grown < 200 * 1024, resource.getpagesize()
