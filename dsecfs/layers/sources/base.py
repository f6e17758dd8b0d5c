"""What every source shares: where data goes, what comes back, and the limits on both.

What must hold:
- a source hands the sink exactly the bytes of one regular file at a time and never holds
  a whole file in memory;
- names are raw bytes; nothing outside the root is ever reached, in the model or on disk;
- attributes with a meaning for overlayfs never pass as they are (see `escape_xattr`);
- what a tree costs is bounded by `Limits` before it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dsecfs.errors import BadInput, UnsafeArchive
from dsecfs.layers.tree import BLOCK, NAME_MAX, Extent, Inode

PIECE = 1 << 20
"""Bytes asked for at a time when data is moved."""


class ByteStream(Protocol):
    """Anything that gives bytes front to back, once."""

    def read(self, n: int, /) -> bytes:
        """Between 1 and `n` bytes, or b"" at the end. `n` > 0."""


class Segment(NamedTuple):
    """A range of a file that holds data; the rest is holes. Both in bytes.

    Sinks get segments that are sorted, do not touch, start at multiples of BLOCK and have
    lengths that are multiples of BLOCK, except that the last may end at the file's end.
    """

    offset: int
    length: int


class DataSink(Protocol):
    """Takes the data of one regular file at a time and gives its extents back.

    Reads `stream` to exactly the announced number of bytes before it returns, in any
    pieces it likes (`stream.read` may return fewer than it was asked for), and no further.
    A stream that ends early is an error; the source's streams raise it by themselves, with
    the entry's name, so a sink only needs to guard itself.
    """

    def add(self, stream: ByteStream, size: int) -> tuple[Extent, ...]:
        """`size` > 0 bytes from `stream` are a file's whole content."""

    def add_sparse(
        self, stream: ByteStream, size: int, segments: Sequence[Segment]
    ) -> tuple[Extent, ...]:
        """`stream` gives the data of `segments` back to back; the file has `size` bytes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a source may cost. Reaching one raises UnsafeArchive that names the entry."""

    entries: int = 4_000_000
    """Files of all types, implied directories included (some 400 bytes of memory each)."""
    metadata: int = 1 << 30
    """Bytes of names, link targets and attributes together."""
    bytes: int = 1 << 42
    """Sum of the data (not the holes) of all regular files."""
    file_size: int = 1 << 44
    """Size of one file, holes included (16 TiB: MAX_BLOB_SIZE)."""
    depth: int = 1024
    """Components of a path."""
    path: int = 64 * 1024
    """Bytes of a path."""
    ratio: int = 1100
    """Uncompressed bytes per compressed byte. Deflate cannot do more than 1032; zstd, xz
    and bzip2 can, so for them this is the guard against bombs, counted after `ratio_from`."""
    ratio_from: int = 1 << 30
    """Uncompressed bytes for which the ratio is not looked at: zeros compress well."""
    xattrs: int = 64 * 1024
    """Bytes of names and values of one inode's attributes (Linux XATTR_SIZE_MAX is 64 KiB)."""
    seconds: float | None = None
    """Wall-clock time of reading one source; None when the caller has its own deadline."""


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class SourceTree:
    """A tree, and what its source could not decide without the layers below.

    `merge` uses `implied` and `links`; a tree that has neither (`self_contained`) means the
    same on top of any lower layers.
    """

    root: Inode
    implied: frozenset[Inode] = frozenset()
    """Directories (the root perhaps) that no entry names: they exist because of what is in
    them. Over a lower directory they keep its metadata; over a lower symbolic link they
    mean the directory it leads to."""
    links: Mapping[Inode, bytes] = field(default_factory=dict)
    """Hard links to files of lower layers: an empty file that stands for the link in the
    tree -> the target's path. Only `merge` can put the file itself in its place."""
    notes: tuple[str, ...] = ()
    """What was left out or changed, one line each, for the user."""

    @property
    def self_contained(self) -> bool:
        return not self.links and all(d is self.root for d in self.implied)


