"""Recording what a run of an environment reads, from its first mount to a trace in the store.

    with Recorder.start(dirs, environment.digest, layers) as recorder:
        with Runner(dirs, mounts=recorder.mounts()) as runner: …      kernel and loop mode
        mount with recorder.tree_config(store.url, directory)         portable mode
        saved = recorder.save(store)

    run/traces/<id>.claim   held by the recorder as long as it lives
    run/traces/<id>.json    the blobs; makes run/fs/traced/<id>/ appear
    run/traces/<id>.log     every read, written by the FUSE worker
    run/trees/<id>.json     the layers; reads of trees/<id> are recorded under the same id
    run/trees/<id>.own-…    the same with shifted owners: roots of containers in FUSE mode

The layers are mounted once more for the recorder alone, over traced blobs: nothing is in the
page cache, read-ahead is off, so the log has exactly what was asked for, whatever the node has
cached. What must hold: the claim is there first and goes last, so what a killed recorder leaves
is removed by the next one; the log is bounded (TRACE_LIMIT); a trace that the store does not
take is kept on this node, and whoever asked is told.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from dsecfs.errors import CacheError, StoreError
from dsecfs.fuse.blobs import TRACE_LIMIT, recorded, start_recording
from dsecfs.fuse.config import FsConfig, tree_config
from dsecfs.fuse.trees import write_tree
from dsecfs.kernel.probe import Mode
from dsecfs.layers.digest import Digest
from dsecfs.layers.erofs.reader import ErofsImage
from dsecfs.layers.local import LocalLayer
from dsecfs.layers.trace import (
    PathIndex,
    Trace,
    TracedLayer,
    keep_trace,
    make_trace,
    save_trace,
)
from dsecfs.locks import Claim
from dsecfs.mount.holders import Holder
from dsecfs.mount.layers import LayerMounts
from dsecfs.mount.trees import RootTrees
from dsecfs.nodedirs import NodeDirs
from dsecfs.store.base import Store

_ID = re.compile(r"rec-[0-9a-f]{16}\Z")


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a recording."""

    trace: Trace
    key: str
    """Where it is in the store; "" if it is not there."""
    kept: Path | None
    """Where this node keeps it, because the store did not take it."""
    why_kept: str
    """What the store said."""
    truncated: bool
    """The log was full before the end: what was read last is missing."""


