"""The journal: what the edge knows, in SQLite (data/edge.db). Every step is written before it is
taken; what was acknowledged to a caller was durable before.

One thread owns the connection. Changes that arrive while a commit is under way are committed
together by the next one (group commit: with synchronous=FULL a commit costs one fsync whoever
waits for it). What must hold: `write` returns after the commit; changes of one call are in one
transaction; a journal of a newer program is refused, not changed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsec_runtime.edge.model import Event, SandboxSpec, State, Why
from dsec_runtime.errors import SandboxError
from dsecfs.errors import TooNew

log = logging.getLogger(__name__)

FORMAT = 1
_BATCH = 256
_CLOSE_S = 10.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sandboxes (
    id TEXT PRIMARY KEY,
    key TEXT UNIQUE,
    state TEXT NOT NULL,
    spec TEXT NOT NULL,
    environment TEXT NOT NULL DEFAULT '',
    record TEXT,
    created_at REAL NOT NULL,
    started_at REAL,
    ended_at REAL,
    paused_at REAL,
    paused_s REAL NOT NULL DEFAULT 0,
    why TEXT NOT NULL DEFAULT '{}',
    snapshot TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    sandbox TEXT NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_of ON events (sandbox, seq);
"""

_COLUMNS = {"key", "state", "spec", "environment", "record", "snapshot", "why"}
_COLUMNS |= {"started_at", "ended_at", "paused_at", "paused_s"}

Change = tuple[str, Sequence[Any]]
"""A statement and its parameters."""


@dataclass(slots=True)
class Row:
    """A sandbox as the journal has it."""

    id: str
    spec: SandboxSpec
    state: State
    created_at: float
    environment: str = ""
    record: dict[str, Any] | None = None
    started_at: float | None = None
    ended_at: float | None = None
    paused_at: float | None = None
    paused_s: float = 0.0
    """Seconds spent in earlier pauses."""
    why: Why = field(default_factory=Why)
    snapshot: str | None = None
    """Of an archived sandbox: digest of the environment that has its files."""


@dataclass(slots=True)
class _Job:
    changes: Sequence[Change]
    done: asyncio.Future[list[int]] | None
    loop: asyncio.AbstractEventLoop | None


