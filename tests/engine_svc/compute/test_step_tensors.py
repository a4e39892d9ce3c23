"""The persistent batch against a plain account of what each row holds."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.compute.step_tensors import PersistentBatch
from engine_svc.planning.step import RowStart, RowStep, SamplingParameters, StepPlan

MAX_SEQS, MAX_LEN = 5, 40
PARAMETERS = SamplingParameters(max_tokens=1)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), block_size=st.sampled_from([1, 3, 16]))
def test_tensors_of_every_step_say_what_the_rows_hold(data: st.DataObject, block_size: int) -> None:
    batch = PersistentBatch(MAX_SEQS, MAX_LEN, block_size)
    tokens: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    free_blocks = iter(range(10_000))
    for _ in range(data.draw(st.integers(1, 6))):
        starts = []
        for row in data.draw(st.lists(st.integers(0, MAX_SEQS - 1), unique=True)):
            length = data.draw(st.integers(1, 30))
            tokens[row] = [row * 100 + i for i in range(length)]
            computed[row] = data.draw(st.integers(0, (length - 1) // block_size)) * block_size
            blocks[row] = [next(free_blocks) for _ in range(computed[row] // block_size)]
            starts.append(RowStart(row, tokens[row], length, PARAMETERS, list(blocks[row])))
        steps = []
        for row in data.draw(st.permutations(sorted(tokens))):
            left = len(tokens[row]) - computed[row]
            if left == 0 or len(tokens[row]) == MAX_LEN:
                continue
            count = data.draw(st.integers(1, left))
            needed = -(-(computed[row] + count) // block_size) - len(blocks[row])
            new_blocks = [next(free_blocks) for _ in range(needed)]
            blocks[row] += new_blocks
            steps.append(RowStep(row, computed[row], count, new_blocks, samples=count == left))
        inputs = batch.apply(StepPlan(starts, steps))

        expected: dict[str, list[int]] = {"ids": [], "positions": [], "slots": [], "ends": []}
        for step in steps:
            for position in range(
                step.num_computed_tokens, step.num_computed_tokens + step.num_scheduled_tokens
            ):
                expected["ids"].append(tokens[step.row][position])
                expected["positions"].append(position)
                block = blocks[step.row][position // block_size]
                expected["slots"].append(block * block_size + position % block_size)
            expected["ends"].append(len(expected["ids"]))
        assert inputs.token_ids.tolist() == expected["ids"]
        assert inputs.positions.tolist() == expected["positions"]
        assert inputs.slot_mapping.tolist() == expected["slots"]
        assert inputs.cu_seqlens.tolist() == [0, *expected["ends"]]
        for index, step in enumerate(steps):
            assert inputs.seq_lens[index] == step.num_computed_tokens + step.num_scheduled_tokens
            own = blocks[step.row]
            assert inputs.block_table[index, : len(own)].tolist() == own
        sampled = [index for index, step in enumerate(steps) if step.samples]
        assert inputs.sampled_sequences.tolist() == sampled
        assert inputs.sample_indices.tolist() == [expected["ends"][i] - 1 for i in sampled]

        for step in steps:
            computed[step.row] += step.num_scheduled_tokens
        rows = np.array([steps[i].row for i in sampled], np.int64)
        new_ids = rows * 100 + 99
        batch.append(rows, inputs.seq_lens[inputs.sampled_sequences].numpy(), new_ids)
        for row, token_id in zip(rows.tolist(), new_ids.tolist(), strict=True):
            tokens[row].append(token_id)


def test_sampling_inputs_are_those_of_the_rows_asked_for_in_their_order() -> None:
    batch = PersistentBatch(4, 20, 16)
    parameters = SamplingParameters(
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=-(2**63),
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logprobs=True,
        top_logprobs=3,
    )
    starts = [
        RowStart(3, [1, 2, 3], 2, parameters, []),
        RowStart(1, [4], 1, SamplingParameters(max_tokens=1, seed=2**63 - 1), []),
    ]
    batch.apply(StepPlan(starts, []))
    inputs = batch.sampling_inputs(np.array([1, 3]), np.array([1, 3]))
    assert inputs.temperature.tolist() == [1.0, 0.5]
    assert inputs.top_p.tolist() == [1.0, 0.25]
    assert inputs.min_p.tolist() == [0.0, 0.125]
    assert inputs.top_k.tolist() == [0, 7]
    assert inputs.seeds.tolist() == [2**63 - 1, -(2**63)]
    assert inputs.repetition_penalty.tolist() == [1.0, 1.5]
    assert inputs.presence_penalty.tolist() == [0.0, -0.5]
    assert inputs.frequency_penalty.tolist() == [0.0, 0.75]
    assert inputs.wants_logprobs.tolist() == [False, True]
    assert inputs.num_top_logprobs.tolist() == [0, 3]
    assert inputs.has_penalties.tolist() == [False, True]
    assert inputs.token_ids.tolist() == [[4, 0, 0], [1, 2, 3]]
    assert inputs.prompt_lens.tolist() == [1, 2]
    assert torch.equal(inputs.seq_lens, torch.tensor([1, 3]))


def test_the_token_after_the_longest_sequence_needs_no_place() -> None:
    batch = PersistentBatch(1, 4, 16)
    batch.apply(StepPlan([RowStart(0, [1, 2, 3, 4], 4, PARAMETERS, [0])], []))
    batch.append(np.array([0]), np.array([4]), np.array([9]))
    inputs = batch.apply(StepPlan([], [RowStep(0, 0, 4, [], samples=True)]))
    assert inputs.token_ids.tolist() == [1, 2, 3, 4]
