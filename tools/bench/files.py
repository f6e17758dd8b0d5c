"""The files that I/O benchmarks read, and the loops that read them.

Small files have 0.6 to 20 KB, like the sources and data of Python packages. The loops are the same
for every file system that is compared, so what the interpreter costs is on both sides; it
draws ratios towards 1. What is warm waits for nothing, so it may be measured in CPU time of the
thread (`time.thread_time`), which other programs on the machine hardly disturb.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

DIRECTORIES = 100
SMALL_BYTES = (600, 20_000)
PIECE = 1 << 20

Clock = Callable[[], float]


def make_files(top: Path, *, small: int, large_bytes: int, seed: int = 7) -> list[str]:
    """`small` files in directories, and one large file `large`; relative names of the small."""
    source = random.Random(seed)
    names = []
    for number in range(small):
        name = f"dir{number % DIRECTORIES:03d}/file{number:05d}"
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.randbytes(source.randrange(*SMALL_BYTES)))
        names.append(name)
    with (top / "large").open("wb") as out:
        for _ in range(large_bytes // PIECE):
            out.write(source.randbytes(PIECE))
    source.shuffle(names)
    return names


def paths(top: Path, names: Sequence[str]) -> list[str]:
    return [f"{top}/{name}" for name in names]


def stat_all(files: Sequence[str], clock: Clock = time.perf_counter) -> float:
    """Files per second of stat(2)."""
    stat = os.stat
    start = clock()
    for file in files:
        stat(file)
    return len(files) / (clock() - start)


def scan_all(top: str, clock: Clock = time.perf_counter) -> float:
    """Entries per second of listing every directory and asking for the attributes of all in it."""
    done = 0
    todo = [top]
    start = clock()
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                done += 1
                entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
    return done / (clock() - start)


def read_all(files: Sequence[str], clock: Clock = time.perf_counter) -> float:
    """Files per second of open, read to the end, close."""
    start = clock()
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.read(fd, 1 << 15)
        os.close(fd)
    return len(files) / (clock() - start)


def read_large(path: str, clock: Clock = time.perf_counter) -> float:
    """MB per second of one sequential read in pieces of 1 MiB."""
    fd = os.open(path, os.O_RDONLY)
    buffer = bytearray(PIECE)
    done = 0
    start = clock()
    while count := os.readv(fd, [buffer]):
        done += count
    took = clock() - start
    os.close(fd)
    return done / took / 1e6
