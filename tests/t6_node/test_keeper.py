"""The keeper with real processes: output, input, terminals, timeouts, and what happens when
either of its processes is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec_runtime.edge.backend import HostCommand
from dsec_runtime.errors import KeeperError
from dsec_runtime.keeper.client import Ended, Keeper, Start
from dsec_runtime.keeper.log import read_kept, read_state
from dsec_runtime.keeper.start import ask, end_keeper, ensure_keeper
from dsecfs.nodedirs import NodeDirs

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]


@pytest.fixture
def dirs(tmp_path: Path) -> Iterator[NodeDirs]:
    dirs = NodeDirs(tmp_path / "data", tmp_path / "run")
    dirs.create()
    ensure_keeper(dirs)
    try:
        yield dirs
    finally:
        end_keeper(dirs)
        deadline = time.monotonic() + 10
        while ask(dirs, "ping") is not None and time.monotonic() < deadline:
            time.sleep(0.05)


class Commands:
    """Starts shell commands."""

    def __init__(self, dirs: NodeDirs, keeper: Keeper) -> None:
        self.dirs, self.keeper = dirs, keeper
        self.number = 0

    async def start(self, script: str, **more: object) -> tuple[str, Path]:
        self.number += 1
        id = f"command{self.number:09d}"
        place = self.dirs.exec("abcdefghijkl", id)
        place.mkdir(parents=True)
        command = HostCommand(("/bin/sh", "-c", script))
        await self.keeper.start(
            Start(id, "abcdefghijkl", command, place, **more)  # type: ignore[arg-type]
        )
        return id, place

    async def run(self, script: str, **more: object) -> tuple[Ended, bytes, bytes]:
        id, place = await self.start(script, **more)
        ended = await asyncio.wait_for(self.keeper.wait(id, place), 60)
        kept = read_kept(place, 1 << 20)
        return ended, kept.stdout.head, kept.stderr.head


@asynccontextmanager
async def commands(dirs: NodeDirs) -> AsyncIterator[Commands]:
    async with Keeper(dirs) as keeper:
        yield Commands(dirs, keeper)


def processes(dirs: NodeDirs) -> tuple[int, int]:
    """Worker and holder."""
    found = ask(dirs, "ping")
    assert found is not None
    return int(str(found["pid"])), int(str(found["holder"]))


async def gone(pid: int) -> None:
    """It was killed: it is gone, or as good as."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"process {pid} lives")


