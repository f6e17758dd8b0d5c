"""The files of one blob: what is believed, what is made anew, what is refused."""

from __future__ import annotations

import os
import re
import struct
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsecfs.cache import ChunkCache, pin, pins, read_chunk_list, unpin, write_chunk_list
from dsecfs.cache.blob import open_files
from dsecfs.cache.blobfiles import HEADER, OLD, STATE, VALID
from dsecfs.errors import BadInput, CacheError, Corrupt, FormatError, NotFound, TooNew
from dsecfs.layers.layout import LZ4
from dsecfs.layers.manifest import BlobRef
from dsecfs.nodedirs import NodeDirs
from tests.t2_cache.conftest import ExpectLog, MakeCache, change_boot, new_node
from tests.t2_cache.packing import CHUNK, Packed, content, pack
from tests.t2_cache.stores import CountingStore


def test_chunk_list_comes_back_and_is_idempotent(dirs: NodeDirs, packed: Packed) -> None:
    path = dirs.blob(packed.register(dirs)) / "chunks"
    before = path.stat()
    os.utime(path, (1, 1))
    packed.register(dirs)
    assert path.stat().st_ino == before.st_ino, "not written again"
    assert path.stat().st_mtime >= before.st_mtime - 1, "noted as just used"
    listed = read_chunk_list(dirs, packed.digest)
    assert listed == (packed.ref.size, packed.ref.chunk_size, packed.digests)


def test_a_chunk_list_of_another_blob_is_refused(dirs: NodeDirs, packed: Packed) -> None:
    with pytest.raises(Corrupt, match="has another digest"):
        write_chunk_list(dirs, packed.ref, packed.digests[32:] + packed.digests[:32])
    other = BlobRef(packed.digest, packed.ref.size + 4096, packed.ref.chunk_size)
    with pytest.raises(Corrupt):
        write_chunk_list(dirs, other, packed.digests)
    with pytest.raises(NotFound, match="not on this node"):
        read_chunk_list(dirs, packed.digest)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_hostile_chunk_list_is_an_error_and_is_healed(
    dirs: NodeDirs, packed: Packed, data: st.DataObject
) -> None:
    path = dirs.blob(packed.register(dirs)) / "chunks"
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = data.draw(
        st.one_of(
            st.just(good[:at]),
            st.just(good + b"\0"),
            st.binary(max_size=200),
            st.integers(1, 255).map(lambda x: good[:at] + bytes([good[at] ^ x]) + good[at + 1 :]),
        )
    )
    path.write_bytes(bad)
    if bad[24:32] != good[24:32] and bad[:24] + bad[32:] == good[:24] + good[32:]:
        assert read_chunk_list(dirs, packed.digest).digests == packed.digests  # padding
    else:
        with pytest.raises(FormatError):
            read_chunk_list(dirs, packed.digest)
    packed.register(dirs)
    assert path.read_bytes() == good


