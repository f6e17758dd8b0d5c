"""New supervisors for a mount that has lost both: made by its worker, which serves on.

The worker cannot become a supervisor, since it has threads. It starts a fresh process
(`python -m dsecfs.fuse.daemon --adopt`) that gets the descriptors of the family and the kept
INIT, makes libfuse's session from that (session.renew), and supervises the worker as one that
it did not fork. What must hold: the new process touches nothing if it finds a living supervisor,
so a late or second rescuer does no harm.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

from dsecfs.errors import BadInput
from dsecfs.fuse.config import FsConfig
from dsecfs.fuse.shared import FD_FIELDS, Inherited, SharedPage

log = logging.getLogger("dsecfs.fuse.rescue")

ALONE_S = 2.0
"""A worker without supervisors for so long has new ones made. A standby needs milliseconds."""
AGAIN_S = 15.0
"""Between two tries."""
START_S = 10.0
"""Longest wait for the interpreter that forks the new supervisor off."""


def call_supervisors(shared: Inherited, environ: dict[str, str]) -> None:
    """Start a process that becomes the active supervisor. Called in a thread of the worker;
    OSError or subprocess.TimeoutExpired if it cannot be started."""
    fds = shared.descriptors()
    given = {
        "version": shared.version,
        "config": shared.config,
        "init": shared.init.hex(),
        "fds": fds,
    }
    subprocess.run(
        [sys.executable, "-P", "-m", "dsecfs.fuse.daemon", "--adopt"],
        input=json.dumps(given).encode(),
        stdout=1,
        stderr=2,
        pass_fds=list(fds.values()),
        start_new_session=True,
        env=environ,
        timeout=START_S,
        check=False,
    )


def adopt(text: str) -> int:
    """Supervise the mount that `text`, from `call_supervisors`, is about. Returns in every
    process that is forked, with its exit code."""
    from dsecfs.fuse.logfile import log_to
    from dsecfs.fuse.session import renew
    from dsecfs.fuse.supervisor import Supervisor

    try:
        given: dict[str, Any] = json.loads(text)
        config = FsConfig.from_json(json.dumps(given["config"]))
        fds = {name: int(given["fds"].get(name, -1)) for name in FD_FIELDS}
        init = bytes.fromhex(given["init"])
        version = int(given["version"])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise BadInput(f"FUSE daemon: cannot adopt a mount: {e!r}") from None
    for fd in fds.values():
        if fd >= 0:
            os.set_inheritable(fd, False)
    log_to(config.log, config.log_bytes, capture=True)
    memory = SharedPage.map(fds["memory_fd"])
    page = SharedPage(memory)
    if page.supervisors():
        log.info("not needed: supervisor %d lives", page.active_pid)
        return 0
    page.set_active()
    page.set_standby(0)
    log.warning("both supervisors were lost: %d takes over", os.getpid())
    page.takeovers += 1
    session = renew(fds["fuse_fd"], init)
    shared = Inherited(
        version=version,
        config=given["config"],
        fuse_fd=session.fuse_fd,
        memory=memory,
        memory_fd=fds["memory_fd"],
        slots_fd=fds["slots_fd"],
        command_fd=fds["command_fd"],
        control_fd=fds["control_fd"],
        lock_fd=fds["lock_fd"],
        init=session.init,
        shell=session.shell,
    )
    return Supervisor(config, shared, lambda word: None).run()
