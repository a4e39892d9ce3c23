"""The rate at which sequences end, as measured."""

import pytest

from gateway.drain_rate import DrainRate


def run(drain: DrainRate, start: float, seconds: float, num_running: int, speed: float) -> float:
    """`num_running` sequences gain `speed` tokens a second each, and are looked at all the time."""
    steps = int(seconds / 0.05)
    for step in range(steps + 1):
        now = start + step * 0.05
        run.tokens += num_running * speed * 0.05  # type: ignore[attr-defined]
        drain.update(now, num_running, int(run.tokens))  # type: ignore[attr-defined]
    return start + seconds


@pytest.fixture(autouse=True)
def no_tokens() -> None:
    run.tokens = 0.0  # type: ignore[attr-defined]


def test_it_follows_the_speed_and_the_length_of_outputs() -> None:
    drain = DrainRate(0.0)
    assert not drain.is_measured
    now = run(drain, 0.0, 20.0, num_running=16, speed=50.0)
    for _ in range(300):
        drain.note_end(1, 100)
    assert drain.is_measured
    assert drain.tokens_per_second(16) == pytest.approx(800, rel=0.05)
    assert drain.sequences_per_second(16) == pytest.approx(8, rel=0.05)
    run(drain, now, 30.0, num_running=64, speed=25.0)
    assert drain.sequences_per_second(64) == pytest.approx(16, rel=0.1)


def test_the_first_end_replaces_the_guess() -> None:
    drain = DrainRate(0.0)
    drain.note_end(2, 1000)
    assert drain.output_tokens == 500


def test_an_idle_line_keeps_what_was_measured() -> None:
    drain = DrainRate(0.0)
    now = run(drain, 0.0, 20.0, num_running=4, speed=50.0)
    drain.update(now + 5, 0, int(run.tokens))  # type: ignore[attr-defined]
    measured = drain.tokens_per_second(4)
    drain.update(now + 300, 0, int(run.tokens))  # type: ignore[attr-defined]
    assert drain.tokens_per_second(4) == pytest.approx(measured, rel=0.01)


def test_it_is_always_a_rate() -> None:
    drain = DrainRate(0.0)
    for now in (0.0, 1e-9, 1000.0, 1e6):
        drain.update(now, 3, 0)
        assert drain.sequences_per_second(0) > 0
