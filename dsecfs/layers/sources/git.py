"""Git work trees are published so that `git status` in a mount opens no unchanged file.

git believes a file to be unchanged if its stat data is that of the index. In a mount inode
number and ctime differ from those of the machine that wrote the index (EROFS has no ctime,
overlayfs makes up inode numbers, and neither is known when a layer is made), so git would
read every file, in every new sandbox. Two things are done about it:

- `core.checkStat=minimal` and `core.trustctime=false` are appended to the repository's
  configuration: git then compares mtime and size, which are the same in every mount. To
  write other numbers into the index instead is not possible, nobody knows them;
- entries that git would not believe all the same, because mtimes were lost when the tree was
  copied, get the mtime and size that are published; and an index that is not later than its
  files ("racy": a fresh clone is written within a second) gets a later mtime. Only for files
  whose content was seen to be the object that the index names; what else is in such an index
  is marked to be read, as git does itself.

What must hold: what `git status` says is the same before and after, so files that git may
convert before it compares them (filters, line ends) are not vouched for; a repository that is
not understood to the last byte is left as it is, with a note; same input, same result. git is
never run: a repository is foreign input, and its configuration can name programs.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dsecfs.errors import FormatError
from dsecfs.layers.sources.base import ByteStream, DataSink, Segment, SourceTree, show
from dsecfs.layers.sources.gitformat import (
    INDEX_MAGIC,
    U32,
    Config,
    GitIndex,
    IndexEntry,
    parse_config,
)
from dsecfs.layers.tree import Extent, Inode, walk

MAX_CONFIG = 64 << 10
MAX_INDEX = 32 << 20
"""A larger index (some 300,000 files) is left as it is."""
MAX_KEPT = 64 << 20
"""Bytes of indexes and configurations that are kept, in all."""
MAX_SEEN = 1 << 18
"""Files whose object names are remembered (some 150 bytes each)."""

_SECTION = b"[core"
_ATTRIBUTES = b".gitattributes"
_WORDS = (b"filter", b"ident", b"working-tree-encoding")
_CONVERTS = re.compile(rb"[ \t][!-]?(?:%s)(?:[ \t\r\n=]|\Z)" % b"|".join(_WORDS))
"""Attributes with which a file's content is not that of its object (gitattributes(5))."""
_EMPTY = hashlib.sha1(b"blob 0\0").digest()
_FALSE = (b"false", b"no", b"off", b"0")


class _Repository(NamedTuple):
    git_dir: Inode
    config: Inode
    stage: Inode
    """Its index."""
    work_tree: Inode
    settings: Config


