"""An OCI image becomes an environment: a blob per image layer, one merged base, defaults.

What must hold:
- every image layer is read at most once into a store: its own layer (data, and its tree with
  whiteouts kept) is recorded under its diff id, and images that share it share its blob;
- a record is only a hint: what it leads to is verified before it is used;
- the base is one layer whose metadata is merged over all of them, its files lie in their
  blobs; names (environment first, then base) come last.

What a tree leaves to the layers below (`SourceTree.implied`, `.links`) is kept in the stored
tree of an image layer as attributes `trusted.dsec.implied` and `trusted.dsec.link`. Nobody
mounts these layers; the merged base has no such attributes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from dsecfs.errors import BadInput, Conflict, DsecfsError, FormatError, NotFound
from dsecfs.layers.blobwriter import BlobResult
from dsecfs.layers.catalog import MAX_REF, Catalog
from dsecfs.layers.digest import Digest
from dsecfs.layers.environment import Environment, EnvironmentManifest, ProcessDefaults
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.head import MAX_EROFS, LayerHead, decode_head
from dsecfs.layers.leases import Lease
from dsecfs.layers.manifest import BlobRef, Fields, canonical_json, load_json
from dsecfs.layers.merge import LayerTree, merge
from dsecfs.layers.names import Name
from dsecfs.layers.progress import SILENT, Hook, Progress, no_hook
from dsecfs.layers.publish import (
    BlobOptions,
    Meta,
    Published,
    layout_is_good,
    publish_tree,
    read_source,
)
from dsecfs.layers.sources.base import DEFAULT_LIMITS, Limits, SourceTree
from dsecfs.layers.sources.image import Image, ImageConfig, ImageLayer, Platform
from dsecfs.layers.tree import Inode, walk
from dsecfs.store.base import Store, head_key, import_key

IMPORT_FORMAT = 1
STEPS = ("leased", "layers", "layout", "head", "environment", "ref", "base ref")
"""What a hook is told while `import_image` runs; "layer objects", "layout" and "head" come
for every image layer that is read, too."""

DIFF_ID_LABEL = "dsec.diff-id"
IMPLIED, LINK = b"trusted.dsec.implied", b"trusted.dsec.link"
IMPORT_OPTIONS = BlobOptions(workers=1, uploads=1)
"""For each of the image layers that are read at the same time."""


@dataclass(frozen=True, slots=True)
class Imported:
    """An image that is in the store."""

    environment: Digest
    base: Published
    layers: int
    reused: int
    """Image layers that were neither read nor uploaded."""
    uploaded: int
    """Bytes put into the store in all."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    tree: LayerTree[BlobRef]
    blobs: tuple[BlobResult, ...]
    uploaded: int
    reused: bool
    notes: tuple[str, ...] = ()


class _Stopped(DsecfsError):
    """Another layer of the image failed."""


def import_image(
    store: Store,
    image: Image,
    name: Name,
    *,
    jobs: int = 2,
    reuse: bool = True,
    labels: Mapping[str, str] | None = None,
    options: BlobOptions = IMPORT_OPTIONS,
    limits: Limits = DEFAULT_LIMITS,
    progress: Progress = SILENT,
    hook: Hook = no_hook,
) -> Imported:
    """Publish an open image as `env/NAME:VERSION` and `base/NAME:VERSION`.

    `jobs` image layers are read at the same time. Raises what reading the image raises
    (UnsafeArchive, BadInput, Corrupt …), Conflict if a name has other content, store errors;
    then no name was made. `labels` go to the base layer. Without `reuse` every image layer
    is read and stored again, which heals what is damaged in the store.
    """
    if not name.version or name.kind not in ("", "env", "base"):
        raise BadInput(f"cannot import an image as {name}", hint="expected NAME:VERSION")
    if any(layer.diff_id is None for layer in image.layers):
        raise BadInput(
            f"{image.spec[:200]}: a plain tree, not an image",
            hint="dsec layer publish SOURCE base/NAME:VERSION makes a layer of it",
        )
    base_name = name.with_kind("base")
    platform = _platform(image.config.platform)
    with Lease(store, "publish") as lease:
        hook("leased")
        importer = _Importer(store, lease, platform, options, limits, progress, hook, reuse)
        loaded = importer.load_all(image.layers, jobs)
        hook("layers")
        merged = merge([part.tree for part in loaded])
        known = {b.ref.digest: b for part in loaded for b in part.blobs}
        base = publish_tree(
            store,
            lease,
            merged.root,
            # Their layouts are there, published with the image layers.
            [BlobResult(ref, known[ref.digest].chunk_digests) for ref in merged.blobs],
            Meta("base", platform, labels=labels or {}),
            hook=hook,
        )
        catalog = Catalog(store)
        _check_free(catalog, base_name, base.digest)
        manifest = EnvironmentManifest(
            {platform: Environment(platform, base.digest, process=_defaults(image.config))},
            image.config.labels,
        )
        environment = catalog.put_env(manifest, lease=lease)
        hook("environment")
        catalog.put_ref(name.with_kind("env"), environment, lease=lease)
        hook("ref")
        catalog.put_ref(base_name, base.digest, lease=lease)
        hook("base ref")
    distinct = {id(part): part for part in loaded}.values()
    return Imported(
        environment,
        base,
        len(loaded),
        sum(part.reused for part in loaded),
        base.uploaded + sum(part.uploaded for part in distinct),
        tuple(note for part in distinct for note in part.notes),
    )


