"""Errors of the node runtime. Exit codes are those that docker and podman users know."""

from __future__ import annotations

from dsecfs.errors import DsecfsError


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
