"""A drafter that knows what requests will answer, and is right as often as a test needs."""

import random
from collections.abc import Hashable, Sequence

from engine_svc.planning.request import Request
from engine_svc.planning.speculation import Draft


class KnowingDrafter:
    """Drafts of random length, of the tokens to come but for some that are wrong.

    `outputs` are whole answers by request key; nothing is drafted for others.
    """

    def __init__(self, vocab_size: int, max_draft_tokens: int, share_wrong: float = 0.2) -> None:
        self.outputs: dict[Hashable, Sequence[int]] = {}
        self.observed: list[tuple[int, float]] = []
        self._vocab_size = vocab_size
        self._max_draft_tokens = max_draft_tokens
        self._share_wrong = share_wrong
        self._random = random.Random(vocab_size)

    def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
        drafts = []
        for place, request in enumerate(requests):
            most = min(self._max_draft_tokens, limit, request.max_num_draft_tokens)
            if most <= 0 or request.key not in self.outputs:
                continue
            begin = len(request.output_token_ids)
            right = self.outputs[request.key][begin : begin + self._random.randint(0, most)]
            token_ids = [self._with_errors(token_id) for token_id in right]
            if token_ids:
                limit -= len(token_ids)
                drafts.append(Draft(place, token_ids))
        return drafts

    def observe(self, num_tokens: int, seconds: float) -> None:
        self.observed.append((num_tokens, seconds))

    def _with_errors(self, token_id: int) -> int:
        if self._random.random() >= self._share_wrong:
            return token_id
        return self._random.randrange(self._vocab_size)
