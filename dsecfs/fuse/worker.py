"""The worker: the one process of a mount that reads requests and answers them.

Forked by a supervisor; imports its code afterwards, so a new worker runs the code that is
on disk now. What must hold:
- it reads no request before it holds the worker lock, and first has the kernel ask again
  what its predecessors left unanswered;
- it gives signs of life from its event loop, so a loop that is blocked is seen;
- it ends when the connection ends, when it is asked to drain, or by dying. It keeps
  nothing that its successor needs.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import resource
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pyfuse3
import trio

from dsecfs.errors import Unsupported
from dsecfs.fuse.blobs import BlobSource
from dsecfs.fuse.config import FsConfig
from dsecfs.fuse.control import ControlServer
from dsecfs.fuse.loop import wait_around_trio
from dsecfs.fuse.operations import HANDLERS, Handlers
from dsecfs.fuse.rescue import AGAIN_S, ALONE_S, call_supervisors
from dsecfs.fuse.session import resend
from dsecfs.fuse.shared import VERSION, Inherited, SharedPage, lock_worker
from dsecfs.fuse.slots import Slots
from dsecfs.fuse.supervisor import EXIT_DRAINED, EXIT_NOT_NEEDED, EXIT_OVER
from dsecfs.fuse.top import ROOT, Spaces

if TYPE_CHECKING:
    from dsecfs.fuse.chores import Chores

log = logging.getLogger("dsecfs.fuse.worker")

BEAT_S = 0.5
LOCK_WAIT_S = 2.0
MAX_TASKS = 300
"""Requests handled at once: the kernel's limit of background requests and some."""
_ABORTED = (errno.ECONNABORTED, errno.ENODEV, errno.ENOTCONN)
REPLY_S = 1.0
"""How long the last answers on the control socket may take once the mount is gone."""


CHORES_S = 2.0
"""How long the last step of what is done beside serving may take once the mount is gone."""


def main(inherited: Inherited) -> int:
    """Entry point in the forked process: serve with the node's chunk cache."""
    from dsecfs.fuse.cached import CachedSource, open_cache
    from dsecfs.fuse.chores import Chores

    config = FsConfig(**inherited.config)
    cache = open_cache(config)
    return run(inherited, config, CachedSource(cache), Chores(config, cache))


def run(
    inherited: Inherited, config: FsConfig, source: BlobSource, chores: Chores | None = None
) -> int:
    """Wait for the lock, then serve until the end. Returns an exit code."""
    if inherited.version != VERSION:
        raise Unsupported(
            "FUSE worker: its supervisor is of another version",
            hint="stop the daemon and start it again",
        )
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    page = SharedPage(inherited.memory)
    parent = os.getppid()
    page.prepared = os.getpid()
    while lock_worker(inherited.slots_fd, LOCK_WAIT_S) is None:
        # The first half of an upgrade is still serving; or a supervisor that had just taken
        # over forked a worker although one was alive.
        if not inherited.successor or os.getppid() != parent:
            log.info("not needed: worker %d serves", page.worker_pid)
            return EXIT_NOT_NEEDED
    page.set_worker()
    page.clear_notes()
    if page.resend and not resend(inherited.fuse_fd):
        log.error("the kernel refuses to ask requests again; some readers may hang")
    code = EXIT_OVER
    try:
        code = trio.run(_serve, inherited, config, source, page, chores)
    except BaseExceptionGroup as group:
        _, rest = group.split(_is_abort)
        if rest is not None:
            raise
        log.warning("the connection of %s was aborted", config.mountpoint)
    if chores is not None and code == EXIT_OVER:
        chores.stop(CHORES_S)
    return code


def _is_abort(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _ABORTED


async def _serve(
    inherited: Inherited,
    config: FsConfig,
    source: BlobSource,
    page: SharedPage,
    chores: Chores | None,
) -> int:
    spaces = Spaces(config.dirs, Slots(inherited.slots_fd), source)
    root = spaces.tree_ino(config.tree.encode()) if config.tree else ROOT
    handlers = Handlers(spaces, page, root, config.request_limit_s)
    for name in HANDLERS:
        setattr(inherited.shell, name, getattr(handlers, name))
    wait_around_trio(inherited.fuse_fd, lambda: not handlers.waiting)
    draining = trio.Event()
    async with trio.open_nursery() as helpers:
        await helpers.start(_watch_signals, inherited, page, draining)
        helpers.start_soon(_beat, page)
        helpers.start_soon(_mind_supervisors, inherited, page)
        control = None
        if inherited.control_fd >= 0:
            control = ControlServer(inherited, config, page, spaces, handlers, source, chores)
            await helpers.start(control.serve, draining)
        page.serving()
        log.info("worker %d serves %s", os.getpid(), config.mountpoint)
        if chores is not None:
            chores.start()
            helpers.start_soon(_stop_chores, draining, chores)
        async with _cut_off(draining, config.drain_s):
            await pyfuse3.main(1, MAX_TASKS)
        if control is not None:
            with trio.move_on_after(REPLY_S):
                await control.finish()
        helpers.cancel_scope.cancel()
    return EXIT_DRAINED if draining.is_set() else EXIT_OVER


@asynccontextmanager
async def _cut_off(draining: trio.Event, drain_s: float) -> AsyncIterator[None]:
    """Ends the block `drain_s` seconds after `draining`; the next worker is asked the rest."""

    async def watch(scope: trio.CancelScope) -> None:
        await draining.wait()
        # Readers of the connection stop; requests that are being handled go on.
        pyfuse3.terminate()
        scope.deadline = trio.current_time() + drain_s

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(watch, scope)
            yield
        nursery.cancel_scope.cancel()


async def _stop_chores(draining: trio.Event, chores: Chores) -> None:
    await draining.wait()
    chores.ask_to_stop()


async def _beat(page: SharedPage) -> None:
    while True:
        page.beat()
        await trio.sleep(BEAT_S)


async def _mind_supervisors(inherited: Inherited, page: SharedPage) -> None:
    """Have new supervisors made when both are gone: without them our death would be the end."""
    from dsecfs.fuse.daemon import environment

    alone_s = 0.0
    while True:
        await trio.sleep(BEAT_S)
        if page.supervisors():
            alone_s = 0.0
            continue
        alone_s += BEAT_S
        if alone_s < ALONE_S:
            continue
        alone_s = ALONE_S - AGAIN_S
        log.error("both supervisors are gone: calling new ones")
        try:
            await trio.to_thread.run_sync(call_supervisors, inherited, environment())
        except (OSError, subprocess.TimeoutExpired) as e:
            log.error("cannot call supervisors: %s", e)


async def _watch_signals(
    inherited: Inherited,
    page: SharedPage,
    draining: trio.Event,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """SIGUSR1 drains. Others were most likely meant for the supervisor, or reach it too."""
    with trio.open_signal_receiver(
        signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    ) as received:
        task_status.started()
        async for number in received:
            if number == signal.SIGUSR1:
                draining.set()
            elif number == signal.SIGHUP:
                page.restart = True
                os.eventfd_write(inherited.command_fd, 1)

