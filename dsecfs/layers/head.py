"""The head: one file of the store that is enough to mount a layer.

Byte layout (little endian; docs/formats.md):

    0   8   magic "DSECHEAD"
    8   u32 version (1)
    12  u32 number of sections
    16  section table, 32 bytes each:
          u32 type   1 manifest, 2 EROFS metadata, 3 chunk digests (one per blob, in order)
          u32 codec  0 raw, 2 zstd
          u64 offset from the start of the file
          u64 stored length
          u64 raw length
    …   sections

Sections do not overlap; only the metadata may be compressed. What must hold: `decode_head`
accepts only what has the digest it was asked for, with metadata whose devices are the blobs of
the manifest (a device's tag is what readers open: it must not name another layer's blob);
every allocation is bounded by lengths it checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import zstandard

from dsecfs.errors import BadInput, Corrupt, FormatError, TooNew
from dsecfs.layers.digest import DIGEST_LEN, Digest, blob_digest, layer_digest
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.manifest import MAX_MANIFEST, LayerManifest, parse_manifest

MAGIC = b"DSECHEAD"
VERSION = 1
_FIXED = struct.Struct("<8sII")
_SECTION = struct.Struct("<IIQQQ")
_MANIFEST, _EROFS, _CHUNKS = 1, 2, 3
_RAW, _ZSTD = 0, 2
MAX_EROFS = 4 << 30
"""Most bytes of EROFS metadata we accept (some 40 million inodes)."""
MAX_BLOBS = 512
"""Most blobs of one layer (an OCI image has at most 127 layers)."""


@dataclass(frozen=True, slots=True)
class LayerHead:
    """A decoded, verified head."""

    digest: Digest
    manifest: LayerManifest
    erofs: bytes
    """The EROFS metadata image; its devices are `manifest.blobs` in order."""
    chunk_digests: tuple[bytes, ...]
    """Per blob: 32-byte digests back to back."""


def make_head(manifest: LayerManifest, erofs: bytes, chunk_digests: list[bytes]) -> LayerHead:
    """Put a head together and compute its digest. BadInput for a manifest that is too long."""
    canonical = manifest.to_json()
    if len(canonical) > MAX_MANIFEST:
        raise BadInput(
            f"the layer's manifest has {len(canonical)} bytes, at most {MAX_MANIFEST} are allowed",
            hint="use fewer or shorter labels and variables",
        )
    digest = layer_digest(canonical, erofs, chunk_digests)
    return LayerHead(digest, manifest, erofs, tuple(chunk_digests))


def encode_head(head: LayerHead) -> bytes:
    """The bytes to store. Not part of any identity: compression may change."""
    squeeze = zstandard.ZstdCompressor(level=3, write_checksum=False).compress
    parts: list[tuple[int, int, bytes, int]] = []
    manifest = head.manifest.to_json()
    parts.append((_MANIFEST, _RAW, manifest, len(manifest)))
    parts.append((_EROFS, _ZSTD, squeeze(head.erofs), len(head.erofs)))
    parts.extend((_CHUNKS, _RAW, c, len(c)) for c in head.chunk_digests)
    offset = _FIXED.size + len(parts) * _SECTION.size
    table = bytearray(_FIXED.pack(MAGIC, VERSION, len(parts)))
    for kind, codec, stored, raw_len in parts:
        table += _SECTION.pack(kind, codec, offset, len(stored), raw_len)
        offset += len(stored)
    return bytes(table) + b"".join(p[2] for p in parts)


def decode_head(data: bytes, digest: Digest) -> LayerHead:
    """Parse a stored head and verify that it is layer `digest`.

    Raises FormatError (truncated or damaged), TooNew or Corrupt; the message names the
    layer. Allocates no more than the checked section lengths.
    """
    what = f"head of layer {digest[:12]}"
    manifest_raw = erofs = None
    chunks: list[bytes] = []
    left = len(data)
    for i, (kind, codec, offset, stored, raw) in enumerate(_sections(data, what)):
        if offset + stored > len(data):
            raise FormatError(
                f"{what}: truncated: section {i} ends at {offset + stored}, file has {len(data)}"
            )
        left -= stored
        if left < 0:
            raise FormatError(f"{what}: its sections overlap")
        if codec != _RAW and (kind, codec) != (_EROFS, _ZSTD):
            raise FormatError(f"{what}: section {i} of type {kind} has codec {codec}")
        first = {_MANIFEST: manifest_raw, _EROFS: erofs, _CHUNKS: None}.get(kind, b"")
        if first is not None or raw > (MAX_MANIFEST if kind == _MANIFEST else MAX_EROFS):
            raise FormatError(f"{what}: section {i} of type {kind} is not expected")
        body = data[offset : offset + stored]
        if codec == _ZSTD:
            try:
                # max_output_size is ignored when the frame itself states a size.
                if zstandard.frame_content_size(body) not in (raw, -1):
                    raise FormatError(f"{what}: section {i} does not hold {raw} bytes")
                body = zstandard.ZstdDecompressor().decompress(body, max_output_size=raw)
            except zstandard.ZstdError as e:
                raise FormatError(f"{what}: section {i} does not decompress: {e}") from None
        if len(body) != raw:
            raise FormatError(f"{what}: section {i} has {len(body)} bytes, expected {raw}")
        if kind == _MANIFEST:
            manifest_raw = body
        elif kind == _EROFS:
            erofs = body
        else:
            chunks.append(body)
    if manifest_raw is None or erofs is None:
        raise FormatError(f"{what}: has no manifest or no metadata")
    if layer_digest(manifest_raw, erofs, chunks) != digest:
        raise Corrupt(f"{what}: its content has another digest", hint="publish the layer again")
    manifest = parse_manifest(manifest_raw, f"manifest of layer {digest[:12]}")
    if len(chunks) != len(manifest.blobs):
        raise FormatError(f"{what}: {len(chunks)} chunk lists for {len(manifest.blobs)} blobs")
    for blob, digests in zip(manifest.blobs, chunks, strict=True):
        if len(digests) != blob.chunks * DIGEST_LEN:
            raise FormatError(f"{what}: blob {blob.digest[:12]} has a wrong chunk list")
        if blob_digest(blob.size, blob.chunk_size, digests) != blob.digest:
            raise Corrupt(f"{what}: blob {blob.digest[:12]} does not match its chunk list")
    if manifest.kind != "disk":
        with ErofsImage(erofs, f"metadata of layer {digest[:12]}") as image:
            devices = [(device.tag, device.size) for device in image.devices]
        if devices != [(blob.digest.encode(), blob.size) for blob in manifest.blobs]:
            raise FormatError(f"{what}: the devices of its metadata are not its blobs")
    return LayerHead(digest, manifest, erofs, tuple(chunks))


def _sections(start: bytes, what: str) -> Iterator[tuple[int, int, int, int, int]]:
    """(type, codec, offset, stored length, raw length) of each section, not yet checked."""
    if len(start) < _FIXED.size:
        raise FormatError(f"{what}: truncated: {len(start)} bytes")
    magic, version, count = _FIXED.unpack_from(start)
    if magic != MAGIC:
        raise FormatError(f"{what}: not a layer head (bad magic)")
    if version > VERSION:
        raise TooNew(
            f"{what}: version {version} is newer than this program knows ({VERSION})",
            hint="upgrade dsec",
        )
    if count > 2 + MAX_BLOBS or len(start) < _FIXED.size + count * _SECTION.size:
        raise FormatError(f"{what}: truncated: no room for {count} sections")
    table = memoryview(start)[_FIXED.size : _FIXED.size + count * _SECTION.size]
    yield from _SECTION.iter_unpack(table)


HEAD_START = 64 * 1024
"""Bytes from the start of a head in which the section table and most manifests lie."""


def manifest_span(start: bytes, digest: Digest) -> tuple[int, int]:
    """(offset, length) of the manifest in a head, from its first HEAD_START bytes.

    For readers that need no metadata (collection, listings). Raises FormatError or TooNew.
    """
    what = f"head of layer {digest[:12]}"
    for kind, codec, offset, stored, raw in _sections(start, what):
        if kind == _MANIFEST and codec == _RAW and stored == raw and 0 < raw <= MAX_MANIFEST:
            return offset, stored
    raise FormatError(f"{what}: has no manifest")
