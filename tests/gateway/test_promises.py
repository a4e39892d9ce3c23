"""Times to come again: told so that they can be kept, taken up once, lapsing, bounded."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.promises import MAX_PROMISES, MAX_SECONDS, Promises


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


def keys(name: object, asked: object = None) -> tuple[bytes, bytes]:
    return repr(name).encode(), repr(("asked", name if asked is None else asked)).encode()


def test_the_kth_is_told_when_k_of_them_have_drained() -> None:
    promises = Promises(Clock())
    told = [promises.make(keys(number), 1, drain=5.0) for number in range(40)]
    # At first half of the promises are expected to be kept; two fifths of the drain are for them.
    assert told == [second for second in range(1, 11) for _ in range(4)]


def test_a_slow_line_spreads_them_over_many_seconds() -> None:
    promises = Promises(Clock())
    told = [promises.make(keys(number), 1, drain=0.3125) for number in range(10)]
    assert told == sorted(told)
    assert all(later - sooner == 4 for sooner, later in pairwise(told))


def test_nobody_is_told_to_come_before_the_first_is_expected_to_end() -> None:
    clock = Clock()
    promises = Promises(clock)
    told = [promises.make(keys(number), 1, 4.0, not_before=6.5) for number in range(20)]
    assert told[0] >= 7
    assert told == sorted(told)
    assert promises.make(keys("late"), 1, 4.0, not_before=1000.0) == MAX_SECONDS


def test_who_comes_in_time_is_known_by_its_id_or_by_what_it_asks() -> None:
    clock = Clock()
    promises = Promises(clock)
    seconds = [promises.make(keys("id", "question"), 1, 10.0), promises.make(keys("other"), 1, 10)]
    assert seconds == [1, 1]
    assert not promises.take(*keys("new id", "question"))
    clock.now += 1
    assert not promises.take(*keys("new id", "new question"))
    assert promises.take(*keys("new id", "question"))
    assert not promises.take(*keys("id", "question"))
    assert promises.take(*keys("other", "new question"))
    assert (promises.num_kept, promises.num_open) == (2, 0)


def test_clients_that_ask_the_same_each_have_a_promise() -> None:
    clock = Clock()
    promises = Promises(clock)
    for name in range(3):
        promises.make(keys(name, "same"), 1, 100.0)
    clock.now += 1
    assert [promises.take(*keys(name + 10, "same")) for name in range(4)] == [True] * 3 + [False]


def test_who_comes_too_soon_is_told_the_same_time() -> None:
    clock = Clock()
    promises = Promises(clock)
    for name in range(30):
        told = promises.make(keys(name), 1, 2.0)
    clock.now += 2
    assert not promises.take(*keys(29))
    assert promises.make(keys(29), 1, 2.0) == told - 2
    assert promises.num_open == 30


def test_what_is_not_taken_up_lapses_and_later_ones_are_told_less() -> None:
    clock = Clock()
    promises = Promises(clock)
    first = [promises.make(keys(("first", name)), 1, 2.0) for name in range(100)]
    clock.now += max(first) * 1.1 + 4
    assert not promises.take(*keys(("first", 50)))
    assert (promises.num_open, promises.num_lapsed) == (0, 100)
    second = [promises.make(keys(("second", name)), 1, 2.0) for name in range(100)]
    assert max(second) < max(first) / 2


def test_they_are_bounded_in_number_and_time() -> None:
    promises = Promises(Clock())
    told = [promises.make(keys(name), 1, 0.1) for name in range(100)]
    assert max(told) == MAX_SECONDS
    assert promises.num_open < 100
    many = Promises(Clock())
    for name in range(MAX_PROMISES + 10):
        many.make(keys(name), 1, 1e6)
    assert many.num_open == MAX_PROMISES


@given(
    st.lists(st.tuples(st.integers(1, 5), st.floats(0, 0.5)), max_size=100),
    st.floats(0.5, 50),
)
def test_no_second_is_promised_to_more_than_it_holds(
    refused: list[tuple[int, float]], drain: float
) -> None:
    clock = Clock()
    promises = Promises(clock)
    due: Counter[int] = Counter()
    for name, (num_sequences, pause) in enumerate(refused):
        clock.now += pause
        seconds = promises.make(keys(name), num_sequences, drain)
        assert 1 <= seconds <= MAX_SECONDS
        due[int(clock.now) + seconds] += num_sequences
    # Four more than its share: the rest of a request that began in an earlier second. Twice the
    # share: as long as it is not known, half are expected not to come.
    seconds_used = sorted(due)
    for first in seconds_used:
        within = [second for second in seconds_used if first <= second < first + 10]
        num_promised = sum(due[second] for second in within)
        lapsed_share = 0.5 / max(0.125, 0.5 * 0.98**promises.num_lapsed)
        assert num_promised <= 10 * drain * max(1.0, lapsed_share) + 5
