"""`dsec cache`: what this node has already."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from dsecfs.cli.complete import complete_env, complete_toolkit
from dsecfs.cli.lazy import group
from dsecfs.cli.output import note, progress, show_record, size_text
from dsecfs.cli.parse import only_toolkits
from dsecfs.cli.session import session
from dsecfs.errors import DsecfsError

app = group()

_POLL_S = 0.1


@app.command()
def stats() -> None:
    """Show counters of the chunk cache since it was made, and its size."""
    from dsecfs.cache.evict import cached_blobs, disk_use
    from dsecfs.cache.stats import amplification, read_totals
    from dsecfs.layers.forget import metadata_use

    node = session().node
    totals = read_totals(node.dirs)
    limit = node.settings.cache_options()["max_bytes"]
    asked = totals["hits"] + totals["misses"]
    counted = ("bytes_served", "bytes_fetched", "bytes_filled", "bytes_evicted")
    sizes = (*counted, "disk", "limit", "metadata", "metadata_limit")
    show_record(
        {
            "disk": disk_use(node.dirs),
            "limit": limit,
            "metadata": metadata_use(node.dirs),
            "metadata_limit": node.settings.metadata_max_bytes,
            "blobs": sum(1 for _ in cached_blobs(node.dirs)),
            "hit_share": totals["hits"] / asked if asked else 0.0,
            "amplification": amplification(totals),
            **totals,
        },
        form=dict.fromkeys(sizes, size_text),
    )


@app.command()
def prefetch(
    env: Annotated[
        str,
        typer.Argument(
            help="Environment or base.", metavar="ENV", autocompletion=complete_env
        ),
    ],
    toolkits: Annotated[
        list[str] | None,
        typer.Argument(
            help="Toolkits.", metavar="[+TOOLKIT]...", autocompletion=complete_toolkit
        ),
    ] = None,
    platform: Annotated[str, typer.Option(help="Platform.")] = "",
    wait: Annotated[bool, typer.Option(help="Wait until all of it is here.")] = True,
) -> None:
    """Fetch all data of an environment to this node."""
    node = session().node
    prepared = node.prepare(env, only_toolkits(toolkits), platform)
    client = node.start_fs()
    blobs = list({ref.digest: ref for layer in prepared.layers for ref in layer.blobs}.values())
    job = f"all-{prepared.digest[:32]}"
    client.prefetch(job, [(ref.digest, None) for ref in blobs])
    chunk = blobs[0].chunk_size if blobs else 0
    status = client.prefetch_status(job)
    with progress() as bars:
        bars.start(env, sum(ref.size for ref in blobs))
        shown = 0
        while wait and not status["finished"]:
            time.sleep(_POLL_S)
            status = client.prefetch_status(job)
            bars.advance(env, (status["done"] - shown) * chunk)
            shown = status["done"]
        bars.finish(env)
    if status["error"]:
        raise DsecfsError(f"prefetch of {env[:120]}: {status['error']}")
    if not wait:
        note("it goes on in the background; dsec cache stats shows how far it is")
    show_record(
        {
            "environment": env,
            "blobs": len(blobs),
            "bytes": sum(ref.size for ref in blobs),
            "chunks": status["total"],
            "done": status["done"],
        },
        form={"bytes": size_text},
    )


@app.command()
def clear() -> None:
    """Give back the disk space of everything that is not in use.

    What somebody asked for within the last half minute stays, so that no mount that is being
    made loses its layers.
    """
    from dsecfs.cache import ChunkCache
    from dsecfs.layers.forget import CLEAR_IDLE_S, forget_unused
    from dsecfs.mount.inuse import layers_in_use

    node = session().node
    node.dirs.create()
    node.release_idle()
    if (client := node.fs_client()) is not None:
        client.close_idle()
    cache = ChunkCache(node.dirs, node.settings.open_store, **node.settings.cache_options())
    try:
        done = cache.clear()
    finally:
        cache.close()
    mounted = layers_in_use(node.dirs).mounted
    forgotten = forget_unused(node.dirs, 0, mounted, idle_s=CLEAR_IDLE_S)
    show_record(
        {
            "chunks": done.chunks,
            "bytes": done.bytes,
            "layers": forgotten.layers,
            "metadata_bytes": forgotten.bytes,
            "pinned": done.pinned,
            "mounted": len(mounted),
        },
        form={"bytes": size_text, "metadata_bytes": size_text},
    )
