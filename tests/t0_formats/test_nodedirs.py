"""The two directories of a node belong to whoever uses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsecfs.errors import BadInput
from dsecfs.nodedirs import NodeDirs


def test_roots_are_private(tmp_path: Path) -> None:
    dirs = NodeDirs(tmp_path / "a" / "data", tmp_path / "run")
    dirs.create()
    dirs.create()
    assert [p.stat().st_mode & 0o777 for p in (dirs.data, dirs.run)] == [0o700, 0o700]


def test_a_root_that_anybody_writes_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o1777)
    with pytest.raises(BadInput, match="others can write"):
        NodeDirs(tmp_path / "data", tmp_path / "run").create()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("link", [False, True])
def test_a_root_that_is_somebody_elses_is_refused(tmp_path: Path, link: bool) -> None:
    if link:
        (tmp_path / "run").symlink_to(tmp_path)
    else:
        (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 1000, 1000, follow_symlinks=False)
    with pytest.raises(BadInput, match="others can write"):
        NodeDirs(tmp_path / "data", tmp_path / "run").create()


def test_the_default_without_a_session_is_checked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert NodeDirs.default().run == Path("/tmp/dsec-1234")
