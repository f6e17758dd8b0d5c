"""One EROFS mount per layer and node, shared by everything on the node that uses the layer.

The mounts live in a pinned mount namespace of their own (run/ns/layers): the host's mount
table, and every copy of it that some service makes, stays small. Users get *clones* as
descriptors and build overlays of them anywhere.

    run/layers/<hex>/lock               held while anything below changes
    run/layers/<hex>/<gen>/record       what is mounted, written before and after
    run/layers/<hex>/<gen>/mnt          mount point, in the pinned namespace
    run/layers/<hex>/<gen>/refs/<name>  one file per holder: the path of its own record
    run/layers/<hex>/<gen>/retired      made by direct.py: data it reads itself was damaged

What must hold:
- EROFS opens its devices at mount. So when every blob of a layer has become whole and
  verified on this node, the layer gets a new *generation* that reads the cache files
  themselves; it is what new holders get, the old one drains and goes with its last holder;
- a holder lives as long as the record it names exists (holders.py);
- the newest generation stays mounted without holders (its page cache is what makes the next
  start fast) until `trim` takes it;
- a generation's directory exists before its mount and its pins, and goes after them: a crash
  at any point leaves a directory that `recover` or the next `acquire` can clear.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dsecfs.errors import BadInput, Busy
from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.namespaces import (
    NamespaceThread,
    enter_namespace,
    is_pinned,
    pin_namespace,
    prune_mounts,
)
from dsecfs.kernel.probe import Mode
from dsecfs.kernel.syscalls import closing, move_mount, umount
from dsecfs.layers.digest import Digest, parse_digest
from dsecfs.layers.local import LocalLayer
from dsecfs.locks import locked_file
from dsecfs.mount.erofs import LOCAL_READ_AHEAD_KIB, READ_AHEAD_KIB, erofs_mount
from dsecfs.mount.holders import Holder, add_holder, drop_holder, holders, stale_holders
from dsecfs.mount.overlay import clone_mounts, needs_attached_layers, overlay_root
from dsecfs.nodedirs import NodeDirs

if TYPE_CHECKING:
    from dsecfs.mount.trees import RootTrees

RECORD_FORMAT = 2
UPGRADE_CHECK_S = 5.0
"""How often at most it is looked whether a layer's blobs have become whole."""
IDLE_KEPT = 128
"""Layers without holders that stay mounted."""

_GENERATION = re.compile(r"[0-9]{8}\Z")


class Recovered(NamedTuple):
    """What `recover` found: names of dropped holders and paths of unmounted generations."""

    holders: list[str]
    mounts: list[str]


@dataclass(frozen=True, slots=True)
class _Record:
    """The content of a generation's record."""

    ready: bool
    """False from before the mount until after it."""
    direct: bool
    """Every device is a cache file; FUSE is not used."""
    private: bool
    """Made for one holder (recording a trace); nobody else gets it."""
    blobs: list[str]
    """Digests of blobs that may carry a pin of this generation."""
    mode: Mode
    """How it is mounted. Who asks for another mode gets another generation."""
    fuse: int
    """Mount id of the FUSE file system its devices are on; 0 if it uses none. The id cannot
    come back while EROFS has those files open."""


@dataclass(frozen=True, slots=True)
class _Generation:
    """One generation on disk."""

    path: Path
    record: _Record | None
    """None if its maker died before it was written, or it cannot be read."""

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def mnt(self) -> Path:
        return self.path / "mnt"

    @property
    def refs(self) -> Path:
        return self.path / "refs"

    @property
    def is_retired(self) -> bool:
        """Its data was found damaged (direct.py)."""
        return (self.path / "retired").exists()