class Journal:
    """Open it in the edge's process only: the file is locked for others."""

    def __init__(self, path: Path) -> None:
        """TooNew for a journal of a newer program; SandboxError for one that is damaged."""
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            path.chmod(0o600)
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            self._check_format()
        except sqlite3.DatabaseError as e:
            raise SandboxError(
                f"journal {path}: {e}",
                hint="another edge may have it open; if it is damaged move it away: sandboxes "
                "of it are then cleared at the next start",
            ) from None
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def _check_format(self) -> None:
        found = self._db.execute("SELECT value FROM meta WHERE name='format'").fetchone()
        if found is None:
            self._db.execute("INSERT INTO meta VALUES ('format', ?)", (str(FORMAT),))
        elif int(found[0]) > FORMAT:
            raise TooNew(f"journal {self.path}: format {found[0]}", hint="upgrade dsec")

    def close(self) -> None:
        """Commit what is waiting and close."""
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        self._db.close()

    # -- writing -----------------------------------------------------------------------

    async def write(self, *changes: Change) -> list[int]:
        """Commit the changes durably, together. Returns each statement's last row id.

        SandboxError if the disk does not take them; then none is in effect.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[int]] = loop.create_future()
        self._queue.put(_Job(changes, done, loop))
        return await asyncio.shield(done)

    def _run(self) -> None:
        while True:
            job = self._queue.get()
            if job is None:
                return
            jobs, last = [job], False
            while len(jobs) < _BATCH:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    last = True
                    break
                jobs.append(more)
            self._commit(jobs)
            if last:
                return

    def _commit(self, jobs: list[_Job]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            ids = [
                [self._db.execute(text, values).lastrowid or 0 for text, values in job.changes]
                for job in jobs
            ]
            self._db.execute("COMMIT")
        except sqlite3.Error as e:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if len(jobs) > 1:  # one of them is to blame: each alone
                for job in jobs:
                    self._commit([job])
                return
            error = SandboxError(f"journal {self.path}: {e}", hint="is its disk full?")
            _answer(jobs[0], error=error)
            return
        for job, found in zip(jobs, ids, strict=True):
            _answer(job, ids=found)

    # -- reading -----------------------------------------------------------------------

    def load(self) -> list[Row]:
        """All sandboxes, oldest first. Called before the first write."""
        names = "id spec state created_at environment record started_at ended_at paused_at paused_s"
        names += " why snapshot"
        rows = []
        query = f"SELECT {', '.join(names.split())} FROM sandboxes ORDER BY created_at, id"
        for found in self._db.execute(query):
            values = dict(zip(names.split(), found, strict=True))
            record = values.pop("record")
            rows.append(
                Row(
                    spec=SandboxSpec.model_validate_json(values.pop("spec")),
                    state=State(values.pop("state")),
                    record=None if record is None else json.loads(record),
                    why=Why.model_validate_json(values.pop("why")),
                    **values,
                )
            )
        return rows

    def meta(self, name: str) -> str | None:
        found = self._db.execute("SELECT value FROM meta WHERE name=?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def events(self, after: int, limit: int, sandbox: str | None = None) -> list[Event]:
        """Events with a greater number than `after`, oldest first."""
        # A connection of its own would be locked out; Python serialises calls on this one.
        where: str = "seq > ?"
        values: tuple[int | str, ...] = (after, limit)
        if sandbox is not None:
            where, values = "seq > ? AND sandbox = ?", (after, sandbox, limit)
        query = f"SELECT seq, at, sandbox, kind, data FROM events WHERE {where}"
        query += " ORDER BY seq LIMIT ?"
        return [
            Event(seq=seq, at=at, sandbox=of, kind=kind, data=json.loads(data))
            for seq, at, of, kind, data in self._db.execute(query, values)
        ]


def _answer(
    job: _Job, *, ids: list[int] | None = None, error: Exception | None = None
) -> None:
    if job.done is None or job.loop is None or job.loop.is_closed():
        return

    def settle(done: asyncio.Future[list[int]]) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(ids or [])

    job.loop.call_soon_threadsafe(settle, job.done)


# -- changes ---------------------------------------------------------------------------


def insert(row: Row) -> Change:
    return (
        "INSERT INTO sandboxes (id, key, state, spec, created_at) VALUES (?, ?, ?, ?, ?)",
        (row.id, row.spec.key, row.state, row.spec.model_dump_json(), row.created_at),
    )


def update(sandbox: str, **values: Any) -> Change:
    """Set columns of a sandbox. Dictionaries and models become JSON."""
    assert values.keys() <= _COLUMNS
    texts = [_stored(value) for value in values.values()]
    return (
        f"UPDATE sandboxes SET {', '.join(f'{name}=?' for name in values)} WHERE id=?",
        [*texts, sandbox],
    )


def remove(sandbox: str) -> Change:
    return ("DELETE FROM sandboxes WHERE id=?", (sandbox,))


def remove_events(sandbox: str) -> Change:
    return ("DELETE FROM events WHERE sandbox=?", (sandbox,))


def event(sandbox: str, kind: str, data: dict[str, Any] | None = None) -> Change:
    return (
        "INSERT INTO events (at, sandbox, kind, data) VALUES (?, ?, ?, ?)",
        (time.time(), sandbox, kind, json.dumps(data or {})),
    )


def set_meta(name: str, value: str) -> Change:
    return ("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


def _stored(value: Any) -> Any:
    if isinstance(value, Why | SandboxSpec):
        return value.model_dump_json()
    return json.dumps(value) if isinstance(value, dict) else value
