"""A command in a container: what it sees, who it is, how it ends, what remains."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsec_runtime import cgroups
from dsec_runtime.bundle import Limits, control_groups
from dsec_runtime.cgroups import LimitWatch
from dsec_runtime.errors import NoSuchUser, SandboxError
from dsec_runtime.run import Runner, RunSpec
from dsec_runtime.running import forwarding
from dsecfs.errors import BadInput
from dsecfs.kernel.probe import version
from dsecfs.layers.local import LocalLayer
from dsecfs.locks import Claim
from tests.support.node import Node
from tests.t5_runtime.conftest import Shell, environment_of, remains

FREEZERS = {"freezer.state": "FROZEN", "cgroup.freeze": "1"}


def wait_for(file: Path, text: bytes, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while text not in file.read_bytes():
        assert time.monotonic() < deadline, f"{text!r} did not come: {file.read_bytes()!r}"
        time.sleep(0.01)


@pytest.mark.parametrize("code", [0, 1, 7, 125, 255])
def test_exit_codes_pass_through(shell: Shell, code: int) -> None:
    result, _, err = shell.run("sh", "-c", f"exit {code}")
    assert (result.exit_code, result.timed_out, err) == (code, False, "")


def test_a_signals_death_is_128_and_its_number(shell: Shell) -> None:
    assert shell.run("sh", "-c", "kill -SEGV $$")[0].exit_code == 128 + signal.SIGSEGV


def test_standard_streams(shell: Shell) -> None:
    result, out, err = shell.run("sh", "-c", "cat; echo oops >&2", stdin=b"from outside")
    assert (result.exit_code, out, err) == (0, "from outside", "oops\n")


def test_pipes_can_be_opened_by_name(runner: Runner, base: LocalLayer) -> None:
    read, write = os.pipe()
    script = "echo one > /dev/stdout; echo two > /dev/stderr"
    for user in ("", "bob"):
        spec = RunSpec((base,), ("sh", "-c", script), stdout=write, stderr=write, user=user)
        assert runner.run(spec).exit_code == 0
        assert os.read(read, 100) == b"one\ntwo\n"
    os.close(read)
    os.close(write)


def test_files_keep_their_owner_and_get_everything(
    runner: Runner, base: LocalLayer, tmp_path: Path
) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "in").write_bytes(data)
    script = "cat; echo end >&2"
    for mode in ("wb", "ab"):
        with (tmp_path / "in").open("rb") as given, (tmp_path / "out").open(mode) as out:
            fds: dict[str, Any] = {"stdin": given.fileno(), "stdout": out.fileno()}
            fds["stderr"] = out.fileno()
            assert runner.run(RunSpec((base,), ("sh", "-c", script), **fds)).exit_code == 0
    assert (tmp_path / "out").read_bytes() == 2 * (data + b"end\n")
    assert [(tmp_path / name).stat().st_uid for name in ("in", "out")] == [0, 0]


def test_input_that_nobody_reads_keeps_nobody_waiting(
    runner: Runner, base: LocalLayer, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(bytes(1 << 20))
    with (tmp_path / "in").open("rb") as given:
        assert runner.run(RunSpec((base,), ("true",), stdin=given.fileno())).exit_code == 0
    deadline = time.monotonic() + 10
    while feeding := [t for t in threading.enumerate() if t.name == "_feed"]:
        assert time.monotonic() < deadline, feeding
        time.sleep(0.01)


def test_environment(shell: Shell) -> None:
    env = environment_of(shell.sh("env", env={"A": "b c", "PATH": "/x:/bin"}))
    assert (env["A"], env["PATH"], env["HOME"]) == ("b c", "/x:/bin", "/root")
    assert env["HOSTNAME"] == "sandbox"
    assert "SHELL" not in env and "TERM" not in env, "nothing of the host's environment"


@pytest.mark.parametrize("name", ["", "A=B", "A\0"])
def test_bad_environment_is_refused(shell: Shell, name: str) -> None:
    with pytest.raises(BadInput, match="environment variable"):
        shell.run("true", env={name: "x"})


def test_working_directory(shell: Shell) -> None:
    assert shell.sh("pwd", cwd="/home/bob") == "/home/bob\n"
    for bad in ("/nowhere", "/etc/passwd"):
        with pytest.raises(SandboxError, match="must exist in the environment"):
            shell.run("true", cwd=bad)
    with pytest.raises(SandboxError, match="not an absolute path"):
        shell.run("true", cwd="home")


@pytest.mark.parametrize(
    ("user", "wanted"),
    [
        ("", "0 0 0"),
        ("bob", "1000 1001 1001 50"),
        ("1000", "1000 1001 1001 50"),
        ("4321", "4321 0 0"),
        ("4321:99", "4321 99 99"),
        ("bob:staff", "1000 60 60"),
        ("0:0", "0 0 0"),
    ],
)
def test_user(shell: Shell, user: str, wanted: str) -> None:
    assert shell.sh("echo $(id -u) $(id -g) $(id -G)", user=user).strip() == wanted


def test_a_user_has_her_home_and_no_capabilities(shell: Shell) -> None:
    out = shell.sh("echo $HOME; cat ~/mine; grep Cap /proc/self/status", user="bob")
    lines = out.splitlines()
    assert lines[:2] == ["/home/bob", "bob's"]
    caps = dict(line.split(":\t") for line in lines[2:])
    assert caps["CapEff"] == caps["CapPrm"] == "0000000000000000"
    assert caps["CapBnd"] == "00000000a80425fb", "docker's default set"


@pytest.mark.parametrize("user", ["alice", "bob:nogroup", "odd x", "70000", "0:70000", "root:"])
def test_unknown_users_are_refused(shell: Shell, user: str) -> None:
    if user == "root:":
        assert shell.sh("id -u", user=user) == "0\n"
        return
    with pytest.raises(NoSuchUser):
        shell.run("true", user=user)


def test_what_can_be_refused_early_makes_nothing(here: Node, shell: Shell) -> None:
    bad: list[dict[str, Any]] = [
        {"hostname": "a/b"},
        {"hostname": "x" * 64},
        {"limits": Limits(memory=1)},
        {"limits": Limits(pids=1)},
        {"limits": Limits(cpus=0)},
        {"tty": True},
        {"upper_limit": 1 << 30},
        {"upper": "tmpfs", "upper_limit": 1},
    ]
    for fields in bad:
        with pytest.raises(BadInput):
            shell.run("true", **fields)
    with pytest.raises(BadInput, match="no layers"):
        Shell(shell.runner).run("true")
    with pytest.raises(BadInput, match="no program"):
        shell.run()
    with pytest.raises(BadInput, match="NUL"):
        shell.run("true", "a\0b")
    assert remains(here, shell.runner) == {}


def test_owners_and_isolation(here: Node, shell: Shell) -> None:
    out = shell.sh(
        "stat -c '%u:%g %n' / /etc/passwd /home/bob/mine; hostname; ls /proc/1/exe -l;"
        "ps | wc -l; ip -o addr; cat /proc/self/uid_map; touch /new; chown bob /new",
        hostname="box",
    )
    lines = out.splitlines()
    assert lines[:4] == ["0:0 /", "0:0 /etc/passwd", "1000:1001 /home/bob/mine", "box"]
    assert int(lines[5]) < 8, "only its own processes"
    assert "127.0.0.1/8" in out and "eth" not in out
    (start,) = shell.runner._uids.taken()
    assert f"0  {start}" in " ".join(out.split("  ")) or str(start) in out


def test_the_upper_belongs_to_the_sandboxs_root(
    here: Node, runner: Runner, base: LocalLayer
) -> None:
    read, write = os.pipe()
    spec = RunSpec(
        (base,), ("sh", "-c", "touch /mine; chown bob /mine; echo x; sleep 60"), stdout=write
    )
    running = runner.start(spec)
    assert os.read(read, 10) == b"x\n"
    upper = here.dirs.uppers / running.sandbox / "upper"
    (start,) = runner._uids.taken()
    assert upper.stat().st_uid == start
    assert (upper / "mine").stat().st_uid == start + 1000
    assert sorted(os.listdir(upper)) == ["mine"], "nothing in it but what the sandbox wrote"
    running.stop(signal.SIGKILL, 0)
    assert running.wait().exit_code == 137
    os.close(read)
    os.close(write)


def test_layers_are_merged_and_protected(here: Node, runner: Runner, base: LocalLayer) -> None:
    tool = here.layer({"opt/tool/bin/hello": b"#!/bin/sh\necho hello $1\n", "etc/plain": b"tool\n"})
    shell = Shell(runner, tool, base)
    assert shell.run("hello", "you", env={"PATH": "/opt/tool/bin:/bin"})[1] == "hello you\n"
    assert shell.sh("cat /etc/plain") == "tool\n"
    assert shell.sh("echo changed > /etc/plain; rm /etc/group; cat /etc/plain") == "changed\n"
    assert shell.sh("cat /etc/plain; test -e /etc/group") == "tool\n"


@pytest.mark.parametrize("upper", ["tmpfs", "image"])
def test_limited_uppers(shell: Shell, upper: str) -> None:
    limit = 32 << 20
    script = "dd if=/dev/zero of=/big bs=1M count=64 2>&1; stat -c %s /big; rm /big; echo ok > /f"
    out = shell.sh(script, upper=upper, upper_limit=limit)
    assert "No space left" in out
    written = int(out.splitlines()[-1])
    assert limit // 2 < written <= limit


def test_memory_limit(shell: Shell) -> None:
    result, _, err = shell.run(
        "sh", "-c", "tail /dev/zero; exit $?", limits=Limits(memory=32 << 20)
    )
    assert (result.exit_code, result.limits_hit) == (137, frozenset({"memory"})), err
    result, _, _ = shell.run("sh", "-c", "kill -9 $$", limits=Limits(memory=32 << 20))
    assert (result.exit_code, result.limits_hit) == (137, frozenset()), "not every SIGKILL is that"


def test_the_memory_limit_counts_for_all_processes_together(shell: Shell) -> None:
    script = "for i in 1 2 3; do dd if=/dev/zero of=/dev/shm/$i bs=1M count=20 & done; wait"
    result, _, _ = shell.run("sh", "-c", script, limits=Limits(memory=40 << 20))
    assert result.limits_hit == {"memory"}


def test_pids_limit(shell: Shell) -> None:
    script = "i=0; while [ $i -lt 40 ]; do sleep 20 & i=$((i+1)); done; echo all"
    result, out, err = shell.run("sh", "-c", script, limits=Limits(pids=16))
    assert result.exit_code != 0 and "all" not in out
    assert "fork" in err
    if control_groups() == "v2" and version() >= (6, 11):
        assert result.limits_hit == {"pids"}


def test_version_2_counts_in_the_group_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On files laid out as the kernel's: here version 2 has no controllers."""
    monkeypatch.setattr("dsec_runtime.cgroups.BASE", tmp_path)
    monkeypatch.setattr("dsec_runtime.cgroups.control_groups", lambda: "v2")
    limits = Limits(memory=1 << 30, pids=10)
    watch = LimitWatch("/dsec/x", limits)
    assert (watch.group, watch.limits) == ("/dsec/x/box", limits)
    assert watch.hit() == set(), "the group does not exist yet"
    above = tmp_path / "dsec" / "x"
    above.mkdir(parents=True)
    (above / "memory.events").write_text("low 0\nmax 9\noom 1\noom_kill 0\n")
    (above / "pids.events").write_text("max 0\n")
    assert watch.hit() == set()
    (above / "memory.events").write_text("low 0\nmax 9\noom 1\noom_kill 2\n")
    assert watch.hit() == {"memory"}
    (above / "pids.events").write_text("max 1\n")
    assert watch.hit() == {"memory", "pids"}
    watch.close()


