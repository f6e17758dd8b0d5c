"""`dsec sandbox` against a real node: what it prints, exit codes, streams, signals, terminals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.t6_node.cli import LIMIT_S, WORDS, Cli, read_until
from tests.t6_node.conftest import RealNode

pytestmark = pytest.mark.root

SMALL = ("--memory", "256MiB", "--disk", "64MiB")


@pytest.fixture
def cli(node: RealNode, tmp_path: Path) -> Cli:
    return Cli(node.environ, tmp_path)


@pytest.fixture
def work(cli: Cli) -> str:
    """A sandbox named "work"; its id."""
    return cli("sb", "create", "box:1", "--name", "work", *SMALL).out.strip()


def sh(cli: Cli, script: str) -> str:
    return cli("sb", "exec", "work", "--", "sh", "-c", script).out


def test_create_prints_an_id_or_all_about_it(cli: Cli) -> None:
    said = cli(
        *("sandbox", "create", "box:1", "+greet:1", "--name", "full", *SMALL),
        *("-e", "A=1", "-e", "B=x=y", "--cpus", "1.5", "--pids", "100", "--label", "k=v"),
        *("--idle-timeout", "10m", "--max-lifetime", "2h", "--then", "pause", "-u", "bob"),
        *("--mount", "scratch=16MiB,at=/scratch", "-w", "/tmp", "--json"),
    ).json
    assert said["name"] == "full" and said["state"] == "running" and said["user"] == "bob"
    assert said["limits"]["memory_mb"] == 256 and said["limits"]["cpus"] == 1.5
    assert said["limits"]["disk_mb"] == 64 and said["limits"]["pids"] == 100
    assert said["labels"] == {"k": "v"} and said["toolkits"] == ["greet:1"]
    assert said["lifetime"]["idle_timeout_s"] == 600 and said["lifetime"]["then"] == "pause"
    assert said["lifetime"]["max_lifetime_s"] == 7200
    out = cli("sb", "exec", "full", "--", "sh", "-c", "echo $A $B; pwd; id -un; greet you").out
    assert out == "1 x=y\n/tmp\nbob\nhello you\n"
    assert cli("sb", "exec", "full", "--", "mount").out.count(" on /scratch type tmpfs") == 1
    id = cli("sb", "create", "box:1", *SMALL).out
    assert id == f"{id[:12]}\n" and id[:12].isalnum()
    assert cli("sb", "show", id[:6], "--json").json["id"] == id.strip()


def test_a_key_gives_the_same_sandbox_again(cli: Cli) -> None:
    first = cli("sb", "create", "box:1", "--key", "k", *SMALL).out
    assert cli("sb", "create", "box:1", "--key", "k", *SMALL).out == first
    assert "another specification" in cli.error("sb", "create", "box:1", "--key", "k", code=4)


def test_no_wait(cli: Cli, node: RealNode) -> None:
    id = cli("sb", "create", "box:1", "--no-wait", *SMALL).out.strip()
    deadline = time.monotonic() + LIMIT_S
    while (state := cli("sb", "show", id).json["state"]) == "creating":
        assert time.monotonic() < deadline
    assert state == "running"


def test_what_cannot_be_created(cli: Cli, node: RealNode) -> None:
    def error(*words: str, code: int = 2) -> str:
        return cli.error("sb", "create", *words, code=code)

    assert "no environment none:1" in error("none:1", code=3)
    assert "--memory" in error("box:1", "--memory", "much")
    assert error("box:1", "--memory", "1MiB").startswith("limits.memory_mb: ")
    assert error("box:1", "--name", "a b").startswith("name: ")
    assert error("box:1", "--then", "explode").startswith("lifetime.then: ")
    assert "--mount" in error("box:1", "--mount", "/etc")
    assert "--mount" in error("box:1", "--mount", "layer=a:1,scratch=1MiB,at=/x")
    assert "--network" in error("box:1", "--network", "none,pypi")
    assert "unexpected 'greet:1'" in error("box:1", "greet:1")
    assert "host" in error("box:1", "--mount", "host=/etc,at=/mnt")
    assert "--idle-timeout" in error("box:1", "--idle-timeout", "soon")
    said = cli("sb", "create", "none:1", "--json", code=3).err
    assert json.loads(said)["error"]["type"] == "NotFound"
    assert cli("sb", "ls").json == []


def test_exec_streams_and_exit_codes(cli: Cli, work: str) -> None:
    ended = cli("sb", "exec", "work", "--", "sh", "-c", "echo out; echo err >&2; exit 7", code=7)
    assert ended.out == "out\n" and ended.err == "err\n"
    assert cli("sb", "exec", work[:4], "echo", "-n", "--", "-x").out == "-- -x"
    assert cli("sb", "exec", "-e", "A=1", "-w", "/tmp", "-u", "bob", "work", "--",
               "sh", "-c", "echo $A; pwd; id -u").out == "1\n/tmp\n1000\n"
    assert "nosuch" in cli.error("sb", "exec", "work", "nosuch", code=127)
    cli.error("sb", "exec", "work", "/etc/passwd", code=126)
    assert "no sandbox" in cli.error("sb", "exec", "other", "true", code=3)
    assert "no sandbox" in cli.error("sb", "exec", "a/../b", "true", code=2)
    assert "no command" in cli.error("sb", "exec", "work", code=2)
    assert "timeout" in cli.error("sb", "exec", "--timeout", "200ms", "work", "sleep", "60",
                                  code=124)
    cli("sb", "exec", "work", "sh", "-c", "kill -9 $$", code=137)


def test_input(cli: Cli, work: str) -> None:
    # Without -i there is none, whatever ours is.
    assert cli("sb", "exec", "work", "cat", stdin="mine").out == ""
    text = "".join(f"line {number}\n" for number in range(200_000))
    assert cli("sb", "exec", "-i", "work", "cat", stdin=text).out == text
    # A command that does not read it ends all the same.
    cli("sb", "exec", "-i", "work", "true", stdin=text)
    running = cli.begin("sb", "exec", "-i", "work", "true")
    try:
        assert running.wait(LIMIT_S) == 0  # our standard input is still open
    finally:
        running.communicate()


def test_output_arrives_whole_and_while_it_is_written(cli: Cli, work: str) -> None:
    out = cli("sb", "exec", "work", "sh", "-c", "seq 1 400000; seq 1 100000 >&2")
    assert out.out.splitlines() == [str(n) for n in range(1, 400_001)]
    assert out.err.splitlines() == [str(n) for n in range(1, 100_001)]
    running = cli.begin("sb", "exec", "-i", "work", "cat")
    assert running.stdin is not None and running.stdout is not None
    try:
        for _ in range(3):
            running.stdin.write(b"ping\n")
            read_until(running.stdout.fileno(), b"ping\n")
        running.stdin.close()
        assert running.wait(LIMIT_S) == 0
    finally:
        running.kill()
        running.wait()


def test_a_reader_that_goes_away_ends_the_command(cli: Cli, work: str) -> None:
    running = cli.begin("sb", "exec", "work", "yes")
    assert running.stdout is not None
    try:
        read_until(running.stdout.fileno(), b"y\n")
        running.stdout.close()
        assert running.wait(LIMIT_S) == 141
    finally:
        running.kill()
        running.wait()
    assert "yes" not in cli("sb", "exec", "work", "ps").out


def test_interrupt_goes_to_the_command_and_the_second_one_kills(cli: Cli, work: str) -> None:
    script = "trap 'echo got it' INT; echo ready; while :; do sleep 0.1; done"
    running = cli.begin("sb", "exec", "work", "sh", "-c", script)
    assert running.stdout is not None
    try:
        out = running.stdout.fileno()
        read_until(out, b"ready\n")
        running.send_signal(signal.SIGINT)
        read_until(out, b"got it\n")
        running.send_signal(signal.SIGINT)
        assert running.wait(LIMIT_S) == 137
    finally:
        running.kill()
        running.communicate()
    assert "sleep" not in cli("sb", "exec", "work", "ps").out


def test_terminal(cli: Cli, work: str) -> None:
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(cli.cwd)
        os.execve(WORDS[0], [*WORDS, "sb", "shell", "work"], {**cli.environ, "TERM": "vt100"})
    try:
        before = termios.tcgetattr(fd)
        read_until(fd, b"# ")
        resize(fd, 33, 111)
        type_(fd, "stty size; echo $TERM; tty\n", until=b"/dev/pts/")
        type_until_size(fd, b"33 111")
        resize(fd, 44, 99)
        type_until_size(fd, b"44 99")
        # ^C is a byte like others: it ends what runs in the shell, not the shell nor dsec.
        os.write(fd, b"echo begin; sleep 1000\n")
        read_until(fd, b"begin\r\n")
        time.sleep(0.3)  # the shell has started it
        os.write(fd, b"\x03")
        assert b"\n3" in type_(fd, "echo $((1 + 2))\n", until=b"3\r\n").replace(b"\r", b"")
        os.write(fd, b"exit 9\n")
        assert wait_for(pid) == 9
        assert termios.tcgetattr(fd)[3] == before[3]
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(fd)


def resize(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


def type_(fd: int, text: str, until: bytes) -> bytes:
    os.write(fd, text.encode())
    return read_until(fd, until)


def type_until_size(fd: int, size: bytes) -> None:
    """The size arrives a moment after the signal."""
    deadline = time.monotonic() + LIMIT_S
    while size not in type_(fd, "stty size; echo e''nd\n", until=b"end\r\n"):
        assert time.monotonic() < deadline


def wait_for(pid: int) -> int:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    raise AssertionError("still runs")


def test_a_script_for_the_shell(cli: Cli, work: str) -> None:
    assert cli("sb", "shell", "work", stdin="cd /tmp\npwd\nexit 3\n", code=3).out == "/tmp\n"
    assert "no terminal" in cli.error("sb", "exec", "-it", "work", "sh", code=2)


def test_logs(cli: Cli, work: str) -> None:
    script = "echo one; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo two >&2; exit 3"
    id = cli("sb", "exec", "-d", "work", "--", "sh", "-c", script).out.strip()
    deadline = time.monotonic() + LIMIT_S
    while cli("sb", "logs", "work", id).out != "one\n":
        assert time.monotonic() < deadline
    following = cli.begin("sb", "logs", "-f", "work", id[:6])
    try:
        assert following.stdout is not None
        read_until(following.stdout.fileno(), b"one\n")
        sh(cli, "touch /tmp/go")
        _, err = following.communicate(timeout=LIMIT_S)
        assert err == b"two\n" and following.returncode == 0
    finally:
        following.kill()
        following.wait()
    last = cli("sb", "logs", "work")
    assert last.out == "" and "touch /tmp/go" in last.err
    listed = cli("sb", "logs", "-l", "work", "--no-json").out
    assert id in listed and "touch /tmp/go" in listed
    assert cli("sb", "logs", "-l", "work").json[0]["id"] == id
    assert "no command" in cli.error("sb", "logs", "work", "zzzz", code=3)


def test_pause_and_resume(cli: Cli, work: str) -> None:
    script = "while :; do date +%s >>/tmp/count; sleep 0.05; done"
    cli("sb", "exec", "-d", "work", "--", "sh", "-c", script)
    assert cli("sb", "pause", "work", "--no-json").out == "work  paused\n"
    listed = cli("sb", "ls", "--no-json").out
    assert " paused " in listed and " work " in listed
    assert "paused" in cli("sb", "why", "work", "--no-json").out
    assert cli("sb", "resume", "work").json[0]["state"] == "running"
    cli("sb", "pause", "work")
    assert sh(cli, "echo awake") == "awake\n"
    assert cli("sb", "ls").json[0]["state"] == "running"


def test_stop_why_and_rm(cli: Cli, work: str) -> None:
    cli("sb", "exec", "work", "sh", "-c", "echo 'last\033[2J words' >&2; exit 5", code=5)
    running = cli("sb", "why", "work", "--no-json").out
    assert f"Sandbox work ({work}, box:1) runs since" in running
    assert "exited with 5" in running and "| last\\x1b[2J words" in running
    ended = cli("sb", "stop", "work", "nowhere", code=3)
    assert "no sandbox 'nowhere'" in ended.err and ended.json[0]["state"] == "stopped"
    assert cli("sb", "ls").json == [] and cli("sb", "ls", "-q", "-a").out == f"{work}\n"
    why = cli("sb", "why", "work", "--no-json").out
    assert "was stopped" in why and "somebody asked for it" in why and "exited with 5" in why
    assert "last" in cli("sb", "logs", "work").err
    assert "has ended" in cli.error("sb", "exec", "work", "true", code=125)
    events = [json.loads(line)["kind"] for line in cli("sb", "events", "work").out.splitlines()]
    assert events[:2] == ["created", "running"] and events[-1] == "stopped"
    cli("sb", "rm", "work")
    assert "no sandbox" in cli.error("sb", "why", "work", code=3)


def test_limits_are_named(cli: Cli, work: str) -> None:
    cli("sb", "exec", "work", "sh", "-c", "tail /dev/zero", code=137)
    said = cli("sb", "why", "work", "--no-json").out
    assert "Limits that were hit: memory." in said and "ran out of memory" in said


def test_show_top_network_lifetime(cli: Cli, work: str) -> None:
    shown = cli("sb", "show", "work", "--no-json").out
    assert "box:1" in shown and "256 MiB" in shown
    assert cli("sb", "show", "work").json["execs"] == []
    row = cli("sb", "top").json[0]
    assert row["id"] == work and row["memory_bytes"] > 0 and row["cpu_percent"] >= 0
    assert " work " in cli("sb", "top", "work", "--once", "--no-json").out
    assert cli("sb", "network", "work", "--no-json").out == "nothing\n"
    cli("sb", "network", "work", "none")
    life = cli("sb", "lifetime", "work", "--idle-timeout", "never", "--then", "pause").json
    assert life["idle_timeout_s"] is None and life["then"] == "pause"
    assert life["max_lifetime_s"] is None
    life = cli("sb", "lifetime", "work", "--max-lifetime", "90m").json
    assert life["max_lifetime_s"] == 5400 and life["then"] == "pause"
    assert "idle timeout     never\n" in cli("sb", "lifetime", "work", "--no-json").out


def test_events_are_followed_to_the_end_of_a_sandbox(cli: Cli, work: str) -> None:
    following = cli.begin("sb", "events", "-f", "work")
    try:
        assert following.stdout is not None
        read_until(following.stdout.fileno(), b'"running"')
        cli("sb", "stop", "work")
        rest, _ = following.communicate(timeout=LIMIT_S)
        assert b'"stopped"' in rest and following.returncode == 0
    finally:
        following.kill()
        following.wait()


def test_what_is_copied(cli: Cli, work: str) -> None:
    here = cli.cwd
    (here / "tree/sub").mkdir(parents=True)
    (here / "tree/file").write_bytes(data := os.urandom(3 << 20))
    (here / "tree/file").chmod(0o750)
    (here / "tree/sub/link").symlink_to("../file")
    (here / "a:b").write_text("colon")
    cli("sb", "cp", "tree", "work:/srv/new")
    assert sh(cli, "cd /srv/new; echo *; stat -c '%a %u' file; readlink sub/link") == (
        "file sub\n750 0\n../file\n"
    )
    cli("sb", "cp", "tree", "work:/srv/new")  # is there now: into it
    cli("sb", "cp", "tree/.", "work:/srv/new/again")
    assert sh(cli, "cd /srv/new; ls tree again/sub") == "again/sub:\nlink\n\ntree:\nfile\nsub\n"
    cli("sb", "cp", "./a:b", "work:/tmp/")
    cli("sb", "cp", "-u", "bob", "a:b", "work:/home/bob/x", code=2)
    cli("sb", "cp", "-u", "bob", "./a:b", "work:/tmp/of-bob")
    assert sh(cli, "cat /tmp/a:b; stat -c %U /tmp/of-bob") == "colonbob\n"
    cli("sb", "cp", "work:/srv/new/file", "back")
    assert (here / "back").read_bytes() == data
    cli("sb", "cp", "work:/srv/new", "out")
    cli("sb", "cp", "work:/srv/new", "out")
    assert (here / "out/new/tree/sub/link").readlink() == Path("../file")
    assert cli("sb", "cp", "work:/tmp/a:b", "-").out == "colon"
    cli("sb", "cp", "-", "work:/tmp/given", stdin="from stdin")
    assert sh(cli, "cat /tmp/given") == "from stdin"
    assert "no file" in cli.error("sb", "cp", "work:/none", "x", code=3)
    assert "no file" in cli.error("sb", "cp", "none", "work:/x", code=3)
    assert "one of them" in cli.error("sb", "cp", "tree", "x", code=2)
    assert "no directory" in cli.error("sb", "cp", "tree", "work:/tmp/given", code=2)
    assert "a directory" in cli.error("sb", "cp", "work:/srv", "-", code=2)
    assert not (here / "x").exists()


def test_commands_start_quickly(cli: Cli, work: str) -> None:
    heavy = {"pydantic", "rich", "fastapi", "uvicorn", "websockets", "asyncio", "boto3", "trio"}
    for words in (("sb", "ls"), ("sb", "exec", "work", "true"), ("node", "status")):
        script = (
            "import sys\nfrom dsecfs.cli.main import run\n"
            f"code = run({list(words)!r})\n"
            f"print(code, sorted({heavy!r} & set(sys.modules)), file=sys.stderr)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
            env=cli.environ,
        )
        assert done.stderr == "0 []\n", words


def test_completion(cli: Cli, work: str) -> None:
    def complete(line: str) -> list[str]:
        words = line.split(" ")
        environ = {
            **cli.environ,
            "_DSEC_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        }
        done = subprocess.run(
            WORDS, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environ
        )
        return done.stdout.split()

    assert "create" in complete("dsec sandbox ")
    assert complete("dsec sb exec w") == ["work"]
    assert complete(f"dsec sb why {work[:5]}") == [work]
    assert "start" in complete("dsec node sta")


@pytest.fixture
def own(own_node: RealNode, tmp_path: Path) -> Iterator[tuple[RealNode, Cli]]:
    yield own_node, Cli(own_node.environ, tmp_path)


def test_exec_goes_on_when_the_edge_is_killed(own: tuple[RealNode, Cli]) -> None:
    node, cli = own
    cli("sb", "create", "box:1", "--name", "work", *SMALL)
    script = "for i in $(seq 1 60); do echo line $i; sleep 0.05; done; cat; exit 6"
    running = cli.begin("sb", "exec", "-i", "work", "sh", "-c", script)
    assert running.stdout is not None and running.stdin is not None
    try:
        got = read_until(running.stdout.fileno(), b"line 10\n")
        node.kill()
        time.sleep(0.3)
        node.start()
        got += read_until(running.stdout.fileno(), b"line 60\n")
        running.stdin.write(b"more\n")
        running.stdin.close()
        rest = running.stdout.read()
        assert rest is not None
        assert running.wait(LIMIT_S) == 6
    finally:
        running.kill()
        running.wait()
    assert (got + rest).decode() == "".join(f"line {n}\n" for n in range(1, 61)) + "more\n"
