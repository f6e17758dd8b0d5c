"""Stores that watch or disturb a real directory store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from dsecfs.store.base import ObjectInfo, Priority, Store


def directory_store(path: Path | str) -> Store:
    from dsecfs.store.directory import DirectoryStore

    Path(path).mkdir(parents=True, exist_ok=True)
    return DirectoryStore(path)


class CountingStore:
    """Counts range reads, and lets a test look at, delay, fail or change them.

    `hook(key, offset, length)` runs before the read; `change(key, offset, data)` after it.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.ranges = 0
        self.bytes = 0
        self.log: list[tuple[str, int, int, Priority]] = []
        self.hook: Callable[[str, int, int], object] = lambda key, offset, length: None
        self.change: Callable[[str, int, bytes], bytes] = lambda key, offset, data: data
        self.closed = False
        self._lock = threading.Lock()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self.inner.put_if_absent(key, data)

    def put_content(self, key: str, data: bytes | memoryview | BinaryIO) -> None:
        self.inner.put_content(key, data)

    def get(self, key: str, *, max_size: int = 1 << 30) -> bytes:
        self.hook(key, 0, 0)
        return self.inner.get(key, max_size=max_size)

    def get_range(
        self, key: str, offset: int, length: int, *, priority: Priority = Priority.FOREGROUND
    ) -> bytes:
        with self._lock:
            self.ranges += 1
            self.bytes += length
            self.log.append((key, offset, length, priority))
        self.hook(key, offset, length)
        return self.change(
            key, offset, self.inner.get_range(key, offset, length, priority=priority)
        )

    def stat(self, key: str) -> ObjectInfo:
        return self.inner.stat(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.hook(prefix, 0, 0)
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def close(self) -> None:
        self.closed = True


class LoggingStore(CountingStore):
    """Appends a line per range read to a file, for counts over several processes."""

    def __init__(self, path: str, log: Path, *, pause_s: float) -> None:
        super().__init__(directory_store(path))
        self._fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._pause_s = pause_s

    def get_range(
        self, key: str, offset: int, length: int, *, priority: Priority = Priority.FOREGROUND
    ) -> bytes:
        os.write(self._fd, f"{os.getpid()} {key} {offset} {length}\n".encode())
        time.sleep(self._pause_s)
        return super().get_range(key, offset, length, priority=priority)
