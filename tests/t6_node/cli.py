"""`dsec` as a process of its own, against a node."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 60.0
WORDS = (sys.executable, "-m", "dsecfs.cli.main")


class Ended(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Runs commands with a node's settings in the environment."""

    def __init__(self, environ: Mapping[str, str], cwd: Path) -> None:
        self.environ = dict(environ)
        self.cwd = cwd

    def having(self, **environ: str) -> Cli:
        """The same with more in the environment."""
        return Cli({**self.environ, **environ}, self.cwd)

    def __call__(self, *words: str, code: int = 0, stdin: str | None = None) -> Ended:
        """Run `dsec WORDS`; it must end with `code`."""
        done = subprocess.run(
            [*WORDS, *words],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=LIMIT_S,
            check=False,
            cwd=self.cwd,
            env=self.environ,
        )
        ended = Ended(done.returncode, done.stdout, done.stderr)
        assert ended.code == code, f"dsec {' '.join(words)}: {ended}"
        return ended

    def error(self, *words: str, code: int) -> str:
        """Run `dsec WORDS`, which must fail with `code` and print nothing but one line."""
        ended = self(*words, code=code)
        lines = ended.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("dsec: "), ended
        return lines[0].removeprefix("dsec: ")

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        """A command that runs on; its streams are pipes."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*WORDS, *words],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=self.cwd,
            env=self.environ,
            bufsize=0,
        )


def read_until(fd: int, text: bytes, limit_s: float = LIMIT_S) -> bytes:
    """What comes from a descriptor up to `text` and a bit more. It must come in time."""
    got = b""
    deadline = time.monotonic() + limit_s
    while text not in got:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no {text!r} within {limit_s} s: {got!r}"
        try:
            data = os.read(fd, 4096)
        except OSError:  # EIO: the terminal is gone
            data = b""
        assert data, f"ended without {text!r}: {got!r}"
        got += data
    return got
