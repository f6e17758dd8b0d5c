"""`--set mode=…` as typed: what is used is said; FUSE mounts come, die and go clean."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsecfs.fuse.config import mount_state
from dsecfs.kernel.mountinfo import mount_at
from tests.support.cli import Dsec
from tests.t4_fuse.family import why_no_resend
from tests.t4_fuse.test_tree_mount import OPEN_DEV_FUSE, READ_ANYTHING, why_no_unprivileged
from tests.t5_runtime.conftest import why_no_containers

_WHY = why_no_containers() or why_no_resend()
pytestmark = pytest.mark.skipif(bool(_WHY), reason=_WHY or "-")


def test_run_in_every_mode(dsec: Dsec) -> None:
    report = dsec.place / "report.json"
    for mode in ("kernel", "loop", "fuse"):
        words = ("run", "--set", f"mode={mode}", "--report", str(report), "box:1", "+greet:1")
        said = dsec(*words, "--", "sh", "-c", "greet $(stat -c %u:%g /bin/busybox); cat /etc/hosts")
        assert said.out.startswith("hello 0:0\n127.0.0.1\tlocalhost"), mode
        assert said.err == "", "it was asked for"
        found = json.loads(report.read_text())
        assert (found["mode"], found["mode_because"]) == (mode, "it was asked for")
    found = dsec("doctor", "--set", "mode=fuse").json
    (line,) = (f for f in found["findings"] if f["name"] == "mode that is set")
    assert found["works"] and line["found"] == "fuse"
    # All that is kept for the next container is let go of.
    dsec("fs", "stop")
    assert not list((dsec.place / "run/trees").glob("own-*"))


def test_less_than_the_best_is_said(dsec: Dsec, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "Linux 5.10 is older than 5.19"
    monkeypatch.setattr("dsecfs.kernel.probe.quick_mode", lambda: ("fuse", why))
    said = dsec("run", "box:1", "echo", "fine")
    assert (said.out, said.error) == ("fine\n", f"fuse mode: {why}")
    target = dsec.place / "mnt"
    target.mkdir()
    said = dsec("mount", "box:1", str(target))
    assert said.error == f"fuse mode: {why}" and said.json["mode"] == "fuse"
    dsec("umount", str(target))
    for mode in ("kernel", "loop"):
        words = ("run", "--set", f"mode={mode}", "box:1", "true")
        said = dsec(*words, code=8)
        assert f"mode {mode} was asked for, and is not possible: {why}" in said.error
    said = dsec("doctor", "--set", "mode=loop", code=8)
    (line,) = (f for f in said.json["findings"] if f["name"] == "mode that is set")
    assert why in line["found"]


def test_limits_that_were_hit_are_said(dsec: Dsec) -> None:
    said = dsec("run", "--memory", "16MiB", "box:1", "--", "tail", "/dev/zero", code=137)
    assert "processes were ended at the limit on memory" in said.error


def test_the_daemon_is_not_stopped_under_a_container(dsec: Dsec) -> None:
    command = [sys.executable, "-m", "dsecfs.cli.main", "run", "--set", "mode=fuse", "box:1"]
    script = "echo ready; trap 'exit 4' TERM; while true; do sleep 0.05; done"
    child = subprocess.Popen(
        [*command, "--", "sh", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert "1 container(s) in FUSE mode" in dsec("fs", "stop", code=5).error
        assert dsec("fs", "status").json["draining"] is False
        assert dsec("fs", "stop", "--drain").json["stopped"] is True
        child.terminate()
        assert child.wait(30) == 4, "it was served to its end"
    finally:
        child.kill()
        child.wait(30)
        child.stdout and child.stdout.close()


def left(dsec: Dsec) -> list[str]:
    """What FUSE mounts of trees have on this node."""
    found = [p.name for p in (dsec.place / "run/trees").glob("mnt-*")]
    return found + [p.name for p in (dsec.place / "run/mounts").iterdir() if p.is_dir()]


def test_one_mount_per_directory(dsec: Dsec) -> None:
    target = dsec.place / "mnt"
    target.mkdir()
    for mode in ("fuse", "kernel"):
        dsec("mount", "box:1", str(target), "--set", f"mode={mode}")
        for other in ("fuse", "kernel"):
            words = ("mount", "box:1", f"{target}/.", "--set", f"mode={other}")
            said = dsec(*words, code=4)
            assert "an environment is mounted there already" in said.error
        (row,) = dsec("mount").json
        assert (row["directory"], row["state"]) == (str(target), "mounted")
        assert ("fuse" in row["mode"]) == (mode == "fuse")
        with (target / "etc/passwd").open():
            assert "busy" in dsec("umount", str(target), code=5).error
        dsec("umount", str(target))
        assert dsec("mount").json == [] and left(dsec) == []


def kill_daemon(dsec: Dsec, target: Path) -> None:
    """All processes of the mount's daemon at once, so that none can replace another."""
    lock = str(mount_state_of(dsec, target) / "fs.lock")
    deadline = time.monotonic() + 30
    while pids := holders(lock):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
        assert time.monotonic() < deadline
        time.sleep(0.01)


