"""How results are printed: tables on a terminal, JSON in a pipe or with --json.

Results go to standard output, everything else (notes, progress, errors) to standard error.
Text from outside (file names, labels) is printed without control characters.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dsecfs.cli.session import session
from dsecfs.layers.progress import SILENT, Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from dsecfs.kernel.probe import Mode

Value = str | int | float | bool | None | Sequence[Any] | Mapping[str, Any]


def clean(text: str) -> str:
    """Without characters that would act on a terminal or end the line."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def path_text(path: bytes) -> str:
    """A path in a layer, for people and for JSON (bytes that are no UTF-8 as \\xNN)."""
    return path.decode("utf-8", "backslashreplace")


def size_text(count: int) -> str:
    """Bytes for people: "4.2 MB". Powers of 1000, as disks and networks are sold."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def time_text(seconds: float) -> str:
    """A point in time for people, in local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def short(digest: str) -> str:
    """A digest for people: enough of it to tell it from others."""
    return f"sha256:{digest[:12]}"


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=True, default=str)
    sys.stdout.write("\n")


def show_rows(
    rows: Sequence[Mapping[str, Value]],
    columns: Mapping[str, str],
    *,
    empty: str = "nothing",
    form: Mapping[str, Any] | None = None,
) -> None:
    """A list. `columns` maps keys of a row to headings; JSON has all keys.

    `form` maps keys to functions that write a value for people (size_text, time_text).
    """
    if session().as_json:
        print_json([dict(row) for row in rows])
        return
    if not rows:
        print(empty)
        return
    from rich.cells import cell_len
    from rich.table import Table

    form = form or {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    written: list[list[str]] = []
    for key, heading in columns.items():
        cells = [_cell(row.get(key), form.get(key)) for row in rows]
        number = all(isinstance(row.get(key), int | float) for row in rows)
        whole = not any(_is_text(cell) for cell in cells)
        table.add_column(
            heading,
            justify="right" if number else "left",
            overflow="fold",
            min_width=max(map(cell_len, (heading, *cells))) if whole else None,
        )
        written.append(cells)
    for row_cells in zip(*written, strict=True):
        table.add_row(*row_cells)
    console = _console()
    # A name in two lines can be neither read nor copied: rather, the terminal breaks the line.
    needed = table.__rich_measure__(console, console.options.update(width=10_000)).minimum
    console.width = max(console.width, needed)
    with console.capture() as shown:
        console.print(table)
    for line in shown.get().splitlines():
        print(line.rstrip())


def show_record(
    record: Mapping[str, Value],
    *,
    form: Mapping[str, Any] | None = None,
    hide: Sequence[str] = (),
) -> None:
    """One thing: a line for each key. `hide` are keys that only JSON has."""
    if session().as_json:
        print_json(dict(record))
        return
    form = form or {}
    width = max((len(key) for key in record if key not in hide), default=0)
    for key, value in record.items():
        if key in hide or (not value and not isinstance(value, int | float)):
            continue
        lines = (
            [_cell(v, form.get(key)) for v in value]
            if isinstance(value, list | tuple)
            else [_cell(value, form.get(key))]
        )
        for number, line in enumerate(lines):
            print(f"{key.replace('_', ' ') if number == 0 else '':<{width}}  {line}")


def note(text: str) -> None:
    """Tell people something that is no result."""
    print(f"dsec: {clean(text)}", file=sys.stderr)


def mode_in_use() -> tuple[Mode, str]:
    """How layers are mounted, and why so. When nobody asked for less than the best and it is
    less, people are told: nothing falls back silently."""
    mode, why = session().node.mode()
    if mode != "kernel" and session().settings.mode == "auto":
        note(f"{mode} mode: {why}")
    return mode, why


def _is_text(cell: str) -> bool:
    """Whether a cell holds words that may be broken into lines: no name, digest or time."""
    return len(cell) > 30 and " " in cell


def _cell(value: Value, form: Any) -> str:
    if value is None or value == "":
        return ""
    if form is not None:
        return str(form(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{clean(str(k))}={clean(str(v))}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(clean(str(v)) for v in value)
    return clean(str(value))


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # In a pipe a line is as long as it needs to be: whoever reads it looks for whole names.
    width = None if stream.isatty() else 400
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


class _Bars:
    """`Progress` as bars of rich; a task is a bar."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def start(self, task: str, total: int | None) -> None:
        self._tasks[task] = self._bars.add_task(clean(task), total=total)

    def advance(self, task: str, amount: int) -> None:
        if task in self._tasks:
            self._bars.advance(self._tasks[task], amount)

    def finish(self, task: str) -> None:
        if (number := self._tasks.pop(task, None)) is not None:
            self._bars.remove_task(number)


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress bars on standard error while the block runs; nothing unless it is a terminal."""
    if not sys.stderr.isatty():
        yield SILENT
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=_console(stderr=True), transient=True) as bars:
        yield _Bars(bars)
