"""What a store's roots lead to: the mark of collection, and the check of a store.

Owns the one walk refs -> environments -> heads -> layouts -> objects. What must hold:
something that cannot be read ends the walk with an error, because to guess would be to
delete; something that is missing is reported, not guessed either. Protocol and words:
docs/gc-protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dsecfs.errors import FormatError, NotFound
from dsecfs.layers.catalog import (
    MAX_REF,
    TRASH_S,
    entry_number,
    parse_channel_entry,
    parse_ref,
    parse_trash,
)
from dsecfs.layers.digest import Digest, parse_digest, sha256
from dsecfs.layers.environment import Environment, parse_environment
from dsecfs.layers.head import HEAD_START, manifest_span
from dsecfs.layers.layout import Layout, decode_layout
from dsecfs.layers.leases import live_layers
from dsecfs.layers.manifest import MAX_MANIFEST, BlobRef, LayerManifest, parse_manifest
from dsecfs.store.base import Store, env_key, head_key, layout_prefix, object_key

MAX_LAYOUT = 1 << 30
"""Most bytes of an encoded layout that are read."""


@dataclass
class Reached:
    """What a walk found."""

    why: dict[str, str] = field(default_factory=dict)
    """Key -> what first led there, for people."""
    layers: dict[Digest, LayerManifest] = field(default_factory=dict)
    blobs: set[Digest] = field(default_factory=set)
    compositions: dict[Digest, str] = field(default_factory=dict)
    """What traces are filed under -> what leads there: each environment for each platform, and
    each base alone."""
    missing: list[tuple[str, str]] = field(default_factory=list)
    """(key that should be there, what leads to it)."""


def read_layer_manifest(store: Store, layer: Digest) -> LayerManifest:
    """A layer's manifest without its metadata: one or two small range reads.

    Its digest cannot be checked without the rest, so use it for listings and collection
    only. Raises NotFound, FormatError, TooNew.
    """
    key = head_key(layer)
    size = store.stat(key).size
    start = store.get_range(key, 0, min(size, HEAD_START)) if size else b""
    offset, length = manifest_span(start, layer)
    if offset + length > size:
        raise FormatError(f"head of layer {layer[:12]}: truncated: {size} bytes")
    if offset + length <= len(start):
        data = start[offset : offset + length]
    else:
        data = store.get_range(key, offset, length)
    return parse_manifest(data, f"manifest of layer {layer[:12]}")


def layout_sequences(store: Store, blob: Digest) -> list[int]:
    """The sequence numbers of a blob's layouts, ascending."""
    prefix = layout_prefix(blob)
    tails = (info.key.removeprefix(prefix) for info in store.list(prefix))
    return sorted(int(tail) for tail in tails if tail.isascii() and tail.isdigit())


def read_newest_layout(store: Store, blob: BlobRef) -> tuple[str, Layout]:
    """(key, layout) in force. NotFound if the blob has none; FormatError, TooNew."""
    while True:
        sequences = layout_sequences(store, blob.digest)
        if not sequences:
            raise NotFound(f"blob {blob.digest[:12]} has no layout in {store.url}")
        key = f"{layout_prefix(blob.digest)}{sequences[-1]:08d}"
        try:
            data = store.get(key, max_size=MAX_LAYOUT)
        except NotFound:
            # Collected between the list and the get, which only happens behind a newer one.
            if layout_sequences(store, blob.digest) == sequences:
                raise
            continue
        return key, decode_layout(data, blob.digest, blob.chunks, blob.chunk_size)


def reach(store: Store, now: float, *, only_leases: bool = False) -> Reached:
    """Walk from all roots (or from live leases alone). `now` is by the store's clock."""
    found = Reached()
    for layer, lease in live_layers(store, now).items():
        _layer(store, found, layer, f"lease {lease}")
    if only_leases:
        return found
    for kind, digest, why in roots(store, now):
        if kind == "env":
            _env(store, found, digest, why)
        else:
            _layer(store, found, digest, why)
    _imports(store, found)
    return found


