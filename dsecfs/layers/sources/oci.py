"""Source: an OCI image layout, as a directory or as a tar archive of one.

Follows the OCI image specification v1.1 (image-layout, image-index, manifest, config) and
docker's equivalents of the same shape. What must hold: a blob's name comes only from a
checked digest; every manifest and configuration is verified before it is parsed; a file of
the layout is a regular file, and reading it cannot block.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
import tempfile
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from dsecfs.errors import BadInput, Corrupt, FormatError, NotFound, Unsupported
from dsecfs.layers.digest import Digest, parse_digest
from dsecfs.layers.manifest import load_json
from dsecfs.layers.sources.base import (
    DEFAULT_LIMITS,
    PIECE,
    DataSink,
    Limits,
    SourceTree,
    show_text,
)
from dsecfs.layers.sources.decompress import decompressed, detect
from dsecfs.layers.sources.image import (
    MAX_LAYERS,
    Image,
    ImageLayer,
    Platform,
    check_platform,
    load_layer_tar,
    parse_config,
)
from dsecfs.layers.sources.streams import Progress
from dsecfs.layers.sources.tarformat import LINK, REG, SYM, TarReader

MAX_JSON = 8 << 20
"""Most bytes of an index, manifest or configuration."""

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
REF_NAME = "org.opencontainers.image.ref.name"


class Range:
    """`length` bytes of an open file, read by position."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd, self._offset, self._left = fd, offset, length

    def read(self, n: int, /) -> bytes:
        data = os.pread(self._fd, min(n, self._left), self._offset) if self._left else b""
        self._offset += len(data)
        self._left -= len(data)
        return data


class Files(Protocol):
    """The files of a layout or of a saved image, by their path in it."""

    what: str

    def size(self, name: str) -> int | None:
        """Bytes of a regular file; None if there is none of that name."""

    def open(self, name: str) -> tuple[Range, Callable[[], None]]:
        """A stream of its bytes, and how to close it. NotFound if it is not there."""

    def close(self) -> None: ...


