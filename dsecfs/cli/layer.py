"""`dsec layer`: publish, list, look at, verify, compare, export, remove."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from dsecfs.cli.complete import (
    complete_env,
    complete_layer,
    complete_layer_or_env,
    complete_toolkit,
)
from dsecfs.cli.lazy import group
from dsecfs.cli.output import (
    note,
    path_text,
    progress,
    short,
    show_record,
    show_rows,
    size_text,
    time_text,
)
from dsecfs.cli.parse import layer_name, pairs
from dsecfs.cli.session import session
from dsecfs.errors import BadInput, Corrupt, NotFound
from dsecfs.layers.digest import Digest
from dsecfs.layers.names import LAYER_KINDS, Name

if TYPE_CHECKING:
    from dsecfs.layers.environment import Environment

app = group()

LAYER = typer.Argument(
    help="[KIND/]NAME:VERSION, NAME@CHANNEL or sha256:DIGEST.",
    metavar="LAYER",
    autocompletion=complete_layer,
)


@app.command()
def publish(
    source: Annotated[
        str,
        typer.Argument(
            help="A directory, a tar archive (any compression, - for standard input), "
            "or dir:, tar:, upper: and a path.",
            metavar="SOURCE",
        ),
    ],
    name: Annotated[str, typer.Argument(help="KIND/NAME:VERSION.", metavar="NAME")],
    at: Annotated[
        str, typer.Option(metavar="DIR", help="Where the tree goes, e.g. /opt/dsh.")
    ] = "",
    path_prepend: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Put DIR in front of PATH wherever the layer is used."),
    ] = None,
    prepend: Annotated[
        list[str] | None,
        typer.Option(metavar="VAR=DIR", help="The same for another variable, e.g. PYTHONPATH."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="VAR=VALUE", help="Set a process variable."),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Attach a label.")
    ] = None,
    git: Annotated[
        bool | None,
        typer.Option(
            "--git/--no-git",
            help="Prepare git work trees so that git status opens no unchanged file "
            "(default: in workspaces).",
        ),
    ] = None,
    platform: Annotated[str, typer.Option(help="Platform, e.g. linux/arm64.")] = "",
    codec: Annotated[str, typer.Option(help="lz4, zstd or raw (default: as configured).")] = "",
    chunk_size: Annotated[str, typer.Option(help="Bytes in a chunk, a power of two.")] = "256KiB",
) -> None:
    """Publish a tree as a layer."""
    from dsecfs.layers.manifest import ProcessEnv
    from dsecfs.layers.publish import BlobOptions, Meta, publish_source
    from dsecfs.layers.sources.image import open_image
    from dsecfs.settings import parse_size

    full = layer_name(name)
    if codec:
        session().options.append(("codec", codec))  # refuses what is none
    node = session().node
    platform = platform or node.platform
    fronts: dict[str, tuple[str, ...]] = {}
    if path_prepend:
        fronts["PATH"] = tuple(path_prepend)
    for variable, entry in _pair_list(prepend):
        fronts[variable] = (*fronts.get(variable, ()), entry)
    meta = Meta(
        full.kind,
        platform,
        ProcessEnv(pairs(env, "--env"), fronts),
        pairs(label, "--label"),
    )
    with open_image(_spec(source), platform=platform) as image, progress() as bars:
        if len(image.layers) != 1:
            raise BadInput(
                f"{source[:120]}: an image of {len(image.layers)} layers",
                hint="dsec image import makes an environment of it",
            )
        published = publish_source(
            node.store,
            image.layers[0],
            full,
            meta,
            at=at,
            git=git,
            options=BlobOptions(
                parse_size(chunk_size),
                codec=session().settings.codec,  # type: ignore[arg-type]
            ),
            progress=bars,
        )
    for line in published.notes:
        note(line)
    manifest = published.head.manifest
    show_record(
        {
            "name": str(full),
            "digest": f"sha256:{published.digest}",
            "files": manifest.inodes,
            "bytes": manifest.file_bytes,
            "uploaded": published.uploaded,
        },
        form={"bytes": size_text, "uploaded": size_text},
    )


def _pair_list(texts: list[str] | None) -> list[tuple[str, str]]:
    return [item for text in texts or () for item in pairs([text], "--prepend").items()]


def _spec(source: str) -> str:
    """What people type as a source, as `open_image` wants it."""
    if source == "-":
        return "tar:-"
    if source.partition(":")[0] in ("dir", "tar", "upper") or "://" in source:
        return source
    path = Path(source)
    if path.is_dir():
        return f"dir:{source}"
    if path.exists():
        return f"tar:{source}"
    kind = source.partition(":")[0]
    if kind in ("oci", "oci-archive", "docker-archive", "docker"):
        return source
    raise NotFound(f"{source[:200]}: no such file or directory")


@app.command()
def ls(
    prefix: Annotated[str, typer.Argument(help="Only names that start so.", metavar="PREFIX")] = "",
    kind: Annotated[str, typer.Option(help=f"Only one of {', '.join(LAYER_KINDS)}.")] = "",
    long: Annotated[bool, typer.Option("--long", "-l", help="Also sizes and platforms.")] = False,
) -> None:
    """List layers by name."""
    from dsecfs.layers.reach import read_layer_manifest

    node = session().node
    kinds, prefix = _kinds(kind, prefix)
    names = list(node.catalog.ls(kinds, prefix))

    def row(name: Name) -> dict[str, Any]:
        ref = node.catalog.get_ref(name)
        found: dict[str, Any] = {
            "name": str(name),
            "kind": name.kind,
            "digest": f"sha256:{ref.digest}",
            "created": ref.created,
        }
        if long:
            manifest = read_layer_manifest(node.store, ref.digest)
            found |= {
                "platform": manifest.platform,
                "files": manifest.inodes,
                "bytes": manifest.file_bytes,
                "labels": dict(manifest.labels),
            }
        return found

    columns = {"name": "name", "digest": "digest", "created": "created"}
    if long:
        columns |= {"platform": "platform", "files": "files", "bytes": "size", "labels": "labels"}
    show_rows(
        _each(row, names),
        columns,
        empty="no layers; dsec layer publish makes one",
        form={"digest": _short, "created": time_text, "bytes": size_text},
    )


def _kinds(kind: str, prefix: str) -> tuple[tuple[str, ...], str]:
    """Kinds to list, and the prefix without its kind."""
    first, slash, rest = prefix.partition("/")
    if slash and first in LAYER_KINDS and not kind:
        kind, prefix = first, rest
    if kind and kind not in LAYER_KINDS:
        raise BadInput(f"no kind {kind[:40]!r}", hint=f"expected one of {', '.join(LAYER_KINDS)}")
    return ((kind,) if kind else LAYER_KINDS), prefix


def _each(work: Any, items: list[Any]) -> list[Any]:
    """`work` of every item at once: a store answers many small questions together."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16, "list") as pool:
        return list(pool.map(work, items))


