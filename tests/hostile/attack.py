"""Sends thousands of hostile requests to a line's ports, and tells what came back."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.hostile import grpc_attacks, http_attacks, well_formed

_NUM_AT_ONCE: Final = 24
# How long an attacker waits for an answer, and for what it sends to be taken.
_READ_SECONDS: Final = 0.4
_WRITE_SECONDS: Final = 3.0
_MAX_READ_BYTES: Final = 1 << 20
_STATUS: Final = re.compile(rb"^HTTP/1\.1 (\d{3}) ", re.MULTILINE)


@dataclass
class HostileReport:
    """statuses: how often each HTTP status came. server_errors: attack and answer of each 5xx.

    unreachable: attacks that could not connect.
    """

    num_attacks: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    server_errors: list[str] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)


async def run_hostile(
    gateway_port: int,
    grpc_ports: Mapping[str, int],
    count: int,
    seed: int,
    model: str = "tiny-llama",
) -> HostileReport:
    """`count` attacks on the gateway's port and as many on the gRPC ports together.

    grpc_ports: of "tokenizer", "detok" and "engine". The attacks depend on the seed alone.
    """
    report = HostileReport()
    at_once = asyncio.Semaphore(_NUM_AT_ONCE)
    names = sorted(grpc_ports)

    async def attack(number: int) -> None:
        generator = random.Random(f"{seed}/{number}")
        name = names[number % len(names)]
        async with at_once:
            await _attack_http(gateway_port, number, generator, model, report)
        async with at_once:
            await _attack_grpc(name, grpc_ports[name], generator, report)

    await asyncio.gather(*(attack(number) for number in range(count)))
    return report


async def _attack_http(
    port: int, number: int, generator: random.Random, model: str, report: HostileReport
) -> None:
    kind = generator.choice(http_attacks.ATTACKS)
    name = f"http {kind.__name__} {number}"
    received = await _send(port, kind(generator, model), generator, name, report)
    statuses = [int(status) for status in _STATUS.findall(received)]
    report.statuses.update(statuses)
    if any(status >= 500 for status in statuses):
        report.server_errors.append(f"{name}: {received[:600]!r}")


async def _attack_grpc(
    service: str, port: int, generator: random.Random, report: HostileReport
) -> None:
    if generator.random() < 0.2:
        report.num_attacks += 1
        await well_formed.CALLS[service](f"127.0.0.1:{port}", generator)
        return
    kind = generator.choice(grpc_attacks.ATTACKS)
    name = f"{service} {kind.__name__}"
    await _send(port, kind(generator), generator, name, report)


async def _send(
    port: int, data: bytes, generator: random.Random, name: str, report: HostileReport
) -> bytes:
    """Sends `data`, whole or in two pieces, reads for a moment, and leaves in one of two ways."""
    report.num_attacks += 1
    resets = generator.random() < 0.3
    cut = generator.randrange(len(data) + 1) if generator.random() < 0.3 else len(data)
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection("127.0.0.1", port), _WRITE_SECONDS
        )
    except (OSError, TimeoutError) as error:
        report.unreachable.append(f"{name}: {error!r}")
        return b""
    received = bytearray()
    try:
        async with asyncio.timeout(_WRITE_SECONDS):
            writer.write(data[:cut])
            await writer.drain()
            writer.write(data[cut:])
            await writer.drain()
        if not resets:
            async with asyncio.timeout(_READ_SECONDS):
                while len(received) < _MAX_READ_BYTES and (piece := await reader.read(1 << 16)):
                    received += piece
    except (OSError, TimeoutError):
        # What was answered before the end is there to be read.
        pass
    finally:
        if resets:
            writer.transport.abort()
        else:
            writer.close()
    return bytes(received)
