"""The log-probabilities of one prompt's tokens, with their texts, given out as they come."""

from collections import deque
from collections.abc import Sequence

from detok_svc.token_bytes import TokenBytes
from detok_svc.token_logprobs import token_entry, with_texts
from protos.detok.v1 import detok_pb2
from protos.engine.v1 import engine_pb2


class PromptLogprobs:
    """The engine lists all prompt tokens but the first; here the first comes before them, with
    its texts only.
    """

    def __init__(self, tokens: TokenBytes, prompt_token_ids: Sequence[int]) -> None:
        self._tokens = tokens
        first, *rest = prompt_token_ids
        self._first: int | None = first
        self._rest = deque(rest)

    def take(self, output: engine_pb2.Output) -> list[detok_pb2.TokenLogprobs]:
        """What the engine's next output adds; all there is by the first sampled token."""
        taken: list[detok_pb2.TokenLogprobs] = []
        if self._first is not None and (output.prompt_logprobs or output.token_ids):
            entry = token_entry(self._tokens, self._first, 0.0)
            taken.append(detok_pb2.TokenLogprobs(token=entry))
            self._first = None
        taken += (
            with_texts(self._tokens, self._rest.popleft(), logprobs)
            for logprobs in output.prompt_logprobs
        )
        return taken
