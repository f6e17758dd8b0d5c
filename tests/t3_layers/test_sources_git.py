"""Git work trees: the oracle is git. What it says of a tree is the same before and after, and it
opens no file it need not: files are overwritten behind its back (same size, same mtime), so
whoever reads them notices."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsecfs.errors import FormatError
from dsecfs.layers.publish import Meta, publish_source
from dsecfs.layers.sources.base import SourceTree
from dsecfs.layers.sources.directory import read_directory
from dsecfs.layers.sources.git import GitSink
from dsecfs.layers.sources.gitformat import GitIndex, parse_config
from dsecfs.layers.sources.image import open_image
from dsecfs.layers.sources.tar import read_tar
from dsecfs.layers.tree import walk
from dsecfs.store.directory import DirectoryStore
from tests.t3_layers.disktree import write_tree
from tests.t3_layers.memsink import MemorySink, listing

pytestmark = [
    pytest.mark.root,  # trees are written with their owners
    pytest.mark.skipif(not shutil.which("git"), reason="git is not installed"),
]

OLD = 1_600_000_000
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "protocol.file.allow",
    "GIT_CONFIG_VALUE_1": "always",
    "GIT_OPTIONAL_LOCKS": "0",
    **{f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER")
       for what in ("NAME", "EMAIL")},
}  # fmt: skip


def git(where: Path, *args: str, fails: bool = False, **environment: str) -> str:
    done = subprocess.run(
        ["git", *args],
        cwd=where,
        env=ENVIRONMENT | environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert fails or done.returncode == 0, done.stderr
    return done.stdout.decode("utf-8", "surrogateescape")


def status(where: Path) -> str:
    return git(where, "status", "--porcelain", "--ignored")


def set_times(top: Path, second: int, *, index: int | None = None) -> None:
    """Every file gets one time, the index perhaps another."""
    for path in [top, *top.rglob("*")]:
        os.utime(path, ns=(second * 10**9, second * 10**9 + 123_000_000), follow_symlinks=False)
    if index is not None:
        os.utime(top / ".git" / "index", (index, index))


FILES = 30


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with committed files, whose index knows all of them."""
    top = tmp_path / "repo"
    top.mkdir()
    git(top, "init", "-q", ".")
    for number in range(FILES):
        path = top / f"dir{number % 3}" / f"file{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"content {number}\n" * 20)
    (top / "empty").touch()
    (top / "link").symlink_to("dir0/file0")
    (top / "tool").write_text("#!/bin/sh\n")
    (top / "tool").chmod(0o755)
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "all")
    return top


def known_at(repo: Path, files: int, index: int) -> None:
    """All files and the index's knowledge of them are of second `files`, the index is of
    second `index`, which git believes only if it is later."""
    set_times(repo, files)
    git(repo, "update-index", "-q", "--refresh", GIT_OPTIONAL_LOCKS="1")
    set_times(repo, files, index=index)


class Published:
    """What a source became, as a directory again."""

    def __init__(self, tree: SourceTree, sink: MemorySink, top: Path) -> None:
        self.tree, self.sink, self.top = tree, sink, top
        top.mkdir()
        write_tree(tree.root, str(top), sink.content)

    @property
    def notes(self) -> str:
        return "\n".join(self.tree.notes)

    def unread(self, where: str = ".") -> str:
        """What git says when every file has been overwritten behind its back."""
        top = self.top / where
        for name in git(top, "ls-files", "-z").split("\0"):
            path = top / name
            found = path.lstat() if os.path.lexists(path) else None
            if found is not None and stat.S_ISREG(found.st_mode):
                path.write_bytes(b"\xff" * found.st_size)
                os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        return status(top)


def publish(source: Path, top: Path) -> Published:
    sink = MemorySink()
    seen = GitSink(sink)
    return Published(seen.prepare(read_directory(str(source), seen)), sink, top)


def tar_of(source: Path) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(source, arcname="repo")
    return out.getvalue()


def test_without_it_git_reads_everything(repo: Path, tmp_path: Path) -> None:
    """What is measured here can be seen at all."""
    known_at(repo, OLD, OLD + 100)
    sink = MemorySink()
    plain = Published(read_directory(str(repo), sink), sink, tmp_path / "out")
    assert plain.unread().count(" M ") == FILES + 1  # all but the link and the empty one


@pytest.mark.parametrize("version", ["2", "4"])
@pytest.mark.parametrize("index", [OLD + 100, OLD])
def test_no_file_is_read(repo: Path, tmp_path: Path, version: str, index: int) -> None:
    """Also if the index is as old as its files, as after a clone."""
    git(repo, "update-index", "--index-version", version, GIT_OPTIONAL_LOCKS="1")
    known_at(repo, OLD, index)
    out = publish(repo, tmp_path / "out")
    assert "repo" not in out.notes and ".git: for git status: core.checkStat=minimal" in out.notes
    assert status(out.top) == ""
    assert out.unread() == ""
    git(out.top, "fsck", "--strict")
    assert git(out.top, "config", "core.checkstat") == "minimal\n"
    assert git(out.top, "config", "core.bare") == "false\n"


