"""FUSE mode against ratarmount on the same two layers: stat, small files, sequential read.

Two tars, the upper one replacing some files of the lower: ours as two layers merged by the FUSE
daemon, the peer's as a union mount of both archives. "Cold" is a new mount whose own data (our
chunk cache, the peer's tars and index) is in the page cache, so that no disk is measured; "warm"
is a second pass over the same mount. Cold stat is measured in two ways: listing directories with
the attributes of all that is in them, and by paths that are known.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from dsecfs.fuse.config import tree_config
from dsecfs.fuse.daemon import start_daemon, stop_daemon
from tools.bench.files import make_files, paths, read_all, read_large, scan_all, stat_all
from tools.bench.images import run
from tools.bench.report import Result, record, spread
from tools.bench.stage import Stage, cache_directory, parser, stage

SMALL_FILES = 4_000
REPLACED = 500
LARGE_BYTES = 256 << 20
LIMIT_S = 60
COLUMNS = ("scan_per_s", "stat_per_s", "small_files_per_s", "sequential_mb_s")


def peer_program(cache: Path) -> Path:
    """ratarmount, installed into a virtual environment of its own."""
    place = cache / "ratarmount"
    program = place / "bin" / "ratarmount"
    if not program.exists():
        run(sys.executable, "-m", "venv", place)
        run(place / "bin" / "python", "-m", "pip", "install", "--quiet", "ratarmount")
    return program


def _tar(top: Path, target: Path) -> Path:
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(top, arcname=".")
    return target


def make_layers(top: Path) -> tuple[list[Path], list[str]]:
    """The tars, bottom first, and the names of the small files."""
    lower, upper = top / "lower", top / "upper"
    names = make_files(lower, small=SMALL_FILES, large_bytes=LARGE_BYTES)
    for name in names[:REPLACED]:
        (upper / name).parent.mkdir(parents=True, exist_ok=True)
        (upper / name).write_bytes((lower / name).read_bytes()[::-1])
    return [_tar(lower, top / "lower.tar"), _tar(upper, top / "upper.tar")], names


@contextlib.contextmanager
def _ours(s: Stage, tree: str) -> Iterator[Path]:
    target = s.top / "mounted"
    target.mkdir(exist_ok=True)
    config = tree_config(s.dirs, f"file:{s.top}/store", tree, target)
    start_daemon(config)
    try:
        yield target
    finally:
        stop_daemon(config, mode="force")


@contextlib.contextmanager
def _peer(program: Path, tars: list[Path], target: Path) -> Iterator[Path]:
    target.mkdir(exist_ok=True)
    log = target.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "-f", *tars, target], stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not os.path.ismount(target):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"ratarmount: {log.read_text(errors='replace')[-1000:]}")
            time.sleep(0.02)
        yield target
    finally:
        subprocess.run(["umount", "-l", target], check=False, capture_output=True, timeout=LIMIT_S)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(LIMIT_S)


def _cold_paths(top: Path, names: list[str]) -> dict[str, float]:
    """What needs a mount of its own."""
    return {"cold_stat_per_s": stat_all(paths(top, names))}


def _others(top: Path, names: list[str]) -> dict[str, float]:
    """All other columns of one mount, cold and warm."""
    small = paths(top, names)
    found = {}
    for state in ("cold", "warm"):
        found[f"{state}_scan_per_s"] = scan_all(str(top))
        if state == "warm":
            found["warm_stat_per_s"] = stat_all(small)
        found[f"{state}_small_files_per_s"] = read_all(small)
        found[f"{state}_sequential_mb_s"] = read_large(f"{top}/large")
    return found


def main() -> None:
    """Measure and record."""
    options = parser(__doc__, repeat=5).parse_args()
    program = peer_program(cache_directory())
    measured: dict[str, dict[str, list[float]]] = {"ours": {}, "ratarmount": {}}
    with stage("fuse-mode") as s:
        tars, names = make_layers(s.top)
        layers = s.local([s.publish(f"tar:{tar}").digest for tar in tars])
        s.start()
        s.fill(layers)
        s.stop()
        s.tree("both", layers)
        mounts: dict[str, Callable[[], AbstractContextManager[Path]]] = {
            "ours": lambda: _ours(s, "both"),
            "ratarmount": lambda: _peer(program, tars, s.top / "ratarmounted"),
        }
        replaced = (s.top / "upper" / names[0]).read_bytes()
        for number in range(-1, options.repeat):
            for measure in (_cold_paths, _others):
                for side in sorted(mounts, reverse=bool(number % 2)):
                    with mounts[side]() as top:
                        values = measure(top, names)
                        if (top / names[0]).read_bytes() != replaced:
                            raise SystemExit(f"{side}: the upper layer does not win")
                    for column, value in values.items():
                        if number >= 0:
                            measured[side].setdefault(column, []).append(value)
    figures = {
        side: {column: spread(values) for column, values in columns.items()}
        for side, columns in measured.items()
    }
    # The best round of each: whatever else runs on a machine only makes a round slower.
    ratios = {
        column: figures["ours"][column]["max"] / figures["ratarmount"][column]["max"]
        for column in measured["ours"]
    }

    def show(state: str) -> str:
        return " / ".join(f"{ratios[f'{state}_{column}']:.1f}×" for column in COLUMNS)

    record(
        Result(
            "fuse_mode",
            "FUSE mode: listing with stat, stat by path, small files, sequential",
            "ratarmount on the same layers",
            "faster in every column",
            f"cold {show('cold')}; warm {show('warm')}",
            min(ratios.values()) > 1,
            {**figures, "ratios": ratios},
            note="columns in this order; the best round of each side",
        )
    )


if __name__ == "__main__":
    main()
