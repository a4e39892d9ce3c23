"""What a line consists of: which processes, with which flags, in which order they stop."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compose.embedded_redis import SERVER_NOISE, server_command
from compose.supervisor import ServiceSpec

LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True)
class LineOptions:
    """What `tokenline up` was asked for.

    `gateway_ports` has one port per gateway; `redis_url` is empty for the embedded server;
    `engine_arguments` are passed to every engine as they are.
    """

    model_path: Path
    host: str
    gateway_ports: tuple[int, ...]
    num_tokenizers: int = 1
    num_detoks: int = 1
    num_engines: int = 1
    redis_url: str = ""
    served_model_name: str = ""
    engine_arguments: tuple[str, ...] = ()

    @property
    def num_internal_ports(self) -> int:
        """How many loopback ports `build_line` needs."""
        embedded_redis = 0 if self.redis_url else 1
        return self.num_tokenizers + self.num_detoks + self.num_engines + embedded_redis


@dataclass(frozen=True)
class Line:
    """The processes of a line, grouped in the order in which they stop, and where to reach it.

    `num_replicas` counts the services behind the gateways, by the names of `/readyz`.
    """

    stop_order: tuple[tuple[ServiceSpec, ...], ...]
    gateway_urls: tuple[str, ...]
    redis_url: str
    num_replicas: Mapping[str, int]

    @property
    def specs(self) -> tuple[ServiceSpec, ...]:
        return tuple(spec for group in self.stop_order for spec in group)


def build_line(options: LineOptions, internal_ports: Sequence[int]) -> Line:
    """Writes every process's command line. Raises CommandError without a Valkey server."""
    ports = iter(internal_ports)
    model = ("--model", str(options.model_path))
    # The tokenizer service is whom the gateway asks for the model's name.
    name = ("--served-model-name", options.served_model_name) if options.served_model_name else ()

    tokenizers = [
        _internal(
            _numbered("tokenizer_svc", i, options.num_tokenizers), next(ports), (*model, *name)
        )
        for i in range(options.num_tokenizers)
    ]
    tokenizer = ("--tokenizer", _addresses(tokenizers))
    # Each engine takes its part of the machine.
    shared = ("--num-local-engines", str(options.num_engines)) if options.num_engines > 1 else ()
    engines = [
        _internal(
            _numbered("engine_svc", i, options.num_engines),
            next(ports),
            (*model, *tokenizer, *shared, *options.engine_arguments),
        )
        for i in range(options.num_engines)
    ]
    detoks = [
        _internal(
            _numbered("detok_svc", i, options.num_detoks),
            next(ports),
            tokenizer,
        )
        for i in range(options.num_detoks)
    ]
    redis = [] if options.redis_url else [_embedded_redis(next(ports))]
    redis_url = options.redis_url or f"redis://{redis[0].address}/0"
    links = (
        *tokenizer,
        *("--detok", _addresses(detoks)),
        *("--engine", _addresses(engines)),
        *("--redis", redis_url),
    )
    gateways = [
        _service(_numbered("gateway", i, len(options.gateway_ports)), options.host, port, links)
        for i, port in enumerate(options.gateway_ports)
    ]
    return Line(
        stop_order=(
            tuple(gateways),
            tuple(detoks),
            tuple(engines),
            tuple(tokenizers),
            tuple(redis),
        ),
        gateway_urls=tuple(_url(options.host, port) for port in options.gateway_ports),
        redis_url=redis_url,
        num_replicas={
            "tokenizers": options.num_tokenizers,
            "detoks": options.num_detoks,
            "engines": options.num_engines,
        },
    )


def _numbered(service: str, index: int, count: int) -> str:
    return service if count == 1 else f"{service}-{index + 1}"


def _internal(name: str, port: int, arguments: Sequence[str]) -> ServiceSpec:
    return _service(name, LOOPBACK, port, arguments)


def _service(name: str, host: str, port: int, arguments: Sequence[str]) -> ServiceSpec:
    module = name.partition("-")[0]
    flags = ("--host", host, "--port", str(port), *arguments)
    return ServiceSpec(
        name,
        _python(module, flags),
        _join(host, port),
        settings_check=_python(f"{module}.settings", flags),
    )


def _python(module: str, flags: Sequence[str]) -> tuple[str, ...]:
    # -P: the services are the installed ones, whatever the working directory holds.
    return (sys.executable, "-P", "-m", module, *flags)


def _embedded_redis(port: int) -> ServiceSpec:
    return ServiceSpec(
        "redis", server_command(LOOPBACK, port), _join(LOOPBACK, port), noise=SERVER_NOISE
    )


def _addresses(services: Sequence[ServiceSpec]) -> str:
    return ",".join(service.address for service in services)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _url(host: str, port: int) -> str:
    # A server that listens everywhere is reached here through loopback.
    reachable = {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}.get(host, host)
    return f"http://{_join(reachable, port)}"