@pytest.mark.skipif(control_groups() != "hybrid", reason="only where both versions are mounted")
def test_nothing_stays_below_the_hidden_version_2(runner: Runner, shell: Shell) -> None:
    shell.sh("true")
    found = runner.in_namespace().run(["ls", "/sys/fs/cgroup/unified"], timeout_s=10)
    name = runner.sandboxes.cgroup_parent.strip("/")
    assert found.returncode == 0 and name not in found.stdout.decode().split()


def test_cpu_limit_is_set(runner: Runner, base: LocalLayer) -> None:
    read, write = os.pipe()
    spec = RunSpec((base,), ("sh", "-c", "echo x; sleep 60"), stdout=write, limits=Limits(cpus=0.5))
    running = runner.start(spec)
    os.read(read, 10)
    name = runner.sandboxes.cgroup(running.sandbox).lstrip("/")
    v1 = Path("/sys/fs/cgroup/cpu", name, "cpu.cfs_quota_us")
    v2 = Path("/sys/fs/cgroup", name, "cpu.max")
    found = v1.read_text() if v1.exists() else v2.read_text().split()[0]
    assert int(found) == 50_000
    running.stop(signal.SIGKILL, 0)
    running.wait()
    os.close(read)
    os.close(write)


def test_timeout(shell: Shell) -> None:
    result, _, _ = shell.run("sh", "-c", "trap 'exit 9' TERM; sleep 60 & wait", timeout_s=0.5)
    assert (result.exit_code, result.timed_out) == (9, True)


