"""What `dsec env heat` and `dsec env traces` show and do."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsecfs.cli.output import path_text, print_json, show_rows, size_text
from dsecfs.cli.session import session
from dsecfs.errors import BadInput, FormatError, NotFound
from dsecfs.layers.digest import Digest
from dsecfs.layers.heat import Heat
from dsecfs.layers.heatplot import strip
from dsecfs.layers.trace import list_traces, read_trace, save_trace
from dsecfs.store.base import Store, trace_prefix

_SHORTEST = 6
"""Characters of a trace's name that are needed to mean it."""


def show_heat(runs: int, report: Heat, labels: Sequence[str], *, depth: int, files: bool) -> None:
    """The report as tables with a strip for each layer, or as JSON."""
    read_files: list[dict[str, Any]] = [
        {
            "path": "/" + path_text(f.path),
            "layer": labels[f.layer],
            "read": f.read,
            "size": f.size,
        }
        for f in report.files
    ]
    layers: list[dict[str, Any]] = [
        {
            "layer": label,
            "files_read": sum(f.layer == number for f in report.files),
            "files": layer.total_files,
            "bytes_read": sum(f.read for f in report.files if f.layer == number),
            "bytes": layer.total_bytes,
            "chunks_read": layer.chunks,
            "chunks": layer.total_chunks,
        }
        for number, (label, layer) in enumerate(zip(labels, report.layers, strict=True))
    ]
    directories: list[dict[str, Any]] = [
        {"path": "/" + path_text(path), "files": count, "read": read}
        for path, count, read in report.by_directory(depth)
    ]
    if session().as_json:
        print_json(
            {
                "runs": runs,
                "files_read": len(report.files),
                "files": report.total_files,
                "bytes_read": report.read,
                "bytes": report.total_bytes,
                "chunks": report.chunks,
                "chunk_bytes": report.chunk_bytes,
                "layers": layers,
                "directories": directories,
                "read": read_files,
            }
        )
        return
    print(
        f"{runs} {'run' if runs == 1 else 'runs'} read {len(report.files)} of "
        f"{report.total_files} files, {size_text(report.read)} of "
        f"{size_text(report.total_bytes)}, in {report.chunks} chunks of "
        f"{size_text(report.chunk_bytes)} in all\n"
    )
    sizes = {"read": size_text, "size": size_text}
    if files:
        columns = {"path": "in order of first use", "layer": "layer", "read": "read"}
        show_rows(read_files, columns | {"size": "of"}, form=sizes)
        return
    show_rows(
        layers,
        {
            "layer": "layer",
            "files_read": "files read",
            "files": "of",
            "bytes_read": "read",
            "bytes": "of",
            "chunks_read": "chunks",
            "chunks": "of",
        },
        form={"bytes_read": size_text, "bytes": size_text},
    )
    width = shutil.get_terminal_size().columns - 2
    for label, layer in zip(labels, report.layers, strict=True):
        if layer.chunks:
            print(f"\nwhere in {label} (from its first chunk to its last)\n|{strip(layer, width)}|")
    print()
    show_rows(directories, {"path": "directory", "files": "files", "read": "read"}, form=sizes)


def trace_rows(store: Store, env: Digest, kept: Path) -> list[dict[str, Any]]:
    """A row for each trace of an environment, newest first. Damaged ones say so."""
    rows: list[dict[str, Any]] = []
    for stored in list_traces(store, env, kept):
        row: dict[str, Any] = {
            "trace": stored.name,
            "recorded": stored.mtime,
            "files": None,
            "bytes": None,
            "in_store": stored.file is None,
            "damage": "",
        }
        try:
            trace = read_trace(store, env, stored)
        except NotFound:
            continue  # removed since it was listed
        except FormatError as e:
            row["damage"] = e.message
        else:
            row["files"] = len({a.path for a in trace.accesses})
            row["bytes"] = trace.total
        rows.append(row)
    return rows


def push_traces(store: Store, env: Digest, kept: Path) -> None:
    """Store the traces that only this node has, and forget them here."""
    for stored in list_traces(store, env, kept):
        if stored.file is not None:
            save_trace(store, read_trace(store, env, stored))
            stored.file.unlink(missing_ok=True)


def remove_traces(store: Store, env: Digest, kept: Path, name: str) -> None:
    """Remove one trace (the beginning of its name is enough), or "all". NotFound, BadInput."""
    if name != "all" and len(name) < _SHORTEST:
        raise BadInput(f"trace {name!r}", hint=f"give at least {_SHORTEST} characters")
    found = [t for t in list_traces(store, env, kept) if name in ("all", t.name[: len(name)])]
    if not found:
        raise NotFound(f"no trace {name[:64]}", hint="dsec env traces lists them")
    if name != "all" and len(found) > 1:
        raise BadInput(f"trace {name[:64]} is not the only one", hint="give more of its name")
    for stored in found:
        if stored.file is None:
            store.delete(trace_prefix(env) + stored.name)
        (kept / env / stored.name).unlink(missing_ok=True)
