"""/proc files that show a sandbox's limits, by lxcfs (Debian's package): one process per node.

    run/lxcfs        its mount; a clone of it is in the copy of crun's namespace of each sandbox
    run/lxcfs.pid    its pid file and lock

What must hold: without lxcfs sandboxes are made all the same, and see the machine's figures; it
is started once and outlives the edge, since sandboxes have its files mounted. When it is killed,
those files fail to be read (ENOTCONN) in the sandboxes that have them: a new one serves new
sandboxes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from dsecfs.errors import DsecfsError
from dsecfs.kernel.syscalls import open_tree, umount
from dsecfs.locks import locked_file
from dsecfs.nodedirs import NodeDirs

log = logging.getLogger(__name__)

START_S = 5.0
FILES = ("cpuinfo", "diskstats", "loadavg", "meminfo", "stat", "swaps", "uptime")
_ONLINE = "sys/devices/system/cpu/online"


class Lxcfs:
    """The node's lxcfs."""

    def __init__(self, dirs: NodeDirs) -> None:
        self._place = dirs.run.absolute() / "lxcfs"
        self._pid = dirs.run.absolute() / "lxcfs.pid"
        self._log = dirs.run / "lxcfs.log"
        self._program = shutil.which("lxcfs", path="/usr/bin:/usr/sbin:/usr/local/bin")

    def start(self) -> bool:
        """It runs when this is True; False, and logged why, if there is none."""
        if self._program is None:
            log.info("no lxcfs: /proc/meminfo and cpuinfo show the machine (apt-get install lxcfs)")
            return False
        with locked_file(self._place.with_suffix(".lock"), "start lxcfs"):
            if self.answers():
                return True
            with contextlib.suppress(DsecfsError):
                umount(self._place, detach=True)
            self._place.mkdir(mode=0o755, exist_ok=True)
            self._pid.unlink(missing_ok=True)
            with self._log.open("ab") as out:
                subprocess.Popen(
                    [self._program, "-f", "--enable-cfs", "-p", str(self._pid), str(self._place)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd="/",
                    env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                    start_new_session=True,
                )
            deadline = time.monotonic() + START_S
            while not self.answers():
                if time.monotonic() > deadline:
                    log.warning("lxcfs does not start: see %s", self._log)
                    return False
                time.sleep(0.01)
        return True

    def answers(self) -> bool:
        try:
            return (self._place / "proc/meminfo").read_text().startswith("MemTotal")
        except OSError:
            return False

    def open(self) -> int:
        """A clone of its mount, attached nowhere. MountError."""
        return open_tree(self._place)

    @staticmethod
    def mounts(place: Path) -> list[dict[str, Any]]:
        """Their part of config.json, when the clone is attached at `place`."""
        found = [(place / "proc" / name, f"/proc/{name}") for name in FILES]
        found.append((place / _ONLINE, f"/{_ONLINE}"))
        options = ["bind", "ro", "nosuid", "nodev", "noexec"]
        return [
            {"destination": at, "type": "bind", "source": str(path), "options": options}
            for path, at in found
        ]

    @staticmethod
    def end(dirs: NodeDirs) -> None:
        """End it. Sandboxes that have its files must be gone."""
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((dirs.run / "lxcfs.pid").read_text()), 15)
        with contextlib.suppress(DsecfsError):
            umount(dirs.run / "lxcfs", detach=True)
