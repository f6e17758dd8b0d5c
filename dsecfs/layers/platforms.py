"""Platforms as OCI writes them: os/architecture[/variant]."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dsecfs.errors import BadInput

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
"""uname -m to GOARCH, where they differ."""


@dataclass(frozen=True, slots=True)
class Platform:
    """An OCI platform. `variant` may be ""."""

    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(p for p in (self.os, self.architecture, self.variant) if p)

    @staticmethod
    def here() -> Platform:
        machine = os.uname().machine
        return Platform("linux", _ARCHITECTURES.get(machine, machine))

    @staticmethod
    def parse(text: str) -> Platform:
        """`os/architecture[/variant]`. Raises BadInput."""
        parts = text.split("/")
        if not 2 <= len(parts) <= 3 or not all(p.isascii() and p.isalnum() for p in parts):
            raise BadInput(
                f"not a platform: {text[:80]!r}", hint="expected e.g. linux/amd64 or linux/arm/v7"
            )
        return Platform(*parts)

    def accepts(self, other: Platform) -> bool:
        """Whether an image for `other` is what was asked for."""
        if (self.os, self.architecture) != (other.os, other.architecture):
            return False
        # arm64 has one variant in practice, which images name or leave out.
        mine, its = (
            "" if p.architecture == "arm64" and p.variant == "v8" else p.variant
            for p in (self, other)
        )
        return not self.variant or mine == its
