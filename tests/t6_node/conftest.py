"""A real node: a store with a small base, `dsec node`'s process, and a client of its API."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dsec_runtime.cgroups import places as cgroup_places
from dsec_runtime.container.lxcfs import Lxcfs
from dsec_runtime.keeper.start import ask, end_keeper
from dsec_runtime.network.start import end_gate
from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.namespaces import unpin_namespaces
from dsecfs.kernel.syscalls import umount
from dsecfs.nodedirs import NodeDirs
from tests.t5_runtime.conftest import APPLETS, GROUP, PASSWD, why_no_containers

ROOT = Path(__file__).parents[2]
START_S = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_containers()
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        if reason and "t6_node" in str(item.path) and names & {"node", "own_node"}:
            item.add_marker(pytest.mark.skip(reason=reason))


class Answer:
    """What the edge answered."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self.content = response.content

    @property
    def json(self) -> Any:
        import json

        return json.loads(self.content)


class RealNode:
    """A node in a directory of its own. `start` it, `stop` it, kill it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.dirs = NodeDirs(place / "data", place / "run")
        self.process: subprocess.Popen[bytes] | None = None
        self.settings: dict[str, str] = {}
        self.ids: set[str] = set()
        (place / "store").mkdir()
        self._publish()

    @property
    def environ(self) -> dict[str, str]:
        kept = {n: v for n, v in os.environ.items() if not n.startswith("DSEC_")}
        return {
            **kept,
            "DSEC_CONFIG": "",
            "DSEC_DATA_DIR": str(self.dirs.data),
            "DSEC_RUN_DIR": str(self.dirs.run),
            "DSEC_STORE": f"file:{self.place / 'store'}",
            "PYTHONPATH": str(ROOT),
            **{f"DSEC_{n.upper()}": v for n, v in self.settings.items()},
        }

    def dsec(self, *words: str, code: int = 0) -> str:
        """Run `dsec WORDS` as a process of its own; what it printed."""
        done = subprocess.run(
            [sys.executable, "-c", "from dsecfs.cli.main import main; main()", *words],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, f"dsec {' '.join(words)}: {done}"
        return done.stdout

    def _publish(self) -> None:
        top = self.place / "rootfs"
        for name in ("bin", "etc", "home/bob", "tmp", "root", "data"):
            (top / name).mkdir(parents=True)
        (top / "tmp").chmod(0o1777)
        os.chown(top / "home/bob", 1000, 1001)
        shutil.copy("/usr/bin/busybox", top / "bin/busybox")
        for applet in sorted({*APPLETS, "head", "seq", "sleep", "dd", "setsid", "httpd", "mkfifo"}):
            (top / "bin" / applet).symlink_to("busybox")
        (top / "etc/passwd").write_bytes(PASSWD)
        (top / "etc/group").write_bytes(GROUP)
        self.dsec("layer", "publish", str(top), "base/box:1")
        tool = self.place / "tool/bin"
        tool.mkdir(parents=True)
        (tool / "greet").write_text("#!/bin/sh\necho hello $1\n")
        (tool / "greet").chmod(0o755)
        self.dsec(
            *("layer", "publish", str(tool.parent), "toolkit/greet:1", "--at", "/opt/greet"),
            *("--path-prepend", "/opt/greet/bin"),
        )

    # -- the process

    def start(self) -> None:
        """Start the edge; returns when it answers."""
        read, write = os.pipe()
        with (self.place / "edge.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dsec_runtime.edge", "--ready", str(write)],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[write],
            )
        os.close(write)
        with os.fdopen(read, "rb") as ready:
            found, _, _ = select.select([ready], [], [], START_S)
            assert found and ready.readline() == b"ready\n", self.log()

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(30)
            self.process = None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def log(self) -> str:
        return (self.place / "edge.log").read_text()

    # -- the API

    @contextlib.contextmanager
    def client(self) -> Iterator[httpx.Client]:
        transport = httpx.HTTPTransport(uds=str(self.dirs.edge))
        with httpx.Client(transport=transport, base_url="http://edge", timeout=90) as client:
            yield client

    def call(self, method: str, path: str, status: int | None = None, **more: Any) -> Answer:
        """One request; its status must be `status`, or a good one."""
        with self.client() as client:
            answer = Answer(client.request(method, path, **more))
        good = answer.status == status if status else answer.status < 300
        said = f"{answer.status} {answer.content[:2000]!r}\n{self.log()[-3000:]}"
        assert good, f"{method} {path}: {said}"
        return answer

    def create(self, status: int | None = None, **spec: Any) -> Any:
        """Create a sandbox; what the API shows of it."""
        body = {"environment": "box:1", "limits": {"disk_mb": 64, "memory_mb": 256}, **spec}
        made = self.call("POST", "/v1/sandboxes", status, json=body).json
        self.ids.add(made.get("id", ""))
        return made

    def run(self, sandbox: str, command: str | list[str], **spec: Any) -> Any:
        """Run a command to its end; its result."""
        status = spec.pop("status", None)
        body = {"command": command, **spec}
        return self.call("POST", f"/v1/sandboxes/{sandbox}/run", status, json=body).json

    def sh(self, sandbox: str, script: str, **spec: Any) -> str:
        """Standard output of a script that must succeed."""
        result = self.run(sandbox, script, **spec)
        assert result["code"] == 0, result
        text: str = result["stdout"]["text"]
        return text

    def remove(self, sandbox: str) -> None:
        self.call("DELETE", f"/v1/sandboxes/{sandbox}")

    # -- what is left

    def remains(self) -> dict[str, list[str]]:
        """What is on the node of sandboxes; {} if nothing is."""
        run, data = self.dirs.run, self.dirs.data
        uids = _names(self.dirs.uids)
        found = {
            "sandboxes": _names(self.dirs.sandboxes),
            "uppers": [n for n in _names(self.dirs.uppers) if not n.startswith(("blank-", "pool"))],
            "crun": _names(run / "crun"),
            "kept": _names(data / "sandboxes"),
            "terminals": _names(run / "keeper"),
            "cgroups": [
                str(p / n)
                for p in cgroup_places("/dsec")
                for n in os.listdir(p)
                if n in self.ids and (p / n).is_dir()
            ],
            "holders": [str(p) for p in (run / "layers").glob("*/*/refs/*")],
            "processes": _processes(uids),
            "mounts": [
                str(m.point)
                for m in mounts_here()
                if m.point.is_relative_to(self.place)
                and not re.search("/run/(ns|fs|lxcfs)", str(m.point))
            ],
            "loops": [
                str(p)
                for p in Path("/sys/block").glob("loop*/loop/backing_file")
                if p.read_text().startswith(str(self.dirs.uppers))
            ],
        }
        return {key: value for key, value in found.items() if value}

    def close(self) -> None:
        """End everything of it, whatever state it is in."""
        if self.process is None and (self.dirs.sandboxes.exists() and _names(self.dirs.sandboxes)):
            with contextlib.suppress(AssertionError):
                self.start()
        with contextlib.suppress(Exception):
            listed = self.call("GET", "/v1/sandboxes?limit=1000").json["sandboxes"]
            for sandbox in listed:
                self.remove(sandbox["id"])
        self.stop()
        end_keeper(self.dirs)
        end_gate(self.dirs)
        deadline = time.monotonic() + 10
        while ask(self.dirs, "ping") is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        Lxcfs.end(self.dirs)
        self.dsec("fs", "stop", "--force")
        unpin_namespaces(self.dirs.run / "ns")
        for mount in reversed(mounts_here()):
            if mount.point.is_relative_to(self.place):
                umount(mount.point, detach=True)
        shutil.rmtree(self.place)


def _names(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.exists() else []


def _processes(uids: list[str]) -> list[str]:
    """Processes whose user ids are in ranges that are given out."""
    starts = [int(name) for name in uids]
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            uid = os.stat(f"/proc/{pid}").st_uid
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and any(start <= uid < start + 65536 for start in starts):
            found.append(f"{pid} {line!r}")
    return found


@contextlib.contextmanager
def real_node() -> Iterator[RealNode]:
    place = Path(os.path.realpath(tempfile.mkdtemp(prefix="dsec-node-", dir="/var/tmp")))
    made: RealNode | None = None
    try:
        made = RealNode(place)
        yield made
    finally:
        if made is None:
            shutil.rmtree(place)
        else:
            made.close()


@pytest.fixture(scope="session")
def _shared_node() -> Iterator[RealNode]:
    with real_node() as made:
        made.start()
        yield made


@pytest.fixture
def node(_shared_node: RealNode) -> Iterator[RealNode]:
    """A node that runs, shared by tests that do not harm it. They leave no sandbox."""
    yield _shared_node
    listed = _shared_node.call("GET", "/v1/sandboxes?ended=true&limit=1000").json["sandboxes"]
    for sandbox in listed:
        _shared_node.remove(sandbox["id"])
    assert _shared_node.remains() == {}


@pytest.fixture
def own_node() -> Iterator[RealNode]:
    """A node of the test's own, started."""
    with real_node() as made:
        made.start()
        yield made


@pytest.fixture
def box(node: RealNode) -> str:
    """A sandbox on the shared node."""
    made: str = node.create()["id"]
    return made
