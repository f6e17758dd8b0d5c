"""Frames between the edge and a child, on a stream socket that only the two have.

    u8 kind, u32 length (little endian), `length` bytes

REQUEST and RESULT are JSON objects, PART a JSON object of several, DATA bytes, ERROR a JSON object
{"errno": number} or {"reason": word} and perhaps {"entry": name}. The edge sends one REQUEST, then
DATA and END if it uploads; a child sends PARTs and DATA, and last one RESULT or ERROR. Names are
texts in which bytes that are no UTF-8 are lone surrogates (PEP 383).

What must hold: a length is checked before anything of that length is read or kept; whoever reads
takes every byte for hostile.
"""

from __future__ import annotations

import json
import struct
from typing import Any

REQUEST, DATA, END, PART, RESULT, ERROR = range(1, 7)

HEADER = struct.Struct("<BI")
MAX_JSON = 1 << 20
MAX_DATA = 256 << 10

# Words of ERROR: what no errno says.
NOT_REGULAR = "not-regular"
NOT_DIRECTORY = "not-directory"
BAD_NAME = "bad-name"
OWNER = "owner"
RANGE = "range"
CHANGED = "changed"
DEEP = "deep"
ARCHIVE = "archive"
UNSAFE = "unsafe"
MEMORY = "memory"
GONE = "gone"
NO_NAMESPACE = "no-namespace"
ABORTED = "aborted"
INTERNAL = "internal"
REASONS = frozenset(
    {
        NOT_REGULAR,
        NOT_DIRECTORY,
        BAD_NAME,
        OWNER,
        RANGE,
        CHANGED,
        DEEP,
        ARCHIVE,
        UNSAFE,
        MEMORY,
        GONE,
        NO_NAMESPACE,
        ABORTED,
        INTERNAL,
    }
)


class WireError(Exception):
    """Bytes that are no frame."""


def frame(kind: int, data: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(data)) + data


def frame_json(kind: int, value: dict[str, Any]) -> bytes:
    return frame(kind, json.dumps(value, separators=(",", ":")).encode())


def parse_header(header: bytes) -> tuple[int, int]:
    """Kind and length. WireError."""
    kind, length = HEADER.unpack(header)
    if not REQUEST <= kind <= ERROR or length > (MAX_DATA if kind == DATA else MAX_JSON):
        raise WireError(f"frame of kind {kind} and {length} bytes")
    return kind, length


def parse_json(data: bytes) -> dict[str, Any]:
    """WireError unless it is a JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise WireError(f"no JSON: {type(e).__name__}") from None
    if not isinstance(value, dict):
        raise WireError("no JSON object")
    return value
