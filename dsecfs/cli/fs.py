"""`dsec fs`: the FUSE daemon that serves this node's blobs and trees."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dsecfs.cli.lazy import group
from dsecfs.cli.output import show_record
from dsecfs.cli.session import session
from dsecfs.errors import Busy, NotFound

app = group()


@app.command()
def start() -> None:
    """Start the daemon, if it does not run."""
    session().node.start_fs()
    status()


@app.command()
def stop(
    drain: Annotated[
        bool, typer.Option("--drain", help="End when nobody uses it any more.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="End now; whoever reads gets errors.")
    ] = False,
) -> None:
    """Stop the daemon; refused while its files are in use.

    Nothing stays mounted then, and no process stays.
    """
    from dsecfs.fuse.daemon import stop_daemon

    node = session().node
    mode = "force" if force else "drain" if drain else "refuse"
    node.release_idle()
    if mode == "refuse":
        _check_containers()
    try:
        stopped = stop_daemon(node.fs_config(), mode=mode)
    except Busy as e:
        hint = "end containers and mounts (dsec mount lists them), or --drain, or --force"
        raise Busy(e.message, hint=hint) from None
    _let_go()
    show_record({"mountpoint": str(node.dirs.fs), "stopped": stopped})


def _check_containers() -> None:
    """Busy if containers have trees as their roots: their mounts are not seen from here."""
    from dsecfs.mount.trees import RootTrees

    held = [name for held in RootTrees(session().node.dirs).described().values() for name in held]
    if held:
        raise Busy(
            f"stop the FUSE daemon: it serves {len(held)} container(s) in FUSE mode",
            hint="end them, or use --drain",
        )


def _let_go() -> None:
    """Unpin the namespaces of layers and containers if none is left."""
    from dsecfs.kernel.namespaces import unpin_namespaces

    dirs = session().node.dirs
    if os.geteuid() == 0 and not any(
        path.is_dir() and any(path.iterdir()) for path in (dirs.layers, dirs.sandboxes)
    ):
        unpin_namespaces(dirs.namespace.parent)


@app.command()
def restart() -> None:
    """Replace the worker by one with the code on disk; readers notice nothing."""
    client = session().node.fs_client()
    if client is None:
        raise NotFound("no FUSE daemon runs", hint="dsec fs start")
    show_record({"worker": client.restart_worker()})


@app.command()
def status() -> None:
    """Show the daemon's processes and how they fare. Exit code 3 if none runs."""
    node = session().node
    client = node.fs_client()
    if client is None:
        raise NotFound(f"no FUSE daemon runs for {node.dirs.run}", hint="dsec fs start")
    show_record({**client.status(), **client.stats()["fuse"]})
