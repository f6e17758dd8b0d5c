"""`dsec store`: make, check, measure and clean up a store."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer

from dsecfs.cli.complete import complete_trash
from dsecfs.cli.lazy import group
from dsecfs.cli.output import note, progress, show_record, show_rows, size_text, time_text
from dsecfs.cli.session import session
from dsecfs.errors import BadInput, Corrupt

app = group()


@app.command()
def init(
    url: Annotated[
        str | None,
        typer.Argument(help="file:DIR, 3fs:DIR or s3://BUCKET/PREFIX.", metavar="URL"),
    ] = None,
) -> None:
    """Make a store (the configured one) and try out what dsec needs of it."""
    from dsecfs.store.open import check_store, open_store

    if url is not None:
        session().options.append(("store", url))
    store = open_store(session().settings.store_url, create=True)
    try:
        check_store(store)
    finally:
        store.close()
    show_record({"store": store.url, "usable": True})


@app.command()
def stats() -> None:
    """Count objects and bytes in the store by what they are."""
    from dsecfs.layers.gc import stats as count

    found = count(session().node.store)
    rows: list[dict[str, Any]] = [
        {"kind": kind, "objects": found.objects[kind], "bytes": found.bytes[kind]}
        for kind in sorted(found.objects)
    ]
    show_rows(
        rows,
        {"kind": "kind", "objects": "objects", "bytes": "size"},
        empty="the store is empty",
        form={"bytes": size_text},
    )


@app.command()
def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only say what would happen.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say of everything that stays, why.")
    ] = False,
) -> None:
    """Delete what nothing refers to any more, after a grace (docs/gc-protocol.md)."""
    from dsecfs.layers.gc import collect

    report = collect(session().node.store, dry_run=dry_run, progress=_step)
    for key, why in report.missing[:100]:
        note(f"missing: {key}, needed by {why}")
    if explain:
        show_rows(
            [{"key": k.key, "bytes": k.size, "why": k.why} for k in report.kept],
            {"key": "key", "bytes": "size", "why": "kept because"},
            form={"bytes": size_text},
        )
        return
    rows = [
        ("kept", len(report.kept), sum(k.size for k in report.kept)),
        ("marked for deletion", len(report.tombstoned), sum(o.size for o in report.tombstoned)),
        ("waiting for the grace", len(report.waiting), sum(o.size for o in report.waiting)),
        ("deleted", len(report.deleted), sum(o.size for o in report.deleted)),
        ("revived", len(report.revived), 0),
        ("missing", len(report.missing), 0),
        ("tidied up", report.housekeeping, 0),
    ]
    show_rows(
        [{"what": what, "objects": count, "bytes": size} for what, count, size in rows],
        {"what": "would be" if dry_run else "what", "objects": "objects", "bytes": "size"},
        form={"bytes": size_text},
    )
    _complain(report.missing)


def _step(text: str) -> None:
    if sys.stderr.isatty():
        note(text)


@app.command()
def check(
    data: Annotated[
        bool, typer.Option("--data", help="Also read and verify every chunk.")
    ] = False,
) -> None:
    """Check that everything that names lead to is there. Deletes nothing."""
    from dsecfs.layers.gc import store_clock
    from dsecfs.layers.reach import reach
    from dsecfs.layers.verify import verify_layer

    store = session().node.store
    found = reach(store, store_clock(store))
    there = {info.key for info in store.list("")}
    missing = [*found.missing, *((k, why) for k, why in found.why.items() if k not in there)]
    damage: list[str] = [f"{key} is missing, needed by {why}" for key, why in missing]
    if data:
        with progress() as bars:
            for layer in sorted(found.layers):
                bars.start(layer[:12], None)
                advance = partial(bars.advance, layer[:12])
                result = verify_layer(store, layer, progress=advance)
                bars.finish(layer[:12])
                damage += result.damage
    show_record(
        {
            "store": store.url,
            "layers": len(found.layers),
            "blobs": len(found.blobs),
            "objects": sum(key.startswith("objects/") for key in found.why),
            "chunks_verified": data,
            "damage": damage,
        }
    )
    _complain(missing)
    if damage:
        raise Corrupt(f"store {store.url}: {len(damage)} things are damaged")


def _complain(missing: list[tuple[str, str]]) -> None:
    if missing:
        raise Corrupt(
            f"store {session().settings.store_url}: {len(missing)} objects are missing",
            hint="publish what they belong to again",
        )


@app.command()
def trash() -> None:
    """List removed names that can be restored."""
    from dsecfs.layers.catalog import TRASH_S

    rows: list[dict[str, Any]] = [
        {"name": f"{name.kind}/{name.with_kind('')}", "removed": at, "until": at + TRASH_S}
        for name, at in session().node.catalog.trash()
    ]
    show_rows(
        rows,
        {"name": "name", "removed": "removed", "until": "can be restored until"},
        empty="nothing was removed lately",
        form={"removed": time_text, "until": time_text},
    )


@app.command()
def restore(
    name: Annotated[
        str,
        typer.Argument(
            help="KIND/NAME:VERSION.", metavar="NAME", autocompletion=complete_trash
        ),
    ],
) -> None:
    """Bring back a removed name."""
    from dsecfs.layers.names import parse_name

    catalog = session().node.catalog
    wanted = parse_name(name)
    if not wanted.kind:
        there = {n for n, _ in catalog.trash() if n.with_kind("") == wanted}
        if len(there) > 1:
            kinds = ", ".join(sorted(n.kind for n in there))
            raise BadInput(f"{name[:120]} is ambiguous", hint=f"say the kind: {kinds}")
        wanted = there.pop() if there else wanted.with_kind("env")
    ref = catalog.restore_ref(wanted)
    show_record({"name": f"{wanted.kind}/{wanted.with_kind('')}", "digest": f"sha256:{ref.digest}"})
