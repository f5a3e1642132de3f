"""The state of a server for Prometheus, read when someone asks for it: its cache, jobs, peers and addresses.

No label has the name of a checkpoint or the address of a client: there may be any number of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shardload.serving.jobs.queue import Jobs
from shardload.serving.jobs.records import JOB_STATES
from shardload.serving.rack.answers import RemoteFiles
from shardload.serving.rack.peers import PEER_STATES


class ServerState(Collector):
    """Reads the state of a server; waits for the disk."""

    def __init__(self, remote: RemoteFiles, jobs: Jobs) -> None:
        self._remote, self._jobs = remote, jobs

    def collect(self) -> Iterator[Metric]:
        """Yield what Prometheus is told."""
        yield from self._cache()
        jobs = self._jobs.all()
        states = dict.fromkeys(JOB_STATES, 0) | Counter(str(job.state) for job in jobs)
        yield _gauge("jobs", "Jobs that are kept", "state", states)
        verified = {job.checkpoint: job.result or {} for job in jobs if (job.kind, job.state) == ("verify", "done")}
        n_damaged = sum(result.get("verdict") == "damaged" for result in verified.values())
        yield _gauge("damaged_checkpoints", "Checkpoints whose last verification found damage", None, {"": n_damaged})
        if self._remote.peers:
            states = dict.fromkeys(PEER_STATES, 0) | Counter(self._remote.peers.states())
            yield _gauge("peers", "Servers that --peer names", "state", states)
        if roots := self._remote.catalogue.roots:
            listed = {root.url: int(root.is_listed) for root in roots}
            yield _gauge("root_up", "Whether an address of --root was listed the last time", "root", listed)

    def _cache(self) -> Iterator[Metric]:
        if (cache := self._remote.blocks.cache) is not None:
            yield _gauge("cache_bytes", "Bytes in the cache", None, {"": self._remote.cached.used_bytes()})
            yield _gauge("cache_limit_bytes", "Most bytes of the cache", None, {"": cache.limit_bytes})
            yield _gauge("cache_up", "Whether the cache stores what is fetched", None, {"": int(cache.is_on)})


def _gauge(name: str, text: str, label: str | None, values: dict[str, int]) -> Metric:
    found = GaugeMetricFamily(f"shardload_{name}", text, labels=[label] if label else [])
    for value, count in values.items():
        found.add_metric([value] if label else [], count)
    return found
