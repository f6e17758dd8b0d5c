"""Extended attributes of all inodes of an image: which are stored once, and each body.

An entry (name and value) that several inodes have goes to the shared area if that saves
space; an inode then holds its 4-byte id. Entries are in the order of (index, name), so
equal trees give equal bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dsecfs.layers.erofs import format as f
from dsecfs.layers.erofs.nodes import Node

_OPAQUE = f.split_xattr_name(f.OPAQUE)


def plan_xattrs(nodes: Sequence[Node]) -> bytes:
    """Fill in `Node.xattrs` of all nodes and return the shared area ("" if there is none).

    Raises BadInput with the path for a name, value or set of them that does not fit.
    """
    entries_of: list[tuple[Node, tuple[bytes, ...]]] = []
    uses: Counter[bytes] = Counter()
    for node in nodes:
        if node.inode.xattrs or node.inode.opaque:
            entries = _entries(node)
            entries_of.append((node, entries))
            uses.update(entries)
    shared = bytearray()
    ids: dict[bytes, int] = {}
    for _, entries in entries_of:
        for entry in entries:
            count = uses[entry]
            if count * len(entry) > len(entry) + 4 * count and entry not in ids:
                ids[entry] = len(shared) // 4
                shared += entry
    bodies: dict[tuple[bytes, ...], bytes] = {}
    for node, entries in entries_of:
        body = bodies.get(entries)
        if body is None:
            by_id = [entry for entry in entries if entry in ids][: f.XATTR_SHARED_MAX]
            left = set(entries).difference(by_id)
            body = f.XATTR_HEADER.pack(0, len(by_id))
            body += b"".join(ids[e].to_bytes(4, "little") for e in by_id)
            body += b"".join(e for e in entries if e in left)
            bodies[entries] = body
        if len(body) > f.XATTR_BODY_MAX:
            raise node.bad(
                f"its extended attributes take {len(body)} bytes",
                f"at most {f.XATTR_BODY_MAX} bytes fit",
            )
        node.xattrs = body
    return bytes(shared)


def _entries(node: Node) -> tuple[bytes, ...]:
    """The encoded entries of one inode, padded to 4 bytes each."""
    named: list[tuple[int, bytes, bytes]] = []
    for name, value in node.inode.xattrs.items():
        split = f.split_xattr_name(name)
        if split is None or b"\0" in name:
            raise node.bad(
                f"extended attribute {name[:80]!r} cannot be stored",
                "known are user.*, trusted.*, security.* and system.posix_acl_*",
            )
        if f.is_overlay_mark(name):
            raise node.bad(
                f"overlayfs would obey its extended attribute {name[:80]!r}",
                "escape it as trusted.overlay.overlay.* or leave it out",
            )
        index, rest = split
        if len(rest) > f.XATTR_VALUE_MAX >> 8:
            raise node.bad(f"extended attribute {name[:80]!r}… has a name of {len(name)} bytes")
        if len(value) > f.XATTR_VALUE_MAX:
            raise node.bad(
                f"extended attribute {name[:80]!r} has {len(value)} bytes",
                f"at most {f.XATTR_VALUE_MAX} bytes fit",
            )
        named.append((index, rest, value))
    if node.inode.opaque:
        assert _OPAQUE is not None
        named.append((*_OPAQUE, f.OPAQUE_VALUE))
    named.sort()
    out = []
    for index, rest, value in named:
        entry = f.XATTR_ENTRY.pack(len(rest), index, len(value)) + rest + value
        out.append(entry + bytes(-len(entry) % 4))
    return tuple(out)
