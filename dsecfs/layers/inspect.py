"""Looking at a composition: what one layer hides from another, and who provides a path.

`check` is for people who put layers together that did not know of each other: a toolkit
that brings its own /etc/passwd, or a dpkg database without the base's packages, works until
something looks there. Names of files decide the risk; a hidden file with the same content
is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dsecfs.errors import BadInput, NotFound
from dsecfs.layers.content import LayerContent, same_content
from dsecfs.layers.merge import LayerTree, hidden, provider
from dsecfs.layers.sources.base import show
from dsecfs.layers.tree import Inode

Risk = Literal["high", "medium", "low"]
RISKS: tuple[Risk, ...] = ("high", "medium", "low")

_DPKG = "dpkg no longer knows the packages of the lower layer"
_RPM = "rpm no longer knows the packages of the lower layer"
_CERTIFICATES = "certificates that the lower layer trusts are gone"
_RULES: tuple[tuple[Risk, str, str], ...] = (
    ("high", r"var/lib/dpkg/status(\.d/.*)?", _DPKG),
    ("high", r"(var/lib|usr/lib/sysimage)/rpm/.*", _RPM),
    ("high", r"lib/apk/db/installed", "apk no longer knows the packages of the lower layer"),
    ("high", r"etc/(passwd|group|shadow|gshadow)", "users of the lower layer are gone"),
    ("high", r"etc/ld\.so\.cache", "libraries of the lower layer may not be found"),
    (
        "high",
        r"(usr/)?lib(32|64)?/(.*/)?(ld-linux[^/]*|libc\.so\.6|libc\.musl[^/]*)",
        "every program of the lower layer loads it",
    ),
    ("high", r"etc/ssl/certs/ca-certificates\.crt", _CERTIFICATES),
    ("high", r"etc/pki/tls/certs/ca-bundle\.crt", _CERTIFICATES),
    (
        "high",
        r"etc/(ld\.so\.(conf|preload)|nsswitch\.conf|pam\.d/.*|sudoers|resolv\.conf)",
        "the whole system looks there",
    ),
    ("medium", r".*\.so(\.[0-9][^/]*)?", "a library that other programs may load"),
    ("medium", r"(.*/)?s?bin/[^/]+", "a program that others may call"),
    ("medium", r".*/(site|dist)-packages/.*", "a Python package may be half of each layer"),
    ("medium", r".*/node_modules/.*", "a Node.js package may be half of each layer"),
    ("medium", r"etc/.*", "configuration of the lower layer"),
)
_COMPILED = tuple((risk, re.compile(rule.encode()), why) for risk, rule, why in _RULES)
_MAX_LINKS = 40
"""As the kernel's MAXSYMLINKS."""


class Hidden(NamedTuple):
    """A file of layer `lower` that does not show because of layer `upper`."""

    path: bytes
    upper: int
    """Index into the layers, bottom is 0."""
    lower: int
    removed: bool
    """There is nothing at the path now."""
    risk: Risk
    why: str


class Stand(NamedTuple):
    """What one layer has at a path."""

    layer: int
    what: str
    """file, directory, symlink, device, fifo, socket or whiteout."""
    inode: Inode
    shows: bool
    """It is what the composition shows, or part of a merged directory."""


class Explained(NamedTuple):
    """Where a path of a composition comes from."""

    path: bytes
    """The path that was looked up, after symbolic links on the way."""
    provider: int | None
    stands: tuple[Stand, ...]
    """Every layer that says something about it, top first."""


def trees(layers: Sequence[LayerContent]) -> list[LayerTree[str]]:
    """The layers as the merging module has them, in the same order."""
    return [
        LayerTree(layer.root, [b.digest for b in layer.head.manifest.blobs]) for layer in layers
    ]


