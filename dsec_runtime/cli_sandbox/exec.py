"""`dsec sandbox exec` and `shell`: a command in a sandbox, as if it ran here."""

from __future__ import annotations

import os
import secrets
from typing import Annotated, Any

import typer

from dsec_runtime.cli_sandbox.common import Answer, SandboxArgument, client, seconds
from dsecfs.cli.lazy import command_settings
from dsecfs.cli.output import note, print_json
from dsecfs.cli.parse import pairs
from dsecfs.cli.session import session
from dsecfs.errors import BadInput

TIMED_OUT = 124
"""Exit code when --timeout ended the command, as of timeout(1)."""
PLATFORM = 125
"""Exit code when nothing is known about the command's end: it says nothing about the command."""
READER_GONE = 141
"""128 + SIGPIPE, as of all of dsec."""
SHELL = 'exec "${SHELL:-$(command -v bash || command -v sh || echo /bin/sh)}"'
"""Run by the sandbox's shell: the one that the image names, else the best there is."""

EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="VAR=VALUE", help="Set a variable."),
]
WorkdirOption = Annotated[
    str, typer.Option("--workdir", "-w", metavar="DIR", help="Where it starts.")
]
UserOption = Annotated[
    str, typer.Option("--user", "-u", metavar="USER", help="NAME or UID, with :GROUP or :GID.")
]


@command_settings(context_settings={"allow_interspersed_args": False})
def exec_(
    sandbox: SandboxArgument,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The command.")
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Pass standard input on.")
    ] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal.")] = False,
    variables: EnvOption = None,
    workdir: WorkdirOption = "",
    user: UserOption = "",
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="End it after so long, e.g. 90s or 2h.")
    ] = "",
    in_session: Annotated[
        str,
        typer.Option(
            "--session", "-s", metavar="NAME", help="In this shell, which keeps its state."
        ),
    ] = "",
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print its id, and leave it running.")
    ] = False,
) -> None:
    """Run a command in a sandbox. Options stand before SANDBOX; what follows is the command.

    The exit code is the command's; 124 after --timeout, 125 if its end is not known or the
    sandbox is lost, 126 if it cannot be executed, 127 if there is none of that name. ^C
    interrupts the command, a second ^C kills it.
    """
    words = list(command or ())
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise BadInput("no command", hint="expected dsec sandbox exec SANDBOX -- COMMAND...")
    if detach and (interactive or tty):
        raise BadInput("--detach with -i or -t", hint="a command that is left has no terminal")
    spec = _spec(words, variables, workdir, user)
    if timeout:
        spec["timeout_s"] = seconds(timeout, "--timeout")
    if in_session:
        import shlex

        spec["session"] = in_session
        spec["command"] = words[0] if len(words) == 1 else shlex.join(words)
    if detach:
        from dsec_runtime.edge.client import sandbox_path

        started = client().post(sandbox_path(sandbox, "execs"), spec)
        if session().json:
            print_json(started)
        else:
            print(started["id"])
        return
    _attach(sandbox, spec, interactive, tty)


def shell(
    sandbox: SandboxArgument,
    variables: EnvOption = None,
    workdir: WorkdirOption = "",
    user: UserOption = "",
) -> None:
    """Open the sandbox's shell on this terminal, or feed it a script on standard input."""
    from dsec_runtime.cli_sandbox.attach import on_terminal

    _attach(sandbox, _spec(SHELL, variables, workdir, user), True, on_terminal())


def _spec(
    command: list[str] | str, variables: list[str] | None, workdir: str, user: str
) -> Answer:
    given: dict[str, Any] = {
        "command": command,
        "variables": pairs(variables, "--env"),
        "cwd": workdir,
        "user": user,
    }
    # With a key the start can be repeated when the edge goes away just then.
    return {k: v for k, v in given.items() if v} | {"key": secrets.token_hex(16)}


def _attach(sandbox: str, spec: Answer, interactive: bool, tty: bool) -> None:
    """Run it here, and end as it ended."""
    from dsec_runtime.cli_sandbox.attach import Attached, on_terminal, terminal_size

    terminal = tty and interactive
    if terminal and not on_terminal():
        raise BadInput("-t: standard input is no terminal", hint="leave -t out")
    if tty:
        rows, columns = terminal_size()
        variables = {"TERM": os.environ.get("TERM", "xterm"), **spec.get("variables", {})}
        spec |= {"tty": True, "rows": rows, "columns": columns, "variables": variables}
    edge = client()
    edge.get("/healthz")
    attached = Attached(edge, sandbox, stdin=interactive, terminal=terminal)
    try:
        result = attached.run(spec | {"stdin": interactive})
    except BrokenPipeError:
        # Typer would make 1 of it. Nothing more can be written: not at the exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(READER_GONE) from None
    if result["message"] and result["outcome"] != "signal":
        note(f"{sandbox}: {result['message']}")
    raise typer.Exit(exit_code(result))


def exit_code(result: Answer) -> int:
    """Of `exec`, from an `ExecResult`."""
    if result["outcome"] == "timeout":
        return TIMED_OUT
    return PLATFORM if result["code"] is None else int(result["code"])
