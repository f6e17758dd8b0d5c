"""What recorded runs of an environment say, put against its layers in a store.

The one place where traces, heads and images of compositions are brought together, for
optimize and for heat reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dsecfs.errors import NotFound
from dsecfs.layers.catalog import Catalog
from dsecfs.layers.content import read_head
from dsecfs.layers.digest import Digest
from dsecfs.layers.environment import Environment
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.head import LayerHead
from dsecfs.layers.heat import Heat, heat
from dsecfs.layers.optimize import HotBlob, Optimized, optimize
from dsecfs.layers.progress import SILENT, Progress
from dsecfs.layers.trace import (
    REPLAY_AHEAD,
    Trace,
    TracedLayer,
    load_traces,
    merge_traces,
    trace_chunks,
)
from dsecfs.store.base import Store


@dataclass(frozen=True, slots=True)
class Profile:
    """Recorded runs and the layers they read. Valid inside `profile`."""

    runs: int
    trace: Trace
    heads: tuple[LayerHead, ...]
    """Top first."""
    layers: tuple[TracedLayer, ...]
    """Top first."""

    def chunks(self) -> list[tuple[Digest, int]]:
        """Chunks (blob, number) that such runs fetch, in order of first use."""
        return trace_chunks(self.trace.accesses, self.layers, ahead=REPLAY_AHEAD)

    def heat(self) -> Heat:
        return heat(self.trace, self.layers)


@contextmanager
def profile(
    store: Store, environment: Environment, kept: Path | None = None
) -> Iterator[Profile]:
    """The profile of a composition. NotFound if no run of it was recorded.

    Traces that the node keeps below `kept` count, too.
    """
    traces = load_traces(store, environment.digest, kept)
    if not traces:
        raise NotFound(
            f"no run of environment sha256:{environment.digest[:12]} was recorded",
            hint="dsec run --record records one",
        )
    top_first = environment.layers_bottom_up()[::-1]
    with ThreadPoolExecutor(8, "heads") as pool:
        heads = tuple(pool.map(lambda layer: read_head(store, layer), top_first))
    with ExitStack() as stack:
        layers = tuple(
            TracedLayer(
                head.manifest.blobs,
                stack.enter_context(ErofsImage(head.erofs, f"layer {head.digest[:12]}")),
            )
            for head in heads
        )
        yield Profile(len(traces), merge_traces(traces), heads, layers)


def environments_with(catalog: Catalog, layer: Digest, platform: str) -> list[Environment]:
    """Every environment that has `layer`, and the layer alone as one for `platform`.

    Reads every environment of the store.
    """
    found = [Environment(platform, layer)]
    for use in catalog.used_by(layer):
        if use.what == "env":
            manifest = catalog.get_env(Digest(use.name), remember=False)
            found += [e for e in manifest.platforms.values() if layer in e.layers_bottom_up()]
    return found


class NewlyHot(NamedTuple):
    """What `optimize_runs` has done."""

    runs: int
    """Recorded runs that counted."""
    environments: int
    """... and of how many environments they were."""
    written: Optimized


def optimize_runs(
    store: Store,
    environments: Sequence[Environment],
    *,
    layers: Collection[Digest] = (),
    kept: Path | None = None,
    progress: Progress = SILENT,
) -> NewlyHot:
    """Put what recorded runs of `environments` need into one hot object, in order of use.

    Only chunks of `layers`, unless that is empty. An environment without recorded runs does
    not count. NotFound if there is no run at all; what `optimize` raises.
    """
    orders: list[list[tuple[Digest, int]]] = []
    blobs: dict[Digest, HotBlob] = {}
    runs = 0
    for environment in {e.digest: e for e in environments}.values():
        try:
            with profile(store, environment, kept) as found:
                orders.append(found.chunks())
                runs += found.runs
                for head in found.heads:
                    if layers and head.digest not in layers:
                        continue
                    for ref, digests in zip(head.manifest.blobs, head.chunk_digests, strict=True):
                        blobs[ref.digest] = HotBlob(ref, digests)
        except NotFound:
            if len(environments) == 1:
                raise
    if not runs:
        raise NotFound(
            f"no run of any of {len(environments)} environments was recorded",
            hint="dsec run --record records one",
        )
    task, last = "optimize", 0

    def advance(done: int, total: int) -> None:
        nonlocal last
        if not last:
            progress.start(task, total)
        progress.advance(task, done - last)
        last = done

    written = optimize(store, _interleaved(orders), blobs, progress=advance)
    progress.finish(task)
    return NewlyHot(runs, len(orders), written)


def _interleaved(orders: Sequence[list[tuple[Digest, int]]]) -> list[tuple[Digest, int]]:
    """Each chunk once, in the order of its earliest relative use in any list."""
    ranked = sorted(
        (place / len(order), number, place)
        for number, order in enumerate(orders)
        for place in range(len(order))
    )
    return list(dict.fromkeys(orders[number][place] for _, number, place in ranked))
