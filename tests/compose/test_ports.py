"""Ports are chosen so that they stay free, and a taken one is named with its holder."""

import os
import socket
from pathlib import Path

import pytest

from compose.errors import CommandError
from compose.ports import free_ports, require_free


def test_free_ports_are_different_and_below_the_ephemeral_range() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    start = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < start for port in ports)
    for port in ports:
        require_free("127.0.0.1", port)


def test_ports_that_others_will_take_are_left_alone() -> None:
    taken = range(20_000, 32_000)
    assert all(port not in taken for port in free_ports(20, excluding=taken))


def test_too_few_ports_are_reported() -> None:
    with pytest.raises(CommandError, match="too few"):
        free_ports(1, excluding=range(1, 65_536))


def test_a_taken_port_is_reported_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(CommandError) as raised:
            require_free("127.0.0.1", port)
    message = str(raised.value)
    assert f"port {port} is taken" in message
    assert f"(process {os.getpid()})" in message
    assert "--port" in message


def test_a_host_that_does_not_exist_is_reported() -> None:
    with pytest.raises(CommandError, match=r"cannot listen on no-such-host\.invalid"):
        require_free("no-such-host.invalid", 8000)


def test_an_address_of_another_machine_is_reported_as_such() -> None:
    with pytest.raises(CommandError, match=r"cannot listen on 192\.0\.2\.1: it is no address of"):
        require_free("192.0.2.1", 8000)
