"""Publish a Debian root of some 300 MB to a directory store, against unpack and mkfs.erofs.

Both sides run as processes of their own, start of the interpreter included, and begin with
the archive in the page cache. Ours is on disk when it ends (every object is fsynced);
the peer's side is measured as it comes, without a sync, which favours it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.bench.images import base_tar
from tools.bench.report import Result, record, spread
from tools.bench.stage import alternate, cache_directory, parser, stage

LIMIT_S = 120
GOAL_MB_S = 100

_OURS = """\
import sys
from dsecfs.layers.publish import Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.store.directory import DirectoryStore
store = DirectoryStore(sys.argv[2], create=True)
with open_image("tar:" + sys.argv[1]) as image:
    publish_source(store, image.layers[0], None, Meta("base", "linux/amd64"))
"""


def _run(*argv: str | Path) -> None:
    done = subprocess.run(
        [str(a) for a in argv], capture_output=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{argv[0]}: {done.stderr.decode(errors='replace')[-2000:]}")


def _size(top: Path) -> int:
    return sum(p.stat().st_size for p in top.rglob("*") if p.is_file())


def main() -> None:
    """Measure and record."""
    options = parser(__doc__, repeat=5).parse_args()
    tar = base_tar(cache_directory())
    megabytes = tar.stat().st_size / 1e6
    sizes: dict[str, int] = {}
    with stage("publish") as s:

        def ours() -> float:
            place = s.top / "ours"
            shutil.rmtree(place, ignore_errors=True)
            os.sync()
            start = time.monotonic()
            _run(sys.executable, "-c", _OURS, tar, place)
            took = time.monotonic() - start
            sizes["ours"] = _size(place)
            return took

        def peer() -> float:
            place, image = s.top / "root", s.top / "root.erofs"
            shutil.rmtree(place, ignore_errors=True)
            image.unlink(missing_ok=True)
            place.mkdir()
            os.sync()
            start = time.monotonic()
            _run("tar", "-xf", tar, "-C", place)
            _run("mkfs.erofs", "-zlz4", "-d0", image, place)
            took = time.monotonic() - start
            sizes["peer"] = image.stat().st_size
            return took

        times = alternate(options.repeat, {"ours": ours, "peer": peer})
    us, them = spread(times["ours"]), spread(times["peer"])
    ratio = them["median"] / us["median"]
    speed = megabytes / us["median"]
    record(
        Result(
            "publish",
            f"publish of a {megabytes:.0f} MB tar to a directory store",
            "`tar -x` + `mkfs.erofs -zlz4`",
            f"faster; ≥{GOAL_MB_S} MB/s",
            f"{ratio:.2f}× as fast, {speed:.0f} MB/s",
            ratio > 1 and speed >= GOAL_MB_S,
            {
                "tar_mb": megabytes,
                "ours_s": us,
                "peer_s": them,
                "ours_bytes": sizes["ours"],
                "peer_bytes": sizes["peer"],
            },
        )
    )


if __name__ == "__main__":
    main()
