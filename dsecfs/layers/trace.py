"""Access traces: which ranges of which files an environment's first run reads, in order.

A trace is recorded by path, so that it stays useful when a layer below is upgraded, and
replayed as chunks of whatever blobs the path lies in now. Several runs are merged.

Stored under `traces/<env>/<sha256 of the bytes>` as a zstd frame of JSON:

    {"format": 1, "env": HEX, "files": [[PATH, [[OFFSET, LENGTH], ...]], ...]}

PATH is os.fsdecode of the raw bytes (surrogates escaped), no leading slash; a file stands
again where the program came back to it after reading others.

What must hold: a trace is only advice. A wrong or hostile one costs a bounded amount of time,
memory (MAX_RANGES, MAX_TRACE) and prefetching, and can never change what a read returns; one
that cannot be read is logged and left out.

A node that may not write to the store keeps its traces in data/traces/<env>/, the same bytes
under the same name; they count on this node, and can be stored by somebody who may.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zstandard

from dsecfs.errors import BadInput, FormatError, NotFound
from dsecfs.layers.digest import Digest, parse_digest, sha256
from dsecfs.layers.erofs.reader import ErofsImage, InodeInfo
from dsecfs.layers.manifest import BlobRef, Fields, load_json
from dsecfs.layers.tree import BLOCK
from dsecfs.store.base import Store, trace_prefix

log = logging.getLogger(__name__)

TRACE_FORMAT = 1
MAX_RANGES = 200_000
"""Most ranges of a trace, and of traces that are merged."""
MAX_TRACE = 8 << 20
"""Most bytes of a trace's JSON."""
MAX_RUNS = 8
"""Runs that are merged; newer ones win."""
REPLAY_AHEAD = 128 << 10
"""Bytes that a mount reads ahead (READ_AHEAD_KIB of mount/erofs.py) and that a trace, recorded
without, does not have. With as much behind every range, 5 of the 558 chunks that
`import numpy, pandas` fetches were not foreseen and 4 too many; without, 39 and none."""
_MOST_PIECES = 1 << 20
"""Pieces of files that a trace may ask for, besides one for each block of metadata."""
_MOST_LISTED = 10_000
"""Traces of an environment that are looked at to find the newest."""


class Touch(NamedTuple):
    """One read of a blob, as the FUSE worker saw it."""

    blob: Digest
    offset: int
    length: int


