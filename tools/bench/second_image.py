"""Import a second image that shares all but its top layer with a first one.

The first is the 935 MB image of the cold start benchmark (two layers); the second adds one
layer of APP_FILES files. Both are OCI layouts on disk, imported into one empty directory
store, one after the other, in one process that has imported its libraries.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

from dsecfs.layers.image import import_image
from dsecfs.layers.names import Name
from dsecfs.layers.sources.image import open_image
from dsecfs.store.directory import DirectoryStore
from tools.bench.images import science_image
from tools.bench.report import Result, record, spread
from tools.bench.stage import cache_directory, parser, stage

APP_FILES = 200
APP_FILE_BYTES = 30_000


def _put(blobs: Path, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def extended(layout: Path, target: Path) -> int:
    """A copy (hard links) of an OCI layout with one more layer; the layer's size in bytes."""
    shutil.copytree(layout, target, copy_function=os.link)
    blobs = target / "blobs" / "sha256"
    source = random.Random(1)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for number in range(APP_FILES):
            member = tarfile.TarInfo(f"opt/app/file{number:03d}")
            member.size = APP_FILE_BYTES
            tar.addfile(member, io.BytesIO(source.randbytes(APP_FILE_BYTES)))
    index = json.loads((target / "index.json").read_text())
    entry = index["manifests"][0]
    manifest = json.loads((blobs / entry["digest"].removeprefix("sha256:")).read_text())
    config = json.loads(
        (blobs / manifest["config"]["digest"].removeprefix("sha256:")).read_text()
    )
    layer = _put(blobs, raw.getvalue())
    manifest["layers"].append({"mediaType": "application/vnd.oci.image.layer.v1.tar", **layer})
    config["rootfs"]["diff_ids"].append(layer["digest"])
    manifest["config"].update(_put(blobs, json.dumps(config).encode()))
    entry.update(_put(blobs, json.dumps(manifest).encode()))
    (target / "index.json").unlink()  # a hard link: the original stays as it is
    (target / "index.json").write_text(json.dumps(index))
    return int(layer["size"])


def _import(store: DirectoryStore, layout: Path, name: str) -> float:
    start = time.monotonic()
    with open_image(f"oci:{layout}:latest") as image:
        import_image(store, image, Name("env", name, "1"))
    return time.monotonic() - start


def _contents(store: DirectoryStore) -> dict[str, int]:
    return {info.key: info.size for info in store.list("")}


def main() -> None:
    """Measure and record."""
    options = parser(__doc__, repeat=3).parse_args()
    first_image = science_image(cache_directory())
    first_s, second_s = [], []
    with stage("second-image") as s:
        second_image = s.top / "oci-second"
        new = extended(first_image, second_image)
        for number in range(options.repeat):
            place = s.top / f"store-{number}"
            store = DirectoryStore(place, create=True)
            first_s.append(_import(store, first_image, "first"))
            before = _contents(store)
            second_s.append(_import(store, second_image, "second"))
            after = _contents(store)
            store.close()
            shutil.rmtree(place)
    added = {key: size for key, size in after.items() if key not in before}
    data = sum(size for key, size in added.items() if key.startswith("objects/"))
    metadata = sum(added.values()) - data
    first_bytes = sum(before.values())
    ratio = spread(first_s)["median"] / spread(second_s)["median"]
    share = sum(added.values()) / first_bytes
    record(
        Result(
            "second_image",
            "import of a second image sharing all but one layer",
            "the first image",
            "uploads only what is new",
            f"{sum(added.values()) / 1e6:.1f} MB of {first_bytes / 1e6:.0f} MB "
            f"({share:.1%}), {ratio:.0f}× as fast",
            data <= new and ratio > 1,
            {
                "first_s": spread(first_s),
                "second_s": spread(second_s),
                "first_bytes": first_bytes,
                "new_layer_bytes": new,
                "second_data_bytes": data,
                "second_metadata_bytes": metadata,
            },
            note="what is added besides the new layer's data is metadata: the image layer's own "
            "head, the merged metadata image of the whole base, and names",
        )
    )


if __name__ == "__main__":
    main()
