"""The node's lease: while layers are mounted here, the store's collector leaves them alone.

One thread calls `NodeLease.step` every few seconds with what is in use. The rules are in
docs/gc-protocol.md. What must hold:
- a layer is listed within seconds of its mount, and as long as anybody uses it;
- a node with nothing mounted writes nothing to the store: no lease is taken before the first
  mount, and it is given up LINGER_S after the last; a layer that comes and goes costs no
  request each time;
- a process that follows a dead one takes over: it lists its own layers first, then removes the
  old lease, whose id the dead one noted on this node (`note`);
- a store that refuses or is away is said once, not at every step, and reads go on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from dsecfs.errors import Busy, DsecfsError, NotFound, StoreDenied
from dsecfs.layers.digest import Digest
from dsecfs.layers.leases import Lease
from dsecfs.store.base import Store, lease_prefix

log = logging.getLogger(__name__)

NODE_TTL_S = 6 * 3600
"""Life of a node's lease without a renewal; it is renewed every third of it. A node that is cut
off for as long, and for the collector's grace of two days on top, may find layers gone."""
LINGER_S = 600.0
"""A layer stays listed for so long after its last use."""
AGAIN_S = 60.0
"""Pause after a store that failed …"""
DENIED_AGAIN_S = 3600.0
"""… and after one that does not let this node write leases."""

NOTE_FORMAT = 1

State = Literal["none", "held", "denied", "failing"]


class LeaseReport(NamedTuple):
    """How it stands, for `dsec doctor`."""

    state: State
    """none: nothing is mounted, or it was not asked for yet."""
    layers: int
    """How many are listed."""
    error: str
    """What the store said; "" if all is well."""


class NodeLease:
    """Keeps one lease in step with what is in use. Not safe in several threads."""

    def __init__(
        self,
        store: Callable[[], Store],
        note: Path,
        *,
        ttl_s: int = NODE_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`store` opens the store at need. `note` is a file of this boot."""
        self._store = store
        self._note = note
        self._ttl_s = ttl_s
        self._clock = clock
        self._lease: Lease | None = None
        self._listed: set[Digest] = set()
        self._missing: set[Digest] = set()
        """In use, and no longer in the store: not listed."""
        self._seen: dict[Digest, float] = {}
        """When a layer was last in use."""
        self._dropped = clock()
        self._again = 0.0
        self._old = _read_note(note)
        self.report = LeaseReport("none", 0, "")

    def step(self, used: Iterable[Digest]) -> None:
        """Bring the lease in line with `used`. Blocks for a request or two if it changes."""
        now = self._clock()
        if now < self._again:
            return
        self._seen.update(dict.fromkeys(used, now))
        for layer in [layer for layer, at in self._seen.items() if now - at > LINGER_S]:
            del self._seen[layer]
            self._missing.discard(layer)
        try:
            self._bring_in_line(now)
        except StoreDenied as e:
            self._failed("denied", e, DENIED_AGAIN_S)
        except DsecfsError as e:
            self._failed("failing", e, AGAIN_S)
        else:
            state: State = "none" if self._lease is None else "held"
            if self.report.error:
                log.info("node's lease: the store takes it again")
            self.report = LeaseReport(state, len(self._listed), "")

    def release(self) -> None:
        """End the lease, a predecessor's too: nothing is in use here any more. StoreError."""
        if self._old is not None:
            old, self._old = self._old, None
            self._remove_old(old)
        if self._lease is not None:
            self._lease.release()
            self._lease = None
            self._listed = set()
        self._note.unlink(missing_ok=True)

    def _bring_in_line(self, now: float) -> None:
        wanted = set(self._seen) - self._missing
        if self._lease is not None and wanted:
            try:
                self._lease.check()
            except Busy as e:
                # The machine slept, or the store was away for hours: a new one, all looked at.
                log.warning("%s", e)
                self.release()
        if new := wanted - self._listed:
            self._list(new)
        elif self._lease is not None and not wanted:
            self.release()
        elif now - self._dropped > LINGER_S and self._listed - wanted:
            assert self._lease is not None
            self._lease.drop(self._listed - wanted)
            self._listed, self._dropped = set(wanted), now
        if self._old is not None and (self._lease is not None or not wanted):
            self._remove_old(self._old)
            self._old = None

    def _list(self, layers: set[Digest]) -> None:
        if self._lease is None:
            self._lease = Lease(self._store(), "node", layers=layers, ttl_s=self._ttl_s)
            self._write_note(self._lease.id)
        else:
            self._lease.add(layers)
        try:
            self._rely_on(self._lease, layers)
        except NotFound:
            missing = {layer for layer in layers if self._is_missing(self._lease, layer)}
            self._lease.drop(missing)
            self._missing |= missing
            layers = layers - missing
        self._listed |= layers

    def _is_missing(self, lease: Lease, layer: Digest) -> bool:
        try:
            self._rely_on(lease, {layer})
        except NotFound as e:
            log.warning("a mounted layer can only be read as far as it is here: %s", e)
            return True
        return False

    def _rely_on(self, lease: Lease, layers: set[Digest]) -> None:
        try:
            lease.rely_on_layers(layers)
        except StoreDenied as e:
            # A node may not write verdicts: the collector's next mark finds the lease.
            log.info("a mounted layer has a tombstone that this node may not revoke: %s", e)

    def _failed(self, state: State, error: DsecfsError, again_s: float) -> None:
        if (self.report.state, self.report.error) != (state, str(error)):
            log.warning(
                "node's lease: layers in use here are not protected from collection: %s", error
            )
        self.report = LeaseReport(state, len(self._listed), str(error))
        self._again = self._clock() + again_s

    def _write_note(self, lease: str) -> None:
        content = {"format": NOTE_FORMAT, "store": self._store().url, "lease": lease}
        new = self._note.with_suffix(".new")
        new.write_text(json.dumps(content))
        new.rename(self._note)

    def _remove_old(self, lease: str) -> None:
        """The lease of a process that is gone. What cannot be removed lapses."""
        store = self._store()
        with contextlib.suppress(StoreDenied):
            for info in store.list(f"{lease_prefix()}{lease}/"):
                store.delete(info.key)


def _read_note(path: Path) -> str | None:
    """The id of the lease that a predecessor left."""
    try:
        value = json.loads(path.read_text())
        if value["format"] == NOTE_FORMAT and str(value["lease"]).startswith("node-"):
            return str(value["lease"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None