def check(layers: Sequence[LayerContent]) -> list[Hidden]:
    """Files that a layer hides from another (bottom first), the worst first.

    A file of high risk that is the same in both is left out.
    """
    found = []
    stacked = trees(layers)
    for path, upper, lower in hidden(stacked):
        risk, why = classify(path)
        there = provider(stacked, path)
        if risk == "high" and there is not None and _same(layers, path, there, lower):
            continue
        found.append(Hidden(path, upper, lower, there is None, risk, why))
    found.sort(key=lambda h: (RISKS.index(h.risk), h.upper, h.lower, h.path))
    return found


def classify(path: bytes) -> tuple[Risk, str]:
    """How much it matters that a file of this name is hidden, and why."""
    for risk, rule, why in _COMPILED:
        if rule.fullmatch(path):
            return risk, why
    return "low", ""


def explain(layers: Sequence[LayerContent], path: bytes) -> Explained:
    """Who provides `path` (absolute or not) in a composition, bottom layer first.

    Symbolic links on the way are followed, one at its end is not. Raises BadInput for loops
    of links, NotFound if no layer says anything about the path.
    """
    stacked = trees(layers)
    found = _follow(stacked, path)
    who = provider(stacked, found)
    stands = []
    visible = who is not None
    for number in range(len(layers) - 1, -1, -1):
        inode = lookup(layers[number].root, found)
        if inode is None:
            # Something on the way may end the view: a whiteout, a file, an opaque directory.
            if visible and _ends(layers[number].root, found):
                visible = False
            continue
        shows = visible and not inode.is_whiteout
        stands.append(Stand(number, _kind(inode), inode, shows))
        if not inode.is_dir or inode.opaque or _ends(layers[number].root, found):
            visible = False
    if not stands:
        raise NotFound(f"no layer has /{show(found)}", hint="is the path spelled right?")
    return Explained(found, who, tuple(stands))


def lookup(root: Inode, path: bytes) -> Inode | None:
    """The inode at a path of one tree; links are not followed."""
    node: Inode | None = root
    for name in _names(path):
        node = (node.children or {}).get(name) if node is not None else None
    return node


def _names(path: bytes) -> list[bytes]:
    return [name for name in path.split(b"/") if name and name != b"."]


def _follow(stacked: Sequence[LayerTree[str]], path: bytes) -> bytes:
    """`path` without symbolic links on the way, as the composition shows them."""
    todo = _names(path)[::-1]
    done: list[bytes] = []
    links = 0
    while todo:
        name = todo.pop()
        if name == b"..":
            done = done[:-1]
            continue
        done.append(name)
        here = b"/".join(done)
        who = provider(stacked, here) if todo else None
        inode = lookup(stacked[who].root, here) if who is not None else None
        if inode is None or not inode.is_symlink:
            continue
        links += 1
        if links > _MAX_LINKS:
            raise BadInput(f"{show(path)!r}: too many symbolic links on the way")
        done = [] if inode.target.startswith(b"/") else done[:-1]
        todo.extend(_names(inode.target)[::-1])
    return b"/".join(done)


def _ends(root: Inode, path: bytes) -> bool:
    """Whether a layer lets nothing of lower layers through at `path`."""
    node: Inode | None = root
    for name in _names(path):
        assert node is not None
        if node.opaque:
            return True
        if node.children is None:
            return True
        node = node.children.get(name)
        if node is None:
            return False
    return node is not None and (node.opaque or node.children is None)


def _kind(inode: Inode) -> str:
    if inode.is_whiteout:
        return "whiteout"
    for test, what in ((inode.is_reg, "file"), (inode.is_dir, "directory")):
        if test:
            return what
    return "symlink" if inode.is_symlink else "special file"


def _same(layers: Sequence[LayerContent], path: bytes, upper: int, lower: int) -> bool:
    a, b = lookup(layers[upper].root, path), lookup(layers[lower].root, path)
    if a is None or b is None or a.mode != b.mode or (a.uid, a.gid) != (b.uid, b.gid):
        return False
    if a.is_symlink:
        return a.target == b.target
    return a.is_reg and same_content(layers[upper], a, layers[lower], b)
