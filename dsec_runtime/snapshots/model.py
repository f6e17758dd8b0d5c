"""What the API of snapshots takes and gives. Same rules as dsec_runtime/edge/model.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from dsec_runtime.edge.model import GuestPath, Lifetime, Model, Name, Sandbox, SandboxSpec, Why

MAX_RULES = 256
MAX_FORKS = 64
MAX_CHANGES = 10_000
RECORD_FORMAT = 1

Glob = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\x00]*$")]


class Scrub(Model):
    """What a snapshot leaves out. Nothing unless asked for: it is what the sandbox has.

    A file that is left out is not in the new layer. If a layer below has one of that path, that
    one shows; what earlier snapshots published stays published.
    """

    paths: tuple[GuestPath, ...] = Field((), max_length=MAX_RULES)
    """Files, and directories with everything below them."""
    globs: tuple[Glob, ...] = Field((), max_length=MAX_RULES)
    """`*`, `?` and `[…]` within a name, `**` for any number of directories. With a leading slash
    from the root, else at any depth. A directory that matches goes with everything below it."""
    caches: bool = False
    """Of package managers, compilers and tools: what is made again when it is missing."""
    history: bool = False
    """Of shells and interactive programs."""
    temporary: bool = False
    """What is below /tmp, /var/tmp and /run."""
    secrets: bool = False
    """Files whose names are those of keys and credentials."""
    secret_contents: bool = False
    """Files whose first MiB has something that looks like a key or token."""


class SnapshotSpec(Model):
    name: Annotated[str, StringConstraints(max_length=256)] = ""
    """NAME:VERSION of the new environment; without one it is known by its digest alone."""
    scrub: Scrub = Scrub()


class LeftOut(Model):
    """A file that is not in a snapshot."""

    path: str
    rule: str
    """Why: "path:…", "glob:…", "caches", "history", "secrets", "secret_contents: KIND"."""
    bytes: int


class LeftOutTotal(Model):
    files: int
    bytes: int


class Snapshot(Model):
    """A snapshot that is in the store."""

    environment: str
    """sha256:…, can be given to create."""
    name: str
    layer: str
    """The digest of the new layer."""
    files: int
    """Files and directories in the layer."""
    bytes: int
    """Their data."""
    uploaded_bytes: int
    frozen_s: float
    """How long the sandbox stood still for it; 0 if it was paused."""
    took_s: float
    method: Literal["reflink", "copy"]
    """How its files were held still: design and limits are in docs/snapshots.md."""
    left_out: list[LeftOut]
    """The first of them; `left_out_totals` counts all."""
    left_out_totals: dict[str, LeftOutTotal]
    notes: list[str]
    """What a layer cannot hold, e.g. sockets."""


class ForkSpec(Model):
    """N new sandboxes with the files of one."""

    count: int = Field(1, ge=1, le=MAX_FORKS)
    memory: bool = False
    """True: with its processes, too. No backend of this node can do that."""
    lifetime: Lifetime | None = None
    """Of the new ones; None: the original's."""
    labels: dict[Name, Annotated[str, StringConstraints(max_length=4096)]] = Field(
        {}, max_length=64
    )
    """On top of the original's."""


class ForkFailure(Model):
    type: str
    message: str
    hint: str = ""


class Forked(Model):
    """One of the new sandboxes, or why there is none."""

    sandbox: Sandbox | None = None
    error: ForkFailure | None = None


class Forks(Model):
    snapshot: Snapshot
    sandboxes: list[Forked]


class Change(Model):
    path: str
    kind: Literal["added", "changed", "removed"]
    type: Literal["file", "directory", "symlink", "other"]
    """What is there now; of something removed, what was there."""
    bytes: int
    """Length of a file, now; of a removed one, before. 0 for others."""


class ChangeTotal(Model):
    entries: int
    bytes: int


class Diff(Model):
    """What changed in a sandbox since its start."""

    changes: list[Change]
    """Sorted as a walk sees them. A removed or new directory stands for what was below it
    only if that is not listed itself."""
    truncated: bool
    """There are more than these; the totals count them, too."""
    complete: bool
    """False: the walk was ended, because there was too much of it."""
    totals: dict[str, ChangeTotal]
    """By kind."""


class ArchiveRecord(Model):
    """A sandbox without a node: with it and the store it can go on anywhere."""

    format: int = Field(RECORD_FORMAT, ge=1)
    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{12}$")]
    spec: SandboxSpec
    environment: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
    """What has its files."""
    created_at: float
    started_at: float | None
    paused_at: float | None
    paused_s: float = Field(ge=0)
    why: Why = Why()
