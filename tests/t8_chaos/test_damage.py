"""Damage: in the store, in the cache, in heads; a disk that is full; power loss in both orders."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dsecfs.layers.local
from dsecfs.cache.blob import PRESENT_VERSION
from dsecfs.errors import FormatError
from dsecfs.layers.digest import Digest
from dsecfs.layers.local import LocalLayers
from dsecfs.store.base import Store, head_key
from dsecfs.store.open import open_store
from tests.t4_fuse.family import wait_for
from tests.t8_chaos.stack import HANG_S, Content, Load, Mode, Node, drop_caches, node, publish

WORDS_AT = 128
"""Where the words of `present` begin (docs/cache-protocol.md)."""
BOOT_AT = 32
EARLIER_BOOT = b"00000000-0000-4000-8000-000000000000"


@pytest.fixture
def own(top: Path) -> Iterator[Store]:
    """A store that the test may damage."""
    store = open_store(f"file:{top}/store", create=True)
    yield store
    store.close()


def outcomes(n: Node) -> dict[Mode, set[str]]:
    """In each mode the files that cannot be read (EIO); all others must be right."""
    failed: dict[Mode, set[str]] = {}
    for mode, tree in n.trees.items():
        failed[mode] = set()
        for name in n.content.sums:
            try:
                (tree / name).read_bytes()
            except OSError as e:
                assert e.errno == errno.EIO
                failed[mode].add(name)
    return failed


def test_a_chunk_corrupt_in_the_store(
    top: Path, own: Store, modes: tuple[Mode, ...]
) -> None:
    content = publish(own, top, seed=4)
    objects = sorted(p for p in (top / "store" / "objects").rglob("*") if p.is_file())
    victim = max(objects, key=lambda p: p.stat().st_size)
    good = victim.read_bytes()
    middle = len(good) // 2
    _overwrite(victim, middle, bytes(b ^ 0x55 for b in good[middle : middle + 1000]))
    with node(top / "node", own, content, modes) as n:
        failed = outcomes(n)
        assert len({frozenset(names) for names in failed.values()}) == 1, "modes differ"
        names = failed[modes[0]]
        assert 0 < len(names) < len(content.sums) // 2
        assert n.counted()["corrupt_store"] > 0
        # Only what is damaged is lost, and it is back as soon as the store is mended.
        _overwrite(victim, middle, good[middle : middle + 1000])
        n.check()


def _overwrite(path: Path, at: int, data: bytes) -> None:
    mode = path.stat().st_mode
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    path.chmod(mode)


def test_heads_that_are_cut_off(
    top: Path, own: Store, modes: tuple[Mode, ...], expect_log: Callable[[str], None]
) -> None:
    content = publish(own, top, seed=5)
    layer = content.layers[0]
    stored = top / "store" / head_key(layer)
    whole = stored.read_bytes()
    with node(top / "node", own, content, modes) as n:
        # On the node: fetched anew.
        for path in (n.dirs.head(layer), n.dirs.meta(layer)):
            n.unmount()
            os.truncate(path, path.stat().st_size // 2)
            n.local = LocalLayers(own, n.dirs).ensure_all(content.layers)
            n.mount()
            drop_caches()
            n.check()
        # In the store: an error that says so, and nothing half done.
        n.unmount()
        stored.chmod(0o600)
        os.truncate(stored, len(whole) - 100)
        for path in (n.dirs.head(layer), n.dirs.meta(layer)):
            path.unlink()
        expect_log("reading it once more")
        with pytest.raises(FormatError, match=layer[:12]):
            LocalLayers(own, n.dirs).ensure(layer)
        assert not n.dirs.head(layer).exists() and not n.dirs.meta(layer).exists()
        stored.write_bytes(whole)
        n.local = LocalLayers(own, n.dirs).ensure_all(content.layers)
        n.mount()
        n.check()


# -- power loss ------------------------------------------------------------------------------


def blobs(n: Node) -> list[Digest]:
    return [blob.digest for layer in n.local for blob in layer.blobs]


def present_words(path: Path) -> tuple[int, ...]:
    data = path.read_bytes()
    return struct.unpack_from(f"<{(len(data) - WORDS_AT) // 4}I", data, WORDS_AT)


def earlier_boot(n: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all that the node has look as if another boot had left it."""
    for blob in blobs(n):
        with (n.dirs.blob(blob) / "present").open("r+b") as file:
            assert struct.unpack("<8sI", file.read(12)) == (b"DSECPRES", PRESENT_VERSION)
            file.seek(BOOT_AT)
            file.write(EARLIER_BOOT)
    monkeypatch.setattr(dsecfs.layers.local, "boot_id", lambda: "another")


