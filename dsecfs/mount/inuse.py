"""Which layers are in use on this node, by what mounts leave below run/. Reads, changes nothing.

What must hold: a layer that somebody reads through a mount is in `held` from before the mount
until its last holder is gone, unless the mount has a daemon of its own, which knows it
(`run/trees/mnt-…`); `mounted` has besides them whatever could be used again without looking.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import NamedTuple

from dsecfs.errors import BadInput, DsecfsError
from dsecfs.fuse.trees import read_tree
from dsecfs.layers.digest import Digest, parse_digest
from dsecfs.mount.holders import is_held
from dsecfs.nodedirs import NodeDirs


class InUse(NamedTuple):
    """Layers of mounts on this node."""

    held: frozenset[Digest]
    """Layers of a store that somebody uses through the node's own daemon."""
    mounted: frozenset[Digest]
    """All that are mounted or described, the held ones too."""


def layers_in_use(dirs: NodeDirs) -> InUse:
    """Looks at a few files per mount."""
    held: set[Digest] = set()
    mounted: set[Digest] = set()
    for name in _names(dirs.layers):
        with contextlib.suppress(BadInput):
            layer = parse_digest(name)
            mounted.add(layer)
            place = dirs.layers / name
            if any(is_held(place / g / "refs") for g in _names(place) if g.isdigit()):
                held.add(layer)
    for name in _names(dirs.trees):
        tree, dot, suffix = name.rpartition(".")
        if not dot or suffix != "json" or tree.startswith("."):
            continue
        # One that is being taken away, or that nobody can serve, protects nothing.
        with contextlib.suppress(DsecfsError, FileNotFoundError):
            mtime_ns = (dirs.trees / name).stat().st_mtime_ns
            layers = _described(dirs.trees, tree, mtime_ns)
            mounted.update(layers)
            refs = dirs.trees / f"{tree}.refs"
            if not tree.startswith("mnt-") and (not refs.is_dir() or is_held(refs)):
                held.update(layers)
    # What has no head was made here and is in no store (the skeleton of containers).
    stored = frozenset(layer for layer in held if dirs.head(layer).exists())
    return InUse(stored, frozenset(mounted))


@functools.lru_cache(maxsize=4096)
def _described(trees: Path, name: str, mtime_ns: int) -> tuple[Digest, ...]:
    """The layers of a tree: there may be one for each container, and they do not change."""
    return read_tree(trees, name).layers


def _names(place: Path) -> list[str]:
    try:
        return os.listdir(place)
    except (FileNotFoundError, NotADirectoryError):
        return []