def test_a_program_that_ignores_sigterm_is_killed(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec_runtime.running.Running.stop.__defaults__", (signal.SIGTERM, 0.3))
    script = "trap '' TERM; while true; do sleep 1; done"
    result, _, _ = shell.run("sh", "-c", script, timeout_s=0.3)
    assert (result.exit_code, result.timed_out) == (137, True)


def test_signals_reach_the_program(runner: Runner, base: LocalLayer) -> None:
    read, write = os.pipe()
    script = "trap 'echo got; exit 3' USR1; echo ready; while true; do sleep 0.1; done"
    running = runner.start(RunSpec((base,), ("sh", "-c", script), stdout=write))
    assert os.read(read, 100) == b"ready\n"
    running.send(signal.SIGUSR1)
    assert running.wait().exit_code == 3
    assert os.read(read, 100) == b"got\n"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("delay", [0.0, 0.004, 0.01, 0.02])
def test_a_container_is_killed_while_it_starts(
    runner: Runner, base: LocalLayer, delay: float
) -> None:
    running = runner.start(RunSpec((base,), ("sleep", "300"), stdout=-3))
    time.sleep(delay)
    running.stop(signal.SIGKILL, 0)
    assert running.wait().exit_code == 137


def test_orphans_end_with_the_container(shell: Shell) -> None:
    shell.sh("sleep 300 & (sleep 300 &) ; true")  # the fixture looks for what is left


def test_many_at_once(here: Node, runner: Runner, base: LocalLayer) -> None:
    codes: dict[int, int] = {}

    def one(number: int) -> None:
        for _ in range(3):
            codes[number] = runner.run(RunSpec((base,), ("sh", "-c", f"exit {number}"))).exit_code

    threads = [threading.Thread(target=one, args=(i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert codes == {i: i for i in range(1, 9)}


def test_loop_mode_runs_too(here: Node, base: LocalLayer) -> None:
    if not os.path.exists("/dev/loop-control"):
        pytest.skip("no loop devices here")
    with Runner(here.dirs, mode="loop", cgroup_parent=f"/dsec-test-{os.getpid()}") as runner:
        assert Shell(runner, base).sh("cat /etc/plain") == "no program\n"
        assert remains(here, runner).keys() <= {"loops"}, "the layer stays mounted"
        runner.mounts.trim(keep=0)
        assert remains(here, runner) == {}


def test_attached_layers_of_older_kernels(
    here: Node, runner: Runner, base: LocalLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsecfs.mount.layers.needs_attached_layers", lambda: True)
    assert Shell(runner, base).sh("cat /etc/plain") == "no program\n"


# -- a whole process: dsec run ---------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
from dsec_runtime.bundle import Limits
from dsec_runtime.run import RunSpec, run_container
from dsecfs.layers.local import LocalLayer
from dsecfs.layers.manifest import parse_manifest
from dsecfs.nodedirs import NodeDirs
data, run, digest, manifest, how, *args = sys.argv[1:]
dirs = NodeDirs(Path(data), Path(run))
layer = LocalLayer(digest, parse_manifest(manifest.encode()), dirs.meta(digest))
spec = RunSpec((layer,), tuple(args), tty=how == "tty")
result = run_container(spec, dirs, tied=how != "loose")
sys.exit(result.exit_code)
"""


def command(here: Node, base: LocalLayer, *args: str, how: str = "plain") -> list[str]:
    manifest = base.manifest.to_json().decode()
    where = [str(here.dirs.data), str(here.dirs.run), base.digest, manifest]
    return [sys.executable, "-c", PROGRAM, *where, how, *args]


def test_ctrl_c_and_sigterm_of_the_process(here: Node, runner: Runner, base: LocalLayer) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        script = "trap 'exit 5' TERM INT; echo ready; while true; do sleep 0.1; done"
        process = subprocess.Popen(command(here, base, "sh", "-c", script), stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(30) == 5
        process.stdout.close()


def test_signals_while_it_is_cleared_change_nothing(
    runner: Runner, base: LocalLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear = runner.sandboxes.clear

    def interrupted(claim: Claim, *, ended: bool = False) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        clear(claim, ended=ended)

    monkeypatch.setattr(runner.sandboxes, "clear", interrupted)
    with forwarding() as forward:
        running = runner.start(RunSpec((base,), ("sh", "-c", "exit 7")))
        forward(running)
        assert running.wait().exit_code == 7


def test_a_terminal(here: Node, runner: Runner, base: LocalLayer) -> None:
    script = "test -t 0 && test -t 1 && stty size && read line && echo got-$line && exit 4"
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    before = termios.tcgetattr(slave)
    process = subprocess.Popen(
        command(here, base, "sh", "-c", script, how="tty"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    seen = b""
    deadline = time.monotonic() + 30
    while b"77" not in seen and time.monotonic() < deadline:
        seen += os.read(master, 1000)
    assert b"33 77" in seen
    os.write(master, b"hello\r")
    while b"got-hello" not in seen and time.monotonic() < deadline:
        seen += os.read(master, 1000)
    assert process.wait(30) == 4
    assert termios.tcgetattr(slave) == before, "the terminal is as it was"
    os.close(master)
    os.close(slave)


def test_a_terminal_gets_all_of_the_output_and_takes_much_input(
    here: Node, base: LocalLayer, runner: Runner
) -> None:
    master, slave = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(master, 65536):
                seen.append(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    spec = RunSpec((base,), ("echo", "the end"), tty=True, stdin=slave, stdout=slave)
    for _ in range(15):
        assert runner.run(spec).exit_code == 0
    before = termios.tcgetattr(slave)
    script = "stty raw -echo; echo go; head -c 200000 | wc -c; dd if=/dev/zero bs=100k count=9"
    running = runner.start(
        RunSpec((base,), ("sh", "-c", script), tty=True, stdin=slave, stdout=slave)
    )
    deadline = time.monotonic() + 30
    while b"go" not in b"".join(seen):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for _ in range(200):
        os.write(master, b"x" * 1000)
    assert running.wait().exit_code == 0
    assert termios.tcgetattr(slave) == before
    os.close(slave)
    reader.join(10)
    os.close(master)
    text = b"".join(seen)
    assert text.count(b"the end\r\n") == 15
    assert b"200000" in text and text.count(b"\0") == 900 * 1024


def test_a_terminal_is_resized(here: Node, base: LocalLayer, runner: Runner) -> None:
    master, slave = pty.openpty()
    script = "trap 'stty size; exit 5' WINCH; echo ready; while true; do sleep 0.05; done"
    spec = RunSpec((base,), ("sh", "-c", script), tty=True, stdin=slave, stdout=slave)
    running = runner.start(spec)
    seen = b""
    while b"ready" not in seen:
        seen += os.read(master, 1000)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 11, 99, 0, 0))
    running.send(signal.SIGWINCH)
    assert running.wait().exit_code == 5
    assert b"11 99" in os.read(master, 1000)
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize("delay", [None, 0.0, 0.02, 0.05, 0.08, 0.12])
def test_kill_9_then_recovery_leaves_nothing(
    here: Node, runner: Runner, base: LocalLayer, delay: float | None, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            command(here, base, "sh", "-c", "echo ready; sleep 300", how="loose"), stdout=out
        )
        if delay is None:
            wait_for(tmp_path / "out", b"ready")
        else:
            deadline = time.monotonic() + 20
            while not here.dirs.sandboxes.exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(delay)
        process.kill()
        process.wait(30)
    left = remains(here, runner)
    if delay is None:
        assert left["processes"] and left["uppers"] and left["holders"], "it was running"
    ids = left.get("sandboxes", [])
    runner.recover()
    assert remains(here, runner) == {}
    assert runner._uids.taken() == []
    for parent in cgroups.places("/dsec"):
        assert not {p.stem for p in parent.iterdir()} & {i.partition(".")[0] for i in ids}


@pytest.mark.parametrize("delay", [None, 0.0, 0.05])
def test_kill_9_ends_the_container_of_dsec_run(
    here: Node, runner: Runner, base: LocalLayer, delay: float | None, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            command(here, base, "sh", "-c", "echo ready; sleep 300"),
            stdout=out,
            start_new_session=True,
        )
        deadline = time.monotonic() + 30
        if delay is None:
            wait_for(tmp_path / "out", b"ready")
            assert remains(here, runner)["processes"]
        else:
            while not here.dirs.sandboxes.exists() or not os.listdir(here.dirs.sandboxes):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    while (left := remains(here, runner)) or runner._uids.taken():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_recovery_leaves_live_sandboxes_alone(here: Node, runner: Runner, base: LocalLayer) -> None:
    read, write = os.pipe()
    script = "trap 'exit 6' USR1; echo x; while true; do sleep 0.1; done"
    running = runner.start(RunSpec((base,), ("sh", "-c", script), stdout=write))
    os.read(read, 10)
    with Runner(here.dirs, cgroup_parent=runner.sandboxes.cgroup_parent) as other:
        assert other.recover() == []
        assert Shell(other, base).sh("echo fine") == "fine\n"
    running.send(signal.SIGUSR1)
    assert running.wait().exit_code == 6
    os.close(read)
    os.close(write)


def test_crun_killed_under_a_run_is_an_error_of_ours(
    here: Node, runner: Runner, base: LocalLayer
) -> None:
    read, write = os.pipe()
    running = runner.start(RunSpec((base,), ("sh", "-c", "echo x; sleep 300"), stdout=write))
    os.read(read, 10)
    os.kill(running.pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="killed by signal 9"):
        running.wait()
    os.close(read)
    os.close(write)
    assert remains(here, runner) == {}


def test_a_frozen_container_is_killed(
    here: Node, runner: Runner, base: LocalLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """crun freezes what it kills; if it is ended in between the frozen do not die by themselves."""
    read, write = os.pipe()
    running = runner.start(RunSpec((base,), ("sh", "-c", "echo x; sleep 300"), stdout=write))
    os.read(read, 10)
    places = cgroups.places(runner.sandboxes.cgroup(running.sandbox))
    knobs = [(p / n, v) for p in places for n, v in FREEZERS.items() if (p / n).exists()]
    assert knobs
    for knob, value in knobs:
        knob.write_text(value)
    monkeypatch.setattr(runner.sandboxes, "command", lambda *args: ["true"])
    running.stop(signal.SIGKILL)
    assert running.wait().exit_code == 128 + signal.SIGKILL
    monkeypatch.undo()
    os.close(read)
    os.close(write)
    assert remains(here, runner) == {}


@pytest.mark.parametrize("step", ["open_upper", "_resolve", "config", "Streams"])
def test_a_failing_step_leaves_nothing(
    here: Node, runner: Runner, base: LocalLayer, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **fields: object) -> None:
        raise SandboxError(f"{step} fails")

    monkeypatch.setattr(f"dsec_runtime.run.{step}", fail)
    with pytest.raises(SandboxError, match=f"{step} fails"):
        runner.run(RunSpec((base,), ("true",)))
    assert remains(here, runner) == {}
    assert runner._uids.taken() == []
    with contextlib.suppress(FileNotFoundError):
        assert os.listdir(here.dirs.uppers) == []
