"""This node as commands and the runtime use it: settings become store, layers and daemon.

    node = Node(settings)
    prepared = node.prepare("swe/django:1", ["dsh@stable"])    names -> layers on this node
    node.start_fs()                                            their data, on demand
    node.warm(prepared)                                        ... and before it is asked for

What must hold: nothing here is needed to read a mounted tree; whoever dies between two steps
leaves only what `dsec fs` and recovery know. Imports are where they are used: `dsec run` with
everything on the node touches no store and no client library.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dsecfs.errors import DsecfsError, NotFound, Unsupported
from dsecfs.layers.catalog import Catalog
from dsecfs.layers.digest import Digest
from dsecfs.layers.environment import Environment, check_layers
from dsecfs.layers.local import LocalLayer, LocalLayers
from dsecfs.settings import Settings

if TYPE_CHECKING:
    from dsecfs.fuse.config import FsConfig
    from dsecfs.fuse.control import FsClient
    from dsecfs.kernel.probe import Mode
    from dsecfs.mount.layers import LayerMounts
    from dsecfs.store.base import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An environment whose layers are ready to mount."""

    environment: Environment
    layers: tuple[LocalLayer, ...]
    """Bottom to top, as `environment.layers_bottom_up`."""

    @property
    def top_first(self) -> tuple[LocalLayer, ...]:
        return self.layers[::-1]

    @property
    def digest(self) -> Digest:
        """What traces of this composition are filed under."""
        return self.environment.digest

    def process_environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return self.environment.process_environment((la.manifest for la in self.layers), extra)


class Node:
    """One node. Cheap to make; opens what is used."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.dirs = settings.dirs

    @cached_property
    def store(self) -> Store:
        return self.settings.open_store()

    @cached_property
    def catalog(self) -> Catalog:
        return Catalog(self.store, self.dirs.refs)

    @cached_property
    def local(self) -> LocalLayers:
        return LocalLayers(self.store, self.dirs)

    def close(self) -> None:
        if "store" in self.__dict__:
            self.store.close()

    @property
    def platform(self) -> str:
        """The platform that is meant when nobody says one."""
        if self.settings.platform:
            return self.settings.platform
        from dsecfs.layers.platforms import Platform

        return str(Platform.here())

    def mode(self) -> tuple[Mode, str]:
        """How layers are mounted here, and why so."""
        from dsecfs.kernel.probe import quick_mode

        best, why = quick_mode()
        if self.settings.mode == "auto":
            return best, why
        wanted: Mode = self.settings.mode  # type: ignore[assignment]  # checked by settings
        if (wanted == "kernel" and best != "kernel") or (wanted == "loop" and best == "fuse"):
            raise Unsupported(
                f"mode {wanted} was asked for, and is not possible: {why}",
                hint="dsec doctor says what is missing; --set mode=auto takes what there is",
            )
        return wanted, "it was asked for"

    def environment(
        self, text: str, toolkits: Iterable[str] = (), platform: str = ""
    ) -> Environment:
        """What a name means, with toolkits on top. Raises as `Catalog.environment_for`."""
        return self.catalog.environment_for(text, toolkits, platform or self.platform)

    def prepare(self, text: str, toolkits: Iterable[str] = (), platform: str = "") -> Prepared:
        """Resolve a name and make its layers ready to mount.

        Raises as `Catalog.environment_for`, `LocalLayers.ensure` and `check_layers`.
        """
        environment = self.environment(text, toolkits, platform)
        self.dirs.create()
        layers = tuple(self.local.ensure_all(environment.layers_bottom_up()))
        check_layers(environment, [layer.manifest for layer in layers])
        return Prepared(environment, layers)

    # -- the FUSE daemon

    def fs_config(self) -> FsConfig:
        """The node's FUSE mount as the settings want it."""
        from dsecfs.fuse.config import node_config

        return node_config(
            self.dirs,
            self.settings.store_url,
            cache=self.settings.cache_options(),
            housekeeping=self.settings.housekeeping_options(),
            request_limit_s=self.settings.request_limit_s,
        )

    def start_fs(self) -> FsClient:
        """The daemon that serves this node's blobs; started if it does not run."""
        from dsecfs.fuse.daemon import ensure_daemon

        self.dirs.create()
        return ensure_daemon(self.fs_config())

    def fs_client(self) -> FsClient | None:
        """The daemon, None if it does not run."""
        from dsecfs.fuse.control import FsClient

        client = FsClient(self.dirs.control)
        try:
            client.ping()
        except NotFound:
            return None
        return client

    def layer_mounts(self) -> LayerMounts:
        """The layer mounts of this node, for kernel and loop mode. The caller closes them."""
        from dsecfs.mount.layers import LayerMounts

        mode, _ = self.mode()
        return LayerMounts(
            self.dirs, mode=mode, read_ahead_kib=self.settings.mount_read_ahead // 1024
        )

    def release_idle(self) -> None:
        """Take down layer mounts that nobody holds, and forget such trees. They keep files of
        the daemon open, and what they need from being removed."""
        if os.geteuid() == 0 and (self.dirs.layers.is_dir() or self.dirs.trees.is_dir()):
            from dsecfs.mount import LayerMounts, recover_mounts

            with contextlib.closing(LayerMounts(self.dirs)) as mounts:
                recover_mounts(self.dirs, mounts=mounts)
                mounts.recover()
                mounts.trim(0)
                if self.dirs.trees.is_dir():
                    mounts.trees.recover()
                    mounts.trees.trim(0)

    def warm(self, client: FsClient, prepared: Prepared) -> None:
        """Have the daemon fetch what earlier runs of this composition read. Advice only."""
        if not self.settings.prefetch:
            return
        try:
            client.warm(prepared.digest, [layer.digest for layer in prepared.layers])
        except DsecfsError as e:
            # Too much else is being fetched, or the worker is being replaced: files come all
            # the same when they are read.
            log.info("not warmed: %s", e)
