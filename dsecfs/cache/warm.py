"""What to prefetch when an environment is mounted, by what traces and optimize know.

If runs of the environment were recorded, it is the chunks that they read, in that order: where
`optimize` has put them back to back they come by a few large reads. If not, it is what the
layouts of its blobs call hot, which runs of other environments needed. What must hold: it is
advice only. Whatever goes wrong here costs speed, never a read.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dsecfs.cache.blobfiles import VALID
from dsecfs.cache.chunkcache import ChunkCache
from dsecfs.errors import DsecfsError
from dsecfs.layers.digest import Digest
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.local import LocalLayer
from dsecfs.layers.trace import (
    REPLAY_AHEAD,
    TracedLayer,
    load_traces,
    merge_traces,
    trace_chunks,
)
from dsecfs.store.base import Store

log = logging.getLogger(__name__)

Plan = list[tuple[Digest, "array[int]"]]
"""Chunks of blobs, in order; a blob may come up again."""

_PARALLEL = 8
"""Layouts that are looked up at the same time."""
_LAYOUT_S = 600.0
"""Seconds for which this node's copy of a layout is taken to be the newest ..."""
_MANY = 16
"""... and always when fewer chunks than these are to be fetched."""


def warm_plan(
    cache: ChunkCache, store: Store, env: Digest | None, layers_bottom_up: Sequence[LocalLayer]
) -> Plan:
    """Chunks to bring in, in order, for a mount of `env` made of these layers.

    Blocks: asks the store for layouts and traces. A blob whose layout cannot be had is left
    out. Raises store errors, FormatError (an image that is damaged).
    """
    blobs = dict.fromkeys(ref.digest for layer in layers_bottom_up for ref in layer.blobs)
    with ThreadPoolExecutor(_PARALLEL, "dsec-warm") as pool:
        # Layouts are needed for fetching in any case; all is asked at the same time.
        traces = pool.submit(load_traces, store, env, cache.dirs.kept_traces) if env else None
        hot = dict(zip(blobs, pool.map(lambda blob: _hot(cache, blob), blobs), strict=True))
        found = traces.result() if traces else []
    if not found:
        return [(blob, array("I", chunks)) for blob, chunks in hot.items() if chunks]
    layers = [
        TracedLayer(layer.blobs, ErofsImage.open(layer.meta_path))
        for layer in reversed(layers_bottom_up)
    ]
    try:
        wanted = trace_chunks(merge_traces(found).accesses, layers, ahead=REPLAY_AHEAD)
    finally:
        for layer in layers:
            layer.image.close()
    plan: Plan = []
    for blob, chunk in wanted:
        if not plan or plan[-1][0] != blob:
            plan.append((blob, array("I")))
        plan[-1][1].append(chunk)
    _renew_layouts(cache, plan)
    return plan


def _renew_layouts(cache: ChunkCache, plan: Plan) -> None:
    """Where much is to be fetched by a layout that this node has had for long, look for a
    newer one: `optimize` may have put it all together since."""
    missing: Counter[Digest] = Counter()
    for blob, chunks in plan:
        state = cache.open(blob).files.state
        missing[blob] += sum(state(chunk) != VALID for chunk in chunks)
    old = [blob for blob, count in missing.items() if count >= _MANY and _is_old(cache, blob)]
    if not old:
        return

    def renew(blob: Digest) -> None:
        try:
            cache.open(blob).refresh_layout()
        except DsecfsError as e:
            log.info("blob %s keeps its layout: %s", blob[:12], e)

    with ThreadPoolExecutor(_PARALLEL, "dsec-warm") as pool:
        list(pool.map(renew, old))


def _is_old(cache: ChunkCache, blob: Digest) -> bool:
    try:
        written = (cache.dirs.blob(blob) / "layout").stat().st_mtime
    except FileNotFoundError:
        return False  # it was had from the store just now, and could not be kept
    return time.time() - written > _LAYOUT_S


def _hot(cache: ChunkCache, blob: Digest) -> list[int]:
    try:
        return cache.open(blob).hot_chunks()
    except DsecfsError as e:
        log.warning("blob %s is not warmed by its layout: %s", blob[:12], e)
        return []
