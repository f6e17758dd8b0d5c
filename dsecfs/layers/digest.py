"""Content identity: what a digest is and how it is computed.

What must hold: identity is sha256 (FIPS 180-4) over *uncompressed* content with a domain
prefix and fixed-width lengths, so no two different inputs share a byte string. Compressors,
chunk placement and optimisation never enter. xxhash is never an identity: snapshots come
from untrusted agents.
"""

from __future__ import annotations

import hashlib
import re
import struct
from typing import NewType

from dsecfs.errors import BadInput

Digest = NewType("Digest", str)
"""64 lower-case hex digits of a sha256. Written `sha256:<hex>` where people read it."""

_HEX = re.compile(r"[0-9a-f]{64}\Z")

DIGEST_LEN = 32

DEFAULT_CHUNK_SIZE = 256 * 1024
"""Bytes in a chunk (DSec report §5.3). Part of a blob's identity, not a tuning knob."""

MIN_CHUNK_SIZE = 4096
MAX_CHUNK_SIZE = 16 * 1024 * 1024

MAX_BLOB_SIZE = 1 << 44
"""16 TiB: 32-bit block numbers of 4 KiB blocks, the limit of an EROFS chunk index."""


def parse_digest(text: str) -> Digest:
    """Check `text` (with or without `sha256:`) and return the bare hex form.

    Raises BadInput unless it is a whole sha256: nothing from outside becomes a path
    or a store key before it went through here.
    """
    bare = text.removeprefix("sha256:")
    if not _HEX.match(bare):
        raise BadInput(
            f"not a digest: {text[:80]!r}", hint="expected sha256: and 64 hex digits"
        )
    return Digest(bare)


def sha256(data: bytes | memoryview) -> Digest:
    """The digest of plain bytes (chunks, objects, environment manifests)."""
    return Digest(hashlib.sha256(data).hexdigest())


def chunk_count(size: int, chunk_size: int) -> int:
    """How many chunks a blob of `size` bytes has; the last one may be short."""
    return -(-size // chunk_size)


def check_chunk_size(chunk_size: int) -> None:
    """Raise BadInput unless `chunk_size` is a power of two from 4 KiB to 16 MiB."""
    if chunk_size & (chunk_size - 1) or not MIN_CHUNK_SIZE <= chunk_size <= MAX_CHUNK_SIZE:
        raise BadInput(
            f"chunk size {chunk_size} is not allowed",
            hint="expected a power of two from 4096 to 16777216 bytes",
        )


def blob_digest(size: int, chunk_size: int, chunk_digests: bytes) -> Digest:
    """The identity of a blob: its size, its chunk size and every chunk's digest in order.

    `chunk_digests` is the 32-byte digests back to back. The last chunk's digest is over
    its real length (not padded).
    """
    h = hashlib.sha256(b"dsec-blob-v1\0")
    h.update(struct.pack("<QQ", size, chunk_size))
    h.update(chunk_digests)
    return Digest(h.hexdigest())


def layer_digest(manifest: bytes, erofs: bytes | memoryview, blobs: list[bytes]) -> Digest:
    """The identity of a layer: canonical manifest, EROFS metadata, all chunk digests.

    `blobs` is each blob's chunk digests back to back, in the order of the manifest.
    """
    h = hashlib.sha256(b"dsec-layer-v1\0")
    for part in (manifest, erofs, *blobs):
        h.update(struct.pack("<Q", len(part)))
        h.update(part)
    return Digest(h.hexdigest())
