"""Cold small files through FUSE, against the same EROFS image on a local file.

All chunks of the layer but one are in the node's cache, so the FUSE daemon serves every read
(the cache's files are in the page cache, no disk and no store is measured). "Cold" is a new mount:
EROFS has nothing cached. The peer's blob is a plain file, also in the page cache. Beside it: the
layer with every chunk there, which the node then mounts without FUSE ("direct use").
"""

from __future__ import annotations

from pathlib import Path

from dsecfs.cache import ChunkCache
from dsecfs.kernel.syscalls import umount
from dsecfs.layers.local import LocalLayer
from dsecfs.mount.erofs import mount_erofs
from tools.bench.files import make_files, paths, read_all
from tools.bench.report import Result, record, spread
from tools.bench.stage import Stage, alternate, parser, stage

SMALL_FILES = 4_000
GOAL = 0.15
TAIL_BYTES = 8 << 20
"""The large file at the blob's end, whose last chunk stays away."""


def _ours(s: Stage, layers: list[LocalLayer], names: list[str]) -> float:
    top = s.mount(layers, s.top / "ours")
    try:
        return read_all(paths(top, names))
    finally:
        s.unmount(top)


def _local(layer: LocalLayer, blobs: list[Path], top: Path, names: list[str]) -> float:
    mount_erofs(layer.meta_path, blobs, top, directio=False)
    try:
        return read_all(paths(top, names))
    finally:
        umount(top)


def main() -> None:
    """Measure and record."""
    options = parser(__doc__, repeat=9).parse_args()
    with stage("cold-small") as s:
        native = s.top / "native"
        names = make_files(native, small=SMALL_FILES, large_bytes=TAIL_BYTES)
        # Directories come after files of the top, so that the tail is the last of the blob.
        (native / "zz").mkdir()
        (native / "large").rename(native / "zz" / "large")
        layers = s.local([s.publish(f"dir:{native}").digest])
        s.start()
        s.fill(layers)
        copies = [s.top / blob.digest for blob in layers[0].blobs]
        for blob, copy in zip(layers[0].blobs, copies, strict=True):
            copy.write_bytes((s.dirs.fs / "blobs" / blob.digest).read_bytes())
        s.stop()
        cache = ChunkCache(s.dirs, s.store, max_bytes=1 << 40)
        cache.clear()  # the copy was read through it; now without the last chunk
        cache.close()
        s.start()
        s.fill(layers, but_last=True)
        top = s.top / "local"
        top.mkdir()

        def local() -> float:
            return _local(layers[0], copies, top, names)

        served = alternate(
            options.repeat, {"ours": lambda: _ours(s, layers, names), "local": local}
        )
        s.fill(layers)
        direct = alternate(
            options.repeat, {"ours": lambda: _ours(s, layers, names), "local": local}
        )
    us, peer = spread(served["ours"]), spread(served["local"])
    # The best round of each: whatever else runs on a machine only makes a round slower.
    ratio = us["max"] / peer["max"]
    ratio_direct = max(direct["ours"]) / max(direct["local"])
    record(
        Result(
            "cold_small",
            "cold small files, all chunks but one in the cache (FUSE serves)",
            "EROFS on a local file",
            f"≥{GOAL}×",
            f"{ratio:.2f}× ({us['max']:,.0f} files/s); direct use {ratio_direct:.2f}×",
            ratio >= GOAL,
            {
                "fuse_files_per_s": us,
                "local_files_per_s": peer,
                "direct_files_per_s": spread(direct["ours"]),
                "local_again_files_per_s": spread(direct["local"]),
            },
            note="the best round of each side; ours have the overlay of a sandbox on top",
        )
    )


if __name__ == "__main__":
    main()
