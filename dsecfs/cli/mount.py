"""`dsec mount` and `dsec umount`: an environment at a directory of this machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsecfs.cli.complete import complete_env, complete_toolkit
from dsecfs.cli.output import mode_in_use, show_record, show_rows
from dsecfs.cli.parse import only_toolkits
from dsecfs.cli.session import session
from dsecfs.errors import BadInput, Busy, Conflict, NotFound

if TYPE_CHECKING:
    from dsecfs.node import Node


def mount(
    env: Annotated[
        str | None,
        typer.Argument(help="Environment or base.", metavar="ENV", autocompletion=complete_env),
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Toolkits, then the directory.",
            metavar="[+TOOLKIT]... DIR",
            autocompletion=complete_toolkit,
        ),
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
    node = session().node
    mode, why = mode_in_use()
    _recover(node)
    if not target.is_dir():
        raise BadInput(f"mount on {directory[:200]}: not a directory", hint="make it first")
    if mode == "fuse" and upper:
        raise BadInput(f"--upper in FUSE mode ({why})", hint="leave it out; this mode is read-only")
    if _place(target) in {row["directory"] for row in _mounted(node)}:
        raise Conflict(
            f"mount on {directory[:200]}: an environment is mounted there already",
            hint=f"dsec umount {directory[:200]}",
        )
    prepared = node.prepare(env, only_toolkits(toolkits), platform)
    if mode == "fuse":
        from dsecfs.mount.fuse import mount_tree

        client = mount_tree(
            node.dirs,
            prepared.top_first,
            target,
            node.settings.store_url,
            cache=node.settings.cache_options(),
            housekeeping=node.settings.housekeeping_options(),
            request_limit_s=node.settings.request_limit_s,
        )
        if not no_prefetch:
            node.warm(client, prepared)
    else:
        from dsecfs.mount import mount_env

        client = node.start_fs()
        if not no_prefetch:
            node.warm(client, prepared)
        with contextlib.closing(node.layer_mounts()) as mounts:
            mount_env(
                node.dirs,
                prepared.top_first,
                target,
                upper=Path(upper) if upper else None,
                mounts=mounts,
            )
    show_record({"environment": env, "directory": str(target), "mode": mode, "because": why})


def umount(
    directory: Annotated[str, typer.Argument(help="Where it is mounted.", metavar="DIR")],
    lazy: Annotated[
        bool, typer.Option("--lazy", "-l", help="Detach now, end with the last user.")
    ] = False,
) -> None:
    """Unmount what dsec mount has mounted."""
    node = session().node
    target = Path(directory)
    modes = {row["directory"]: row["mode"] for row in _mounted(node)}
    try:
        if modes.get(_place(target)) == "fuse":
            from dsecfs.mount.fuse import umount_tree

            umount_tree(node.dirs, target, mode="drain" if lazy else "refuse")
        elif os.geteuid() == 0:
            from dsecfs.mount import umount_env

            umount_env(node.dirs, target, detach=lazy)
        else:
            raise NotFound(
                f"unmount {directory[:200]}: no environment is mounted there",
                hint="dsec mount shows what is mounted",
            )
    except Busy as e:
        raise Busy(e.message, hint=f"{e.hint}; or detach it with --lazy") from None
    show_record({"directory": directory, "unmounted": True})


def _place(target: Path) -> Path:
    """A target as it is remembered; no symlink is followed in its last component."""
    return Path(os.path.realpath(target.parent), target.name)


def _recover(node: Node) -> None:
    """Clear what mounts left whose processes are gone."""
    from dsecfs.mount.fuse import recover_trees

    recover_trees(node.dirs)
    if os.geteuid() == 0:
        from dsecfs.mount import recover_mounts

        recover_mounts(node.dirs)


def _mounted(node: Node) -> list[dict[str, Any]]:
    from dsecfs.mount.environment import mounted_envs
    from dsecfs.mount.fuse import mounted_trees

    rows = [
        {"directory": target, "mode": "kernel or loop", "layers": len(layers), "state": "mounted"}
        for target, layers in mounted_envs(node.dirs).items()
    ]
    rows += [
        {
            "directory": tree.target,
            "mode": "fuse",
            "layers": len(tree.layers),
            "state": "mounted" if tree.serving else "detached or dead",
        }
        for tree in mounted_trees(node.dirs)
    ]
    return rows


def _list() -> None:
    columns = {"directory": "directory", "mode": "mode", "layers": "layers", "state": "state"}
    rows = [{**row, "directory": str(row["directory"])} for row in _mounted(session().node)]
    show_rows(rows, columns, empty="nothing is mounted")
