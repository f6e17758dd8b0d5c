"""`dsec node`: the edge of this machine, its start and end, what it takes, its log.

`status`, `cordon`, `uncordon` and `drain` ask whichever edge the settings name (node_url); the
others are about this machine's own process.
"""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer

from dsec_runtime.cli_sandbox.common import mib_text
from dsec_runtime.edge.client import EdgeClient, sandbox_path
from dsecfs.cli.lazy import group
from dsecfs.cli.output import note, show_record
from dsecfs.cli.session import session
from dsecfs.errors import BadInput, NotFound, Unsupported

app = group()

POLL_S = 0.5
LIVE = ("creating", "running", "paused", "stopping")


def client() -> EdgeClient:
    return EdgeClient.of(session().settings)


@app.command()
def start(
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay, and write the log to standard error.")
    ] = False,
) -> None:
    """Start the edge, if it does not run. It finds the sandboxes of an earlier one again."""
    if os.geteuid() != 0:
        raise Unsupported("start the edge: not root", hint="run it as root")
    if foreground:
        from dsec_runtime.edge.__main__ import run, start_log

        start_log()
        run(session().node)
        return
    from dsec_runtime.edge.start import start_edge

    if not start_edge(session().settings.dirs, session().options):
        note("it runs already")
    _show(EdgeClient(path=session().settings.dirs.edge))