class Access(NamedTuple):
    """One range of one file."""

    path: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The ranges that one or more runs of an environment read, in order of first use."""

    env: Digest
    accesses: tuple[Access, ...]

    @property
    def total(self) -> int:
        """Sum of the lengths."""
        return sum(a.length for a in self.accesses)


class TracedLayer(NamedTuple):
    """A layer of an environment as this module needs it."""

    blobs: Sequence[BlobRef]
    image: ErofsImage


class PathIndex:
    """From a blob's address to the file that lies there.

    Built by one pass over the metadata of all layers. A range that several names share
    (equal files are stored once) is given the first name in path order.
    """

    def __init__(self, layers: Sequence[TracedLayer]) -> None:
        found: dict[Digest, dict[int, tuple[int, bytes, int]]] = {}
        for layer in layers:
            for path, extents in layer.image.data_files():
                for e in extents:
                    by_start = found.setdefault(layer.blobs[e.blob].digest, {})
                    by_start.setdefault(e.physical, (e.length, path, e.logical))
        self._starts = {blob: sorted(by_start) for blob, by_start in found.items()}
        self._found = found

    def accesses(self, touch: Touch) -> Iterator[Access]:
        """The file ranges that a read of a blob covers; padding between files is left out."""
        starts = self._starts.get(touch.blob, [])
        end = touch.offset + touch.length
        i = max(bisect_right(starts, touch.offset) - 1, 0)
        while i < len(starts) and starts[i] < end:
            start = starts[i]
            length, path, logical = self._found[touch.blob][start]
            low, high = max(touch.offset, start), min(end, start + length)
            if low < high:
                yield Access(path, logical + low - start, high - low)
            i += 1


def make_trace(env: Digest, touches: Iterable[Touch], index: PathIndex) -> Trace:
    """Turn what a worker logged into a trace: by path, each byte once, neighbours joined."""
    seen = _Ranges()
    out: list[Access] = []
    for touch in touches:
        for access in index.accesses(touch):
            for offset, length in seen.add(access.path, access.offset, access.length):
                last = out[-1] if out else None
                if last and last.path == access.path and last.offset + last.length == offset:
                    out[-1] = last._replace(length=last.length + length)
                elif len(out) < MAX_RANGES:
                    out.append(Access(access.path, offset, length))
    return Trace(env, tuple(out))


def merge_traces(traces: Sequence[Trace]) -> Trace:
    """All that any run read, each byte once, in the order of its earliest relative use."""
    ranked = sorted(
        (i / len(t.accesses), n, i) for n, t in enumerate(traces) for i in range(len(t.accesses))
    )
    seen = _Ranges()
    out: list[Access] = []
    for _, n, i in ranked:
        a = traces[n].accesses[i]
        out.extend(Access(a.path, o, length) for o, length in seen.add(a.path, a.offset, a.length))
    return Trace(traces[0].env, tuple(out[:MAX_RANGES]))


def trace_chunks(
    accesses: Iterable[Access], layers_top_first: Sequence[TracedLayer], *, ahead: int = 0
) -> list[tuple[Digest, int]]:
    """The chunks (blob, number) that a trace needs now, in order of first use, each once.

    Paths that no longer exist are skipped; the topmost layer that has a path provides it.
    `ahead` bytes behind each range, up to the file's end, are needed too: the kernel reads them
    ahead. Ranges of one path should not overlap (merged traces are so): each is walked.
    """
    where: dict[bytes, tuple[TracedLayer, InodeInfo] | None] = {}
    out: dict[tuple[Digest, int], None] = {}
    pieces = 0
    most = _MOST_PIECES + sum(layer.image.block_count for layer in layers_top_first)
    for path, offset, length in accesses:
        if path not in where:
            where[path] = _provider(path, layers_top_first)
        found = where[path]
        if found is None:
            continue
        layer, info = found
        begin, end = offset, min(offset + length + ahead, info.size)
        if begin >= end:
            continue
        bits = layer.image.indexes_of(info)[2] + BLOCK.bit_length() - 1
        pieces += (end - 1 >> bits) - (begin >> bits) + 1
        if pieces > most:
            log.warning("a trace asks for more than %d pieces: the rest is left out", most)
            break
        for e in layer.image.extents_of(info, begin, end):
            low, high = max(begin, e.logical), min(end, e.logical + e.length)
            if low >= high:
                continue
            blob = layer.blobs[e.blob]
            first = (e.physical + low - e.logical) // blob.chunk_size
            last = (e.physical + high - 1 - e.logical) // blob.chunk_size
            for chunk in range(first, last + 1):
                out[blob.digest, chunk] = None
    return list(out)


def _provider(
    path: bytes, layers_top_first: Sequence[TracedLayer]
) -> tuple[TracedLayer, InodeInfo] | None:
    for layer in layers_top_first:
        try:
            nid = layer.image.resolve(path)
        except (NotFound, BadInput):
            continue
        info = layer.image.stat(nid)
        # A whiteout or another type hides what is below; a directory has no data.
        return (layer, info) if stat.S_ISREG(info.mode) else None
    return None


def encode_trace(trace: Trace) -> bytes:
    """The bytes to store. What is beyond MAX_RANGES or MAX_TRACE, used last, is left out."""
    files: list[tuple[str, list[tuple[int, int]]]] = []
    last: bytes | None = None
    size = 0
    for path, offset, length in trace.accesses[:MAX_RANGES]:
        # At most: 6 bytes for each of the path, and two numbers with their signs.
        size += 44 + (6 * len(path) + 8 if path != last else 0)
        if size > MAX_TRACE - 4096:
            break
        if path != last:
            files.append((os.fsdecode(path), []))
            last = path
        files[-1][1].append((offset, length))
    value = {"format": TRACE_FORMAT, "env": trace.env, "files": files}
    data = json.dumps(value, separators=(",", ":")).encode()
    return zstandard.ZstdCompressor(level=6).compress(data)


def decode_trace(data: bytes, env: Digest) -> Trace:
    """Parse and check a trace of `env`. Raises FormatError or TooNew."""
    what = f"trace of environment {env[:12]}"
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_TRACE:
            raise FormatError(f"{what}: claims {size} bytes")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
    except zstandard.ZstdError as e:
        raise FormatError(f"{what}: does not decompress: {e}") from None
    # Before it is parsed: a list costs some 100 bytes. A range needs one, a file two.
    if raw.count(b"[") > 4 * MAX_RANGES:
        raise FormatError(f"{what}: more than {MAX_RANGES} ranges")
    f = Fields(load_json(raw, what), what)
    f.check_format(TRACE_FORMAT)
    if f.take("env", str) != env:
        raise FormatError(f"{what}: belongs to another environment")
    out: list[Access] = []
    try:
        for path, ranges in f.take("files", list):
            raw_path = os.fsencode(path)
            for offset, length in ranges:
                if not (
                    isinstance(offset, int)
                    and isinstance(length, int)
                    and 0 <= offset < 1 << 63
                    and 0 < length < 1 << 63
                ):
                    raise FormatError(f"{what}: an impossible range")
                out.append(Access(raw_path, offset, length))
    except (ValueError, TypeError) as e:
        raise FormatError(f"{what}: 'files' has a wrong shape: {e}") from None
    f.done()
    if len(out) > MAX_RANGES:
        raise FormatError(f"{what}: {len(out)} ranges, at most {MAX_RANGES} are allowed")
    return Trace(env, tuple(out))


def save_trace(store: Store, trace: Trace) -> str:
    """Store a run's trace; returns its key."""
    data = encode_trace(trace)
    key = trace_prefix(trace.env) + sha256(data)
    store.put_content(key, data)
    return key


