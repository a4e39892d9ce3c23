"""Who of those that wait goes next: tenants take turns by the tokens that they have had.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) with the costs of a Virtual Token Counter
(Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each tenant has a count of
tokens, the tenant with the lowest goes next, and is charged what its request is expected to take.
Who comes back after a pause begins at the present count, so that no credit is saved up. While two
tenants have requests waiting, what they were charged differs by at most one request of each.
"""

from bisect import insort
from collections.abc import Set
from dataclasses import dataclass
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


@dataclass(slots=True, eq=False)
class Entry(Generic[ItemT]):
    """One request that waits. Its tenant's higher priorities go first, then its older ones.

    `is_kept`: it is pushed out for nobody. `number` is its place in the order of arrival.
    """

    item: ItemT
    tenant: str
    num_sequences: int
    num_tokens: int
    priority: int = 0
    is_kept: bool = False
    number: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """Higher goes earlier."""
        return (self.priority, -self.number)


class FairQueue(Generic[ItemT]):
    """The requests that wait, and what each tenant has had."""

    def __init__(self) -> None:
        # By rank: the next one of a tenant is its last. Only tenants with something waiting.
        self._waiting: dict[str, list[Entry[ItemT]]] = {}
        self._charged: dict[str, int] = {}
        # The count of the tenant that went last, as it was before: where newcomers begin.
        self._present = 0
        self._num_arrivals = 0
        self.num_requests = 0
        self.num_sequences = 0
        self.num_tokens = 0

    @property
    def tenants(self) -> Set[str]:
        """Those that have something waiting."""
        return self._waiting.keys()

    def num_sequences_of(self, tenant: str) -> int:
        return sum(entry.num_sequences for entry in self._waiting.get(tenant, ()))

    def num_tokens_of(self, tenant: str) -> int:
        return sum(entry.num_tokens for entry in self._waiting.get(tenant, ()))

    def add(self, entry: Entry[ItemT]) -> None:
        self._num_arrivals += 1
        entry.number = self._num_arrivals
        if entry.tenant not in self._waiting:
            self._waiting[entry.tenant] = []
            self._charged[entry.tenant] = max(self._present, self._charged.get(entry.tenant, 0))
        insort(self._waiting[entry.tenant], entry, key=lambda waiting: waiting.rank)
        self._count(entry, 1)

    def remove(self, entry: Entry[ItemT]) -> bool:
        """Takes an entry out that will not be served; False if it was not waiting any more."""
        entries = self._waiting.get(entry.tenant, [])
        if entry not in entries:
            return False
        entries.remove(entry)
        self._forget_if_empty(entry.tenant)
        self._count(entry, -1)
        return True

    def pop(self) -> Entry[ItemT]:
        """The next one, charged to its tenant. Something must be waiting."""
        tenant = min(
            self._waiting, key=lambda name: (self._charged[name], -self._waiting[name][-1].rank[1])
        )
        entry = self._waiting[tenant].pop()
        self._present = max(self._present, self._charged[tenant])
        self._charged[tenant] += entry.num_tokens
        self._forget_if_empty(tenant)
        self._count(entry, -1)
        return entry

    def settle(self, tenant: str, num_tokens: int) -> None:
        """Corrects what `tenant` was charged by what a request took more, or less (negative)."""
        if tenant in self._charged:
            self._charged[tenant] += num_tokens

    def to_push_out(
        self, newcomer: Entry[ItemT], max_sequences: int, max_tokens: int
    ) -> list[Entry[ItemT]] | None:
        """Who has to go so that the queue holds the newcomer and stays within the bounds.

        Always the latest of the tenant with most tokens waiting, and only while that tenant keeps
        as many as the newcomer's has then. Empty when there is room; None when none can be made.
        """
        kept = {
            tenant: [entry for entry in entries if not entry.is_kept]
            for tenant, entries in self._waiting.items()
        }
        tokens = {tenant: self.num_tokens_of(tenant) for tenant in kept}
        sequences_over = self.num_sequences + newcomer.num_sequences - max_sequences
        tokens_over = self.num_tokens + newcomer.num_tokens - max_tokens
        own = tokens.get(newcomer.tenant, 0) + newcomer.num_tokens
        pushed_out: list[Entry[ItemT]] = []
        while sequences_over > 0 or tokens_over > 0:
            longest = max(
                (tenant for tenant in kept if kept[tenant] and tenant != newcomer.tenant),
                key=lambda tenant: tokens[tenant],
                default=None,
            )
            if longest is None:
                return None
            victim = kept[longest].pop(0)
            tokens[longest] -= victim.num_tokens
            if tokens[longest] < own:
                return None
            sequences_over -= victim.num_sequences
            tokens_over -= victim.num_tokens
            pushed_out.append(victim)
        return pushed_out

    def _forget_if_empty(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _count(self, entry: Entry[ItemT], sign: int) -> None:
        self.num_requests += sign
        self.num_sequences += sign * entry.num_sequences
        self.num_tokens += sign * entry.num_tokens
