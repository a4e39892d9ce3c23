"""/metrics: what is counted, and that it adds up."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gateway.histogram import Histogram
from protos.common.v1 import common_pb2
from tests.fakes.gateway_line import MODEL, GatewayLine
from tests.fakes.scripted_detok import DetokScript, output

STOP = common_pb2.FINISH_REASON_STOP


async def scrape(line: GatewayLine) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    response = await line.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_a_request_is_counted_in_every_place(line: GatewayLine) -> None:
    line.detok.script = DetokScript(
        [
            output("a", started=True, num_cached_tokens=1),
            output("bcd", num_tokens=3),
            output(finish=STOP),
        ]
    )
    await line.chat(n=2)
    await line.complete(stream=True)
    await line.chat(temperature=9)
    await line.client.get("/nowhere")
    for probe in ("/healthz", "/readyz"):
        await line.client.get(probe)
    found = await scrape(line)

    def value(name: str, **labels: str) -> float:
        return found[f"tokenline_{name}", frozenset(labels.items())]

    assert value("prompt_tokens_total") == 4
    assert value("cached_tokens_total") == 2
    assert value("completion_tokens_total") == 15
    chat, text = "/v1/chat/completions", "/v1/completions"
    assert value("requests_total", endpoint=chat, finish_reason="stop") == 1
    assert value("requests_total", endpoint=text, finish_reason="stop") == 1
    assert value("responses_total", endpoint=chat, status="200") == 1
    assert value("responses_total", endpoint=chat, status="400") == 1
    assert value("responses_total", endpoint="other", status="404") == 1
    # Who only asks whether the line is ready is not counted.
    endpoints = {
        dict(labels)["endpoint"] for name, labels in found if name == "tokenline_responses_total"
    }
    assert endpoints == {chat, text, "other"}
    for stage in ("preprocessing", "waiting", "prefilling", "decoding"):
        assert value("live_requests", stage=stage) == 0
    for name in (
        "time_to_first_token",
        "e2e_request_latency",
        "request_preprocessing_time",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
    ):
        assert value(f"{name}_seconds_count") == 2
        assert value(f"{name}_seconds_bucket", le="+Inf") == 2
        assert 0 <= value(f"{name}_seconds_sum") < 60
    # Merged outputs count one interval per token; the first token of a choice has none.
    assert value("inter_token_latency_seconds_count") <= 12
    engine = line.settings.engine[0]
    assert value("engine_kv_cache_usage_ratio", engine=engine) == 0
    assert value("engine_waiting_requests", engine=engine) == 0
    for name in ("prefix_cache_queried_tokens", "prefix_cache_hit_tokens", "preemptions"):
        assert value(f"engine_{name}_total", engine=engine) == 0
    assert value("redis_up") == 1
    assert ("process_resident_memory_bytes", frozenset()) in found


async def test_all_requests_that_are_wrong_count_alike_and_none_of_their_tokens(
    line: GatewayLine,
) -> None:
    user = {"role": "user", "content": "hi"}
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/chat/completions": [{"messages": 5}, {"messages": [user], "max_tokens": 5000}],
        "/v1/completions": [{"prompt": ["hi", ""]}, {"prompt": "x" * 5000}, {"prompt": []}],
        "/v1/messages": [{"messages": [user], "max_tokens": number} for number in (0, 5000)],
        "/v1/responses": [{"input": 5}, {"input": "x" * 5000}],
    }
    for path, wrong in bodies.items():
        for body in wrong:
            response = await line.client.post(path, json={"model": MODEL, **body})
            assert response.status_code == 400, response.text
    found = await scrape(line)
    assert found["tokenline_prompt_tokens_total", frozenset()] == 0
    for path, wrong in bodies.items():
        labels = frozenset({("endpoint", path), ("finish_reason", "error")})
        assert found["tokenline_requests_total", labels] == len(wrong)


def test_a_histogram_counts_into_cumulative_buckets() -> None:
    histogram = Histogram("h", "H.", (0.1, 1.0))
    histogram.observe(0.1)
    histogram.observe(0.2, times=3)
    histogram.observe(5.0)
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in histogram.collect().samples
    }
    assert samples == {
        ("h_bucket", "0.1"): 1,
        ("h_bucket", "1.0"): 4,
        ("h_bucket", "+Inf"): 5,
        ("h_count", None): 5,
        ("h_sum", None): 0.1 + 0.2 * 3 + 5.0,
    }
