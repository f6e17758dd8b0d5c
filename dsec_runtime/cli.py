"""`dsec run`: one command in a container.

On the way to the first system call nothing is imported that is not needed
(docs/dependencies.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from dsecfs.cli.complete import complete_env, complete_toolkit
from dsecfs.cli.lazy import command_settings
from dsecfs.cli.output import mode_in_use, note, size_text
from dsecfs.cli.parse import pairs, split_toolkits
from dsecfs.cli.session import session
from dsecfs.errors import BadInput, Unsupported

if TYPE_CHECKING:
    from dsec_runtime.run import RunSpec
    from dsec_runtime.running import RunResult
    from dsecfs.node import Node, Prepared

UPPERS = ("disk", "tmpfs", "image")
TIMED_OUT = 124
"""Exit code when --timeout ended the program, as of timeout(1)."""

_HIT = {
    "memory": "processes were ended at the limit on memory (--memory)",
    "pids": "processes were refused at the limit on their number (--pids)",
}

_COMMAND = "dsec.command"


class _RunCommand(TyperCommand):
    """Options may stand on both sides of ENV, and nothing after "--" is one of ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = args[at + 1 :]
            args = args[:at]
        try:
            return super().parse_args(ctx, args)
        except Exception as e:
            # Its class is not public everywhere (as in dsecfs/cli/main.py).
            if type(e).__name__ != "NoSuchOption" or _COMMAND in ctx.meta:
                raise
            option = str(getattr(e, "option_name", ""))[:80]
            hint = "put -- before the command if it is the command's; dsec run --help"
            raise BadInput(f"no such option: {option}", hint=hint) from None


@command_settings(cls=_RunCommand)
def run(
    context: typer.Context,
    env: Annotated[
        str,
        typer.Argument(help="Environment or base.", metavar="ENV", autocompletion=complete_env),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Toolkits on top of it, then the command; put -- before a command with options.",
            metavar="[+TOOLKIT]... [-- COMMAND...]",
            autocompletion=complete_toolkit,
        ),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="VAR=VALUE", help="Set a process variable."),
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Pass standard input on.")
    ] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal.")] = False,
    rm: Annotated[
        bool, typer.Option("--rm", help="Remove it afterwards; that is always done.")
    ] = True,
    workdir: Annotated[
        str, typer.Option("--workdir", "-w", metavar="DIR", help="Where it starts.")
    ] = "",
    user: Annotated[
        str, typer.Option("--user", "-u", metavar="USER", help="NAME or UID, with :GROUP or :GID.")
    ] = "",
    entrypoint: Annotated[
        str | None,
        typer.Option(metavar="WORDS", help='Put the command behind this; "" for nothing.'),
    ] = None,
    hostname: Annotated[str, typer.Option(metavar="NAME", help="Its host name.")] = "",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Most memory, e.g. 2GiB.")] = "",
    cpus: Annotated[
        float, typer.Option(metavar="N", help="Most CPUs, e.g. 1.5.", show_default=False)
    ] = 0.0,
    pids: Annotated[int, typer.Option(metavar="N", help="Most processes and threads.")] = 4096,
    upper: Annotated[
        str, typer.Option(metavar="KIND", help="Where it writes: disk, tmpfs or image.")
    ] = "",
    upper_limit: Annotated[
        str, typer.Option(metavar="SIZE", help="Most it may write; not for disk.")
    ] = "",
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="End it after so long, e.g. 90s or 2h.")
    ] = "",
    platform: Annotated[str, typer.Option(help="Platform.")] = "",
    record: Annotated[
        bool, typer.Option("--record", help="Record what it reads; later runs prefetch that.")
    ] = False,
    no_prefetch: Annotated[
        bool,
        typer.Option("--no-prefetch", help="Fetch only what is read, as --set prefetch=false."),
    ] = False,
    report: Annotated[
        str, typer.Option(metavar="FILE", help="Write what each step took, and what was fetched.")
    ] = "",
) -> None:
    """Run a command in a container whose files arrive on demand.

    The exit code is the command's; 124 after --timeout, 125 if the container could not be
    made, 126 if the command cannot be executed, 127 if there is none of that name.
    """
    if os.geteuid() != 0:
        raise Unsupported(
            "run a container: not root", hint="run it as root; dsec mount works for everybody"
        )
    toolkits, rest = split_toolkits(words or [])
    after = context.meta.get(_COMMAND)
    if rest and after is not None:
        raise BadInput(f"unexpected {rest[0][:80]!r} before --", hint="a toolkit is +NAME:VERSION")
    command = tuple(after if after is not None else rest)
    steps = _Steps()
    node = session().node
    prepared = node.prepare(env, toolkits, platform)
    steps.done("names and layers")

    from dsec_runtime.bundle import Limits
    from dsec_runtime.run import RunSpec
    from dsecfs.settings import parse_duration, parse_size

    defaults = prepared.environment.process
    if upper and upper not in UPPERS:
        raise BadInput(f"--upper {upper[:40]!r}", hint=f"expected {', '.join(UPPERS)}")
    extra: dict[str, Any] = {"hostname": hostname} if hostname else {}
    spec = RunSpec(
        layers=prepared.top_first,
        args=_arguments(prepared, entrypoint, command),
        env=prepared.process_environment(pairs(variables, "--env")),
        cwd=workdir or defaults.cwd or "/",
        user=user or defaults.user,
        tty=tty,
        stdin=None if interactive or tty else -3,  # subprocess.DEVNULL
        limits=Limits(parse_size(memory) if memory else None, cpus or None, pids),
        upper=upper or session().settings.upper,  # type: ignore[arg-type]  # checked above
        upper_limit=parse_size(upper_limit) if upper_limit else None,
        timeout_s=parse_duration(timeout) if timeout else None,
        **extra,
    )
    result = _run(node, prepared, spec, steps, record, not no_prefetch, report)
    for limit in sorted(result.limits_hit):
        note(f"{env}: {_HIT[limit]}")
    if result.timed_out:
        note(f"{env}: ended after {timeout}")
        raise typer.Exit(TIMED_OUT)
    raise typer.Exit(result.exit_code)


