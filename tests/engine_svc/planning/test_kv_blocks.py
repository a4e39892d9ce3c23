"""The block pool: counting of holders, and the order in which blocks are reused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_svc.planning.kv_blocks import BlockPool
from engine_svc.planning.prefix_index import PrefixIndex


def test_blocks_come_free_when_their_last_holder_releases_them() -> None:
    pool = BlockPool(4, PrefixIndex())
    block_ids = pool.allocate(3)
    pool.reference(block_ids[:2])
    pool.release(block_ids)
    assert pool.num_free == 2
    assert [pool.num_references(block_id) for block_id in block_ids] == [1, 1, 0]
    pool.release(block_ids[:2])
    assert pool.num_free == 4


def test_releasing_a_free_block_is_noticed() -> None:
    pool = BlockPool(2, PrefixIndex())
    block_ids = pool.allocate(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(block_ids)


def test_a_cached_block_is_found_until_it_is_reused() -> None:
    index = PrefixIndex()
    pool = BlockPool(2, index)
    block_ids = pool.allocate(2)
    index.insert(b"first", block_ids[0])
    pool.release(block_ids)
    assert pool.num_free == 2
    assert index.find(b"first") == block_ids[0]
    assert pool.count_free([block_ids[0]]) == 1
    pool.reference([block_ids[0]])
    assert (pool.num_free, pool.count_free([block_ids[0]])) == (1, 0)
    pool.release([block_ids[0]])
    pool.allocate(2)
    assert index.find(b"first") is None


def test_uncached_blocks_are_reused_before_cached_ones_and_those_least_recently_used_first() -> (
    None
):
    index = PrefixIndex()
    pool = BlockPool(6, index)
    older, newer, uncached = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    for number, block_id in enumerate([*older, *newer]):
        index.insert(bytes([number]), block_id)
    pool.release(older)
    pool.release(newer)
    pool.release(uncached)
    # Of one sequence the end goes first: its beginning is useful without it, not the reverse.
    expected = [*uncached, *reversed(older), *reversed(newer)]
    assert pool.allocate(6) == expected


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 99))))
def test_references_and_free_blocks_always_add_up(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(8, PrefixIndex())
    holdings: list[list[int]] = []
    for operation, number in operations:
        if operation == "allocate" and pool.num_free:
            holdings.append(pool.allocate(1 + number % pool.num_free))
        elif operation == "share" and holdings:
            shared = list(holdings[number % len(holdings)])
            pool.reference(shared)
            holdings.append(shared)
        elif operation == "release" and holdings:
            pool.release(holdings.pop(number % len(holdings)))
        held = [block_id for holding in holdings for block_id in holding]
        for block_id in range(pool.num_blocks):
            assert pool.num_references(block_id) == held.count(block_id)
        assert pool.num_free == pool.num_blocks - len(set(held))
