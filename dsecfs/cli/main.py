"""Entry point of `dsec`: the table of commands, and what becomes of errors.

Exit codes: 0, what `DsecfsError.exit_code` says (docs/cli.md has the list), 2 for a command
line that makes no sense, 130 after ^C, and of `dsec run` the program's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer

from dsecfs.cli.lazy import Entry, LazyGroup, common_options, finish
from dsecfs.cli.session import new_session, session
from dsecfs.errors import DsecfsError

RUN, LAYERS, NODE = "Run", "Layers and names", "This machine"

COMMANDS = {
    "run": Entry("dsec_runtime.cli:run", "Run a command in a container.", RUN),
    "sandbox": Entry("dsec_runtime.cli_sandbox:app", "Sandboxes that live and are worked in.", RUN),
    "sb": Entry("dsec_runtime.cli_sandbox:app", "The same as sandbox.", RUN),
    "mount": Entry("dsecfs.cli.mount:mount", "Mount an environment on a directory.", RUN),
    "umount": Entry("dsecfs.cli.mount:umount", "Unmount it.", RUN),
    "unmount": Entry("dsecfs.cli.mount:umount", "The same as umount.", RUN),
    "image": Entry("dsecfs.cli.image:app", "Foreign images become environments.", LAYERS),
    "layer": Entry("dsecfs.cli.layer:app", "Immutable file trees in the store.", LAYERS),
    "env": Entry("dsecfs.cli.env:app", "Compositions of layers.", LAYERS),
    "channel": Entry("dsecfs.cli.channel:app", "Movable, audited names for versions.", LAYERS),
    "store": Entry("dsecfs.cli.store:app", "The store: check, measure, clean up.", LAYERS),
    "node": Entry("dsec_runtime.cli_node:app", "The daemon that owns this node's sandboxes.", NODE),
    "cache": Entry("dsecfs.cli.cache:app", "Data that this node has already.", NODE),
    "fs": Entry("dsecfs.cli.fs:app", "The daemon that serves data on demand.", NODE),
    "doctor": Entry("dsecfs.cli.doctor:doctor", "What it can do, and what is missing.", NODE),
    "config": Entry("dsecfs.cli.config:app", "Settings and where they come from.", NODE),
    "version": Entry("dsecfs.cli.config:version", "What this is and what it uses.", NODE),
}


class _Commands(LazyGroup):
    table = COMMANDS


app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode="rich")


def _print_version(value: bool) -> None:
    if value:
        from dsecfs import __version__

        print(f"dsec {__version__}")
        raise typer.Exit


@app.callback()
def _dsec(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Sandboxes from immutable layers that are fetched on demand."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process."""
    try:
        code = run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 141
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command; its exit code. Errors of the known kinds are printed here."""
    now = new_session()
    command: Any = typer.main.get_command(app)
    finish(command, common_options())
    try:
        with _completing():
            code = command.main(arguments, prog_name="dsec", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Abort:
        return _fail("Interrupted", "interrupted", "", 130)
    except KeyboardInterrupt:
        return _fail("Interrupted", "interrupted", "", 130)
    except DsecfsError as e:
        if now.debug:
            raise
        return _fail(type(e).__name__, e.message, e.hint, e.exit_code)
    except BrokenPipeError:
        raise
    except OSError as e:
        if now.debug:
            raise
        name = f"{os.fsdecode(e.filename)}: " if isinstance(e.filename, str | bytes) else ""
        return _fail(type(e).__name__, f"{name}{e.strerror or e}", "", 1)
    except Exception as e:
        # Typer's own errors about the command line; their base class is not public everywhere.
        describe = getattr(e, "format_message", None)
        if describe is None or now.debug:
            raise
        return _usage(e, describe())
    finally:
        now.close()


def _completing() -> AbstractContextManager[None]:
    if "_DSEC_COMPLETE" not in os.environ:
        return nullcontext()
    from dsecfs.cli.complete import whole_words

    return whole_words(os.environ)


def _usage(error: Any, message: str) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help() if context else message, file=sys.stderr)
        return 2
    path = context.command_path if context else "dsec"
    message = " ".join(message.split())
    hint = "" if message.endswith("?") else f"{path} --help shows what there is"
    return _fail("Usage", message.rstrip("."), hint, 2)


def _fail(kind: str, message: str, hint: str, code: int) -> int:
    """One line on standard error."""
    if session().json:
        error = {"type": kind, "message": message, "hint": hint, "exit_code": code}
        print(json.dumps({"error": error}), file=sys.stderr)
    else:
        line = f"{message}; {hint}" if hint else message
        print(f"dsec: {' '.join(line.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
