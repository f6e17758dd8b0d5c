"""Many `dsec run` at once over a slow store, while some of them, workers and supervisors are
killed: who was not killed gives the right output, and nothing of anybody is left."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dsec_runtime.run import Runner
from dsecfs.store.faults import Rule
from tests.t4_fuse.family import wait_for
from tests.t5_runtime.conftest import why_no_containers
from tests.t8_chaos.machine import BASE, Base, Machine, machine
from tests.t8_chaos.stack import HANG_S, Mode, why_not

pytestmark = pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers() or "ok")

LATENCY = Rule("stall", op="get_range", prefix="objects/", seconds=0.05)
SCRIPT = "sha256sum -c /sums > /dev/null && ls /dir0 | wc -l && echo wrote > /mine && cat /mine"
CACHE = {"max_bytes": 3 << 20}
"""Less than the base has: chunks are fetched, evicted and fetched again all the time."""


def work(number: int, uppers: tuple[str, ...]) -> list[str]:
    limits = (["--memory", "64M"], ["--pids", "64"], [])[number % 3]
    return ["run", "--upper", uppers[number % len(uppers)], *limits, BASE, "--", "sh", "-c", SCRIPT]


def killing(m: Machine, runs: list[subprocess.Popen[str]], seed: int) -> tuple[set[int], set[str]]:
    """Until all have ended: kill a third of them, and the daemon's processes, at random.
    Numbers of the runs that were killed, and ids of all sandboxes that were seen."""
    rng = random.Random(seed)
    doomed = set(rng.sample(range(len(runs)), len(runs) // 3))
    seen: set[str] = set()
    killed: set[int] = set()
    rounds = 0
    deadline = time.monotonic() + 5 * HANG_S
    while any(run.poll() is None for run in runs):
        assert time.monotonic() < deadline, "runs do not end"
        seen |= m.sandboxes()
        if seen:  # the first is on its way
            alive = [n for n in doomed - killed if runs[n].poll() is None]
            for number in rng.sample(alive, min(1, len(alive))):
                runs[number].kill()
                killed.add(number)
            rounds += 1
            if rounds % 4 == 0:
                m.kill("worker")
            if rounds % 8 == 3:
                m.kill("active")
            if rounds % 8 == 7:
                m.kill("standby")
        time.sleep(rng.uniform(0.0, 0.3))
    return killed, seen | m.sandboxes()


def check(m: Machine, count: int, uppers: tuple[str, ...], base: Base) -> None:
    runs = [m.popen(*work(number, uppers)) for number in range(count)]
    try:
        killed, seen = killing(m, runs, seed=count)
        said = [run.communicate(timeout=HANG_S) for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.communicate()
    killed = {n for n in killed if runs[n].returncode == -signal.SIGKILL}
    assert killed, "some were killed while they worked"
    for number, (run, (out, err)) in enumerate(zip(runs, said, strict=True)):
        if number not in killed:
            assert (run.returncode, out) == (0, f"{base.files}\nwrote\n"), (number, err)
            assert not err, err
    assert len(seen) >= count // 2
    # Those that were killed are cleared by their reapers; what those were too late for, now.
    wait_for("reapers", lambda: not _reapers(m), HANG_S)
    with Runner(m.dirs) as runner:
        runner.recover()
    wait_for("nothing left", lambda: not m.left(seen), 10) if m.left(seen) else None
    assert m.left(seen) == {}
    assert m.client.stats()["fuse"]["errors"] == 0
    counted = m.counted()
    assert counted["corrupt_cache"] == counted["corrupt_store"] == counted["errors"] == 0
    assert counted["evictions"] > 0
    assert "Traceback" not in m.log()
    assert m("run", BASE, "--", "echo", "well").out == "well\n"


def _reapers(m: Machine) -> list[str]:
    from tests.t8_chaos.remains import processes_of

    return [line for line in processes_of(str(m.dirs.run)) if "reaper" in line]


def uppers_here(mode: Mode) -> tuple[str, ...]:
    return ("disk", "tmpfs") if why_not("loop") else ("disk", "tmpfs", "image")


@pytest.mark.parametrize("mode", ["kernel", "fuse"])
def test_some_are_killed(top: Path, base: Base, mode: Mode) -> None:
    if why_not(mode):
        pytest.skip(why_not(mode))
    with machine(top / "node", base.store, mode=mode) as m:
        m.start_faulty(cache=CACHE)
        m.fault(LATENCY)
        check(m, 12, uppers_here(mode), base)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["kernel", "loop", "fuse"])
def test_some_of_fifty_are_killed(top: Path, base: Base, mode: Mode) -> None:
    if why_not(mode):
        pytest.skip(why_not(mode))
    with machine(top / "node", base.store, mode=mode) as m:
        m.start_faulty(cache=CACHE)
        m.fault(LATENCY)
        check(m, 50, uppers_here(mode), base)
