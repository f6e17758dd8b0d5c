"""A layer's head and metadata on this node: fetched once, verified, healed, ready to mount.

    data/heads/<hex>        the head as the store has it
    data/heads/<hex>.ok     what was verified, and in which boot (below)
    data/heads/.lock-<xx>   locks, one per first two digits: one process fetches a layer
    data/meta/<hex>.erofs   the EROFS image, to mount
    data/blobs/<hex>/chunks chunk digests of each blob (owned by dsecfs/cache/blob.py)

What must hold:
- what `ensure` returns was verified against the layer's digest in this boot, and the files
  are still the ones that were verified (inode, size and mtime): after another boot, a power
  loss perhaps, everything is hashed again;
- files appear whole, by rename, and `.ok` last; a file that is mounted is never changed;
- a layer that is here needs no store, and no library that is slow to import;
- `ensure` notes the use (the time of `.ok`) before it looks, and looks last whether `.ok` is
  still there; `forget` takes `.ok` away before it looks at that time. So one of the two sees
  the other, without a lock on the way of `dsec run`.

`.ok` is one line with the XXH3 (128 bits, hex) of the rest, then JSON: format, boot, files
([inode, size, mtime in ns] of head, image and the blobs' chunk lists) and manifest (its
canonical text).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from dsecfs.errors import BadInput, Busy, CacheError, DsecfsError, FormatError
from dsecfs.layers.digest import Digest, parse_digest
from dsecfs.layers.manifest import BlobRef, LayerManifest, parse_manifest
from dsecfs.locks import locked
from dsecfs.nodedirs import NodeDirs, age_s, boot_id
from dsecfs.store.base import Store, head_key

if TYPE_CHECKING:
    from dsecfs.layers.head import LayerHead

log = logging.getLogger(__name__)

OK_FORMAT = 1
MAX_HEAD = 4 << 30
LOCK_WAIT_S = 120.0
"""Longest wait for another process that fetches the same layer."""
_PARALLEL = 8


@dataclass(frozen=True, slots=True)
class LocalLayer:
    """A layer that can be mounted on this node now."""

    digest: Digest
    manifest: LayerManifest
    meta_path: Path
    """Its EROFS metadata image."""

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """The devices of the image, in order; the cache knows their chunk digests."""
        return self.manifest.blobs


class LocalLayers:
    """The layers of this node. Safe to use from several threads and processes."""

    def __init__(self, store: Store, dirs: NodeDirs) -> None:
        self._store = store
        self._dirs = dirs

    def ensure(self, layer: Digest) -> LocalLayer:
        """Make `layer` ready to mount; from the store only if it is not here whole.

        Raises NotFound, Corrupt and FormatError (the store's head), store errors, CacheError
        (the local disk), Busy (another process takes longer than LOCK_WAIT_S).
        """
        return self._present(layer) or self._obtain(layer)

    def ensure_all(self, layers: Sequence[Digest]) -> list[LocalLayer]:
        """`ensure` for several layers; those that are missing are fetched at the same time."""
        found = {layer: self._present(layer) for layer in layers}
        missing = [layer for layer, local in found.items() if local is None]
        if len(missing) > 1:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(_PARALLEL, "layers") as pool:
                found.update(zip(missing, pool.map(self._obtain, missing), strict=True))
        return [found[layer] or self._obtain(layer) for layer in layers]

    def _present(self, layer: Digest) -> LocalLayer | None:
        """The layer if it was verified in this boot and nothing touched it since."""
        path = _ok_path(self._dirs.head(layer))
        try:
            with open(path, "rb") as file:
                with contextlib.suppress(OSError):  # a disk that is read-only
                    os.utime(file.fileno())
                inode = os.fstat(file.fileno()).st_ino
                content = file.read()
            ok = _parse_ok(content)
            if ok["boot"] != boot_id():
                return None
            manifest = parse_manifest(ok["manifest"].encode())
            if ok["files"] != self._identities(layer, manifest):
                return None
            if path.stat().st_ino != inode:
                return None
        except (OSError, ValueError, KeyError, TypeError, DsecfsError):
            # Absent, of another version or damaged: all of it is made anew.
            return None
        return LocalLayer(layer, manifest, self._dirs.meta(layer))

    def _identities(self, layer: Digest, manifest: LayerManifest) -> list[list[int]]:
        """What was verified: head, image, and the chunk list of each blob."""
        chunks = [self._dirs.blob(blob.digest) / "chunks" for blob in manifest.blobs]
        return [*map(_identity, (self._dirs.head(layer), self._dirs.meta(layer), *chunks))]

    def _obtain(self, layer: Digest) -> LocalLayer:
        from dsecfs.cache.blob import write_chunk_list
        from dsecfs.layers.head import decode_head

        path, meta = self._dirs.head(layer), self._dirs.meta(layer)
        with layer_lock(self._dirs, layer):
            found = self._present(layer)
            if found is not None:
                return found
            head: LayerHead | None = None
            try:
                head = decode_head(path.read_bytes(), layer)
            except (OSError, FormatError):
                # Not here, or damaged here: the store has it.
                pass
            try:
                if head is None:
                    data, head = self._fetch(layer)
                    _write(path, data)
                if not _equal(meta, head.erofs):
                    _write(meta, head.erofs)
                for blob, digests in zip(head.manifest.blobs, head.chunk_digests, strict=True):
                    write_chunk_list(self._dirs, blob, digests)
                ok = {
                    "format": OK_FORMAT,
                    "boot": boot_id(),
                    "files": self._identities(layer, head.manifest),
                    "manifest": head.manifest.to_json().decode(),
                }
                body = json.dumps(ok).encode()
                _write(_ok_path(path), _checksum(body) + b"\n" + body)
            except OSError as e:
                raise CacheError(
                    f"layer {layer[:12]}: cannot write below {self._dirs.data}: {e.strerror}",
                    hint="free space there, or set another directory",
                ) from None
            return LocalLayer(layer, head.manifest, meta)

    def _fetch(self, layer: Digest) -> tuple[bytes, LayerHead]:
        """The stored head and what it says. One damaged answer is asked for again."""
        from dsecfs.layers.head import decode_head

        try:
            data = self._store.get(head_key(layer), max_size=MAX_HEAD)
            return data, decode_head(data, layer)
        except FormatError as e:
            log.warning("%s; reading it once more", e)
        data = self._store.get(head_key(layer), max_size=MAX_HEAD)
        return data, decode_head(data, layer)


def known_layers(dirs: NodeDirs) -> Iterator[Digest]:
    """Layers of a store of which this node has the head, whole or not. An image without one was
    made here."""
    try:
        names = sorted({name.removesuffix(".ok") for name in os.listdir(dirs.data / "heads")})
    except FileNotFoundError:
        return
    for name in names:
        with contextlib.suppress(BadInput):
            if parse_digest(name) == name:
                yield Digest(name)


def layer_files(dirs: NodeDirs, layer: Digest) -> tuple[Path, Path, Path]:
    """What there may be of a layer, besides its blobs: `.ok`, head and image."""
    head = dirs.head(layer)
    return _ok_path(head), head, dirs.meta(layer)


def local_manifest(dirs: NodeDirs, layer: Digest) -> LayerManifest | None:
    """The manifest of a layer that is on this node whole, from whichever boot."""
    try:
        content = _ok_path(dirs.head(layer)).read_bytes()
        return parse_manifest(_parse_ok(content)["manifest"].encode())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DsecfsError):
        return None


def forget_layer(dirs: NodeDirs, layer: Digest, idle_s: float) -> bool:
    """Remove what this node has of `layer`, which must not be mounted; blobs stay.

    False, and nothing is done, if it was ensured within the last `idle_s` seconds (somebody
    may be about to mount it), or is being fetched. CacheError.
    """
    ok, head, meta = layer_files(dirs, layer)
    aside = _temporary(ok)
    try:
        with layer_lock(dirs, layer, 0.0):
            try:
                ok.rename(aside)
            except FileNotFoundError:
                pass  # never whole, or a crash in here
            else:
                if age_s(aside.stat()) < idle_s:
                    aside.rename(ok)
                    return False
            # The head last: what has none was made here, and is nobody's to forget.
            for path in (*map(_temporary, (meta, head)), aside, meta, head):
                path.unlink(missing_ok=True)
    except Busy:
        return False
    except OSError as e:
        raise CacheError(f"forget layer {layer[:12]}: {e.filename}: {e.strerror}") from None
    return True


@contextlib.contextmanager
def layer_lock(dirs: NodeDirs, layer: Digest, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Keep other threads and processes from writing this layer's files. Busy, CacheError."""
    path = dirs.head(layer).with_name(f".lock-{layer[:2]}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise CacheError(f"cannot lock {path}: {e.strerror}") from None
    try:
        with locked(fd, f"layer sha256:{layer[:12]}, being fetched", wait_s=wait_s):
            yield
    finally:
        os.close(fd)


def _ok_path(head: Path) -> Path:
    return head.with_name(f"{head.name}.ok")


def _parse_ok(content: bytes) -> dict[str, Any]:
    checksum, _, body = content.partition(b"\n")
    if _checksum(body) != checksum:
        raise ValueError("damaged")
    ok = json.loads(body)
    if not isinstance(ok, dict) or ok["format"] != OK_FORMAT:
        raise ValueError("another format")
    return ok


def _checksum(body: bytes) -> bytes:
    # A check for torn writes of our own, no identity: who can write here can write anything.
    return xxhash.xxh3_128_hexdigest(body).encode()


def _identity(path: Path) -> list[int]:
    """What changes when somebody replaces or writes the file."""
    s = path.stat()
    return [s.st_ino, s.st_size, s.st_mtime_ns]


def _equal(path: Path, data: bytes) -> bool:
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except FileNotFoundError:
        return False


def _write(path: Path, data: bytes) -> None:
    """Make `path` appear whole. Call with the layer's lock: the temporary name is fixed, so
    what a crash leaves the next writer takes over."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path) -> Path:
    return path.with_name(f".tmp-{path.name}")
