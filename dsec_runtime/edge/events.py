"""Events of sandboxes: written to the journal with the change they tell of, followed live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from dsec_runtime.edge import journal as j
from dsec_runtime.edge.box import Box
from dsec_runtime.edge.model import Event

_PAGE = 500


class Events:
    """What happened, and whoever waits for more."""

    def __init__(self, journal: j.Journal) -> None:
        self._journal = journal
        self._more = asyncio.Event()

    def created(self, box: Box) -> j.Change:
        spec = box.row.spec
        return j.event(box.row.id, "created", {"environment": spec.environment, "job": spec.job})

    def change(self, box: Box, kind: str, data: dict[str, Any]) -> j.Change:
        return j.event(box.row.id, kind, data)

    def wake(self) -> None:
        """Something was written."""
        more, self._more = self._more, asyncio.Event()
        more.set()

    async def read(self, after: int, limit: int, sandbox: str | None = None) -> list[Event]:
        return await asyncio.to_thread(self._journal.events, after, limit, sandbox)

    async def follow(
        self, after: int, sandbox: str | None = None, done: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[Event]:
        """Events after a number, then new ones as they come; ends when `done` and all were told."""
        while True:
            more, ending = self._more, done()
            found = await self.read(after, _PAGE, sandbox)
            for event in found:
                after = event.seq
                yield event
            if len(found) == _PAGE:
                continue
            if ending:
                return
            await more.wait()
