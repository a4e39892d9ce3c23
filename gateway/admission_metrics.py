"""What /metrics says of the requests that wait, and of those that were sent away."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.waiting_room import WaitingRoom


def waiting_metrics(room: WaitingRoom) -> Iterator[Metric]:
    """Read off when scraped. Tenants are counted, not named: their names belong to them."""
    for name, documentation, value in (
        ("queued_requests", "Requests that wait for an engine.", room.queue.num_requests),
        ("queued_sequences", "Sequences that wait for an engine.", room.queue.num_sequences),
        ("queued_tokens", "Tokens that they are expected to take.", room.queue.num_tokens),
        ("queued_tenants", "API keys whose requests wait.", len(room.queue.tenants)),
        ("drain_sequences_per_second", "Sequences that end.", room.sequences_per_second),
        ("drain_tokens_per_second", "Tokens that they gain.", room.tokens_per_second),
        ("open_promises", "Clients told when to come again.", room.promises.num_open),
    ):
        yield GaugeMetricFamily(f"tokenline_{name}", documentation, value=value)
    refused = CounterMetricFamily(
        "tokenline_refused_requests", "Requests that were not let in.", labels=("reason",)
    )
    for reason, count in room.num_refused.items():
        refused.add_metric((reason,), count)
    yield refused
    promises = CounterMetricFamily(
        "tokenline_ended_promises", "Times to come again, by their end.", labels=("end",)
    )
    promises.add_metric(("kept",), room.promises.num_kept)
    promises.add_metric(("lapsed",), room.promises.num_lapsed)
    yield promises
    yield room.waits.collect()
