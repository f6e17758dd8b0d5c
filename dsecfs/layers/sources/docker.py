"""Source: an archive that `docker save` or `podman save` wrote.

Two shapes: the old one (manifest.json, one directory per layer with layer.tar) and the one
of docker ≥25, which is an OCI layout with a manifest.json beside it. manifest.json names
configuration and layers in both (moby, image/tarexport).
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from dsecfs.errors import BadInput, Corrupt, FormatError, NotFound
from dsecfs.layers.digest import Digest, parse_digest
from dsecfs.layers.manifest import load_json
from dsecfs.layers.sources.image import (
    MAX_LAYERS,
    Image,
    Platform,
    check_platform,
    parse_config,
)
from dsecfs.layers.sources.oci import (
    ArchiveFiles,
    file_layer,
    image_of_layout,
    read_whole,
    split_reference,
)

_NAMED_BY_DIGEST = re.compile(r"(?:blobs/sha256/)?([0-9a-f]{64})(?:\.json|\.tar)?\Z")


def open_docker_archive(spec: str, rest: str, *, platform: Platform | None) -> Image:
    """Open `FILE[:NAME]`; see `image.open_image`."""
    path, name = split_reference(rest)
    files = ArchiveFiles(path)
    try:
        if files.size("manifest.json") is None:
            if files.size("index.json") is None:
                raise BadInput(
                    f"{files.what}: neither manifest.json nor index.json in it",
                    hint="expected what docker save writes",
                )
            return image_of_layout(spec, files, name, platform)
        return _saved(spec, files, name, platform)
    except BaseException:
        files.close()
        raise


def _saved(spec: str, files: ArchiveFiles, name: str, platform: Platform | None) -> Image:
    what = f"{files.what}: manifest.json"
    images = load_json(read_whole(files, "manifest.json"), what)
    if not isinstance(images, list) or not all(isinstance(i, dict) for i in images):
        raise FormatError(f"{what}: expected a list of JSON objects")
    entry = _choose(images, name, files.what)
    config_name, layers = entry.get("Config"), entry.get("Layers") or []
    if not isinstance(config_name, str) or not isinstance(layers, list):
        raise FormatError(f"{what}: 'Config' or 'Layers' is missing")
    if not all(isinstance(layer, str) for layer in layers):
        raise FormatError(f"{what}: 'Layers' must be a list of strings")
    data = read_whole(files, config_name)
    named = _digest_in(config_name)
    if named is not None and hashlib.sha256(data).hexdigest() != named:
        raise Corrupt(f"{files.what}: config sha256:{named[:12]} has another content")
    config, diff_ids = parse_config(data, f"{files.what}: config")
    if (
        platform is not None
        and not platform.accepts(config.platform)
        and files.size("index.json") is not None
    ):
        # manifest.json lists one platform only; the layout beside it may have more.
        return image_of_layout(spec, files, name, platform)
    check_platform(config.platform, platform, files.what)
    if len(diff_ids) != len(layers) or len(layers) > MAX_LAYERS:
        raise BadInput(
            f"{what}: {len(layers)} layers for {len(diff_ids)} diff ids "
            f"(at most {MAX_LAYERS} are allowed)"
        )
    loaded = []
    for number, (layer, diff_id) in enumerate(zip(layers, diff_ids, strict=True), 1):
        size = files.size(layer)
        if size is None:
            raise NotFound(f"{files.what}: layer {number} is missing", hint="save the image again")
        digest = _digest_in(layer) if layer.startswith("blobs/") else None
        loaded.append(
            file_layer(
                files, layer, f"layer {number} of {spec}", parse_digest(diff_id), digest, None
            )
        )
    return Image(spec, config, tuple(loaded), files.close)


def _digest_in(name: str) -> Digest | None:
    """The digest a file of a saved image is named by, if it is."""
    match = _NAMED_BY_DIGEST.match(name)
    return Digest(match[1]) if match else None


def _choose(images: list[dict[str, Any]], name: str, what: str) -> dict[str, Any]:
    """The image called `name` ("": the only one)."""

    def tags(image: dict[str, Any]) -> list[str]:
        return [t for t in image.get("RepoTags") or () if isinstance(t, str)]

    def full(tag: str) -> str:
        tag = tag if ":" in tag.rsplit("/", 1)[-1] else f"{tag}:latest"
        return tag.removeprefix("docker.io/").removeprefix("library/")

    known = ", ".join(sorted(t[:60] for i in images for t in tags(i))[:10]) or "none by name"
    if name:
        found = [i for i in images if full(name) in map(full, tags(i))]
        if not found:
            raise NotFound(f"{what}: it has no image {name[:100]!r}", hint=f"it has {known}")
        return found[0]
    if len(images) != 1:
        raise BadInput(f"{what}: it holds {len(images)} images", hint=f"name one of {known}")
    return images[0]