class Notes:
    """Collects notes; keeps a bounded number and counts the rest."""

    def __init__(self, keep: int = 100) -> None:
        self._keep = keep
        self._lines: list[str] = []
        self._more = 0

    def add(self, line: str) -> None:
        if len(self._lines) < self._keep:
            self._lines.append(line)
        else:
            self._more += 1

    def lines(self) -> tuple[str, ...]:
        return (*self._lines, f"and {self._more} more notes") if self._more else tuple(self._lines)


def show(name: bytes) -> str:
    """A name from outside as printable text of bounded length, for messages."""
    text = name[:200].decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text + "…" if len(name) > 200 else text
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text + "…" if len(name) > 200 else text


def show_text(text: str) -> str:
    """`show` for text, in which paths and JSON from outside may have lone surrogates."""
    return show(text.encode("utf-8", "backslashreplace"))


_OVERLAY = (b"trusted.overlay.", b"user.overlay.")


def escape_xattr(name: bytes) -> bytes:
    """The name under which overlayfs shows `name` again instead of obeying it.

    overlayfs reads `trusted.overlay.overlay.x` (`user.…` with userxattr) on a lower layer
    as an attribute `trusted.overlay.x` of the file (Documentation/filesystems/overlayfs.rst,
    "Nesting overlayfs mounts"), so a foreign mark stays data and is never obeyed. All modes of
    mounting show `trusted.overlay.x`; none uses userxattr, so `user.overlay.x` is shown escaped.
    """
    for prefix in _OVERLAY:
        if name.startswith(prefix):
            return prefix + b"overlay." + name[len(prefix) :]
    return name


def unescape_xattr(name: bytes) -> bytes:
    """The name that `escape_xattr` escaped."""
    for prefix in _OVERLAY:
        escaped = prefix + b"overlay."
        if name.startswith(escaped):
            return prefix + name[len(escaped) :]
    return name


_KEPT_NAMESPACES = (b"user.", b"trusted.", b"security.")
_KEPT = (b"system.posix_acl_access", b"system.posix_acl_default")


def keep_xattrs(
    found: Mapping[bytes, bytes], label: Callable[[], str], notes: Notes
) -> dict[bytes, bytes]:
    """The attributes that a layer keeps, overlay marks escaped.

    The namespaces of xattr(7) and POSIX ACLs; others belong to one kind of file system and
    are left out with a note.
    """
    kept: dict[bytes, bytes] = {}
    for name, value in found.items():
        if name not in _KEPT and not (name.startswith(_KEPT_NAMESPACES) and name[-1:] != b"."):
            notes.add(f"{label()}: attribute {show(name)!r} left out")
            continue
        escaped = escape_xattr(name)
        if escaped != name:
            notes.add(
                f"{label()}: attribute {show(name)!r} kept as data, overlayfs will not obey it"
            )
        if len(escaped) > NAME_MAX:
            raise BadInput(f"{label()}: an attribute's name of {len(escaped)} bytes")
        kept[escaped] = value
    return kept


def split_path(name: bytes, limits: Limits, what: str) -> list[bytes]:
    """The components of an archive's path, relative to the root.

    Leading "/" and all "." and empty components vanish, as tar does. ".." goes up as long
    as it stays inside; the result never has one. Raises UnsafeArchive (`what` names the
    entry) for a path that leaves the root or breaks a limit.
    """
    if len(name) > limits.path:
        raise UnsafeArchive(
            f"{what}: the path has {len(name)} bytes, at most {limits.path} are allowed"
        )
    if b"\0" in name:
        raise UnsafeArchive(f"{what}: the path has a NUL byte in it")
    parts: list[bytes] = []
    for part in name.split(b"/"):
        if part == b"..":
            if not parts:
                raise UnsafeArchive(
                    f"{what}: the path leads outside the root", hint="nothing was published"
                )
            parts.pop()
        elif part and part != b".":
            if len(part) > NAME_MAX:
                raise UnsafeArchive(
                    f"{what}: a name of {len(part)} bytes, at most {NAME_MAX} are allowed"
                )
            parts.append(part)
    if len(parts) > limits.depth:
        raise UnsafeArchive(
            f"{what}: the path is {len(parts)} deep, at most {limits.depth} is allowed"
        )
    return parts


