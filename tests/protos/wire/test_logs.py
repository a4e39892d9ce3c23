"""Log records inside a request's context say which request and trace they belong to."""

import logging
import re

import pytest

from protos.wire.logs import (
    child_traceparent,
    configure_logging,
    new_traceparent,
    request_context,
)

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_records_carry_the_request_and_trace_ids(capsys: pytest.CaptureFixture[str]) -> None:
    handlers = logging.getLogger().handlers[:]
    try:
        configure_logging("gateway")
        with request_context("request-7", PARENT):
            logging.getLogger("x").info("inside")
        logging.getLogger("x").info("outside")
    finally:
        logging.getLogger().handlers[:] = handlers
    inside, outside = capsys.readouterr().err.splitlines()
    assert inside.endswith(
        "INFO gateway x: inside request_id=request-7 trace_id=4bf92f3577b34da6a3ce929d0e0e4736"
    )
    assert outside.endswith("INFO gateway x: outside")


def test_a_child_stays_in_its_parents_trace_under_a_new_span() -> None:
    child = child_traceparent(PARENT)
    assert child.split("-")[1] == PARENT.split("-")[1]
    assert child.split("-")[2] != PARENT.split("-")[2]


@pytest.mark.parametrize("parent", ["", "junk", PARENT.upper(), f"00-{'0' * 32}-{'1' * 16}-01"])
def test_a_malformed_parent_begins_a_new_trace(parent: str) -> None:
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", child_traceparent(parent))


def test_new_traces_differ() -> None:
    assert new_traceparent() != new_traceparent()


def test_an_id_from_outside_cannot_forge_lines_or_fill_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handlers = logging.getLogger().handlers[:]
    try:
        configure_logging("engine_svc")
        with request_context("a\nforged\x1b[2J" + "x" * 100_000, PARENT):
            logging.getLogger("x").info("inside")
    finally:
        logging.getLogger().handlers[:] = handlers
    (line,) = capsys.readouterr().err.splitlines()
    assert "request_id=a?forged?[2Jxxx" in line
    assert len(line) < 400
