"""What one invocation of `dsec` was told: output form, settings, the node they name.

There is one `Session` per process, made anew by `main`. The options that every command has
(--json, --debug, --store, --set) write to it. Settings are read when they are first needed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from dsecfs.settings import Loaded, Settings, load

if TYPE_CHECKING:
    from dsecfs.node import Node


@dataclass
class Session:
    """Everything is as the command line says; what it does not say is asked when needed."""

    json: bool | None = None
    """Whether results are JSON; None: unless standard output is a terminal."""
    debug: bool = False
    options: list[tuple[str, str]] = field(default_factory=list)
    """Settings from the command line."""

    @property
    def as_json(self) -> bool:
        return not sys.stdout.isatty() if self.json is None else self.json

    @cached_property
    def loaded(self) -> Loaded:
        return load(self.options)

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    @cached_property
    def node(self) -> Node:
        from dsecfs.node import Node

        return Node(self.settings)

    def close(self) -> None:
        if "node" in self.__dict__:
            self.node.close()


_current = Session()


def session() -> Session:
    """This invocation."""
    return _current


def new_session() -> Session:
    """Begin an invocation."""
    global _current
    _current = Session()
    return _current
