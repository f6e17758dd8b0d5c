"""What chaos tests share: a place, a store with two layers of random files, the three modes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecfs.store.base import Store
from dsecfs.store.open import open_store
from tests.t8_chaos.machine import Base, publish_base
from tests.t8_chaos.stack import MODES, Content, Mode, publish, why_not


@pytest.fixture(scope="session")
def shared_top() -> Iterator[Path]:
    """On the disk: EROFS mounts no files of tmpfs."""
    top = Path(os.path.realpath(tempfile.mkdtemp(prefix="dsec-chaos-", dir="/var/tmp")))
    try:
        yield top
    finally:
        shutil.rmtree(top)


@pytest.fixture(scope="session")
def shared_store(shared_top: Path) -> Iterator[Store]:
    """For tests that leave it as it is."""
    store = open_store(f"file:{shared_top}/store", create=True)
    yield store
    store.close()


@pytest.fixture(scope="session")
def content(shared_store: Store, shared_top: Path) -> Content:
    return publish(shared_store, shared_top)


@pytest.fixture(scope="session")
def base(shared_top: Path) -> Base:
    """A base by name in a store of its own, for tests that run `dsec`."""
    store = open_store(f"file:{shared_top}/named", create=True)
    try:
        return publish_base(store, shared_top / "rootfs")
    finally:
        store.close()


@pytest.fixture
def top(shared_top: Path) -> Iterator[Path]:
    """A directory of the test's own."""
    place = Path(tempfile.mkdtemp(dir=shared_top))
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="session")
def modes() -> tuple[Mode, ...]:
    """All that this machine can do: they are tried side by side."""
    possible = tuple(mode for mode in MODES if not why_not(mode))
    if not possible:
        pytest.skip(why_not("fuse"))
    return possible
