"""Heads, layouts, manifests and names: what is read back, and what hostile bytes can do."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecfs.errors import BadInput, FormatError
from dsecfs.layers.digest import Digest, blob_digest, sha256
from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.head import (
    HEAD_START,
    LayerHead,
    decode_head,
    encode_head,
    make_head,
    manifest_span,
)
from dsecfs.layers.layout import LZ4, ZERO, Layout, Place, decode_layout, encode_layout
from dsecfs.layers.leases import parse_lease
from dsecfs.layers.manifest import (
    MAX_MANIFEST,
    BlobRef,
    LayerManifest,
    ProcessEnv,
    canonical_json,
    load_json,
    parse_manifest,
)
from dsecfs.layers.names import parse_name
from dsecfs.layers.tree import Extent, Inode, directory

CHUNK = 4096


def blob(*chunks: bytes) -> tuple[BlobRef, bytes]:
    digests = b"".join(bytes.fromhex(sha256(chunk)) for chunk in chunks)
    size = sum(map(len, chunks))
    return BlobRef(blob_digest(size, CHUNK, digests), size, CHUNK), digests


def manifest(*blobs: BlobRef, labels: dict[str, str] | None = None) -> LayerManifest:
    env = ProcessEnv({"A": "1"}, {"PATH": ("/opt/bin",)})
    return LayerManifest("base", "linux/amd64", blobs, env, labels or {}, 2, 10)


def image(*devices: tuple[Digest, int]) -> bytes:
    root = directory()
    assert root.children is not None
    if devices:
        root.children[b"file"] = Inode(0o100644, size=10, extents=(Extent(0, 0, 0, 10),))
    return write_erofs(root, [Device(digest.encode(), size) for digest, size in devices])


def head() -> LayerHead:
    ref, digests = blob(b"a" * CHUNK, b"b" * CHUNK)
    return make_head(manifest(ref), image((ref.digest, ref.size)), [digests])


def test_a_head_is_read_back() -> None:
    made = head()
    stored = encode_head(made)
    assert decode_head(stored, made.digest) == made
    offset, length = manifest_span(stored[:HEAD_START], made.digest)
    assert parse_manifest(stored[offset : offset + length]) == made.manifest


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_head_is_an_error(data: st.DataObject) -> None:
    made = head()
    stored = bytearray(encode_head(made))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(stored) - 1))
        stored[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(stored)))
    for damaged in (bytes(stored), bytes(stored[:cut])):
        try:
            # A frame may have several spellings: what is accepted is what was asked for.
            assert decode_head(damaged, made.digest) == made
        except FormatError:
            pass
        try:
            manifest_span(damaged[:HEAD_START], made.digest)
        except FormatError:
            pass


def sections(parts: list[tuple[int, int, int, int, int]], body: bytes) -> bytes:
    """A head with any section table; offsets count from the end of the table."""
    start = 16 + 32 * len(parts)
    table = b"".join(struct.pack("<IIQQQ", k, c, start + o, n, r) for k, c, o, n, r in parts)
    return struct.pack("<8sII", b"DSECHEAD", 1, len(parts)) + table + body


def test_sections_cannot_multiply_the_memory_of_a_head() -> None:
    body = bytes(1 << 20)
    packed = zstandard.compress(bytes(64 << 20))
    overlapping = [(3, 0, 0, len(body), len(body))] * 400
    bombs = [(3, 2, 0, len(packed), 64 << 20)]
    long_manifest = [(1, 0, 0, len(body), len(body)), (1, 0, 0, 0, 0)]
    for parts, data in ((overlapping, body), (bombs, packed), (long_manifest, body)):
        tracemalloc.start()
        try:
            with pytest.raises(FormatError, match="overlap|codec|not expected"):
                decode_head(sections(parts, data), Digest("0" * 64))
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


def test_the_devices_of_the_metadata_are_the_blobs_of_the_manifest() -> None:
    """A tag is what readers open: another layer's blob must not be named by one."""
    mine, digests = blob(b"a" * CHUNK, b"b" * CHUNK)
    other, _ = blob(b"secret".ljust(CHUNK, b"!"))
    for devices in (
        [(other.digest, mine.size)],
        [(mine.digest, 2 * mine.size)],
        [(mine.digest, mine.size), (other.digest, other.size)],
        [],
    ):
        bad = make_head(manifest(mine), image(*devices), [digests])
        with pytest.raises(FormatError, match="devices of its metadata are not its blobs"):
            decode_head(encode_head(bad), bad.digest)
    no_image = make_head(manifest(mine), b"\0" * 4096, [digests])
    with pytest.raises(FormatError, match="not an EROFS image"):
        decode_head(encode_head(no_image), no_image.digest)


