"""What only directories can do wrong: links, special files, crashes, leftovers."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecfs.errors import Conflict, DsecfsError, NotFound, StoreDenied, StoreError, StoreUnavailable
from dsecfs.store import beneath
from dsecfs.store.directory import STALE_S, DirectoryStore
from dsecfs.store.threefs import ThreeFsStore


@pytest.fixture(params=[DirectoryStore, ThreeFsStore])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DirectoryStore]:
    made: DirectoryStore = request.param(tmp_path / "store", create=True)
    yield made
    made.close()


@pytest.fixture(params=["openat2", "walk"])
def opening(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of staying below the root."""
    if request.param == "walk":
        monkeypatch.setattr(beneath, "_have_openat2", False)


def leftovers(store: DirectoryStore) -> list[str]:
    return sorted(os.listdir(store.root / "~tmp"))


@pytest.mark.usefixtures("opening")
def test_no_link_leads_outside(store: DirectoryStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (outside / "sub").mkdir()
    os.symlink(outside, store.root / "dir")
    os.symlink(outside / "secret", store.root / "file")
    (store.root / "real").mkdir()
    os.symlink("../../outside/secret", store.root / "real" / "up")
    os.symlink("/etc/passwd", store.root / "real" / "etc")
    for key in ("dir/secret", "file", "real/up", "real/etc"):
        for call in (
            lambda key=key: store.get(key),
            lambda key=key: store.get_range(key, 0, 1),
            lambda key=key: store.stat(key),
        ):
            with pytest.raises((StoreError, NotFound)):
                call()
    for key in ("dir/new", "dir/sub/new", "dir/newsub/new"):
        with pytest.raises(DsecfsError):
            store.put_if_absent(key, b"x")
        with pytest.raises(DsecfsError):
            store.put_content(key, b"x")
    store.delete("dir/secret")
    assert list(store.list("")) == []
    assert sorted(os.listdir(outside)) == ["secret", "sub"] and not os.listdir(outside / "sub")
    assert leftovers(store) == []
    # A link under the key itself is replaced or refused, never followed.
    assert store.put_if_absent("file", b"x") is False
    if type(store) is DirectoryStore:
        store.put_content("file", b"new")
        assert store.get("file") == b"new"
    assert (outside / "secret").read_bytes() == b"secret"


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    os.symlink("real", tmp_path / "link")
    store = DirectoryStore(tmp_path / "link")
    store.put_content("a/b", b"x")
    assert (tmp_path / "real/a/b").read_bytes() == b"x"
    store.close()


@pytest.mark.usefixtures("opening")
def test_a_directory_swapped_for_a_link_is_never_followed(
    store: DirectoryStore, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"secret")
    store.put_content("d/f", b"inside")
    os.symlink(outside, store.root / "evil")
    stop = threading.Event()

    def swap() -> None:
        libc = beneath._libc
        while not stop.is_set():
            # renameat2 RENAME_EXCHANGE (include/uapi/linux/fs.h)
            libc.renameat2(
                -100, os.fsencode(store.root / "d"), -100, os.fsencode(store.root / "evil"), 2
            )

    thread = threading.Thread(target=swap)
    thread.start()
    got: set[object] = set()
    try:
        for _ in range(3000):
            try:
                got.add(store.get("d/f"))
            except DsecfsError as e:
                got.add(type(e))
    finally:
        stop.set()
        thread.join()
    assert b"inside" in got and b"secret" not in got


def test_special_files_are_no_objects(store: DirectoryStore) -> None:
    os.mkfifo(store.root / "fifo")
    with pytest.raises((NotFound, StoreError)):
        store.get("fifo")
    with pytest.raises((NotFound, StoreError)):
        store.get_range("fifo", 0, 1)
    assert list(store.list("")) == []


def test_files_of_others_are_left_alone(store: DirectoryStore) -> None:
    for name in ("lost+found", "a b", "~backup"):
        (store.root / name).mkdir()
        (store.root / name / "x").write_bytes(b"x")
    store.put_content("a/b", b"x")
    assert [info.key for info in store.list("")] == ["a/b"]


def test_directories_deeper_than_any_key_are_left_alone(store: DirectoryStore) -> None:
    """A list goes down by recursion: what others made must not end it."""
    store.put_if_absent("a/a/x", b"1")
    fd = os.open(store.root, os.O_RDONLY)
    try:
        for _ in range(1500):
            with contextlib.suppress(FileExistsError):
                os.mkdir("a", dir_fd=fd)
            below = os.open("a", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
    finally:
        os.close(fd)
    try:
        assert [info.key for info in store.list("")] == ["a/a/x"]
    finally:
        # Deeper than what pytest could remove.
        subprocess.run(["rm", "-rf", store.root / "a"], check=True, timeout=60)


def test_a_missing_root_is_an_error_that_says_so(tmp_path: Path) -> None:
    for kind in (DirectoryStore, ThreeFsStore):
        with pytest.raises(NotFound, match="no such directory; check that it is mounted"):
            kind(tmp_path / "missing")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotFound):
        DirectoryStore(tmp_path / "file")
    assert not (tmp_path / "missing").exists()


def test_a_key_below_an_object_is_a_conflict(store: DirectoryStore) -> None:
    store.put_content("a", b"x")
    with pytest.raises(Conflict, match="one key is a directory of another"):
        store.put_if_absent("a/b", b"y")
    store.put_content("d/e", b"x")
    if type(store) is DirectoryStore:
        with pytest.raises(Conflict):
            store.put_content("d", b"y")
    assert store.put_if_absent("d", b"y") is False
    assert leftovers(store) == []


def test_writers_leave_nothing(store: DirectoryStore) -> None:
    store.put_if_absent("a", b"x")
    store.put_if_absent("a", b"y")
    store.put_content("b", b"x")
    store.put_content("b", b"x")
    assert leftovers(store) == []


def test_old_leftovers_are_swept_and_young_ones_kept(store: DirectoryStore) -> None:
    tmp = store.root / "~tmp"
    tmp.mkdir()
    for name, age in (("old", STALE_S + 60), ("young", STALE_S - 3600)):
        (tmp / name).write_bytes(b"x")
        when = time.time() - age
        os.utime(tmp / name, (when, when))
    store.put_content("a", b"x")
    assert leftovers(store) == ["young"]


def test_an_answer_lost_after_the_link_is_found_again(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory cannot be fsynced: nobody is told True, until the repeated call is."""
    with monkeypatch.context() as patch:
        patch.setattr(
            store, "_sync_parent", lambda key: (_ for _ in ()).throw(OSError(errno.EIO, "injected"))
        )
        with pytest.raises(StoreUnavailable):
            store.put_if_absent("a", b"x", put_id="1" * 32)
    assert store.put_if_absent("a", b"x", put_id="2" * 32) is False
    assert store.put_if_absent("a", b"x", put_id="1" * 32) is True
    assert leftovers(store) == []


def test_deletes_that_prune_do_not_disturb_puts(store: DirectoryStore) -> None:
    """Directories come and go under the hands of writers."""

    def work(number: int) -> None:
        for i in range(150):
            key = f"d/e/{number}-{i}"
            if i % 2:
                store.put_content(key, b"x")
            else:
                assert store.put_if_absent(key, b"x")
            assert store.get(key) == b"x"
            store.delete(key)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert sorted(os.listdir(store.root)) == ["~tmp"]


def test_full_and_readonly_stores_say_what_to_do(tmp_path: Path, store: DirectoryStore) -> None:
    for code, kind in (
        (errno.ENOSPC, StoreError),
        (errno.EDQUOT, StoreError),
        (errno.EROFS, StoreDenied),
        (errno.EACCES, StoreDenied),
        (errno.ESTALE, StoreUnavailable),
        (errno.EIO, StoreUnavailable),
    ):
        error = store._error(OSError(code, os.strerror(code)), "store", "a")
        assert type(error) is kind and os.strerror(code) in str(error)


@pytest.mark.root
def test_a_really_full_store(tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)], check=True)
    try:
        store = DirectoryStore(root)
        store.put_content("a", b"x" * 1000)
        with pytest.raises(StoreError, match="No space left.*make room"):
            store.put_content("b", b"x" * (2 << 20))
        assert [info.key for info in store.list("")] == ["a"]
        assert leftovers(store) == []
        store.put_content("c", b"x" * 1000)
        store.close()
    finally:
        subprocess.run(["umount", str(root)], check=True)


@pytest.mark.root
def test_a_root_that_is_mounted_anew_works_again(tmp_path: Path) -> None:
    """As when the FUSE daemon of a shared file system was restarted."""
    root = tmp_path / "mnt"
    backing = tmp_path / "backing"
    for path in (root, backing):
        path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(backing)], check=True)
    try:
        subprocess.run(["mount", "--bind", str(backing), str(root)], check=True)
        store = DirectoryStore(root)
        store.put_content("a", b"x")
        subprocess.run(["umount", "-l", str(root)], check=True)
        failed = store._fd
        store._reopen(failed)
        assert store._fd == failed, "an unmounted root must not become the directory below it"
        subprocess.run(["mount", "--bind", str(backing), str(root)], check=True)
        store._reopen(failed)
        assert store._fd != failed
        assert store.get("a") == b"x"
        store.close()
    finally:
        subprocess.run(["umount", str(root)], check=False)
        subprocess.run(["umount", str(backing)], check=True)


def test_a_closed_store_says_so(store: DirectoryStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("a")


PUTS = """
import sys
from dsecfs.store.directory import DirectoryStore
store = DirectoryStore(sys.argv[1])
for i in range(100000):
    store.put_content(f"c/{i % 7}/{i}", b"%d" % i * 5000)
    store.put_if_absent(f"r/{i}", b"%d" % i * 5000)
    print(i, flush=True)
"""


def test_killed_at_any_moment_nothing_is_half(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    for delay in (0.0, 0.003, 0.011, 0.02, 0.05):
        child = subprocess.Popen(
            [sys.executable, "-c", PUTS, str(root)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        try:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(delay)
        finally:
            child.kill()
            rest, _ = child.communicate()
        done = int(rest.split()[-1]) if rest.split() else 0
        store = DirectoryStore(root)
        found = {info.key: info.size for info in store.list("")}
        for key, size in found.items():
            number = key.rpartition("/")[2]
            assert size == len(number) * 5000
            assert store.get(key) == number.encode() * 5000
        # What was acknowledged is there.
        assert all(f"r/{i}" in found and f"c/{i % 7}/{i}" in found for i in range(done + 1))
        store.close()


names = st.sampled_from(["a", "b", "a-", "a.", "a0", "A", "z_", "0"])
trees = st.lists(st.lists(names, min_size=1, max_size=4).map("/".join), unique=True, max_size=20)


@settings(max_examples=60, deadline=None)
@given(trees, st.lists(names, max_size=2).map("/".join), st.none() | st.text("ab-.0/", max_size=5))
def test_lists_are_those_of_a_sorted_dict(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[str], prefix: str, after: str | None
) -> None:
    store = DirectoryStore(tmp_path_factory.mktemp("list"))
    there: set[str] = set()
    for key in wanted:
        parts = key.split("/")
        above = {"/".join(parts[:i]) for i in range(1, len(parts))}
        if not above & there and not any(k.startswith(key + "/") for k in there):
            store.put_content(key, b"")
            there.add(key)
    below = prefix + "/" if prefix else ""
    expected = sorted(k for k in there if k.startswith(below) and k > (after or ""))
    assert [info.key for info in store.list(prefix, after=after or "")] == expected
    store.close()


def test_no_directory_is_read_for_keys_that_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    for i in range(10):
        store.put_content(f"d/{i}/x", b"")
    opened = []
    whole = DirectoryStore._entries

    def watched(self: DirectoryStore, prefix: str) -> Sequence[tuple[str, os.stat_result]]:
        opened.append(prefix)
        return whole(self, prefix)

    monkeypatch.setattr(DirectoryStore, "_entries", watched)
    assert [info.key for info in store.list("d", after="d/8/x")] == ["d/9/x"]
    assert opened == ["d/", "d/8/", "d/9/"]
    store.close()