def _short(digest: str) -> str:
    return short(digest.removeprefix("sha256:"))


@app.command()
def show(layer: Annotated[str, LAYER]) -> None:
    """Show what a layer is."""
    from dsecfs.layers.content import read_head
    from dsecfs.layers.layout import ZERO
    from dsecfs.layers.reach import read_newest_layout

    node = session().node
    found = node.catalog.resolve(layer, LAYER_KINDS)
    head = read_head(node.store, found.digest)
    manifest = head.manifest
    blobs: list[dict[str, Any]] = []
    stored = 0
    for blob in manifest.blobs:
        layout = read_newest_layout(node.store, blob)[1]
        places = {(p.object, p.offset): p.stored for p in layout.places if p.codec != ZERO}
        stored += sum(places.values())
        blobs.append(
            {
                "digest": f"sha256:{blob.digest}",
                "bytes": blob.size,
                "chunk_size": blob.chunk_size,
                "chunks": blob.chunks,
                "stored": sum(places.values()),
                "objects": len(layout.objects),
                "hot_chunks": len(layout.hot),
            }
        )
    env = manifest.process_env
    show_record(
        {
            "name": str(found.name) if found.name else "",
            "digest": f"sha256:{found.digest}",
            "kind": manifest.kind,
            "platform": manifest.platform,
            "files": manifest.inodes,
            "bytes": manifest.file_bytes,
            "stored": stored,
            "metadata": len(head.erofs),
            "blobs": blobs
            if session().as_json
            else [
                f"{short(b['digest'].removeprefix('sha256:'))} {size_text(b['bytes'])} in "
                f"{b['chunks']} chunks, {b['hot_chunks']} of them hot"
                for b in blobs
            ],
            "sets": dict(env.set),
            "prepends": {k: ":".join(v) for k, v in env.prepend.items()},
            "labels": dict(manifest.labels),
        },
        form={"bytes": size_text, "stored": size_text, "metadata": size_text},
    )


