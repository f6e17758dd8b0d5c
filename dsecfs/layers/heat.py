"""Heat: which files and bytes of an environment are read, from its access traces.

Answers two questions: what does a start cost (files, bytes, chunks, share of the whole),
and where do those bytes lie (by layer, by directory, by file, by chunk).
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass

from dsecfs.errors import BadInput, NotFound
from dsecfs.layers.digest import Digest
from dsecfs.layers.trace import Trace, TracedLayer, trace_chunks


@dataclass(frozen=True, slots=True)
class HeatFile:
    """One file that was read."""

    path: bytes
    layer: int
    """Index into the layers, top first."""
    read: int
    """Bytes of it that were read, each once."""
    size: int
    rank: int
    """When it was first used: 0 is the first."""


@dataclass(frozen=True, slots=True)
class HeatBlob:
    """The address space of a blob, chunk by chunk."""

    digest: Digest
    ranks: tuple[int | None, ...]
    """For each chunk when it was first needed (0 is the first of all); None: never."""


@dataclass(frozen=True, slots=True)
class HeatLayer:
    """What is read of one layer."""

    total_files: int
    total_bytes: int
    blobs: tuple[HeatBlob, ...]
    """Blobs that a layer above has, too, are counted there."""

    @property
    def chunks(self) -> int:
        """Chunks that hold what was read."""
        return sum(rank is not None for blob in self.blobs for rank in blob.ranks)

    @property
    def total_chunks(self) -> int:
        return sum(len(blob.ranks) for blob in self.blobs)


@dataclass(frozen=True, slots=True)
class Heat:
    """What traces say about an environment."""

    files: tuple[HeatFile, ...]
    """In order of first use."""
    layers: tuple[HeatLayer, ...]
    """Top first."""
    chunk_bytes: int
    """Uncompressed bytes of the chunks that hold what was read: what a node fetches."""

    @property
    def read(self) -> int:
        """Bytes read, each once."""
        return sum(f.read for f in self.files)

    @property
    def total_files(self) -> int:
        """Regular files of all layers."""
        return sum(layer.total_files for layer in self.layers)

    @property
    def total_bytes(self) -> int:
        """Their bytes."""
        return sum(layer.total_bytes for layer in self.layers)

    @property
    def chunks(self) -> int:
        """Chunks that hold what was read."""
        return sum(layer.chunks for layer in self.layers)

    def by_directory(self, depth: int) -> list[tuple[bytes, int, int]]:
        """(directory of at most `depth` components, files, bytes read), most bytes first."""
        sums: dict[bytes, tuple[int, int]] = {}
        for f in self.files:
            top = b"/".join(f.path.split(b"/")[:-1][:depth])
            count, read = sums.get(top, (0, 0))
            sums[top] = (count + 1, read + f.read)
        return sorted(
            ((path, count, read) for path, (count, read) in sums.items()),
            key=lambda row: (-row[2], row[0]),
        )


def heat(trace: Trace, layers_top_first: Sequence[TracedLayer]) -> Heat:
    """Put a (merged) trace against the layers of its environment."""
    read: dict[bytes, int] = {}
    for access in trace.accesses:
        read[access.path] = read.get(access.path, 0) + access.length
    files = []
    for rank, (path, count) in enumerate(read.items()):
        for number, layer in enumerate(layers_top_first):
            try:
                info = layer.image.stat(layer.image.resolve(path))
            except (NotFound, BadInput):
                continue
            if stat.S_ISREG(info.mode):
                files.append(HeatFile(path, number, min(count, info.size), info.size, rank))
            break
    chunks = trace_chunks(trace.accesses, layers_top_first)
    ranks = {chunk: rank for rank, chunk in enumerate(chunks)}
    sizes: dict[Digest, int] = {}
    layers = []
    for layer in layers_top_first:
        regular = [info.size for _, info in layer.image.walk() if stat.S_ISREG(info.mode)]
        blobs = []
        for ref in layer.blobs:
            if ref.digest not in sizes:
                sizes[ref.digest] = ref.chunk_size
                marks = tuple(ranks.get((ref.digest, c)) for c in range(ref.chunks))
                blobs.append(HeatBlob(ref.digest, marks))
        layers.append(HeatLayer(len(regular), sum(regular), tuple(blobs)))
    return Heat(tuple(files), tuple(layers), sum(sizes[blob] for blob, _ in chunks))
