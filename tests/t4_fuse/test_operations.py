"""Parts of the handlers that need no mount."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import trio
import trio.testing

from dsecfs.errors import (
    BadInput,
    Corrupt,
    DeadlineExceeded,
    DsecfsError,
    NotFound,
    StoreUnavailable,
)
from dsecfs.fuse.operations import ByteBudget, QuietLog, errno_of


def test_bytes_that_are_waited_for_are_bounded_and_in_order() -> None:
    budget = ByteBudget(100)
    held = 0
    most = 0
    order: list[int] = []

    async def reader(number: int, size: int) -> None:
        nonlocal held, most
        async with budget.hold(size):
            order.append(number)
            held += size
            most = max(most, held)
            await trio.sleep(0.001)
            held -= size

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number, size in enumerate([60, 60, 1, 100, 500, 1, 30] * 5):
                nursery.start_soon(reader, number, size)
                await trio.testing.wait_all_tasks_blocked()

    trio.run(main)
    assert order == list(range(35))
    # 500 is more than all of it: it passes alone.
    assert most == 500


def test_a_reader_that_gives_up_frees_its_turn() -> None:
    async def main() -> None:
        budget = ByteBudget(10)
        async with budget.hold(10):
            with trio.move_on_after(0.01) as scope:
                async with budget.hold(1):
                    pass
            assert scope.cancelled_caught
        with trio.fail_after(5):
            async with budget.hold(10):
                pass

    trio.run(main)


@pytest.mark.parametrize(
    ("error", "opening", "reading"),
    [
        (NotFound("x"), errno.ENOENT, errno.EIO),
        (Corrupt("x"), errno.EIO, errno.EIO),
        (StoreUnavailable("x"), errno.EIO, errno.EIO),
        (DeadlineExceeded("x"), errno.EIO, errno.EIO),
        (BadInput("x"), errno.EINVAL, errno.EINVAL),
    ],
)
def test_errno(error: DsecfsError, opening: int, reading: int) -> None:
    assert errno_of(error, reading=False) == opening
    assert errno_of(error, reading=True) == reading


def test_a_burst_of_errors_is_counted(expect_log: Callable[[str], None]) -> None:
    expect_log("2 more errors were not logged")
    quiet = QuietLog(limit=3, window_s=0.0)
    assert [quiet.allows() for _ in range(2)] == [True, True]
    quiet = QuietLog(limit=3, window_s=3600)
    assert [quiet.allows() for _ in range(5)] == [True, True, True, False, False]
    quiet._since -= 3601
    assert quiet.allows()
