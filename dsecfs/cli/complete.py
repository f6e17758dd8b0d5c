"""Names for tab completion: asked of the store, quickly or not at all."""

from __future__ import annotations

import threading
from itertools import islice

_MOST = 200
_LONGEST_S = 1.5


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


def _names(kinds: tuple[str, ...], incomplete: str) -> list[str]:
    from dsecfs.cli.session import session
    from dsecfs.errors import DsecfsError

    found: list[str] = []

    def ask() -> None:
        try:
            names = (str(name) for name in session().node.catalog.ls(kinds))
            found.extend(islice((n for n in names if n.startswith(incomplete)), _MOST))
        except (DsecfsError, OSError):
            # There is nobody to tell; the shell completes nothing.
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_LONGEST_S)
    return list(found)
