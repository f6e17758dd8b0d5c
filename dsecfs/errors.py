"""The one error tree of dsecfs.

Every error says what was being done to what, what was expected and what to do about it.
`recoverable` tells a caller whether the same call may succeed later without anything
else being changed. Nothing in dsecfs raises a bare built-in exception across a module
border, except OSError subclasses that the kernel gave for a user's own path.
"""

from __future__ import annotations


class DsecfsError(Exception):
    """Base of the tree.

    `message` is one line: what was done to what, and what was wrong with it.
    `hint` is one line: what the reader can do next ("" when there is nothing to do).
    """

    recoverable = False
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class BadInput(DsecfsError):
    """Something from outside (a name, an archive, a setting) breaks a stated rule."""

    exit_code = 2


class UnsafeArchive(BadInput):
    """An archive entry would reach outside the tree, or would cost without bound."""


class FormatError(DsecfsError):
    """Bytes that should be one of our formats are not: truncated, damaged, or a lie."""


class TooNew(FormatError):
    """A format version that this program does not know; the hint says to upgrade."""


class Corrupt(FormatError):
    """Bytes do not have the digest they are named by."""


class NotFound(DsecfsError):
    """A name, digest or object that does not exist."""

    exit_code = 3


class Conflict(DsecfsError):
    """The name is taken by different content, or somebody else decided first."""

    exit_code = 4


class Busy(DsecfsError):
    """Somebody holds what was asked for: a pinned blob, a mounted layer, a live lease."""

    recoverable = True
    exit_code = 5


class DeadlineExceeded(DsecfsError):
    """A wait reached its limit. Nothing is known about the thing waited for."""

    recoverable = True
    exit_code = 6


class StoreError(DsecfsError):
    """The store gave an answer that is not a result. Final unless a subclass says so."""

    exit_code = 7


class StoreUnavailable(StoreError):
    """The store did not answer, answered 5xx or 429, or cut the connection."""

    recoverable = True

    def __init__(
        self, message: str, *, hint: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class ShortRead(StoreUnavailable):
    """The store sent fewer or more bytes than were asked for, or the object changed."""


class StoreDenied(StoreError):
    """Credentials are missing, wrong or not allowed to do this."""


class CacheError(DsecfsError):
    """The node's cache cannot be used: not a directory of ours, no space at all."""


class MountError(DsecfsError):
    """A kernel mount could not be made or undone. The message has the kernel's words."""

    def __init__(self, message: str, *, hint: str = "", errno: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.errno = errno
        """What the system call failed with; 0 when no single call did."""


class Unsupported(DsecfsError):
    """This machine cannot do it; the hint says what is missing and how to get it."""

    exit_code = 8
