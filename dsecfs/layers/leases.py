"""Leases: who is writing to a store or using layers of it, so that collection leaves them alone.

    leases/KIND-ID/SEQUENCE     canonical JSON, see `LeaseRecord`; the highest sequence counts

A store has no replace, so a renewal is the next sequence; the holder removes the one
before. What must hold (docs/formats.md; the collector's side is docs/gc-protocol.md):

- A lease is live until the store's time of its last record plus its `ttl_s`. Both are
  judged by the *store's* clock: no clock of a publisher or a node is trusted.
- A publisher takes its lease before it writes or relies on anything, and lists the layers
  that it is about to refer to. It publishes through the lease (`put_content`,
  `put_if_absent`), which refuses once the lease may have lapsed or is older than
  MAX_PUBLISH_S. So what a publisher met without a tombstone it refers to within
  MAX_PUBLISH_S or never, and a collector whose grace is longer cannot hurt it.
- A tombstone `tombstones/KEY` says: KEY was not reachable, and goes after the grace. A put
  that meets one revives KEY: the *verdict* `verdicts/KEY`, made by put_if_absent, says
  "keep" (publisher) or "delete" (collector), and exactly one of them wins. After "delete"
  the collector removes KEY, then the tombstone, then the verdict, and the publisher, which
  waits for that, puts KEY anew. After "keep" the collector removes tombstone, then verdict,
  and begins with KEY from the start.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Self

from dsecfs.errors import Busy, Conflict, DsecfsError, FormatError, NotFound, StoreDenied
from dsecfs.layers.digest import Digest
from dsecfs.layers.manifest import Fields, canonical_json, load_json
from dsecfs.store.base import Store, head_key, lease_prefix, object_key

log = logging.getLogger(__name__)

LEASE_FORMAT = 1
LEASE_KINDS = ("publish", "node")
DEFAULT_TTL_S = 300
"""Seconds a lease lives without a renewal; renewed after a third of it."""
MAX_TTL_S = 7 * 86400
MAX_PUBLISH_S = 24 * 3600
"""Longest life of a publisher, in seconds. The collector's grace is longer than this."""
MAX_LEASE = 64 << 20
"""Most bytes of a lease record."""

KEEP, DELETE = b"keep", b"delete"
"""The two verdicts."""

_DELETE_WAIT_S = 30.0
_LOST_ANSWERS = 100


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One record of a lease."""

    kind: str
    holder: str
    """Who holds it, for people: HOST/PID."""
    created: int
    """Seconds since 1970 by the holder's clock, for people."""
    ttl_s: int
    layers: tuple[Digest, ...]
    """Layers that must be kept with everything they refer to, sorted."""

    def to_json(self) -> bytes:
        return canonical_json(
            {
                "format": LEASE_FORMAT,
                "kind": self.kind,
                "holder": self.holder,
                "created": self.created,
                "ttl_s": self.ttl_s,
                "layers": list(self.layers),
            }
        )


def parse_lease(data: bytes, what: str) -> LeaseRecord:
    """Parse and check a record. Raises FormatError or TooNew."""
    f = Fields(load_json(data, what), what)
    f.check_format(LEASE_FORMAT)
    layers = f.take("layers", list)
    if not all(isinstance(d, str) for d in layers):
        raise FormatError(f"{what}: 'layers' must be a list of digests")
    record = LeaseRecord(
        f.take("kind", str),
        f.take("holder", str),
        f.take("created", int),
        f.take("ttl_s", int),
        tuple(f.digest("layers", d) for d in layers),
    )
    f.done()
    if record.kind not in LEASE_KINDS or not 0 < record.ttl_s <= MAX_TTL_S:
        raise FormatError(f"{what}: kind {record.kind[:40]!r} for {record.ttl_s} s is not a lease")
    return record


def tombstone_key(key: str) -> str:
    return f"tombstones/{key}"


def verdict_key(key: str) -> str:
    return f"verdicts/{key}"


def revive(store: Store, key: str, *, wait_s: float = _DELETE_WAIT_S) -> None:
    """Make it safe to rely on `key`, or to put it, if it carries a tombstone.

    Call with a live lease. Afterwards `key` is there for good, or is gone and can be put.
    Raises Busy if a collector that decided to delete it has not done so within `wait_s`.
    """
    try:
        store.stat(tombstone_key(key))
    except NotFound:
        return
    if store.put_if_absent(verdict_key(key), KEEP):
        return
    deadline = time.monotonic() + wait_s
    pause = 0.01
    while True:
        try:
            if store.get(verdict_key(key), max_size=64) == KEEP:
                return
            store.stat(tombstone_key(key))
        except NotFound:
            return
        if time.monotonic() > deadline:
            raise Busy(
                f"{key} is being deleted by a collection for more than {wait_s:.0f} s",
                hint="try again; if the collection died, run dsec store gc",
            )
        time.sleep(pause)
        pause = min(pause * 2, 1.0)


