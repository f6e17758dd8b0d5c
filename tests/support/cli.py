"""Runs `dsec` in this process, with a node and a store of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dsecfs.cli.main import run


class Said(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line on standard error."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("dsec: ")
        return lines[0].removeprefix("dsec: ")


class Dsec:
    """The command with its settings in the environment."""

    def __init__(
        self,
        place: Path,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.place = place
        self._capfd = capfd
        for name in [n for n in os.environ if n.startswith("DSEC_")]:
            monkeypatch.delenv(name)
        self.environ = {
            "DSEC_CONFIG": "",
            "DSEC_DATA_DIR": str(place / "data"),
            "DSEC_RUN_DIR": str(place / "run"),
            "DSEC_STORE": f"file:{place / 'store'}",
        }
        (place / "store").mkdir()
        for name, value in self.environ.items():
            monkeypatch.setenv(name, value)

    def __call__(self, *words: str, code: int = 0) -> Said:
        """Run `dsec WORDS`; it must end with `code`."""
        self._capfd.readouterr()
        ended = run(list(words))
        out, err = self._capfd.readouterr()
        said = Said(ended, out, err)
        assert said.code == code, f"dsec {' '.join(words)}: {said}"
        return said
