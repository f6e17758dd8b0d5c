"""What the commands of `dsec sandbox` share: the client, arguments, words for people."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from dsec_runtime.edge.client import EdgeClient
from dsecfs.cli.complete import complete_sandbox
from dsecfs.cli.output import time_text
from dsecfs.cli.session import session
from dsecfs.settings import parse_duration, parse_size

SandboxArgument = Annotated[
    str,
    typer.Argument(
        help="Name, id, or the start of an id.", metavar="SANDBOX", autocompletion=complete_sandbox
    ),
]
SandboxArguments = Annotated[
    list[str],
    typer.Argument(
        help="Names, ids, or starts of ids.", metavar="SANDBOX...", autocompletion=complete_sandbox
    ),
]

Answer = dict[str, Any]


def client() -> EdgeClient:
    """The edge that the settings name."""
    return EdgeClient.of(session().settings)


def mib(text: str, option: str) -> int:
    """A size in whole MiB, rounded up. BadInput names the option."""
    from dsecfs.errors import BadInput

    try:
        return -(-parse_size(text) // (1 << 20))
    except BadInput as e:
        raise BadInput(f"{option}: {e.message}", hint=e.hint) from None


def seconds(text: str, option: str) -> float:
    """A duration. BadInput names the option."""
    from dsecfs.errors import BadInput

    try:
        return parse_duration(text)
    except BadInput as e:
        raise BadInput(f"{option}: {e.message}", hint=e.hint) from None


def mib_text(count: int) -> str:
    """MiB for people: "512 MiB", "1.5 GiB". Powers of 1024, as limits are given."""
    if count < 1024:
        return f"{count} MiB"
    return f"{count / 1024:.4g} GiB" if count < 1 << 20 else f"{count / (1 << 20):.4g} TiB"


def bytes_text(count: int) -> str:
    """Bytes for people, in powers of 1024: what is compared with a limit."""
    if count < 1 << 20:
        return f"{count} B" if count < 1024 else f"{count / 1024:.3g} KiB"
    return f"{count / (1 << 20):.3g} MiB" if count < 1 << 30 else f"{count / (1 << 30):.4g} GiB"


def span_text(length_s: float) -> str:
    """A time span for people: "4.2 s", "17 s", "12 min", "3.5 h", "2 d"."""
    length_s = max(0.0, length_s)
    if length_s < 120:
        return f"{length_s:.2g} s" if length_s < 10 else f"{length_s:.0f} s"
    if length_s < 7200:
        return f"{length_s / 60:.0f} min"
    return f"{length_s / 3600:.3g} h" if length_s < 172800 else f"{length_s / 86400:.3g} d"


def since(at: float | None) -> str:
    """How long ago; "" for never."""
    return "" if at is None else span_text(time.time() - at)


def moment(at: float | None) -> str:
    """A point in time and how long ago it was."""
    return "" if at is None else f"{time_text(at)} ({since(at)} ago)"


def called(sandbox: Answer) -> str:
    """What people call a sandbox: its name, else its id."""
    return str(sandbox["name"] or sandbox["id"])


def environment_text(sandbox: Answer) -> str:
    """The environment as it was asked for, with toolkits."""
    return " ".join([sandbox["environment_name"], *(f"+{t}" for t in sandbox["toolkits"])])


def rules_text(network: Answer) -> list[str]:
    """Network rules as --network takes them."""
    if network["internet"]:
        return ["internet"]
    return [_rule_text(rule) for rule in network["allow"]]


def _rule_text(rule: Answer) -> str:
    name = rule["service"] or rule["host"] or rule["cidr"]
    ports = "".join(f":{port}" for port in rule["ports"])
    return f"{name}{ports}{'/udp' if rule['protocol'] == 'udp' else ''}"
