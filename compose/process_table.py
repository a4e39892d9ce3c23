"""What `tokenline ps` shows: the processes of each line, and the requests that run now."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

from compose.errors import CommandError
from compose.gateway_client import GatewayClient, LiveRequest
from compose.state_file import LineState, ServiceState

_CPU_SAMPLE_SECONDS: Final = 0.3
_PIPE_WIDTH: Final = 1000


@dataclass(frozen=True)
class ProcessUsage:
    """`cpu_percent` of one core; memory in bytes, resident."""

    cpu_percent: float
    resident_bytes: int
    uptime_seconds: float


def show_lines(lines: Sequence[LineState], console: Console, api_key: str = "") -> None:
    """Prints a table of processes and one of requests for each line.

    `api_key` is for gateways that ask for one.
    """
    if not console.is_terminal:
        # What reads a pipe has no width: nothing is cut off for it.
        console.width = _PIPE_WIDTH
    processes = _sample([service for line in lines for service in line.services])
    for line in lines:
        gateways = ", ".join(line.gateway_urls)
        console.print(
            f"{_served_name(line, api_key)} at {gateways} (launcher {line.launcher_pid})",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
        console.print(_service_table(line.services, processes))
        try:
            requests = _live_requests(line.gateway_urls, api_key)
        except CommandError as error:
            console.print(f"no list of requests: {error}", soft_wrap=True, markup=False)
            continue
        if requests:
            console.print(_request_table(requests))
        else:
            console.print("no live request")


def _sample(services: Sequence[ServiceState]) -> dict[int, ProcessUsage]:
    """Usage by pid; a process that has ended meanwhile is left out."""
    watched: list[psutil.Process] = []
    for service in services:
        try:
            process = psutil.Process(service.pid)
            process.cpu_percent()
        except psutil.Error:
            continue
        watched.append(process)
    # psutil gives the share of CPU time since the last call.
    time.sleep(_CPU_SAMPLE_SECONDS if watched else 0)
    usage = {}
    for process in watched:
        try:
            usage[process.pid] = ProcessUsage(
                cpu_percent=process.cpu_percent(),
                resident_bytes=process.memory_info().rss,
                uptime_seconds=time.time() - process.create_time(),
            )
        except psutil.Error:
            continue
    return usage


def _service_table(
    services: Sequence[ServiceState], processes: Mapping[int, ProcessUsage]
) -> Table:
    table = _table("service", ">pid", ">port", ">CPU %", ">memory MB", ">uptime", ">restarts")
    for service in services:
        usage = processes.get(service.pid)
        port = service.address.rpartition(":")[2]
        measured = (
            (
                f"{usage.cpu_percent:.0f}",
                f"{usage.resident_bytes / 1e6:.0f}",
                format_duration(usage.uptime_seconds),
            )
            if usage
            else ("-", "-", "ended")
        )
        table.add_row(service.name, str(service.pid), port, *measured, str(service.num_restarts))
    return table


def _served_name(line: LineState, api_key: str) -> str:
    """The model's name in the API; that of its file while the line serves none."""
    try:
        with GatewayClient(line.gateway_urls[0], api_key) as client:
            return client.model().name
    except CommandError:
        return line.model


def _live_requests(gateway_urls: Sequence[str], api_key: str) -> list[LiveRequest]:
    """The requests that any of the gateways knows, each once."""
    found: dict[str, LiveRequest] = {}
    for url in gateway_urls:
        with GatewayClient(url, api_key) as client:
            found.update((request.request_id, request) for request in client.live_requests())
    return list(found.values())


def _request_table(requests: Sequence[LiveRequest]) -> Table:
    table = _table("request", "state", ">prompt", ">cached", ">output", ">age", "engine")
    for request in requests:
        table.add_row(
            request.request_id,
            request.state,
            str(request.num_prompt_tokens),
            str(request.num_cached_tokens),
            str(request.num_output_tokens),
            format_duration(time.time() - request.created),
            request.engine or "-",
        )
    return table


def _table(*columns: str) -> Table:
    """A plain table; a column whose name starts with `>` is set flush right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=True,
        )
    return table


def format_duration(seconds: float) -> str:
    """`7s`, `3m12s`, `2h05m`, `4d07h`."""
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