def test_a_manifest_that_could_not_be_read_back_is_not_made() -> None:
    with pytest.raises(BadInput, match="at most"):
        make_head(manifest(labels={"a": "x" * MAX_MANIFEST}), image(), [])


def changed(**fields: Any) -> bytes:
    value = json.loads(manifest().to_json())
    value.update(fields)
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "image"},
        {"platform": "linux"},
        {"platform": "linux/\x1b[31m"},
        {"labels": {"a": "\ud800"}},
        {"labels": {"a": 1}},
        {"inodes": -1},
        {"inodes": True},
        {"bytes": 1 << 63},
        {"process_env": {"set": {"A=B": "1"}, "prepend": {}}},
        {"process_env": {"set": {"A": "\0"}, "prepend": {}}},
        {"process_env": {"set": {}, "prepend": {"": ["x"]}}},
        {"process_env": {"set": {}, "prepend": {"P": ["\ud800"]}}},
        {"blobs": [{"digest": "../../x", "size": 4096, "chunk_size": 4096}]},
        {"blobs": [{"digest": "0" * 64, "size": 4096, "chunk_size": 5}]},
        {"blobs": [{"digest": "0" * 64, "size": 1 << 50, "chunk_size": 1 << 24}]},
        {"blobs": [{"digest": "0" * 64, "size": 0, "chunk_size": 4096}]},
        {"unknown": 1},
    ],
)
def test_a_hostile_manifest_is_a_format_error(fields: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        parse_manifest(changed(**fields))


@pytest.mark.parametrize(
    "data",
    [b'"\xed\xa0\x80"', '{"a":1}'.encode("utf-16"), b"\xef\xbb\xbf{}", b"[" * 100_000, b"1" * 5000],
)
def test_json_is_utf8_and_bounded(data: bytes) -> None:
    with pytest.raises(FormatError):
        load_json(data, "test")


def test_a_digest_that_is_none_is_damage_where_it_was_stored() -> None:
    record = {"format": 1, "kind": "node", "holder": "h", "created": 1, "ttl_s": 60}
    with pytest.raises(FormatError, match="'layers': not a digest"):
        parse_lease(canonical_json({**record, "layers": ["../x"]}), "lease")
    with pytest.raises(FormatError, match="Unicode"):
        parse_lease(json.dumps({**record, "holder": "\ud800", "layers": []}).encode(), "lease")


def test_a_place_lies_where_a_store_can_read() -> None:
    ref, _ = blob(b"a" * CHUNK, b"b" * CHUNK)
    name = sha256(b"object")
    good = Layout(ref.digest, (name,), (Place(0, 0, 9, LZ4), Place(0, 0, 0, ZERO)), (1,))
    assert decode_layout(encode_layout(good), ref.digest, 2, CHUNK) == good
    for place in (
        Place(0, (1 << 64) - 5, 9, LZ4),
        Place(0, 1 << 62, 9, LZ4),
        Place(1, 0, 9, LZ4),
        Place(0, 0, CHUNK + 1, LZ4),
        Place(0, 0, 0, LZ4),
        Place(0, 0, 9, 4),
    ):
        bad = Layout(ref.digest, (name,), (place, place))
        with pytest.raises(FormatError, match="impossible place"):
            decode_layout(encode_layout(bad), ref.digest, 2, CHUNK)


@pytest.mark.parametrize("text", ["env/base/x:1", "toolkit/env/x@stable", "base/disk/a/b:1"])
def test_a_name_has_one_kind(text: str) -> None:
    """Written without its own kind it would be taken for a name of the other."""
    with pytest.raises(BadInput, match="two kinds"):
        parse_name(text)


@given(st.text(alphabet="az09AZ._-/:@é", max_size=40))
def test_a_name_reads_back_as_itself(text: str) -> None:
    try:
        name = parse_name(text)
    except BadInput:
        return
    assert parse_name(str(name), default_kind=name.kind) == name
    assert ".." not in (name.name + "/" + name.version + name.channel).split("/")


def test_a_path_in_a_message_is_one_printable_line() -> None:
    root = directory()
    assert root.children is not None
    root.children[b"a\nb\x1b[31m" + b"x" * 300] = Inode(0o100644, uid=-1)
    with pytest.raises(BadInput) as caught:
        write_erofs(root, [])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
