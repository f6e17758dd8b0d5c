"""The real worker over a store that fails as a test says: rules in data/faults.json.

The file holds a list of `Rule`s as objects; it is read again whenever it has changed.
"""

from __future__ import annotations

import json
from pathlib import Path

from dsecfs.fuse.config import FsConfig
from dsecfs.fuse.shared import Inherited
from dsecfs.fuse.worker import run
from dsecfs.store.base import Backend
from dsecfs.store.faults import FaultyStore, Rule
from dsecfs.store.retry import RetryPolicy

RULES = "faults.json"
POLICY = RetryPolicy(
    foreground_s=1.0, background_s=1.0, first_delay_s=0.02, max_delay_s=0.2, quiet=1000
)
"""So that a store that is gone shows soon."""


class RuledStore(FaultyStore):
    """Rules come from a file, so that another process can change them."""

    def __init__(self, inner: Backend, path: Path) -> None:
        super().__init__(inner)
        self._path = path
        self._seen: tuple[int, int] | None = None

    def _choose(self, op: str, key: str, call: int) -> Rule | None:
        try:
            info = self._path.stat()
            seen = (info.st_mtime_ns, info.st_ino)
            if seen != self._seen:
                self.rules = tuple(Rule(**rule) for rule in json.loads(self._path.read_text()))
                self._seen = seen
        except FileNotFoundError:
            self.rules = ()
        return super()._choose(op, key, call)


def main(inherited: Inherited) -> int:
    from dsecfs.cache import ChunkCache
    from dsecfs.fuse.cached import CachedSource
    from dsecfs.fuse.chores import Chores
    from dsecfs.store.open import open_store

    config = FsConfig(**inherited.config)
    rules = Path(config.data, RULES)

    def faulty() -> object:
        return open_store(
            config.store, wrap=lambda inner: RuledStore(inner, rules), policy=POLICY
        )

    cache = ChunkCache(config.dirs, faulty, **config.cache)  # type: ignore[arg-type]
    return run(inherited, config, CachedSource(cache), Chores(config, cache))