@app.command()
def verify(layer: Annotated[str, LAYER]) -> None:
    """Read everything that the store has of a layer and check it."""
    from dsecfs.layers.verify import verify_layer

    node = session().node
    found = node.catalog.resolve(layer, LAYER_KINDS)
    with progress() as bars:
        bars.start(layer, None)
        result = verify_layer(
            node.store, found.digest, progress=lambda count: bars.advance(layer, count)
        )
        bars.finish(layer)
    show_record(
        {
            "digest": f"sha256:{found.digest}",
            "chunks": result.chunks,
            "bytes": result.bytes,
            "stored": result.stored,
            "bad_chunks": result.bad_chunks,
            "damage": result.damage,
        },
        form={"bytes": size_text, "stored": size_text},
    )
    if result.damage:
        raise Corrupt(
            f"layer {layer[:120]}: {result.bad_chunks} chunks are missing or damaged in the store",
            hint="publish the same content again, which heals it",
        )


@app.command()
def optimize(
    name: Annotated[
        str,
        typer.Argument(
            help="A layer, or an environment: then all its layers.",
            metavar="NAME",
            autocompletion=complete_layer_or_env,
        ),
    ],
    toolkits: Annotated[
        list[str] | None,
        typer.Argument(
            help="Toolkits on the environment.",
            metavar="[+TOOLKIT]...",
            autocompletion=complete_toolkit,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENV",
            help="Count recorded runs of this one, \"ENV +TOOLKIT\" with toolkits "
            "(default: every environment that the layer is in).",
            autocompletion=complete_env,
        ),
    ] = None,
    platform: Annotated[str, typer.Option(help="Platform.")] = "",
) -> None:
    """Put what recorded runs read into one object, so that it comes by few large reads.

    dsec run --record records runs. Layers keep their digests; what nodes have stays valid.
    """
    from dsecfs.cli.parse import only_toolkits
    from dsecfs.layers.profile import environments_with, optimize_runs

    node = session().node
    found = node.catalog.resolve(name, ("env", *LAYER_KINDS))
    environments = [_environment(text, platform) for text in env or ()]
    layers: list[Digest] = []
    if found.kind == "env":
        environments = environments or [
            node.environment(name, only_toolkits(toolkits), platform)
        ]
    else:
        if toolkits:
            raise BadInput(f"{name[:120]} is a layer", hint='say --env "ENV +TOOLKIT"')
        layers.append(found.digest)
        environments = environments or environments_with(
            node.catalog, found.digest, platform or node.platform
        )
    with progress() as bars:
        done = optimize_runs(
            node.store,
            environments,
            layers=layers,
            kept=node.dirs.kept_traces,
            progress=bars,
        )
    show_record(
        {
            "name": name,
            "runs": done.runs,
            "environments": done.environments,
            "hot_object": f"sha256:{done.written.object}" if done.written.object else None,
            "chunks": done.written.chunks,
            "stored": done.written.stored,
            "blobs": done.written.blobs,
        },
        form={"stored": size_text},
    )


def _environment(text: str, platform: str) -> Environment:
    """What "ENV +TOOLKIT" means."""
    from dsecfs.cli.parse import only_toolkits

    words = text.split()
    if not words:
        raise BadInput("--env says nothing", hint="expected ENV, or ENV and +TOOLKIT")
    return session().node.environment(words[0], only_toolkits(words[1:]), platform)


