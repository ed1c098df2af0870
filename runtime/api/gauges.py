"""The state of the service as Prometheus sees it, read when it is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.service import InstanceState, Service, Snapshot

_GAUGES: tuple[tuple[str, str, Callable[[InstanceState], float]], ...] = (
    ("vllm:num_requests_running", "Requests that are in a batch.", lambda i: i.running),
    ("vllm:num_requests_waiting", "Requests that wait for their first step.", lambda i: i.waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks that requests hold, from 0 to 1.",
        lambda i: i.used_blocks / i.kv_blocks if i.kv_blocks else 0.0,
    ),
)
_OWN_GAUGES: tuple[tuple[str, str, Callable[[InstanceState], float]], ...] = (
    ("goodput_planner_instance_ready", "1 while the instance takes requests.", lambda i: i.state == "ready"),
    ("goodput_planner_instance_kv_blocks", "KV blocks of the instance.", lambda i: i.kv_blocks),
    ("goodput_planner_instance_used_blocks", "KV blocks that requests hold.", lambda i: i.used_blocks),
    ("goodput_planner_instance_starts", "How often the instance was started.", lambda i: i.starts),
)
_OWN_COUNTERS: tuple[tuple[str, str, Callable[[InstanceState], int]], ...] = (
    ("goodput_planner_instance_steps", "Steps run.", lambda i: i.steps),
    ("goodput_planner_instance_run_tokens", "Tokens run.", lambda i: i.run_tokens),
    ("goodput_planner_instance_output_tokens", "Tokens chosen.", lambda i: i.output_tokens),
)
_REQUESTS: tuple[tuple[str, str, Callable[[Snapshot], int]], ...] = (
    ("goodput_planner_requests_accepted", "Requests taken in.", lambda s: s.accepted),
    ("goodput_planner_requests_finished", "Requests answered.", lambda s: s.finished),
    ("goodput_planner_requests_cancelled", "Requests that their client gave up.", lambda s: s.cancelled),
    ("goodput_planner_requests_rejected", "Requests that the conductor turned away.", lambda s: s.rejected),
    ("goodput_planner_requests_lost", "Requests that ended with an error as instances were lost.", lambda s: s.lost),
    ("goodput_planner_request_retries", "Times that a request started over.", lambda s: s.retries),
)


class StateCollector(Collector):
    """Reads a service's snapshot at each scrape."""

    def __init__(self, service: Service):
        self._service, self._rising = service, _Rising()

    def describe(self) -> Iterator[Metric]:
        """Return nothing: names are known only together with their values."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        snapshot, model = self._service.snapshot(), self._service.model
        yield from self._shared(snapshot, model)
        yield from self._own(snapshot, model)

    def _shared(self, snapshot: Snapshot, model: str) -> Iterator[Metric]:
        """Yield what vLLM has, too; its `engine` is our instance."""
        for name, about, value in _GAUGES:
            gauge = GaugeMetricFamily(name, about, labels=["model_name", "engine"])
            for instance in snapshot.instances:
                gauge.add_metric([model, instance.name], value(instance))
            yield gauge
        preempted = CounterMetricFamily(
            "vllm:num_preemptions", "Requests that had to make room for others.", labels=["model_name", "engine"]
        )
        for instance in snapshot.instances:
            total = self._rising.total("preemptions", instance.name, instance.preemptions)
            preempted.add_metric([model, instance.name], total)
        yield preempted

    def _own(self, snapshot: Snapshot, model: str) -> Iterator[Metric]:
        labels = ["model_name", "instance", "phase"]
        for name, about, value in _OWN_GAUGES:
            gauge = GaugeMetricFamily(name, about, labels=labels)
            for each in snapshot.instances:
                gauge.add_metric([model, each.name, each.phase], float(value(each)))
            yield gauge
        for name, about, count in _OWN_COUNTERS:
            counter = CounterMetricFamily(name, about, labels=labels)
            for each in snapshot.instances:
                counter.add_metric([model, each.name, each.phase], self._rising.total(name, each.name, count(each)))
            yield counter
        yield from _requests(snapshot, model)


def _requests(snapshot: Snapshot, model: str) -> Iterator[Metric]:
    unfinished = GaugeMetricFamily("goodput_planner_requests", "Accepted and not finished.", labels=["model_name"])
    unfinished.add_metric([model], snapshot.requests)
    yield unfinished
    for name, about, value in _REQUESTS:
        counter = CounterMetricFamily(name, about, labels=["model_name"])
        counter.add_metric([model], value(snapshot))
        yield counter
    attained = GaugeMetricFamily(
        "goodput_planner_attainment", "Share of the last requests that met their SLO.", labels=["model_name", "slo"]
    )
    for slo, share in snapshot.attained.items():
        attained.add_metric([model, slo], share)
    yield attained


class _Rising:
    """Totals that go on rising when an instance is started anew and counts from 0 again."""

    def __init__(self) -> None:
        self._base: dict[tuple[str, str], int] = {}
        self._last: dict[tuple[str, str], int] = {}

    def total(self, counter: str, instance: str, value: int) -> int:
        key = (counter, instance)
        if value < self._last.get(key, 0):
            self._base[key] = self._base.get(key, 0) + self._last[key]
        self._last[key] = value
        return self._base.get(key, 0) + value
