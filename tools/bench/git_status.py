"""`git status` in a published repository, in a new sandbox and again, against ext4.

The repository has the Python sources of the science image's packages (some 3,800 files), cloned
a moment before it is published. "First" is in a mount that nobody has used, page cache dropped
on both sides, the layer in the node's chunk cache; "second" follows at once. Opened files are
counted with strace, in runs of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from dsecfs.layers.local import LocalLayer
from tools.bench.images import SITE, science_files
from tools.bench.podman import drop_caches
from tools.bench.report import Result, record, spread
from tools.bench.stage import Stage, cache_directory, parser, stage

LIMIT_S = 100
GOAL = 2.0
_OPENED = re.compile(rb'open(?:at)?\((?:[^,]*, )?"([^"]*)", [^)]*\) = \d')

_ENVIRONMENT = {
    "PATH": os.environ.get("PATH", os.defpath),
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    **{
        f"GIT_{who}_{what}": "bench@example.org"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    },
}


def _run(where: Path, *argv: str) -> bytes:
    done = subprocess.run(
        argv, cwd=where, env=_ENVIRONMENT, capture_output=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(argv[:3])}: {done.stderr.decode(errors='replace')[-500:]}")
    return done.stdout


def make_repository(sources: Path, top: Path) -> Path:
    """A repository of all Python sources below `sources`, and a clone of it; the clone."""
    origin, clone = top / "origin", top / "clone"
    origin.mkdir()
    for path in sorted(sources.rglob("*.py")):
        target = origin / path.relative_to(sources)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    _run(origin, "git", "init", "-q", ".")
    _run(origin, "git", "add", ".")
    _run(origin, "git", "commit", "-q", "-m", "sources")
    _run(top, "git", "clone", "-q", "--no-local", str(origin), str(clone))
    shutil.rmtree(origin)
    return clone


def _status(where: Path) -> float:
    start = time.monotonic()
    if _run(where, "git", "status", "--porcelain"):
        raise SystemExit(f"git status in {where}: the tree should be clean")
    return time.monotonic() - start


def _opened(where: Path, files: set[bytes]) -> int:
    """How many of the tracked files one `git status` opens."""
    log = where.parent / "strace.log"
    _run(where, "strace", "-f", "-qq", "-e", "trace=open,openat", "-o", str(log),
         "git", "status", "--porcelain")  # fmt: skip
    return len(files & set(_OPENED.findall(log.read_bytes())))


def _rounds(s: Stage, layers: list[LocalLayer], clone: Path, repeat: int) -> dict[str, list[float]]:
    """Seconds of the first and the second run, ours in a new mount each round."""
    times: dict[str, list[float]] = {}
    for number in range(repeat):
        ours = s.mount(layers, s.top / f"sandbox{number}")
        for side, where in (("ours", ours), ("ext4", clone)) if number % 2 else (
            ("ext4", clone), ("ours", ours)
        ):  # fmt: skip
            drop_caches()
            times.setdefault(f"{side}_first", []).append(_status(where))
            times.setdefault(f"{side}_second", []).append(_status(where))
        s.unmount(ours)
    return times


def main() -> None:
    """Measure and record."""
    options = parser(__doc__, repeat=7).parse_args()
    sources = science_files(cache_directory()) / SITE
    with stage("git-status") as s:
        clone = make_repository(sources, s.top)
        published = s.publish(f"dir:{clone}", "workspace")
        plain = s.publish(f"dir:{clone}", "base")
        layers = s.local([published.digest])
        s.start()
        s.fill(layers, but_last=True)
        _status(clone)  # git updates its index after a clone; ours never has to
        files = set(_run(clone, "git", "ls-files", "-z").split(b"\0"))
        sandbox = s.mount(layers, s.top / "counted")
        opened = [_opened(sandbox, files), _opened(sandbox, files)]
        s.unmount(sandbox)
        unprepared = s.mount(s.local([plain.digest]), s.top / "unprepared")
        opened.append(_opened(unprepared, files))
        s.unmount(unprepared)
        times = {k: spread(v) for k, v in _rounds(s, layers, clone, options.repeat).items()}
    first, second = (
        times[f"ours_{run}"]["median"] / times[f"ext4_{run}"]["median"]
        for run in ("first", "second")
    )
    record(
        Result(
            "git_status",
            "`git status` in a published repository, first and second time",
            "ext4",
            f"≤{GOAL:.0f}×, opens no unchanged file",
            f"{first:.2f}× / {second:.2f}×, {opened[0]} / {opened[1]} files opened",
            max(first, second) <= GOAL and not any(opened[:2]),
            {
                "files": len(files) - 1,
                "opened_first": opened[0],
                "opened_second": opened[1],
                "opened_if_published_as_it_is": opened[2],
                "notes": list(published.notes),
                **{f"{name}_s": value for name, value in times.items()},
            },
        )
    )


if __name__ == "__main__":
    main()