def test_a_clone_through_a_tar(repo: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repo), str(clone))
    sink = MemorySink()
    seen = GitSink(sink)
    tree = seen.prepare(read_tar(io.BytesIO(tar_of(clone)), seen, "archive"))
    out = Published(tree, sink, tmp_path / "out")
    assert out.unread("repo") == ""
    assert out.notes.startswith("repo/.git: for git status: core.checkStat=minimal")


def test_lost_times_are_refreshed(repo: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(repo, copy, symlinks=True, copy_function=shutil.copyfile)
    shutil.copymode(repo / "tool", copy / "tool")
    set_times(copy, OLD - 5000)
    out = publish(copy, tmp_path / "out")
    assert f"{FILES + 3} entries refreshed" in out.notes
    assert out.unread() == ""
    debug = git(out.top, "ls-files", "--debug", "tool")
    assert f"mtime: {OLD - 5000}:123000000" in debug and "size: 10" in debug


def test_a_change_that_only_content_shows(repo: Path, tmp_path: Path) -> None:
    """Same size, same second as the index: git would read it, and must go on doing so."""
    known_at(repo, OLD, OLD)
    (repo / "dir0" / "file0").write_text("CONTENT 0\n" * 20)
    (repo / "dir1" / "file1").write_text("")
    set_times(repo, OLD, index=OLD)
    before = status(repo)
    assert before == " M dir0/file0\n M dir1/file1\n"
    out = publish(repo, tmp_path / "out")
    assert "later time" in out.notes
    assert status(out.top) == before
    assert out.unread() == before


def test_status_is_the_same(repo: Path, tmp_path: Path) -> None:
    (repo / ".gitignore").write_text("*.o\n")
    (repo / "dir0" / "file0").write_text("modified")
    (repo / "dir0" / "file3").unlink()
    (repo / "new").write_text("new")
    (repo / "x.o").write_text("ignored")
    (repo / "staged").write_text("staged")
    git(repo, "add", "staged", GIT_OPTIONAL_LOCKS="1")
    (repo / "link").unlink()
    (repo / "link").symlink_to("elsewhere")
    (repo / "tool").chmod(0o644)
    for index in (OLD, OLD + 100):
        known_at(repo, OLD, index)
        before = status(repo)
        assert before.count("\n") == 8
        out = publish(repo, tmp_path / f"out{index}")
        assert status(out.top) == before


def test_entries_git_does_not_compare(repo: Path, tmp_path: Path) -> None:
    (repo / "intent").write_text("later")
    git(repo, "add", "-N", "intent", GIT_OPTIONAL_LOCKS="1")
    git(repo, "update-index", "--skip-worktree", "dir0/file0", GIT_OPTIONAL_LOCKS="1")
    git(repo, "update-index", "--assume-unchanged", "dir0/file3", GIT_OPTIONAL_LOCKS="1")
    (repo / "dir0" / "file0").write_text("hidden")
    (repo / "dir0" / "file3").write_text("hidden")
    set_times(repo, OLD, index=OLD)
    before = status(repo)
    assert before == " A intent\n"
    out = publish(repo, tmp_path / "out")
    assert status(out.top) == before
    assert git(out.top, "ls-files", "-v") == git(repo, "ls-files", "-v")


def test_a_merge_conflict(repo: Path, tmp_path: Path) -> None:
    for branch, text in (("one", "1"), ("two", "2")):
        git(repo, "checkout", "-q", "-b", branch, "HEAD" if branch == "one" else "HEAD~1")
        (repo / "dir0" / "file0").write_text(text)
        git(repo, "commit", "-q", "-a", "-m", branch)
    git(repo, "merge", "-q", "one", fails=True)
    set_times(repo, OLD, index=OLD)
    before = status(repo)
    assert "UU dir0/file0" in before
    out = publish(repo, tmp_path / "out")
    assert status(out.top) == before


@pytest.mark.parametrize(
    "attributes", ["*.txt filter=upper\n", "* text eol=crlf\n", "*.txt ident\n"]
)
def test_files_that_git_converts(repo: Path, tmp_path: Path, attributes: str) -> None:
    """Content that is the object's and yet a change, because git would convert it."""
    git(repo, "config", "filter.upper.clean", "tr a-z A-Z")
    (repo / "a.txt").write_bytes(b"text $Id: abc $\r\n")
    git(repo, "-c", "core.autocrlf=false", "add", "a.txt", GIT_OPTIONAL_LOCKS="1")
    git(repo, "commit", "-q", "-m", "as it is")
    (repo / ".gitattributes").write_text(attributes)
    git(repo, "add", ".gitattributes", GIT_OPTIONAL_LOCKS="1")
    git(repo, "commit", "-q", "-m", "converted from now on")
    set_times(repo, OLD, index=OLD)
    before = status(repo)
    assert before == " M a.txt\n"
    out = publish(repo, tmp_path / "out")
    assert status(out.top) == before
    # The other way around: converted, and no change.
    git(repo, "add", "--renormalize", "a.txt", GIT_OPTIONAL_LOCKS="1")
    git(repo, "commit", "-q", "-m", "converted")
    set_times(repo, OLD, index=OLD)
    assert status(repo) == ""
    assert status(publish(repo, tmp_path / "out2").top) == ""


def test_submodules(repo: Path, tmp_path: Path) -> None:
    top = tmp_path / "super"
    top.mkdir()
    git(top, "init", "-q", ".")
    git(top, "submodule", "--quiet", "add", str(repo), "sub")
    git(top, "commit", "-q", "-m", "sub")
    set_times(top, OLD - 50, index=OLD - 50)
    out = publish(top, tmp_path / "out")
    assert "sub/.git" not in out.notes and ".git/modules/sub: for git status" in out.notes
    assert out.unread("sub") == ""
    assert status(out.top) == ""


def _left_alone(repo: Path, tmp_path: Path, *, config: bool = True) -> str:
    out = publish(repo, tmp_path / "out")
    assert (out.top / ".git/index").read_bytes() == (repo / ".git/index").read_bytes()
    if config:
        assert (out.top / ".git/config").read_bytes() == (repo / ".git/config").read_bytes()
    return out.notes


def test_what_is_not_understood_is_left_alone(repo: Path, tmp_path: Path) -> None:
    known_at(repo, OLD, OLD)
    index = repo / ".git/index"
    whole = index.read_bytes()
    for damaged, why in (
        (whole[:-30], "checksum"),
        (whole[:6] + b"\0\5" + whole[8:], "version 5"),
        (b"DIRC", "truncated"),
    ):
        index.write_bytes(damaged)
        os.utime(index, (OLD, OLD))
        assert why in _left_alone(repo, tmp_path, config=False)
        shutil.rmtree(tmp_path / "out")
    index.write_bytes(b"XXXX" + whole[4:])
    assert _left_alone(repo, tmp_path) == ""


def test_a_split_index_is_left_alone(repo: Path, tmp_path: Path) -> None:
    git(repo, "update-index", "--split-index", GIT_OPTIONAL_LOCKS="1")
    assert "split index" in _left_alone(repo, tmp_path, config=False)
    assert status(tmp_path / "out") == ""


def test_sha256_names_are_left_alone(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q", "--object-format=sha256", ".")
    (repo / "file").write_text("x")
    git(repo, "add", ".")
    assert "SHA-256" in _left_alone(repo, tmp_path, config=False)
    assert status(tmp_path / "out") == "A  file\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[core]\n\tcheckStat = default\n", "sets core.checkStat itself"),
        ("[core]\n\tTrustCTime\n", "sets core.trustctime itself"),
        ('[core]\n\tname = "open\n', "does not end"),
        ("[core\n", "does not end"),
    ],
)
def test_configurations_that_are_left_alone(
    repo: Path, tmp_path: Path, text: str, why: str
) -> None:
    with (repo / ".git/config").open("a") as config:
        config.write(text)
    assert why in _left_alone(repo, tmp_path)


