"""Results' memory: two of a kind in turns, at addresses that stay once the largest step has run."""

import pytest
import torch

from kernels.gpu.result_buffers import ResultBuffers

FLOAT = torch.float32


@pytest.fixture
def buffers() -> ResultBuffers:
    return ResultBuffers(torch.device("cpu"))


def test_a_result_lives_until_its_op_was_called_twice_more(buffers: ResultBuffers) -> None:
    first = buffers.take("linear", 4, 8, FLOAT).fill_(1.0)
    buffers.take("linear", 4, 8, FLOAT).fill_(2.0)
    assert torch.equal(first, torch.ones(4, 8))
    assert buffers.take("linear", 4, 8, FLOAT).data_ptr() == first.data_ptr()


def test_other_ops_widths_and_types_have_memory_of_their_own(buffers: ResultBuffers) -> None:
    kinds = [
        ("linear", 8, FLOAT),
        ("norm", 8, FLOAT),
        ("linear", 4, FLOAT),
        ("linear", 8, torch.bfloat16),
    ]
    taken = [buffers.take(op, 2, width, dtype) for op, width, dtype in kinds for _ in range(2)]
    assert len({tensor.data_ptr() for tensor in taken}) == 2 * len(kinds)
    assert [tensor.shape[1] for tensor in taken[::2]] == [8, 8, 4, 8]


def test_smaller_steps_lie_where_the_largest_did(buffers: ResultBuffers) -> None:
    largest = [buffers.take("linear", 100, 8, FLOAT) for _ in range(2)]
    num_bytes = buffers.num_bytes
    for rows in (1, 100, 0, 7):
        tensors = [buffers.take("linear", rows, 8, FLOAT) for _ in range(2)]
        assert [tensor.shape for tensor in tensors] == [(rows, 8)] * 2
        if rows:
            assert [t.data_ptr() for t in tensors] == [t.data_ptr() for t in largest]
    assert buffers.num_bytes == num_bytes


def test_what_is_outgrown_stays_once_graphs_have_its_address(buffers: ResultBuffers) -> None:
    buffers.take("linear", 1, 8, FLOAT)
    buffers.take("linear", 2, 8, FLOAT)
    assert buffers.num_bytes == 2 * 2 * 8 * 4
    scratch = buffers.scratch("partials", (2, 3), FLOAT)
    buffers.keep_addresses()
    buffers.keep_addresses()
    buffers.take("linear", 4, 8, FLOAT)
    assert buffers.scratch("partials", (3, 2), FLOAT).data_ptr() == scratch.data_ptr()
    buffers.scratch("partials", (10,), FLOAT)
    assert buffers.num_bytes == 2 * 2 * 8 * 4 + 2 * 4 * 8 * 4 + 6 * 4 + 10 * 4


def test_results_can_be_written_in_and_outside_of_inference_mode(buffers: ResultBuffers) -> None:
    with torch.inference_mode():
        buffers.take("linear", 2, 2, FLOAT).zero_()
    result = buffers.take("linear", 2, 2, FLOAT)
    torch.mm(torch.eye(2), torch.eye(2), out=result)
    assert torch.equal(result, torch.eye(2))
