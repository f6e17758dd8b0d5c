"""The lowest layer of every container: what must exist although the image lacks it.

Mount points (/proc, /sys, /dev) and a working /etc/hosts come from here, so that neither crun
nor we create anything in the sandbox's upper: what is there was written by the sandbox. An
image that has a file of its own hides ours. Nothing is bind-mounted into /etc.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from dsecfs.layers.digest import Digest
from dsecfs.layers.local import LocalLayer
from dsecfs.layers.manifest import LayerManifest
from dsecfs.nodedirs import NodeDirs

VERSION = 1
"""Part of the file's name: raise it when the content changes."""

HOSTNAME = "sandbox"
"""The default host name; /etc/hosts knows it."""

_HOSTS = f"""127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
127.0.1.1\t{HOSTNAME}
""".encode()


def skeleton(dirs: NodeDirs) -> LocalLayer:
    """The layer, written to this node's disk when it is not there."""
    # Not a content digest: the image is made here, and never leaves the node.
    name = Digest(hashlib.sha256(b"dsec-skeleton-%d" % VERSION).hexdigest())
    path = dirs.meta(name)
    if not path.exists():
        _write(path)
    return LocalLayer(name, LayerManifest("base", "any", ()), path)


def _write(path: Path) -> None:
    # Imported here: once per node, and dsec run is quick to start.
    from dsecfs.layers.erofs.writer import Device, write_erofs
    from dsecfs.layers.tree import BLOCK, Extent, Inode, directory

    root, etc = directory(), directory()
    assert root.children is not None and etc.children is not None
    for name in (b"proc", b"sys", b"dev"):
        root.children[name] = directory()
    root.children[b"tmp"] = directory(0o1777)
    root.children[b"etc"] = etc
    extents = (Extent(0, 0, 0, len(_HOSTS)),)
    etc.children[b"hosts"] = Inode(stat.S_IFREG | 0o644, size=len(_HOSTS), extents=extents)
    # The flat form: the image and its one blob in one file.
    image = write_erofs(root, [Device(b"hosts", BLOCK)]) + _HOSTS.ljust(BLOCK, b"\0")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f".tmp-{os.urandom(8).hex()}")
    with new.open("wb") as file:
        file.write(image)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