@app.command()
def diff(
    old: Annotated[str, LAYER],
    new: Annotated[str, LAYER],
    times: Annotated[bool, typer.Option("--times", help="Modification times count too.")] = False,
) -> None:
    """Compare two layers. Exit code 0 when they show the same files, 1 when not."""
    from dsecfs.layers.content import LayerContent
    from dsecfs.layers.diff import diff_layers

    node = session().node
    digests = [node.catalog.resolve(text, LAYER_KINDS).digest for text in (old, new)]
    rows: list[dict[str, Any]] = []
    if digests[0] != digests[1]:
        left, right = (LayerContent(node.store, digest) for digest in digests)
        for change in diff_layers(left, right, times=times):
            rows.append(
                {
                    "path": "/" + path_text(change.path),
                    "change": change.what,
                    "aspects": list(change.aspects),
                    "old_size": change.old_size,
                    "new_size": change.new_size,
                }
            )
    columns = {"change": "change", "path": "path", "aspects": "in", "new_size": "size"}
    show_rows(rows, columns, empty="the same", form={"new_size": size_text})
    if rows:
        raise typer.Exit(1)


@app.command()
def export(
    layer: Annotated[str, LAYER],
    file: Annotated[str, typer.Argument(help="Where to, - for standard output.", metavar="FILE")],
) -> None:
    """Write a layer as a tar archive, whiteouts as in OCI images."""
    from dsecfs.layers.content import LayerContent
    from dsecfs.layers.export import export_tar

    node = session().node
    found = node.catalog.resolve(layer, LAYER_KINDS)
    content = LayerContent(node.store, found.digest)
    if file == "-":
        if sys.stdout.isatty():
            raise BadInput("export: standard output is a terminal", hint="give a file name")
        export_tar(content, sys.stdout.buffer)
        return
    with _NewFile(Path(file)) as out:
        count = export_tar(content, out)
    show_record({"file": file, "digest": f"sha256:{found.digest}", "entries": count})


class _NewFile:
    """A file that appears under its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f"{path.name}.part")

    def __enter__(self) -> BinaryIO:
        self._file = self._part.open("wb")
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._file.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            self._part.unlink(missing_ok=True)


@app.command()
def rm(
    names: Annotated[
        list[str],
        typer.Argument(help="KIND/NAME:VERSION.", metavar="NAME...", autocompletion=complete_layer),
    ],
) -> None:
    """Remove names. What environments still use stays; dsec store restore brings a name back."""
    from dsecfs.layers.catalog import TRASH_S

    node = session().node
    found = []
    for text in names:
        resolved = node.catalog.resolve(text, LAYER_KINDS)
        if resolved.name is None or not resolved.name.version:
            raise BadInput(f"{text[:120]}: only a version of a name can be removed")
        found.append((resolved.name, resolved.digest))
    for name, _ in found:
        node.catalog.remove_ref(name)
    days = TRASH_S // 86400
    show_rows(
        [{"name": str(n), "digest": f"sha256:{d}", "restorable_days": days} for n, d in found],
        {"name": "removed", "digest": "digest", "restorable_days": "days to restore it"},
        form={"digest": _short},
    )


@app.command("used-by")
def used_by(layer: Annotated[str, LAYER]) -> None:
    """List the names, channels and environments that refer to a layer."""
    node = session().node
    found = node.catalog.resolve(layer, LAYER_KINDS)
    uses = node.catalog.used_by(found.digest)
    names = _env_names([u.name for u in uses if u.what == "env"])
    rows = [
        {"what": use.what, "name": use.name, "names": names.get(use.name, [])} for use in uses
    ]
    show_rows(
        rows,
        {"what": "what", "name": "name", "names": "known as"},
        empty="nothing refers to it",
        form={"name": lambda text: short(text) if len(text) == 64 else text, "names": ", ".join},
    )


def _env_names(digests: list[str]) -> dict[str, list[str]]:
    """Names of environments given by digest."""
    if not digests:
        return {}
    node = session().node
    wanted = set(digests)
    names = list(node.catalog.ls(("env",)))
    found: dict[str, list[str]] = {}
    for name, ref in zip(names, _each(node.catalog.get_ref, names), strict=True):
        if ref.digest in wanted:
            found.setdefault(ref.digest, []).append(str(name))
    return found