def keep_trace(place: Path, trace: Trace) -> Path:
    """Keep a run's trace below the directory `place` of this node; its file. OSError.

    The newest MAX_RUNS of an environment stay.
    """
    data = encode_trace(trace)
    folder = place / trace.env
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / sha256(data)
    temporary = folder / f".{path.name}"
    temporary.write_bytes(data)
    temporary.replace(path)
    for old in kept_traces(place, trace.env)[MAX_RUNS:]:
        old.unlink(missing_ok=True)
    return path


def kept_traces(place: Path, env: Digest) -> list[Path]:
    """Traces of an environment that this node keeps below `place`, newest first."""
    found = []
    try:
        names = os.listdir(place / env)
    except FileNotFoundError:
        return []
    for name in names:
        try:
            path = place / env / parse_digest(name)
            found.append((-path.stat().st_mtime, path))
        except (BadInput, FileNotFoundError):
            continue  # being written, or just replaced
    return [path for _, path in sorted(found)]


class StoredTrace(NamedTuple):
    """A trace that is somewhere."""

    name: str
    """The sha256 of its bytes."""
    mtime: float
    size: int
    """Stored bytes."""
    file: Path | None
    """Where this node keeps it; None: in the store."""


def list_traces(store: Store, env: Digest, kept: Path | None = None) -> list[StoredTrace]:
    """The traces of an environment, newest first, those that the node keeps below `kept` too."""
    found = []
    prefix = trace_prefix(env)
    for number, info in enumerate(store.list(prefix)):
        if number == _MOST_LISTED:
            log.warning("environment %s has too many traces: not all count", env[:12])
            break
        found.append(StoredTrace(info.key.removeprefix(prefix), info.mtime, info.size, None))
    names = {trace.name for trace in found}
    for path in kept_traces(kept, env) if kept else ():
        if path.name not in names:
            s = path.stat()
            found.append(StoredTrace(path.name, s.st_mtime, s.st_size, path))
    return sorted(found, key=lambda t: (-t.mtime, t.name))


def read_trace(store: Store, env: Digest, stored: StoredTrace) -> Trace:
    """One trace. Raises FormatError for one that is none, NotFound, store errors."""
    if stored.file is not None:
        try:
            with stored.file.open("rb") as f:
                return decode_trace(f.read(MAX_TRACE), env)
        except OSError as e:
            raise NotFound(f"trace {stored.file}: {e.strerror}") from None
    return decode_trace(store.get(trace_prefix(env) + stored.name, max_size=MAX_TRACE), env)


def load_traces(store: Store, env: Digest, kept: Path | None = None) -> list[Trace]:
    """The newest MAX_RUNS traces of an environment, newest first; empty if there are none.

    Those that the node keeps below `kept` count too. One that cannot be read is logged and
    left out; so are old ones when there are more than MAX_RANGES ranges in all.
    """
    listed = list_traces(store, env, kept)[:MAX_RUNS]
    if not listed:
        return []

    def read(stored: StoredTrace) -> Trace | None:
        try:
            return read_trace(store, env, stored)
        except (FormatError, NotFound) as e:
            log.warning("trace %s is left out: %s", stored.name[:12], e)
            return None

    with ThreadPoolExecutor(len(listed), "dsec-traces") as pool:
        found = [trace for trace in pool.map(read, listed) if trace and trace.accesses]
    traces: list[Trace] = []
    ranges = 0
    for trace in found:
        ranges += len(trace.accesses)
        if traces and ranges > MAX_RANGES:
            break
        traces.append(trace)
    return traces


class _Ranges:
    """Which bytes of which files were seen, as sorted disjoint ranges."""

    def __init__(self) -> None:
        self._seen: dict[bytes, list[tuple[int, int]]] = {}

    def add(self, path: bytes, offset: int, length: int) -> list[tuple[int, int]]:
        """Add a range; returns the parts (offset, length) that are new."""
        ranges = self._seen.setdefault(path, [])
        end = offset + length
        first = max(bisect_right(ranges, (offset, 1 << 63)) - 1, 0)
        while first < len(ranges) and ranges[first][1] < offset:
            first += 1
        stop, at, fresh = first, offset, []
        while stop < len(ranges) and ranges[stop][0] <= end:
            low, high = ranges[stop]
            if at < low:
                fresh.append((at, low - at))
            at = max(at, high)
            stop += 1
        if at < end:
            fresh.append((at, end - at))
        if first < stop:
            offset, end = min(offset, ranges[first][0]), max(end, ranges[stop - 1][1])
        ranges[first:stop] = [(offset, end)]
        return fresh
