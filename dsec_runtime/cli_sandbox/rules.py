"""What --network and --mount mean: texts become the API's rules and mounts.

    --network   WORD[,WORD]...  with WORD a service of the node (pypi), a host name (example.org,
                *.example.org), an address or range (192.0.2.0/24), each with :PORT as often as
                wanted and /udp at its end; "internet" is everything public, "none" nothing
    --mount     layer=NAME,at=PATH | scratch=SIZE,at=PATH | host=PATH,at=PATH[,rw]
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any

from dsec_runtime.cli_sandbox.common import mib
from dsecfs.errors import BadInput

_PORTS = re.compile(r"(?P<name>.*?)(?P<ports>(?::\d{1,5})+)?(?P<udp>/udp|/tcp)?", re.ASCII)


def network(texts: Iterable[str] | None) -> dict[str, Any]:
    """The API's `Network`. BadInput says which word is wrong."""
    words = [word.strip() for text in texts or () for word in text.split(",") if word.strip()]
    if "none" in words and len(words) > 1:
        raise BadInput("--network none with other words", hint="leave one of them out")
    rules = [_rule(word) for word in words if word not in ("none", "internet")]
    return {"allow": rules, "internet": "internet" in words}


def _rule(word: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    name = word
    if not _is_range(word):
        match = _PORTS.fullmatch(word)
        assert match is not None  # all of it is optional
        name = match["name"]
        if match["ports"]:
            found["ports"] = [int(port) for port in match["ports"][1:].split(":")]
        if match["udp"] == "/udp":
            found["protocol"] = "udp"
    if not name:
        raise BadInput(f"--network {word[:60]!r}", hint="expected e.g. pypi, example.org:443")
    kind = "cidr" if _is_range(name) else "host" if "." in name else "service"
    return {kind: name, **found}


def _is_range(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def mount(text: str) -> dict[str, Any]:
    """The API's `Mount`. BadInput says what is wrong with it."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, sep, value = part.partition("=")
        if key in ("rw", "ro") and not sep:
            found["read_only"] = key == "ro"
        elif key == "scratch" and value:
            found["scratch_mb"] = mib(value, f"--mount {text[:80]}")
        elif key in ("layer", "host", "at") and value:
            found[key] = value
        else:
            raise _no_mount(text)
    if "at" not in found or sum(kind in found for kind in ("layer", "scratch_mb", "host")) != 1:
        raise _no_mount(text)
    return found


def _no_mount(text: str) -> BadInput:
    hint = "expected layer=NAME,at=PATH, scratch=SIZE,at=PATH or host=PATH,at=PATH[,rw]"
    return BadInput(f"--mount {text[:120]!r}", hint=hint)
