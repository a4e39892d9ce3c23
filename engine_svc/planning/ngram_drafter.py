"""Guesses what requests will say next, as far as computing the guesses pays."""

from collections.abc import Sequence
from typing import Final

from engine_svc.planning.limits import SchedulerConfig
from engine_svc.planning.repetition import Certainty, Repetition
from engine_svc.planning.request import Request
from engine_svc.planning.speculation import Draft
from engine_svc.planning.step_times import StepTimes

# How many times the tokens a second of a step without drafts one with drafts must promise.
_LEAST_GAIN: Final = 1.05
# Less likely tokens are not worth thinking about.
_LEAST_CHANCE: Final = 0.1
# How long a step without drafts takes, by which all is measured, is found out anew so often.
_STEPS_BETWEEN_PLAIN_ONES: Final = 32
# Times that speak against drafts are put to the test once in so many steps, with so few drafts,
# which are this likely.
_STEPS_BETWEEN_TRIALS: Final = 256
_MAX_TRIAL_TOKENS: Final = 3
_LEAST_TRIAL_CHANCE: Final = 0.5


class NgramDrafter:
    """Drafts for a request what followed its latest tokens when they last stood in its sequence.

    How much is drafted in a step is what promises the most tokens a second, by what is learned of
    how often guesses come true and of how long steps take; but no request is to lose more than a
    few per cent of its speed, by wrong guesses of its own or by right ones of others. Nothing but
    speed hangs on it.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        """max_draft_tokens: of one request in one step."""
        self._max_draft_tokens = max_draft_tokens
        self._certainty = Certainty()
        self._times = StepTimes()
        self._num_steps_declined = 0
        self._num_steps = 0
        self._num_drafted_in_a_row = 0
        # Requests of the last step, and tokens with their drafts.
        self._last_size = (1, 1)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """See `Drafter`."""
        self._times.observe(num_tokens, seconds)

    def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
        """See `Drafter`."""
        self._num_steps += 1
        last_size, self._last_size = self._last_size, (len(requests), len(requests))
        if limit <= 0 or self._times.is_empty or not self._could_pay(len(requests), limit):
            return []
        # Of the last step, by what is known now that it was timed.
        slowness = self._times.estimate(last_size[1]) / self._times.estimate(last_size[0])
        chances = self._chances(requests, limit, slowness)
        count = self._most_worthwhile(chances, requests)
        self._num_drafted_in_a_row = self._num_drafted_in_a_row + 1 if count else 0
        if self._num_drafted_in_a_row > _STEPS_BETWEEN_PLAIN_ONES:
            self._num_drafted_in_a_row = count = 0
        self._last_size = (len(requests), len(requests) + count)
        lengths: dict[int, int] = {}
        for _, place in chances[:count]:
            lengths[place] = lengths.get(place, 0) + 1
        drafts = []
        for place, length in lengths.items():
            request = requests[place]
            assert request.repetition is not None
            drafts.append(Draft(place, request.repetition.expected(request.token_ids, length)))
        return drafts

    def _could_pay(self, num_rows: int, limit: int) -> bool:
        """Whether drafts would pay if all of them came true, or it is time for a trial."""
        rate = num_rows / self._times.estimate(num_rows)
        best = (num_rows + limit) / self._times.estimate(num_rows + limit)
        if best > _LEAST_GAIN * rate or self._num_steps_declined >= _STEPS_BETWEEN_TRIALS:
            return True
        self._num_steps_declined += 1
        return False

    def _chances(
        self, requests: Sequence[Request], limit: int, slowness: float
    ) -> list[tuple[float, int]]:
        """Each token that could be drafted: (the chance that it is accepted, place of its request);
        the likeliest first, so that those of a request come in order."""
        chances = []
        for place, request in enumerate(requests):
            repetition = request.repetition
            if repetition is None:
                repetition = request.repetition = Repetition(self._certainty)
            repetition.account(request.token_ids, self._num_steps, slowness)
            if repetition.follow(request.token_ids):
                length = min(request.max_num_draft_tokens, limit, self._max_draft_tokens)
                for chance in repetition.chances(length, _LEAST_CHANCE):
                    chances.append((chance, place))
        chances.sort(reverse=True)
        return chances[:limit]

    def _most_worthwhile(
        self, chances: Sequence[tuple[float, int]], requests: Sequence[Request]
    ) -> int:
        """With how many of the likeliest a step yields the most tokens a second; 0 for none."""
        if not chances:
            return 0
        estimate, num_rows = self._times.estimate, len(requests)
        seconds = estimate(num_rows)
        expected = [0.0] * num_rows
        best_count, best_rate = 0, _LEAST_GAIN * num_rows
        for count, (chance, place) in enumerate(chances, 1):
            expected[place] += chance
            slowness = estimate(num_rows + count) / seconds
            rate = (num_rows + sum(expected)) / slowness
            if rate > best_rate and slowness <= _least_patience(requests, expected):
                best_count, best_rate = count, rate
        if best_count or chances[0][0] < _LEAST_TRIAL_CHANCE:
            return best_count
        self._num_steps_declined += 1
        if self._num_steps_declined <= _STEPS_BETWEEN_TRIALS:
            return 0
        self._num_steps_declined = 0
        return min(_MAX_TRIAL_TOKENS, len(chances))


def _least_patience(requests: Sequence[Request], num_accepted: Sequence[float]) -> float:
    """How many times as long as without drafts the step may take for each of `requests`."""
    return min(
        request.repetition.patience(num)
        for request, num in zip(requests, num_accepted, strict=True)
        if request.repetition is not None
    )


def drafter_for(config: SchedulerConfig) -> NgramDrafter | None:
    """None where the limits leave no room for drafts, or steps are planned before the tokens that
    drafts would have to follow are known."""
    if not config.max_draft_tokens or config.max_steps_in_flight > 1:
        return None
    return NgramDrafter(config.max_draft_tokens)
