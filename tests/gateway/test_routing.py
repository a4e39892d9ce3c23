"""Prefix affinity with bounded loads."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import choose_engine, prefix_key

ENGINES = [f"10.0.0.{number}:7000" for number in range(4)]


def key(*token_ids: int, salt: str = "") -> bytes:
    return prefix_key(token_ids, 16, salt)


def test_prompts_that_share_their_leading_blocks_share_a_key() -> None:
    head = range(64)
    assert key(*head, 1, 2, 3) == key(*head, 9)
    assert key(*head) != key(*range(63), 99)
    assert key(*range(20)) == key(*range(16))
    assert key(1, 2, 3) != key(1, 2)
    assert key(*head, salt="a") != key(*head, salt="b")


def test_every_gateway_makes_the_same_choice() -> None:
    for number in range(100):
        chosen = {
            choose_engine(key(number), engines, lambda address: 0)
            for engines in (ENGINES, ENGINES[::-1])
        }
        assert len(chosen) == 1


def test_keys_spread_over_idle_engines() -> None:
    counts = Counter(choose_engine(key(n), ENGINES, lambda address: 0) for n in range(1000))
    assert min(counts.values()) > 150


def test_an_engine_that_goes_moves_only_its_own_keys() -> None:
    def choose(number: int, engines: list[str]) -> str:
        return choose_engine(key(number), engines, lambda address: 0)

    for number in range(200):
        before = choose(number, ENGINES)
        if before != ENGINES[0]:
            assert choose(number, ENGINES[1:]) == before


@given(
    loads=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    token_ids=st.lists(st.integers(0, 1 << 31), min_size=1, max_size=100),
)
def test_the_chosen_engine_is_never_over_the_bound(loads: list[int], token_ids: list[int]) -> None:
    by_address = {f"e{number}": load for number, load in enumerate(loads)}
    chosen = choose_engine(prefix_key(token_ids, 16, ""), by_address, by_address.__getitem__)
    mean = (sum(loads) + 1) / len(loads)
    assert by_address[chosen] < 1.25 * mean + 1


def test_a_flood_of_one_prefix_uses_every_engine() -> None:
    loads: Counter[str] = Counter()
    for _ in range(100):
        loads[choose_engine(key(1), ENGINES, loads.__getitem__)] += 1
    assert max(loads.values()) <= 32
    assert len(loads) == 4
