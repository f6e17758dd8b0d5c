"""A process that writes to a store: one of several in a race, or one that is killed.

    python writer.py race URL KEY NUMBER THREADS    prints one line True/False per thread
    python writer.py stuck URL KEY BYTES            prints "half" and never finishes
"""

from __future__ import annotations

import io
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from dsecfs.store.open import open_store


def race(url: str, key: str, number: str, threads: str) -> None:
    with_store = open_store(url)
    with_store.put_content(f"warm/{number}", b"x")  # imports and connections are made
    ready = threading.Barrier(int(threads) + 1)

    def write(thread: int) -> bool:
        ready.wait(60)
        return with_store.put_if_absent(key, f"{number}.{thread}".encode())

    with ThreadPoolExecutor(int(threads)) as pool:
        answers = [pool.submit(write, thread) for thread in range(int(threads))]
        print("ready", flush=True)
        sys.stdin.readline()
        ready.wait(60)
        for thread, answer in enumerate(answers):
            print(f"{number}.{thread}", answer.result(), flush=True)


class Stuck(io.RawIOBase):
    """A source that gives half of what it promised, says so, and stops."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = self.size if whence == 2 else offset
        return self.at

    def read(self, size: int = -1) -> bytes:
        if self.at >= self.size // 2:
            print("half", flush=True)
            time.sleep(600)
        count = min(size, self.size - self.at)
        self.at += count
        return bytes(count)


def stuck(url: str, key: str, size: str) -> None:
    open_store(url).put_content(key, Stuck(int(size)))  # type: ignore[arg-type]


if __name__ == "__main__":
    if sys.argv[1] == "race":
        race(*sys.argv[2:])
    else:
        stuck(*sys.argv[2:])
