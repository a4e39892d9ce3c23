"""The table of where steps spend their time."""

import pytest

from engine_svc.planning import step_profile
from engine_svc.planning.step_profile import StepProfile


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(step_profile.time, "perf_counter", lambda: self.now)

    def run(self, profile: StepProfile, num_tokens: int, **laps: float) -> None:
        """A step whose laps take so many microseconds."""
        self.now += 1.0
        profile.start()
        for name, microseconds in laps.items():
            self.now += microseconds / 1e6
            profile.lap(name)
        profile.end(num_tokens)


def test_it_reports_the_mean_of_so_many_steps_and_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables: list[str] = []
    clock, profile = Clock(monkeypatch), StepProfile(2, tables.append)
    profile.take_parts = lambda: {"layers": {"norm": 2e-5, "linear": 1e-3}}
    clock.run(profile, 1, plan=100, layers=1000)
    assert tables == []
    clock.run(profile, 4, plan=300, layers=600)
    clock.run(profile, 1, plan=10)
    clock.run(profile, 1, plan=20)
    lines = [" ".join(line.split()) for line in tables[0].splitlines()]
    assert lines == [
        "the mean of 2 steps:",
        "a step of 2.5 tokens 1000.0 us 100.0 %",
        "plan 200.0 us 20.0 %",
        "layers 800.0 us 80.0 %",
        "linear 500.0 us 50.0 %",
        "norm 10.0 us 1.0 %",
    ]
    assert " ".join(tables[1].splitlines()[2].split()) == "plan 15.0 us 100.0 %"
    assert len(tables) == 2


def test_unasked_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, profile = Clock(monkeypatch), StepProfile()
    assert not profile.is_on
    for _ in range(3):
        clock.run(profile, 1, plan=100)
