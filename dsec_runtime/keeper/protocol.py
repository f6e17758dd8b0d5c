"""Messages on run/keeper.sock: a header, a JSON object, raw bytes.

    u32 length of the JSON, u32 length of the bytes (little endian), JSON, bytes

Requests have a number "n" and an "op"; answers have the same "n", and "error" with the name of
an error's class in "type" when it failed. Messages without "n" are news: {"ended": ID},
{"grown": ID}. What must hold: lengths are bounded before anything is read; what does not parse
ends the connection.
"""

from __future__ import annotations

import json
import struct
from typing import Any

HEADER = struct.Struct("<II")
MAX_JSON = 8 << 20
MAX_BYTES = 1 << 20

Message = tuple[dict[str, Any], bytes]


class ProtocolError(Exception):
    """Bytes that are no message."""


def pack(value: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(value).encode()
    return HEADER.pack(len(text), len(data)) + text + data


def sizes(header: bytes) -> tuple[int, int]:
    """Lengths of JSON and bytes. ProtocolError."""
    text, data = HEADER.unpack(header)
    if not 2 <= text <= MAX_JSON or data > MAX_BYTES:
        raise ProtocolError(f"message of {text} and {data} bytes")
    return text, data


def parse(text: bytes) -> dict[str, Any]:
    """ProtocolError unless it is a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"message is no JSON: {e}") from None
    if not isinstance(value, dict):
        raise ProtocolError("message is no JSON object")
    return value


class Unpacker:
    """Messages from pieces of a stream."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, piece: bytes) -> list[Message]:
        """Whole messages. ProtocolError."""
        self._held += piece
        found = []
        while len(self._held) >= HEADER.size:
            text, data = sizes(bytes(self._held[: HEADER.size]))
            end = HEADER.size + text + data
            if len(self._held) < end:
                break
            body = bytes(self._held[HEADER.size : end])
            del self._held[:end]
            found.append((parse(body[:text]), body[text:]))
        return found