def _arguments(
    prepared: Prepared, entrypoint: str | None, command: tuple[str, ...]
) -> tuple[str, ...]:
    """What is executed, by the rules that docker has for entry points and commands."""
    defaults = prepared.environment.process
    if entrypoint is not None:
        import shlex

        try:
            return (*shlex.split(entrypoint), *command) or ("/bin/sh",)
        except ValueError as e:
            raise BadInput(f"--entrypoint {entrypoint[:80]!r}: {e}") from None
    return (*defaults.entrypoint, *(command or defaults.cmd)) or ("/bin/sh",)


def _run(
    node: Node,
    prepared: Prepared,
    spec: RunSpec,
    steps: _Steps,
    record: bool,
    prefetch: bool,
    report: str,
) -> RunResult:
    from dsec_runtime.run import run_container

    if os.geteuid() != 0:  # said before anything is started or mounted
        raise Unsupported("run a container: not root", hint="run it as root")
    mode, why = mode_in_use()
    client = node.start_fs()
    steps.done("file system")
    before = _counters(node) if report else {}
    if record:
        result = _record(node, prepared, spec, steps)
    else:
        if prefetch:
            node.warm(client, prepared)
            steps.done("prefetch asked for")
        with contextlib.closing(node.layer_mounts()) as mounts:
            result = run_container(spec, node.dirs, mode=mode, mounts=mounts)
    if report:
        steps.times.update(result.phases)
        fetched = {k: v - before.get(k, 0) for k, v in _counters(node).items()}
        with open(report, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "sandbox": result.sandbox,
                    "exit_code": result.exit_code,
                    "timed_out": result.timed_out,
                    "limits_hit": sorted(result.limits_hit),
                    "mode": mode,
                    "mode_because": why,
                    "seconds": {k: round(v, 6) for k, v in steps.times.items()},
                    "cache": fetched,
                },
                file,
                indent=2,
            )
    return result


def _record(node: Node, prepared: Prepared, spec: RunSpec, steps: _Steps) -> RunResult:
    from dsec_runtime.run import run_container
    from dsecfs.mount.record import Recorder

    mode, _ = node.mode()
    store = node.store  # without one nothing is run
    with Recorder.start(node.dirs, prepared.digest, prepared.layers) as recorder:
        steps.done("recording set up")
        with contextlib.closing(recorder.mounts(mode=mode)) as mounts:
            result = run_container(spec, node.dirs, mode=mode, mounts=mounts)
        saved = recorder.save(store)
    files = len({a.path for a in saved.trace.accesses})
    note(f"recorded {files} files, {size_text(saved.trace.total)}")
    if saved.kept is not None:
        note(f"the trace stays on this node, the store did not take it: {saved.why_kept}")
        note("dsec env traces ENV --push stores it later")
    if saved.truncated:
        note("the log was full before the end: what was read last is missing")
    return result


def _counters(node: Node) -> dict[str, int]:
    from dsecfs.cache.stats import read_totals

    return read_totals(node.dirs)


class _Steps:
    """Seconds that each step took, in order."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, step: str) -> None:
        now = time.perf_counter()
        self.times[step] = now - self._last
        self._last = now