def test_nothing_is_left_to_do(repo: Path, tmp_path: Path) -> None:
    """Publishing what was published changes nothing."""
    known_at(repo, OLD, OLD)
    first = publish(repo, tmp_path / "first")
    second = publish(first.top, tmp_path / "second")
    assert "nothing to do" in second.notes
    assert listing(first.tree.root, first.sink) == listing(second.tree.root, second.sink)


def test_other_files_stay_as_they_are(repo: Path, tmp_path: Path) -> None:
    known_at(repo, OLD, OLD)
    sink = MemorySink()
    before = listing(read_directory(str(repo), sink).root, sink)
    out = publish(repo, tmp_path / "out")
    after = listing(out.tree.root, out.sink)
    assert {p for p in after if before[p] != after[p]} == {b".git/config", b".git/index"}


def test_workspaces_are_prepared_when_published(repo: Path, tmp_path: Path) -> None:
    known_at(repo, OLD, OLD)
    store = DirectoryStore(tmp_path / "store", create=True)
    with open_image(f"dir:{repo}") as image:
        (layer,) = image.layers
        done = [
            publish_source(store, layer, None, Meta(kind, "linux/amd64"), git=git)
            for kind, git in (
                ("workspace", None), ("workspace", None), ("workspace", False), ("base", None)
            )
        ]  # fmt: skip
    assert done[0].digest == done[1].digest != done[2].digest
    assert [any("git status" in n for n in p.notes) for p in done] == [True, True, False, False]


