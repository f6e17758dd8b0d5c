"""A sandbox in the edge's memory: its journal row and what only a running edge knows."""

from __future__ import annotations

import asyncio
import time

from dsec_runtime.edge.journal import Row
from dsec_runtime.edge.model import Sandbox, State
from dsecfs.layers.environment import Environment


class Box:
    """One sandbox. `lock` is held by who changes its state."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.lock = asyncio.Lock()
        self.users = 0
        """Requests that work in it now."""
        self.running: set[str] = set()
        """Ids of its commands that run."""
        self.last_active = time.time()
        self.watch: int | None = None
        self.warned = False
        """The event before its end was sent."""
        self.prepared: Environment | None = None
        """What it was made from; None after a restart of the edge until it is asked for."""

    def activity(self) -> None:
        """It was just used."""
        self.last_active = time.time()
        self.warned = False

    @property
    def busy(self) -> bool:
        return self.users > 0 or bool(self.running)

    def ends_at(self) -> float | None:
        """When lifetime rules apply to it, if nothing happens until then."""
        row, life = self.row, self.row.spec.lifetime
        if row.state != State.RUNNING or row.started_at is None:
            return None
        times = []
        if life.max_lifetime_s is not None:
            times.append(row.started_at + row.paused_s + life.max_lifetime_s)
        if life.idle_timeout_s is not None and not self.busy:
            times.append(self.last_active + life.idle_timeout_s)
        return min(times) if times else None

    def show(self) -> Sandbox:
        row = self.row
        return Sandbox(
            id=row.id,
            state=row.state,
            name=row.spec.name,
            environment=row.environment,
            environment_name=row.spec.environment,
            toolkits=row.spec.toolkits,
            backend=row.spec.backend,
            labels=row.spec.labels,
            job=row.spec.job,
            user=row.spec.user,
            limits=row.spec.limits,
            network=row.spec.network,
            lifetime=row.spec.lifetime,
            created_at=row.created_at,
            started_at=row.started_at,
            ended_at=row.ended_at,
            paused_at=row.paused_at,
            idle_since=None if self.busy or row.state != State.RUNNING else self.last_active,
            ends_at=self.ends_at(),
            why=row.why,
        )
