"""`python -m dsec_runtime.edge [--ready FD] [NAME=VALUE]...`: the process of `dsec node start`.

Settings come from where commands get them; NAME=VALUE are those of the command line. FD is a
descriptor that gets the line "ready" when the edge answers. Why it ended is the last line of
standard error, which is run/edge.log; the exit code is that of the error.
"""

from __future__ import annotations

import argparse
import logging
import sys

from dsecfs.errors import BadInput, DsecfsError
from dsecfs.node import Node
from dsecfs.settings import load

log = logging.getLogger("dsec_runtime.edge")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dsec_runtime.edge", description=__doc__)
    parser.add_argument("--ready", type=int, metavar="FD")
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE")
    given = parser.parse_args(arguments)
    start_log()
    try:
        node = Node(load([_option(text) for text in given.options]).settings)
        run(node, given.ready)
    except DsecfsError as e:
        log.error("ended: %s", e)
        return e.exit_code
    except OSError as e:
        log.error("ended: %s", e)
        return 1
    return 0


def _option(text: str) -> tuple[str, str]:
    name, sep, value = text.partition("=")
    if not sep:
        raise BadInput(f"{text[:80]!r} is not NAME=VALUE")
    return name, value


def start_log() -> None:
    """Everything goes to standard error, a line each."""
    logging.basicConfig(
        format="%(asctime)s edge[%(process)d] %(levelname)s %(message)s", level=logging.INFO
    )


def run(node: Node, ready: int | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then let go of what the node has open."""
    from dsec_runtime.edge.service import serve

    try:
        log.info("starts: data %s, run %s", node.dirs.data, node.dirs.run)
        serve(node, ready)
        log.info("ended: asked")
    finally:
        node.close()


if __name__ == "__main__":
    sys.exit(main())
