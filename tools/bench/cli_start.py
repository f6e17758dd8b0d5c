"""Starts of the command line, against `--help` of an empty Typer program.

`dsec --help` is timed whole. `dsec run` is timed to its first system call for the work: the
first one that names the store or the directories of the node. strace sees it, so for this
figure both sides run under strace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.bench.report import Result, record, spread
from tools.bench.stage import parser

BARE = """
import typer
app = typer.Typer()
@app.command()
def one() -> None: "One."
@app.command()
def two() -> None: "Two."
app()
"""
LIMIT_S = 30


def whole(argv: list[str], env: dict[str, str]) -> float:
    """Seconds from start to end of a command that succeeds."""
    start = time.monotonic()
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    return time.monotonic() - start


def traced(argv: list[str], env: dict[str, str], log: Path, mark: str | None) -> float:
    """Seconds from the first system call to the first that names `mark`, or to the last."""
    subprocess.run(
        ["strace", "-f", "-ttt", "-e", "trace=%file,connect,exit_group", "-o", log, *argv],
        env=env,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )
    lines = [line.split(maxsplit=2) for line in log.read_text(errors="replace").splitlines()]
    first = float(lines[0][1])
    for _, moment, call in lines[1:]:
        if mark is not None and mark in call:
            return float(moment) - first
    if mark is not None:
        raise SystemExit(f"{argv} never touched {mark}")
    return float(lines[-1][1]) - first


def main() -> None:
    """Measure and record."""
    given = parser(__doc__, repeat=15).parse_args()
    if shutil.which("strace") is None:
        raise SystemExit("strace is missing: apt-get install strace")
    with tempfile.TemporaryDirectory(prefix="dsec-cli-") as top:
        bare = Path(top, "bare.py")
        bare.write_text(BARE)
        python = sys.executable
        dsec = [python, "-c", "from dsecfs.cli.main import main; main()"]
        node = Path(top, "node")
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "DSEC_CONFIG": "",
            "DSEC_STORE": f"file:{top}/store",
            "DSEC_DATA_DIR": str(node / "data"),
            "DSEC_RUN_DIR": str(node / "run"),
        }
        help_: list[float] = []
        theirs: list[float] = []
        run: list[float] = []
        theirs_traced: list[float] = []
        log = Path(top, "log")
        for number in range(given.repeat + 1):
            rows = (
                whole([*dsec, "--help"], env),
                whole([python, str(bare), "--help"], env),
                traced([*dsec, "run", "debian:12", "true"], env, log, top),
                traced([python, str(bare), "--help"], env, log, None),
            )
            if number:  # the first one reads everything from the disk
                for values, value in zip((help_, theirs, run, theirs_traced), rows, strict=True):
                    values.append(value)
    of_help = sorted(a / b for a, b in zip(help_, theirs, strict=True))[len(help_) // 2]
    of_run = sorted(a / b for a, b in zip(run, theirs_traced, strict=True))[len(run) // 2]
    record(
        Result(
            "cli_start",
            "start of `dsec --help`, and of `dsec run` up to its first system call for the work",
            "`--help` of a bare Typer program",
            "≤1.3×",
            f"{of_help:.2f}× and {of_run:.2f}×",
            max(of_help, of_run) <= 1.3,
            {
                "help_s": spread(help_),
                "bare_s": spread(theirs),
                "run_traced_s": spread(run),
                "bare_traced_s": spread(theirs_traced),
            },
            note="both sides of the second figure run under strace",
        )
    )


if __name__ == "__main__":
    main()
