"""`blobs/<digest>` and `traced/<trace>/<digest>`: blobs as read-only files.

A blob file shows the blob's uncompressed address space: the device of EROFS mounts and of
virtual machines. It exists as soon as the node knows the blob's chunk digests. A traced
blob is the same bytes under another inode, so that the page cache is cold, and every read
of it is written down. A composed tree that has the name of a recording is recorded, too.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dsecfs.errors import BadInput, FormatError, NotFound
from dsecfs.fuse.spaces import FOREVER, Attributes, Data, DirEntry
from dsecfs.layers.digest import Digest, parse_digest
from dsecfs.layers.trace import Touch

log = logging.getLogger("dsecfs.fuse.blobs")

TRACE_FORMAT = 1
TRACE_RECORD = struct.Struct("<QQII")
"""One read: CLOCK_MONOTONIC in ns, offset, length, number of the blob in the trace's list."""
TRACE_LIMIT = 64 << 20
"""Bytes after which a trace takes no more records (2.8 million reads)."""
MAX_TRACE_BLOBS = 65536


class Blob(Protocol):
    """An open blob of the cache."""

    @property
    def size(self) -> int: ...

    def read_nowait(self, offset: int, size: int) -> Data | None:
        """Bytes that are here and verified, None if any of them is not."""

    def aread(self, offset: int, size: int) -> Awaitable[Data]:
        """Bytes, fetched if need be. Short only at the end of the blob."""


class BlobSource(Protocol):
    """Where blobs come from: the node's chunk cache."""

    def exists(self, blob: Digest) -> bool:
        """Whether the node knows the blob's chunks. One stat of a local file."""

    def size(self, blob: Digest) -> int:
        """Bytes of a blob, without opening it. NotFound if the node does not know it."""

    def open(self, blob: Digest) -> Blob:
        """NotFound if the node does not know the blob. Quick for one that is in use."""

    def stats(self) -> Mapping[str, int]:
        """Counters of this process."""

    async def prefetch(
        self, wanted: Sequence[tuple[Digest, Sequence[int] | None]], progress: Progress
    ) -> None:
        """Bring chunks (None: all) of blobs into the cache, in this order as far as may be."""

    async def warm(
        self, env: Digest | None, layers: Sequence[Digest], progress: Progress
    ) -> None:
        """Bring in what runs of `env`, made of `layers` (bottom first), are known to read."""


class Progress(Protocol):
    """Told how a prefetch goes."""

    def __call__(self, done: int, total: int) -> None: ...


class _File:
    """What is the same for every space that is one file, node 0."""

    def names_hold(self, node: int) -> float:
        return FOREVER

    def lookup(self, node: int, name: bytes) -> int:
        raise NotFound("a file has no entries")

    def listing(self, node: int, start: int) -> Iterator[DirEntry]:
        raise BadInput("a file has no entries")

    def readlink(self, node: int) -> bytes:
        raise BadInput("not a symlink")

    def xattrs(self, node: int) -> Mapping[bytes, bytes]:
        return {}


class BlobSpace(_File):
    """One blob. How long its files stay open is the source's to decide."""

    def __init__(self, source: BlobSource, digest: Digest) -> None:
        self._source = source
        self._digest = digest
        self._size = source.size(digest)
        self._attributes = Attributes(stat.S_IFREG | 0o444, self._size)

    def attributes(self, node: int) -> Attributes:
        return self._attributes

    def read_nowait(self, node: int, offset: int, size: int) -> Data | None:
        return self._source.open(self._digest).read_nowait(offset, size)

    async def aread(self, node: int, offset: int, size: int) -> Data:
        return await self._source.open(self._digest).aread(offset, size)


