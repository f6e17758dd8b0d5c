"""Errors of the node runtime. Exit codes are those that docker and podman users know."""

from __future__ import annotations

from dsecfs.errors import BadInput, Conflict, DsecfsError, NotFound


class SandboxError(DsecfsError):
    """A container could not be made or run. Nothing of it remains."""

    exit_code = 125


class NotExecutable(SandboxError):
    """The program exists in the environment and cannot be executed."""

    exit_code = 126


class ProgramNotFound(SandboxError):
    """The program does not exist in the environment."""

    exit_code = 127


class NoSuchUser(SandboxError):
    """The user or group does not exist in the environment's /etc/passwd or /etc/group."""


class SandboxLost(SandboxError):
    """The sandbox is gone: killed, out of memory, or its node was restarted."""


class NoSuchSandbox(SandboxError):
    """No sandbox (or exec, or session) of that name is on this node."""

    exit_code = 3


class WrongState(SandboxError):
    """The sandbox is not in a state in which this can be done."""

    exit_code = 4


class CannotFreeze(SandboxError):
    """A task did not stop in time: it waits for a file system or a device. The sandbox runs on."""

    recoverable = True


class Refused(SandboxError):
    """The node has no room for it now. Nothing was made."""

    recoverable = True
    exit_code = 5

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 10.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class KeeperError(SandboxError):
    """The process that owns commands could not do it. The sandbox itself is not concerned."""

    recoverable = True


class NoEdge(SandboxError):
    """No edge answers, or the connection to it broke. Sandboxes live on without one."""

    recoverable = True


class PortError(SandboxError):
    """What answered on a port in the sandbox gave no proper answer. The sandbox can be used."""

    recoverable = True


class PortClosed(PortError):
    """Nothing listens on that port in the sandbox."""


class GateError(SandboxError):
    """The gate could not change what a sandbox may reach. Nothing more than before is allowed."""

    recoverable = True


class BadNetwork(BadInput):
    """A rule of a network policy that names nothing or may not be. `field` is where it stands."""

    def __init__(self, message: str, *, field: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field


class FilesError(SandboxError):
    """The process that touches files for us could not be used or was killed. A file is the old one
    or the new one; of a tree, a part may have been done."""

    recoverable = True


class FileProblem(SandboxError):
    """What is at a path in a sandbox, or how it changes, does not fit the operation."""


class NoSuchFile(FileProblem, NotFound):
    """Nothing is at that path in the sandbox."""

    exit_code = 3


class FileExists(FileProblem, Conflict):
    """Something is at that path already, or a directory is not empty."""

    exit_code = 4


class FileDenied(FileProblem):
    """The sandbox's user may not do it."""


class NoSpace(FileProblem):
    """The sandbox's disk, its quota or its inodes are used up."""


class BadRange(FileProblem):
    """A range of bytes that the file does not have."""


class SnapshotFailed(SandboxError):
    """A snapshot could not be made. The sandbox goes on, and nothing was published."""

    recoverable = True


class NodeFull(SnapshotFailed):
    """The node's disk has no room for the work. The sandbox goes on."""
