"""What a backend must do. Owns the interface between the edge and containers, calls and VMs.

Every method blocks (the edge calls it in a thread of a bounded pool), ends within a stated time,
and raises errors of dsec_runtime.errors: `SandboxLost` when the sandbox is gone for good, others
when it can still be used. What must hold:

- `create` leaves a *record*, a JSON object with all that `adopt` and `destroy` need; the edge
  writes it to the journal. It is made in steps, each undone if a later one fails; when the
  process is killed in between, `destroy` removes what there is, by the id alone;
- `destroy` can be called for every id at any time, as often as one likes, and leaves nothing;
- a sandbox lives on when the edge dies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dsec_runtime.edge.model import SandboxSpec, Stats
from dsecfs.node import Prepared

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run in a sandbox."""

    args: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    """On top of the sandbox's own."""
    cwd: str | None = None
    """None: the sandbox's."""
    user: str | None = None
    """None: the sandbox's."""
    tty: bool = False
    rows: int = 24
    columns: int = 80
    extra_fds: int = 0
    """Descriptors from 3 on that it gets from whoever starts the host command."""


@dataclass(frozen=True, slots=True)
class HostCommand:
    """How the keeper runs it: a host program whose standard streams are the command's and whose
    exit code is the command's."""

    argv: tuple[str, ...]
    console: bool = False
    """It sends the terminal's descriptor to a socket: the keeper replaces the word
    "{console}" in `argv` by the socket's path (--console-socket of OCI runtimes)."""
    cgroup: str = ""
    """Control group that has its processes and no others, relative to the cgroup mounts;
    "": none, its process tree is killed instead."""
    counters: Mapping[str, tuple[Path, str]] = field(default_factory=dict)
    """Files with lines "KEY NUMBER" to compare at the start and at the end; the names (memory,
    pids; what follows a dot tells several apart) are the limits that were hit when one grew."""
    scratch: Path | None = None
    """Directory with what it needs, removed when it has ended; its file "log" has what the runtime
    itself had to say when it failed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the files of a sandbox are, for the files helper."""

    pid: int
    """A process of the sandbox whose user, mount and pid namespaces are entered."""
    started: int
    """Its start time (field 22 of /proc/PID/stat): the same pid may be another's by now."""
    uid: int
    """The user, in the sandbox, on whose behalf files are touched."""
    gid: int
    groups: Sequence[int]
    cwd: str
    """What relative paths start at."""


class Backend(Protocol):
    """One kind of sandbox."""

    name: str

    def create(self, sandbox: str, spec: SandboxSpec, prepared: Prepared) -> Record:
        """Make it and start it. Limits: a minute, reads from the store included."""
        ...

    def adopt(self, sandbox: str, record: Record) -> str:
        """After a restart of the edge: "running", "paused" or "gone"."""
        ...

    def watch(self, sandbox: str, record: Record) -> int:
        """A descriptor that becomes readable when the sandbox is gone (a pidfd)."""
        ...

    def command(self, sandbox: str, record: Record, command: Command) -> HostCommand:
        """ProgramNotFound, NotExecutable, NoSuchUser, BadInput are found out here."""
        ...

    def place(self, sandbox: str, record: Record, user: str | None = None) -> Place:
        """Whom the files helper shall be."""
        ...

    def pause(self, sandbox: str, record: Record, *, deadline_s: float) -> None:
        """Freeze. CannotFreeze, and it runs on, when that is not possible in time."""
        ...

    def resume(self, sandbox: str, record: Record) -> None: ...

    def reclaim(self, sandbox: str, record: Record) -> int:
        """Give back the memory of a paused sandbox. Bytes that became free."""
        ...

    def stats(self, sandbox: str, record: Record) -> Stats: ...

    def upper(self, sandbox: str, record: Record) -> tuple[int, int]:
        """A descriptor of the directory that has what the sandbox wrote (overlay format), and
        the start of its range of ids. Nothing can be written through it; it shows changes as they
        happen. The caller closes it."""
        ...

    def clone_upper(self, sandbox: str, record: Record) -> int | None:
        """The same of a copy of it as it is now, made in milliseconds; None where that is not
        possible. The sandbox is frozen, and its upper was synced."""
        ...

    def lower(self, sandbox: str, record: Record, prepared: Prepared) -> int:
        """A descriptor of what the sandbox started with: its layers as one read-only tree, with
        owners as in the layers. The caller closes it."""
        ...

    def destroy(self, sandbox: str, record: Record | None) -> None:
        """End all of its processes and remove everything but what is kept in the journal."""
        ...

    def close(self) -> None:
        """The edge ends; sandboxes go on."""
        ...

    def all(self) -> list[str]:
        """Ids of the sandboxes of which anything is on this node."""
        ...
