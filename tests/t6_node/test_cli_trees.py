"""`dsec sandbox cp` takes archives from sandboxes: nothing is written outside the target."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_runtime.cli_sandbox.trees import pack, unpack
from dsecfs.errors import BadInput, Busy, UnsafeArchive


def entry(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    if "type" in fields:
        info.size = 0
    return info, content


def archive(*entries: tuple[tarfile.TarInfo, bytes]) -> Iterator[bytes]:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as made:
        for info, content in entries:
            made.addfile(info, io.BytesIO(content))
    whole = data.getvalue()
    return (whole[at : at + 700] for at in range(0, len(whole), 700))


def symlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.SYMTYPE, linkname=target)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("mine")
    return tmp_path / "target"


def test_a_tree_arrives_as_it_was(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/file").write_bytes(os.urandom(1 << 20))
    (source / "a/b/file").chmod(0o751)
    (source / "a/twin").hardlink_to(source / "a/b/file")
    (source / "link").symlink_to("a/b")
    (source / "ünï\udce4").write_text("name")
    (source / "empty").touch()
    (source / "locked").mkdir(mode=0o500)
    os.mkfifo(source / "fifo")
    told: list[str] = []
    assert unpack(pack(source, told.append), target, told.append) == 5
    assert len(told) == 1 and "fifo" in told[0]
    assert (target / "a/b/file").read_bytes() == (source / "a/b/file").read_bytes()
    assert stat.S_IMODE((target / "a/b/file").stat().st_mode) == 0o751
    assert (target / "a/twin").samefile(target / "a/b/file")
    assert (target / "link").readlink() == Path("a/b")
    assert (target / "ünï\udce4").read_text() == "name"
    assert stat.S_IMODE((target / "locked").stat().st_mode) == 0o500
    assert {p.name for p in target.iterdir()} == {p.name for p in source.iterdir()} - {"fifo"}


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", ".."])
def test_names_that_lead_elsewhere_are_refused(target: Path, name: str) -> None:
    with pytest.raises(UnsafeArchive):
        unpack(archive(entry("good"), entry(name)), target, print)
    assert (target / "good").exists()
    assert not list(target.parent.glob("**/evil"))


def test_symlinks_are_not_followed(target: Path) -> None:
    outside = target.parent / "outside"
    with pytest.raises(UnsafeArchive):
        unpack(archive(symlink("out", str(outside)), entry("out/evil")), target, print)
    with pytest.raises(UnsafeArchive):
        unpack(
            archive(symlink("d", str(outside)), entry("d", type=tarfile.DIRTYPE)), target, print
        )
    # A file takes the place of a link, and is not written through it.
    unpack(archive(symlink("f", str(outside / "secret")), entry("f", b"evil")), target, print)
    assert (target / "f").read_bytes() == b"evil"
    with pytest.raises(UnsafeArchive):
        unpack(
            archive(
                symlink("up", ".."),
                entry("stolen", type=tarfile.LNKTYPE, linkname="up/outside/secret"),
            ),
            target,
            print,
        )
    assert sorted(os.listdir(outside)) == ["secret"]
    assert (outside / "secret").read_text() == "mine"


def test_a_hard_link_leads_nowhere_outside(target: Path) -> None:
    for name in ("../outside/secret", str(target.parent / "outside/secret")):
        link = entry("stolen", type=tarfile.LNKTYPE, linkname=name)
        with pytest.raises(UnsafeArchive):
            unpack(archive(link), target, print)
    assert not (target / "stolen").exists()


def test_devices_and_set_user_id_bits_are_not_made(target: Path) -> None:
    told: list[str] = []
    unpack(
        archive(
            entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
            entry("fifo", type=tarfile.FIFOTYPE),
            entry("su", b"#!/bin/sh\n", mode=0o6755, uid=0),
        ),
        target,
        told.append,
    )
    assert os.listdir(target) == ["su"] and len(told) == 2
    assert stat.S_IMODE((target / "su").stat().st_mode) == 0o755


def test_a_cut_or_strange_archive_is_an_error(target: Path) -> None:
    whole = b"".join(archive(entry("big", bytes(100_000))))
    with pytest.raises(BadInput):
        unpack(iter([whole[:50_000]]), target, print)
    with pytest.raises(BadInput):
        unpack(iter([b"no archive" * 1000]), target, print)


def test_a_file_that_becomes_shorter_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    pieces = pack(tmp_path, print)
    next(pieces)  # the top
    next(pieces)  # the file's header
    os.truncate(tmp_path / "file", 10)
    with pytest.raises(Busy, match="shorter"):
        list(pieces)
