"""The back ends that the contract suite runs over."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecfs.store.base import Backend
from dsecfs.store.open import open_backend
from tests.support.seaweed import Seaweed

KINDS = ("file", "3fs", "s3-obstore", "s3-boto3")


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind."""
    kind: str = request.param
    if kind in ("file", "3fs"):
        (tmp_path / "store").mkdir()
        return f"{kind}:{tmp_path}/store"
    server: Seaweed = request.getfixturevalue("s3_server")
    reader = kind.removeprefix("s3-")
    return f"{server.url(prefix=uuid.uuid4().hex)}&reader={reader}"


@pytest.fixture
def backend(url: str) -> Iterator[Backend]:
    store = open_backend(url)
    yield store
    store.close()
