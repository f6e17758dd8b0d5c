"""Small OCI layouts made by hand: tar layers with exactly the entries a test wants."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Entry = tuple[str, bytes | None]
"""A file with its content, or (content None) what the name says: directory if it ends with
"/", symbolic link if it is "name -> target", hard link if it is "name => target"."""


def layer_tar(entries: Sequence[Entry], mtime: int = 1_700_000_000) -> bytes:
    """An uncompressed tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in entries:
            info = tarfile.TarInfo(name)
            info.mtime = mtime
            info.mode = 0o644
            if data is not None:
                info.size = len(data)
            elif " -> " in name:
                info.name, info.linkname = name.split(" -> ")
                info.type, info.mode = tarfile.SYMTYPE, 0o777
            elif " => " in name:
                info.name, info.linkname = name.split(" => ")
                info.type = tarfile.LNKTYPE
            else:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info, io.BytesIO(data) if data is not None else None)
    return out.getvalue()


def oci_layout(
    path: Path,
    layers: Sequence[bytes],
    config: Mapping[str, Any] | None = None,
    architecture: str = "amd64",
) -> Path:
    """A layout directory with one image of these uncompressed layer tars, gzip inside."""
    blobs = path / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, media: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

    kind = "application/vnd.oci.image."
    stored = [put(gzip.compress(t, 1, mtime=0), f"{kind}layer.v1.tar+gzip") for t in layers]
    made = {
        "os": "linux",
        "architecture": architecture,
        "config": dict(config or {}),
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(t).hexdigest()}" for t in layers],
        },
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}manifest.v1+json",
        "config": put(json.dumps(made).encode(), f"{kind}config.v1+json"),
        "layers": stored,
    }
    entry = put(json.dumps(manifest).encode(), f"{kind}manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return path
