"""What a step gathers of its rows: each row's own parameters, and nothing nobody asks for."""

import numpy as np
import torch

from engine_svc.compute.sampling_rows import SamplingInputs, SamplingRows
from engine_svc.planning.step import SamplingParameters

VOCAB_SIZE = 70
PLAIN = SamplingParameters(max_tokens=1, seed=2**63 - 1)
EVERYTHING = SamplingParameters(
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
    min_tokens=2,
    logit_bias=((5, 1.0),),
    allowed_token_ids=frozenset({0, 31, 32, 69}),
    bad_words=((5, 6),),
)


def gather(
    requests: dict[int, tuple[list[int], int, SamplingParameters]], rows: list[int]
) -> SamplingInputs:
    """requests: row -> (token ids, length of the prompt, parameters)."""
    token_ids, prompt_lens = np.zeros((4, 20), np.int32), np.zeros(4, np.int64)
    sampling_rows = SamplingRows(token_ids, prompt_lens, VOCAB_SIZE)
    for row, (ids, prompt_len, sampling) in requests.items():
        token_ids[row, : len(ids)] = ids
        prompt_lens[row] = prompt_len
        sampling_rows.start(row, sampling)
    seq_lens = [len(requests[row][0]) for row in rows]
    return sampling_rows.gather(np.array(rows), np.array(seq_lens))


def test_inputs_are_those_of_the_rows_asked_for_in_their_order() -> None:
    inputs = gather({3: ([1, 2, 3], 2, EVERYTHING), 1: ([4], 1, PLAIN)}, [1, 3])
    assert inputs.temperature.tolist() == [1.0, 0.5]
    assert inputs.top_p.tolist() == [1.0, 0.25]
    assert inputs.min_p.tolist() == [0.0, 0.125]
    assert inputs.top_k.tolist() == [0, 7]
    assert inputs.seeds.tolist() == [2**63 - 1, -(2**63)]
    assert inputs.positions.tolist() == [1, 3]
    (mask,) = inputs.masks
    assert mask.rows.tolist() == [1]
    assert mask.allowed.tolist() == [[1 - 2**31, 1, 1 << 5]]
    assert inputs.biases is not None and inputs.penalties is not None
    assert inputs.biases.rows.tolist() == [1]
    assert inputs.biases.token_ids.tolist() == [5]
    assert inputs.penalties.rows.tolist() == [1]
    assert inputs.penalties.token_ids.tolist() == [[1, 2, 3]]
    assert inputs.penalties.prompt_lens.tolist() == [2]
    assert inputs.penalties.seq_lens.tolist() == [3]
    assert inputs.penalties.repetition.tolist() == [1.5]
    assert inputs.penalties.presence.tolist() == [-0.5]
    assert inputs.penalties.frequency.tolist() == [0.75]
    assert inputs.logprobs is not None
    assert inputs.logprobs.rows.tolist() == [1]
    assert inputs.logprobs.num_top == [3]


def test_a_step_without_options_gathers_none_even_beside_rows_that_sit_it_out() -> None:
    requests = {0: ([4], 1, PLAIN), 1: ([1, 2, 3], 2, EVERYTHING), 2: ([4, 5], 1, PLAIN)}
    inputs = gather(requests, [2, 0])
    assert inputs.masks == ()
    assert inputs.biases is inputs.penalties is inputs.logprobs is None
    assert torch.equal(inputs.positions, torch.tensor([2, 1]))


def test_a_restarted_row_keeps_no_option_of_the_request_before_it() -> None:
    token_ids, prompt_lens = np.zeros((1, 20), np.int32), np.ones(1, np.int64)
    rows = SamplingRows(token_ids, prompt_lens, VOCAB_SIZE)
    rows.start(0, EVERYTHING)
    rows.start(0, PLAIN)
    inputs = rows.gather(np.array([0]), np.array([1]))
    assert inputs.masks == ()
    assert inputs.biases is inputs.penalties is inputs.logprobs is None