class LayerMounts:
    """The layer mounts of a node. Safe to use from several threads and processes."""

    def __init__(
        self,
        dirs: NodeDirs,
        *,
        mode: Mode = "kernel",
        direct: bool = True,
        read_ahead_kib: int = READ_AHEAD_KIB,
    ) -> None:
        """`direct` False never uses cache files without FUSE. `read_ahead_kib` is that of new
        mounts whose bytes come on demand."""
        self._dirs = NodeDirs(dirs.data.absolute(), dirs.run.absolute())
        self._mode: Mode = mode
        self._direct = direct
        self._read_ahead_kib = read_ahead_kib
        self._thread: NamespaceThread | None = None
        self._starting = threading.Lock()
        self._looked: dict[Digest, float] = {}

    @property
    def mode(self) -> Mode:
        """How layers are mounted; "fuse": not at all, roots come from `trees`."""
        return self._mode

    @cached_property
    def trees(self) -> RootTrees:
        """Roots of containers in FUSE mode, where no layer is mounted."""
        from dsecfs.mount.trees import RootTrees

        return RootTrees(self._dirs)

    @property
    def namespace(self) -> Path:
        """Where the namespace with the mounts is pinned."""
        return self._dirs.namespace.with_name("layers")

    def start(self) -> NamespaceThread:
        """Make sure that the namespace exists and a thread of ours is in it."""
        with self._starting:
            if self._thread is None:
                run = self._dirs.run
                run.mkdir(mode=0o700, parents=True, exist_ok=True)
                keep = (run, Path("/proc"), Path("/sys"), Path("/dev"))
                pin_namespace(self.namespace, lambda: prune_mounts(keep))
                place = self.namespace
                self._thread = NamespaceThread(lambda: enter_namespace(place), "layer mounts")
            return self._thread

    def close(self) -> None:
        """End the thread. Mounts stay."""
        with self._starting:
            if self._thread is not None:
                self._thread.close()
                self._thread = None

    # -- using layers ------------------------------------------------------------------

    def acquire(self, layer: LocalLayer, holder: Holder) -> Path:
        """Mount `layer` if it is not mounted, note that `holder` uses it, return the mount's
        path (in the namespace of the mounts: give it to `clone`).

        MountError, Busy (another process holds the lock), DeadlineExceeded.
        """
        made = False
        with self._locked(layer.digest) as place:
            current = self._current(place, layer)
            if current is None:
                made = True
                current = self._make_direct(place, layer)
            if current is None:
                fuse = [self._dirs.fs / "blobs" / blob.digest for blob in layer.blobs]
                current = self._make(place, layer, fuse, self._read_ahead_kib)
            add_holder(current.refs, holder)
        if made:
            self.trim()
        return current.mnt

    def acquire_private(
        self, layer: LocalLayer, holder: Holder, devices: Sequence[Path], *, read_ahead_kib: int = 0
    ) -> Path:
        """A mount of its own for `holder`, with nothing cached, over the given device files.

        For recording: read-ahead is off, so what is read is what was asked for.
        """
        with self._locked(layer.digest) as place:
            made = self._make(place, layer, devices, read_ahead_kib, private=True)
            add_holder(made.refs, holder)
            return made.mnt

    def release(self, layer: Digest, holder: str) -> None:
        """`holder` no longer uses `layer`. No error if it did not."""
        with self._locked(layer) as place:
            generations = self._generations(place)
            for generation in generations:
                drop_holder(generation.refs, holder)
            self._drain(generations)

    def clone(self, paths: Sequence[Path], userns: int | None = None) -> list[int]:
        """Descriptors of unattached clones of acquired mounts, with owners shifted by the
        mapping of the user namespace `userns`. The caller closes them."""
        return self.start().call(lambda: clone_mounts(paths, userns))

    def overlay(
        self, lowers: Sequence[int], upper: int | None, *, what: str, place: Path, volatile: bool
    ) -> int:
        """`overlay_root` of clones. On kernels that want layers attached, they are attached below
        `place` for a moment, in the namespace of the mounts; a crash in between leaves them
        there for `detach_below(place)`."""
        if not needs_attached_layers():
            return overlay_root(lowers, upper, what=what, volatile=volatile)
        return self.start().call(
            lambda: overlay_root(
                lowers, upper, what=what, volatile=volatile, attach=place / "attached"
            )
        )

    def detach_below(self, place: Path) -> None:
        """Unmount what a crash in `overlay` left below `place`."""
        if not is_pinned(self.namespace):
            return

        def work() -> None:
            for mount in reversed(mounts_here()):
                if mount.point.is_relative_to(place):
                    umount(mount.point, detach=True)

        self.start().call(work)

    # -- keeping order -----------------------------------------------------------------

    def recover(self) -> Recovered:
        """Drop holders whose record is gone, generations nobody uses, and what crashes left."""
        from dsecfs.mount.direct import drop_stale_pins

        found = Recovered([], [])
        for layer in self._layers():
            with self._locked(layer) as place:
                generations = self._generations(place)
                for generation in generations:
                    for ref in stale_holders(generation.refs):
                        ref.unlink(missing_ok=True)
                        found.holders.append(ref.name)
                found.mounts.extend(str(g.path) for g in self._drain(generations))
        for _ in drop_stale_pins(self._dirs, self._knows_pin):
            pass
        return found

    def trim(self, keep: int = IDLE_KEPT) -> int:
        """Unmount layers without holders but for the `keep` last used; how many it were."""
        idle: list[tuple[float, Digest]] = []
        for layer in self._layers():
            place = self._dirs.layers / layer
            # Others make and remove generations meanwhile; what has none yet is not idle.
            with contextlib.suppress(OSError):
                found = [p for p in place.iterdir() if _GENERATION.match(p.name)]
                newest = max(found, default=None)
                if newest is not None and not os.listdir(newest / "refs"):
                    idle.append(((newest / "refs").stat().st_mtime, layer))
        done = 0
        for _, layer in sorted(idle)[: max(0, len(idle) - keep)]:
            with contextlib.suppress(Busy), self._locked(layer, wait_s=0) as place:
                done += len(self._drain(self._generations(place), newest_too=True))
        return done

    def mounted(self) -> dict[Digest, list[list[str]]]:
        """For each layer its generations, oldest first, each as the names of its holders."""
        found: dict[Digest, list[list[str]]] = {}
        for layer in self._layers():
            generations = self._generations(self._dirs.layers / layer)
            found[layer] = [sorted(ref.name for ref in _refs(g)) for g in generations]
        return {layer: generations for layer, generations in found.items() if generations}

    def _layers(self) -> list[Digest]:
        try:
            names = sorted(os.listdir(self._dirs.layers))
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            with contextlib.suppress(BadInput):
                found.append(parse_digest(name))
        return found

    def _knows_pin(self, name: str) -> bool:
        """Whether the generation a pin belongs to exists (name: mount-<boot>-<hex>-<gen>)."""
        prefix, _, number = name.rpartition("-")
        short = prefix.rpartition("-")[2]
        return any(
            (self._dirs.layers / layer / f"{int(number):08d}").is_dir()
            for layer in self._layers()
            if number.isdigit() and layer.startswith(short)
        )

    # -- generations (the layer's lock is held) -------------------------------------------

    @contextlib.contextmanager
    def _locked(self, layer: Digest, *, wait_s: float = 30.0) -> Iterator[Path]:
        place = self._dirs.layers / parse_digest(layer)
        while True:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(
                        locked_file(place / "lock", f"layer {layer[:12]}", wait_s=wait_s)
                    )
                except FileNotFoundError:
                    continue  # removed between the two steps by who saw it empty
                try:
                    yield place
                finally:
                    if not any(_GENERATION.match(name) for name in os.listdir(place)):
                        # The lock goes last: who waits for it sees that and starts again.
                        (place / "lock").unlink(missing_ok=True)
                        with contextlib.suppress(OSError):
                            place.rmdir()
                return

    def _generations(self, place: Path) -> list[_Generation]:
        """All generations of a layer, oldest first."""
        try:
            names = sorted(name for name in os.listdir(place) if _GENERATION.match(name))
        except FileNotFoundError:
            return []
        return [_Generation(place / name, _read_record(place / name)) for name in names]

    def _is_mounted(self, mnt: Path) -> bool:
        return self.start().call(lambda: _is_mount(mnt))

    def _current(self, place: Path, layer: LocalLayer) -> _Generation | None:
        """The generation a new holder gets, if there is one already."""
        for generation in reversed(self._generations(place)):
            record = generation.record
            if record is None or not record.ready or not self._is_mounted(generation.mnt):
                # Left by a crash, or by a namespace that is gone.
                self._destroy(generation)
            elif record.private or record.mode != self._mode:
                continue
            elif generation.is_retired:
                return None
            elif record.fuse and record.fuse != self._fuse_mount():
                # The FUSE file system was mounted anew: this generation reads from the old one.
                return None
            elif record.direct or not self._may_look(layer.digest):
                return generation
            else:
                return self._make_direct(place, layer) or generation
        return None

    def _fuse_mount(self) -> int:
        """The id of the mount at run/fs, found without a request to who serves it."""
        try:
            fd = os.open(self._dirs.fs, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return 0
        with closing(fd):
            for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
                if line.startswith("mnt_id:"):
                    return int(line.partition(":")[2])
        return 0

    def _may_look(self, layer: Digest) -> bool:
        now = time.monotonic()
        if not self._direct or now - self._looked.get(layer, -UPGRADE_CHECK_S) < UPGRADE_CHECK_S:
            return False
        self._looked[layer] = now
        return True

    def _make_direct(self, place: Path, layer: LocalLayer) -> _Generation | None:
        """A new generation that reads the cache files themselves; None unless all are whole."""
        from dsecfs.mount.direct import direct_file, may_be_whole, pin_name

        if not self._direct or not all(may_be_whole(self._dirs, blob) for blob in layer.blobs):
            return None
        with self._making(place, layer, direct=True) as path:
            name = pin_name(layer.digest, int(path.name))
            devices: list[Path] = []
            for blob in layer.blobs:
                file = direct_file(self._dirs, blob, name)
                if file is None:
                    self._destroy(_Generation(path, _read_record(path)))
                    return None
                devices.append(file)
            # Not around the page cache: the disk is read ahead for it, and what FUSE served lies
            # there already. Small files of a new mount come 1.5 to 9 times as fast; the copy that
            # was used once is the first to be dropped when memory is short.
            return self._mount(path, layer, devices, LOCAL_READ_AHEAD_KIB, directio=False)

    def _make(
        self,
        place: Path,
        layer: LocalLayer,
        devices: Sequence[Path],
        read_ahead_kib: int,
        *,
        private: bool = False,
    ) -> _Generation:
        """A new generation over the given device files."""
        with self._making(place, layer, private=private) as path:
            return self._mount(path, layer, devices, read_ahead_kib)

    @contextlib.contextmanager
    def _making(
        self, place: Path, layer: LocalLayer, *, direct: bool = False, private: bool = False
    ) -> Iterator[Path]:
        """A new generation's directory, which goes again if the block fails."""
        generations = self._generations(place)
        path = place / f"{generations[-1].number + 1 if generations else 1:08d}"
        for part in (path, path / "mnt", path / "refs"):
            part.mkdir(mode=0o700)
        pinned: list[str] = [blob.digest for blob in layer.blobs] if direct else []
        fuse = 0 if direct or not layer.blobs else self._fuse_mount()
        record = _Record(False, direct, private, pinned, self._mode, fuse)
        try:
            _write_record(path, record)
            yield path
        except BaseException:
            self._destroy(_Generation(path, record))
            raise

    def _mount(
        self,
        path: Path,
        layer: LocalLayer,
        devices: Sequence[Path],
        read_ahead_kib: int,
        *,
        directio: bool = True,
    ) -> _Generation:
        fd = erofs_mount(
            layer.meta_path,
            devices,
            mode=self._mode,
            directio=directio,
            read_ahead_kib=read_ahead_kib,
        )
        try:
            self.start().call(lambda: move_mount(fd, path / "mnt"))
        finally:
            os.close(fd)
        making = _read_record(path)
        assert making is not None
        record = replace(making, ready=True)
        _write_record(path, record)
        return _Generation(path, record)

    def _drain(
        self, generations: Sequence[_Generation], *, newest_too: bool = False
    ) -> list[_Generation]:
        """Unmount generations nobody holds; of the ready ones the newest only if told so."""
        usable = [
            g
            for g in generations
            if g.record and g.record.ready and not g.record.private and not g.is_retired
        ]
        newest = usable[-1] if usable and not newest_too else None
        gone = [g for g in generations if g is not newest and not _refs(g)]
        for generation in gone:
            self._destroy(generation)
        return gone

    def _destroy(self, generation: _Generation) -> None:
        self.start().call(lambda: umount(generation.mnt, detach=True))
        if generation.record is not None and generation.record.blobs:
            from dsecfs.cache.blob import unpin
            from dsecfs.mount.direct import pin_name

            layer = parse_digest(generation.path.parent.name)
            for blob in generation.record.blobs:
                unpin(self._dirs, parse_digest(blob), pin_name(layer, generation.number))
        shutil.rmtree(generation.path)


def _is_mount(path: Path) -> bool:
    try:
        return path.stat().st_dev != path.parent.stat().st_dev
    except FileNotFoundError:
        return False


def _refs(generation: _Generation) -> list[Path]:
    return holders(generation.refs)


def _read_record(path: Path) -> _Record | None:
    try:
        value = json.loads((path / "record").read_text())
        if value.pop("format") != RECORD_FORMAT:
            return None
        return _Record(**value)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_record(path: Path, record: _Record) -> None:
    """Replace the record in one step."""
    new = path / "record.new"
    new.write_text(json.dumps({"format": RECORD_FORMAT, **asdict(record)}))
    new.rename(path / "record")