@app.command()
def stop(
    all_: Annotated[
        bool,
        typer.Option("--all", help="Stop all sandboxes first, and end what owns their commands."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Kill it. Sandboxes live on all the same.")
    ] = False,
) -> None:
    """Stop the edge. Sandboxes and their commands go on; the next start finds them again.

    Exit code 3 if none runs.
    """
    from dsec_runtime.edge.start import edge_pid, stop_edge

    dirs = session().settings.dirs
    local = EdgeClient(path=dirs.edge)
    if edge_pid(dirs) is None:
        hint = "dsec node start, then stop --all, ends sandboxes" if all_ else "dsec node start"
        raise NotFound(f"no edge runs for {dirs.run}", hint=hint)
    states: dict[str, int] = local.get("/v1/node")["states"] if not force else {}
    stopped = stop_sandboxes(local) if all_ else 0
    pid = stop_edge(dirs, force=force)
    left = 0 if all_ else sum(states.get(state, 0) for state in LIVE)
    if all_:
        _end_helpers()
    elif left:
        note(f"{left} sandboxes go on; dsec node start finds them, dsec node stop --all ends them")
    show_record({"stopped": pid, "sandboxes_stopped": stopped, "sandboxes_left": left})


def _end_helpers() -> None:
    """What lives on beside the edge: who owns commands, and who owns networks."""
    from dsec_runtime.keeper.start import end_keeper
    from dsec_runtime.network.start import end_gate

    end_keeper(session().settings.dirs)
    end_gate(session().settings.dirs)


@app.command()
def status() -> None:
    """Show what the node has and what it takes. Exit code 3 if no edge runs."""
    found = client()
    dirs = session().settings.dirs
    if not session().settings.node_url:
        from dsec_runtime.edge.start import edge_pid

        if edge_pid(dirs) is None:
            raise NotFound(f"no edge runs for {dirs.run}", hint="dsec node start")
    _show(found)


def _show(edge: EdgeClient) -> None:
    """The answer of /v1/node, as a record."""
    found: dict[str, Any] = edge.get("/v1/node")
    if session().as_json:
        show_record({"address": edge.name, **found})
        return
    states = found["states"]
    show_record(
        {
            "edge": f"{edge.name}, version {found['version']}",
            "takes_sandboxes": f"no: {found['cordoned']}" if found["cordoned"] else "yes",
            "backends": found["backends"],
            "sandboxes": ", ".join(f"{states[state]} {state}" for state in sorted(states))
            or f"none of {found['sandboxes_max']}",
            "memory_requested": f"{mib_text(found['memory_requested_mb'])} of "
            f"{mib_text(found['memory_capacity_mb'])}",
            "cpus_requested": f"{found['cpu_requested']:.4g} of {found['cpu_capacity']:.4g}",
            "disk_free": mib_text(found["disk_free_mb"]),
            "memory_pressure": f"{found['memory_pressure']:.3g} %",
        }
    )


@app.command()
def cordon(
    reason: Annotated[str, typer.Option(help="Why; status and refusals say it.")] = "asked",
) -> None:
    """Take no new sandboxes, until uncordon. Those that are there go on."""
    edge = client()
    edge.post("/v1/node/cordon", query={"reason": reason})
    _show(edge)


@app.command()
def uncordon() -> None:
    """Take new sandboxes again."""
    edge = client()
    edge.post("/v1/node/uncordon")
    _show(edge)


@app.command()
def drain(
    deadline: Annotated[
        str, typer.Option(metavar="TIME", help="How long sandboxes in use may go on.")
    ] = "10m",
) -> None:
    """Cordon the node, then stop its sandboxes: idle ones now, others when they become idle
    or at the deadline."""
    from dsecfs.settings import parse_duration

    ends = time.monotonic() + parse_duration(deadline)
    edge = client()
    edge.post("/v1/node/cordon", query={"reason": "drain"})
    stopped = told = 0
    while True:
        late = time.monotonic() >= ends
        busy = 0
        for sandbox in live_sandboxes(edge):
            if late or sandbox["state"] == "paused" or sandbox["idle_since"] is not None:
                stopped += stop_one(edge, sandbox["id"])
            else:
                busy += 1
        if not busy:
            break
        if busy != told:
            note(f"{stopped} sandboxes stopped, {busy} in use")
            told = busy
        time.sleep(min(POLL_S, max(0.0, ends - time.monotonic())))
    show_record({"cordoned": "drain", "sandboxes_stopped": stopped})


def live_sandboxes(edge: EdgeClient) -> list[dict[str, Any]]:
    """All that have not ended, page by page."""
    found: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        page = edge.get("/v1/sandboxes", {"limit": 1000, "after": after})
        found.extend(page["sandboxes"])
        after = page["next"]
    return [sandbox for sandbox in found if sandbox["state"] in LIVE]


def stop_sandboxes(edge: EdgeClient) -> int:
    """Stop all of them; how many."""
    return sum(stop_one(edge, sandbox["id"]) for sandbox in live_sandboxes(edge))


def stop_one(edge: EdgeClient, sandbox: str) -> int:
    """Stop a sandbox; 0 if it was gone by itself."""
    from dsec_runtime.errors import NoSuchSandbox

    try:
        edge.post(sandbox_path(sandbox, "stop"))
    except NoSuchSandbox:
        return 0
    return 1


@app.command()
def log(
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the last ones.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="And what comes.")] = False,
) -> None:
    """Print the end of the edge's log. Text, whatever the output is."""
    from dsec_runtime.edge.start import log_path

    if lines < 0:
        raise BadInput(f"--lines {lines}: expected 0 or more")
    path = log_path(session().settings.dirs)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise NotFound(f"no log at {path}", hint="dsec node start writes it") from None
    with file:
        end = file.seek(0, os.SEEK_END)
        start = max(0, end - 400 * lines - 4096)
        file.seek(start)
        held = file.read(end - start).split(b"\n")
        last = held.pop()
        wanted = held[max(0, len(held) - lines) :] if lines else []
        _print(b"".join(line + b"\n" for line in wanted) + last)
        while follow:
            if data := file.read(1 << 16):
                _print(data)
            else:
                time.sleep(POLL_S)


def _print(data: bytes) -> None:
    """Lines of the log, without what would act on a terminal."""
    text = data.decode(errors="replace")
    kept = "".join(c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    print(kept, end="", flush=True)