class Recorder:
    """Makes one recording. Use it in `with`, or `close` it: then nothing of it is left."""

    def __init__(
        self, dirs: NodeDirs, env: Digest, layers: tuple[LocalLayer, ...], name: str, claim: Claim
    ) -> None:
        """Use `start`."""
        self.dirs = dirs
        self.env = env
        self.layers = layers
        """Bottom to top."""
        self.name = name
        self._claim = claim

    @staticmethod
    def start(dirs: NodeDirs, env: Digest, layers_bottom_up: Sequence[LocalLayer]) -> Recorder:
        """Begin to record runs of `env`, made of these layers. CacheError (the local disk)."""
        dirs = NodeDirs(dirs.data.absolute(), dirs.run.absolute())
        recover_recordings(dirs)
        name = f"rec-{secrets.token_hex(8)}"
        layers = tuple(layers_bottom_up)
        blobs = dict.fromkeys(blob.digest for layer in layers for blob in layer.blobs)
        try:
            dirs.traces.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = Recorder(dirs, env, layers, name, Claim.make(_claim_path(dirs, name), {}))
            try:
                start_recording(dirs.traces, name, list(blobs))
                write_tree(dirs.trees, name, [layer.digest for layer in layers])
            except BaseException:
                made.close()
                raise
        except OSError as e:
            raise CacheError(
                f"record a run: cannot write below {dirs.traces}: {e.strerror}"
            ) from None
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove what the recording has on this node. Its mounts are gone before."""
        _remove(self.dirs, self.name)
        self._claim.release()

    # -- what is mounted

    def mounts(self, *, mode: Mode = "kernel") -> RecordedMounts:
        """Layer mounts that record: for `mount_env` and `Runner`, closed by the caller."""
        return RecordedMounts(self, mode=mode)

    def device(self, blob: Digest) -> Path:
        """The file of a blob whose reads are recorded."""
        return self.dirs.fs / "traced" / self.name / blob

    def tree_config(self, store: str, mountpoint: Path) -> FsConfig:
        """A FUSE mount of the merged layers at `mountpoint`, for `start_daemon`: the portable
        mode. Without root its read-ahead stays on, and what it reads is in the trace, too."""
        return tree_config(self.dirs, store, self.name, mountpoint, read_ahead_kib=0)

    # -- what it gives

    def trace(self) -> Trace:
        """What was read so far."""
        # Top first: a range that two layers share is called as the upper one calls it.
        layers = [
            TracedLayer(layer.blobs, ErofsImage.open(layer.meta_path))
            for layer in reversed(self.layers)
        ]
        try:
            index = PathIndex(layers)
        finally:
            for layer in layers:
                layer.image.close()
        return make_trace(self.env, recorded(self.dirs.traces, self.name), index)

    def save(self, store: Store) -> Saved:
        """Make a trace of the recording and store it; on this node if the store refuses.

        CacheError if neither is possible.
        """
        trace = self.trace()
        full = _size(self._log) >= TRACE_LIMIT
        if not trace.accesses:
            return Saved(trace, "", None, "", full)
        try:
            return Saved(trace, save_trace(store, trace), None, "", full)
        except StoreError as e:
            why = e.message
        try:
            return Saved(trace, "", keep_trace(self.dirs.kept_traces, trace), why, full)
        except OSError as e:
            raise CacheError(
                f"save a trace: {why}; and it cannot be kept in {self.dirs.kept_traces}: "
                f"{e.strerror}"
            ) from None

    @property
    def _log(self) -> Path:
        return self.dirs.traces / f"{self.name}.log"


class RecordedMounts(LayerMounts):
    """Layer mounts of one recorder: its layers are its own, everything else is shared."""

    def __init__(self, recorder: Recorder, *, mode: Mode = "kernel") -> None:
        super().__init__(recorder.dirs, mode=mode)
        self._recorder = recorder
        self._recorded = {layer.digest for layer in recorder.layers}

    def acquire(self, layer: LocalLayer, holder: Holder) -> Path:
        """As LayerMounts does, with what is read through the mount being recorded."""
        if layer.digest not in self._recorded:
            return super().acquire(layer, holder)
        devices = [self._recorder.device(blob.digest) for blob in layer.blobs]
        return self.acquire_private(layer, holder, devices)

    @cached_property
    def trees(self) -> RootTrees:
        """The same for FUSE mode."""
        return RootTrees(self._dirs, recording=self._recorder.name)


def recover_recordings(dirs: NodeDirs) -> list[str]:
    """Remove what killed recorders left; the names of their recordings."""
    found = []
    try:
        names = sorted(os.listdir(dirs.traces))
    except FileNotFoundError:
        return []
    for name in names:
        recording, _, suffix = name.rpartition(".")
        if suffix != "claim" or not _ID.match(recording):
            continue
        claim = Claim.take(_claim_path(dirs, recording))
        if claim is not None:
            _remove(dirs, recording)
            claim.release()
            found.append(recording)
    return found


def _claim_path(dirs: NodeDirs, name: str) -> Path:
    return dirs.traces / f"{name}.claim"


def _remove(dirs: NodeDirs, name: str) -> None:
    """Remove everything but the claim, whatever is there of it."""
    with contextlib.suppress(FileNotFoundError):
        # A worker may keep it open for long: give the disk back now.
        os.truncate(dirs.traces / f"{name}.log", 0)
    for place in (dirs.traces, dirs.trees):
        with contextlib.suppress(FileNotFoundError):
            # With a dot in front: a description that was being written.
            found = [n for n in os.listdir(place) if n.startswith((f"{name}.", f".{name}."))]
            for path in (place / n for n in found if n != f"{name}.claim"):
                if path.suffix == ".refs":
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
