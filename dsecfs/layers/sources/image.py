"""What a foreign image is to us: a configuration and layers that can be loaded, bottom first.

Owns the types, the specs people type (`open_image`) and the verified, read-ahead stream in
which every image layer is read. What must hold: a layer's bytes are checked against the
digests of its manifest (compressed) and of its configuration (uncompressed) while they
stream; `ImageLayer.load` returns only if both were right, so a caller that publishes after
it publishes only what was verified.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dsecfs.errors import BadInput, FormatError, NotFound
from dsecfs.layers.digest import Digest
from dsecfs.layers.manifest import load_json
from dsecfs.layers.platforms import Platform as Platform
from dsecfs.layers.sources.base import (
    DEFAULT_LIMITS,
    ByteStream,
    DataSink,
    Limits,
    SourceTree,
    show_text,
)
from dsecfs.layers.sources.decompress import decompressed
from dsecfs.layers.sources.streams import Counting, Progress, ReadAhead, Verified, drain
from dsecfs.layers.sources.tar import read_tar, read_tar_file

MAX_LAYERS = 512
"""Most layers of an image (docker allows 127)."""

@dataclass(frozen=True, slots=True)
class ImageConfig:
    """An image's configuration: the defaults of a process (OCI image spec, "config")."""

    platform: Platform
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    shell: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    exposed: tuple[str, ...] = ()
    """Ports as "8080/tcp"."""
    volumes: tuple[str, ...] = ()
    stop_signal: str = ""


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """One layer, not read yet."""

    diff_id: Digest | None
    """sha256 of the uncompressed tar; None for a source that is no image."""
    size: int
    """Bytes that `load` will read (compressed); 0 if unknown."""
    _load: Callable[[DataSink, Limits, Progress | None], SourceTree]

    def load(
        self,
        sink: DataSink,
        *,
        limits: Limits = DEFAULT_LIMITS,
        progress: Progress | None = None,
    ) -> SourceTree:
        """Read it: data to `sink`, the tree as result. May be called again.

        Raises Corrupt when the bytes do not have their digest, and what `read_tar` raises.
        """
        return self._load(sink, limits, progress)


@dataclass(slots=True)
class Image:
    """An open image. A context manager: closing it removes what was made to read it."""

    spec: str
    config: ImageConfig
    layers: tuple[ImageLayer, ...]
    _close: Callable[[], None] = lambda: None

    def close(self) -> None:
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """How `docker://` is reached."""

    authfile: Path | None = None
    """Credentials in the form of containers-auth.json(5); None: skopeo's own search."""
    tls_verify: bool = True
    timeout_s: float = 3600.0
    scratch: Path | None = None
    """Where compressed layers lie until the image is closed; None: the temporary directory."""


def open_image(spec: str, *, platform: str = "", registry: RegistryOptions | None = None) -> Image:
    """Open an image or another source by its spec.

        oci:DIR[:TAG]  oci-archive:FILE[:TAG]  docker-archive:FILE[:NAME]  docker://REFERENCE
        tar:FILE  dir:DIR  upper:DIR

    `platform` ("linux/arm64") picks from a multi-platform image; "" means this machine's, or
    the only one there is. Raises BadInput for a spec or image that is not valid, NotFound,
    Unsupported, Corrupt, DeadlineExceeded, and OSError for the user's own path.
    """
    wanted = Platform.parse(platform) if platform else None
    kind, sep, rest = spec.partition(":")
    if not sep or not rest:
        raise BadInput(
            f"not an image: {spec[:200]!r}",
            hint="expected oci:DIR, oci-archive:FILE, docker-archive:FILE or docker://NAME; "
            "a tar archive or a directory is a layer (dsec layer publish)",
        )
    # Imported here: each of them imports this module.
    if kind in ("oci", "oci-archive"):
        from dsecfs.layers.sources.oci import open_oci

        return open_oci(spec, rest, archive=kind == "oci-archive", platform=wanted)
    if kind == "docker-archive":
        from dsecfs.layers.sources.docker import open_docker_archive

        return open_docker_archive(spec, rest, platform=wanted)
    if kind == "docker":
        from dsecfs.layers.sources.registry import open_registry

        return open_registry(spec, platform=wanted, options=registry or RegistryOptions())
    return _open_plain(spec, kind, rest, wanted or Platform.here())


