"""Waiting for requests: nobody reads what is not there, and the event loop gets its turn."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from dsecfs.fuse.loop import BURST, RequestWait


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


@pytest.mark.parametrize("idle", [True, False])
def test_one_request_wakes_one_reader(pipe: tuple[int, int], idle: bool) -> None:
    """However many wait: a second one would block in its read."""
    read, write = pipe
    seen: list[bytes] = []

    async def reader(wait: RequestWait) -> None:
        while await wait.wait():
            seen.append(os.read(read, 1))
            await trio.sleep(0)

    async def main() -> None:
        wait = RequestWait(read, lambda: idle)
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
            wait.end()
            trio.lowlevel.notify_closing(read)

    trio.run(main)
    assert b"".join(seen) == bytes(range(40))


def test_others_get_their_turn(pipe: tuple[int, int]) -> None:
    """While requests never stop coming."""
    read, write = pipe
    turns = answered = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.sleep(0)

    async def main() -> None:
        nonlocal answered
        wait = RequestWait(read, lambda: True)
        os.write(write, b"x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            while answered < 10 * BURST:
                assert await wait.wait()
                answered += 1
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert turns >= 9


def test_it_ends(pipe: tuple[int, int]) -> None:
    read, _ = pipe

    async def main() -> None:
        wait = RequestWait(read, lambda: True)
        results: list[bool] = []

        async def reader() -> None:
            results.append(await wait.wait())

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reader)
                nursery.start_soon(reader)
                await trio.testing.wait_all_tasks_blocked()
                wait.end()
                trio.lowlevel.notify_closing(read)
        assert results == [False, False]
        assert not await wait.wait()

    trio.run(main)
