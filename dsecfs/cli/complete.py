"""Tab completion: names are asked of the store, quickly or not at all."""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from itertools import chain, islice

_MOST = 200
_LONGEST_S = 1.5
_BREAKS = re.compile(r"[:@=]+")
"""What names hold of bash's COMP_WORDBREAKS: bash takes it for words of their own."""


def complete_env(incomplete: str) -> list[str]:
    """Environments and bases."""
    return _names(("env", "base"), incomplete)


def complete_layer(incomplete: str) -> list[str]:
    """Layers of every kind."""
    from dsecfs.layers.names import LAYER_KINDS

    return _names(LAYER_KINDS, incomplete)


def complete_layer_or_env(incomplete: str) -> list[str]:
    """Everything that has a name."""
    from dsecfs.layers.names import KINDS

    return _names(KINDS, incomplete)


def complete_toolkit(incomplete: str) -> list[str]:
    """Toolkits behind a "+"; nothing for other words."""
    if not incomplete.startswith("+"):
        return []
    found = _names(("toolkit",), incomplete[1:])
    return [f"+{name.removeprefix('toolkit/')}" for name in found]


def complete_channel(incomplete: str) -> list[str]:
    """Channels."""
    from dsecfs.layers.names import KINDS

    return [name for name in _names(KINDS, incomplete) if "@" in name]


def complete_trash(incomplete: str) -> list[str]:
    """Removed names."""

    def names() -> Iterable[str]:
        from dsecfs.cli.session import session

        trash = session().node.catalog.trash()
        return (f"{name.kind}/{name.with_kind('')}" for name, _ in trash)

    return _quickly(lambda: (n for n in names() if n.startswith(incomplete)))


def complete_sandbox(incomplete: str) -> list[str]:
    """Sandboxes of the edge, by name where they have one, else by id."""

    def ask() -> Iterable[str]:
        from dsec_runtime.edge.client import EdgeClient
        from dsecfs.cli.session import session

        client = EdgeClient.of(session().settings)
        found = client.get("/v1/sandboxes", {"limit": 1000}, wait_s=_LONGEST_S)["sandboxes"]
        for sandbox in found:
            forms = (sandbox["name"] or "", sandbox["id"])
            yield from islice((f for f in forms if f and f.startswith(incomplete)), 1)

    return _quickly(ask)


def complete_setting(incomplete: str) -> list[str]:
    """Settings, as --set takes them."""
    from dsecfs.settings import SPECS

    return [f"{name}=" for name in SPECS if name.startswith(incomplete)]


def _names(kinds: tuple[str, ...], incomplete: str) -> list[str]:
    """Versions and channels; the kind may be left out once something was typed."""

    def ask() -> Iterator[str]:
        from dsecfs.cli.session import session

        catalog = session().node.catalog
        channels = (name for name in catalog.channels() if name.kind in kinds)
        for name in chain(catalog.ls(kinds), channels):
            forms = (str(name), str(name.with_kind("")))
            yield from islice((f for f in forms if f.startswith(incomplete)), 1)

    return _quickly(ask)


def _quickly(ask: Callable[[], Iterable[str]]) -> list[str]:
    """What `ask` gives, unless it takes too long or fails."""
    from dsecfs.errors import DsecfsError

    found: list[str] = []

    def work() -> None:
        try:
            found.extend(islice(ask(), _MOST))
        except (DsecfsError, OSError):
            # There is nobody to tell; the shell completes nothing.
            return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_LONGEST_S)
    return list(found)


@contextlib.contextmanager
def whole_words(environ: MutableMapping[str, str]) -> Iterator[None]:
    """While bash asks for completions: put words together that it took apart at ":", "@", "=".

    bash puts the answer in the place of what stands behind the last of these characters, so
    what stands before it is left out of the answers.
    """
    if environ.get("_DSEC_COMPLETE") != "complete_bash" or "\n" not in (
        environ.get("COMP_WORDS", "")
    ):
        yield
        return
    words, at = join_words(environ["COMP_WORDS"].split("\n"), int(environ["COMP_CWORD"]))
    environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join(words), str(at)
    current = words[at] if at < len(words) else ""
    breaks = list(_BREAKS.finditer(current))
    known = current[: breaks[-1].end()] if breaks else ""
    answers = io.StringIO()
    try:
        with contextlib.redirect_stdout(answers):
            yield
    finally:
        for line in answers.getvalue().splitlines():
            print(line.removeprefix(known))


def join_words(words: list[str], at: int) -> tuple[list[str], int]:
    """bash's words as they were typed, and which of them the cursor is in."""
    joined: list[str] = []
    place = 0
    glue = False
    for number, word in enumerate(words[: at + 1]):
        is_break = _BREAKS.fullmatch(word) is not None
        if joined and (glue or is_break) and number > 1:
            joined[-1] += word
        else:
            joined.append(word)
        glue = is_break
        place = len(joined) - 1
    return joined, place
