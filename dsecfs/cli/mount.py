"""`dsec mount` and `dsec umount`: an environment at a directory of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dsecfs.cli.complete import complete_env
from dsecfs.cli.output import note, show_record, show_rows
from dsecfs.cli.parse import only_toolkits
from dsecfs.cli.session import session
from dsecfs.errors import BadInput, DsecfsError, NotFound


def mount(
    env: Annotated[
        str | None,
        typer.Argument(help="Environment or base.", metavar="ENV", autocompletion=complete_env),
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Toolkits, then the directory.", metavar="[+TOOLKIT]... DIR"),
    ] = None,
    upper: Annotated[
        str, typer.Option(metavar="DIR", help="Writable: what is written goes to DIR.")
    ] = "",
    no_prefetch: Annotated[
        bool,
        typer.Option("--no-prefetch", help="Fetch only what is read, as --set prefetch=false."),
    ] = False,
    platform: Annotated[str, typer.Option(help="Platform.")] = "",
) -> None:
    """Mount an environment on a directory; without arguments: show what is mounted.

    Root gets kernel mounts where the kernel can (dsec doctor), everybody else a FUSE mount.
    """
    if env is None:
        _list()
        return
    if not words:
        raise BadInput("no directory to mount on", hint="expected ENV [+TOOLKIT]... DIR")
    *toolkits, directory = words
    target = Path(directory)
    if not target.is_dir():
        raise BadInput(f"mount on {directory[:200]}: not a directory", hint="make it first")
    node = session().node
    mode, why = node.mode()
    prepared = node.prepare(env, only_toolkits(toolkits), platform)
    if mode == "fuse":
        if upper:
            raise BadInput(
                f"--upper in FUSE mode ({why})", hint="leave it out; this mode is read-only"
            )
        from dsecfs.fuse.config import tree_config
        from dsecfs.fuse.daemon import start_daemon
        from dsecfs.fuse.trees import write_tree

        tree = prepared.digest
        write_tree(node.dirs.trees, tree, [layer.digest for layer in prepared.layers])
        client = start_daemon(
            tree_config(
                node.dirs,
                node.settings.store_url,
                tree,
                target,
                cache=node.settings.cache_options(),
                request_limit_s=node.settings.request_limit_s,
            )
        )
    else:
        from dsecfs.mount import mount_env, recover_mounts

        client = node.start_fs()
        mounts = node.layer_mounts()
        try:
            recover_mounts(node.dirs, mounts=mounts)
            mount_env(
                node.dirs,
                prepared.top_first,
                target,
                upper=Path(upper) if upper else None,
                mounts=mounts,
            )
        finally:
            mounts.close()
    if not no_prefetch:
        node.warm(client, prepared)
    show_record({"environment": env, "directory": str(target), "mode": mode, "because": why})


def umount(
    directory: Annotated[str, typer.Argument(help="Where it is mounted.", metavar="DIR")],
    lazy: Annotated[
        bool, typer.Option("--lazy", "-l", help="Detach now, end with the last user.")
    ] = False,
) -> None:
    """Unmount what dsec mount has mounted."""
    from dsecfs.fuse.config import tree_config
    from dsecfs.fuse.daemon import stop_daemon

    node = session().node
    target = Path(directory)
    config = tree_config(node.dirs, node.settings.store_url, "", target)
    if config.control.exists():
        if not stop_daemon(config, mode="drain" if lazy else "refuse"):
            raise NotFound(f"unmount {directory[:200]}: its daemon is gone; nothing is mounted")
    elif os.geteuid() == 0:
        from dsecfs.mount import umount_env

        umount_env(node.dirs, target, detach=lazy)
    else:
        raise NotFound(
            f"unmount {directory[:200]}: no environment is mounted there",
            hint="dsec mount shows what is mounted",
        )
    show_record({"directory": directory, "unmounted": True})


def _list() -> None:
    from dsecfs.fuse.control import FsClient
    from dsecfs.mount.environment import mounted_envs

    node = session().node
    rows: list[dict[str, Any]] = [
        {"directory": str(target), "mode": "kernel or loop", "layers": len(layers)}
        for target, layers in mounted_envs(node.dirs).items()
    ]
    for socket in sorted((node.dirs.run / "mounts").glob("*/fs.sock")):
        try:
            status = FsClient(socket, timeout_s=2).status()
        except NotFound:
            continue  # its daemon ended
        except DsecfsError as e:
            note(e.message)
            continue
        rows.append({"directory": status["mountpoint"], "mode": "fuse", "tree": status["tree"]})
    show_rows(
        rows,
        {"directory": "directory", "mode": "mode", "layers": "layers"},
        empty="nothing is mounted",
    )
