"""`dsec run`, `mount` and `fs` as typed: names to containers, streams, exit codes, prefetch."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time

import pytest

from dsecfs.doctor import _device
from tests.support.cli import Dsec
from tests.t5_runtime.conftest import PASSWD, why_no_containers

pytestmark = pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers() or "-")


def test_a_command_runs_and_its_exit_code_is_passed_on(dsec: Dsec) -> None:
    assert dsec("run", "box:1", "--", "echo", "-n", "hi").out == "hi"
    assert dsec("run", "box:1", "echo", "hi").out == "hi\n"
    dsec("run", "box:1", "--", "sh", "-c", "exit 7", code=7)
    dsec("run", "box:1", "--", "sh", "-c", "kill -9 $$", code=137)
    assert "nosuch" in dsec("run", "box:1", "nosuch", code=127).error
    assert dsec("run", "nobox:1", "true", code=3).error.startswith("no environment nobox:1")


def test_toolkits_variables_user_and_directory(dsec: Dsec) -> None:
    assert dsec("run", "box:1", "+greet:1", "greet", "you").out == "hello you\n"
    script = "echo $SEED $PWD; id -u; cat"
    said = dsec(
        *("run", "-e", "SEED=1", "box:1", "-w", "/home/bob", "-u", "bob", "--rm"),
        *("--", "sh", "-c", script),
    )
    assert said.out == "1 /home/bob\n1000\n"


def test_what_an_environment_says_is_the_default(dsec: Dsec) -> None:
    dsec(
        *("env", "create", "my/box:1", "box:1", "+greet:1", "-e", "WHO=me", "-w", "/tmp"),
        *("--entrypoint", "sh -c", "--cmd", "'greet $WHO; pwd'"),
    )
    assert dsec("run", "my/box:1").out == "hello me\n/tmp\n"
    assert dsec("run", "my/box:1", "-e", "WHO=you", "--", "greet $WHO").out == "hello you\n"
    assert dsec("run", "my/box:1", "--entrypoint", "", "--", "echo", "x").out == "x\n"
    dsec("env", "create", "my/plain:1", "my/box:1")
    assert dsec("env", "show", "my/plain:1").json["entrypoint"] == ["sh", "-c"]


def test_standard_input_is_passed_on_when_asked_for(dsec: Dsec) -> None:
    for words, expected in ((("-i",), "given"), ((), "")):
        done = subprocess.run(
            [sys.executable, "-m", "dsecfs.cli.main", "run", *words, "box:1", "cat"],
            input="given",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == expected


def test_output_to_a_file_that_others_write_to_is_complete_and_in_order(dsec: Dsec) -> None:
    script = "echo out; echo err >&2; echo more"
    with (dsec.place / "log").open("wb", buffering=0) as log:
        for _ in range(5):
            log.write(b"before\n")
            subprocess.run(
                [sys.executable, "-m", "dsecfs.cli.main", "run", "box:1", "--", "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=60,
                check=True,
            )
            log.write(b"after\n")
    assert (dsec.place / "log").read_text() == "before\nout\nerr\nmore\nafter\n" * 5


def test_a_terminal(dsec: Dsec) -> None:
    ours, theirs = pty.openpty()
    try:
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "dsecfs.cli.main", "run", "box:1", "-it", "--"),
                *("sh", "-c", "test -t 0 && test -t 1 && echo a terminal"),
            ],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
        )
        assert child.wait(60) == 0, child.stderr and child.stderr.read()
        assert os.read(ours, 1000).strip() == b"a terminal"
    finally:
        os.close(ours)
        os.close(theirs)
    assert "leave out -t" in dsec("run", "-t", "box:1", "true", code=2).error


def test_an_option_of_the_command_needs_dashes(dsec: Dsec) -> None:
    assert "put -- before" in dsec("run", "box:1", "sh", "-c", "true", code=2).error
    assert dsec("run", "box:1", "--", "sh", "-c", "exit 3", code=3).out == ""
    assert "--hlp" in dsec("run", "--hlp", "box:1", "--", "true", code=2).error


def test_only_root_runs_containers(dsec: Dsec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec_runtime.cli.os.geteuid", lambda: 1000)
    assert "not root" in dsec("run", "box:1", "--", "true", code=8).error
    monkeypatch.undo()


def test_limits_and_timeout(dsec: Dsec) -> None:
    said = dsec("run", "--timeout", "300ms", "box:1", "--", "sleep", "60", code=124)
    assert said.error == "box:1: ended after 300ms"
    words = ("run", "--upper", "tmpfs", "--upper-limit", "8MiB", "box:1", "--", "dd")
    said = dsec(*words, "if=/dev/zero", "of=/tmp/x", "bs=1M", "count=20", code=1)
    assert "No space left" in said.err
    assert "expected disk, tmpfs, image" in dsec("run", "--upper", "x", "box:1", code=2).error


def test_an_interrupt_reaches_the_program(dsec: Dsec) -> None:
    script = 'trap "echo caught; exit 3" INT; echo ready; while true; do sleep 0.05; done'
    child = subprocess.Popen(
        [sys.executable, "-m", "dsecfs.cli.main", "run", "box:1", "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.read() == b"caught\n"
        assert child.wait(30) == 3
    finally:
        child.kill()


def test_what_is_recorded_is_prefetched_on_an_empty_node(dsec: Dsec) -> None:
    dsec("env", "create", "my/greet:1", "box:1", "+greet:1")
    said = dsec("run", "--record", "my/greet:1", "--", "greet", "x")
    assert said.out == "hello x\n" and "recorded" in said.error
    heat = dsec("env", "heat", "my/greet:1").json
    assert {f["path"] for f in heat["read"]} >= {"/bin/busybox", "/opt/greet/bin/greet"}
    assert dsec("layer", "optimize", "my/greet:1").json["chunks"] == heat["chunks"]
    dsec("fs", "stop")
    shutil.rmtree(dsec.place / "data")
    report = dsec.place / "report.json"
    dsec("run", "--report", str(report), "my/greet:1", "--", "greet", "x")
    found = json.loads(report.read_text())
    assert found["exit_code"] == 0 and found["cache"]["chunks_fetched"] > 0
    assert {"names and layers", "overlay", "run"} <= set(found["seconds"])
    deadline = time.monotonic() + 30
    while dsec("cache", "stats").json["prefetched"] == 0:
        assert time.monotonic() < deadline


def test_mount_and_unmount_in_both_modes(dsec: Dsec) -> None:
    target = dsec.place / "mnt"
    target.mkdir()
    for mode in ("kernel", "fuse"):
        said = dsec("mount", "box:1", "+greet:1", str(target), "--set", f"mode={mode}")
        assert said.json["mode"] == mode
        assert (target / "opt/greet/bin/greet").read_text().startswith("#!/bin/sh")
        assert [row["directory"] for row in dsec("mount").json] == [str(target)]
        with (target / "etc/passwd").open():
            assert "--lazy" in dsec("umount", str(target), code=5).error
            if mode == "kernel":
                assert "--force" in dsec("fs", "stop", code=5).error
        dsec("umount" if mode == "kernel" else "unmount", str(target))
        assert not list(target.iterdir()) and dsec("mount").json == []
    assert "no environment is mounted there" in dsec("umount", str(target), code=3).error


def test_a_writable_mount(dsec: Dsec) -> None:
    target, upper = dsec.place / "mnt", dsec.place / "upper"
    target.mkdir()
    dsec("mount", "box:1", str(target), "--upper", str(upper))
    (target / "etc/new").write_text("new")
    dsec("umount", str(target))
    assert (upper / "upper/etc/new").read_text() == "new"


def test_the_daemon_is_started_shown_replaced_and_stopped(dsec: Dsec) -> None:
    assert "no FUSE daemon runs" in dsec("fs", "status", code=3).error
    first = dsec("fs", "start").json
    assert dsec("fs", "start").json["worker"] == first["worker"]
    assert dsec("fs", "restart").json["worker"] != first["worker"]
    assert dsec("cache", "prefetch", "box:1").json["done"] > 0
    assert dsec("cache", "stats").json["disk"] > 100_000
    assert dsec("fs", "stop").json["stopped"] is True
    assert dsec("cache", "clear").json["bytes"] > 100_000


def test_clear_gives_back_what_is_not_in_use(
    dsec: Dsec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsecfs.layers.forget.CLEAR_IDLE_S", 0.0)
    target = dsec.place / "mnt"
    target.mkdir()
    dsec("mount", "box:1", str(target))
    assert dsec("run", "box:1", "+greet:1", "--", "greet", "x").out == "hello x\n"
    assert dsec("cache", "stats").json["metadata"] > 0
    done = dsec("cache", "clear").json
    assert (done["layers"], done["mounted"]) == (1, 1) and done["metadata_bytes"] > 0, done
    assert (target / "etc/passwd").read_bytes() == PASSWD
    assert dsec("run", "box:1", "+greet:1", "--", "greet", "y").out == "hello y\n"
    deadline = time.monotonic() + 30
    while not (lease := _finding(dsec, "lease")):
        assert time.monotonic() < deadline
    assert lease["state"] == "ok" and "layers in the store" in lease["found"]
    dsec("umount", str(target))
    assert dsec("cache", "clear").json["mounted"] == 0
    assert dsec("run", "box:1", "--", "true").code == 0


def _finding(dsec: Dsec, name: str) -> dict[str, str] | None:
    found = {f["name"]: f for f in dsec("doctor").json["findings"]}
    return found.get(name)


def test_doctor_says_that_this_machine_can(dsec: Dsec) -> None:
    said = dsec("doctor").json
    assert said["works"] is True
    found = {f["name"]: f for f in said["findings"]}
    assert found["mount mode"]["state"] == "ok" and found["crun"]["found"].startswith("crun")


def test_doctor_says_who_may_not_use_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _device().state == "ok"
    monkeypatch.setattr("dsecfs.doctor.os.access", lambda path, mode: False)
    assert (_device().state, _device().hint) == ("missing", "as root: chmod 0666 /dev/fuse")
    assert _device("/dev/no-fuse").hint == "modprobe fuse"


def test_doctor_names_what_is_missing(dsec: Dsec, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(
        "dsecfs.doctor.shutil.which",
        lambda name, path=None: None if "catatonit" in name else which(name, path=path),
    )
    said = dsec("doctor", code=8).json
    (found,) = (f for f in said["findings"] if f["name"] == "catatonit")
    assert (found["state"], found["hint"]) == ("missing", "apt-get install catatonit")
    assert not said["works"]
