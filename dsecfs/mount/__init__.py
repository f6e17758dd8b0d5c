"""Kernel mounts: from layers that are on this node to a tree.

    erofs.py        one EROFS image as a mount, from files or through loop devices
    direct.py       using a blob's cache file without FUSE
    layers.py       one mount per layer and node, with holders and generations
    holders.py      who uses something that is shared
    trees.py        FUSE mode: composed trees as roots of containers
    overlay.py      layers and an upper as one tree
    environment.py  a composed tree at a directory of the host (`dsec mount`)

The composition without kernel mounts is dsecfs/fuse.
"""

from dsecfs.mount.environment import mount_env, recover_mounts, umount_env
from dsecfs.mount.erofs import mount_erofs
from dsecfs.mount.holders import Holder
from dsecfs.mount.layers import LayerMounts
from dsecfs.mount.overlay import overlay_root

__all__ = [
    "Holder",
    "LayerMounts",
    "mount_env",
    "mount_erofs",
    "overlay_root",
    "recover_mounts",
    "umount_env",
]
