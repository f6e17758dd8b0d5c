"""A daemon with fake blobs for tests: made, watched, and taken away whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from dsecfs.errors import DsecfsError
from dsecfs.fuse.config import FsConfig, node_config
from dsecfs.fuse.control import FsClient
from dsecfs.fuse.daemon import start_daemon, stop_daemon
from dsecfs.fuse.mountpoint import fuse_device
from dsecfs.layers.digest import Digest
from dsecfs.nodedirs import NodeDirs
from tests.t4_fuse.fakeworker import content

ENTRY = "tests.t4_fuse.fakeworker:main"
WAIT_S = 30.0
_libc = ctypes.CDLL(None, use_errno=True)


def why_no_fuse() -> str:
    """What is missing for FUSE mounts by root; "" if nothing is."""
    if os.geteuid() != 0:
        return "mounting here needs root"
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    return ""


def why_no_resend() -> str:
    release = tuple(int(p) for p in os.uname().release.split("-")[0].split(".")[:2])
    if release < (6, 9):
        return f"kernel {os.uname().release} has no FUSE_NOTIFY_RESEND (6.9)"
    return why_no_fuse()


def wait_for(what: str, condition: Callable[[], Any], limit_s: float = WAIT_S) -> Any:
    """The first true value of `condition`; fails after `limit_s`."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {limit_s} s")


class Family:
    """The processes of one mount, in scratch directories of their own."""

    def __init__(self, **settings: Any) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="dsec-fuse-"))
        self.dirs = NodeDirs(self.top / "data", self.top / "run")
        self.dirs.create()
        self.dirs.blobs.mkdir()
        settings = {"entry": ENTRY, **settings}
        self.config: FsConfig = node_config(self.dirs, "file:/nowhere", **settings)
        self.client = FsClient(self.config.control, timeout_s=WAIT_S)

    def start(self) -> None:
        start_daemon(self.config)

    def add_blob(self, name: str, size: int) -> Digest:
        digest = Digest(hashlib.sha256(name.encode()).hexdigest())
        (self.dirs.blobs / digest).mkdir()
        (self.dirs.blobs / digest / "chunks").write_text(str(size))
        return digest

    def blob(self, digest: Digest) -> Path:
        return self.dirs.fs / "blobs" / digest

    def flag(self, name: str) -> Path:
        """A file that makes the fake worker misbehave while it exists."""
        path = self.dirs.data / name
        path.touch()
        return path

    def status(self) -> dict[str, Any]:
        """The status, asked again when the worker is replaced while it answers."""

        def ask() -> dict[str, Any] | None:
            try:
                return self.client.status()
            except DsecfsError:
                return None

        found: dict[str, Any] = wait_for("status", ask)
        return found

    def settled(self) -> dict[str, Any]:
        """Status once both supervisors and a worker are alive."""

        def look() -> dict[str, Any] | None:
            s = self.status()
            pids = {s["active"], s["standby"], s["worker"]}
            return s if len(pids) == 3 and pids <= self.pids() else None

        found: dict[str, Any] = wait_for("all three processes", look)
        return found

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = int(self.settled()[role])
        os.kill(pid, number)
        return pid

    def kill_worker(self) -> None:
        """Kill the worker and wait until another one serves."""
        s = self.status()
        os.kill(s["worker"], signal.SIGKILL)
        wait_for("a new worker", lambda: self.status()["generation"] > s["generation"])

    def has_lost(self, pid: int) -> bool:
        return pid not in self.pids()

    def pids(self) -> set[int]:
        """Living processes of the family: those that hold its lock file open."""
        found = set()
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    for fd in os.listdir(f"/proc/{name}/fd"):
                        if os.readlink(f"/proc/{name}/fd/{fd}") == str(self.config.lock):
                            found.add(int(name))
        return found

    def kill_everybody(self) -> None:
        """All at once: stopped first, so that none can replace another."""
        stopped: set[int] = set()
        while (found := self.pids()) - stopped:
            for pid in found - stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= found
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for("their end", lambda: not self.pids())

    def log(self) -> str:
        return self.config.log.read_text() if self.config.log.exists() else ""

    def remove(self) -> None:
        self.end_family()
        shutil.rmtree(self.top)

    def end_family(self) -> None:
        """End its processes and take its mount away, whatever state they are in."""
        with contextlib.suppress(DsecfsError):
            stop_daemon(self.config, mode="force", timeout_s=10)
        self.kill_everybody()
        while fuse_device(self.dirs.fs) is not None:
            # MNT_FORCE aborts the connection: no reader is left hanging.
            _libc.umount2(os.fsencode(self.dirs.fs), 1)
            if _libc.umount2(os.fsencode(self.dirs.fs), 2):
                break


@contextlib.contextmanager
def family(**settings: Any) -> Iterator[Family]:
    f = Family(**settings)
    try:
        f.start()
        yield f
    except BaseException:
        print(f.log())
        raise
    finally:
        f.remove()


class Readers:
    """Threads that read a file at random places past the page cache, and check every byte."""

    def __init__(self, path: Path, digest: str, size: int, threads: int = 3) -> None:
        self._path = path
        self._digest = digest
        self._size = size
        self._stop = threading.Event()
        self.reads = 0
        self.errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(threads)
        ]

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            fd = os.open(self._path, os.O_RDONLY)
            try:
                while not self._stop.is_set():
                    size = rng.choice((4096, 65536, 262144))
                    at = rng.randrange(0, self._size - size, 4096)
                    os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)
                    if os.pread(fd, size, at) != content(self._digest, at, size):
                        raise AssertionError(f"wrong bytes at {at}+{size}")
                    self.reads += 1
            finally:
                os.close(fd)
        except (OSError, AssertionError) as e:
            self.errors.append(e)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        wait_for("first reads", lambda: self.reads > 10 or self.errors)
        return self

    def __exit__(self, *_: object) -> None:
        self.check_progress()
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        assert not self.errors, self.errors
        assert not any(t.is_alive() for t in self._threads), "a reader hangs"

    def check_progress(self) -> None:
        """All is well and reads go on."""
        before = self.reads
        wait_for("reads go on", lambda: self.reads > before + 5 or self.errors)
        assert not self.errors, self.errors
