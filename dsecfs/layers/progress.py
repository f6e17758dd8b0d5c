"""How long work tells how far it is, and where tests may interrupt it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Receives progress, from any thread. Tasks are names for people, unique in one call."""

    def start(self, task: str, total: int | None) -> None:
        """`task` begins and has `total` bytes, if that is known."""

    def advance(self, task: str, amount: int) -> None:
        """`amount` more bytes of `task` are done."""

    def finish(self, task: str) -> None:
        """`task` is done."""


class Silent:
    """Progress that nobody looks at."""

    def start(self, task: str, total: int | None) -> None:
        pass

    def advance(self, task: str, amount: int) -> None:
        pass

    def finish(self, task: str) -> None:
        pass


SILENT = Silent()

Hook = Callable[[str], None]
"""Called with the name of each step that was just done; tests stop or kill there."""


def no_hook(step: str) -> None:
    """The hook that does nothing."""
