"""How fast the line finishes sequences now, from what it was seen to do in the last seconds."""

import math
from typing import Final

# What was seen so long ago weighs e times less than what is seen now.
_MEMORY_SECONDS: Final = 10.0
# Before anything was seen: a sequence gains so many tokens a second, as if seen for so long.
_GUESSED_TOKENS_PER_SECOND: Final = 20.0
_GUESSED_SECONDS: Final = 30.0
_GUESSED_OUTPUT_TOKENS: Final = 128.0
# Of each sequence that ends, on the mean length of outputs.
_LENGTH_WEIGHT: Final = 0.02
_MIN_UPDATE_SECONDS: Final = 0.02


class DrainRate:
    """An exponentially weighted mean of the tokens per second that a running sequence gains.

    Together with the mean length of an output it gives the rate at which sequences end, already
    before the first of them has, and soon after the batch or the engines have changed. All times
    are of one monotonic clock, in seconds.
    """

    def __init__(self, now: float) -> None:
        self._updated_at = now
        self._num_running = 0
        # Tokens and sequence-seconds that were seen, each weighted by its age.
        self._tokens = _GUESSED_TOKENS_PER_SECOND * _GUESSED_SECONDS
        self._seconds = _GUESSED_SECONDS
        self._num_tokens_before = 0
        self._num_ended = 0
        self._output_tokens = _GUESSED_OUTPUT_TOKENS

    @property
    def is_measured(self) -> bool:
        """Whether any sequence has ended, so that this is no guess."""
        return self._num_ended > 0

    @property
    def output_tokens(self) -> float:
        """The mean length of an output."""
        return self._output_tokens

    def update(self, now: float, num_running: int, num_tokens: int) -> None:
        """Now `num_running` sequences run, and `num_tokens` were sampled since the beginning."""
        seconds = now - self._updated_at
        if seconds >= _MIN_UPDATE_SECONDS:
            # An idle line shows nothing that could replace what was seen.
            decay = math.exp(-seconds / _MEMORY_SECONDS) if self._num_running else 1.0
            self._tokens = self._tokens * decay + num_tokens - self._num_tokens_before
            self._seconds = self._seconds * decay + self._num_running * seconds
            self._num_tokens_before = num_tokens
            self._updated_at = now
            self._num_running = num_running
        else:
            self._num_running = max(self._num_running, num_running)

    def note_end(self, num_sequences: int, num_output_tokens: int) -> None:
        """A request has ended whose sequences had so many tokens together."""
        length = max(1.0, num_output_tokens / num_sequences)
        weight = _LENGTH_WEIGHT if self.is_measured else 1.0
        weight = 1.0 - (1.0 - weight) ** num_sequences
        self._output_tokens += weight * (length - self._output_tokens)
        self._num_ended += num_sequences

    def tokens_per_second(self, num_running: int) -> float:
        """Of `num_running` sequences together. More than 0."""
        return max(1, num_running) * max(self._tokens, 1e-3) / max(self._seconds, 1e-3)

    def sequences_per_second(self, num_running: int) -> float:
        """How many of them end. More than 0."""
        return self.tokens_per_second(num_running) / self._output_tokens
