"""A minute of everything at once, at random: run it longer with DSEC_SOAK_S."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsecfs.errors import DsecfsError
from dsecfs.store.base import Store
from dsecfs.store.faults import Kind, Rule
from tests.t8_chaos.stack import Content, Load, Mode, Node, drop_caches, node

SOAK_S = float(os.environ.get("DSEC_SOAK_S", "25"))
"""Seconds of each of the two parts."""


def kill_some(n: Node, rng: random.Random) -> None:
    """One or two of the three, at the same moment."""
    s = n.settled()
    for role in rng.sample(("active", "standby", "worker"), rng.choice((1, 1, 2))):
        os.kill(s[role], signal.SIGKILL)


def upgrade(n: Node, rng: random.Random) -> None:
    try:
        n.client.restart_worker()
    except DsecfsError:
        n.settled()  # it was killed meanwhile


def stop_and_go(n: Node, rng: random.Random) -> None:
    """A process that sleeps for a moment."""
    pid = n.settled()[rng.choice(("active", "standby", "worker"))]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(rng.uniform(0, 0.5))
    os.kill(pid, signal.SIGCONT)


def soak(n: Node, load: Load, rng: random.Random, deeds: list[Callable[[], None]]) -> None:
    end = time.monotonic() + SOAK_S
    while time.monotonic() < end:
        rng.choice(deeds)()
        time.sleep(rng.uniform(0, 0.3))
        assert not load.errors, load.errors
    n.settled()


@pytest.mark.slow
def test_everything_at_once(
    top: Path, shared_store: Store, content: Content, modes: tuple[Mode, ...]
) -> None:
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    rng = random.Random(seed)
    with node(top / "node", shared_store, content, modes, cache={"max_bytes": 8 << 20}) as n:

        def faulty() -> None:
            kinds: tuple[Kind, ...] = (
                "error", "busy", "cut", "short", "truncated", "wrong", "stall",
            )  # fmt: skip
            n.fault(
                *(
                    Rule(k, probability=rng.choice((0.1, 0.5, 1.0)), seconds=0.2)
                    for k in rng.sample(kinds, 2)
                )
            )

        calm: list[Callable[[], None]] = [
            lambda: kill_some(n, rng),
            lambda: upgrade(n, rng),
            lambda: stop_and_go(n, rng),
            n.forget_chunks,
            drop_caches,
        ]
        with Load(n) as load:
            soak(n, load, rng, calm)
            load.progress()
        assert n.client.stats()["fuse"]["errors"] == 0
        with Load(n, tolerated=(errno.EIO,)) as load:
            soak(n, load, rng, [*calm, faulty, n.fault])
            n.fault()
            load.progress()
        drop_caches()
        n.check()
        assert "Traceback" not in n.log()
