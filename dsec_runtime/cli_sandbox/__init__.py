"""`dsec sandbox` (`dsec sb`): sandboxes of a node, by way of its edge's API.

create.py   create; rules.py reads --network and --mount
exec.py     exec, shell; attach.py passes streams, signals and sizes to a command
logs.py     logs: what commands printed
look.py     ls, show, events
top.py      top
why.py      why
change.py   pause, resume, stop, rm, network, lifetime
copy.py     cp; trees.py packs and unpacks directories
common.py   the client, and how things are written for people

What must hold: commands know the edge by its API alone, so that they work for one elsewhere; a
sandbox may be named by its name, its id or the start of it; what a sandbox says is text from
outside: it is printed raw only where it is the result (exec, logs, cp).
"""

from __future__ import annotations

import typer

from dsecfs.cli.lazy import Entry, LazyGroup

MAKE, WORK, LOOK, CHANGE = "Make and end", "Work in it", "Look at it", "Change it"
_HERE = "dsec_runtime.cli_sandbox"


class _Commands(LazyGroup):
    table = {  # noqa: RUF012  # as declared in LazyGroup
        "create": Entry(f"{_HERE}.create:create", "Make a sandbox; prints its id.", MAKE),
        "stop": Entry(f"{_HERE}.change:stop", "End sandboxes; why and logs still answer.", MAKE),
        "rm": Entry(f"{_HERE}.change:rm", "End sandboxes and forget them.", MAKE),
        "exec": Entry(f"{_HERE}.exec:exec_", "Run a command in it.", WORK),
        "shell": Entry(f"{_HERE}.exec:shell", "Open its shell.", WORK),
        "cp": Entry(f"{_HERE}.copy:cp", "Copy files into it or out of it.", WORK),
        "logs": Entry(f"{_HERE}.logs:logs", "What a command in it printed.", WORK),
        "ls": Entry(f"{_HERE}.look:ls", "List sandboxes.", LOOK),
        "show": Entry(f"{_HERE}.look:show", "All about one of them.", LOOK),
        "top": Entry(f"{_HERE}.top:top", "What they use now.", LOOK),
        "events": Entry(f"{_HERE}.look:events", "What happened to them.", LOOK),
        "why": Entry(f"{_HERE}.why:why", "Why it is in the state it is in.", LOOK),
        "pause": Entry(f"{_HERE}.change:pause", "Freeze it; its memory is given back.", CHANGE),
        "resume": Entry(f"{_HERE}.change:resume", "Let it go on.", CHANGE),
        "network": Entry(f"{_HERE}.change:network", "Show or replace what it may reach.", CHANGE),
        "lifetime": Entry(f"{_HERE}.change:lifetime", "Show or change when it ends.", CHANGE),
    }


app = typer.Typer(
    cls=_Commands, add_completion=False, no_args_is_help=True, rich_markup_mode="rich"
)


@app.callback()
def _sandbox() -> None:
    """Sandboxes that live, are worked in, paused and ended. The node must run: dsec node start."""
