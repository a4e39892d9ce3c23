"""Cuts outputs between tokens: what somebody has is told from what is new to him."""

from collections.abc import Sequence
from typing import NamedTuple

from protos.detok.v1 import detok_pb2


class Parts(NamedTuple):
    """The two parts of an output; None for a part that holds nothing."""

    had: detok_pb2.Output | None
    new: detok_pb2.Output | None


def num_events(output: detok_pb2.Output) -> int:
    """How far an output moves its choice: one for each token, or for an end without a token.

    The sum of it, over a choice's outputs, is what the ids of a stream's events count.
    """
    return len(output.token_ids) or int(output.HasField("finish"))


def cut(output: detok_pb2.Output, num_tokens: int) -> tuple[detok_pb2.Output, detok_pb2.Output]:
    """The first `num_tokens` tokens with all that was settled with them, and the rest.

    Fewer than all tokens, so that the end is in the rest. Without `text_lengths` the text belongs
    to the last token. Both parts are copies.
    """
    assert num_tokens < len(output.token_ids)
    num_characters = sum(output.text_lengths[:num_tokens])
    num_logprobs = sum(output.logprob_counts[:num_tokens])
    text = output.text
    head, rest = detok_pb2.Output(), detok_pb2.Output()
    head.CopyFrom(output)
    rest.CopyFrom(output)
    head.text, rest.text = text[:num_characters], text[num_characters:]
    for name, number in (
        ("token_ids", num_tokens),
        ("text_lengths", num_tokens),
        ("logprob_counts", num_tokens),
        ("logprobs", num_logprobs),
    ):
        del getattr(head, name)[number:]
        del getattr(rest, name)[:number]
    head.ClearField("finish")
    rest.ClearField("prompt_logprobs")
    rest.ClearField("prefill_started")
    rest.ClearField("num_cached_tokens")
    return head, rest


class Divider:
    """Divides the outputs of a request's choices into what is had already and what is new.

    covered: per choice, how far it is had, as `num_events` counts.
    """

    def __init__(self, covered: Sequence[int]) -> None:
        self._missing = list(covered)

    @property
    def is_done(self) -> bool:
        """Whether everything from here on is new."""
        return not any(self._missing)

    def divide(self, output: detok_pb2.Output) -> Parts:
        """`output.sequence_id` is the choice."""
        missing = self._missing[output.sequence_id]
        number = num_events(output)
        if not missing:
            return Parts(None, output)
        if number <= missing:
            self._missing[output.sequence_id] -= number
            return Parts(output, None)
        self._missing[output.sequence_id] = 0
        return Parts(*cut(output, missing))