# -- parsers


@pytest.fixture(scope="module")
def an_index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, bytes]]]:
    """A repository, and its index in several versions."""
    top = tmp_path_factory.mktemp("index") / "repo"
    top.mkdir()
    git(top, "init", "-q", ".")
    for name in ("a", "b" * 200, "dir/c", "dir/d", "\xfcml"):
        path = top / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    git(top, "add", ".")
    # Longer than the length field can say.
    oid = git(top, "hash-object", "-w", "a").strip()
    git(top, "update-index", "--add", "--cacheinfo", f"100644,{oid},{'long/' * 900}end")
    found = {}
    for version in (2, 4):
        git(top, "update-index", "--index-version", str(version))
        found[version] = (top / ".git/index").read_bytes()
    git(top, "update-index", "--index-version", "2")
    git(top, "update-index", "--skip-worktree", "a")
    found[3] = (top / ".git/index").read_bytes()
    yield top, found


@pytest.mark.parametrize("version", [2, 3, 4])
def test_entries_are_those_that_git_lists(
    an_index: tuple[Path, dict[int, bytes]], version: int
) -> None:
    top, indexes = an_index
    (top / ".git/index").write_bytes(indexes[version])
    index = GitIndex(indexes[version])
    assert index.version == version
    listed = git(top, "ls-files", "--stage", "-z").split("\0")[:-1]
    ours = [f"{e.mode:o} {e.oid.hex()} 0\t{os.fsdecode(e.path)}" for e in index.entries]
    assert ours == listed
    assert index.to_bytes() == indexes[version]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_indexes(an_index: tuple[Path, dict[int, bytes]], data: st.DataObject) -> None:
    """Refused, or changed in nothing but stat data."""
    _, indexes = an_index
    raw = bytearray(indexes[data.draw(st.sampled_from([2, 3, 4]))][:-20])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw)))) :]
    whole = bytes(raw) + hashlib.sha1(raw).digest()
    try:
        index = GitIndex(whole)
    except FormatError:
        return
    assert index.to_bytes() == whole
    allowed: set[int] = set()
    for entry in index.entries:
        index.set_stat(entry, -5, 1 << 33, 2, 1 << 40)
        allowed |= {*range(entry.at, entry.at + 24), *range(entry.at + 28, entry.at + 40)}
    changed = index.to_bytes()
    assert len(changed) == len(whole)
    assert {i for i, (x, y) in enumerate(zip(changed, whole, strict=True)) if x != y} <= (
        allowed | set(range(len(whole) - 20, len(whole)))
    )
    assert [e.path for e in GitIndex(changed).entries] == [e.path for e in index.entries]


PIECES = st.sampled_from(
    ["[core]", '[a "b"]', "[a.b]", '[x "\\"\\\\y"]', "\n", "\n\n", " ", "\t", "key", "k-1", "=",
     " = ", "value", '"', "\\", "\\n", '\\"', "\\\\", "\\\n", "#", ";", "# c\n", "]", "[", "true",
     "0", "\r\n", "é", "a b", "  x  "]
)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(PIECES, max_size=24))
def test_configurations_mean_what_git_takes_them_for(pieces: list[str]) -> None:
    """Whatever we understand, git understands in the same way, also with more at its end."""
    text = "".join(pieces).encode()
    try:
        ours = parse_config(text)
    except FormatError:
        return
    end = b"" if not text or text.endswith(b"\n") else b"\n"
    more = text + end + b"[core]\n\tcheckStat = minimal\n"
    for content, expected in ((text, ours), (more, ours | {b"core.checkstat": b"minimal"})):
        done = subprocess.run(
            ["git", "config", "-f", "-", "-z", "--list"],
            input=content, env=ENVIRONMENT, capture_output=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (content, done.stderr)
        theirs = {}
        for item in done.stdout.split(b"\0")[:-1]:
            key, _, value = item.partition(b"\n")
            theirs[key] = value
        # White space inside of a value has come out differently over the years.
        spaces = bytes.maketrans(b"\t\r", b"  ")
        assert {k: v.translate(spaces) for k, v in theirs.items()} == {
            k: v.translate(spaces) for k, v in expected.items()
        }


def test_every_tree_is_walked_once(repo: Path) -> None:
    """No repository, nothing changes, and nothing is noted."""
    sink = MemorySink()
    seen = GitSink(sink)
    tree = read_directory(str(repo / "dir0"), seen)
    assert seen.prepare(tree) is tree
    assert len(list(walk(tree.root))) == FILES // 3 + 1
