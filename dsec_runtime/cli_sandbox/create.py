"""`dsec sandbox create`."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import typer

from dsec_runtime.cli_sandbox.common import client, mib, seconds
from dsec_runtime.cli_sandbox.rules import mount, network
from dsecfs.cli.complete import complete_env, complete_toolkit
from dsecfs.cli.output import print_json
from dsecfs.cli.parse import only_toolkits, pairs
from dsecfs.cli.session import session

MAKING_S = 3600.0
"""Longest wait for a sandbox: its layers' heads may come from far away, and creates queue."""
AGAIN_S = 60.0
"""How long a create is repeated, by its key, while the edge is being restarted."""


def create(
    env: Annotated[
        str,
        typer.Argument(help="Environment or base.", metavar="ENV", autocompletion=complete_env),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Toolkits on top of it.", metavar="[+TOOLKIT]...", autocompletion=complete_toolkit
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="A name to call it by.")] = "",
    variables: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="VAR=VALUE", help="Set a variable for its commands."),
    ] = None,
    workdir: Annotated[
        str, typer.Option("--workdir", "-w", metavar="DIR", help="Where its commands start.")
    ] = "",
    user: Annotated[
        str,
        typer.Option(
            "--user", "-u", metavar="USER", help="NAME or UID; a name that is missing is made."
        ),
    ] = "",
    hostname: Annotated[str, typer.Option(metavar="NAME", help="Its host name.")] = "",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Most memory, e.g. 2GiB.")] = "",
    cpus: Annotated[
        float, typer.Option(metavar="N", help="Most CPUs, e.g. 1.5.", show_default=False)
    ] = 0.0,
    pids: Annotated[
        int, typer.Option(metavar="N", help="Most processes and threads.", show_default=False)
    ] = 0,
    disk: Annotated[str, typer.Option(metavar="SIZE", help="Most it may write.")] = "",
    memory_request: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory that the node counts for it.")
    ] = "",
    cpu_request: Annotated[
        float | None, typer.Option(metavar="N", help="CPUs that the node counts for it.")
    ] = None,
    idle_timeout: Annotated[
        str, typer.Option(metavar="TIME", help='It may idle so long, e.g. 10m; "never".')
    ] = "",
    max_lifetime: Annotated[
        str, typer.Option(metavar="TIME", help="It lives so long at most, e.g. 8h.")
    ] = "",
    then: Annotated[
        str, typer.Option(metavar="WHAT", help="What happens then: stop or pause.")
    ] = "",
    keep_on_failure: Annotated[
        bool, typer.Option("--keep-on-failure", help="If it fails its files stay until rm.")
    ] = False,
    net: Annotated[
        list[str] | None,
        typer.Option(
            "--network",
            metavar="WORDS",
            help="What it may reach: pypi,npm, example.org:443, 192.0.2.0/24, internet.",
        ),
    ] = None,
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="MOUNT", help="E.g. layer=data/x:1,at=/data."),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Label it.")
    ] = None,
    job: Annotated[str, typer.Option(help="The job it belongs to.")] = "",
    key: Annotated[
        str, typer.Option(help="A second create with the same key gives the same sandbox.")
    ] = "",
    entrypoint: Annotated[
        bool, typer.Option("--entrypoint", help="Run the image's own command in it.")
    ] = False,
    ready: Annotated[
        str, typer.Option(metavar="COMMAND", help="It is ready when this exits with 0.")
    ] = "",
    platform: Annotated[str, typer.Option(help="Platform.")] = "",
    backend: Annotated[str, typer.Option(help="Kind of sandbox.")] = "container",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it is ready to work in.")
    ] = True,
) -> None:
    """Make a sandbox from an environment. Prints its id; with --json all about it."""
    spec = _without_nothing(
        {
            "environment": env,
            "toolkits": only_toolkits(words),
            "backend": backend,
            "platform": platform,
            "name": name,
            "labels": pairs(label, "--label"),
            "job": job,
            "key": key or secrets.token_hex(16),
            "variables": pairs(variables, "--env"),
            "cwd": workdir,
            "user": user,
            "hostname": hostname,
            "mounts": [mount(text) for text in mounts or ()],
            "entrypoint": entrypoint,
            "ready_cmd": ready,
            "memory_request_mb": mib(memory_request, "--memory-request") if memory_request else 0,
            "limits": {
                "memory_mb": mib(memory, "--memory") if memory else 0,
                "cpus": cpus,
                "pids": pids,
                "disk_mb": mib(disk, "--disk") if disk else 0,
            },
            "network": network(net) if net else {},
            "lifetime": {
                "max_lifetime_s": seconds(max_lifetime, "--max-lifetime") if max_lifetime else 0,
                "then": then,
                "keep_on_failure": keep_on_failure,
            },
        }
    )
    if idle_timeout:
        never = idle_timeout == "never"
        length = None if never else seconds(idle_timeout, "--idle-timeout")
        spec.setdefault("lifetime", {})["idle_timeout_s"] = length
    if cpu_request is not None:
        spec["cpu_request"] = cpu_request
    query = None if wait else {"wait": "false"}
    edge = client()
    edge.get("/healthz")  # none there is told at once; one that goes away later is waited for
    made = edge.post("/v1/sandboxes", spec, query, wait_s=MAKING_S, again_s=AGAIN_S)
    if session().json:
        print_json(made)
    else:
        print(made["id"])


def _without_nothing(value: dict[str, Any]) -> dict[str, Any]:
    """Without what was not said: the API's defaults hold there."""
    inner = {k: _without_nothing(v) if isinstance(v, dict) else v for k, v in value.items()}
    return {k: v for k, v in inner.items() if v or (isinstance(v, bool) and k == "internet")}
