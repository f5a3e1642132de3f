"""What a server counts, for Prometheus and for its log."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from shardload import __version__

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self._registry, self._state = CollectorRegistry(), CollectorRegistry()
        Info("shardload_build", "The version of shardload", registry=self._registry).info({"version": __version__})
        ProcessCollector(registry=self._state)
        self.sent = Counter(
            "shardload_sent_bytes", "Bytes of files that were sent", ["source", "to"], registry=self._registry
        )
        self.received = Counter(
            "shardload_received_bytes",
            "Bytes of files at addresses that were read: from the source, or the cache",
            ["source"],
            registry=self._registry,
        )
        self.blocks = Counter(
            "shardload_blocks",
            "Blocks of files at addresses that were needed: in memory, in the cache, or missing",
            ["found"],
            registry=self._registry,
        )
        self.removed = Gauge(
            "shardload_cache_removed_bytes", "Bytes removed from the cache to make room", registry=self._registry
        )
        self.handed = Counter(
            "shardload_handed_files", "Open files that were handed to clients on this machine", registry=self._registry
        )
        self.requests = Counter(
            "shardload_requests", "Requests that were answered", ["route", "status"], registry=self._registry
        )
        self.seconds = Histogram(
            "shardload_request_seconds",
            "Seconds from a request to the end of its answer",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.errors = Counter(
            "shardload_errors",
            "Requests and connections that failed",
            ["kind"],
            registry=self._registry,
        )
        self.running = Gauge("shardload_running_requests", "Requests being answered", registry=self._registry)
        self.connections = Gauge("shardload_connections", "Open connections", registry=self._registry)
        self.checkpoints = Gauge("shardload_checkpoints", "Checkpoints in the catalogue", registry=self._registry)

    @property
    def n_running(self) -> int:
        """How many requests are being answered."""
        return self.value("shardload_running_requests")

    def value(self, name: str, **labels: str) -> int:
        """Return a counter by the name that Prometheus knows it by; 0 if nothing was counted."""
        return int(self._registry.get_sample_value(name, labels) or 0)

    def tell(self, name: str, text: str, value: float) -> None:
        """Tell something that stays as it is."""
        Gauge(name, text, registry=self._registry).set(value)

    def read(self, state: Collector) -> None:
        """Have the text tell what a collector reads, which may wait for the disk."""
        self._state.register(state)

    def text(self) -> bytes:
        """Return all of them in Prometheus' text format; waits for the disk."""
        return generate_latest(self._registry) + generate_latest(self._state)
