"""When a lost sequence is tried again, and when it is given up; on a clock of the test's own."""

from typing import Any

import pytest

from gateway.recovery import Recovery
from protos.wire.errors import Overloaded, TokenlineError, Unavailable

LOST = Unavailable("Lost.", code="engine_lost")


class StandInLane:
    def __init__(self, role: str) -> None:
        self.role = role
        self.num_doubts = 0

    def doubt(self) -> None:
        self.num_doubts += 1


def route() -> Any:
    return StandInLane("engine"), StandInLane("detok")


def test_the_lane_that_was_lost_is_doubted_and_avoided() -> None:
    recovery, lanes = Recovery(60.0), route()
    recovery.note_loss(0.0, LOST, lanes)
    assert [lane.num_doubts for lane in lanes] == [1, 0]
    assert recovery.lost_lanes == {lanes[0]}
    # A second time, the detokenizer may be the one that cannot reach its engines.
    recovery.note_loss(1.0, LOST, lanes)
    assert recovery.lost_lanes == {*lanes}
    assert [lane.num_doubts for lane in lanes] == [2, 0]


def test_only_the_first_loss_is_tried_again_at_once_and_the_others_ever_later() -> None:
    recovery = Recovery(60.0)
    recovery.note_loss(10.0, LOST, route())
    assert recovery.may_try_at_once
    recovery.note_loss(10.0, LOST, route())
    assert not recovery.may_try_at_once
    waits = [recovery.next_try_at(10.0) - 10.0 for _ in range(7)]
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_a_new_token_makes_it_well() -> None:
    recovery = Recovery(60.0)
    assert recovery.is_well
    for _ in range(4):
        recovery.note_loss(10.0, LOST, route())
    recovery.next_try_at(10.0)
    assert recovery.note_progress(12.5) == 2.5
    assert recovery.is_well and not recovery.has_waited and not recovery.lost_lanes
    recovery.note_loss(13.0, LOST, route())
    assert recovery.may_try_at_once and recovery.verdict(13.0) is None
    assert recovery.num_losses == 5


def test_five_losses_without_a_token_are_the_end() -> None:
    recovery = Recovery(60.0)
    for _ in range(4):
        recovery.note_loss(0.0, LOST, route())
        assert recovery.verdict(0.0) is None
    recovery.note_loss(0.0, LOST, route())
    verdict = recovery.verdict(0.0)
    assert isinstance(verdict, Unavailable) and verdict.code == "engine_lost"


def test_twenty_losses_are_the_end() -> None:
    recovery = Recovery(60.0)
    for _ in range(19):
        recovery.note_loss(0.0, LOST, route())
        recovery.note_progress(0.0)
    assert recovery.verdict(0.0) is None
    recovery.note_loss(0.0, LOST, route())
    assert recovery.verdict(0.0) is not None


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("", code="engine_draining"),
        Unavailable("", code="detok_draining"),
        Unavailable("", code="engine_unreachable"),
        Overloaded("Full.", code="queue_full"),
    ],
)
def test_what_speaks_not_against_the_request_is_not_counted(error: TokenlineError) -> None:
    recovery = Recovery(60.0)
    for _ in range(99):
        recovery.note_loss(0.0, error, route())
        assert recovery.verdict(0.0) is None
    assert recovery.num_losses == 0
    # But even that has an end.
    recovery.note_loss(0.0, error, route())
    assert recovery.verdict(0.0) is error


def test_replicas_that_cannot_be_reached_are_waited_for_so_long() -> None:
    recovery = Recovery(60.0)
    recovery.note_loss(0.0, LOST, route())
    for now in (10.0, 30.0, 59.0):
        recovery.note_loss(now, Unavailable("", code="engine_unreachable"), route())
        assert recovery.verdict(now) is None
    assert recovery.next_try_at(59.99) == 60.0
    verdict = recovery.verdict(60.0)
    assert verdict is not None and "within 60 seconds" in verdict.message


def test_the_time_in_an_engines_queue_is_not_time_without_a_replica() -> None:
    recovery = Recovery(60.0)
    recovery.note_loss(0.0, LOST, route())
    recovery.note_loss(500.0, Unavailable("", code="engine_draining"), route())
    assert recovery.verdict(559.0) is None
    assert recovery.verdict(560.0) is not None
