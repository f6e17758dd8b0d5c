"""What the edge counts, for Prometheus. One registry per edge, so that tests can have several."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """Counters and histograms; names start with dsec_."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._created = Histogram(
            "dsec_create_seconds",
            "From the request to a running sandbox.",
            ["backend"],
            buckets=_LATENCY,
            registry=self.registry,
        )
        self._failed = Counter(
            "dsec_create_failures", "Creates that failed.", ["backend", "error"],
            registry=self.registry,
        )
        self._ended = Counter(
            "dsec_sandboxes_ended", "Sandboxes that ended.", ["backend", "cause"],
            registry=self.registry,
        )
        self._took = Histogram(
            "dsec_operation_seconds", "Pause, resume, snapshot, exec.", ["operation"],
            buckets=_LATENCY, registry=self.registry,
        )
        self._refused = Counter(
            "dsec_refused", "Creates that did not fit.", registry=self.registry
        )
        self._denied = Counter(
            "dsec_network_denied", "Connections that a policy denied.", registry=self.registry
        )
        self._limits = Counter(
            "dsec_limits_hit", "Commands that hit a limit.", ["limit"], registry=self.registry
        )
        self._leftovers = Counter(
            "dsec_leftovers", "Things that could not be removed or done in the background.",
            registry=self.registry,
        )
        self._states = Gauge(
            "dsec_sandboxes", "Sandboxes by state.", ["state"], registry=self.registry
        )

    def created(self, backend: str, seconds: float) -> None:
        self._created.labels(backend).observe(seconds)

    def failed(self, backend: str, error: str) -> None:
        self._failed.labels(backend, error).inc()

    def ended(self, backend: str, cause: str) -> None:
        self._ended.labels(backend, cause).inc()

    def took(self, operation: str, seconds: float) -> None:
        self._took.labels(operation).observe(seconds)

    def refused(self) -> None:
        self._refused.inc()

    def denied(self, count: int = 1) -> None:
        self._denied.inc(count)

    def limit(self, name: str) -> None:
        self._limits.labels(name).inc()

    def leftover(self) -> None:
        self._leftovers.inc()

    def text(self, states: dict[str, int]) -> bytes:
        """The exposition format."""
        for state, count in states.items():
            self._states.labels(state).set(count)
        return generate_latest(self.registry)
