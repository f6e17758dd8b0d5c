"""`dsec sandbox cp`: files and directories into a sandbox and out of it.

As `cp -r` has it: into a directory that is there by the source's name, else under the target's
name; "DIR/." is what is in it. In a sandbox, directories that are missing above it are made.
What is copied belongs to whoever gets it: the sandbox's user (or --user) inside, the caller
outside.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dsec_runtime.cli_sandbox.common import Answer, client
from dsec_runtime.cli_sandbox.trees import pack, unpack
from dsec_runtime.edge.client import EdgeClient, sandbox_path
from dsec_runtime.errors import NoSuchFile
from dsecfs.cli.complete import complete_sandbox
from dsecfs.cli.output import note
from dsecfs.errors import BadInput, NotFound

_PIECE = 1 << 18


class Side(NamedTuple):
    """Where something is copied from or to."""

    sandbox: str
    """"": this machine."""
    path: str


def _complete(incomplete: str) -> list[str]:
    return [f"{name}:" for name in complete_sandbox(incomplete)] if ":" not in incomplete else []


def cp(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="PATH, SANDBOX:PATH or -.", autocompletion=_complete),
    ],
    target: Annotated[
        str,
        typer.Argument(metavar="DST", help="PATH, SANDBOX:PATH or -.", autocompletion=_complete),
    ],
    user: Annotated[
        str, typer.Option("--user", "-u", metavar="USER", help="Who reads or writes inside.")
    ] = "",
) -> None:
    """Copy a file or a directory into a sandbox, or out of it. "-" is standard input or output.

    A name with a colon that is on this machine is written ./a:b.
    """
    from_, to = side(source), side(target)
    if bool(from_.sandbox) == bool(to.sandbox):
        raise BadInput(
            f"cp {source[:60]} {target[:60]}: one of them must be in a sandbox",
            hint="SANDBOX:PATH is a path in a sandbox",
        )
    edge = client()
    if to.sandbox:
        _into(Files(edge, to.sandbox, user), from_.path, to.path)
    else:
        _out_of(Files(edge, from_.sandbox, user), from_.path, to.path)


def side(text: str) -> Side:
    """SANDBOX:PATH, or a path of this machine."""
    sandbox, sep, path = text.partition(":")
    if not sep or "/" in sandbox or not sandbox:
        return Side("", text)
    return Side(sandbox, path or ".")


class Files:
    """The files of one sandbox, through the API."""

    def __init__(self, edge: EdgeClient, sandbox: str, user: str) -> None:
        self._edge = edge
        self._sandbox = sandbox
        self._user = user or None

    def _path(self, what: str) -> str:
        return sandbox_path(self._sandbox, "files", what)

    def stat(self, path: str) -> Answer | None:
        """What is there, through symlinks; None for nothing."""
        try:
            found: Answer = self._edge.get(self._path("stat"), {"path": path, "user": self._user})
        except NoSuchFile:
            return None
        return found

    def send(self, what: str, path: str, body: Iterable[bytes], **query: object) -> None:
        """PUT …/files/content or …/files/tar."""
        asked = {"path": path, "user": self._user, "make_parents": "true", **query}
        with self._edge.stream("PUT", self._path(what), asked, body=body) as answer:
            answer.read()

    def receive(self, what: str, path: str) -> Iterator[bytes]:
        """GET …/files/content or …/files/tar."""
        asked = {"path": path, "user": self._user}
        with self._edge.stream("GET", self._path(what), asked) as answer:
            yield from self._edge.pieces(answer)


def _last(path: str) -> str:
    """The name that a copy of `path` has in another directory; "" for its content."""
    name = path.rstrip("/").rpartition("/")[2]
    return "" if name in ("", ".", "..") else name


def _below(path: str, name: str) -> str:
    return f"{path.rstrip('/') or '/'}/{name}".replace("//", "/") if name else path


# -- into a sandbox --------------------------------------------------------------------


def _into(files: Files, source: str, target: str) -> None:
    if source == "-":
        if target.endswith("/"):
            raise BadInput(f"{target[:120]}: what comes from standard input needs a name")
        files.send("content", target, _stdin())
        return
    try:
        kind = os.stat(source).st_mode
    except FileNotFoundError:
        raise NotFound(f"no file {source[:200]!r} on this machine") from None
    there = files.stat(target)
    inside = target.endswith("/") or (there is not None and there["type"] == "directory")
    if stat.S_ISDIR(kind):
        if there is not None and not inside:
            raise BadInput(f"{target[:120]}: is there, and no directory")
        # As of cp -r: into it if it is there, under its name if it is not.
        at = _below(target, _last(source)) if there is not None else target
        files.send("tar", at, pack(Path(source), note))
        return
    if not stat.S_ISREG(kind):
        raise BadInput(f"{source[:120]}: neither a file nor a directory")
    at = _below(target, Path(source).name) if inside else target
    with open(source, "rb") as file:
        files.send("content", at, _pieces(file.fileno()), mode=f"{kind & 0o777:o}")


def _pieces(fd: int) -> Iterator[bytes]:
    while data := os.read(fd, _PIECE):
        yield data


def _stdin() -> Iterator[bytes]:
    yield from _pieces(0)


# -- out of a sandbox ------------------------------------------------------------------


def _out_of(files: Files, source: str, target: str) -> None:
    found = files.stat(source)
    if found is None:
        raise NotFound(f"no file {source[:200]!r} in the sandbox")
    is_directory = found["type"] == "directory"
    if target == "-":
        if is_directory:
            raise BadInput(f"{source[:120]}: a directory", hint="copy it to a directory")
        for data in files.receive("content", source):
            _write(1, data)
        return
    place = Path(target)
    if is_directory:
        if place.exists():
            place = place / _last(source)
        place.mkdir(exist_ok=True)
        unpack(files.receive("tar", source), place, note)
        return
    if found["type"] != "file":
        raise BadInput(f"{source[:120]}: neither a file nor a directory, but {found['type']}")
    if target.endswith("/") or place.is_dir():
        place = place / _last(source)
    _save(files.receive("content", source), place, int(found["mode"]) & 0o777)


def _save(pieces: Iterable[bytes], place: Path, mode: int) -> None:
    """Whole or not at all."""
    fd, part = tempfile.mkstemp(prefix=f".{place.name[:100]}.", dir=place.parent)
    try:
        with open(fd, "wb") as file:
            for data in pieces:
                file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
        if place.exists() and not place.is_file():
            with open(part, "rb") as whole, place.open("wb") as device:
                shutil.copyfileobj(whole, device)
            os.unlink(part)
        else:
            os.replace(part, place)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
