"""From a source to a layer in a store; nothing is visible before all of it is there.

Order, and what must hold: lease, objects, layout, head, then the name. What a publisher that
dies leaves behind is referred to by nothing, and its lease lapses. To publish the same
again gives the same digest and succeeds, finds what is there, and heals what is damaged.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsecfs.errors import BadInput, Conflict, FormatError, NotFound
from dsecfs.layers.blobwriter import BlobResult, BlobWriter
from dsecfs.layers.catalog import Catalog
from dsecfs.layers.codec import Codec
from dsecfs.layers.digest import DEFAULT_CHUNK_SIZE, Digest
from dsecfs.layers.erofs.writer import Device, write_erofs
from dsecfs.layers.head import MAX_EROFS, LayerHead, decode_head, encode_head, make_head
from dsecfs.layers.layout import ZERO, encode_layout
from dsecfs.layers.leases import Lease
from dsecfs.layers.manifest import BlobRef, LayerManifest, ProcessEnv, check_process_env
from dsecfs.layers.names import LAYER_KINDS, Name
from dsecfs.layers.platforms import Platform
from dsecfs.layers.progress import SILENT, Hook, Progress, no_hook
from dsecfs.layers.reach import layout_sequences, read_newest_layout
from dsecfs.layers.sources.base import DEFAULT_LIMITS, Limits, SourceTree, at_prefix
from dsecfs.layers.sources.git import GitSink
from dsecfs.layers.sources.image import ImageLayer
from dsecfs.layers.tree import Inode
from dsecfs.store.base import Store, head_key, layout_key, object_key

STEPS = ("leased", "objects", "layout", "head", "ref")
"""What a hook is told while `publish_source` runs, in this order."""

_LAYOUT_TRIES = 10


@dataclass(frozen=True, slots=True)
class Meta:
    """What the publisher says about a layer."""

    kind: str
    platform: str
    process_env: ProcessEnv = field(default_factory=ProcessEnv)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlobOptions:
    """How a blob is made. Only `chunk_size` enters its identity."""

    chunk_size: int = DEFAULT_CHUNK_SIZE
    codec: Codec = "lz4"
    workers: int = 2
    uploads: int = 2


DEFAULT_OPTIONS = BlobOptions()


@dataclass(frozen=True, slots=True)
class Published:
    """A layer that is in the store."""

    digest: Digest
    head: LayerHead
    uploaded: int
    """Bytes put into the store for it; what the store had already is not counted."""
    notes: tuple[str, ...] = ()
    """What its source left out or changed, one line each, for the user."""


def publish_source(
    store: Store,
    source: ImageLayer,
    name: Name | None,
    meta: Meta,
    *,
    at: str = "",
    git: bool | None = None,
    options: BlobOptions = DEFAULT_OPTIONS,
    limits: Limits = DEFAULT_LIMITS,
    progress: Progress = SILENT,
    hook: Hook = no_hook,
) -> Published:
    """Publish what `source` reads as a layer, under `name` if given (kind and version set).

    `at` places the tree below a directory (/opt/dsh). `git`: see sources/git.py; the default
    is to do it for a workspace. Raises what the source raises, BadInput
    for what no layer can be, Conflict if the name has other content, and store errors.
    """
    if name is not None and (name.kind != meta.kind or not name.version):
        raise BadInput(f"cannot publish a {meta.kind} as {name}", hint="expected KIND/NAME:VERSION")
    _check_meta(meta)
    task = str(name or meta.kind)
    with Lease(store, "publish") as lease:
        hook("leased")
        tree, blob = read_source(
            lease,
            source,
            task,
            git=meta.kind == "workspace" if git is None else git,
            options=options,
            limits=limits,
            progress=progress,
        )
        hook("objects")
        if tree.links:
            raise BadInput(f"{task}: it has hard links to files of layers below it")
        if at:
            tree = at_prefix(tree, os.fsencode(at), limits)
        _settle(tree, meta.kind)
        blobs = [blob] if blob else []
        published = publish_tree(store, lease, tree.root, blobs, meta, notes=tree.notes, hook=hook)
        if name is not None:
            Catalog(store).put_ref(name, published.digest, lease=lease)
            hook("ref")
    return published


_USUAL_MODES = {b"root": 0o700, b"tmp": 0o1777, b"var/tmp": 0o1777}
"""Directories that everybody expects with modes other than 0755 (FHS 3.0, base-files)."""


def _settle(tree: SourceTree, kind: str) -> None:
    """Give directories that only exist because of what is in them the usual attributes.

    A layer's directory hides the attributes of the one below it, so a workspace that is put
    at /tmp/x must not make /tmp private, nor one published from a private directory "/".
    """
    for path, mode in _USUAL_MODES.items():
        node: Inode | None = tree.root
        for part in path.split(b"/"):
            node = node.children.get(part) if node is not None and node.children else None
        if node is not None and node in tree.implied:
            node.mode = stat.S_IFDIR | mode
    if kind in ("workspace", "toolkit"):
        tree.root.mode, tree.root.uid, tree.root.gid = stat.S_IFDIR | 0o755, 0, 0
        tree.root.xattrs = {}  # an ACL says who may enter, too


def read_source(
    lease: Lease,
    source: ImageLayer,
    task: str,
    *,
    git: bool = False,
    options: BlobOptions = DEFAULT_OPTIONS,
    limits: Limits = DEFAULT_LIMITS,
    progress: Progress = SILENT,
) -> tuple[SourceTree, BlobResult | None]:
    """Run a source and store its data as a blob: its objects, not yet its layout.

    `git` prepares work trees for `git status` (sources/git.py).
    """
    progress.start(task, source.size or None)
    with BlobWriter(
        lease,
        chunk_size=options.chunk_size,
        codec=options.codec,
        workers=options.workers,
        uploads=options.uploads,
    ) as writer:
        sink = GitSink(writer) if git else writer
        tree = source.load(
            sink, limits=limits, progress=lambda amount: progress.advance(task, amount)
        )
        if isinstance(sink, GitSink):
            tree = sink.prepare(tree)
        blob = writer.finish()
    progress.finish(task)
    return tree, blob


def publish_tree(
    store: Store,
    lease: Lease,
    root: Inode,
    blobs: Sequence[BlobResult],
    meta: Meta,
    *,
    notes: tuple[str, ...] = (),
    hook: Hook = no_hook,
) -> Published:
    """Store the layouts and the head of a layer whose extents index `blobs`. Names nothing.

    Blobs without a layout are known ones; the caller's lease covers a layer that has them.
    """
    _check_meta(meta)
    inodes, size = _count(root)
    refs = tuple(b.ref for b in blobs)
    manifest = LayerManifest(
        meta.kind, meta.platform, refs, meta.process_env, meta.labels, inodes, size
    )
    devices = [Device(ref.digest.encode(), ref.size) for ref in refs]
    # The kernel tells file systems apart by UUID: the same tree under another manifest is
    # another layer and needs another one.
    erofs = write_erofs(root, devices, uuid_salt=manifest.to_json())
    head = make_head(manifest, erofs, [b.chunk_digests for b in blobs])
    uploaded = sum(_store_layout(store, lease, b) for b in blobs)
    hook("layout")
    uploaded += _store_head(store, lease, head)
    hook("head")
    return Published(head.digest, head, uploaded, notes)


def _store_layout(store: Store, lease: Lease, blob: BlobResult) -> int:
    """Put the layout of a new blob unless there is a good one; the bytes that were needed."""
    if blob.layout is None:
        return 0
    data = encode_layout(blob.layout)
    for _ in range(_LAYOUT_TRIES):
        there = layout_sequences(store, blob.ref.digest)
        if there and layout_is_good(store, lease, blob.ref):
            return 0
        sequence = there[-1] + 1 if there else 1
        if lease.put_if_absent(layout_key(blob.ref.digest, sequence), data):
            return blob.stored + len(data)
    raise Conflict(f"blob {blob.ref.digest[:12]}: others write damaged layouts of it")


def layout_is_good(store: Store, lease: Lease, ref: BlobRef) -> bool:
    """Whether the layout in force can be read and its objects are there to stay, as long as
    they must be. Their bytes are not read."""
    try:
        key, layout = read_newest_layout(store, ref)
        lease.rely_on(key)
        store.stat(key)
        ends = [0] * len(layout.objects)
        for place in layout.places:
            if place.codec != ZERO:
                ends[place.object] = max(ends[place.object], place.offset + place.stored)
        for name, end in zip(layout.objects, ends, strict=True):
            lease.rely_on(object_key(name))
            if store.stat(object_key(name)).size < end:
                return False
    except (NotFound, FormatError):
        return False
    return True


def _store_head(store: Store, lease: Lease, head: LayerHead) -> int:
    key = head_key(head.digest)
    data = encode_head(head)
    if lease.put_if_absent(key, data):
        return len(data)
    try:
        decode_head(store.get(key, max_size=MAX_EROFS), head.digest)
        return 0
    except (FormatError, NotFound):
        # Damaged in the store: whoever reads it fails, so nothing is lost by the gap.
        store.delete(key)
        lease.put_if_absent(key, data)
        return len(data)


def _check_meta(meta: Meta) -> None:
    if meta.kind not in LAYER_KINDS or meta.kind == "disk":
        raise BadInput(f"no file tree is of kind {meta.kind!r}")
    Platform.parse(meta.platform)
    check_process_env(meta.process_env, "process environment")


def _count(root: Inode) -> tuple[int, int]:
    """Inodes, and bytes of regular files, each inode counted once."""
    seen = {root}
    todo = [root]
    size = 0
    while todo:
        inode = todo.pop()
        if inode.children is not None:
            new = {c for c in inode.children.values() if c not in seen}
            seen |= new
            todo.extend(new)
        elif inode.is_reg:
            size += inode.size
    return len(seen), size
