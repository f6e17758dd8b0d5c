"""`dsec channel`: movable, audited pointers to versions."""

from __future__ import annotations

import getpass
import os
import socket
from typing import Annotated

import typer

from dsecfs.cli.complete import complete_channel, complete_layer_or_env
from dsecfs.cli.lazy import group
from dsecfs.cli.output import short, show_record, show_rows, time_text
from dsecfs.cli.session import session
from dsecfs.errors import BadInput
from dsecfs.layers.catalog import ChannelEntry
from dsecfs.layers.names import KINDS, Name, parse_name

app = group()

CHANNEL = typer.Argument(
    help="[KIND/]NAME@CHANNEL, e.g. toolkit/dsh@stable.",
    metavar="CHANNEL",
    autocompletion=complete_channel,
)
REASON = typer.Option(metavar="TEXT", help="Why, for the log.")


@app.command("set")
def set_(
    channel: Annotated[str, CHANNEL],
    to: Annotated[
        str,
        typer.Argument(
            help="A version of the name, NAME:VERSION, or sha256:DIGEST.",
            metavar="VERSION",
            autocompletion=complete_layer_or_env,
        ),
    ],
    reason: Annotated[str, REASON] = "",
) -> None:
    """Point a channel at a version."""
    catalog = session().node.catalog
    name = _channel(channel)
    if ":" in to and not to.startswith("sha256:"):
        given = parse_name(to)
        if given.name != name.name or given.kind not in ("", name.kind or given.kind):
            raise BadInput(
                f"channel {channel[:120]} cannot point at {to[:120]}",
                hint="a channel points at versions of its own name",
            )
        name, to = name.with_kind(name.kind or given.kind), given.version
    if not name.kind:
        if to.startswith("sha256:"):
            raise BadInput(f"{channel[:120]}: say the kind", hint=f"one of {', '.join(KINDS)}")
        found = catalog.resolve(f"{name.name}:{to}").name
        assert found is not None
        name = name.with_kind(found.kind)
    entry = catalog.channel_set(
        name.kind, name.name, name.channel, to, actor=_actor(), reason=reason
    )
    _show(name, entry)


@app.command()
def get(channel: Annotated[str, CHANNEL]) -> None:
    """Show what a channel points at."""
    name = _existing(channel)
    _show(name, session().node.catalog.channel_get(name.kind, name.name, name.channel))


@app.command()
def close(channel: Annotated[str, CHANNEL], reason: Annotated[str, REASON] = "") -> None:
    """End a channel: it resolves no more. Its log stays."""
    name = _existing(channel)
    _show(
        name,
        session().node.catalog.channel_close(
            name.kind, name.name, name.channel, actor=_actor(), reason=reason
        ),
    )


@app.command()
def log(channel: Annotated[str, CHANNEL]) -> None:
    """Show every movement of a channel, the oldest first."""
    name = _existing(channel)
    entries = session().node.catalog.channel_log(name.kind, name.name, name.channel)
    show_rows(
        [_row(name, entry) for entry in entries],
        {
            "sequence": "no.",
            "created": "when",
            "version": "version",
            "digest": "digest",
            "actor": "who",
            "reason": "why",
        },
        form={"created": time_text, "digest": lambda d: short(d.removeprefix("sha256:"))},
    )


@app.command()
def ls() -> None:
    """List channels."""
    catalog = session().node.catalog
    rows = []
    for name in catalog.channels():
        entry = catalog.channel_get(name.kind, name.name, name.channel)
        rows.append(_row(name, entry))
    show_rows(
        rows,
        {"channel": "channel", "version": "version", "digest": "digest", "created": "since"},
        empty="no channels",
        form={"created": time_text, "digest": lambda d: short(d.removeprefix("sha256:"))},
    )


def _channel(text: str) -> Name:
    name = parse_name(text)
    if not name.channel:
        raise BadInput(f"{text[:120]!r} is no channel", hint="expected [KIND/]NAME@CHANNEL")
    return name


def _existing(text: str) -> Name:
    """The channel that `text` means, with its kind."""
    name = _channel(text)
    if name.kind:
        return name
    there = [n for n in session().node.catalog.channels() if n.with_kind("") == name]
    if len(there) > 1:
        choices = ", ".join(map(str, there))
        raise BadInput(f"{text[:120]} is ambiguous", hint=f"say which one: {choices}")
    return there[0] if there else name.with_kind("env")


def _actor() -> str:
    """Who does it, for the log: what the system says, not a proof."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _row(name: Name, entry: ChannelEntry) -> dict[str, str | int | None]:
    return {
        "channel": str(name),
        "sequence": entry.sequence,
        "version": entry.version if entry.digest else "closed",
        "digest": f"sha256:{entry.digest}" if entry.digest else "",
        "created": entry.created,
        "actor": entry.actor,
        "reason": entry.reason,
    }


def _show(name: Name, entry: ChannelEntry) -> None:
    show_record(_row(name, entry), form={"created": time_text})