class GitSink:
    """A data sink before another one, which sees what `prepare` needs to know later."""

    def __init__(self, sink: DataSink) -> None:
        self._sink = sink
        self._kept: dict[tuple[Extent, ...], bytes] = {}
        """Contents of what looks like an index or a configuration."""
        self._left = MAX_KEPT
        self._indexes = False
        self._oids: dict[Extent, bytes] = {}
        """Object names of files that consist of one extent, unless they have a CR."""
        self._converting: set[Extent] = set()
        """What, as a file of attributes, names conversions."""

    def add(self, stream: ByteStream, size: int) -> tuple[Extent, ...]:
        """As `DataSink.add`."""
        watched = _Watched(stream, size, self._left)
        extents = self._sink.add(watched, size)
        if len(self._oids) < MAX_SEEN and not watched.has_cr:
            self._oids[extents[0]] = watched.hash.digest()
        content = watched.content()
        if content is None:
            return extents
        if any(word in content for word in _WORDS) and _CONVERTS.search(content):
            self._converting.add(extents[0])
        index = content.startswith(INDEX_MAGIC)
        if (index or _SECTION in content) and extents not in self._kept:
            self._kept[extents] = content
            self._left -= len(content)
            self._indexes |= index
        return extents

    def add_sparse(
        self, stream: ByteStream, size: int, segments: Sequence[Segment]
    ) -> tuple[Extent, ...]:
        """As `DataSink.add_sparse`."""
        return self._sink.add_sparse(stream, size, segments)

    def prepare(self, tree: SourceTree) -> SourceTree:
        """Change the repositories in `tree`, whose data went through this sink; what is new
        goes to the sink below. The tree comes back with notes of what was done."""
        if not self._indexes:
            return tree
        notes = []
        for path, git_dir in walk(tree.root):
            found = self._repository(tree.root, path, git_dir)
            if isinstance(found, str):
                notes.append(f"{show(path)}: left as it is: {found}")
            elif found is not None:
                notes.append(f"{show(path)}: {self._change(found)}")
        return replace(tree, notes=(*tree.notes, *notes))

    def _repository(self, root: Inode, path: bytes, git_dir: Inode) -> _Repository | str | None:
        """The repository with a work tree at `path`; None if there is none, or why not."""
        names = git_dir.children
        if names is None or not {b"HEAD", b"config", b"index", b"objects"} <= names.keys():
            return None
        config, index = names[b"config"], names[b"index"]
        if not (config.is_reg and index.is_reg and names[b"objects"].is_dir):
            return None
        data = self._kept.get(config.extents)
        if data is None:
            return "its configuration is not one"
        try:
            settings = parse_config(data)
        except FormatError as e:
            return f"configuration: {e}"
        parts = path.split(b"/")[:-1]
        if b"core.worktree" in settings:  # submodules have one
            if settings[b"core.worktree"].startswith(b"/"):
                return "its work tree has an absolute path"
            parts = _normal([*path.split(b"/"), *settings[b"core.worktree"].split(b"/")])
        elif path.split(b"/")[-1] != b".git":
            return None
        work_tree = _find(root, parts)
        if work_tree is None or not work_tree.is_dir:
            return "its work tree is not in the layer"
        return _Repository(git_dir, config, index, work_tree, settings)

    def _change(self, repository: _Repository) -> str:
        settings = repository.settings
        lines = []
        if b"core.checkstat" not in settings:
            lines.append(b"\tcheckStat = minimal\n")
        elif settings[b"core.checkstat"] != b"minimal":
            return "left as it is: it sets core.checkStat itself"
        if b"core.trustctime" not in settings:
            lines.append(b"\ttrustctime = false\n")
        elif settings[b"core.trustctime"].lower() not in _FALSE:
            return "left as it is: it sets core.trustctime itself"
        did = []
        if lines:
            data = self._kept[repository.config.extents]
            end = b"" if data.endswith(b"\n") else b"\n"
            self._replace(repository.config, data + end + b"[core]\n" + b"".join(lines))
            did.append("core.checkStat=minimal, core.trustctime=false")
        data_of_index = self._kept.get(repository.stage.extents)
        try:
            if data_of_index is None:
                raise FormatError(f"larger than {MAX_INDEX} bytes, or not one")
            did += self._refresh(repository, GitIndex(data_of_index))
        except FormatError as e:
            did.append(f"index left as it is: {e}")
        return "for git status: " + ("; ".join(did) or "nothing to do")

    def _replace(self, inode: Inode, data: bytes) -> None:
        inode.extents = self._sink.add(io.BytesIO(data), len(data))
        inode.size = len(data)

    def _refresh(self, repository: _Repository, index: GitIndex) -> list[str]:
        """Make git believe the entries it can believe; what was done, in words."""
        if self._converts(repository):
            return ["files may be converted: index left as it is"]
        find = _Finder(repository.work_tree)
        written = _second(repository.stage)
        later = written
        """The second of the index, when all is done: after that of every file it vouches for."""
        refreshed = 0
        doubtful: list[IndexEntry] = []
        for entry in index.entries:
            inode = find(entry.path) if entry.settled else None
            if inode is None or inode.mode & 0o170000 != entry.mode & 0o170000:
                continue
            second = _second(inode)
            same = entry.mtime_s == second and entry.size == inode.size & U32
            if same and second < written:
                continue
            if self._oid(inode) == entry.oid:
                if not same:
                    index.set_stat(entry, inode.mtime_ns, inode.uid, inode.gid, inode.size)
                    refreshed += 1
                later = max(later, second + 1)
            elif same:
                doubtful.append(entry)
        if later > U32:
            raise FormatError("files with times after the year 2106")
        changed = refreshed > 0
        did = []
        if later > written:
            for entry in doubtful:
                if entry.mtime_s < later:
                    index.smudge(entry)
                    changed = True
            repository.stage.mtime_ns = later * 10**9
            did.append("index given a later time than its files")
        if changed:
            self._replace(repository.stage, index.to_bytes())
            did.append(f"{refreshed} entries refreshed")
        return did

    def _converts(self, repository: _Repository) -> bool:
        """Whether a file's content may be another than its object's."""
        names = repository.settings.keys()
        if b"core.attributesfile" in names or any(n.startswith(b"include") for n in names):
            return True
        info = _find_under(repository.git_dir, (b"info", b"attributes"))
        files = [info] if info is not None else []
        for path, inode in walk(repository.work_tree):
            if path.rpartition(b"/")[2] == _ATTRIBUTES:
                files.append(inode)
        for file in files:
            extent = _only_extent(file)
            if file.size > MAX_CONFIG or not file.is_reg or extent in self._converting:
                return True
            if file.size and extent is None:
                return True
        return False

    def _oid(self, inode: Inode) -> bytes | None:
        """The object name of a file's content, if it was seen."""
        if inode.is_symlink:
            return hashlib.sha1(b"blob %d\0" % len(inode.target) + inode.target).digest()
        if not inode.size:
            return _EMPTY
        extent = _only_extent(inode)
        return None if extent is None else self._oids.get(extent)


