"""`dsec sandbox ls|show|events`: what there is and what happened."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from dsec_runtime.cli_sandbox.common import (
    Answer,
    SandboxArgument,
    client,
    environment_text,
    mib_text,
    moment,
    rules_text,
    since,
    span_text,
)
from dsec_runtime.cli_sandbox.logs import command_text
from dsec_runtime.edge.client import EdgeClient, sandbox_path
from dsecfs.cli.complete import complete_sandbox
from dsecfs.cli.output import clean, print_json, show_record, show_rows, time_text
from dsecfs.cli.session import session

PAGE = 1000


def ls(
    ended: Annotated[
        bool, typer.Option("--all", "-a", help="Also those that ended within a day.")
    ] = False,
    state: Annotated[
        list[str] | None, typer.Option(metavar="STATE", help="Only those: running, paused …")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY[=VALUE]", help="Only those with it.")
    ] = None,
    job: Annotated[str, typer.Option(help="Only those of a job.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids only, a line each.")] = False,
) -> None:
    """List the sandboxes of the node."""
    query = {"ended": str(ended).lower(), "state": state, "label": label, "job": job or None}
    found = all_sandboxes(client(), query)
    if quiet:
        for sandbox in found:
            print(sandbox["id"])
        return
    found.sort(key=lambda sandbox: sandbox["created_at"])
    if session().as_json:
        print_json(found)
        return
    rows = [
        {
            "id": sandbox["id"],
            "name": sandbox["name"],
            "state": sandbox["state"],
            "environment": environment_text(sandbox),
            "age": since(sandbox["created_at"]),
            "idle": since(sandbox["idle_since"]) if sandbox["state"] == "running" else "",
            "memory": mib_text(sandbox["limits"]["memory_mb"]),
            "cpus": sandbox["limits"]["cpus"],
        }
        for sandbox in found
    ]
    columns = {key: key for key in ("id", "name", "state", "environment", "age", "idle")}
    columns |= {"memory": "memory limit", "cpus": "cpus"}
    show_rows(rows, columns, empty="no sandboxes")


def all_sandboxes(edge: EdgeClient, query: dict[str, Any]) -> list[Answer]:
    """Every page of a list."""
    found: list[Answer] = []
    after: str | None = ""
    while after is not None:
        page = edge.get("/v1/sandboxes", {**query, "limit": PAGE, "after": after})
        found.extend(page["sandboxes"])
        after = page["next"]
    return found


def show(sandbox: SandboxArgument) -> None:
    """Show all about a sandbox, and its last commands."""
    edge, path = client(), sandbox_path(sandbox)
    found = edge.get(path)
    execs = edge.get(f"{path}/execs")["execs"]
    if session().as_json:
        print_json({**found, "execs": execs})
        return
    limits, life, why = found["limits"], found["lifetime"], found["why"]
    idle, lives = life["idle_timeout_s"], life["max_lifetime_s"]
    show_record(
        {
            "id": found["id"],
            "name": found["name"],
            "state": found["state"],
            "because": f"{why['cause']} {why['message']}".strip(),
            "environment": environment_text(found),
            "digest": found["environment"],
            "backend": found["backend"],
            "user": found["user"],
            "job": found["job"],
            "labels": found["labels"],
            "created": moment(found["created_at"]),
            "paused": moment(found["paused_at"]),
            "ended": moment(found["ended_at"]),
            "idle_since": moment(found["idle_since"]),
            "ends": f"{time_text(found['ends_at'])} ({life['then']})" if found["ends_at"] else "",
            "idle_timeout": "never" if idle is None else span_text(idle),
            "max_lifetime": "none" if lives is None else span_text(lives),
            "memory": mib_text(limits["memory_mb"]),
            "cpus": limits["cpus"],
            "processes": limits["pids"],
            "disk": mib_text(limits["disk_mb"]),
            "open_files": limits["open_files"],
            "network": rules_text(found["network"]) or "nothing",
            "commands": [
                f"{e['id']}  {'running' if e['running'] else 'ended'}  {command_text(e)}"
                for e in execs[-10:]
            ],
        }
    )


def events(
    sandbox: Annotated[
        str,
        typer.Argument(
            help="Only its events.", metavar="[SANDBOX]", autocompletion=complete_sandbox
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="And what comes.")] = False,
    after: Annotated[
        int, typer.Option(metavar="NUMBER", help="Only those after this one.", min=0)
    ] = 0,
) -> None:
    """What happened to a sandbox, or to all: a line each, oldest first."""
    edge = client()
    if sandbox:
        sandbox_path(sandbox)  # BadInput
    query: dict[str, Any] = {"sandbox": sandbox or None, "after": after}
    if follow:
        with edge.stream("GET", "/v1/events", {**query, "follow": "yes"}) as answer:
            for event in edge.lines(answer):
                _print(event)
        return
    while True:
        page = edge.get("/v1/events", {**query, "limit": PAGE})
        for event in page["events"]:
            _print(event)
        if len(page["events"]) < PAGE:
            return
        query["after"] = page["next"]


def _print(event: Answer) -> None:
    if session().as_json:
        sys.stdout.write(json.dumps(event) + "\n")
    else:
        said = {k: v for k, v in event["data"].items() if v not in (None, "", {}, [])}
        data = " ".join(f"{clean(str(k))}={clean(str(v))}" for k, v in said.items())
        line = f"{time_text(event['at'])}  {event['sandbox']}  {clean(event['kind']):<9}  {data}"
        print(line.rstrip())
    sys.stdout.flush()
