"""Which chunks to fetch before a sequential reader asks for them.

Owns the streams of one blob: pure bookkeeping, no I/O. What must hold: never more is
fetched ahead than the stream has read so far (so a file's end costs at most its length),
nor more than the window; random reads fetch nothing ahead.

Programs that start read many files and mapped libraries by pieces: short runs of chunks that
end for no visible reason. Running ahead of these fetched up to 500 chunks more than the 558
that an `import numpy, pandas` needs. So a stream must be _START chunks long before it counts;
with 12 and a slack of 1 none was fetched too many, with 8 or a slack of 2 it was 60.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

_STREAMS = 16
"""Streams followed per blob; the one that was idle longest gives way."""
_START = 16
"""Chunks that a reader has read in order before anything is fetched ahead of it."""
_SLACK = 1
"""Chunks by which requests of one reader may arrive out of order."""


@dataclass(slots=True, eq=False)
class _Stream:
    start: int
    next: int
    """Chunk after the last one that was read."""
    ahead: int
    """End of what was fetched ahead; ≥ next."""


class ReadAhead:
    """Sequential readers of one blob of `count` chunks; at most `window` chunks ahead."""

    def __init__(self, count: int, window: int) -> None:
        self._count = count
        self._window = window
        self._lock = threading.Lock()
        self._streams: list[_Stream] = []
        self.triggers: dict[int, _Stream] = {}
        """A hit on such a chunk means that a stream comes near the end of what is ahead."""

    def missed(self, first: int, last: int) -> range:
        """Chunks first..last (inclusive) were read and not all there: what to fetch ahead."""
        with self._lock:
            for stream in self._streams:
                if stream.next - _SLACK <= first <= stream.ahead + _SLACK:
                    return self._advance(stream, first, last)
            stream = _Stream(first, last + 1, last + 1)
            self._streams.append(stream)
            if len(self._streams) > _STREAMS:
                gone = self._streams.pop(0)
                self.triggers = {c: s for c, s in self.triggers.items() if s is not gone}
            return range(0)

    def hit(self, first: int, last: int) -> range:
        """Chunks first..last were read and there; call it when one of them is a trigger."""
        with self._lock:
            for chunk in range(first, last + 1):
                stream = self.triggers.pop(chunk, None)
                if stream is not None:
                    return self._advance(stream, first, last)
            return range(0)

    def _advance(self, stream: _Stream, first: int, last: int) -> range:
        self._streams.remove(stream)
        self._streams.append(stream)
        if last < stream.next:
            return range(0)  # an earlier request that comes late
        stream.next = last + 1
        start = stream.ahead = max(stream.ahead, stream.next)
        if stream.next - stream.start < _START:
            return range(0)
        window = min(stream.next - stream.start, self._window)
        stop = min(stream.next + window, self._count)
        if start >= stop:
            return range(0)
        stream.ahead = stop
        # Ask for the next quarter once that much of the window has been read.
        self.triggers[max(stream.next, stop - window * 3 // 4)] = stream
        return range(start, stop)
