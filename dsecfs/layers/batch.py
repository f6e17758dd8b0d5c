"""Importing many images: several at a time, each on its own, with a report that allows to go on.

A list has one image a line: SPEC NAME, blank lines and lines with "#" are left out. The
report has one JSON object a line, written when an image is done. What must hold: one image
that fails does not stop the others; a run that dies can be resumed from its report; what was
imported counts as done only while its name is in the store.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from dsecfs.errors import BadInput, DsecfsError, NotFound
from dsecfs.layers.catalog import Catalog
from dsecfs.layers.image import Imported, import_image
from dsecfs.layers.names import Name, parse_name
from dsecfs.layers.progress import SILENT, Progress
from dsecfs.layers.sources.image import RegistryOptions, open_image
from dsecfs.store.base import Store

MAX_LIST = 16 << 20
MAX_IMAGES = 100_000


@dataclass(frozen=True, slots=True)
class Job:
    """One image to import."""

    spec: str
    name: Name


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one image."""

    spec: str
    name: str
    outcome: str
    """imported, skipped (it was there) or failed."""
    environment: str = ""
    base: str = ""
    layers: int = 0
    reused: int = 0
    uploaded: int = 0
    """Bytes put into the store."""
    seconds: float = 0.0
    error: str = ""
    recoverable: bool = False
    """It failed, and may succeed when it is simply tried again."""
    notes: tuple[str, ...] = ()


def read_list(path: Path) -> list[Job]:
    """The images of a list. BadInput names the line; OSError for the path itself."""
    if path.stat().st_size > MAX_LIST:
        raise BadInput(f"{path}: longer than {MAX_LIST} bytes")
    jobs: list[Job] = []
    names: dict[Name, int] = {}
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not UTF-8") from None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise BadInput(
                f"{path}:{number}: {len(words)} words", hint="expected SPEC NAME:VERSION"
            )
        try:
            name = parse_name(words[1])
        except BadInput as e:
            raise BadInput(f"{path}:{number}: {e.message}", hint=e.hint) from None
        if name in names:
            raise BadInput(f"{path}:{number}: {name} stands in line {names[name]} already")
        names[name] = number
        jobs.append(Job(words[0], name))
        if len(jobs) > MAX_IMAGES:
            raise BadInput(f"{path}: more than {MAX_IMAGES} images")
    return jobs


def done_before(report: Path) -> dict[tuple[str, str], str]:
    """(spec, name) -> environment of what a report says was imported. Later lines win.

    A last line that was cut by a crash counts as not written.
    """
    done: dict[tuple[str, str], str] = {}
    try:
        lines = report.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return done
    for line in lines:
        try:
            value = json.loads(line)
            key = (value["spec"], value["name"])
            if value["outcome"] in ("imported", "skipped"):
                done[key] = value["environment"]
        except (ValueError, KeyError, TypeError):
            continue
    return done


def open_report(path: Path) -> TextIO:
    """A report to go on with. What a crash left of its last line is ended first."""
    file = path.open("a+", encoding="utf-8")
    if file.tell():
        with path.open("rb") as there:
            there.seek(-1, os.SEEK_END)
            if there.read(1) != b"\n":
                file.write("\n")
    return file


def import_many(
    store: Store,
    jobs: Sequence[Job],
    *,
    parallel: int,
    platform: str = "",
    registry: RegistryOptions | None = None,
    resume: Mapping[tuple[str, str], str] | None = None,
    labels: Mapping[str, str] | None = None,
    progress: Progress = SILENT,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> Iterator[Outcome]:
    """Import images, `parallel` at a time; outcomes as they come.

    With `resume` (from `done_before`; may be empty) an image is skipped if it was imported
    and its name still means that environment. `report` is called once for each, in order of
    completion, by one thread at a time. Closing the iterator cancels what has not begun.
    """
    catalog = Catalog(store)
    lock = threading.Lock()

    def work(job: Job) -> Outcome:
        began = time.monotonic()
        outcome = _skip(catalog, job, resume)
        if outcome is None:
            try:
                with open_image(job.spec, platform=platform, registry=registry) as image:
                    done = import_image(
                        store, image, job.name, labels=labels, progress=_Named(job, progress)
                    )
                outcome = _imported(job, done, time.monotonic() - began)
            except (DsecfsError, OSError) as e:
                outcome = Outcome(
                    job.spec,
                    str(job.name),
                    "failed",
                    seconds=round(time.monotonic() - began, 3),
                    error=str(e),
                    recoverable=isinstance(e, DsecfsError) and e.recoverable,
                )
        with lock:
            report(outcome)
        return outcome

    with ThreadPoolExecutor(max(parallel, 1), "import") as pool:
        futures = [pool.submit(work, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def outcome_json(outcome: Outcome) -> str:
    """A line of a report."""
    return json.dumps(asdict(outcome))


def _skip(
    catalog: Catalog, job: Job, resume: Mapping[tuple[str, str], str] | None
) -> Outcome | None:
    if resume is None:
        return None
    environment = resume.get((job.spec, str(job.name)))
    if environment is None:
        return None
    try:
        ref = catalog.get_ref(job.name.with_kind("env"), remember=False)
    except NotFound:
        return None
    if f"sha256:{ref.digest}" != environment:
        return None
    return Outcome(job.spec, str(job.name), "skipped", environment=environment)


def _imported(job: Job, done: Imported, seconds: float) -> Outcome:
    return Outcome(
        job.spec,
        str(job.name),
        "imported",
        f"sha256:{done.environment}",
        f"sha256:{done.base.digest}",
        done.layers,
        done.reused,
        done.uploaded,
        round(seconds, 3),
        notes=done.notes,
    )


class _Named:
    """Progress of one of several images: its tasks carry its name."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self._name = str(job.name)
        self._progress = progress

    def start(self, task: str, total: int | None) -> None:
        self._progress.start(f"{self._name} {task}", total)

    def advance(self, task: str, amount: int) -> None:
        self._progress.advance(f"{self._name} {task}", amount)

    def finish(self, task: str) -> None:
        self._progress.finish(f"{self._name} {task}")
