"""The command lines of a line's processes fit together."""

import itertools
from pathlib import Path

import pytest

from compose.embedded_redis import server_executable
from compose.line import Line, LineOptions, build_line
from compose.supervisor import ServiceSpec


def options(**changes: object) -> LineOptions:
    values = {"model_path": Path("/m.gguf"), "host": "127.0.0.1", "gateway_ports": (8000,)}
    return LineOptions(**{**values, **changes})  # type: ignore[arg-type]


def build(line_options: LineOptions) -> Line:
    return build_line(line_options, range(20_001, 20_001 + line_options.num_internal_ports))


def flags(spec: ServiceSpec) -> dict[str, str]:
    """The `--flag value` pairs of a command."""
    command = spec.command
    return {flag: value for flag, value in itertools.pairwise(command) if flag.startswith("--")}


def by_name(line: Line) -> dict[str, ServiceSpec]:
    return {spec.name: spec for group in line.stop_order for spec in group}


def test_services_stop_from_the_gateway_to_redis() -> None:
    groups = [[spec.name for spec in group] for group in build(options()).stop_order]
    assert groups == [["gateway"], ["detok_svc"], ["engine_svc"], ["tokenizer_svc"], ["redis"]]


def test_each_service_is_told_where_the_others_are() -> None:
    line = build(options(num_engines=2, num_detoks=2, gateway_ports=(8000, 8001)))
    specs = by_name(line)
    engines = f"{specs['engine_svc-1'].address},{specs['engine_svc-2'].address}"
    for gateway in ("gateway-1", "gateway-2"):
        told = flags(specs[gateway])
        assert told["--tokenizer"] == specs["tokenizer_svc"].address
        assert told["--detok"] == f"{specs['detok_svc-1'].address},{specs['detok_svc-2'].address}"
        assert told["--engine"] == engines
        assert told["--redis"] == f"redis://{specs['redis'].address}/0"
    for service in ("detok_svc-1", "engine_svc-1", "engine_svc-2"):
        assert flags(specs[service])["--tokenizer"] == specs["tokenizer_svc"].address
    addresses = [spec.address for spec in specs.values()]
    assert len(set(addresses)) == len(addresses)


def test_the_model_and_engine_options_reach_the_engine() -> None:
    line = build(options(served_model_name="m", engine_arguments=("--max-num-seqs", "4")))
    engine = flags(by_name(line)["engine_svc"])
    assert engine["--model"] == "/m.gguf"
    assert "--served-model-name" not in engine
    assert engine["--max-num-seqs"] == "4"
    tokenizer = flags(by_name(line)["tokenizer_svc"])
    assert tokenizer["--served-model-name"] == "m"
    assert "--max-num-seqs" not in tokenizer


def test_engines_are_told_how_many_share_the_machine() -> None:
    assert "--num-local-engines" not in flags(by_name(build(options()))["engine_svc"])
    specs = by_name(build(options(num_engines=2)))
    assert flags(specs["engine_svc-2"])["--num-local-engines"] == "2"


def test_a_given_redis_takes_the_place_of_the_embedded_one() -> None:
    line = build(options(redis_url="redis://elsewhere:6379/2"))
    assert "redis" not in by_name(line)
    assert flags(by_name(line)["gateway"])["--redis"] == "redis://elsewhere:6379/2"


def test_only_the_gateway_listens_beyond_loopback() -> None:
    specs = by_name(build(options(host="0.0.0.0")))
    hosts = {name: spec.address.rpartition(":")[0] for name, spec in specs.items()}
    assert hosts.pop("gateway") == "0.0.0.0"
    assert set(hosts.values()) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("myhost", "http://myhost:8000"),
    ],
)
def test_the_url_shown_can_be_reached_from_here(host: str, url: str) -> None:
    assert build(options(host=host)).gateway_urls == (url,)


def test_the_embedded_server_is_a_program() -> None:
    assert server_executable().is_file()
