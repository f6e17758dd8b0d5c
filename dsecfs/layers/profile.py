"""What recorded runs of an environment say, put against its layers in a store.

The one place where traces, heads and images of a composition are brought together, for
optimize and for heat reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dsecfs.errors import NotFound
from dsecfs.layers.content import read_head
from dsecfs.layers.digest import Digest
from dsecfs.layers.environment import Environment
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.head import LayerHead
from dsecfs.layers.heat import Heat, heat
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
def profile(store: Store, environment: Environment) -> Iterator[Profile]:
    """The profile of a composition. NotFound if no run of it was recorded."""
    traces = load_traces(store, environment.digest)
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