def _only_extent(inode: Inode) -> Extent | None:
    """The extent that holds all of a file, if one does."""
    whole = len(inode.extents) == 1 and inode.extents[0].length == inode.size
    return inode.extents[0] if whole else None


class _Watched:
    """A stream on its way: hashed as git does, and kept if it may be one of git's files."""

    def __init__(self, raw: ByteStream, size: int, room: int) -> None:
        self._raw = raw
        self._size = size
        self._room = room
        self._keep: bool | None = None
        self._pieces: list[bytes] = []
        self.hash = hashlib.sha1(b"blob %d\0" % size)
        self.has_cr = False

    def read(self, n: int, /) -> bytes:
        data = self._raw.read(n)
        self.hash.update(data)
        self.has_cr = self.has_cr or b"\r" in data
        if self._keep is None:
            limit = MAX_INDEX if data.startswith(INDEX_MAGIC) else MAX_CONFIG
            self._keep = self._size <= min(limit, self._room)
        if self._keep:
            self._pieces.append(data)
        return data

    def content(self) -> bytes | None:
        """The whole content, None if it is too large."""
        return b"".join(self._pieces) if self._keep else None


class _Finder:
    """Files of a work tree by path. Symbolic links are not followed, as git does not."""

    def __init__(self, top: Inode) -> None:
        self._known: dict[bytes, Inode | None] = {b"": top}

    def __call__(self, path: bytes) -> Inode | None:
        head, _, name = path.rpartition(b"/")
        parent = self._known[head] if head in self._known else self._directory(head)
        return None if parent is None or parent.children is None else parent.children.get(name)

    def _directory(self, path: bytes) -> Inode | None:
        found = _find_under(self._known[b""], path.split(b"/"))
        self._known[path] = found
        return found


def _find(root: Inode, parts: Sequence[bytes]) -> Inode | None:
    return _find_under(root, [part for part in parts if part])


def _find_under(top: Inode | None, parts: Sequence[bytes]) -> Inode | None:
    for part in parts:
        top = None if top is None or top.children is None else top.children.get(part)
    return top


def _normal(parts: Sequence[bytes]) -> list[bytes]:
    """A path without `.` and `..`, which do not lead above the root."""
    out: list[bytes] = []
    for part in parts:
        if part == b"..":
            del out[-1:]
        elif part not in (b"", b"."):
            out.append(part)
    return out


def _second(inode: Inode) -> int:
    """The mtime as git keeps it: 32 bits."""
    return inode.mtime_ns // 10**9 & U32
