"""Results of benchmarks: one JSON file, and the table in docs/benchmarks.md made from it.

What must hold: a figure is only ever written by the benchmark that measured it; both sides
of a ratio come from the same run on the same machine.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS / "benchmarks.json"
PAGE = DOCS / "benchmarks.md"
_BEGIN, _END = "<!-- results -->", "<!-- end of results -->"


@dataclass
class Result:
    """One row of the table."""

    name: str
    """Short and stable: the row that a later run replaces."""
    what: str
    against: str
    goal: str
    measured: str
    """The ratio that the goal speaks of, in words that fit a table cell."""
    met: bool
    figures: dict[str, object] = field(default_factory=dict)
    """Everything measured, with units in the names (first_output_s, wire_bytes)."""
    note: str = ""
    """Why a goal is missed, or what to know when reading the figure."""
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    machine: str = field(
        default_factory=lambda: f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}"
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median, p90, p99 and maximum of a sample, to five digits."""
    ordered = sorted(float(f"{value:.5g}") for value in values)

    def at(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    return {
        "n": len(ordered),
        "min": ordered[0],
        "median": statistics.median(ordered),
        "p90": at(0.9),
        "p99": at(0.99),
        "max": ordered[-1],
    }


def record(result: Result) -> None:
    """Put a result in the JSON file in place of its older self, and print it."""
    rows: dict[str, dict[str, object]] = {}
    if RESULTS.exists():
        rows = json.loads(RESULTS.read_text())
    rows[result.name] = asdict(result)
    RESULTS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    print(
        f"{result.name}: {result.measured} (goal {result.goal}):"
        f" {'met' if result.met else 'MISSED'}"
    )
    for key, value in result.figures.items():
        print(f"    {key}: {value}")
    render()


def render() -> None:
    """Write the table of all results into docs/benchmarks.md."""
    rows = json.loads(RESULTS.read_text())
    lines = [
        _BEGIN,
        "",
        "| what | against | goal | measured | |",
        "|---|---|---|---|---|",
    ]
    for row in rows.values():
        mark = "met" if row["met"] else "**missed**"
        lines.append(
            f"| {row['what']} | {row['against']} | {row['goal']} | {row['measured']} | {mark} |"
        )
    notes = [f"- **{row['what']}**: {row['note']}" for row in rows.values() if row["note"]]
    if notes:
        lines += ["", "Notes:", "", *notes]
    lines += ["", _END]
    text = PAGE.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(before + "\n".join(lines) + after)
