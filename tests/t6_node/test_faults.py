"""What happens to sandboxes and their commands when processes of the node are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dsec_runtime.keeper.start import ask
from tests.t6_node.conftest import RealNode

pytestmark = [pytest.mark.root, pytest.mark.kernel, pytest.mark.timeout(240)]

COUNTING = "i=0; while [ $i -lt 150 ]; do i=$((i+1)); echo $i; sleep 0.02; done; exit 9"
COUNTED = "".join(f"{i}\n" for i in range(1, 151))


def start(node: RealNode, sandbox: str, script: str, **spec: Any) -> str:
    body = {"command": script, **spec}
    found: str = node.call("POST", f"/v1/sandboxes/{sandbox}/execs", json=body).json["id"]
    return found


def result(node: RealNode, sandbox: str, command: str) -> Any:
    return node.call("GET", f"/v1/sandboxes/{sandbox}/execs/{command}/result?wait_s=60").json


def test_kill_9_of_the_edge(own_node: RealNode) -> None:
    node = own_node
    box, paused = node.create(name="works")["id"], node.create(name="sleeps")["id"]
    node.call("POST", f"/v1/sandboxes/{paused}/pause")
    command = start(node, box, COUNTING)
    time.sleep(0.5)
    node.kill()
    time.sleep(0.5)
    node.start()
    shown = {s["id"]: s["state"] for s in node.call("GET", "/v1/sandboxes").json["sandboxes"]}
    assert shown == {box: "running", paused: "paused"}
    found = result(node, box, command)
    assert (found["code"], found["stdout"]["text"]) == (9, COUNTED)
    assert node.sh(paused, "echo on") == "on\n"
    # dsec run's recovery leaves them alone.
    node.dsec("run", "box:1", "--", "true")
    assert node.sh(box, "echo still") == "still\n"
    node.remove(box)
    node.remove(paused)
    assert node.remains() == {}


def test_an_end_while_no_edge_runs_is_told(own_node: RealNode) -> None:
    node = own_node
    box, gone = node.create()["id"], node.create()["id"]
    command = start(node, box, "sleep 0.5; echo done; exit 3")
    node.kill()
    pid = int((node.dirs.sandboxes / gone / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    time.sleep(1.0)
    node.start()
    found = result(node, box, command)
    assert (found["code"], found["stdout"]["text"]) == (3, "done\n")
    why = node.call("GET", f"/v1/sandboxes/{gone}/why").json
    assert (why["sandbox"]["state"], why["why"]["cause"]) == ("failed", "lost")
    assert why["why"]["fault"] == "platform"


def test_sigterm_leaves_sandboxes(own_node: RealNode) -> None:
    node = own_node
    box = node.create()["id"]
    command = start(node, box, COUNTING)
    node.stop()
    node.start()
    assert result(node, box, command)["stdout"]["text"] == COUNTED


@pytest.mark.parametrize("which", ["pid", "holder"])
def test_kill_9_of_the_owner_of_commands(own_node: RealNode, which: str) -> None:
    node = own_node
    box = node.create()["id"]
    commands = [start(node, box, COUNTING) for _ in range(3)]
    time.sleep(0.4)
    found = ask(node.dirs, "ping")
    assert found is not None
    os.kill(int(str(found[which])), signal.SIGKILL)
    assert node.sh(box, "echo new") == "new\n"
    for command in commands:
        got = result(node, box, command)
        assert (got["code"], got["outcome"], got["stdout"]["text"]) == (9, "exited", COUNTED)


def test_both_owners_killed_is_lost_and_the_sandbox_lives(own_node: RealNode) -> None:
    node = own_node
    box = node.create()["id"]
    command = start(node, box, "sleep 60")
    found = ask(node.dirs, "ping")
    assert found is not None
    holder, worker = int(str(found["holder"])), int(str(found["pid"]))
    os.kill(holder, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    os.kill(holder, signal.SIGKILL)
    got = result(node, box, command)
    assert (got["outcome"], got["fault"], got["code"]) == ("lost", "platform", None)
    assert "sleep 60" not in node.sh(box, "ps")


def test_kill_9_of_crun_exec_is_lost(own_node: RealNode) -> None:
    node = own_node
    box = node.create()["id"]
    command = start(node, box, "echo begun; sleep 60")
    time.sleep(0.4)
    wanted = f"{node.dirs.sandboxes}/{box}/exec-".encode()
    killed = [
        int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if wanted in _cmdline(int(pid))
    ]
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    got = result(node, box, command)
    assert (got["outcome"], got["fault"], got["code"]) == ("lost", "platform", None)
    assert got["stdout"]["text"] == "begun\n"
    assert "sleep 60" not in node.sh(box, "ps")


def _cmdline(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_kill_9_of_the_edge_at_any_moment_leaks_nothing(own_node: RealNode) -> None:
    """Creates, commands and removals are under way when it dies; again and again."""
    node = own_node

    def work(number: int, until: threading.Event) -> None:
        while not until.is_set():
            try:
                key = f"k{number}-{time.monotonic()}"
                made = node.create(key=key)["id"]
                node.run(made, "echo x")
                node.remove(made)
            except (AssertionError, httpx.HTTPError):
                time.sleep(0.05)

    for delay in (0.2, 0.45, 0.7, 1.0):
        until = threading.Event()
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(work, number, until) for number in range(4)]
            time.sleep(delay)
            node.kill()
            until.set()
            for job in jobs:
                job.result(60)
        node.start()
        for sandbox in node.call("GET", "/v1/sandboxes?ended=true").json["sandboxes"]:
            assert sandbox["state"] in ("running", "failed", "stopped"), sandbox
            node.remove(sandbox["id"])
    assert node.remains() == {}


def test_a_killed_fuse_worker_does_not_disturb(own_node: RealNode) -> None:
    node = own_node
    box = node.create()["id"]
    command = start(node, box, COUNTING)
    status = node.dsec("--json", "fs", "status")
    import json

    pid = json.loads(status)["pid"] if "pid" in json.loads(status) else json.loads(status)["worker"]
    os.kill(int(pid), signal.SIGKILL)
    assert node.sh(box, "cat /bin/busybox | wc -c").strip().isdigit()
    assert result(node, box, command)["stdout"]["text"] == COUNTED
    other = node.create()["id"]
    assert node.sh(other, "echo fine") == "fine\n"


def test_disk_full_in_the_sandbox_harms_nobody(own_node: RealNode) -> None:
    node = own_node
    small, other = node.create(limits={"disk_mb": 8})["id"], node.create()["id"]
    assert node.run(small, "cat /dev/zero > /root/x")["outcome"] == "disk"
    assert node.sh(small, "rm /root/x; echo again > /root/y; cat /root/y") == "again\n"
    assert node.sh(other, "echo fine > /root/z; cat /root/z") == "fine\n"


def test_a_hundred_short_sandboxes_leave_everything_flat(own_node: RealNode) -> None:
    node = own_node

    def one(number: int) -> None:
        made = node.create()["id"]
        assert node.sh(made, f"echo {number}") == f"{number}\n"
        node.remove(made)

    def used() -> tuple[int, int]:
        assert node.process is not None
        pid = node.process.pid
        return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(20)))
        before = used()
        list(pool.map(one, range(80)))
    after = used()
    assert node.remains() == {}
    # Ranges of ids that are kept for the next runs have a descriptor or two each.
    assert after[0] <= before[0] + 20 and after[1] <= before[1] + 40, (before, after)
