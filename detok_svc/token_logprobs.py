"""Log-probabilities as users see them, held until it is known whether their token is shown."""

from collections import deque
from typing import NamedTuple

from detok_svc.token_bytes import TokenBytes
from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2


def with_texts(
    tokens: TokenBytes, token_id: int, logprobs: engine_pb2.TokenLogprobs
) -> detok_pb2.TokenLogprobs:
    """The engine's log-probabilities of a token, with the texts of the tokens in it."""
    return detok_pb2.TokenLogprobs(
        token=token_entry(tokens, token_id, logprobs.logprob),
        top=[
            token_entry(tokens, top_id, logprob)
            for top_id, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        ],
    )


def token_entry(tokens: TokenBytes, token_id: int, logprob: float) -> detok_pb2.TokenLogprob:
    return detok_pb2.TokenLogprob(
        token_id=token_id,
        text=tokens.text(token_id),
        text_bytes=tokens.token_bytes(token_id),
        logprob=logprob,
    )


class _PendingToken(NamedTuple):
    # The token is shown when this many characters of the output are.
    shown_at: int
    # None for a token of a record, whose log-probabilities were sent when it was made.
    logprobs: detok_pb2.TokenLogprobs | None


class PendingLogprobs:
    """The tokens of one sequence whose text may still be cut off by a stop string.

    A token is shown when the first character that it adds to is; one that adds nothing, when all
    text before it is. So a streamed answer lists the same tokens as one sent whole.
    """

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._pending: deque[_PendingToken] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def message(self, token_id: int, logprobs: engine_pb2.TokenLogprobs) -> detok_pb2.TokenLogprobs:
        """The engine's log-probabilities of a token, with the texts of the tokens in it."""
        return with_texts(self._tokens, token_id, logprobs)

    def add(self, start: int, adds_text: bool, logprobs: detok_pb2.TokenLogprobs | None) -> None:
        """Takes a token that stands before character `start` of the output, or is part of it."""
        self._pending.append(_PendingToken(start + adds_text, logprobs))

    def settle(self, num_shown: int) -> list[detok_pb2.TokenLogprobs]:
        """The tokens that are shown now that the first `num_shown` characters are."""
        settled = []
        while self._pending and self._pending[0].shown_at <= num_shown:
            settled.append(self._pending.popleft().logprobs)
        return [logprobs for logprobs in settled if logprobs is not None]

    def settle_all(self) -> list[detok_pb2.TokenLogprobs]:
        """The tokens that are shown because the output ends and nothing is cut off."""
        settled = [token.logprobs for token in self._pending if token.logprobs is not None]
        self._pending.clear()
        return settled

    def drop(self) -> None:
        """Forgets the tokens that a stop string cut off."""
        self._pending.clear()
