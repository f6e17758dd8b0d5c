"""Heat: which files and bytes of an environment are read, from its access traces.

Answers two questions: what does a start cost (files, bytes, chunks, share of the whole),
and where do those bytes lie (by layer, by directory, by file).
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass

from dsecfs.errors import BadInput, NotFound
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
class Heat:
    """What traces say about an environment."""

    files: tuple[HeatFile, ...]
    """In order of first use."""
    total_files: int
    """Regular files of all layers."""
    total_bytes: int
    """Their bytes."""
    chunks: int
    """Chunks that hold what was read."""
    chunk_bytes: int
    """Uncompressed bytes of these: what a node fetches."""

    @property
    def read(self) -> int:
        """Bytes read, each once."""
        return sum(f.read for f in self.files)

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
    total_files = total_bytes = 0
    for layer in layers_top_first:
        for _, info in layer.image.walk():
            if stat.S_ISREG(info.mode):
                total_files += 1
                total_bytes += info.size
    sizes = {blob.digest: blob.chunk_size for layer in layers_top_first for blob in layer.blobs}
    chunks = trace_chunks(trace.accesses, layers_top_first)
    return Heat(
        tuple(files), total_files, total_bytes, len(chunks), sum(sizes[b] for b, _ in chunks)
    )
