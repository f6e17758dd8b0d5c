"""The edge over its API: a sandbox from create to its end."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest

from tests.t6_node.conftest import RealNode

pytestmark = [pytest.mark.root, pytest.mark.kernel, pytest.mark.timeout(120)]


def test_create_run_remove(node: RealNode) -> None:
    made = node.create(name="first", labels={"team": "a"}, variables={"SEED": "1"})
    assert made["state"] == "running" and made["name"] == "first"
    result = node.run(made["id"], "echo $SEED; echo oops >&2; exit 3")
    assert (result["code"], result["outcome"], result["fault"]) == (3, "exited", "")
    assert (result["stdout"]["text"], result["stderr"]["text"]) == ("1\n", "oops\n")
    assert base64.b64decode(result["stdout"]["head"]) == b"1\n"
    assert result["duration_s"] > 0 and not result["truncated"]
    listed = node.call("GET", "/v1/sandboxes?label=team=a").json["sandboxes"]
    assert [s["id"] for s in listed] == [made["id"]]
    node.remove("first")
    assert node.call("GET", f"/v1/sandboxes/{made['id']}", 404).json["type"] == "NoSuchSandbox"
    assert node.remains() == {}


def test_what_a_command_sees(node: RealNode, box: str) -> None:
    groups = node.sh(box, "cat /proc/self/cgroup").splitlines()
    limiting = [line for line in groups if line.split(":")[1] in ("memory", "pids", "freezer", "")]
    assert limiting and all("/exec-" in line or ":0::" in f":{line}" for line in limiting), groups
    status = dict(x.split(":\t") for x in node.sh(box, "cat /proc/self/status").splitlines()[8:])
    assert (status["Seccomp"], status["CapAmb"]) == ("2", "0" * 16)
    assert int(status["CapEff"], 16) & (1 << 21) == 0, "CAP_SYS_ADMIN"
    assert node.sh(box, "hostname; pwd; whoami 2>/dev/null || id -un") == "sandbox\n/\nroot\n"
    env = dict(line.split("=", 1) for line in node.sh(box, "env").splitlines())
    assert env["LANG"] == "C.UTF-8" and env["HOME"] == "/root"
    assert "DSEC_STORE" not in env
    # Standard input is /dev/null: a character device, at its end.
    assert node.sh(box, "stat -L -c %F /dev/stdin; cat") == "character special file\n"
    assert node.sh(box, "cat", input="given") == "given"
    assert node.run(box, ["greet"], status=422)["type"] == "ProgramNotFound"
    assert node.run(box, ["ls"], cwd="/nowhere", status=500)["type"] == "SandboxError"
    assert node.sh(box, "id -u; id -g; id -G; echo $HOME", user="bob") == (
        "1000\n1001\n1001 50\n/home/bob\n"
    )
    assert node.run(box, "true", user="nobody-there", status=422)["type"] == "NoSuchUser"


def test_state_stays_between_commands(node: RealNode, box: str) -> None:
    node.sh(box, "echo kept > /root/file; (sleep 300 >/dev/null 2>&1 &)")
    assert node.sh(box, "cat /root/file; ps | grep -c 'sleep 300'").startswith("kept\n")


def test_kill_all_inside_leaves_the_sandbox(node: RealNode, box: str) -> None:
    body = {"command": "sleep 100"}
    other = node.call("POST", f"/v1/sandboxes/{box}/execs", json=body).json["id"]
    time.sleep(0.3)
    assert node.run(box, "kill -9 -1; exit 4")["code"] == 4
    result = node.call("GET", f"/v1/sandboxes/{box}/execs/{other}/result").json
    assert (result["outcome"], result["signal"], result["code"]) == ("signal", 9, 137)
    assert node.sh(box, "echo alive") == "alive\n"


def test_the_end_of_pid_1_is_the_end(node: RealNode, box: str) -> None:
    node.run(box, "kill -TERM 1; kill -INT 1; sleep 2")
    deadline = time.monotonic() + 10
    while (shown := node.call("GET", f"/v1/sandboxes/{box}").json)["state"] == "running":
        if time.monotonic() > deadline:
            pytest.skip("PID 1 does not end of a signal")
        time.sleep(0.05)
    assert shown["state"] == "failed" and shown["why"]["cause"] == "exited"
    assert node.run(box, "true", status=410)["type"] == "SandboxLost"


def test_timeouts(node: RealNode, box: str) -> None:
    script = "trap '' TERM; echo started; (trap '' TERM; setsid sleep 77) & sleep 77; sleep 77"
    result = node.run(box, script, timeout_s=0.7, grace_s=0.3)
    assert (result["outcome"], result["fault"], result["limit"]) == ("timeout", "agent", "time")
    assert result["stdout"]["text"] == "started\n"
    assert "sleep 77" not in node.sh(box, "ps")


def test_limits_are_told(node: RealNode) -> None:
    made = node.create(limits={"memory_mb": 32, "pids": 20, "disk_mb": 16})["id"]
    hog = "x=$(dd if=/dev/zero bs=1M count=200 2>/dev/null | tr '\\0' x); echo ${#x}"
    result = node.run(made, hog)
    assert (result["outcome"], result["limit"]) == ("oom", "memory"), result
    result = node.run(made, "for i in $(seq 40); do sleep 5 & done; wait")
    assert (result["outcome"], result["limit"]) == ("pids", "pids"), result
    result = node.run(made, "dd if=/dev/zero of=/root/big bs=1M count=64")
    assert (result["outcome"], result["limit"]) == ("disk", "disk"), result
    assert "MemTotal:          32768 kB" in node.sh(made, "cat /proc/meminfo")
    stats = node.call("GET", f"/v1/sandboxes/{made}/stats").json
    assert stats["memory_limit_bytes"] == 32 << 20 and stats["disk_bytes"] > 8 << 20


def test_pause_and_resume(node: RealNode, box: str) -> None:
    body = {"command": "i=0; while true; do i=$((i+1)); echo $i; sleep 0.05; done", "timeout_s": 60}
    command = node.call("POST", f"/v1/sandboxes/{box}/execs", json=body).json["id"]
    time.sleep(0.3)
    assert node.call("POST", f"/v1/sandboxes/{box}/pause").json["state"] == "paused"
    place = node.dirs.exec(box, command)
    size = sum(p.stat().st_size for p in place.glob("1.*"))
    time.sleep(0.3)
    assert sum(p.stat().st_size for p in place.glob("1.*")) == size > 0
    # Any request resumes it first.
    assert node.sh(box, "echo awake") == "awake\n"
    assert node.call("GET", f"/v1/sandboxes/{box}").json["state"] == "running"
    kinds = [e["kind"] for e in node.call("GET", f"/v1/events?sandbox={box}").json["events"]]
    assert kinds[:2] == ["created", "running"] and kinds[-2:] == ["paused", "resumed"]
    node.call("DELETE", f"/v1/sandboxes/{box}/execs/{command}")


def test_idle_sandboxes_end(node: RealNode) -> None:
    made = node.create(lifetime={"idle_timeout_s": 1.5})["id"]
    node.sh(made, "sleep 2.5; echo still here")  # something is going on
    deadline = time.monotonic() + 20
    while node.call("GET", f"/v1/sandboxes/{made}").json["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    why = node.call("GET", f"/v1/sandboxes/{made}/why").json
    assert why["sandbox"]["state"] == "stopped" and why["why"]["cause"] == "idle"
    assert why["last"]["stdout"]["text"] == "still here\n"


def test_a_key_makes_one_sandbox(node: RealNode) -> None:
    first = node.create(key="step-1")
    assert node.create(key="step-1")["id"] == first["id"]
    assert node.create(key="step-1", name="other", status=409)["type"] == "Conflict"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"limits": {"memory_mb": 1}}, "limits.memory_mb"),
        ({"limits": {"memory": 1}}, "limits.memory"),
        ({"hostname": "-x"}, "hostname"),
        ({"name": "a/b"}, "name"),
        ({"name": "x" * 200}, "name"),
        ({"variables": {"A=B": "1"}}, "variables"),
        ({"mounts": [{"at": "/x"}]}, "mounts.0"),
        ({"network": {"allow": [{"host": "a", "cidr": "1.1.1.1/32"}]}}, "network.allow.0"),
        ({"lifetime": {"idle_timeout_s": -1}}, "lifetime.idle_timeout_s"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_bad_specifications(node: RealNode, spec: dict[str, Any], field: str) -> None:
    answer = node.create(422, **spec)
    assert answer["type"] == "BadInput" and answer["field"].startswith(field), answer
    assert node.call("GET", "/v1/sandboxes").json["sandboxes"] == []


@pytest.mark.parametrize(
    ("spec", "status", "text"),
    [
        ({"environment": "swe/djagno:1"}, 404, "swe/djagno:1"),
        ({"toolkits": ["nothing:1"]}, 404, "nothing"),
        ({"user": "No-Such:User"}, 422, "No-Such"),
        ({"ulimits": {"nonsense": {"soft": 1, "hard": 1}}}, 422, "nonsense"),
        ({"mounts": [{"at": "/proc/x", "scratch_mb": 1}]}, 422, "/proc/x"),
        ({"mounts": [{"at": "/x", "host": "/etc"}]}, 422, "does not allow"),
        ({"extra_hosts": {"a": "not an address"}}, 422, "extra_hosts"),
        ({"memory_request_mb": 1 << 30}, 409, "largest free"),
        ({"backend": "microvm"}, 501, "microvm"),
        ({"lifetime": {"archive_after_s": 60}}, 501, "archives"),
        ({"lifetime": {"keep_on_failure": True}}, 501, "keeps"),
        ({"oci_runtime": "runsc"}, 501, "runsc"),
        ({"ready_cmd": "exit 1", "ready_timeout_s": 0.3}, 500, "not ready"),
    ],
)
def test_creates_that_fail_leave_nothing(
    node: RealNode, spec: dict[str, Any], status: int, text: str
) -> None:
    answer = node.create(status, **spec)
    assert text in answer["message"], answer
    assert node.call("GET", "/v1/sandboxes").json["sandboxes"] == []


def test_a_full_specification(node: RealNode) -> None:
    made = node.create(
        toolkits=["greet:1"],
        user="agent",
        cwd="/home/bob",
        hostname="worker-1",
        extra_hosts={"llm": "192.0.2.9"},
        tmpfs={"/scratch": 8},
        shm_mb=16,
        ulimits={"stack": {"soft": 4 << 20, "hard": 8 << 20}},
        mounts=[
            {"at": "/data", "layer": "toolkit/greet:1"},
            {"at": "/space", "scratch_mb": 4},
        ],
        ready_cmd="test -d /scratch",
    )["id"]
    said = node.sh(
        made,
        "greet you; id -un; pwd; hostname; grep llm /etc/hosts; ls -d /home/agent; "
        "grep -c ' /scratch ' /proc/mounts; find /data 2>/dev/null | head -1; ulimit -s; "
        "touch ~/mine && echo wrote; touch /data/x 2>/dev/null || echo read-only; "
        "touch /space/x && echo scratch",
    )
    assert said.splitlines() == [
        *("hello you", "agent", "/home/bob", "worker-1", "192.0.2.9\tllm", "/home/agent"),
        *("1", "4096", "wrote", "read-only", "scratch"),
    ] or said.splitlines() == [
        *("hello you", "agent", "/home/bob", "worker-1", "192.0.2.9\tllm", "/home/agent"),
        *("1", "/data", "4096", "wrote", "read-only", "scratch"),
    ]


def test_status_metrics_and_cordon(node: RealNode, box: str) -> None:
    status = node.call("GET", "/v1/node").json
    assert status["states"]["running"] == 1 and "container" in status["backends"]
    assert status["memory_requested_mb"] == 16
    metrics = node.call("GET", "/metrics").content.decode()
    assert "dsec_" in metrics
    node.call("POST", "/v1/node/cordon?reason=upgrade")
    try:
        refused = node.create(409)
        assert refused["type"] == "Refused" and "upgrade" in refused["message"]
        assert refused["retry_after_s"] > 0
    finally:
        node.call("POST", "/v1/node/uncordon")
    assert node.call("GET", "/openapi.json").json["paths"]