@pytest.mark.parametrize("order", ["words before data", "data before words"])
def test_power_loss(
    top: Path,
    shared_store: Store,
    content: Content,
    modes: tuple[Mode, ...],
    order: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk has the words but not all of the data they speak of, or the other way round."""
    rng = random.Random(order)
    with node(top / "node", shared_store, content, modes) as n:
        n.check()
        before = n.counted()
        states = [w & 3 for b in blobs(n) for w in present_words(n.dirs.blob(b) / "present")]
        assert before["chunks_fetched"] == states.count(2)
        n.power_loss()
        lost = 0
        for blob in blobs(n):
            place = n.dirs.blob(blob)
            words = present_words(place / "present")
            chosen = [i for i, word in enumerate(words) if word and rng.random() < 0.5]
            lost += len(chosen)
            for chunk in chosen:
                if order == "words before data":
                    _drop_block(place / "data", chunk)
                else:
                    _overwrite(place / "present", WORDS_AT + 4 * chunk, bytes(4))
            if order == "words before data":
                _overwrite(place / "present", WORDS_AT + 4 * len(words) - 4, b"\x02\0\0\0")
        # Heads and images were not all written either.
        os.truncate(n.dirs.head(content.layers[0]), 1000)
        os.truncate(n.dirs.meta(content.layers[1]), 4096)
        earlier_boot(n, monkeypatch)
        n.up(shared_store)
        with Load(n) as load:
            load.progress(count=5)
        n.check()
        after = n.counted()
        fetched = after["chunks_fetched"] - before["chunks_fetched"]
        verified = after["verified"] - before["verified"]
        assert lost <= fetched < before["chunks_fetched"]
        assert verified > 0, "what was whole is used again"
        damaged = after["corrupt_cache"] - before["corrupt_cache"]
        assert damaged >= lost if order == "words before data" else damaged == 0
        assert after["errors"] == before["errors"]


def _drop_block(data: Path, chunk: int) -> None:
    """A block under a chunk becomes a hole, as if it had never been written."""
    size = data.stat().st_size
    at = min(chunk * (64 << 10), size - 4096)
    done = subprocess.run(
        ["fallocate", "--punch-hole", "--offset", str(at), "--length", "4096", data],
        capture_output=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr


# -- a full disk -------------------------------------------------------------------------------


@pytest.fixture
def small_disk(top: Path) -> Iterator[Path]:
    """An ext4 file system of 24 MiB in a file: less than the layers' data."""
    if shutil.which("mkfs.ext4") is None or not os.path.exists("/dev/loop-control"):
        pytest.skip("needs mkfs.ext4 (e2fsprogs) and loop devices")
    image, place = top / "disk.ext4", top / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(24 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True, timeout=60)
    subprocess.run(["mount", "-o", "loop", image, place], check=True, timeout=60)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True, timeout=60)


def kept(n: Node) -> int:
    """Chunks that were fetched and written."""
    counted = n.counted()
    return counted["chunks_fetched"] - counted["read_through"]


def test_the_cache_disk_is_full(
    top: Path, shared_store: Store, content: Content, modes: tuple[Mode, ...], small_disk: Path
) -> None:
    with node(top / "node", shared_store, content, modes, data=small_disk / "data") as n:
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(65536))
        os.truncate(filler, filler.stat().st_size - 300_000)
        with Load(n) as load:
            load.progress(count=5)
            drop_caches()
            n.kill_worker()
            load.progress(count=2)
            assert n.counted()["read_through"] > 0
            # Nothing hangs for good: with room again, chunks are kept again.
            filler.unlink()
            before = kept(n)
            wait_for("chunks that are kept", lambda: kept(n) > before + 20, HANG_S)
            load.progress()
        n.check()
        assert n.counted()["errors"] == 0
        assert "Traceback" not in n.log()
