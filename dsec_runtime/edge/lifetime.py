"""Sandboxes end by themselves: idle too long, lived too long, ended long ago.

One task looks at all of them at intervals. What must hold: a sandbox in which something is going
on is not idle; paused time does not count; an event tells of the end WARNING_S before it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time

from dsec_runtime.edge.box import Box
from dsec_runtime.edge.edge import ENDED_KEPT_S, Edge
from dsec_runtime.errors import CannotFreeze
from dsecfs.errors import DsecfsError

log = logging.getLogger(__name__)

WARNING_S = 60.0
"""How long before its end a sandbox's event "expiring" comes."""
TICK_S = 1.0


async def run(edge: Edge, *, tick_s: float = TICK_S) -> None:
    """Until it is cancelled."""
    while True:
        await asyncio.sleep(tick_s)
        now = time.time()
        for box in edge.all():
            await _look(edge, box, now)


async def _look(edge: Edge, box: Box, now: float) -> None:
    row, life = box.row, box.row.spec.lifetime
    if row.state.ended:
        if row.ended_at is not None and now - row.ended_at > ENDED_KEPT_S:
            edge.spawn(functools.partial(edge.remove, row.id), f"forget sandbox {row.id}")
        return
    if box.lock.locked():
        return  # somebody changes it just now
    ends_at = box.ends_at()
    if ends_at is None:
        return
    if now >= ends_at:
        edge.spawn(functools.partial(_expire, edge, box), f"end of sandbox {row.id}")
    elif now >= ends_at - WARNING_S and not box.warned:
        box.warned = True
        await edge.note(box, "expiring", {"ends_at": ends_at, "then": life.then})


async def _expire(edge: Edge, box: Box) -> None:
    life = box.row.spec.lifetime
    cause = "lifetime" if _too_old(box) else "idle"
    if life.then == "pause":
        try:
            await edge.pause(box.row.id, cause=cause, if_idle=cause == "idle")
            return
        except CannotFreeze as e:
            log.info("sandbox %s is not paused: %s", box.row.id, e)
            box.activity()  # tried again when it has been idle for as long again
            return
        except DsecfsError as e:
            log.warning("sandbox %s is not paused: %s", box.row.id, e)
    await edge.stop(box.row.id, cause=cause, if_idle=cause == "idle")


def _too_old(box: Box) -> bool:
    row, most = box.row, box.row.spec.lifetime.max_lifetime_s
    return (
        most is not None
        and row.started_at is not None
        and time.time() >= row.started_at + row.paused_s + most
    )