FINE_SIZE = 16 << 30
"""Bytes up to which a file's map may have an entry for each block (erofs/chunks.py, 2^22)."""
COARSE_GRAINS = 1 << 18
MAX_WIDENED = 1 << 30
"""Bytes of zeros that a coarse grain may add to a file."""


def align_segments(segments: Iterable[Segment], size: int) -> list[Segment]:
    """Widen data ranges to block borders, joining those that then touch.

    `segments` are sorted, disjoint and inside `size`. The gaps that are swallowed are
    zeros: a `Widened` stream supplies them.

    A file of more than FINE_SIZE (/var/log/lastlog is as long as the largest uid) is widened to
    a coarser grain, since its map in EROFS has an entry for each grain; unless that would be
    mostly zeros: then the writer of the metadata says that it cannot be stored.
    """
    if size > FINE_SIZE:
        segments = list(segments)
        coarse = _widen(segments, size, 1 << (size // COARSE_GRAINS).bit_length())
        if sum(s.length for s in coarse) <= MAX_WIDENED + 2 * sum(s.length for s in segments):
            return coarse
    return _widen(segments, size, BLOCK)


def _widen(segments: Iterable[Segment], size: int, grain: int) -> list[Segment]:
    out: list[Segment] = []
    for offset, length in segments:
        if not length:
            continue
        start = offset // grain * grain
        end = min(-(-(offset + length) // grain) * grain, size)
        if out and start <= out[-1].offset + out[-1].length:
            start = out[-1].offset
            out.pop()
        out.append(Segment(start, end - start))
    return out


class Widened:
    """The data of `align_segments(segments)`: `data` gives that of `segments`, zeros between."""

    def __init__(
        self, data: ByteStream, segments: Sequence[Segment], aligned: Sequence[Segment]
    ) -> None:
        self._data = data
        self._pieces = self._plan(segments, aligned)
        self._zeros, self._left = 0, 0

    @staticmethod
    def _plan(segments: Sequence[Segment], aligned: Sequence[Segment]) -> Iterator[tuple[int, int]]:
        """(zeros, data) pairs of byte counts, in the order in which they are read."""
        inner = iter(segments)
        nxt = next(inner, None)
        for offset, length in aligned:
            at, end = offset, offset + length
            while nxt is not None and nxt.offset < end:
                yield nxt.offset - at, nxt.length
                at = nxt.offset + nxt.length
                nxt = next(inner, None)
            yield end - at, 0

    def read(self, n: int, /) -> bytes:
        while not self._zeros and not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._zeros, self._left = piece
        if self._zeros:
            n = min(n, self._zeros, PIECE)
            self._zeros -= n
            return bytes(n)
        data = self._data.read(min(n, self._left))
        self._left -= len(data)
        return data


def at_prefix(tree: SourceTree, prefix: bytes, limits: Limits = DEFAULT_LIMITS) -> SourceTree:
    """The same tree below `prefix` (b"/opt/dsh"), which is made of implied directories.

    Raises BadInput for a prefix with "..", and for a tree with links to lower layers, whose
    paths would mean something else then. The tree's own root keeps its metadata.
    """
    if tree.links:
        raise BadInput(f"cannot place a tree at {show(prefix)!r}: it has links to lower layers")
    if b".." in prefix.split(b"/"):
        raise BadInput(f"cannot place a tree at {show(prefix)!r}: it contains '..'")
    parts = split_path(prefix, limits, f"prefix {show(prefix)}")
    if not parts:
        return tree
    node, implied = tree.root, set(tree.implied)
    for part in reversed(parts):
        node = Inode(0o040755, children={part: node})
        implied.add(node)
    return SourceTree(node, frozenset(implied), {}, tree.notes)
