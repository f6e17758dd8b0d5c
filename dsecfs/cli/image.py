"""`dsec image`: foreign images become environments."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dsecfs.cli.lazy import group
from dsecfs.cli.output import note, progress, show_record, show_rows, size_text
from dsecfs.cli.parse import pairs
from dsecfs.cli.session import session
from dsecfs.errors import BadInput, DsecfsError
from dsecfs.layers.batch import (
    Job,
    Outcome,
    done_before,
    import_many,
    open_report,
    outcome_json,
    read_list,
)
from dsecfs.layers.names import parse_name

app = group()


@app.command("import")
def import_(
    spec: Annotated[
        str | None,
        typer.Argument(
            help="oci:DIR[:TAG], oci-archive:FILE, docker-archive:FILE or docker://REFERENCE.",
            metavar="SPEC",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="NAME:VERSION of the environment.", metavar="NAME")
    ] = None,
    from_: Annotated[
        str, typer.Option("--from", metavar="FILE", help="Import many: a line SPEC NAME for each.")
    ] = "",
    jobs: Annotated[int, typer.Option(help="Images, or layers of one, at the same time.")] = 2,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what the report says is done.")
    ] = False,
    report: Annotated[
        str, typer.Option(metavar="FILE", help="Append a JSON line for each image.")
    ] = "",
    platform: Annotated[str, typer.Option(help="Which of a multi-platform image.")] = "",
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Label the base.")
    ] = None,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse/--no-reuse",
            help="Take layers that the store has; --no-reuse stores them again, which heals "
            "a damaged store.",
        ),
    ] = True,
    authfile: Annotated[
        str, typer.Option(metavar="FILE", help="Registry credentials (containers-auth.json).")
    ] = "",
    tls_verify: Annotated[
        bool, typer.Option("--tls-verify/--no-tls-verify", help="Check the registry's certificate.")
    ] = True,
) -> None:
    """Import an image, or many: layers are uploaded once, whoever shares them."""
    from dsecfs.layers.sources.image import RegistryOptions

    if not 1 <= jobs <= 64:
        raise BadInput(f"--jobs {jobs}: expected 1 to 64")
    registry = RegistryOptions(Path(authfile) if authfile else None, tls_verify)
    labels = pairs(label, "--label")
    if from_:
        if spec is not None:
            raise BadInput("--from and an image on the command line", hint="use one of them")
        if not reuse:
            raise BadInput("--no-reuse with --from", hint="it is for one image")
        _many(Path(from_), jobs, resume, report, platform, registry, labels)
        return
    if spec is None or name is None:
        raise BadInput("no image to import", hint="expected SPEC NAME, or --from FILE")
    if resume:
        raise BadInput("--resume without --from", hint="it is for lists of images")
    from dsecfs.layers.image import import_image
    from dsecfs.layers.sources.image import open_image

    full = parse_name(name)
    with open_image(spec, platform=platform, registry=registry) as image, progress() as bars:
        done = import_image(
            session().node.store,
            image,
            full,
            jobs=jobs,
            reuse=reuse,
            labels=labels,
            progress=bars,
        )
    for line in done.notes:
        note(line)
    show_record(
        {
            "name": str(full.with_kind("env")),
            "environment": f"sha256:{done.environment}",
            "base": f"sha256:{done.base.digest}",
            "layers": done.layers,
            "reused": done.reused,
            "files": done.base.head.manifest.inodes,
            "bytes": done.base.head.manifest.file_bytes,
            "uploaded": done.uploaded,
        },
        form={"bytes": size_text, "uploaded": size_text},
    )


def _many(
    path: Path,
    jobs: int,
    resume: bool,
    report: str,
    platform: str,
    registry: Any,
    labels: dict[str, str],
) -> None:
    wanted: list[Job] = read_list(path)
    if resume and not report:
        raise BadInput("--resume without --report", hint="name the report of the earlier run")
    before = done_before(Path(report)) if resume else None
    file = open_report(Path(report)) if report else None

    def write(outcome: Outcome) -> None:
        if file is not None:
            file.write(outcome_json(outcome) + "\n")
            file.flush()

    outcomes: list[Outcome] = []
    try:
        with progress() as bars:
            for outcome in import_many(
                session().node.store,
                wanted,
                parallel=jobs,
                platform=platform,
                registry=registry,
                resume=before,
                labels=labels,
                progress=bars,
                report=write,
            ):
                outcomes.append(outcome)
    finally:
        if file is not None:
            file.close()
    show_rows(
        [asdict(o) for o in outcomes],
        {
            "name": "name",
            "outcome": "outcome",
            "layers": "layers",
            "reused": "reused",
            "uploaded": "uploaded",
            "seconds": "seconds",
            "error": "error",
        },
        empty=f"{path} names no images",
        form={"uploaded": size_text},
    )
    failed = [o for o in outcomes if o.outcome == "failed"]
    if failed:
        raise DsecfsError(
            f"{len(failed)} of {len(outcomes)} images were not imported",
            hint="the report says why; --resume tries them again" if report else failed[0].error,
        )
