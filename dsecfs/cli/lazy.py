"""Commands that are imported when they are called, and options that all of them have.

Why: importing every command module to print a list or to reach one of them would cost more
than the command itself (docs/dependencies.md has figures). So a `LazyGroup` knows name and
help of its commands from a table; completion and `--help` look no further.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from dsecfs.cli.session import session

PANEL = "Options of every command"


class Entry(NamedTuple):
    """Where a command is and what a list says about it."""

    target: str
    """MODULE:ATTRIBUTE of a typer.Typer or of a function."""
    help: str
    panel: str


class LazyGroup(TyperGroup):
    """A group whose commands come from `table`."""

    table: ClassVar[Mapping[str, Entry]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What lists need: name and help. `resolve_command` gives the real one."""
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        return TyperCommand(cmd_name, help=entry.help, rich_help_panel=entry.panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # The suggestions for a mistyped command come from here.
        self.commands = {name: self.get_command(ctx, name) for name in self.table}
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or command is None:
            return name, command, rest
        return name, load_command(name, self.table[name]), rest


def load_command(name: str, entry: Entry) -> Any:
    """Import a command and give it the common options."""
    module, _, attribute = entry.target.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(name, **getattr(found, "command_settings", {}))(found)
        found = app
    command = typer.main.get_command(found)
    command.name = name
    command.help = command.help or entry.help
    finish(command, common_options())
    return command


def group() -> typer.Typer:
    """A group of commands in a module of its own."""
    app = typer.Typer(add_completion=False, no_args_is_help=True)
    # Without a callback a Typer with one command becomes that command.
    app.callback()(lambda: None)
    return app


def command_settings(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Keyword arguments of `Typer.command` for a function that stands in a table itself."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        function.__dict__["command_settings"] = settings
        return function

    return mark


def finish(command: Any, options: list[Any]) -> None:
    """Prepare a command, and what is below it: common options, quick parameters."""
    for child in getattr(command, "commands", {}).values():
        finish(child, options)
    for param in command.params:
        _skip_needless_coercion(param)
    command.params.extend(options)
    make_help_option = command.get_help_option

    def get_help_option(ctx: Any) -> Any:
        option = make_help_option(ctx)
        if option is not None and "process_value" not in vars(option):
            _skip_needless_coercion(option)
        return option

    command.get_help_option = get_help_option


def _skip_needless_coercion(param: Any) -> None:
    """Do not let Typer build a pydantic validator for values that have their type already.

    Typer validates every value with pydantic, whose import alone takes longer than all the
    rest of `dsec run` up to its first system call.
    """
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    if annotation is None:
        return
    checked = param.process_value

    def process_value(ctx: Any, value: Any) -> Any:
        if value is None and not param.required:
            value = () if param.multiple or param.nargs == -1 else None
        elif annotation == list[str] and type(value) in (tuple, list):
            if not value and param.required:
                return checked(ctx, value)
        elif type(value) is not annotation or (value == "" and param.required):
            return checked(ctx, value)
        return param.callback(ctx, param, value) if param.callback else value

    param.process_value = process_value


def _set_json(value: bool | None) -> None:
    if value is not None:
        session().json = value


def _set_debug(value: bool) -> None:
    if value:
        session().debug = True


def _set_store(value: str | None) -> None:
    if value is not None:
        session().options.append(("store", value))


def _set_options(values: list[str] | None) -> None:
    for text in values or []:
        name, sep, value = text.partition("=")
        if not sep:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
        session().options.append((name.strip(), value))


def _complete_setting(incomplete: str) -> list[str]:
    from dsecfs.cli.complete import complete_setting

    return complete_setting(incomplete)


def _carrier(
    json: Annotated[
        bool | None,
        typer.Option(
            "--json/--no-json",
            help="Print JSON (default: unless on a terminal).",
            callback=_set_json,
            expose_value=False,
            rich_help_panel=PANEL,
            show_default=False,
        ),
    ] = None,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show where an error came from.",
            callback=_set_debug,
            expose_value=False,
            rich_help_panel=PANEL,
        ),
    ] = False,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="The store to use.",
            callback=_set_store,
            expose_value=False,
            rich_help_panel=PANEL,
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Give a setting another value for this once.",
            autocompletion=_complete_setting,
            callback=_set_options,
            expose_value=False,
            rich_help_panel=PANEL,
        ),
    ] = None,
) -> None:
    """Carries the declarations of the options that every command has."""


def common_options() -> list[Any]:
    """The parameters that every command has; their values go to the session."""
    app = typer.Typer(add_completion=False)
    app.command()(_carrier)
    params: list[Any] = typer.main.get_command(app).params
    for param in params:
        _skip_needless_coercion(param)
    return params
