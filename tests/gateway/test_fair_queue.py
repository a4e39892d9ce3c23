"""The fair queue: nothing is lost or starved, tenants get equal tokens, bounds hold."""

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from gateway.fair_queue import Entry, FairQueue

MAX_TOKENS = 1000
Queue = FairQueue[int]

requests = st.builds(
    lambda tenant, tokens, sequences, priority, kept: Entry(
        0, tenant, sequences, tokens, priority, kept
    ),
    st.sampled_from("abc"),
    st.integers(1, MAX_TOKENS),
    st.integers(1, 4),
    st.integers(-1, 1),
    st.booleans(),
)
# An entry to add, or None: the next one goes.
steps = st.lists(st.one_of(requests, st.none()), max_size=60)


def copied(entry: Entry[int]) -> Entry[int]:
    """Examples may share an entry; a queue needs each to be its own."""
    return Entry(
        0, entry.tenant, entry.num_sequences, entry.num_tokens, entry.priority, entry.is_kept
    )


@given(steps)
def test_what_goes_in_comes_out_once_in_the_order_of_its_tenant(
    steps: list[Entry[int] | None],
) -> None:
    queue = Queue()
    waiting: dict[str, list[Entry[int]]] = defaultdict(list)

    def check_next() -> None:
        entry = queue.pop()
        expected = max(waiting[entry.tenant], key=lambda other: (other.priority, -other.number))
        assert entry is expected
        waiting[entry.tenant].remove(entry)

    for step in steps:
        if step is not None:
            entry = copied(step)
            queue.add(entry)
            waiting[entry.tenant].append(entry)
        elif queue.num_requests:
            check_next()
        left = [entry for entries in waiting.values() for entry in entries]
        assert queue.num_requests == len(left)
        assert queue.num_sequences == sum(entry.num_sequences for entry in left)
        assert queue.num_tokens == sum(entry.num_tokens for entry in left)
        assert set(queue.tenants) == {entry.tenant for entry in left}
    while queue.num_requests:
        check_next()
    assert not any(waiting.values())


@given(st.lists(requests, min_size=1, max_size=60))
def test_tenants_that_wait_are_charged_alike_within_one_request_of_each(
    entries: list[Entry[int]],
) -> None:
    queue = Queue()
    for entry in entries:
        queue.add(copied(entry))
    charged = Counter[str]()
    busy = set(queue.tenants)
    while len(queue.tenants) > 1:
        entry = queue.pop()
        charged[entry.tenant] += entry.num_tokens
        busy &= queue.tenants
        if len(busy) > 1:
            counts = [charged[tenant] for tenant in busy]
            assert max(counts) - min(counts) <= MAX_TOKENS


@given(st.lists(requests, max_size=60), st.integers(1, MAX_TOKENS))
def test_a_flood_costs_a_newcomer_at_most_one_turn_of_each_other(
    flood: list[Entry[int]], num_tokens: int
) -> None:
    queue = Queue()
    for entry in flood:
        queue.add(copied(entry))
    for _ in range(len(flood) // 2):
        queue.pop()
    lone = Entry(1, "lone", 1, num_tokens)
    queue.add(lone)
    others: Counter[str] = Counter()
    while (entry := queue.pop()) is not lone:
        others[entry.tenant] += entry.num_tokens
    # Each other gets no more than what it was behind, and the request that brings it past.
    assert all(count <= 3 * MAX_TOKENS for count in others.values())


@given(st.lists(requests, max_size=40), st.integers(1, 12), st.integers(500, 4000))
def test_the_bounds_hold_and_only_who_has_more_makes_room(
    newcomers: list[Entry[int]], max_sequences: int, max_tokens: int
) -> None:
    queue = Queue()
    for step in newcomers:
        newcomer = copied(step)
        before = {tenant: queue.num_tokens_of(tenant) for tenant in "abc"}
        pushed_out = queue.to_push_out(newcomer, max_sequences, max_tokens)
        fits = (
            queue.num_sequences + newcomer.num_sequences <= max_sequences
            and queue.num_tokens + newcomer.num_tokens <= max_tokens
        )
        assert (pushed_out == []) == fits
        if pushed_out is None:
            continue
        for victim in pushed_out:
            assert victim.tenant != newcomer.tenant and not victim.is_kept
            assert queue.remove(victim)
            assert not queue.remove(victim)
        queue.add(newcomer)
        for tenant in {victim.tenant for victim in pushed_out}:
            assert queue.num_tokens_of(tenant) >= before[newcomer.tenant] + newcomer.num_tokens
        assert queue.num_sequences <= max_sequences
        assert queue.num_tokens <= max_tokens


def test_what_was_not_used_is_given_back() -> None:
    queue = Queue()
    queue.add(Entry(0, "a", 1, 1000))
    queue.pop()
    queue.settle("a", -990)
    for number in range(3):
        queue.add(Entry(number, "a", 1, 10))
        queue.add(Entry(number, "b", 1, 10))
    tenants = [queue.pop().tenant for _ in range(4)]
    assert tenants.count("a") == tenants.count("b") == 2


def test_idle_time_earns_nothing() -> None:
    queue = Queue()
    for number in range(20):
        queue.add(Entry(number, "busy", 1, 100))
    for _ in range(10):
        queue.pop()
    for number in range(10):
        queue.add(Entry(number, "late", 1, 100))
    tenants = [queue.pop().tenant for _ in range(8)]
    assert tenants.count("busy") >= 3
