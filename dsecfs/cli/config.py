"""`dsec config` and `dsec version`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dsecfs.cli.lazy import group
from dsecfs.cli.output import show_record, show_rows
from dsecfs.cli.session import session
from dsecfs.settings import SPECS, shown

app = group()


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="Only this setting.", metavar="NAME")] = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Also where a value comes from.")
    ] = False,
    describe: Annotated[bool, typer.Option("--describe", help="Also what it is for.")] = False,
) -> None:
    """Show the settings in force."""
    from dsecfs.errors import NotFound

    loaded = session().loaded
    if name is not None and name not in SPECS:
        raise NotFound(f"no setting {name[:60]!r}", hint="dsec config show lists them")
    rows: list[dict[str, Any]] = []
    for key, spec in SPECS.items():
        if name is not None and key != name:
            continue
        value = getattr(loaded.settings, key)
        rows.append(
            {
                "name": key,
                "value": value if isinstance(value, int | float) else shown(value),
                "unit": spec.unit,
                "changes": "hot" if spec.hot else "cold",
                "origin": loaded.origins[key],
                "help": spec.help,
            }
        )
    if not session().as_json:
        for row in rows:
            row["value"] = _text(row["value"], row["unit"])
    columns = {"name": "setting", "value": "value"}
    if origin:
        columns |= {"origin": "from", "changes": "takes effect"}
    if describe:
        columns |= {"help": "what it is for"}
    show_rows(rows, columns, form={"changes": _effect})


def _text(value: Any, unit: str) -> str:
    """A value as one could write it into the file."""
    if not unit.startswith("bytes"):
        return f"{value:g}s" if unit == "seconds" else shown(value)
    for factor, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value and value % factor == 0:
            return f"{value // factor}{name}"
    return str(value)


def _effect(changes: object) -> str:
    return "at once" if changes == "hot" else "when dsec fs starts"


def version() -> None:
    """What this is and what it uses."""
    import os
    import platform
    from importlib import metadata

    from dsecfs import __version__

    libraries = {}
    for library in ("pyfuse3", "trio", "lz4", "zstandard", "xxhash", "boto3", "obstore", "typer"):
        try:
            libraries[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            libraries[library] = "missing"
    show_record(
        {
            "dsec": __version__,
            "python": platform.python_version(),
            "kernel": os.uname().release,
            "libraries": libraries,
        }
    )
