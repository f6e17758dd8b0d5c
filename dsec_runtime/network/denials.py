"""What a sandbox was denied: counted always, told in bounded numbers.

What must hold: a flood costs a counter and a look into a table of fixed size; the same
destination is told once in REPEAT_S, all of a sandbox together no faster than TOLD_PER_S.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from dsec_runtime.network.bounds import Bucket
from dsec_runtime.network.names import shown

log = logging.getLogger(__name__)

REPEAT_S = 60.0
TOLD_PER_S, TOLD_BURST = 1.0, 16.0
_MAX_KEPT = 128
Tell = Callable[[dict[str, Any]], None]


class Denials:
    """Those of one sandbox."""

    def __init__(self, sandbox: str, tell: Tell) -> None:
        self._sandbox = sandbox
        self._tell = tell
        self._told: OrderedDict[tuple[str, int, str], float] = OrderedDict()
        self._bucket = Bucket(TOLD_PER_S, TOLD_BURST)
        self.count = 0
        self.counted = 0
        """How many the edge has heard of."""

    def add(self, host: str, port: int, protocol: str = "tcp", why: str = "") -> None:
        """`why` is "" for what no rule allows, else a word that the edge explains (client.py)."""
        self.count += 1
        key = (shown(host), port, protocol)
        now = time.monotonic()
        if (at := self._told.get(key)) is not None and now - at < REPEAT_S:
            return
        if not self._bucket.take():
            return
        self._told[key] = now
        self._told.move_to_end(key)
        while len(self._told) > _MAX_KEPT:
            self._told.popitem(last=False)
        log.info("sandbox %s: denied %s:%d (%s) %s", self._sandbox, *key, why)
        self.counted = self.count
        self._tell(
            {
                "denied": self._sandbox,
                "host": key[0],
                "port": port,
                "protocol": protocol,
                "why": why,
                "count": self.count,
            }
        )
