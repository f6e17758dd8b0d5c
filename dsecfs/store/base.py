"""The store interface, and the names of everything in a store.

What must hold for every back end (tests/t1_store runs one contract suite over all):
- keys are relative, made of [A-Za-z0-9._-] components joined by "/"; anything else is
  refused with BadInput before it reaches a file system or a network;
- reads are exact: a short, long or changed read raises ShortRead, never returns;
- `put_if_absent` decides: of any number of concurrent callers exactly one gets True;
- nothing is visible under a key before all its bytes are durable;
- all methods are blocking and thread-safe; call them from threads, not from an event loop;
- every wait has a limit, and retries live in store/retry.py alone.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, Protocol

from dsecfs.errors import BadInput
from dsecfs.layers.digest import Digest


class ObjectInfo(NamedTuple):
    """What a store knows of an object."""

    key: str
    size: int
    mtime: float
    """Seconds since 1970 by the store's clock."""


class Priority(enum.IntEnum):
    """Why bytes are wanted; smaller goes first. Carried from the read to the back end."""

    FOREGROUND = 0
    """A reader is waiting."""
    PREFETCH = 1
    """A reader will want it soon (read-ahead, traces)."""
    BACKGROUND = 2
    """Warming, verifying, scrubbing, publishing."""


class Store(Protocol):
    """A flat name space of immutable objects."""

    url: str
    """What the user configured, without secrets (file:/srv/dsec, s3://bucket/prefix)."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create `key` with `data` in one atomic step. False if it exists already."""

    def put_content(self, key: str, data: bytes | memoryview | BinaryIO) -> None:
        """Store content-addressed bytes: racing writers write the same. Idempotent.

        A file object is read from its position to its end without holding it in memory;
        it must be seekable, so that a failed attempt can begin again. May use multipart
        uploads. Afterwards `stat` gives a time that is not older than this call
        (S3 counts whole seconds).
        """

    def get(self, key: str, *, max_size: int = 1 << 30) -> bytes:
        """All bytes of `key`. NotFound if absent; FormatError if larger than `max_size`."""

    def get_range(
        self, key: str, offset: int, length: int, *, priority: Priority = Priority.FOREGROUND
    ) -> bytes:
        """Exactly `length` > 0 bytes from `offset`. NotFound, or ShortRead at the end."""

    def stat(self, key: str) -> ObjectInfo:
        """Size and time of `key`. NotFound if absent."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Everything below `prefix` (whole key components, "" for all), sorted by key.

        `refs` and `refs/` mean the same. What comes or goes meanwhile may be missed.
        """

    def delete(self, key: str) -> None:
        """Remove `key`; no error if it is absent."""

    def close(self) -> None:
        """Let go of connections. The store is not used afterwards."""


class Backend(Store, Protocol):
    """What a back end gives to store/retry.py: a Store whose calls are single attempts."""

    settle_s: float
    """For how long a name that was just created elsewhere may look absent, seconds."""

    def put_if_absent(self, key: str, data: bytes, *, put_id: str = "") -> bool:
        """As in Store. A repeated call with the `put_id` of one whose outcome was unclear
        gives the answer that one would have given: True if it was the one that created."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """As in Store, leaving out keys up to and including `after`."""


def head_key(layer: Digest) -> str:
    return f"heads/{layer[:2]}/{layer}"


def layout_prefix(blob: Digest) -> str:
    return f"layouts/{blob[:2]}/{blob}/"


def layout_key(blob: Digest, sequence: int) -> str:
    """`sequence` counts from 1; the highest present is in force."""
    return f"{layout_prefix(blob)}{sequence:08d}"


def object_key(digest: Digest) -> str:
    """A pack of compressed chunks, named by the sha256 of its own bytes."""
    return f"objects/{digest[:2]}/{digest}"


def env_key(env: Digest) -> str:
    """An environment manifest (canonical JSON), named by its sha256."""
    return f"envs/{env[:2]}/{env}"


def ref_key(kind: str, name: str, version: str) -> str:
    """A ref: small immutable JSON that gives a version of a name its digest."""
    return f"refs/{kind}/{name}/.v/{version}"


def channel_prefix(kind: str, name: str, channel: str) -> str:
    """A channel is a log: entry N+1 is put_if_absent, the last one is in force."""
    return f"channels/{kind}/{name}/.c/{channel}/"


def import_key(diff_id: Digest) -> str:
    """Which layer an OCI layer (by diff id) became. A hint, never a root for collection."""
    return f"imports/oci/{diff_id[:2]}/{diff_id}"


def trace_prefix(env: Digest) -> str:
    """Access traces of an environment; several runs are merged by the reader."""
    return f"traces/{env[:2]}/{env}/"


def lease_prefix() -> str:
    """Leases of publishers and nodes; see docs/gc-protocol.md."""
    return "leases/"


def seekable_size(data: BinaryIO) -> int:
    """Bytes from the position of `data` to its end. Raises BadInput if it cannot seek."""
    if not data.seekable():
        raise BadInput("cannot store from a stream that cannot seek", hint="spool it to a file")
    at = data.tell()
    end = data.seek(0, os.SEEK_END)
    data.seek(at)
    return end - at


Json = dict[str, Any]
