"""A host or port that a service cannot listen on is named, by the flag that is wrong."""

import socket

import pytest

from protos.wire.errors import StartupError
from protos.wire.listening import check_listening
from protos.wire.server import GrpcServer


def test_a_host_and_port_that_can_be_had_pass() -> None:
    check_listening("127.0.0.1", 0)
    check_listening("localhost", 0)
    check_listening("0.0.0.0", 0)


@pytest.mark.parametrize("host", ["not a host", "256.1.1.1", "", "a..b"])
def test_a_host_that_is_none_is_named(host: str) -> None:
    with pytest.raises(StartupError, match=r"^--host: .* is neither an address nor a known name$"):
        check_listening(host, 0)


def test_a_host_of_another_machine_is_named() -> None:
    """192.0.2.1 is for documentation: no machine has it."""
    with pytest.raises(StartupError, match=r"^--host: '192\.0\.2\.1' is no address"):
        check_listening("192.0.2.1", 0)


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"^port {port} on 127.0.0.1 is taken .* --port$"):
            check_listening("127.0.0.1", port)


def test_a_name_of_two_addresses_needs_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(*_: object, **__: object) -> list[object]:
        kinds = socket.AF_INET, socket.SOCK_STREAM, 0, ""
        return [(*kinds, ("192.0.2.1", 0)), (*kinds, ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    check_listening("both", 0)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_a_server_listens_on_an_ipv6_address(host: str) -> None:
    try:
        check_listening("::1", 0)
    except StartupError:
        pytest.skip("this machine has no IPv6")
    async with GrpcServer("nothing", host, 0) as server:
        assert server.address.startswith("[::1]:")
