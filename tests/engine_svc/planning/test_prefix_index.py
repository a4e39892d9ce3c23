"""Block hashes and the index over them."""

from hypothesis import given
from hypothesis import strategies as st

from engine_svc.planning.prefix_index import BlockHashes, PrefixIndex

TOKEN_IDS = list(range(12))


def block_hash(token_ids: list[int], index: int, *, salt: str = "", block_size: int = 4) -> bytes:
    return BlockHashes(block_size, salt).of_block(index, token_ids)


def test_a_hash_has_at_least_128_bits() -> None:
    assert len(block_hash(TOKEN_IDS, 0)) * 8 >= 128


def test_a_hash_covers_the_block_all_before_it_and_the_salt_but_nothing_after_it() -> None:
    reference = block_hash(TOKEN_IDS, 1)
    assert block_hash([*TOKEN_IDS[:8], 99, 99, 99, 99], 1) == reference
    assert block_hash([99, *TOKEN_IDS[1:]], 1) != reference
    assert block_hash([*TOKEN_IDS[:7], 99, *TOKEN_IDS[8:]], 1) != reference
    assert block_hash(TOKEN_IDS, 1, salt="tenant") != reference
    assert block_hash(TOKEN_IDS, 0) != reference


def test_equal_blocks_at_different_places_have_different_hashes() -> None:
    hashes = BlockHashes(2, "")
    assert hashes.of_block(0, [5, 5, 5, 5]) != hashes.of_block(1, [5, 5, 5, 5])


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8),
    st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8),
)
def test_hashes_agree_exactly_where_the_tokens_up_to_there_agree(
    one: list[int], other: list[int]
) -> None:
    for index in range(4):
        same = one[: 2 * index + 2] == other[: 2 * index + 2]
        hash_one = block_hash(one, index, block_size=2)
        assert (hash_one == block_hash(other, index, block_size=2)) == same


def test_hashes_do_not_depend_on_how_far_the_sequence_had_grown_when_they_were_asked_for() -> None:
    token_ids = [1, 2, 3, 4]
    hashes = BlockHashes(4, "")
    first = hashes.of_block(0, token_ids)
    token_ids += [5, 6, 7, 8]
    assert hashes.of_block(1, token_ids) == block_hash([1, 2, 3, 4, 5, 6, 7, 8], 1)
    assert hashes.of_block(0, token_ids) == first


def test_the_first_block_to_hold_some_tokens_keeps_the_name() -> None:
    index = PrefixIndex()
    index.insert(b"hash", 1)
    index.insert(b"hash", 2)
    assert index.find(b"hash") == 1
    assert 2 not in index
    index.remove(2)
    assert index.find(b"hash") == 1
    index.remove(1)
    assert index.find(b"hash") is None
    assert 1 not in index
