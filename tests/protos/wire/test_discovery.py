"""A target may name many replicas, and a name server's hiccup takes none of them away."""

import asyncio
import socket
from typing import Any

import pytest

from protos.wire.discovery import AddressSet


async def test_addresses_pass_through_and_names_are_resolved() -> None:
    async with AddressSet(["127.0.0.1:7", "localhost:8"]) as found:
        assert {"127.0.0.1:7", "127.0.0.1:8"} == found.addresses


async def test_replicas_come_and_go_and_a_failed_lookup_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[list[str] | None] = [["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], None, ["10.0.0.2"]]

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        hosts = answers.pop(0)
        if hosts is None:
            raise socket.gaierror("no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    found = AddressSet(["engine:50051"])
    seen = []
    for _ in range(4):
        await found.refresh()
        seen.append(found.addresses)
    one, two = "10.0.0.1:50051", "10.0.0.2:50051"
    assert seen == [{one}, {one, two}, {one, two}, {two}]
