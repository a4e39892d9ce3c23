"""The ladder of batch sizes that have a graph, and which of them a step takes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine_svc.compute.decode_graphs import DecodeGraphs, ladder


def test_the_ladder_is_fine_where_steps_are_short() -> None:
    assert ladder(1) == (1,)
    assert ladder(3) == (1, 2, 3)
    assert ladder(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert ladder(1024)[-5:] == (896, 928, 960, 992, 1024)


@given(largest=st.integers(1, 2048))
def test_at_most_an_eighth_is_padding_beyond_the_first_sizes(largest: int) -> None:
    sizes = ladder(largest)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    for smaller, larger in itertools.pairwise(sizes):
        assert larger - smaller <= max(8, smaller / 8)


@given(largest=st.integers(1, 300), num_left_out=st.integers(0, 5), size=st.integers(1, 310))
def test_a_step_takes_the_next_size_that_was_captured(
    largest: int, num_left_out: int, size: int
) -> None:
    captured = ladder(largest)[-max(1, len(ladder(largest)) - num_left_out) :]
    graphs = DecodeGraphs(dict.fromkeys(captured))  # type: ignore[arg-type]
    padded = graphs.padded_size(size)
    if size > largest:
        assert padded == 0
    else:
        assert padded == min(other for other in captured if other >= size)


def test_without_graphs_every_step_goes_without() -> None:
    assert DecodeGraphs({}).padded_size(1) == 0
