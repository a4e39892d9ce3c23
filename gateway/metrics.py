"""What /metrics says. Plain numbers, collected when scraped: a token costs additions only."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.histogram import Histogram
from gateway.records import RequestRecord, Stage
from protos.common.v1 import common_pb2

_TOKEN_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
_STAGE_SECONDS: Final = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
# Asked several times a second while a line starts, and every few seconds by who watches it.
_PROBES: Final = frozenset({"/healthz", "/readyz"})


class Metrics:
    """All counts of this gateway. Gauges of others are read through the callables of `watch`."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self._responses: Counter[tuple[str, int]] = Counter()
        self._finishes: Counter[tuple[str, str]] = Counter()
        self.inter_token_latency = Histogram(
            "tokenline_inter_token_latency_seconds", "Time between tokens.", _TOKEN_SECONDS
        )
        self._time_to_first_token = _stage_histogram(
            "time_to_first_token", "Time from a request's arrival to its first token."
        )
        self._latency = _stage_histogram(
            "e2e_request_latency", "Time from a request's arrival to its end."
        )
        self._preprocessing = _stage_histogram(
            "request_preprocessing_time", "Time in the preprocessing stage."
        )
        self._queue = _stage_histogram("request_queue_time", "Time in the waiting stage.")
        self._prefill = _stage_histogram("request_prefill_time", "Time in the prefilling stage.")
        self._decode = _stage_histogram("request_decode_time", "Time in the decoding stage.")
        self._resubmissions: Counter[str] = Counter()
        self._recovery = _stage_histogram(
            "sequence_recovery", "Time from the loss of a sequence to its next token."
        )
        self._live_records: Callable[[], Iterable[RequestRecord]] = tuple
        self._engine_loads: Callable[[], Mapping[str, common_pb2.EngineLoad]] = dict
        self._ledger: Callable[[], tuple[bool, int]] = lambda: (False, 0)
        self._sources: list[Callable[[], Iterable[Metric]]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def watch(
        self,
        live_records: Callable[[], Iterable[RequestRecord]],
        engine_loads: Callable[[], Mapping[str, common_pb2.EngineLoad]],
        ledger: Callable[[], tuple[bool, int]],
    ) -> None:
        """Names the sources of the gauges; `ledger` gives (Redis is there, records dropped)."""
        self._live_records = live_records
        self._engine_loads = engine_loads
        self._ledger = ledger

    def add_source(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Others' metrics, which `collect` makes at each scrape."""
        self._sources.append(collect)

    def note_response(self, endpoint: str, status: int) -> None:
        """Counts an HTTP response, but for those to who only asks whether the line is ready."""
        if endpoint not in _PROBES:
            self._responses[endpoint, status] += 1

    def note_finish(self, record: RequestRecord) -> None:
        """Counts a finished request and how long it was in each stage."""
        self._finishes[record.endpoint, record.finish_reason or ""] += 1
        times = (
            record.preprocessing_at,
            record.waiting_at,
            record.prefilling_at,
            record.decoding_at,
            record.finished_at,
        )
        arrived, waiting, prefilling, decoding, finished = times
        for histogram, start, end in (
            (self._preprocessing, arrived, waiting),
            (self._queue, waiting, prefilling),
            (self._prefill, prefilling, decoding),
            (self._decode, decoding, finished),
            (self._time_to_first_token, arrived, decoding),
            (self._latency, arrived, finished),
        ):
            if start is not None and end is not None:
                histogram.observe(end - start)

    def note_refusal(self, endpoint: str) -> None:
        """Counts a request that was wrong before it became live."""
        self._finishes[endpoint, "error"] += 1

    def note_resubmission(self, reason: str) -> None:
        """Counts a sequence that goes on elsewhere; `reason` is the code of the loss."""
        self._resubmissions[reason] += 1

    def note_recovery(self, seconds: float) -> None:
        """Counts a sequence that has a new token, so long after it was lost."""
        self._recovery.observe(seconds)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        yield from self._collect_requests()
        for histogram in (
            self._time_to_first_token,
            self.inter_token_latency,
            self._latency,
            self._preprocessing,
            self._queue,
            self._prefill,
            self._decode,
            self._recovery,
        ):
            yield histogram.collect()
        resubmissions = CounterMetricFamily(
            "tokenline_sequence_resubmissions",
            "Sequences that were submitted again after a loss.",
            labels=("reason",),
        )
        for reason, count in self._resubmissions.items():
            resubmissions.add_metric((reason,), count)
        yield resubmissions
        yield from self._collect_engines()
        for collect in self._sources:
            yield from collect()
        redis_up, dropped = self._ledger()
        yield GaugeMetricFamily(
            "tokenline_redis_up", "Whether Redis can be written.", value=float(redis_up)
        )
        yield CounterMetricFamily(
            "tokenline_ledger_dropped_records",
            "Finished records that were given up while Redis was away.",
            value=dropped,
        )

    def _collect_requests(self) -> Iterator[Metric]:
        for name, value in (
            ("prompt", self.prompt_tokens),
            ("cached", self.cached_tokens),
            ("completion", self.completion_tokens),
        ):
            yield CounterMetricFamily(
                f"tokenline_{name}_tokens", f"Number of {name} tokens.", value=value
            )
        responses = CounterMetricFamily(
            "tokenline_responses", "HTTP responses.", labels=("endpoint", "status")
        )
        for (endpoint, status), count in self._responses.items():
            responses.add_metric((endpoint, str(status)), count)
        yield responses
        finishes = CounterMetricFamily(
            "tokenline_requests", "Finished requests.", labels=("endpoint", "finish_reason")
        )
        for (endpoint, reason), count in self._finishes.items():
            finishes.add_metric((endpoint, reason), count)
        yield finishes
        stages = Counter(record.state for record in self._live_records())
        live = GaugeMetricFamily(
            "tokenline_live_requests", "Requests in progress by stage.", labels=("stage",)
        )
        for stage in Stage:
            if stage is not Stage.FINISHED:
                live.add_metric((stage.value,), stages[stage])
        yield live

    def _collect_engines(self) -> Iterator[Metric]:
        loads = self._engine_loads()
        for metric, read in (
            (_engine_gauge("running_requests", "Sequences in the batch."), _num_running),
            (_engine_gauge("waiting_requests", "Sequences in the queue."), _num_waiting),
            (_engine_gauge("kv_cache_usage_ratio", "Share of KV blocks in use."), _kv_usage),
            (
                _engine_counter("prefix_cache_queried_tokens", "Prompt tokens looked up."),
                lambda load: load.num_prefix_cache_query_tokens,
            ),
            (
                _engine_counter("prefix_cache_hit_tokens", "Prompt tokens found in the cache."),
                lambda load: load.num_prefix_cache_hit_tokens,
            ),
            (
                _engine_counter("preemptions", "Sequences sent back to the queue."),
                lambda load: load.num_preemptions,
            ),
            (_engine_counter("steps", "Steps of the engine."), lambda load: load.num_steps),
            (
                _engine_counter("draft_tokens", "Tokens guessed and computed ahead."),
                lambda load: load.num_draft_tokens,
            ),
            (
                _engine_counter("accepted_draft_tokens", "Of those, the ones that were right."),
                lambda load: load.num_accepted_draft_tokens,
            ),
        ):
            for address, load in loads.items():
                metric.add_metric((address,), read(load))
            yield metric


def _stage_histogram(name: str, documentation: str) -> Histogram:
    return Histogram(f"tokenline_{name}_seconds", documentation, _STAGE_SECONDS)


def _engine_gauge(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tokenline_engine_{name}", documentation, labels=("engine",))


def _engine_counter(name: str, documentation: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"tokenline_engine_{name}", documentation, labels=("engine",))


def _num_running(load: common_pb2.EngineLoad) -> int:
    return load.num_running


def _num_waiting(load: common_pb2.EngineLoad) -> int:
    return load.num_waiting


def _kv_usage(load: common_pb2.EngineLoad) -> float:
    return 1.0 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
