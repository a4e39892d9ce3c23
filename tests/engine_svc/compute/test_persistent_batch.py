"""The persistent batch against a plain account of what each row holds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.compute.persistent_batch import PersistentBatch, StepLayout
from engine_svc.compute.step_tensors import StepInputs
from engine_svc.planning.step import RowStart, RowStep, SamplingParameters, StepPlan

MAX_SEQS, MAX_LEN, MAX_TOKENS = 5, 40, 200
PARAMETERS = SamplingParameters(max_tokens=1)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), block_size=st.sampled_from([1, 3, 16]))
def test_tensors_of_every_step_say_what_the_rows_hold(data: st.DataObject, block_size: int) -> None:
    batch = PersistentBatch(MAX_SEQS, MAX_LEN, block_size, 1000, MAX_TOKENS)
    tokens: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    prompts: dict[int, int] = {}
    free_blocks = iter(range(10_000))
    for _ in range(data.draw(st.integers(1, 6))):
        starts = []
        for row in data.draw(st.lists(st.integers(0, MAX_SEQS - 1), unique=True)):
            length = data.draw(st.integers(1, 30))
            prompts[row] = data.draw(st.integers(1, length))
            tokens[row] = [row * 100 + i for i in range(length)]
            computed[row] = data.draw(st.integers(0, (length - 1) // block_size)) * block_size
            blocks[row] = [next(free_blocks) for _ in range(computed[row] // block_size)]
            parameters = SamplingParameters(max_tokens=1, top_prompt_logprobs=row)
            starts.append(RowStart(row, tokens[row], prompts[row], parameters, list(blocks[row])))
        steps = []
        for row in data.draw(st.permutations(sorted(tokens))):
            left = len(tokens[row]) - computed[row]
            if left == 0 or len(tokens[row]) == MAX_LEN:
                continue
            count = data.draw(st.integers(1, left))
            asks = computed[row] < prompts[row] - 1 and data.draw(st.booleans())
            most_drafts = min(3, MAX_LEN - len(tokens[row])) if count == left and not asks else 0
            drafts = data.draw(st.lists(st.integers(700, 800), max_size=most_drafts))
            size = count + len(drafts)
            needed = -(-(computed[row] + size) // block_size) - len(blocks[row])
            new_blocks = [next(free_blocks) for _ in range(needed)]
            blocks[row] += new_blocks
            steps.append(RowStep(row, computed[row], size, new_blocks, count == left, asks, drafts))
        layout = batch.apply(StepPlan(starts, steps))
        inputs = batch.staged.of_step(layout.counts)

        expected: dict[str, list[int]] = {"ids": [], "positions": [], "slots": [], "ends": []}
        for step in steps:
            held = [*tokens[step.row], *step.draft_token_ids]
            for position in range(
                step.num_computed_tokens, step.num_computed_tokens + step.num_scheduled_tokens
            ):
                expected["ids"].append(held[position])
                expected["positions"].append(position)
                block = blocks[step.row][position // block_size]
                expected["slots"].append(block * block_size + position % block_size)
            expected["ends"].append(len(expected["ids"]))
        assert inputs.token_ids.tolist() == expected["ids"]
        assert inputs.positions.tolist() == expected["positions"]
        assert inputs.slot_mapping.tolist() == expected["slots"]
        assert inputs.cu_seqlens.tolist() == [0, *expected["ends"]]
        assert inputs.rows.tolist() == [step.row for step in steps]
        for step in steps:
            assert inputs.seq_lens[step.row] == step.num_computed_tokens + step.num_scheduled_tokens
            # Blocks that were taken for rejected drafts stay.
            own = blocks[step.row][: -(-int(inputs.seq_lens[step.row]) // block_size)]
            assert inputs.block_table[step.row, : len(own)].tolist() == own
        # (index of the step, how many of its drafts come before the token to sample)
        sampled = [
            (index, num_drafts)
            for index, step in enumerate(steps)
            if step.samples
            for num_drafts in range(len(step.draft_token_ids) + 1)
        ]
        assert layout.sampled_rows.tolist() == [steps[i].row for i, _ in sampled]
        assert layout.sampled_positions.tolist() == [
            len(tokens[steps[i].row]) + num_drafts for i, num_drafts in sampled
        ]
        assert inputs.kept_indices[layout.sample_places].tolist() == [
            expected["ends"][i] - 1 - len(steps[i].draft_token_ids) + num_drafts
            for i, num_drafts in sampled
        ]
        check_kept_tokens(inputs, steps)
        check_prompt_targets(layout, inputs, steps, tokens, prompts)

        new_ids: list[int] = []
        for step in steps:
            computed[step.row] += step.num_scheduled_tokens - len(step.draft_token_ids)
            if not step.samples:
                continue
            num_accepted = data.draw(st.integers(0, len(step.draft_token_ids)))
            accepted = [*step.draft_token_ids[:num_accepted], step.row * 100 + 99]
            tokens[step.row] += accepted
            computed[step.row] += num_accepted
            # Behind the accepted ones come tokens that the row never has.
            new_ids += [*accepted, *[999] * (len(step.draft_token_ids) - num_accepted)]
        batch.append(
            layout.sampled_rows, layout.sampled_positions, np.array(new_ids, dtype=np.int64)
        )


def check_kept_tokens(inputs: StepInputs, steps: list[RowStep]) -> None:
    kept = [i for i, step in enumerate(steps) if step.samples or step.prompt_logprobs]
    assert inputs.kept_rows.tolist() == [steps[index].row for index in kept]
    indices: list[int] = []
    bounds = [0]
    ends = inputs.cu_seqlens.tolist()[1:]
    for index in kept:
        step = steps[index]
        count = 1 + len(step.draft_token_ids)
        if step.prompt_logprobs:
            count = step.num_scheduled_tokens
        indices += range(ends[index] - count, ends[index])
        bounds.append(len(indices))
    assert inputs.kept_indices.tolist() == indices
    assert inputs.kept_positions.tolist() == inputs.positions[indices].tolist()
    assert inputs.kept_cu_seqlens.tolist() == bounds
    assert inputs.keeps_every_token == (len(indices) == len(inputs.token_ids))


def check_prompt_targets(
    layout: StepLayout,
    inputs: StepInputs,
    steps: list[RowStep],
    tokens: dict[int, list[int]],
    prompts: dict[int, int],
) -> None:
    asking = [step for step in steps if step.prompt_logprobs]
    targets = layout.prompt_targets
    if targets is None:
        assert not asking
        return
    assert targets.rows == [step.row for step in asking]
    before, following, num_top = [], [], []
    for step, count in zip(asking, targets.counts, strict=True):
        end = step.num_computed_tokens + step.num_scheduled_tokens
        positions = range(step.num_computed_tokens, min(end, prompts[step.row] - 1))
        assert count == len(positions) > 0
        before += [tokens[step.row][position] for position in positions]
        following += [tokens[step.row][position + 1] for position in positions]
        num_top += [step.row] * count
    assert inputs.token_ids[inputs.kept_indices[targets.kept_places]].tolist() == before
    assert targets.token_ids.tolist() == following
    assert targets.num_top == num_top


def test_the_token_after_the_longest_sequence_needs_no_place() -> None:
    batch = PersistentBatch(1, 4, 16, vocab_size=10, max_num_tokens=4)
    batch.apply(StepPlan([RowStart(0, [1, 2, 3, 4], 4, PARAMETERS, [0])], []))
    batch.append(np.array([0]), np.array([4]), np.array([9]))
    layout = batch.apply(StepPlan([], [RowStep(0, 0, 4, [], samples=True)]))
    assert batch.staged.of_step(layout.counts).token_ids.tolist() == [1, 2, 3, 4]