def _open_plain(spec: str, kind: str, path: str, platform: Platform) -> Image:
    """Sources that are one tree without a configuration."""

    if kind not in ("tar", "dir", "upper"):
        raise BadInput(
            f"unknown kind of source {kind[:40]!r}",
            hint="expected oci, oci-archive, docker-archive, docker, tar, dir or upper",
        )
    size = 0
    if path != "-" or kind != "tar":
        try:
            st = os.stat(path)
        except FileNotFoundError:
            raise NotFound(f"{show_text(path)}: no such file or directory") from None
        if stat.S_ISDIR(st.st_mode) != (kind != "tar"):
            raise BadInput(f"{show_text(path)}: not a {'file' if kind == 'tar' else 'directory'}")
        size = st.st_size if kind == "tar" else 0

    def load(sink: DataSink, limits: Limits, progress: Progress | None) -> SourceTree:
        if kind == "tar":
            return read_tar_file(path, sink, limits=limits, progress=progress)
        from dsecfs.layers.sources.directory import read_directory
        from dsecfs.layers.sources.upper import read_upper

        if kind == "dir":
            return read_directory(path, sink, limits=limits, progress=progress)
        return read_upper(path, sink, limits=limits, progress=progress)

    return Image(spec, ImageConfig(platform), (ImageLayer(None, size, load),))


def parse_config(data: bytes, what: str) -> tuple[ImageConfig, list[str]]:
    """An image configuration (OCI or docker) and its diff ids as they stand there.

    Unknown keys are ignored, it is not our format; known ones must have the right type and
    be text that a process can get. Raises FormatError.
    """
    top = load_json(data, what)
    if not isinstance(top, dict):
        raise FormatError(f"{what}: expected a JSON object")

    def check(text: str) -> str:
        # JSON can hold NULs and lone surrogates; no argument or variable of a process can.
        if "\0" in text or (not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text)):
            raise FormatError(f"{what}: not usable as text: {show_text(text)!r}")
        return text

    def take(where: dict[str, Any], key: str, kind: type, default: Any) -> Any:
        value = where.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise FormatError(f"{what}: {key!r} has the wrong type")
        return check(value) if isinstance(value, str) else value

    def strings(where: dict[str, Any], key: str) -> tuple[str, ...]:
        value = take(where, key, list, [])
        if not all(isinstance(v, str) for v in value):
            raise FormatError(f"{what}: {key!r} must be a list of strings")
        return tuple(map(check, value))

    config = take(top, "config", dict, {})
    env: dict[str, str] = {}
    for item in strings(config, "Env"):
        name, _, value = item.partition("=")
        if name:
            env[name] = value
    labels = take(config, "Labels", dict, {})
    if not all(isinstance(v, str) for v in labels.values()):
        raise FormatError(f"{what}: 'Labels' must map names to strings")
    rootfs = take(top, "rootfs", dict, {})
    parsed = ImageConfig(
        Platform(
            take(top, "os", str, "linux") or "linux",
            take(top, "architecture", str, ""),
            take(top, "variant", str, ""),
        ),
        env,
        take(config, "WorkingDir", str, ""),
        take(config, "User", str, ""),
        strings(config, "Entrypoint"),
        strings(config, "Cmd"),
        strings(config, "Shell"),
        {check(k): check(v) for k, v in labels.items()},
        tuple(sorted(map(check, take(config, "ExposedPorts", dict, {})))),
        tuple(sorted(map(check, take(config, "Volumes", dict, {})))),
        take(config, "StopSignal", str, ""),
    )
    return parsed, list(strings(rootfs, "diff_ids"))


def load_layer_tar(
    raw: ByteStream,
    sink: DataSink,
    what: str,
    *,
    diff_id: Digest,
    digest: Digest | None,
    size: int | None,
    limits: Limits,
    progress: Progress | None,
) -> SourceTree:
    """Read one layer's tar, verified: `digest` and `size` of what is stored, `diff_id` of
    what it becomes. Raises Corrupt, and what `read_tar` raises."""
    stored: ByteStream = raw
    if digest is not None:
        stored = Verified(raw, digest, what, size, progress)
    elif progress is not None:
        stored = Counting(raw, progress)
    inflated = Verified(decompressed(stored, limits, what), diff_id, f"{what} (uncompressed)")
    ahead = ReadAhead(inflated)
    try:
        tree = read_tar(ahead, sink, what, whiteouts=True, limits=limits)
        drain(ahead)
    finally:
        ahead.close()
    drain(stored)
    return tree


def check_platform(found: Platform, wanted: Platform | None, what: str) -> None:
    """Raise BadInput if an image is for another platform than was asked for."""
    if wanted is not None and not wanted.accepts(found):
        raise BadInput(
            f"{what}: it is for {show_text(str(found))}, not for {wanted}",
            hint=f"leave the platform out to take it as it is, or find one for {wanted}",
        )