class Recording:
    """One recording: run/traces/<id>.json says of which blobs, <id>.log gets the reads."""

    def __init__(self, traces: Path, name: str) -> None:
        """NotFound if there is no such trace, FormatError if its description is not one."""
        self.name = name
        path = traces / f"{name}.json"
        try:
            value = json.loads(path.read_bytes())
            if value["format"] != TRACE_FORMAT or len(value["blobs"]) > MAX_TRACE_BLOBS:
                raise ValueError("unknown format")
            self.blobs = [parse_digest(d) for d in value["blobs"]]
        except FileNotFoundError:
            raise NotFound(f"no trace {name}") from None
        except (ValueError, KeyError, TypeError, AttributeError, BadInput) as e:
            raise FormatError(f"trace {path}: {e}") from None
        self._numbers = {blob: i for i, blob in enumerate(self.blobs)}
        self._fd = os.open(
            traces / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._bytes = os.fstat(self._fd).st_size

    def __del__(self) -> None:
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            os.close(fd)

    def has(self, blob: Digest) -> bool:
        """Whether reads of a blob are recorded."""
        return blob in self._numbers

    def number(self, blob: Digest) -> int:
        """The blob's place in the list. NotFound if it is not traced."""
        try:
            return self._numbers[blob]
        except KeyError:
            raise NotFound(f"trace {self.name} has no blob {blob[:12]}") from None

    def record(self, number: int, offset: int, length: int) -> None:
        """Write one read down. A recording that is full, or cannot be written, stays as it is."""
        if self._bytes >= TRACE_LIMIT:
            return
        try:
            os.write(self._fd, TRACE_RECORD.pack(time.monotonic_ns(), offset, length, number))
        except OSError as e:
            log.error("trace %s: recording ends: %s", self.name, e.strerror)
            self._bytes = TRACE_LIMIT
            return
        self._bytes += TRACE_RECORD.size
        if self._bytes >= TRACE_LIMIT:
            log.warning("trace %s is full (%d bytes)", self.name, TRACE_LIMIT)


def recorded(traces: Path, name: str) -> Iterator[Touch]:
    """What recording `name` has so far, in order. NotFound, FormatError."""
    recording = Recording(traces, name)
    data = (traces / f"{name}.log").read_bytes()
    whole = len(data) - len(data) % TRACE_RECORD.size
    for _, offset, length, number in TRACE_RECORD.iter_unpack(memoryview(data)[:whole]):
        if number >= len(recording.blobs):
            raise FormatError(f"trace log {name}: blob number {number} does not exist")
        yield Touch(recording.blobs[number], offset, length)


def start_recording(traces: Path, name: str, blobs: Sequence[Digest]) -> None:
    """Make `traced/<name>/` exist. A recording of the same name must not have existed."""
    if len(blobs) > MAX_TRACE_BLOBS:
        raise BadInput(f"trace {name}: {len(blobs)} blobs, at most {MAX_TRACE_BLOBS}")
    traces.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = traces / f".{name}.{os.getpid()}"
    temporary.write_text(json.dumps({"format": TRACE_FORMAT, "blobs": list(blobs)}))
    temporary.replace(traces / f"{name}.json")


class RecordedBlob:
    """An open blob whose reads are written down, once or (when they wait) twice."""

    def __init__(self, blob: Blob, recording: Recording, number: int) -> None:
        self._blob = blob
        self._recording = recording
        self._number = number

    @property
    def size(self) -> int:
        return self._blob.size

    def read_nowait(self, offset: int, size: int) -> Data | None:
        self._recording.record(self._number, offset, size)
        return self._blob.read_nowait(offset, size)

    def aread(self, offset: int, size: int) -> Awaitable[Data]:
        # Of a read of several blobs, `read_nowait` stops at the first that is not at hand.
        self._recording.record(self._number, offset, size)
        return self._blob.aread(offset, size)


class TracedBlobSpace(BlobSpace):
    """A blob whose reads are written down."""

    def __init__(
        self, source: BlobSource, digest: Digest, recording: Recording, number: int
    ) -> None:
        super().__init__(source, digest)
        self._recording = recording
        self._number = number

    def read_nowait(self, node: int, offset: int, size: int) -> Data | None:
        # Every read comes through here first, so each is recorded once.
        self._recording.record(self._number, offset, max(0, min(size, self._size - offset)))
        return self._source.open(self._digest).read_nowait(offset, size)