def mount_state_of(dsec: Dsec, target: Path) -> Path:
    from dsecfs.nodedirs import NodeDirs

    return mount_state(NodeDirs(dsec.place / "data", dsec.place / "run"), target)


def holders(lock: str) -> list[int]:
    """Processes that have the file open."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            fds = [os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")]
        except OSError:
            continue
        if lock in fds and state != "Z":
            found.append(int(name))
    return found


@pytest.mark.parametrize("then", ["mount", "umount", "another mount"])
def test_a_mount_whose_daemon_was_killed(dsec: Dsec, then: str) -> None:
    target = dsec.place / "mnt"
    target.mkdir()
    dsec("mount", "box:1", str(target), "--set", "mode=fuse")
    kill_daemon(dsec, target)
    with pytest.raises(OSError, match="not connected"):
        os.listdir(target)
    (row,) = dsec("mount").json
    assert row["state"] == "detached or dead"
    if then == "umount":
        dsec("umount", str(target))
    elif then == "another mount":
        other = dsec.place / "other"
        other.mkdir()
        dsec("mount", "box:1", str(other))
        dsec("umount", str(other))
    else:
        dsec("mount", "box:1", str(target), "--set", "mode=fuse")
        assert (target / "etc/passwd").exists()
        dsec("umount", str(target))
    assert mount_at(target) is None and left(dsec) == [] and dsec("mount").json == []


@pytest.mark.skipif(bool(why_no_unprivileged()), reason=why_no_unprivileged() or "-")
def test_a_user_mounts_without_root(dsec: Dsec) -> None:
    """In a mount namespace where /dev/fuse is everybody's, as Debian's udev has it."""
    place = dsec.place / "user"
    (place / "mnt").mkdir(parents=True)
    os.chown(place, 65534, 65534)
    os.chown(place / "mnt", 65534, 65534)
    dsec.place.chmod(0o755)
    code = (
        "import contextlib, io, json, os, sys\n"
        "from dsecfs.cli.main import run\n"
        "place, store = sys.argv[1:]\n"
        "os.environ |= {'DSEC_CONFIG': '', 'DSEC_STORE': 'file:' + store,\n"
        "    'DSEC_DATA_DIR': place + '/data', 'DSEC_RUN_DIR': place + '/run'}\n"
        "def dsec(*words):\n"
        "    out, err = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "        code = run(list(words))\n"
        "    return code, out.getvalue(), err.getvalue()\n"
        "said = [os.getuid(), dsec('mount', 'box:1', place + '/mnt')]\n"
        "said += [open(place + '/mnt/etc/group').readline(), dsec('mount')]\n"
        "said += [dsec('umount', place + '/mnt'), os.listdir(place + '/mnt'), dsec('mount')]\n"
        "said += [sorted(os.listdir(place + '/run/trees')), dsec('run', 'box:1', 'true')]\n"
        "print(json.dumps(said))\n"
    )
    done = subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private", "sh", "-ec", OPEN_DEV_FUSE),
            *(str(dsec.place / "fuse"), "setpriv", "--reuid=65534", "--regid=65534"),
            *("--clear-groups", *READ_ANYTHING, sys.executable, "-c", code),
            *(str(place), str(dsec.place / "store")),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    uid, mounted, line, listed, gone, left_there, empty, trees, run = json.loads(done.stdout)
    assert (uid, line, left_there, trees) == (65534, "root:x:0:\n", [], [])
    assert mounted[0] == 0 and json.loads(mounted[1])["mode"] == "fuse"
    assert mounted[2] == "dsec: fuse mode: not root: kernel mounts need root\n"
    assert json.loads(listed[1])[0]["state"] == "mounted"
    assert gone[0] == 0 and json.loads(empty[1]) == []
    why = "dsec: run a container: not root; run it as root; dsec mount works for everybody\n"
    assert (run[0], run[2]) == (8, why)
    assert not (place / "run/fs.sock").exists(), "no daemon was started for it"
