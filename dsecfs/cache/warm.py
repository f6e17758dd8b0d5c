"""What to prefetch when an environment is mounted, by what optimize and traces know.

A blob whose layout names hot chunks is warmed by these: they lie back to back, so it is one
sequential read. For the others the traces of the environment say which chunks a run reads.
What must hold: it is advice only. Whatever goes wrong here costs speed, never a read.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dsecfs.cache.chunkcache import ChunkCache
from dsecfs.layers.digest import Digest
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.local import LocalLayer
from dsecfs.layers.trace import TracedLayer, load_traces, merge_traces, trace_chunks
from dsecfs.store.base import Store

Plan = list[tuple[Digest, list[int]]]

_PARALLEL = 8
"""Layouts that are looked up at the same time."""


def warm_plan(
    cache: ChunkCache, store: Store, env: Digest | None, layers_bottom_up: Sequence[LocalLayer]
) -> Plan:
    """Chunks to bring in, in order, for a mount of `env` made of these layers.

    Blocks: asks the store for layouts and traces. Raises store errors and FormatError.
    """
    blobs = dict.fromkeys(ref.digest for layer in layers_bottom_up for ref in layer.blobs)
    with ThreadPoolExecutor(_PARALLEL, "dsec-warm") as pool:
        hot = dict(
            zip(blobs, pool.map(lambda blob: cache.open(blob).hot_chunks(), blobs), strict=True)
        )
    plan: Plan = [(blob, chunks) for blob, chunks in hot.items() if chunks]
    if env is None or all(hot.values()):
        return plan
    traces = load_traces(store, env)
    if not traces:
        return plan
    layers = [
        TracedLayer(layer.blobs, ErofsImage.open(layer.meta_path))
        for layer in reversed(layers_bottom_up)
    ]
    try:
        wanted = trace_chunks(merge_traces(traces).accesses, layers)
    finally:
        for layer in layers:
            layer.image.close()
    # Runs of one blob stay together, in the order in which they are first used.
    for blob, chunk in wanted:
        if hot[blob]:
            continue
        if not plan or plan[-1][0] != blob:
            plan.append((blob, []))
        plan[-1][1].append(chunk)
    return plan