def roots(store: Store, now: float) -> Iterator[tuple[str, Digest, str]]:
    """(kind, digest, why) of refs, removed refs that can be restored, and channels."""
    for info in store.list("refs/"):
        parts = info.key.split("/")
        try:
            ref = parse_ref(store.get(info.key, max_size=MAX_REF), info.key)
        except NotFound:
            continue  # removed meanwhile: it is in the trash, which is listed after this
        yield parts[1], ref.digest, f"ref {info.key}"
    for info in store.list("trash/refs/"):
        if info.mtime + TRASH_S <= now:
            continue
        try:
            ref = parse_trash(store.get(info.key, max_size=MAX_REF), info.key)
        except NotFound:
            continue  # restored meanwhile: the second mark sees the ref
        yield info.key.split("/")[2], ref.digest, f"removed {info.key}"
    last: dict[str, tuple[str, float]] = {}
    for info in store.list("channels/"):
        channel = info.key.rpartition("/")[0]
        earlier = last.get(channel)
        if earlier and info.mtime + TRASH_S > now:
            # Until lately this entry's predecessor was in force, and somebody may go back.
            yield from _channel_root(store, earlier[0])
        last[channel] = (info.key, info.mtime)
    for key, _ in last.values():
        yield from _channel_root(store, key)


def _channel_root(store: Store, key: str) -> Iterator[tuple[str, Digest, str]]:
    entry = parse_channel_entry(store.get(key, max_size=MAX_REF), entry_number(key), key)
    if entry.digest is not None:
        yield key.split("/")[1], entry.digest, f"channel {key}"


def _env(store: Store, found: Reached, digest: Digest, why: str) -> None:
    key = env_key(digest)
    if key in found.why:
        return
    try:
        data = store.get(key, max_size=MAX_MANIFEST)
    except NotFound:
        found.missing.append((key, why))
        return
    if sha256(data) != digest:
        raise FormatError(f"environment sha256:{digest[:12]}: its content has another digest")
    found.why[key] = why
    what = f"environment sha256:{digest[:12]}"
    manifest = parse_environment(data, what)
    for composition in manifest.platforms.values():
        found.compositions.setdefault(composition.digest, f"{what}, {why}")
    for layer in sorted(manifest.layers()):
        _layer(store, found, layer, f"environment sha256:{digest[:12]}, {why}")


def _layer(store: Store, found: Reached, layer: Digest, why: str) -> None:
    key = head_key(layer)
    if layer in found.layers:
        return
    try:
        manifest = read_layer_manifest(store, layer)
    except NotFound:
        found.missing.append((key, why))
        return
    found.why[key] = why
    found.layers[layer] = manifest
    if manifest.kind == "base":
        found.compositions.setdefault(Environment(manifest.platform, layer).digest, why)
    for blob in manifest.blobs:
        _blob(store, found, blob, f"layer sha256:{layer[:12]}, {why}")


def _blob(store: Store, found: Reached, blob: BlobRef, why: str) -> None:
    if blob.digest in found.blobs:
        return
    found.blobs.add(blob.digest)
    try:
        key, layout = read_newest_layout(store, blob)
    except NotFound:
        found.missing.append((layout_prefix(blob.digest), why))
        return
    found.why[key] = why
    for digest in layout.objects:
        found.why.setdefault(object_key(digest), f"blob {blob.digest[:12]}, {why}")


def _imports(store: Store, found: Reached) -> None:
    """Records of imported OCI layers are kept while all their blobs are reached anyway."""
    from dsecfs.layers.image import parse_import_record

    for info in store.list("imports/"):
        try:
            layer = parse_import_record(store.get(info.key, max_size=MAX_REF), info.key)
            manifest = found.layers.get(layer) or read_layer_manifest(store, layer)
        except NotFound:
            continue
        if all(blob.digest in found.blobs for blob in manifest.blobs):
            found.why[info.key] = "its blobs are kept"
            _layer(store, found, layer, f"import record {info.key}")


def trace_env(key: str) -> Digest:
    """The environment that a trace's key belongs to. FormatError for a key of another shape."""
    parts = key.split("/")
    if len(parts) != 4:
        raise FormatError(f"{key}: not the key of a trace")
    return parse_digest(parts[2])
