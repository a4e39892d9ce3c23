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


async def test_only_what_may_change_is_resolved_again_and_changes_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    hosts = ["10.0.0.1"]

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        found = hosts if host == "engine" else [host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with AddressSet(["127.0.0.1:7", "engine:8"], refresh_seconds=0.01) as found:
        found.changed.clear()
        while asked.count("engine") < 3:
            await asyncio.sleep(0.01)
        assert not found.changed.is_set()
        hosts.append("10.0.0.2")
        await asyncio.wait_for(found.changed.wait(), 10)
        assert found.addresses == {"127.0.0.1:7", "10.0.0.1:8", "10.0.0.2:8"}
    assert asked.count("127.0.0.1") == 1