class DirectoryFiles:
    """Files below a directory that the user named."""

    def __init__(self, path: str) -> None:
        self.what = f"image {show_text(path)}"
        self._path = path
        if not os.path.isdir(path):
            raise NotFound(f"{self.what}: no such directory")

    def _fd(self, name: str) -> int:
        # O_NONBLOCK: a fifo in the place of a blob must not stop us.
        return os.open(os.path.join(self._path, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def size(self, name: str) -> int | None:
        try:
            st = os.stat(os.path.join(self._path, name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return st.st_size if stat.S_ISREG(st.st_mode) else None

    def open(self, name: str) -> tuple[Range, Callable[[], None]]:
        size = self.size(name)
        if size is None:
            raise NotFound(f"{self.what}: {show_text(name)} is missing", hint="get the image again")
        fd = self._fd(name)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise BadInput(f"{self.what}: {show_text(name)} is not a regular file")
        return Range(fd, 0, size), lambda: os.close(fd)

    def close(self) -> None:
        pass


class ArchiveFiles:
    """Files in a tar archive, indexed once. A compressed one is inflated to a temporary file."""

    def __init__(self, path: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self.what = f"archive {show_text(path)}"
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        try:
            file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115 - kept open
        except FileNotFoundError:
            raise NotFound(f"{self.what}: no such file") from None
        self._file = file
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadInput(f"{self.what}: not a regular file")
            if detect(os.pread(file.fileno(), 8, 0)):
                self._file = self._inflate(file, limits)
                file.close()
            self._index(limits)
        except BaseException:
            self._file.close()
            file.close()
            raise

    def _inflate(self, file: BinaryIO, limits: Limits) -> BinaryIO:
        out = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - kept open, has no name
        try:
            stream = decompressed(file, limits, self.what)
            total = 0
            while data := stream.read(PIECE):
                total += len(data)
                if total > limits.bytes:
                    raise BadInput(f"{self.what}: more than {limits.bytes} bytes")
                out.write(data)
        except BaseException:
            out.close()
            raise
        return out

    def _index(self, limits: Limits) -> None:
        size = os.fstat(self._file.fileno()).st_size
        raw = _Seekable(self._file.fileno(), size)
        reader = TarReader(raw, limits, self.what, jump=raw.jump)
        for count, entry in enumerate(reader):
            if count > limits.entries:
                raise BadInput(f"{self.what}: more than {limits.entries} entries")
            name = posixpath.normpath(entry.name.decode("utf-8", "surrogateescape")).lstrip("/")
            if entry.type == REG and entry.segments is None:
                self._places[name] = (reader.offset, entry.stored)
            elif entry.type in (SYM, LINK):
                target = entry.linkname.decode("utf-8", "surrogateescape")
                if entry.type == SYM:  # docker save wrote equal layers as ../ID/layer.tar
                    target = posixpath.join(posixpath.dirname(name), target)
                self._links[name] = posixpath.normpath(target).lstrip("/")

    def _place(self, name: str) -> tuple[int, int] | None:
        for _ in range(8):
            if name in self._places or name not in self._links:
                break
            name = self._links[name]
        return self._places.get(name)

    def size(self, name: str) -> int | None:
        place = self._place(name)
        return place[1] if place else None

    def open(self, name: str) -> tuple[Range, Callable[[], None]]:
        place = self._place(name)
        if place is None:
            raise NotFound(f"{self.what}: {show_text(name)} is missing")
        return Range(self._file.fileno(), *place), lambda: None

    def close(self) -> None:
        self._file.close()


class _Seekable:
    """A whole file as a stream that can jump over data."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._size, self._offset = fd, size, 0

    def read(self, n: int, /) -> bytes:
        data = os.pread(self._fd, min(n, 64 * 1024), self._offset)
        self._offset += len(data)
        return data

    def jump(self, n: int) -> int:
        n = min(n, self._size - self._offset)
        self._offset += n
        return n


def read_whole(files: Files, name: str, limit: int = MAX_JSON) -> bytes:
    """A small file. NotFound, or BadInput if it is longer than `limit`."""
    size = files.size(name)
    if size is not None and size > limit:
        raise BadInput(
            f"{files.what}: {show_text(name)} has {size} bytes, at most {limit} are allowed"
        )
    stream, close = files.open(name)
    try:
        parts = []
        while data := stream.read(PIECE):
            parts.append(data)
        return b"".join(parts)
    finally:
        close()


def blob_name(digest: Digest) -> str:
    return f"blobs/sha256/{digest}"


def read_blob(files: Files, digest: Digest) -> bytes:
    """A small blob, verified. Raises Corrupt, NotFound, BadInput."""
    data = read_whole(files, blob_name(digest))
    if hashlib.sha256(data).hexdigest() != digest:
        raise Corrupt(
            f"{files.what}: blob sha256:{digest} has another content", hint="get the image again"
        )
    return data


class Descriptor:
    """An OCI content descriptor, checked."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, dict):
            raise FormatError(f"{what}: a descriptor is not a JSON object")
        media = value.get("mediaType", "")
        digest, size = value.get("digest"), value.get("size")
        if not isinstance(media, str) or not isinstance(digest, str) or type(size) is not int:
            raise FormatError(f"{what}: a descriptor lacks mediaType, digest or size")
        self.media_type = media
        self.digest = parse_digest(digest)
        self.size: int = size
        annotations = value.get("annotations")
        self.annotations: dict[str, Any] = annotations if isinstance(annotations, dict) else {}
        self.platform = self._platform(value.get("platform"), what)

    @staticmethod
    def _platform(value: object, what: str) -> Platform | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise FormatError(f"{what}: a platform is not a JSON object")
        parts = [value.get(k) or "" for k in ("os", "architecture", "variant")]
        if not all(isinstance(p, str) for p in parts):
            raise FormatError(f"{what}: a platform has the wrong type")
        return Platform(*parts)


def _object(data: bytes, what: str) -> dict[str, Any]:
    value = load_json(data, what)
    if not isinstance(value, dict):
        raise FormatError(f"{what}: expected a JSON object")
    return value


def _descriptors(value: object, what: str) -> list[Descriptor]:
    if not isinstance(value, list) or len(value) > 10_000:
        raise FormatError(f"{what}: expected a list of descriptors")
    return [Descriptor(v, what) for v in value]


def open_oci(spec: str, rest: str, *, archive: bool, platform: Platform | None) -> Image:
    """Open `DIR[:TAG]` or `FILE[:TAG]`; see `image.open_image`."""
    path, tag = split_reference(rest)
    files: Files = ArchiveFiles(path) if archive else DirectoryFiles(path)
    try:
        return image_of_layout(spec, files, tag, platform)
    except BaseException:
        files.close()
        raise


def split_reference(rest: str) -> tuple[str, str]:
    """PATH[:REFERENCE]: the longest path that exists, or all up to the first colon."""
    if os.path.exists(rest):
        return rest, ""
    positions = [i for i, c in enumerate(rest) if c == ":"]
    for i in reversed(positions):
        if os.path.exists(rest[:i]):
            return rest[:i], rest[i + 1 :]
    path, _, reference = rest.partition(":")
    return path, reference


def image_of_layout(spec: str, files: Files, tag: str, platform: Platform | None) -> Image:
    """The image called `tag` ("": the only one) in a layout. Takes over `files`."""
    index = _object(read_whole(files, "index.json"), f"{files.what}: index.json")
    entries = _descriptors(index.get("manifests"), f"{files.what}: index.json")
    if tag:
        found = [e for e in entries if e.annotations.get(REF_NAME) == tag]
        # `docker save` puts the whole name in another annotation (containerd's).
        found = found or [
            e for e in entries if e.annotations.get("io.containerd.image.name") == tag
        ]
        if not found:
            raise NotFound(f"{files.what}: it has no image {tag[:100]!r}", hint=_tags(entries))
        entries = found
    elif len({e.annotations.get(REF_NAME) for e in entries}) > 1:
        raise BadInput(f"{files.what}: it holds several images", hint=_tags(entries))
    manifest = _pick(files, entries, platform, 0)
    return image_of_manifest(spec, files, manifest, platform)


def _tags(entries: list[Descriptor]) -> str:
    names = sorted(
        {str(e.annotations[REF_NAME])[:60] for e in entries if REF_NAME in e.annotations}
    )
    if not names:
        return "it holds no names at all"
    return (
        "it has "
        + ", ".join(names[:10])
        + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    )


def _pick(
    files: Files, entries: list[Descriptor], platform: Platform | None, depth: int
) -> Descriptor:
    """The manifest for `platform`, through nested indexes."""
    if depth > 4:
        raise BadInput(f"{files.what}: indexes are nested more than 4 deep")
    if not entries:
        raise BadInput(f"{files.what}: an index without manifests")
    # Attestations (docker buildx) are manifests for "unknown/unknown".
    entries = [e for e in entries if e.platform is None or e.platform.os != "unknown"] or entries
    if len(entries) == 1:
        chosen = entries[0]
        if chosen.platform is not None:
            check_platform(chosen.platform, platform, files.what)
    else:
        wanted = platform or Platform.here()
        fitting = [e for e in entries if e.platform is not None and wanted.accepts(e.platform)]
        if not fitting:
            has = (
                ", ".join(sorted({str(e.platform) for e in entries if e.platform})) or "none named"
            )
            raise NotFound(f"{files.what}: no image for {wanted}", hint=f"it has {show_text(has)}")
        chosen = fitting[0]
    if chosen.media_type in INDEX_TYPES:
        what = f"{files.what}: index sha256:{chosen.digest[:12]}"
        inner = _object(read_blob(files, chosen.digest), what)
        return _pick(files, _descriptors(inner.get("manifests"), what), platform, depth + 1)
    return chosen


def image_of_manifest(
    spec: str, files: Files, chosen: Descriptor, platform: Platform | None
) -> Image:
    """The image of one manifest blob. Takes over `files`."""
    what = f"{files.what}: manifest sha256:{chosen.digest[:12]}"
    if chosen.media_type and chosen.media_type not in MANIFEST_TYPES:
        raise Unsupported(
            f"{what}: is a {show_text(chosen.media_type)}, not an image manifest",
            hint="convert it with skopeo copy",
        )
    manifest = _object(read_blob(files, chosen.digest), what)
    config_of = Descriptor(manifest.get("config"), what)
    layers = _descriptors(manifest.get("layers"), what)
    config, diff_ids = parse_config(
        read_blob(files, config_of.digest), f"{files.what}: config sha256:{config_of.digest[:12]}"
    )
    check_platform(config.platform, platform, files.what)
    if len(diff_ids) != len(layers) or len(layers) > MAX_LAYERS:
        raise BadInput(
            f"{what}: {len(layers)} layers for {len(diff_ids)} diff ids "
            f"(at most {MAX_LAYERS} are allowed)"
        )
    loaded = []
    for number, (layer, diff_id) in enumerate(zip(layers, diff_ids, strict=True), 1):
        kind = layer.media_type
        if "tar" not in kind or kind.endswith("+encrypted"):
            raise Unsupported(f"{what}: layer {number} is a {show_text(kind)}, expected a tar")
        name = blob_name(layer.digest)
        if files.size(name) is None:
            raise NotFound(f"{what}: layer {number} (sha256:{layer.digest}) is missing")
        loaded.append(
            file_layer(
                files,
                name,
                f"layer {number} of {spec}",
                parse_digest(diff_id),
                layer.digest,
                layer.size,
            )
        )
    return Image(spec, config, tuple(loaded), files.close)


def file_layer(
    files: Files, name: str, what: str, diff_id: Digest, digest: Digest | None, size: int | None
) -> ImageLayer:
    """A layer that is a file of the image; `digest` and `size` where a manifest gives them."""

    def load(sink: DataSink, limits: Limits, progress: Progress | None) -> SourceTree:
        stream, close = files.open(name)
        try:
            return load_layer_tar(
                stream,
                sink,
                what,
                diff_id=diff_id,
                digest=digest,
                size=size,
                limits=limits,
                progress=progress,
            )
        finally:
            close()

    return ImageLayer(diff_id, files.size(name) or 0, load)
