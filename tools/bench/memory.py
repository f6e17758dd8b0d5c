"""Peak memory of publishing a 10 GB layer, and of the FUSE daemon after it served 1 GiB.

The layer is a tar that is made while it is read (through a pipe, never on a disk): 175,000
files of 3 KB to 150 MB, no two alike, that compress to a half. The publisher is a process of its
own. The daemon serves a blob of which nothing is here yet: every byte is fetched from a
directory store, checked, cached and given to the reader. Its memory is that of all its
processes, pages they share counted once (PSS); the peak is the worker's alone.
"""

from __future__ import annotations

import io
import random
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import IO

from tools.bench.files import make_files, read_large
from tools.bench.report import Result, record
from tools.bench.stage import Stage, parser, stage

LAYER_BYTES = 10 * 10**9
SERVED_BYTES = 1 << 30
PUBLISH_GOAL_MB = 300
DAEMON_GOAL_MB = 150
LIMIT_S = 400
SHARES = (
    (3_000, 0.03), (12_000, 0.06), (60_000, 0.12), (400_000, 0.20), (3_000_000, 0.18),
    (20_000_000, 0.16), (150_000_000, 0.25),
)  # fmt: skip
"""(bytes of a file, share of the layer)."""

_PUBLISH = """\
import resource, sys
from dsecfs.layers.publish import Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.store.directory import DirectoryStore
store = DirectoryStore(sys.argv[1], create=True)
with open_image("tar:-") as image:
    done = publish_source(store, image.layers[0], None, Meta("base", "linux/amd64"))
manifest = done.head.manifest
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(manifest.inodes, manifest.file_bytes, done.uploaded, peak)
"""


def _half_random(pages: int) -> bytes:
    source = random.Random(0)
    return b"".join(source.randbytes(2048) + bytes(2048) for _ in range(pages))


class _Pattern(io.RawIOBase):
    """Data of members: pages that are half random, half zeros, each piece with its own stamp."""

    _size = 4096 * 4096
    _pages = _half_random(4096) * 2
    _stamp = 0

    def __init__(self) -> None:
        # Somewhere else each time: a codec must not find the file before it.
        self._at = self._stamp * 97 * 4096 % self._size

    def read(self, n: int = -1) -> bytes:
        """As much as is asked for: tarfile wants 16 KiB at a time, less than a chunk."""
        _Pattern._stamp += 1
        data = self._stamp.to_bytes(16, "little") + self._pages[self._at + 16 : self._at + n]
        self._at = (self._at + n) % self._size
        return data[:n]


def write_layer(out: IO[bytes], size: int) -> int:
    """A tar of about `size` bytes of data; how many files it has."""
    number = 0
    with tarfile.open(fileobj=out, mode="w|", bufsize=1 << 20) as tar:
        for length, share in SHARES:
            for _ in range(max(1, round(size * share / length))):
                member = tarfile.TarInfo(f"dir{number // 200:04d}/file{number:06d}")
                member.size = length
                tar.addfile(member, _Pattern())
                number += 1
    return number


def _publish(s: Stage, size: int) -> dict[str, float]:
    """Publish a layer of `size` bytes from a pipe."""
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", _PUBLISH, s.top / "large"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            with process.stdin as pipe:
                files = write_layer(pipe, size)
            said = process.stdout.read()
            if process.wait(LIMIT_S):
                raise SystemExit("the publisher failed")
        finally:
            process.kill()
    took = time.monotonic() - start
    inodes, data, uploaded, peak = map(int, said.split())
    if inodes <= files:
        raise SystemExit(f"{files} files were written, {inodes} inodes published")
    return {
        "publish_peak_mb": peak * 1024 / 1e6,
        "files": files,
        "layer_bytes": data,
        "stored_bytes": uploaded,
        "publish_s": took,
    }


def _field(path: Path, name: str) -> int:
    """A field of a file in /proc that counts kB, in bytes."""
    found = re.search(rf"^{name}:\s*(\d+) kB", path.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _serve(s: Stage, size: int) -> dict[str, float]:
    """Have the daemon serve a file of `size` bytes, twice, from a store."""
    native = s.top / "native"
    native.mkdir()
    make_files(native, small=100, large_bytes=size)
    layers = s.local([s.publish(f"dir:{native}").digest])
    client = s.start()
    top = s.tree("large", layers)
    first = read_large(f"{top}/large")
    status = client.status()
    family = {int(status[role]) for role in ("worker", "active", "standby")}
    return {
        "served_bytes": size,
        "served_mb_s": first,
        "worker_peak_mb": _field(Path(f"/proc/{status['worker']}/status"), "VmHWM") / 1e6,
        "daemon_mb": sum(_field(Path(f"/proc/{p}/smaps_rollup"), "Pss") for p in family) / 1e6,
    }


def main() -> None:
    """Measure and record."""
    options = parser(__doc__, repeat=1)
    options.add_argument(
        "--bytes", type=int, default=LAYER_BYTES, help="size of the layer (default %(default)s)"
    )
    size = options.parse_args().bytes
    with stage("memory") as s:
        figures = _serve(s, SERVED_BYTES)
    with stage("memory") as s:
        figures |= _publish(s, size)
    publish = figures["publish_peak_mb"]
    daemon = max(figures["worker_peak_mb"], figures["daemon_mb"])
    record(
        Result(
            "memory",
            f"peak memory of publishing a {figures['layer_bytes'] / 1e9:.0f} GB layer; of the FUSE "
            f"daemon serving {SERVED_BYTES >> 30} GiB",
            "—",
            f"≤{PUBLISH_GOAL_MB} MB; ≤{DAEMON_GOAL_MB} MB",
            f"{publish:.0f} MB; {daemon:.0f} MB",
            publish <= PUBLISH_GOAL_MB and daemon <= DAEMON_GOAL_MB,
            dict(figures),
        )
    )


if __name__ == "__main__":
    main()
