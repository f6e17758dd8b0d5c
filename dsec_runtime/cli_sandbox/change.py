"""`dsec sandbox pause|resume|stop|rm|network|lifetime`: what changes a sandbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from dsec_runtime.cli_sandbox.common import (
    Answer,
    SandboxArgument,
    SandboxArguments,
    client,
    rules_text,
    seconds,
    span_text,
)
from dsec_runtime.cli_sandbox.rules import network as read_rules
from dsec_runtime.edge.client import EdgeClient, sandbox_path
from dsecfs.cli.output import note, print_json, show_record
from dsecfs.cli.session import session
from dsecfs.errors import DsecfsError

STOP_S = 300.0
"""Longest wait for a stop, pause or resume: others may have to end theirs first."""


def pause(sandboxes: SandboxArguments) -> None:
    """Freeze sandboxes. What runs in them stands still; the next request resumes them."""
    _each(sandboxes, lambda edge, path: edge.post(f"{path}/pause", wait_s=STOP_S))


def resume(sandboxes: SandboxArguments) -> None:
    """Let paused sandboxes go on."""
    _each(sandboxes, lambda edge, path: edge.post(f"{path}/resume", wait_s=STOP_S))


def stop(sandboxes: SandboxArguments) -> None:
    """End sandboxes, whatever they do. For a day, why and logs still answer; rm forgets them."""
    _each(sandboxes, lambda edge, path: edge.post(f"{path}/stop", wait_s=STOP_S))


def rm(sandboxes: SandboxArguments) -> None:
    """End sandboxes and forget them, with all that their commands printed."""
    _each(sandboxes, lambda edge, path: edge.delete(path, wait_s=STOP_S))


def _each(sandboxes: list[str], change: Callable[[EdgeClient, str], Any]) -> None:
    """Change each; one that fails does not keep the others. The last error is raised."""
    edge = client()
    done: list[Answer] = []
    failed: DsecfsError | None = None
    for sandbox in sandboxes:
        try:
            answer = change(edge, sandbox_path(sandbox))
        except DsecfsError as e:
            if failed is not None:
                note(str(failed))
            failed = e
            continue
        done.append(answer or {"id": sandbox, "state": "removed"})
        if not session().as_json:
            print(f"{sandbox}  {done[-1]['state']}")
    if session().as_json:
        print_json(done)
    if failed is not None:
        raise failed


def network(
    sandbox: SandboxArgument,
    rules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RULES]...",
            help="pypi,npm, example.org:443, 192.0.2.0/24, internet; none for nothing.",
        ),
    ] = None,
) -> None:
    """Show what a sandbox may reach, or replace all of it in one step."""
    edge, path = client(), sandbox_path(sandbox)
    found = edge.put(f"{path}/network", read_rules(rules)) if rules else edge.get(path)
    if session().as_json:
        print_json(found["network"])
        return
    print("\n".join(rules_text(found["network"])) or "nothing")


def lifetime(
    sandbox: SandboxArgument,
    idle_timeout: Annotated[
        str, typer.Option(metavar="TIME", help='It may idle so long, e.g. 10m; "never".')
    ] = "",
    max_lifetime: Annotated[
        str, typer.Option(metavar="TIME", help='It lives so long at most, e.g. 8h; "never".')
    ] = "",
    then: Annotated[
        str, typer.Option(metavar="WHAT", help="What happens then: stop or pause.")
    ] = "",
    archive_after: Annotated[
        str, typer.Option(metavar="TIME", help='Paused so long, it is archived; "never".')
    ] = "",
    keep_on_failure: Annotated[
        bool | None,
        typer.Option(
            "--keep-on-failure/--drop-on-failure", help="Whether its files stay if it fails."
        ),
    ] = None,
) -> None:
    """Show or change when a sandbox ends by itself. Its idle time starts again with a change."""
    edge, path = client(), sandbox_path(sandbox)
    found = edge.get(path)
    wanted = dict(found["lifetime"])
    for key, text in (
        ("idle_timeout_s", idle_timeout),
        ("max_lifetime_s", max_lifetime),
        ("archive_after_s", archive_after),
    ):
        if text:
            option = f"--{key.removesuffix('_s').replace('_', '-')}"
            wanted[key] = None if text == "never" else seconds(text, option)
    if then:
        wanted["then"] = then
    if keep_on_failure is not None:
        wanted["keep_on_failure"] = keep_on_failure
    if wanted != found["lifetime"]:
        found = edge.put(f"{path}/lifetime", wanted)
    if session().as_json:
        print_json(found["lifetime"])
        return
    show_record(
        {key.removesuffix("_s"): _length(value) for key, value in found["lifetime"].items()}
    )


def _length(value: object) -> str | bool:
    if value is None:
        return "never"
    return value if isinstance(value, bool | str) else span_text(float(str(value)))
