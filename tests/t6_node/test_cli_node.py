"""`dsec node`: start, end and kill an edge, what it takes, its log; and every example of the
documentation, run as it stands there."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_runtime.edge.start import edge_pid, last_line
from dsec_runtime.keeper.start import ask
from tests.t5_runtime.conftest import why_no_containers
from tests.t6_node.cli import LIMIT_S, WORDS, Cli, read_until
from tests.t6_node.conftest import ROOT, RealNode, real_node

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(why_no_containers() != "", reason=why_no_containers() or "runs here"),
]

SMALL = ("--memory", "256MiB", "--disk", "64MiB")


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[tuple[RealNode, Cli]]:
    """A node whose edge was not started; whatever runs at the end is stopped."""
    with real_node() as made:
        cli = Cli(made.environ, tmp_path)
        try:
            yield made, cli
        finally:
            if edge_pid(made.dirs) is not None:
                cli("node", "stop", "--all")


def test_start_status_stop(bare: tuple[RealNode, Cli]) -> None:
    node, cli = bare
    assert "no edge runs" in cli.error("node", "status", code=3)
    assert "no edge runs" in cli.error("node", "stop", code=3)
    assert "dsec node start" in cli.error("sb", "ls", code=125)
    assert "no log" in cli.error("node", "log", code=3)
    started = cli("node", "start").json
    assert started["backends"] == ["container"] and started["cordoned"] == ""
    pid = edge_pid(node.dirs)
    again = cli("node", "start")
    assert "runs already" in again.err and edge_pid(node.dirs) == pid
    assert "none of 4096" in cli("node", "status", "--no-json").out
    assert "starts: data" in cli("node", "log").out
    assert cli("node", "log", "-n", "0").out == ""
    assert os.stat(node.dirs.run / "edge.log").st_mode & 0o077 == 0
    assert cli("node", "stop").json == {
        "stopped": pid,
        "sandboxes_stopped": 0,
        "sandboxes_left": 0,
    }
    assert edge_pid(node.dirs) is None and not node.dirs.edge.exists()
    assert "ended: asked" in cli("node", "log").out


def test_sandboxes_outlive_their_edge_until_all_is_stopped(bare: tuple[RealNode, Cli]) -> None:
    node, cli = bare
    cli("node", "start")
    id = cli("sb", "create", "box:1", "--name", "work", *SMALL).out.strip()
    script = "while [ ! -e /tmp/go ]; do sleep 0.05; done; echo done"
    job = cli("sb", "exec", "-d", "work", "--", "sh", "-c", script).out.strip()
    stopped = cli("node", "stop")
    assert stopped.json["sandboxes_left"] == 1 and "go on" in stopped.err
    cli("node", "start")
    assert cli("sb", "ls", "-q").out == f"{id}\n"
    cli("node", "stop", "--force")  # SIGKILL
    cli("node", "start")
    cli("sb", "exec", "work", "touch", "/tmp/go")
    assert cli("sb", "logs", "-f", "work", job).out == "done\n"
    ended = cli("node", "stop", "--all").json
    assert ended["sandboxes_stopped"] == 1 and ended["sandboxes_left"] == 0
    deadline = time.monotonic() + LIMIT_S
    while ask(node.dirs, "ping") is not None:
        assert time.monotonic() < deadline
    left = node.remains()
    left.pop("kept", None)  # what why and logs answer from
    assert left == {}


def test_an_edge_that_cannot_start_says_why(bare: tuple[RealNode, Cli]) -> None:
    node, cli = bare
    said = cli.having(DSEC_NODE_LISTEN="127.0.0.1:1").error("node", "start", code=125)
    assert "no token" in said and "edge.log" in said
    said = cli.error("node", "start", "--set", "node_listen=nonsense", code=125)
    assert "expected ADDRESS:PORT" in said
    node.dirs.journal.write_bytes(b"no database" * 1000)
    assert "edge.log" in cli.error("node", "start", code=125)
    assert edge_pid(node.dirs) is None
    node.dirs.journal.unlink()


def test_foreground(bare: tuple[RealNode, Cli]) -> None:
    node, cli = bare
    running = cli.begin("node", "start", "--foreground")
    try:
        deadline = time.monotonic() + LIMIT_S
        while edge_pid(node.dirs) is None:
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert edge_pid(node.dirs) == running.pid
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=LIMIT_S)
        assert b"starts: data" in err and running.returncode == 0
    finally:
        running.kill()
        running.wait()


def test_cordon_and_drain(bare: tuple[RealNode, Cli]) -> None:
    _, cli = bare
    cli("node", "start")
    cli("sb", "create", "box:1", "--name", "idle", *SMALL)
    cli("sb", "create", "box:1", "--name", "busy", *SMALL)
    cli("sb", "exec", "-d", "busy", "sleep", "1000")
    assert cli("node", "cordon", "--reason", "new kernel").json["cordoned"] == "new kernel"
    assert "cordoned (new kernel)" in cli.error("sb", "create", "box:1", code=5)
    cli("node", "stop")
    cli("node", "start")
    assert cli("node", "status").json["cordoned"] == "new kernel"
    assert cli("node", "uncordon").json["cordoned"] == ""
    drained = cli("node", "drain", "--deadline", "1s")
    assert drained.json == {"cordoned": "drain", "sandboxes_stopped": 2}
    assert "1 sandboxes stopped, 1 in use" in drained.err
    assert cli("sb", "ls").json == []
    assert cli("node", "status").json["cordoned"] == "drain"


def test_log_is_followed(bare: tuple[RealNode, Cli]) -> None:
    _, cli = bare
    cli("node", "start")
    following = cli.begin("node", "log", "-f", "-n", "1")
    try:
        assert following.stdout is not None
        read_until(following.stdout.fileno(), b"edge[")
        cli("node", "stop")
        read_until(following.stdout.fileno(), b"ended: asked")
        following.send_signal(signal.SIGINT)
        assert following.wait(LIMIT_S) == 130
    finally:
        following.kill()
        following.communicate()


def test_over_tcp_with_a_token(bare: tuple[RealNode, Cli]) -> None:
    node, cli = bare
    token = node.place / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    there = cli.having(
        DSEC_NODE_LISTEN=f"127.0.0.1:{port}", DSEC_NODE_TOKEN_FILE=str(token)
    )
    there("node", "start")
    url = f"http://127.0.0.1:{port}"
    here = cli.having(
        DSEC_NODE_URL=url,
        DSEC_NODE_TOKEN_FILE=str(token),
        DSEC_RUN_DIR=str(node.place / "elsewhere"),
    )
    assert here("node", "status").json["address"] == url
    here("sb", "create", "box:1", "--name", "work", *SMALL)
    text = "x" * 300_000
    assert here("sb", "exec", "-i", "work", "cat", stdin=text).out == text
    wrong = node.place / "wrong"
    wrong.write_text("0" * 32)
    wrong.chmod(0o600)
    assert "token" in here.having(DSEC_NODE_TOKEN_FILE=str(wrong)).error("sb", "ls", code=125)
    assert "node_url" in here.having(DSEC_NODE_URL="127.0.0.1").error("sb", "ls", code=2)


def test_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_text("date edge[1] INFO starts\ndate edge[1] ERROR ended: no token; x\n\n")
    assert last_line(log) == "no token; x"
    log.write_text("Traceback\nValueError: what\n")
    assert last_line(log) == "ValueError: what"
    assert last_line(log, len("Traceback\nValueError: what\n")) == ""


def examples(page: Path) -> str:
    """All indented blocks of a page, in order: a script."""
    lines = page.read_text().splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("    "))


def test_every_example_of_the_documentation(bare: tuple[RealNode, Cli]) -> None:
    """docs/sandboxes.md from its first line to its last, as somebody types it."""
    node, cli = bare
    script = examples(ROOT / "docs/sandboxes.md")
    assert script.count("dsec ") > 40
    node.dsec("layer", "publish", str(node.place / "rootfs"), "base/debian:12")
    bin_ = node.place / "bin"
    bin_.mkdir()
    (bin_ / "dsec").write_text(f'#!/bin/sh\nexec {" ".join(WORDS)} "$@"\n')
    (bin_ / "dsec").chmod(0o755)
    (bin_ / "script").write_text(script)
    # Each line is shown before it runs; the first that fails ends the script.
    done = subprocess.run(
        ["bash", "-euvo", "pipefail", str(bin_ / "script")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=cli.cwd,
        env={**cli.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "PWD": str(cli.cwd)},
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    out, err = done.stdout, done.stderr
    for text in (
        *("exit code 7\n", "exit code 124\n", "exit code 1\n", "exit code 5\n"),
        *("from here\n", "hello, sandbox\n", "step 1\nstep 2\nstep 3\n"),
        *("A LINE\nA LINE\n", "1,2,3\n", '"paused"', '"limit": "disk"', '"then": "pause"'),
    ):
        assert text in out, text
    assert "cordoned (new kernel)" in err and "to stderr" in err
    assert edge_pid(node.dirs) is None


if __name__ == "__main__":
    sys.stdout.write(examples(ROOT / "docs/sandboxes.md"))