def parse_import_record(data: bytes, what: str) -> Digest:
    """The layer that a record names. Raises FormatError or TooNew."""
    f = Fields(load_json(data, what), what)
    f.check_format(IMPORT_FORMAT)
    layer = f.take_digest("layer")
    f.done()
    return layer


class _Importer:
    """Loads the layers of one image, each from the store or from the image."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        platform: str,
        options: BlobOptions,
        limits: Limits,
        progress: Progress,
        hook: Hook,
        reuse: bool,
    ) -> None:
        self._reuse = reuse
        self._store = store
        self._lease = lease
        self._platform = platform
        self._options = options
        self._limits = limits
        self._progress = progress
        self._hook = hook
        self._stop = threading.Event()

    def load_all(self, layers: Iterable[ImageLayer], jobs: int) -> list[_Loaded]:
        """All layers, bottom first; one that stands several times is loaded once."""
        with ThreadPoolExecutor(max(jobs, 1), "import") as pool:
            started: dict[object, Future[_Loaded]] = {}
            order = []
            for number, layer in enumerate(layers, 1):
                key = layer.diff_id or number
                if key not in started:
                    started[key] = pool.submit(self._load, number, layer)
                order.append(started[key])
            try:
                return self._collect(order)
            except BaseException:
                self._stop.set()
                for future in order:
                    future.cancel()
                raise

    def _collect(self, order: list[Future[_Loaded]]) -> list[_Loaded]:
        """Results in order; of several errors the first that is not a consequence."""
        from concurrent.futures import FIRST_EXCEPTION, wait

        done, _ = wait(order, return_when=FIRST_EXCEPTION)
        for future in order:
            if future in done and future.exception() is not None:
                future.result()
        return [future.result() for future in order]

    def _load(self, number: int, layer: ImageLayer) -> _Loaded:
        recorded = self._recorded(layer) if self._reuse else None
        return recorded or self._read(number, layer)

    def _recorded(self, layer: ImageLayer) -> _Loaded | None:
        """What the store has of this layer, if it has all of it."""
        if layer.diff_id is None:
            return None
        key = import_key(layer.diff_id)
        try:
            self._lease.rely_on(key)
            digest = parse_import_record(self._store.get(key, max_size=MAX_REF), key)
            self._lease.rely_on_layers([digest])
            head = decode_head(self._store.get(head_key(digest), max_size=MAX_EROFS), digest)
            if head.manifest.labels.get(DIFF_ID_LABEL) != layer.diff_id:
                return None
            if not all(layout_is_good(self._store, self._lease, b) for b in head.manifest.blobs):
                return None
        except (NotFound, FormatError):
            return None
        blobs = tuple(
            BlobResult(ref, digests)
            for ref, digests in zip(head.manifest.blobs, head.chunk_digests, strict=True)
        )
        return _Loaded(_stored_tree(head), blobs, 0, True)

    def _read(self, number: int, layer: ImageLayer) -> _Loaded:
        task = f"layer {number}"
        tree, blob = read_source(
            self._lease,
            layer,
            task,
            options=self._options,
            limits=self._limits,
            progress=_Stoppable(self._progress, self._stop),
        )
        self._hook("layer objects")
        blobs = (blob,) if blob else ()
        refs = [b.ref for b in blobs]
        if layer.diff_id is None:
            raise BadInput(f"{task}: a plain tree, not a layer of an image")
        notes = tree.notes + _drop_marks(tree.root)
        marked = _mark(tree)
        published = publish_tree(
            self._store,
            self._lease,
            tree.root,
            blobs,
            Meta("base", self._platform, labels={DIFF_ID_LABEL: layer.diff_id}),
            hook=self._hook,
        )
        for inode in marked:
            inode.xattrs.pop(IMPLIED, None)
            inode.xattrs.pop(LINK, None)
        self._record(layer.diff_id, published.digest)
        return _Loaded(LayerTree.of(tree, refs), blobs, published.uploaded, False, notes)

    def _record(self, diff_id: Digest, layer: Digest) -> None:
        key = import_key(diff_id)
        record = canonical_json({"format": IMPORT_FORMAT, "layer": layer})
        if self._lease.put_if_absent(key, record):
            return
        try:
            if self._store.get(key, max_size=MAX_REF) == record:
                return
        except (NotFound, FormatError):
            pass
        # The record that is there was of no use, or this layer would not have been read.
        self._store.delete(key)
        self._lease.put_if_absent(key, record)


class _Stoppable:
    """Progress that ends a read when another layer has failed."""

    def __init__(self, progress: Progress, stop: threading.Event) -> None:
        self._progress = progress
        self._stop = stop

    def start(self, task: str, total: int | None) -> None:
        self._progress.start(task, total)

    def advance(self, task: str, amount: int) -> None:
        if self._stop.is_set():
            raise _Stopped(f"{task}: another layer failed")
        self._progress.advance(task, amount)

    def finish(self, task: str) -> None:
        self._progress.finish(task)


def _mark(tree: SourceTree) -> list[Inode]:
    """Write what is left to lower layers into the tree; the inodes that got a mark."""
    for inode in tree.implied:
        inode.xattrs[IMPLIED] = b"y"
    for inode, path in tree.links.items():
        inode.xattrs[LINK] = path
    return [*tree.implied, *tree.links]


def _drop_marks(root: Inode) -> tuple[str, ...]:
    """Remove marks that an archive brought along; a note if there were any."""
    found = 0
    for _, inode in walk(root):
        for mark in (IMPLIED, LINK):
            found += inode.xattrs.pop(mark, None) is not None
    return (f"{found} attributes trusted.dsec.* left out",) if found else ()


def _stored_tree(head: LayerHead) -> LayerTree[BlobRef]:
    """The tree of an image layer as its source gave it."""
    with ErofsImage(head.erofs, f"metadata of layer {head.digest[:12]}") as image:
        root = image.load_tree()
    implied: set[Inode] = set()
    links: dict[Inode, bytes] = {}
    for _, inode in walk(root):
        if inode.xattrs.pop(IMPLIED, None) is not None:
            implied.add(inode)
        path = inode.xattrs.pop(LINK, None)
        if path is not None:
            links[inode] = path
    return LayerTree(root, head.manifest.blobs, frozenset(implied), links)


def _platform(found: Platform) -> str:
    """The name of a platform; arm64 has one variant in practice, which is left out."""
    if (found.architecture, found.variant) == ("arm64", "v8"):
        return f"{found.os}/{found.architecture}"
    return str(found)


def _defaults(config: ImageConfig) -> ProcessDefaults:
    return ProcessDefaults(
        config.env, config.cwd, config.user, config.entrypoint, config.cmd, config.shell
    )


def _check_free(catalog: Catalog, name: Name, digest: Digest) -> None:
    """Find a conflict of the second name before the first one is made."""
    try:
        there = catalog.get_ref(name, remember=False)
    except NotFound:
        return
    if there.digest != digest:
        raise Conflict(
            f"{name} exists already with other content", hint="import under another version"
        )
