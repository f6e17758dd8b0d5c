"""Waiting for requests: nobody reads what is not there, and the event loop gets its turn."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator

import pyfuse3
import pytest
import trio
import trio.testing

from dsecfs.fuse.loop import _KNOWN, BURST, RequestWait


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def as_pyfuse3_does(fd: int, exited: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    """`_wait_fuse_readable` of pyfuse3 3.5.0 (internal.pxi)."""
    lock = trio.Lock()

    async def wait() -> bool:
        try:
            async with lock:
                if exited():
                    return False
                await trio.lowlevel.wait_readable(fd)
        except trio.ClosedResourceError:
            return False
        return True

    return wait


@pytest.mark.parametrize("idle", [True, False])
def test_one_request_wakes_one_reader(pipe: tuple[int, int], idle: bool) -> None:
    """However many wait: a second one would block in its read."""
    read, write = pipe
    seen: list[bytes] = []
    ended = False

    async def reader(wait: RequestWait) -> None:
        while await wait.wait():
            seen.append(os.read(read, 1))
            await trio.sleep(0)

    async def main() -> None:
        nonlocal ended
        wait = RequestWait(read, lambda: idle, as_pyfuse3_does(read, lambda: ended))
        os.set_blocking(read, False)  # so that a wrong read fails, and does not hang
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(reader, wait)
            for number in range(40):
                os.write(write, b"%c" % number)
                if number % 3:
                    await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(10):
                while len(seen) < 40:
                    await trio.sleep(0.001)
            ended = True
            trio.lowlevel.notify_closing(read)

    trio.run(main)
    assert b"".join(seen) == bytes(range(40))


def test_others_get_their_turn(pipe: tuple[int, int]) -> None:
    """While requests never stop coming."""
    read, write = pipe
    turns = answered = 0

    async def main() -> None:
        wait = RequestWait(read, lambda: True, as_pyfuse3_does(read, lambda: False))

        async def reader() -> None:
            nonlocal answered
            while await wait.wait():
                answered += 1
                if answered >= 10 * BURST:
                    nursery.cancel_scope.cancel()
                    return

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.sleep(0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader)
            nursery.start_soon(reader)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(other)
            os.write(write, b"x")

    trio.run(main)
    assert 9 <= turns < 10 * BURST / 2, "the event loop runs once for many requests"


def test_a_reader_alone_lets_pyfuse3_start_another(pipe: tuple[int, int]) -> None:
    """It starts one when nobody waits in its way: else one after each request."""
    read, write = pipe
    os.write(write, b"x")
    calls = 0

    async def own() -> bool:
        nonlocal calls
        calls += 1
        return True

    async def main() -> None:
        wait = RequestWait(read, lambda: True, own)
        for _ in range(5):
            assert await wait.wait()

    trio.run(main)
    assert calls == 5


def test_the_installed_pyfuse3_is_known() -> None:
    assert pyfuse3.__version__.startswith(_KNOWN)
    assert hasattr(pyfuse3, "_wait_fuse_readable")
