"""`dsec env`: compositions of layers: make, list, look at, check, explain."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from dsecfs.cli.complete import complete_env, complete_toolkit
from dsecfs.cli.lazy import group
from dsecfs.cli.output import path_text, short, show_record, show_rows, size_text, time_text
from dsecfs.cli.parse import only_toolkits, pairs
from dsecfs.cli.session import session
from dsecfs.errors import BadInput
from dsecfs.layers.content import LayerContent
from dsecfs.layers.environment import Environment

app = group()

ENV = typer.Argument(
    help="Environment or base: NAME:VERSION, NAME@CHANNEL or sha256:DIGEST.",
    metavar="ENV",
    autocompletion=complete_env,
)
TOOLKITS = typer.Argument(
    help="Toolkits on top of it.", metavar="[+TOOLKIT]...", autocompletion=complete_toolkit
)
PLATFORM = typer.Option(help="Platform, e.g. linux/arm64.")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="NAME:VERSION of the new one.", metavar="NAME")],
    base: Annotated[
        str,
        typer.Argument(
            help="The base, or an environment to start from.",
            metavar="BASE",
            autocompletion=complete_env,
        ),
    ],
    toolkits: Annotated[list[str] | None, TOOLKITS] = None,
    workspace: Annotated[str, typer.Option(metavar="LAYER", help="The workspace layer.")] = "",
    snapshot: Annotated[
        list[str] | None, typer.Option(metavar="LAYER", help="A snapshot layer; bottom first.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="VAR=VALUE", help="A process variable."),
    ] = None,
    cwd: Annotated[str, typer.Option("--cwd", "-w", metavar="DIR", help="Where to start.")] = "",
    user: Annotated[str, typer.Option("--user", "-u", help="Who runs: NAME or UID[:GID].")] = "",
    entrypoint: Annotated[
        str, typer.Option(metavar="WORDS", help="What every command is put behind.")
    ] = "",
    cmd: Annotated[str, typer.Option(metavar="WORDS", help="What runs if nothing is said.")] = "",
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Attach a label.")
    ] = None,
    platform: Annotated[str, PLATFORM] = "",
) -> None:
    """Compose an environment from layers."""
    from dataclasses import replace

    from dsecfs.layers.environment import EnvironmentManifest, check_layers
    from dsecfs.layers.manifest import check_variable
    from dsecfs.layers.names import parse_name
    from dsecfs.layers.reach import read_layer_manifest

    full = parse_name(name)
    if full.kind not in ("", "env") or not full.version:
        raise BadInput(f"no environment can be called {name[:120]!r}", hint="expected NAME:VERSION")
    node = session().node
    made = node.environment(base, only_toolkits(toolkits), platform)
    if workspace:
        found = node.catalog.resolve(workspace, ("workspace",))
        made = replace(made, workspace=found.digest)
    for text in snapshot or ():
        made = made.with_snapshot(node.catalog.resolve(text, ("snapshot",)).digest)
    variables = pairs(env, "--env")
    for variable, value in variables.items():
        check_variable(variable, value, "--env")
    process = made.process
    made = replace(
        made,
        process=replace(
            process,
            env={**process.env, **variables},
            cwd=cwd or process.cwd,
            user=user or process.user,
            entrypoint=_words(entrypoint, "--entrypoint") or process.entrypoint,
            cmd=_words(cmd, "--cmd") or process.cmd,
        ),
    )
    check_layers(
        made, [read_layer_manifest(node.store, layer) for layer in made.layers_bottom_up()]
    )
    manifest = EnvironmentManifest({made.platform: made}, pairs(label, "--label"))
    digest = node.catalog.put_env(manifest, full)
    show_record(
        {
            "name": str(full.with_kind("env")),
            "digest": f"sha256:{digest}",
            "platform": made.platform,
            "layers": len(made.layers_bottom_up()),
        }
    )


def _words(text: str, option: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as e:
        raise BadInput(f"{option} {text[:80]!r}: {e}") from None


@app.command()
def ls(
    prefix: Annotated[str, typer.Argument(help="Only names that start so.", metavar="PREFIX")] = "",
) -> None:
    """List environments by name."""
    from concurrent.futures import ThreadPoolExecutor

    catalog = session().node.catalog
    names = list(catalog.ls(("env",), prefix))
    with ThreadPoolExecutor(16, "list") as pool:
        refs = list(pool.map(catalog.get_ref, names))
    show_rows(
        [
            {"name": str(n), "digest": f"sha256:{r.digest}", "created": r.created}
            for n, r in zip(names, refs, strict=True)
        ],
        {"name": "name", "digest": "digest", "created": "created"},
        empty="no environments; dsec image import or dsec env create makes one",
        form={"digest": lambda d: short(d.removeprefix("sha256:")), "created": time_text},
    )


@app.command()
def show(
    env: Annotated[str, ENV],
    toolkits: Annotated[list[str] | None, TOOLKITS] = None,
    platform: Annotated[str, PLATFORM] = "",
) -> None:
    """Show what an environment is made of and what its processes start with."""
    from dsecfs.layers.reach import read_layer_manifest

    node = session().node
    made = node.environment(env, only_toolkits(toolkits), platform)
    labels = _labels(made)
    layers = made.layers_bottom_up()
    manifests = [read_layer_manifest(node.store, layer) for layer in layers]
    rows = [
        {
            "layer": label,
            "digest": f"sha256:{layer}",
            "files": manifest.inodes,
            "bytes": manifest.file_bytes,
        }
        for label, layer, manifest in zip(labels, layers, manifests, strict=True)
    ]
    process = made.process
    show_record(
        {
            "environment": env,
            "digest": f"sha256:{made.digest}",
            "platform": made.platform,
            "layers": rows
            if session().as_json
            else [
                f"{r['layer']}  {short(str(r['digest'])[7:])}  {r['files']} files, "
                f"{size_text(m.file_bytes)}"
                for r, m in zip(rows, manifests, strict=True)
            ],
            "entrypoint": list(process.entrypoint),
            "cmd": list(process.cmd),
            "cwd": process.cwd,
            "user": process.user,
            "env": _shown_env(made.process_environment(manifests)),
        }
    )


def _shown_env(env: dict[str, str]) -> Any:
    return env if session().as_json else [f"{k}={v}" for k, v in sorted(env.items())]


def _labels(made: Environment) -> list[str]:
    """What to call the layers, bottom to top."""
    names = ["base"]
    names += ["workspace"] if made.workspace else []
    names += [f"toolkit {short(t.name) if len(t.name) == 64 else t.name}" for t in made.toolkits]
    return names + [f"snapshot {i}" for i in range(1, len(made.snapshots) + 1)]


@app.command()
def rm(
    names: Annotated[
        list[str],
        typer.Argument(help="NAME:VERSION.", metavar="NAME...", autocompletion=complete_env),
    ],
) -> None:
    """Remove names of environments; dsec store restore brings one back."""
    from dsecfs.layers.catalog import TRASH_S

    catalog = session().node.catalog
    found = []
    for text in names:
        resolved = catalog.resolve(text, ("env",))
        if resolved.name is None or not resolved.name.version:
            raise BadInput(f"{text[:120]}: only a version of a name can be removed")
        found.append((resolved.name, resolved.digest))
    for name, _ in found:
        catalog.remove_ref(name)
    days = TRASH_S // 86400
    show_rows(
        [{"name": str(n), "digest": f"sha256:{d}", "restorable_days": days} for n, d in found],
        {"name": "removed", "restorable_days": "days to restore it"},
    )


@app.command()
def check(
    env: Annotated[str, ENV],
    toolkits: Annotated[list[str] | None, TOOLKITS] = None,
    all_: Annotated[bool, typer.Option("--all", help="Also what matters little.")] = False,
    platform: Annotated[str, PLATFORM] = "",
) -> None:
    """List files that one layer hides from another, the dangerous ones first.

    Exit code 1 if something of high risk is hidden.
    """
    from collections import Counter

    from dsecfs.layers.inspect import RISKS
    from dsecfs.layers.inspect import check as find_hidden

    made, contents = _contents(env, toolkits, platform)
    labels = _labels(made)
    found = find_hidden(contents)
    counts = Counter(h.risk for h in found)
    rows: list[dict[str, Any]] = [
        {
            "risk": h.risk,
            "path": "/" + path_text(h.path),
            "by": labels[h.upper],
            "of": labels[h.lower],
            "removed": h.removed,
            "why": h.why,
        }
        for h in found
        if all_ or h.risk != "low"
    ]
    show_rows(
        rows,
        {"risk": "risk", "path": "hidden file", "of": "of", "by": "by", "why": "why it matters"},
        empty="nothing of importance is hidden",
    )
    if not session().as_json and found:
        print(", ".join(f"{counts[risk]} of {risk} risk" for risk in RISKS if counts[risk]))
    if counts["high"]:
        raise typer.Exit(1)


@app.command()
def explain(
    env: Annotated[str, ENV],
    words: Annotated[
        list[str],
        typer.Argument(
            help="Toolkits, then the path.",
            metavar="[+TOOLKIT]... PATH",
            autocompletion=complete_toolkit,
        ),
    ],
    platform: Annotated[str, PLATFORM] = "",
) -> None:
    """Name the layer that provides a path, and what others have there."""
    from dsecfs.layers.inspect import explain as find

    *toolkits, path = words
    made, contents = _contents(env, toolkits, platform)
    labels = _labels(made)
    found = find(contents, path.encode("utf-8", "surrogateescape"))
    rows: list[dict[str, Any]] = [
        {
            "path": "/" + path_text(found.path),
            "layer": labels[stand.layer],
            "digest": f"sha256:{contents[stand.layer].head.digest}",
            "is": stand.what,
            "provides": stand.layer == found.provider,
            "shows": stand.shows,
            "mode": f"{stand.inode.mode & 0o7777:04o}",
            "owner": f"{stand.inode.uid}:{stand.inode.gid}",
            "size": stand.inode.size,
        }
        for stand in found.stands
    ]
    columns = {"layer": "layer", "is": "has a", "provides": "provides it", "shows": "shows"}
    columns |= {"mode": "mode", "owner": "owner", "size": "size"}
    if not session().as_json:
        print("/" + path_text(found.path) + ("" if found.provider is not None else " is removed"))
    show_rows(rows, columns)


def _contents(
    env: str, toolkits: list[str] | None, platform: str
) -> tuple[Environment, list[LayerContent]]:
    """The composition and its layers, bottom first."""
    node = session().node
    made = node.environment(env, only_toolkits(toolkits), platform)
    return made, [LayerContent(node.store, layer) for layer in made.layers_bottom_up()]


@app.command()
def heat(
    env: Annotated[str, ENV],
    toolkits: Annotated[list[str] | None, TOOLKITS] = None,
    depth: Annotated[
        int, typer.Option(min=1, help="Directories above each other to tell apart.")
    ] = 3,
    files: Annotated[bool, typer.Option("--files", help="Every file instead.")] = False,
    svg: Annotated[str, typer.Option(metavar="FILE", help="Draw it instead.")] = "",
    platform: Annotated[str, PLATFORM] = "",
) -> None:
    """Show which files and bytes recorded runs read (dsec run --record records)."""
    from dsecfs.cli.heat import show_heat
    from dsecfs.layers.heatplot import heat_svg
    from dsecfs.layers.profile import profile

    node = session().node
    made = node.environment(env, only_toolkits(toolkits), platform)
    labels = _labels(made)[::-1]
    with profile(node.store, made, node.dirs.kept_traces) as found:
        report = found.heat()
    if not svg:
        show_heat(found.runs, report, labels, depth=depth, files=files)
        return
    title = f"What {found.runs} runs of {' +'.join((env, *only_toolkits(toolkits)))} read"
    Path(svg).write_text(heat_svg(report, labels, title, depth=depth), encoding="utf-8")
    show_record({"file": svg, "runs": found.runs, "chunks": report.chunks})


@app.command()
def traces(
    env: Annotated[str, ENV],
    toolkits: Annotated[list[str] | None, TOOLKITS] = None,
    push: Annotated[
        bool, typer.Option("--push", help="Store those that only this node has.")
    ] = False,
    rm: Annotated[
        list[str] | None,
        typer.Option("--rm", metavar="TRACE", help='Remove this one; "all" for all of them.'),
    ] = None,
    platform: Annotated[str, PLATFORM] = "",
) -> None:
    """List recorded runs of an environment; prefetching goes by the newest ones."""
    from dsecfs.cli.heat import push_traces, remove_traces, trace_rows

    node = session().node
    digest = node.environment(env, only_toolkits(toolkits), platform).digest
    kept = node.dirs.kept_traces
    if push:
        push_traces(node.store, digest, kept)
    for name in rm or ():
        remove_traces(node.store, digest, kept, name)
    rows = trace_rows(node.store, digest, kept)
    columns = {"trace": "trace", "recorded": "recorded", "files": "files", "bytes": "read"}
    columns["in_store"] = "in the store"
    if any(row["damage"] for row in rows):
        columns["damage"] = "damage"
    show_rows(
        rows,
        columns,
        empty="no run was recorded; dsec run --record records one",
        form={"trace": lambda t: t[:12], "recorded": time_text, "bytes": size_text},
    )
