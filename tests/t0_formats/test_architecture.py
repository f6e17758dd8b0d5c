"""docs/architecture.md names the modules there are, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/architecture.md").read_text()
PACKAGES = ("cache", "fuse", "kernel", "layers", "mount", "store")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_in_the_table(package: str) -> None:
    there = {p.name for p in (ROOT / "dsecfs" / package).glob("*.py")} - {"__init__.py"}
    row = f"`dsecfs/{package}/"
    lines = TABLE.splitlines()
    named: set[str] = set()
    for number, line in enumerate(lines):
        if line.startswith(f"| {row}"):
            named |= set(re.findall(r"([a-z0-9_]+\.py)`", line))
            for more in lines[number + 1 :]:
                if not more.startswith("| |"):
                    break
                named |= set(re.findall(r"`([a-z0-9_]+\.py)`", more))
    if package == "layers":
        named -= {"format.py", "writer.py", "reader.py", "git.py", "gitformat.py"}
    assert named == there
