"""What a node remembers of a store's names: small files that never change.

What must hold: losing one is harmless, and a damaged one counts as lost.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dsecfs.errors import DsecfsError

T = TypeVar("T")


class Remembered:
    """Small files below `root`, by a key that is safe as a path; each for `keep_s` seconds."""

    def __init__(self, root: Path, keep_s: float) -> None:
        self._root = root
        self._keep_s = keep_s

    def get(self, key: str, parse: Callable[[bytes], T]) -> T | None:
        """What is remembered and not too old; a damaged file counts as forgotten."""
        path = self._root / key
        try:
            if time.time() - path.stat().st_mtime > self._keep_s:
                return None
            return parse(path.read_bytes())
        except (OSError, DsecfsError):
            return None

    def put(self, key: str, data: bytes) -> None:
        path = self._root / key
        # One fixed name, so that crashes do not pile up files. Two writers of one key write the
        # same; should one rename what the other has just cut, `get` finds it damaged.
        temporary = path.with_name(f".tmp-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.rename(path)
        except OSError:
            # A node without space goes on, it only asks the store again.
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def forget(self, key: str) -> None:
        with contextlib.suppress(OSError):
            (self._root / key).unlink()
