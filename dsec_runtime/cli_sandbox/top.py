"""`dsec sandbox top`: what sandboxes use now, again and again."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from dsec_runtime.cli_sandbox.common import Answer, bytes_text, client, seconds
from dsec_runtime.cli_sandbox.look import all_sandboxes
from dsec_runtime.edge.client import EdgeClient, sandbox_path
from dsec_runtime.errors import NoSuchSandbox, WrongState
from dsecfs.cli.complete import complete_sandbox
from dsecfs.cli.output import show_rows
from dsecfs.cli.session import session

FIRST_S = 0.5
"""Between the two samples from which the first CPU share is made."""
COLUMNS = {
    "id": "id",
    "name": "name",
    "state": "state",
    "cpu_percent": "cpu %",
    "memory": "memory",
    "disk": "disk",
    "pids": "processes",
    "execs": "commands",
    "network_denied": "denied",
}


def top(
    sandboxes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Only these.", metavar="[SANDBOX]...", autocompletion=complete_sandbox
        ),
    ] = None,
    interval: Annotated[str, typer.Option(metavar="TIME", help="Time between looks.")] = "2s",
    once: Annotated[
        bool, typer.Option("--once", help="Look once; always so unless on a terminal.")
    ] = False,
) -> None:
    """Show what sandboxes use now: the busiest first, until ^C."""
    edge = client()
    pause = max(0.2, seconds(interval, "--interval"))
    before = sample(edge, sandboxes or ())
    time.sleep(FIRST_S)
    live = not once and not session().as_json and sys.stdout.isatty()
    while True:
        now = sample(edge, sandboxes or ())
        rows = compare(before, now)
        if live:
            print("\x1b[H\x1b[J", end="")  # to the top left, and clear
        show_rows(
            rows,
            COLUMNS,
            empty="no sandboxes",
            form={"cpu_percent": lambda value: f"{value:.0f}"},
        )
        if not live:
            return
        before = now
        try:
            time.sleep(pause)
        except KeyboardInterrupt:
            return


def sample(edge: EdgeClient, wanted: list[str] | tuple[str, ...]) -> dict[str, Answer]:
    """Sandboxes that live, each with its stats and the time they were taken."""
    if wanted:
        found = [edge.get(sandbox_path(sandbox)) for sandbox in wanted]
    else:
        found = all_sandboxes(edge, {"state": ["running", "paused"]})
    sampled = {}
    for sandbox in found:
        try:
            stats = edge.get(sandbox_path(sandbox["id"], "stats"))
        except (NoSuchSandbox, WrongState):
            if wanted:
                raise
            continue  # it ended meanwhile
        sampled[sandbox["id"]] = {**sandbox, "stats": stats, "at": time.monotonic()}
    return sampled


def compare(before: dict[str, Answer], now: dict[str, Answer]) -> list[dict[str, Any]]:
    """Rows, the busiest first. A CPU share is of one CPU: 150 is one and a half."""
    rows = []
    for id, sandbox in now.items():
        stats, earlier = sandbox["stats"], before.get(id)
        share = 0.0
        if earlier is not None and sandbox["at"] > earlier["at"]:
            used = stats["cpu_s"] - earlier["stats"]["cpu_s"]
            share = max(0.0, 100 * used / (sandbox["at"] - earlier["at"]))
        rows.append(
            {
                "id": id,
                "name": sandbox["name"],
                "state": sandbox["state"],
                "cpu_percent": round(share, 1),
                "memory": _of(stats["memory_bytes"], stats["memory_limit_bytes"]),
                "disk": _of(stats["disk_bytes"], stats["disk_limit_bytes"]),
                **stats,
            }
        )
    return sorted(rows, key=lambda row: (-row["cpu_percent"], -row["memory_bytes"]))


def _of(used: int, limit: int) -> str:
    return f"{bytes_text(used)} / {bytes_text(limit)}"
