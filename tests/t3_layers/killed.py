"""Publishes in a process of its own and kills it with SIGKILL at a named step.

    python -m tests.t3_layers.killed STORE SPEC NAME STEP

STEP is "NAME" or "NAME:N" (the N-th time it is reached). Prints the steps that were reached.
"""

from __future__ import annotations

import os
import signal
import sys

from dsecfs.layers.image import import_image
from dsecfs.layers.names import parse_name
from dsecfs.layers.publish import Meta, publish_source
from dsecfs.layers.sources.image import open_image
from dsecfs.store.directory import DirectoryStore


def main() -> None:
    store, spec, name, step = sys.argv[1:]
    wanted, _, count = step.partition(":")
    left = int(count or 1)

    def hook(reached: str) -> None:
        nonlocal left
        print(reached, flush=True)
        if reached == wanted:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    target = DirectoryStore(store, create=True)
    with open_image(spec) as image:
        if image.layers[0].diff_id is None:
            publish_source(
                target, image.layers[0], parse_name(name), Meta("toolkit", "linux/amd64"), hook=hook
            )
        else:
            import_image(target, image, parse_name(name), jobs=1, hook=hook)


if __name__ == "__main__":
    main()
