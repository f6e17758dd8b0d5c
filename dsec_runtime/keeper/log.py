"""The output of one command on disk.

    1.<start>, 2.<start>   segments of standard output and error: raw bytes, <start> is the offset
                           of the first one in the stream, 16 digits; SEGMENT bytes each
    exit.json              how the command ended (`Ended`), written once, atomically

What must hold: bytes go from the command's pipe to the segment by splice(2), so a byte is in one
of the two whatever is killed, and the end of the last segment is the end of what was taken. The
first HEAD bytes of a stream stay; of the rest the newest `keep` bytes do, more while a follower
has not read them yet. Readers open files only: they need no keeper.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import struct
import termios
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

STDOUT, STDERR = 1, 2
STREAMS = (STDOUT, STDERR)
STATE = 3
"""What a command of a session hands to the next one (descriptor 4); at most MAX_STATE bytes."""
MAX_STATE = 1 << 20
SEGMENT = 4 << 20
HEAD = SEGMENT
"""The first segment of each stream is kept; a result shows a MiB of it."""
EXIT = "exit.json"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int | None
    """Exit code; 128 + n after signal n."""
    signal: int | None
    timed_out: bool
    started_at: float
    ended_at: float
    duration_s: float
    """Without the time its sandbox was paused."""
    limits: tuple[str, ...] = ()
    """Limits whose counters grew while it ran."""
    lost: bool = False
    """Its end was not seen; code and signal are None."""
    error: str = ""
    """What the container runtime had to say: the program did not run."""
    written: dict[str, int] = field(default_factory=dict)
    """Bytes of each stream up to its end: {"1": n, "2": n}. What it left behind may write more."""

    @staticmethod
    def unknown(started_at: float = 0.0, ended_at: float = 0.0) -> Ended:
        return Ended(None, None, False, started_at, ended_at, 0.0, lost=True)

    def write(self, place: Path) -> None:
        new = place / f".{EXIT}"
        new.write_text(json.dumps(asdict(self)))
        new.rename(place / EXIT)


def read_ended(place: Path) -> Ended | None:
    """How the command ended; None while it runs, or if nobody wrote it down."""
    try:
        value = json.loads((place / EXIT).read_text())
        value["limits"] = tuple(value["limits"])
        return Ended(**value)
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Segment(NamedTuple):
    start: int
    size: int
    path: Path


def segments(place: Path, stream: int) -> list[Segment]:
    """Segments of a stream that are there, in order."""
    found = []
    try:
        names = os.listdir(place)
    except FileNotFoundError:
        return []
    for name in names:
        kind, _, start = name.partition(".")
        if kind == str(stream) and len(start) == 16 and start.isdigit():
            with contextlib.suppress(FileNotFoundError):
                found.append(Segment(int(start), (place / name).stat().st_size, place / name))
    return sorted(found)


def end_of(place: Path, stream: int) -> int:
    """Bytes written to a stream so far."""
    found = segments(place, stream)
    return found[-1].start + found[-1].size if found else 0


def read_at(place: Path, stream: int, offset: int, count: int) -> tuple[int, bytes]:
    """Up to `count` bytes from `offset` on, and where they really start: what is deleted is
    skipped. (offset, b"") at the present end."""
    for start, size, path in segments(place, stream):
        if start + size <= offset:
            continue
        at = max(start, offset)
        with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
            file.seek(at - start)
            data = file.read(min(count, start + size - at))
            if data:
                return at, data
    return offset, b""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of a stream: its first and last bytes."""

    head: bytes
    tail: bytes
    total: int


@dataclass(frozen=True, slots=True)
class Both:
    stdout: Kept
    stderr: Kept
    truncated: bool


def read_kept(place: Path, edge: int, until: dict[str, int] | None = None) -> Both:
    """First and last `edge` bytes of both streams; `until` are the ends to look at (written)."""
    out, err = (
        _kept(place, stream, edge, (until or {}).get(str(stream))) for stream in STREAMS
    )
    cut = any(k.total > len(k.head) + len(k.tail) for k in (out, err))
    return Both(out, err, cut)


def _kept(place: Path, stream: int, edge: int, until: int | None) -> Kept:
    total = end_of(place, stream) if until is None else until
    head = _read(place, stream, 0, min(edge, total))
    rest = total - len(head)
    tail = _read(place, stream, max(len(head), total - edge), min(edge, rest)) if rest else b""
    return Kept(head, tail, total)


def _read(place: Path, stream: int, offset: int, count: int) -> bytes:
    parts, end = [], offset + count
    while offset < end:
        at, data = read_at(place, stream, offset, end - offset)
        if not data or at >= end:
            break
        parts.append(data)
        offset = at + len(data)
    return b"".join(parts)


def read_state(place: Path) -> bytes | None:
    """What a command handed on; None if it is nothing, or more than MAX_STATE."""
    size = end_of(place, STATE)
    return _read(place, STATE, 0, size) if 0 < size <= MAX_STATE else None


class Writer:
    """Takes a stream from a pipe into segments. One process at a time has it."""

    def __init__(self, place: Path, stream: int, keep: int) -> None:
        """Goes on where an earlier writer was killed."""
        self._place = place
        self._stream = stream
        self._keep = keep
        self._fd = -1
        found = segments(place, stream)
        self._starts = [segment.start for segment in found]
        self.end = found[-1].start + found[-1].size if found else 0
        """Offset of the next byte."""

    def take(self, pipe: int, most: int) -> int:
        """Move up to `most` bytes that wait in the pipe. 0 at its end.

        BlockingIOError if there is nothing; OSError (ENOSPC) if the disk does not take it: then
        it is still in the pipe.
        """
        if self._fd < 0 or self.end >= self._starts[-1] + SEGMENT:
            if not _waiting(pipe):  # most commands are silent on one of the two: no file for it
                byte = os.read(pipe, 1)
                self.add(byte)
                return len(byte)
            self._open()
        room = self._starts[-1] + SEGMENT - self.end
        at = self.end - self._starts[-1]
        moved = os.splice(
            pipe, self._fd, min(most, room), offset_dst=at, flags=_NONBLOCK
        )
        self.end += moved
        return moved

    def add(self, data: bytes) -> None:
        """Append bytes of our own. OSError if the disk does not take them."""
        if not data:
            return
        if self._fd < 0 or self.end >= self._starts[-1] + SEGMENT:
            self._open()
        self.end += os.pwrite(self._fd, data, self.end - self._starts[-1])

    def discard(self, pipe: int, most: int) -> int:
        """Throw away what waits in the pipe: the disk is full, and the command must go on."""
        return len(os.read(pipe, most))

    def _open(self) -> None:
        self.close()
        if not self._starts or self.end >= self._starts[-1] + SEGMENT:
            self._starts.append(self.end)
        path = self._path(self._starts[-1])
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def trim(self, needed: int) -> int:
        """Delete old segments, but for the first, and those with bytes from `needed` on. Bytes
        that are kept besides the first segment."""
        while len(self._starts) > 2 and self.end - self._starts[1] > self._keep:
            if self._starts[1] + SEGMENT > needed:
                break
            with contextlib.suppress(FileNotFoundError):
                self._path(self._starts[1]).unlink()
            del self._starts[1]
        return self.end - self._starts[1] if len(self._starts) > 1 else 0

    def _path(self, start: int) -> Path:
        return self._place / f"{self._stream}.{start:016d}"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _waiting(pipe: int) -> int:
    """Bytes in a pipe."""
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))
    return int(count)


_NONBLOCK = os.SPLICE_F_NONBLOCK
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