async def killed(dirs: NodeDirs, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    for _ in range(200):
        found = await asyncio.to_thread(ask, dirs, "ping")
        if found is not None and pid not in (found["pid"], found["holder"]):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("no new process")


def test_output_and_exit_code(dirs: NodeDirs) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            ended, out, err = await c.run("echo out; echo err >&2; exit 7")
            assert (ended.code, ended.signal, out, err) == (7, None, b"out\n", b"err\n")
            ended, out, _ = await c.run("stat -L -c %F /dev/stdin; cat")
            assert (ended.code, out) == (0, b"character special file\n")
            # Of a host command that is killed itself nothing is known.
            ended, _, _ = await c.run("kill -9 $$")
            assert ended.lost and ended.code is None

    asyncio.run(check())


def test_a_missing_program_is_an_error(dirs: NodeDirs) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            place = dirs.exec("abcdefghijkl", "missing")
            place.mkdir(parents=True)
            start = Start("missing", "abcdefghijkl", HostCommand(("/no/such",)), place)
            with pytest.raises(KeeperError, match="No such file"):
                await c.keeper.start(start)
            _, out, _ = await c.run("echo on")
            assert out == b"on\n"

    asyncio.run(check())


def test_a_second_start_is_the_same_command(dirs: NodeDirs) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            id, place = await c.start("echo x; sleep 0.3")
            command = HostCommand(("/bin/sh", "-c", "echo second"))
            await c.keeper.start(Start(id, "abcdefghijkl", command, place))
            await c.keeper.wait(id, place)
            assert read_kept(place, 100).stdout.head == b"x\n"

    asyncio.run(check())


def test_input(dirs: NodeDirs) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            id, place = await c.start("wc -c", stdin="pipe")
            await c.keeper.write(id, b"x" * (5 << 20))
            await c.keeper.close_stdin(id)
            await c.keeper.wait(id, place)
            assert read_kept(place, 100).stdout.head.strip() == b"%d" % (5 << 20)
            id, place = await c.start("exec 0<&-; sleep 30", stdin="pipe")
            with pytest.raises(KeeperError):
                for _ in range(100):
                    await c.keeper.write(id, b"y" * 100_000)
                    await asyncio.sleep(0.02)
            await c.keeper.signal(id, signal.SIGKILL)
            await c.keeper.wait(id, place)

    asyncio.run(check())


def test_a_slow_reader_of_a_burst_gets_every_byte(dirs: NodeDirs) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            program = "import os\nfor i in range(64): os.write(1, bytes([i]) * (1 << 20))"
            script = f'{sys.executable} -c "{program}"'
            id, place = await c.start(script)
            position = 0
            async for frame in c.keeper.follow(id, place, (0, 0)):
                assert frame.start == position
                want = b"".join(
                    bytes([(position + at) >> 20]) for at in range(0, len(frame.data), 1 << 16)
                )
                assert frame.data[:: 1 << 16] == want
                position += len(frame.data)
                if position < 8 << 20:
                    await asyncio.sleep(0.02)
            assert position == 64 << 20
            ended = await c.keeper.wait(id, place)
            assert ended.written["1"] == 64 << 20

    asyncio.run(check())


def test_endless_output_costs_a_bounded_amount(dirs: NodeDirs) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            id, place = await c.start("yes", timeout_s=8.0, grace_s=0.0)
            _, out, _ = await c.run("echo others are not stalled")
            assert out == b"others are not stalled\n"
            ended = await c.keeper.wait(id, place)
            assert ended.timed_out
            assert ended.written["1"] < (128 + 16 * 32) << 20
            used = sum(p.stat().st_blocks * 512 for p in place.iterdir())
            assert used < 40 << 20
            kept = read_kept(place, 1 << 20)
            assert kept.truncated and len(kept.stdout.tail) == 1 << 20

    asyncio.run(check())


def test_timeouts_end_the_whole_tree(dirs: NodeDirs) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            ended, out, _ = await c.run(
                "trap '' TERM; sh -c \"trap '' TERM; sleep 61\" & echo $!; sleep 61; sleep 61",
                timeout_s=0.5,
                grace_s=0.3,
            )
            assert ended.timed_out and not ended.lost
            await gone(int(out))

    asyncio.run(check())


def test_paused_time_does_not_count(dirs: NodeDirs) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            id, place = await c.start("sleep 1.5; echo done", timeout_s=1.0)
            await c.keeper.hold("abcdefghijkl")
            await asyncio.sleep(1.2)
            await c.keeper.release("abcdefghijkl")
            ended = await c.keeper.wait(id, place)
            assert ended.code == 0 and not ended.timed_out
            assert ended.duration_s < 1.0

    asyncio.run(check())


def test_what_is_left_behind_writes_on(dirs: NodeDirs) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            id, place = await c.start("(sleep 0.5; echo late) & echo early")
            ended = await c.keeper.wait(id, place)
            assert ended.code == 0 and ended.duration_s < 0.4
            assert ended.written["1"] == len(b"early\n")
            await asyncio.sleep(0.8)
            assert read_kept(place, 100).stdout.head == b"early\nlate\n"

    asyncio.run(check())


@pytest.mark.parametrize("victim", ["worker", "holder", "one after the other"])
def test_kill_9_of_a_process_of_the_keeper(dirs: NodeDirs, victim: str) -> None:
    """Commands go on; all of their output and their exit codes arrive."""

    async def check() -> None:
        async with commands(dirs) as c:
            script = "for i in $(seq 0 299); do echo line $i; sleep 0.01; done; exit 5"
            running = [await c.start(script) for _ in range(4)]
            waits = [asyncio.create_task(c.keeper.wait(*one)) for one in running]
            frames: list[bytes] = []

            async def follow() -> None:
                async for frame in c.keeper.follow(*running[0], (0, 0)):
                    frames.append(frame.data)

            following = asyncio.create_task(follow())
            await asyncio.sleep(0.3)
            worker, holder = processes(dirs)
            if victim == "one after the other":
                await killed(dirs, worker)
                await killed(dirs, processes(dirs)[0])
            else:
                await killed(dirs, worker if victim == "worker" else holder)
            more = await c.run("echo new; exit 3")
            assert (more[0].code, more[1]) == (3, b"new\n")
            want = b"".join(b"line %d\n" % i for i in range(300))
            for (_, place), wait in zip(running, waits, strict=True):
                ended = await asyncio.wait_for(wait, 30)
                assert (ended.code, ended.lost) == (5, False)
                assert read_kept(place, 1 << 20).stdout.head == want
            await asyncio.wait_for(following, 10)
            assert b"".join(frames) == want

    asyncio.run(check())


def test_state_goes_through_two_descriptors(dirs: NodeDirs, tmp_path: Path) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            (tmp_path / "before").write_bytes(b"before")
            _, place = first = await c.start(
                "cat <&3; printf after >&4; exec 4>&-", state=tmp_path / "before"
            )
            assert (await c.keeper.wait(*first)).code == 0
            assert read_kept(place, 100).stdout.head == b"before"
            assert read_state(place) == b"after"
            _, place = second = await c.start(
                "head -c 9000000 /dev/zero >&4; echo on", state=tmp_path / "before"
            )
            assert (await c.keeper.wait(*second)).code == 0
            assert read_state(place) is None
            assert sum(p.stat().st_size for p in place.glob("3.*")) < 4 << 20

    asyncio.run(check())


def test_notes_reach_standard_error(dirs: NodeDirs) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            id, place = await c.start("echo a >&2; sleep 0.5; echo b >&2")
            await asyncio.sleep(0.2)
            await c.keeper.note("abcdefghijkl", "dsec: network denied example.org:443")
            await c.keeper.wait(id, place)
            said = read_kept(place, 1 << 20).stderr.head
            assert said == b"a\ndsec: network denied example.org:443\nb\n"

    asyncio.run(check())


def test_forget_ends_everything_of_a_sandbox(dirs: NodeDirs) -> None:
    async def check() -> None:
        async with commands(dirs) as c:
            id, place = await c.start("sleep 60 & echo $!; wait")
            await asyncio.sleep(0.2)
            await c.keeper.forget("abcdefghijkl")
            ended = await asyncio.wait_for(c.keeper.wait(id, place), 10)
            assert ended.code is None
            child = int(read_kept(place, 100).stdout.head)
            await gone(child)

    asyncio.run(check())
