"""Which tokens of a step with drafts its rows keep."""

from engine_svc.compute.verification import keep_accepted
from engine_svc.planning.step import RowStep, SampledToken, SamplingError


def step_of(row: int, draft_token_ids: list[int], samples: bool = True) -> RowStep:
    return RowStep(row, 10, 1 + len(draft_token_ids), [], samples, draft_token_ids=draft_token_ids)


def tokens_of(row: int, token_ids: list[int]) -> list[SampledToken]:
    return [SampledToken(row, token_id) for token_id in token_ids]


def test_without_drafts_every_token_is_kept() -> None:
    steps = [step_of(3, []), step_of(1, [], samples=False), step_of(0, [])]
    tokens = [*tokens_of(3, [7]), *tokens_of(0, [8])]
    assert keep_accepted(steps, tokens) == tuple(tokens)


def test_tokens_follow_as_long_as_drafts_come_true_and_one_more() -> None:
    sampled = {(5, 6, 7): 0, (4, 6, 7): 1, (4, 5, 7): 2, (4, 5, 6): 3}
    for drafts, num_accepted in sampled.items():
        steps = [step_of(2, [9]), step_of(0, list(drafts)), step_of(1, [])]
        tokens = [*tokens_of(2, [8, 1]), *tokens_of(0, [4, 5, 6, 7]), *tokens_of(1, [3])]
        before, token, after = keep_accepted(steps, tokens)
        assert (before.token_id, before.following) == (8, [])
        assert token.token_id == 4
        assert [following.token_id for following in token.following] == [5, 6, 7][:num_accepted]
        assert after == SampledToken(1, 3)


def test_an_error_behind_drafts_is_left_to_the_next_step() -> None:
    error = SampledToken(0, 0, error=SamplingError.BAD_LOGITS)
    first, second = tokens_of(0, [4, 5])
    (token,) = keep_accepted([step_of(0, [4, 5])], [first, second, error])
    assert [following.token_id for following in token.following] == [5]
    (token,) = keep_accepted([step_of(0, [0, 5])], [error, first, second])
    assert token == error._replace(following=[])
