"""Prometheus metrics of a reward server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """Metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        of = self._registry
        self.requests = Counter(
            "flowmill_reward_requests", "Requests by status of the answer.", ["status"], registry=of
        )
        self.samples = Counter("flowmill_reward_samples", "Samples handed to the reward.", registry=of)
        self.seconds = Histogram("flowmill_reward_call_seconds", "Seconds of a call of the reward.", registry=of)
        self.rows = Histogram(
            "flowmill_reward_call_samples", "Samples of a call.", buckets=[2**n for n in range(11)], registry=of
        )
        self.waiting = Gauge("flowmill_reward_waiting_samples", "Samples that wait or are being scored.", registry=of)

    def scored(self, rows: int, seconds: float) -> None:
        """Count a call."""
        self.samples.inc(rows)
        self.seconds.observe(seconds)
        self.rows.observe(rows)

    def text(self) -> bytes:
        """Return all in Prometheus' text format."""
        return generate_latest(self._registry)
