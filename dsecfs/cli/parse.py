"""Texts that several commands take: NAME=VALUE pairs, +toolkits, names of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsecfs.errors import BadInput
from dsecfs.layers.names import LAYER_KINDS, Name, parse_name


def pairs(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """NAME=VALUE texts as a mapping; later ones win. BadInput names the option."""
    found = {}
    for text in texts or ():
        name, sep, value = text.partition("=")
        if not sep or not name:
            raise BadInput(f"{option} {text[:80]!r}: not NAME=VALUE")
        found[name] = value
    return found


def split_toolkits(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(toolkits without their "+", the rest), from words after an environment's name."""
    count = 0
    while count < len(words) and words[count].startswith("+"):
        count += 1
    return [word[1:] for word in words[:count]], list(words[count:])


def only_toolkits(words: Sequence[str] | None) -> list[str]:
    """Words that must all be +TOOLKIT. BadInput names the one that is not."""
    toolkits, rest = split_toolkits(words or ())
    if rest:
        raise BadInput(f"unexpected {rest[0][:80]!r}", hint="a toolkit is written +NAME:VERSION")
    return toolkits


def layer_name(text: str) -> Name:
    """The full name of a layer that is to be published: KIND/NAME:VERSION."""
    name = parse_name(text)
    if name.kind not in LAYER_KINDS or not name.version:
        raise BadInput(
            f"{text[:120]!r} does not say what kind of layer it is",
            hint=f"expected KIND/NAME:VERSION with KIND one of {', '.join(LAYER_KINDS)}",
        )
    return name
