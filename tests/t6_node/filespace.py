"""What the tests of files share: a sandbox of its own and the edge's side of the helper."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec_runtime.files.client import Files
from dsecfs.nodedirs import NodeDirs
from tests.support.ownspace import OwnSpace, own_space, why_no_own_space

Check = Callable[[Files, OwnSpace], Awaitable[None]]


class Space:
    """A sandbox, and a node's directories for the helper."""

    def __init__(self, own: OwnSpace, dirs: NodeDirs) -> None:
        self.own = own
        self.dirs = dirs
        self.work = own.root / "work"

    def run(self, check: Check) -> None:
        async def inner() -> None:
            async with Files(self.dirs) as files:
                await check(files, self.own)
                if files.pid is not None:
                    await no_children(files.pid)

        asyncio.run(inner())

    def left(self) -> list[str]:
        """Half-written files."""
        return [str(path) for path in self.own.root.glob("work/**/.dsec-*")]


async def no_children(pid: int) -> None:
    """Every operation's process ends."""
    for _ in range(200):
        if not Path(f"/proc/{pid}/task/{pid}/children").read_text():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("children are left")


@contextmanager
def space() -> Iterator[Space]:
    if why := why_no_own_space():
        pytest.skip(why)
    # Not pytest's own directory: others than root must get through.
    place = Path(tempfile.mkdtemp(prefix="dsec-files-", dir="/var/tmp"))
    try:
        place.chmod(0o755)
        dirs = NodeDirs(place / "data", place / "run")
        dirs.create()
        (place / "sandbox").mkdir()
        with own_space(place / "sandbox") as own:
            yield Space(own, dirs)
        log = dirs.run / "files.log"
        said = log.read_text() if log.exists() else ""
        assert said == "", said[-2000:]
    finally:
        shutil.rmtree(place)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def content(files: Files, own: OwnSpace, path: str, **more: int) -> bytes:
    async with files.read(own.place(), path, **more) as reading:
        return b"".join([part async for part in reading.parts])


async def packed(files: Files, own: OwnSpace, path: str, user: int = 1000) -> bytes:
    async with files.pack(own.place(user), path) as parts:
        return b"".join([part async for part in parts])


def odd_name(raw: bytes) -> str:
    return os.fsdecode(raw)
