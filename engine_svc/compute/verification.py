"""Which drafts come true: from tokens sampled after every draft to those that a row keeps."""

from collections.abc import Iterable, Sequence

from engine_svc.planning.step import RowStep, SampledToken


def keep_accepted(
    steps: Iterable[RowStep], tokens: Sequence[SampledToken]
) -> tuple[SampledToken, ...]:
    """One token per step that samples, with those that follow it.

    tokens: for each such step in order, those sampled after its last token before the drafts and
    after each of these. They are what would have been sampled without drafts as long as the drafts
    before them equal what was sampled in their stead.
    """
    kept = []
    first = 0
    for step in steps:
        if not step.samples:
            continue
        token = tokens[first]
        if step.draft_token_ids:
            following = tokens[first + 1 : first + 1 + len(step.draft_token_ids)]
            num_accepted = _num_accepted(step.draft_token_ids, token, following)
            token = token._replace(following=following[:num_accepted])
        kept.append(token)
        first += 1 + len(step.draft_token_ids)
    return tuple(kept)


def _num_accepted(
    draft_token_ids: Sequence[int], token: SampledToken, following: Sequence[SampledToken]
) -> int:
    """How many drafts come true. One that no token can follow is left to the next step."""
    num_accepted = 0
    for draft_token_id, next_token in zip(draft_token_ids, following, strict=True):
        if token.error or token.token_id != draft_token_id or next_token.error:
            break
        token = next_token
        num_accepted += 1
    return num_accepted