class Lease:
    """A held lease: renews itself in a thread, until `release`. A context manager.

    `clock` gives seconds that never go back and that count while the machine sleeps.
    """

    def __init__(
        self,
        store: Store,
        kind: str,
        *,
        layers: Iterable[Digest] = (),
        ttl_s: int = DEFAULT_TTL_S,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        if kind not in LEASE_KINDS:
            raise ValueError(kind)
        self.id = f"{kind}-{secrets.token_hex(12)}"
        self._store = store
        self._kind = kind
        self._ttl_s = ttl_s
        self._clock = clock
        self._layers = set(layers)
        self._sequence = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._taken = self._renewed = clock()
        self._write(self._layers)
        self._thread = threading.Thread(target=self._renew, name=f"lease {self.id}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def add(self, layers: Iterable[Digest]) -> None:
        """List more layers; returns when the store has the record."""
        with self._lock:
            wanted = self._layers.union(layers)
            if wanted != self._layers:
                self._write(wanted)

    def drop(self, layers: Iterable[Digest]) -> None:
        """Take layers off the list, after the last use of them."""
        with self._lock:
            wanted = self._layers.difference(layers)
            if wanted != self._layers:
                self._write(wanted)

    def check(self) -> None:
        """Raise Busy if the lease may have lapsed, or a publisher took longer than allowed."""
        now = self._clock()
        if now - self._renewed >= self._ttl_s:
            raise Busy(
                f"lease {self.id} was not renewed for {now - self._renewed:.0f} s",
                hint="the store was out of reach; do it again",
            )
        if self._kind == "publish" and now - self._taken > MAX_PUBLISH_S:
            raise Busy(
                f"publishing took longer than {MAX_PUBLISH_S // 3600} hours",
                hint="do it again; what was uploaded is found again",
            )

    def put_content(self, key: str, data: bytes | memoryview | BinaryIO) -> None:
        """`Store.put_content` under the rules of this module."""
        self.rely_on(key)
        self._store.put_content(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """`Store.put_if_absent` under the rules of this module."""
        self.rely_on(key)
        return self._store.put_if_absent(key, data)

    def rely_on(self, key: str) -> None:
        """Make sure that `key`, if it is there, stays; call it before looking."""
        self.check()
        revive(self._store, key)

    def rely_on_layers(self, layers: Iterable[Digest]) -> None:
        """List `layers` and make sure that they, and all they need, stay in the store.

        Raises NotFound for one that is not there, or no longer.
        """
        layers = tuple(layers)
        self.add(layers)
        self.check()
        collecting = next(iter(self._store.list("tombstones/")), None) is not None
        for layer in layers:
            try:
                if collecting:
                    self._revive_all(layer)
                self._store.stat(head_key(layer))
            except NotFound as e:
                raise NotFound(
                    f"layer sha256:{layer} is not in the store ({e.message})",
                    hint="publish it again",
                ) from None

    def _revive_all(self, layer: Digest) -> None:
        from dsecfs.layers.reach import read_layer_manifest, read_newest_layout

        revive(self._store, head_key(layer))
        for blob in read_layer_manifest(self._store, layer).blobs:
            key, layout = read_newest_layout(self._store, blob)
            for needed in (key, *map(object_key, layout.objects)):
                revive(self._store, needed)
                self._store.stat(needed)

    def release(self) -> None:
        """End the lease. A store that cannot be told lets it lapse."""
        self._stop.set()
        self._thread.join(timeout=self._ttl_s)
        with self._lock:
            try:
                self._store.delete(self._key(self._sequence))
            except DsecfsError:
                return

    def _key(self, sequence: int) -> str:
        return f"{lease_prefix()}{self.id}/{sequence:08d}"

    def _write(self, layers: set[Digest]) -> None:
        """Put the next record. Only what the store has counts as listed."""
        before = self._clock()
        record = LeaseRecord(
            self._kind,
            f"{socket.gethostname()}/{os.getpid()}",
            int(time.time()),
            self._ttl_s,
            tuple(sorted(layers)),
        )
        # The id is ours alone: a record that is there already is from a put of which the
        # answer was lost, with an older list of layers.
        for _ in range(_LOST_ANSWERS):
            self._sequence += 1
            if self._store.put_if_absent(self._key(self._sequence), record.to_json()):
                break
        else:
            raise Conflict(f"lease {self.id} is written by somebody else")
        self._renewed = before
        self._layers = layers
        if self._sequence > 1:
            try:
                self._store.delete(self._key(self._sequence - 1))
            except StoreDenied:
                # A node may not delete; the collector removes records that do not count.
                pass

    def _renew(self) -> None:
        while not self._stop.wait(self._ttl_s / 3):
            with self._lock:
                try:
                    self._write(self._layers)
                except DsecfsError as e:
                    # Tried again at the next turn; `check` tells when it was too long.
                    log.warning("lease %s was not renewed: %s", self.id, e)


def live_layers(store: Store, now: float) -> dict[Digest, str]:
    """Layers that live leases list -> a lease that does. `now` is by the store's clock.

    Raises FormatError for a record that cannot be read: to guess would delete.
    """
    latest: dict[str, tuple[str, float]] = {}
    for info in store.list(lease_prefix()):
        parts = info.key.split("/")
        if len(parts) == 3:
            latest[parts[1]] = (info.key, info.mtime)
    found: dict[Digest, str] = {}
    for lease, (key, mtime) in latest.items():
        try:
            record = parse_lease(store.get(key, max_size=MAX_LEASE), f"lease {lease}")
        except NotFound:
            # Released or renewed since it was listed.
            renewed = _reread(store, lease)
            if renewed is None:
                continue
            record, mtime = renewed, now
        if mtime + record.ttl_s > now:
            found.update((layer, lease) for layer in record.layers)
    return found


def _reread(store: Store, lease: str) -> LeaseRecord | None:
    for _ in range(10):
        keys = [i.key for i in store.list(f"{lease_prefix()}{lease}/")]
        if not keys:
            return None
        try:
            return parse_lease(store.get(keys[-1], max_size=MAX_LEASE), f"lease {lease}")
        except NotFound:
            continue
    raise Busy(f"lease {lease} is renewed faster than it can be read", hint="try again")