def test_newer_versions_are_refused_in_one_line(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    make_cache(store).open(packed.register(dirs)).read(0, 1)
    present = dirs.blob(packed.digest) / "present"
    with open(present, "r+b") as f:
        f.seek(8)
        f.write(struct.pack("<I", 2))
    before = present.read_bytes()
    with pytest.raises(TooNew, match=r"version 2 is newer than this program knows \(1\)"):
        make_cache(store).open(packed.digest)
    assert present.read_bytes() == before, "a newer program's cache is left alone"
    chunks = dirs.blob(packed.digest) / "chunks"
    chunks.write_bytes(chunks.read_bytes()[:8] + struct.pack("<I", 2) + chunks.read_bytes()[12:])
    with pytest.raises(TooNew):
        read_chunk_list(dirs, packed.digest)


@pytest.mark.parametrize("digests_missing", [False, True])
def test_unknown_blob(
    dirs: NodeDirs,
    packed: Packed,
    make_cache: MakeCache,
    store: CountingStore,
    digests_missing: bool,
) -> None:
    if digests_missing:
        dirs.blob(packed.digest).mkdir(parents=True)
    with pytest.raises(NotFound):
        make_cache(store).open(packed.digest)


def test_after_a_boot_every_chunk_is_hashed_again(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    assert blob.read(0, blob.size) == packed.content
    assert blob.complete() and blob.contents().old == 0
    change_boot(dirs, packed.digest)
    requests = store.ranges
    again = make_cache(store)
    blob = again.open(packed.digest)
    assert blob.contents() == (blob.chunk_count, 0, blob.chunk_count)
    assert not blob.complete()
    assert blob.read_nowait(0, 1) is None, "nothing of an earlier boot is served unseen"
    assert blob.read(0, blob.size) == packed.content
    assert blob.complete()
    assert store.ranges == requests
    assert again.stats.snapshot()["verified"] == blob.chunk_count


@pytest.mark.parametrize("damage", ["punched", "garbage", "all"])
def test_power_loss_words_newer_than_data(
    dirs: NodeDirs,
    packed: Packed,
    make_cache: MakeCache,
    store: CountingStore,
    damage: str,
    expect_log: ExpectLog,
) -> None:
    """The kernel wrote `present` and not all of `data`."""
    expect_log(r"damaged in the cache")
    blob = make_cache(store).open(packed.register(dirs))
    blob.read(0, blob.size)
    lost = [c for c in range(11) if c != 6] if damage == "all" else [1, 4, 5]
    fd = os.open(dirs.blob(packed.digest) / "data", os.O_RDWR)
    for chunk in lost:
        filler = b"\xa5" * 777 if damage == "garbage" else bytes(blob.files.length(chunk))
        os.pwrite(fd, filler, chunk * CHUNK)
    os.close(fd)
    change_boot(dirs, packed.digest)
    cache = make_cache(store)
    blob = cache.open(packed.digest)
    assert blob.read(0, blob.size) == packed.content
    counted = cache.stats.snapshot()
    assert counted["corrupt_cache"] == len(lost)
    assert counted["chunks_fetched"] == len(lost)
    assert blob.complete()


def test_power_loss_data_newer_than_words(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    """The kernel wrote `data` and not all of `present`."""
    blob = make_cache(store).open(packed.register(dirs))
    blob.read(0, blob.size)
    present = dirs.blob(packed.digest) / "present"
    words = bytearray(present.read_bytes())
    for chunk in (0, 2, 3):
        words[HEADER + 4 * chunk : HEADER + 4 * chunk + 4] = bytes(4)
    present.write_bytes(words)
    change_boot(dirs, packed.digest)
    cache = make_cache(store)
    blob = cache.open(packed.digest)
    assert blob.read(0, blob.size) == packed.content
    assert cache.stats.snapshot()["chunks_fetched"] == 3


@pytest.mark.parametrize("kept", [0, 1, CHUNK, 3 * CHUNK + 7])
def test_truncated_data_at_open(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore, kept: int
) -> None:
    """Even in the same boot: whatever lay behind the cut would read as zeros."""
    blob = make_cache(store).open(packed.register(dirs))
    blob.read(0, blob.size)
    os.truncate(dirs.blob(packed.digest) / "data", kept)
    blob = make_cache(store).open(packed.digest)
    assert blob.contents() == (blob.chunk_count, 0, 0)
    assert blob.read(0, blob.size) == packed.content


def test_truncated_data_under_an_open_blob(
    dirs: NodeDirs,
    packed: Packed,
    make_cache: MakeCache,
    store: CountingStore,
    expect_log: ExpectLog,
) -> None:
    """A chunk beyond the cut is short; one filled beyond it must not turn the rest to zeros."""
    expect_log(r"damaged in the cache")
    expect_log(r"cut short")
    cache = make_cache(store)
    blob = cache.open(packed.register(dirs))
    blob.read(0, (blob.chunk_count - 2) * CHUNK)
    os.truncate(dirs.blob(packed.digest) / "data", CHUNK + 5)
    tail = (blob.chunk_count - 2) * CHUNK
    assert blob.read(tail, blob.size) == packed.content[tail:]
    for offset in range(0, blob.size, CHUNK // 2):
        got = blob.read(offset, CHUNK)
        assert got == packed.content[offset : offset + CHUNK]
    assert blob.read(0, blob.size) == packed.content
    end = time.monotonic() + 10
    data = dirs.blob(packed.digest) / "data"
    while data.stat().st_size != blob.size and time.monotonic() < end:
        time.sleep(0.005)
    assert blob.read(0, blob.size) == packed.content
    assert data.read_bytes() == packed.content and blob.complete()


@pytest.mark.parametrize("name", ["present", "data", "used"])
@pytest.mark.parametrize("what", ["removed", "empty", "random", "longer", "another inode"])
def test_damaged_files_are_made_anew(
    dirs: NodeDirs,
    packed: Packed,
    make_cache: MakeCache,
    store: CountingStore,
    name: str,
    what: str,
) -> None:
    first = make_cache(store).open(packed.register(dirs))
    first.read(0, first.size)
    path = dirs.blob(packed.digest) / name
    before = path.read_bytes()
    if what == "removed":
        path.unlink()
    elif what == "another inode":
        path.unlink()
        path.write_bytes(before)
    elif what == "longer":
        with open(path, "ab") as f:
            f.write(b"\xff" * 5000)
    elif what == "random" and name == "present":
        path.write_bytes(os.urandom(len(before)))
    elif what == "random" or name != "data":
        path.write_bytes(b"")  # `used` may hold anything; `present` empty
    blob = make_cache(store).open(packed.digest)
    assert blob.read(0, blob.size) == packed.content
    if first.files.words.nbytes and what != "empty" and what != "random":
        # Who had it open keeps the pair of files it had.
        assert first.read(0, first.size) == packed.content


@pytest.mark.parametrize("name", ["present", "data", "used"])
def test_a_symlink_is_not_followed(
    dirs: NodeDirs,
    packed: Packed,
    make_cache: MakeCache,
    store: CountingStore,
    tmp_path: Path,
    name: str,
) -> None:
    blob = make_cache(store).open(packed.register(dirs))
    blob.read(0, blob.size)
    path = dirs.blob(packed.digest) / name
    victim = tmp_path / "victim"
    victim.write_bytes(path.read_bytes())
    before = victim.read_bytes()
    path.unlink()
    path.symlink_to(victim)
    try:
        blob = make_cache(store).open(packed.digest)
        assert blob.read(0, blob.size) == packed.content
    except CacheError as e:
        assert str(path.parent) in str(e)
    assert victim.read_bytes() == before


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(noise=st.binary(max_size=400), at=st.integers(0, 400), cut=st.integers(0, 600))
def test_hostile_present_never_gives_wrong_bytes(
    tmp_path: Path, noise: bytes, at: int, cut: int
) -> None:
    """Any bytes in `present` cost at most a fetch, as long as no data was verified: words that
    say VALID in this boot are believed, so only those of another boot are drawn here."""
    dirs, store = new_node(tmp_path)
    packed = pack(store, content(6, chunk_size=4096), chunk_size=4096, codecs=(LZ4,))
    digest = packed.register(dirs)
    cache = ChunkCache(dirs, store, max_bytes=1 << 30, min_free=0)
    try:
        cache.open(digest).read(0, 8192)
        present = dirs.blob(digest) / "present"
        damaged = bytearray(present.read_bytes())
        damaged[at : at + len(noise)] = noise
        present.write_bytes(bytes(damaged[: len(damaged) - cut] if cut else damaged))
        change_boot(dirs, digest)
        cache.close()
        cache = ChunkCache(dirs, store, max_bytes=1 << 30, min_free=0)
        blob = cache.open(digest)
        assert blob.read(0, blob.size) == packed.content
    except TooNew as e:
        assert re.search("version", str(e))
    finally:
        cache.close()


def test_generation_grows_with_every_clear(dirs: NodeDirs, packed: Packed) -> None:
    packed.register(dirs)
    files = open_files(dirs, packed.digest, packed.ref.size, packed.ref.chunk_size)
    seen = set()
    for _ in range(5):
        assert files.lock(3)
        files.fill(3, packed.content[3 * CHUNK : 4 * CHUNK], zeros=False)
        assert files.words[3] & STATE == VALID
        assert files.words[3] not in seen
        seen.add(files.words[3])
        files.demote(3)
        assert files.words[3] & STATE == VALID, "a locked chunk is left alone"
        files.clear(3)
        files.punch(3)
        files.unlock(3)
    files.lock(3)
    files.words[3] = 0xFFFFFFFC | VALID
    files.clear(3)
    assert files.words[3] == 0, "the generation wraps without touching the state"


def test_locks_exclude_other_openers_and_die_with_them(dirs: NodeDirs, packed: Packed) -> None:
    packed.register(dirs)

    def another() -> object:
        return open_files(dirs, packed.digest, packed.ref.size, packed.ref.chunk_size)

    one = open_files(dirs, packed.digest, packed.ref.size, packed.ref.chunk_size)
    two = open_files(dirs, packed.digest, packed.ref.size, packed.ref.chunk_size)
    assert one.lock(2, 3)
    assert not two.lock(4) and not two.lock(0, 8) and two.lock(5)
    one.unlock(4)
    assert two.lock(4)
    assert not two.lock(2)
    del one
    assert two.lock(2)


def test_demote_marks_a_free_chunk(
    dirs: NodeDirs, packed: Packed, make_cache: MakeCache, store: CountingStore
) -> None:
    blob = make_cache(store).open(packed.register(dirs))
    blob.read(0, CHUNK)
    blob.files.demote(0)
    assert blob.files.state(0) == OLD
    assert blob.read(0, CHUNK) == packed.content[:CHUNK]
    assert blob.files.state(0) == VALID


def test_pins(dirs: NodeDirs, packed: Packed) -> None:
    packed.register(dirs)
    pin(dirs, packed.digest, "layer.1")
    pin(dirs, packed.digest, "layer.1")
    pin(dirs, packed.digest, "b")
    assert pins(dirs, packed.digest) == ["b", "layer.1"]
    unpin(dirs, packed.digest, "b")
    unpin(dirs, packed.digest, "b")
    assert pins(dirs, packed.digest) == ["layer.1"]
    for name in ("", "..", "a/b", ".x", "a\n", "x" * 200):
        with pytest.raises(BadInput):
            pin(dirs, packed.digest, name)
