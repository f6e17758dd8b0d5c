"""Warm run of `true` in a warm process, against crun alone on an unpacked root.

Both sides run the very same config.json. Ours is everything a run needs: mounts from layers,
shifted owners, an upper, the overlay, crun, and removing all of it. The peer is `crun run` in the
same namespace on an ext4 directory whose owners were shifted once, and nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from dsec_runtime.run import Runner, RunSpec
from dsecfs.layers.local import LocalLayer
from tools.bench.images import base_tar
from tools.bench.report import Result, record, spread
from tools.bench.stage import cache_directory, parser, stage

PROGRAM = ("/bin/true",)
LIMIT_S = 30.0
WARM_UP = 5


def ours(runner: Runner, layer: LocalLayer) -> float:
    """Seconds that one run takes, clean-up included."""
    start = time.monotonic()
    result = runner.run(RunSpec((layer,), PROGRAM, timeout_s=LIMIT_S))
    if result.exit_code:
        raise SystemExit(f"true ended with {result.exit_code}")
    return time.monotonic() - start


class Peer:
    """crun on an unpacked root, with the configuration of one of our runs."""

    def __init__(self, runner: Runner, layer: LocalLayer, place: Path, tar: Path) -> None:
        self._runner = runner
        self._place = place
        self._number = 0
        running = runner.start(RunSpec((layer,), PROGRAM, timeout_s=LIMIT_S))
        bundle = runner.sandboxes.place(running.sandbox)
        config = (bundle / "config.json").read_bytes()
        running.wait()
        place.mkdir(parents=True)
        (place / "config.json").write_bytes(config)
        root = place / "rootfs"
        root.mkdir()
        subprocess.run(["tar", "-xf", tar, "-C", root], check=True, timeout=120)
        start = int(config.split(b'"hostID":')[1].split(b",")[0].strip(b" }"))
        for directory, names, files in os.walk(root):
            for name in (*names, *files):
                path = os.path.join(directory, name)
                s = os.lstat(path)
                os.lchown(path, s.st_uid + start, s.st_gid + start)
        os.chown(root, start, start)

    def run(self) -> float:
        """Seconds that `crun run` takes."""
        self._number += 1
        command = self._runner.sandboxes.command(
            "run", "--bundle", str(self._place), f"peer{self._number}"
        )
        start = time.monotonic()
        done = self._runner.in_namespace().run(command, timeout_s=LIMIT_S)
        if done.returncode:
            raise SystemExit(f"crun ended with {done.returncode}: {done.stderr!r}")
        return time.monotonic() - start


def main() -> None:
    """Measure and record."""
    given = parser(__doc__, repeat=60).parse_args()
    tar = base_tar(cache_directory())
    with stage("warm-run") as s:
        layer = s.local([s.publish(f"tar:{tar}").digest])[0]
        s.start()
        s.fill([layer])
        with Runner(s.dirs) as runner:
            runner.recover()
            runner.prepare()
            peer = Peer(runner, layer, s.top / "peer", tar)
            for _ in range(WARM_UP):
                ours(runner, layer)
                peer.run()
            mine, theirs = [], []
            for _ in range(given.repeat):
                mine.append(ours(runner, layer))
                theirs.append(peer.run())
            shutil.rmtree(s.top / "peer")
    ratios = sorted(a / b for a, b in zip(mine, theirs, strict=True))
    ratio = ratios[len(ratios) // 2]
    record(
        Result(
            "warm_run",
            "warm run of `true` in a warm process, from mounts to clean-up",
            "`crun run` with the same config.json on an unpacked ext4 root",
            "≤1.5×",
            f"{ratio:.2f}× ({spread(mine)['median'] * 1e3:.0f} ms)",
            ratio <= 1.5,
            {"ours_s": spread(mine), "crun_s": spread(theirs), "ratio": spread(ratios)},
        )
    )


if __name__ == "__main__":
    main()
