"""`dsec sandbox logs`: what a command printed, while it runs and after its end."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec_runtime.cli_sandbox.attach import follow, write_all
from dsec_runtime.cli_sandbox.common import Answer, SandboxArgument, client, since
from dsec_runtime.edge.client import STDERR, STDOUT, EdgeClient, sandbox_path
from dsec_runtime.errors import NoSuchSandbox
from dsecfs.cli.output import clean, note, show_rows
from dsecfs.errors import BadInput


def logs(
    sandbox: SandboxArgument,
    exec_: Annotated[
        str, typer.Argument(metavar="[EXEC]", help="Id of a command; the last one without it.")
    ] = "",
    follow_: Annotated[
        bool, typer.Option("--follow", "-f", help="And what comes, until its end.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", "-l", help="List the commands instead.")
    ] = False,
) -> None:
    """Print what a command in a sandbox wrote, to standard output and error as it did."""
    edge = client()
    execs = edge.get(sandbox_path(sandbox, "execs"))["execs"]
    if list_:
        show_execs(execs)
        return
    found = _find(sandbox, execs, exec_)
    if not exec_:
        note(f"command {found['id']}: {command_text(found)}")
    print_output(edge, found, live=follow_)


def _find(sandbox: str, execs: list[Answer], text: str) -> Answer:
    """The command with this id or start of an id; the last one that began without."""
    found = [e for e in execs if e["id"] == text] or [e for e in execs if e["id"].startswith(text)]
    if not found:
        hint = f"dsec sandbox logs --list {sandbox} lists them"
        if not text:
            raise NoSuchSandbox(f"sandbox {sandbox}: no command was run in it")
        raise NoSuchSandbox(f"sandbox {sandbox}: no command {text[:40]!r}", hint=hint)
    if text and len(found) > 1:
        raise BadInput(
            f"command {text[:40]!r} can be any of {len(found)}",
            hint="use an id: " + ", ".join(e["id"] for e in found[:5]),
        )
    return found[-1]


def print_output(edge: EdgeClient, exec_: Answer, *, live: bool) -> None:
    """What is kept of a command's output; with `live` what comes, too."""
    path = sandbox_path(exec_["sandbox"], "execs", exec_["id"], "output")
    with follow(edge, path, {STDOUT: 0, STDERR: 0}, live=live) as frames:
        for stream, _, data in frames:
            write_all(stream, data)


def show_execs(execs: list[Answer]) -> None:
    """A list of commands, the newest last."""
    rows = [
        {**e, "state": "running" if e["running"] else "ended", "age": since(e["started_at"])}
        for e in execs
    ]
    columns = {"id": "id", "state": "state", "age": "age", "label": "label", "command": "command"}
    show_rows(rows, columns, empty="no commands", form={"command": _words})


def command_text(exec_: Answer) -> str:
    """The command as it was given, in one line."""
    return _words(exec_["command"])


def _words(command: str | list[str]) -> str:
    import shlex

    text = command if isinstance(command, str) else shlex.join(command)
    text = clean(" ".join(text.split()))
    return text if len(text) <= 120 else f"{text[:119]}…"
