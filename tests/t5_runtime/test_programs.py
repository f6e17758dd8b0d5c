"""Programs that a container cannot start are told apart before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec_runtime.errors import NotExecutable, ProgramNotFound
from dsec_runtime.run import Runner
from dsecfs.errors import BadInput
from tests.support.node import Node, file_inode
from tests.t5_runtime.conftest import Shell, base_entries


def test_missing_programs(shell: Shell) -> None:
    with pytest.raises(ProgramNotFound, match="no program 'nonsense' in \\$PATH") as e:
        shell.run("nonsense")
    assert e.value.exit_code == 127
    with pytest.raises(ProgramNotFound):
        shell.run("/bin/nonsense")
    with pytest.raises(NotExecutable) as e2:
        shell.run("/etc/plain")
    assert e2.value.exit_code == 126
    with pytest.raises(NotExecutable):
        shell.run("/etc")
    assert shell.run("./true", cwd="/bin")[0].exit_code == 0


def test_a_missing_interpreter_is_named(here: Node, runner: Runner) -> None:
    data = bytearray()
    ls = Path("/bin/ls").read_bytes()
    programs = {
        "script": b"#! /usr/bin/nonsense -x\n",
        "dynamic": ls,
        "cut": ls[:100],
        "wild": ls[:32] + b"\xff" * 32 + ls[64:],
    }
    entries = base_entries(data) | {n: file_inode(c, data) for n, c in programs.items()}
    shell = Shell(runner, here.layer(entries, data))
    with pytest.raises(NotExecutable, match="interpreter '/usr/bin/nonsense'"):
        shell.run("/script")
    with pytest.raises(NotExecutable, match="interpreter '/lib.*ld-"):
        shell.run("/dynamic")
    for name in ("cut", "wild"):
        assert shell.run(f"/{name}")[0].exit_code != 0


def test_what_execve_does_not_take_is_refused(shell: Shell) -> None:
    most = "x" * (128 * 1024 - 1)
    assert shell.run("true", most)[0].exit_code == 0
    with pytest.raises(BadInput):
        shell.run("true", most + "x")
    with pytest.raises(BadInput):
        shell.run("true", env={"A": most})
    with pytest.raises(BadInput):
        shell.run("true", *["x" * 1000] * 7000)
    assert shell.run("true", *["x" * 1000] * 2000)[0].exit_code == 0
