"""What the rounds against peers come to: medians of ratios, goals, shares of the limits."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
from rich.table import Table

from tests.bench.machine import MachineLimits
from tests.bench.peers_quiet import MAX_OTHERS_SHARE
from tests.bench.peers_servers import OURS
from tests.bench.peers_workloads import Figure


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of each contestant, one right after the other."""

    values: Mapping[str, float]
    others_share: float

    @property
    def quiet(self) -> bool:
        return self.others_share <= MAX_OTHERS_SHARE


@dataclass(slots=True)
class Outcome:
    """All rounds of one workload. Loud rounds count only where there is no quiet one."""

    figure: Figure
    rounds: list[Round] = field(default_factory=list)
    memory_mib: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def names(self) -> Sequence[str]:
        """Of those that could do it."""
        return list(self.rounds[0].values)

    @property
    def quiet(self) -> bool:
        return any(one.quiet for one in self.rounds)

    @property
    def num_quiet(self) -> int:
        return sum(one.quiet for one in self.rounds)

    def value(self, name: str) -> float:
        return statistics.median(one.values[name] for one in self._counted())

    def ratio(self, name: str) -> float:
        """Ours to `name`'s, taken within each round; the median."""
        return statistics.median(one.values[OURS] / one.values[name] for one in self._counted())

    def best_peer(self) -> str:
        peers = [name for name in self.names if name != OURS]
        # The peer that we are least ahead of.
        ratio = {name: self.ratio(name) for name in peers}
        return (min if self.figure.more_is_better else max)(peers, key=ratio.__getitem__)

    def _counted(self) -> list[Round]:
        return [one for one in self.rounds if one.quiet] or self.rounds


@dataclass(frozen=True, slots=True)
class Goal:
    figure: str
    ratio: float


# On the file that both serve, and against the best peer with any file.
SAME_FILE_GOALS = (
    Goal("single", 1.6),
    Goal("streams16", 4.5),
    Goal("streams64", 5.0),
    Goal("prefill512", 6.0),
    Goal("ttft16", 0.25),
)
BEST_PEER_GOALS = (Goal("single", 1.2), Goal("streams16", 2.2), Goal("prefill512", 2.0))


@dataclass(frozen=True, slots=True)
class Work:
    """What the model costs, whoever computes it."""

    bytes_per_step: float  # weights read once for each step that samples
    operations_per_prompt_token: float  # multiplications and additions, without the head
    operations_per_new_token: float

    @classmethod
    def of(cls, model: Path) -> "Work | None":
        """From a GGUF file; None for a directory, whose engine decides what it holds."""
        if model.is_dir():
            return None
        tensors = {one.name: one for one in gguf.GGUFReader(model).tensors if len(one.shape) > 1}
        head = tensors["output.weight" if "output.weight" in tensors else "token_embd.weight"]
        layers = [one for name, one in tensors.items() if name.startswith("blk.")]
        values = sum(int(one.n_elements) for one in layers)
        return cls(
            float(sum(int(one.n_bytes) for one in layers) + int(head.n_bytes)),
            2.0 * values,
            2.0 * (values + int(head.n_elements)),
        )


def results_table(outcomes: Sequence[Outcome], names: Sequence[str]) -> Table:
    table = Table(title="medians, and how many times theirs ours is")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("quiet rounds", justify="right")
    for outcome in outcomes:
        cells = []
        for name in names:
            if name not in outcome.names:
                cells.append("failed")
                continue
            text = f"{outcome.value(name):,.0f} {outcome.figure.unit}"
            cells.append(text if name == OURS else f"{text}  [bold]{outcome.ratio(name):.2f}x[/]")
        quiet = f"{outcome.num_quiet} of {len(outcome.rounds)}"
        table.add_row(outcome.figure.title, *cells, quiet if outcome.quiet else f"[red]{quiet}[/]")
    return table


def memory_table(outcome: Outcome) -> Table:
    table = Table("after 16 streams, MiB", "RSS", "PSS")
    for name, (resident, proportional) in outcome.memory_mib.items():
        table.add_row(name, f"{resident:,.0f}", f"{proportional:,.0f}")
    return table


def limits_table(
    outcomes: Sequence[Outcome], names: Sequence[str], work: Work, limits: MachineLimits
) -> Table:
    """The share of the memory bandwidth that decoding one stream takes at least, and of the int8
    operations that the rest does."""
    table = Table("share of the machine's limit", *names, title=str(limits))
    for outcome in outcomes:
        figure = outcome.figure
        if figure.name == "decode":
            title, unit_share = "memory", work.bytes_per_step / limits.memory_bytes_per_second
        elif figure.name.startswith("streams"):
            operations = work.operations_per_new_token
            # The 32 prompt tokens of each stream, spread over its 64 new ones.
            operations += work.operations_per_prompt_token * 32 / 64
            title, unit_share = "int8", operations / limits.int8_operations_per_second
        elif figure.name.startswith("prefill"):
            operations = work.operations_per_prompt_token
            title, unit_share = "int8", operations / limits.int8_operations_per_second
        else:
            continue
        shares = [
            f"{unit_share * outcome.value(name):.0%}" if name in outcome.names else "failed"
            for name in names
        ]
        table.add_row(f"{title}: {figure.title}", *shares)
    return table


def goals_table(outcomes: Sequence[Outcome], same_file_peer: str | None) -> tuple[Table, list[str]]:
    """The goals that the outcomes say anything about; and those missed, in sentences."""
    by_name = {outcome.figure.name: outcome for outcome in outcomes}
    goals = [(goal, "the best peer", None) for goal in BEST_PEER_GOALS]
    if same_file_peer is not None:
        goals = [(goal, "the same file", same_file_peer) for goal in SAME_FILE_GOALS] + goals
    table = Table("goal", "against", "wanted", "measured", "")
    missed = []
    for goal, kind, peer in goals:
        outcome = by_name.get(goal.figure)
        if outcome is None:
            continue
        if peer is not None and peer not in outcome.names:
            missed.append(f"{outcome.figure.title}: {peer} failed")
            continue
        name = peer or outcome.best_peer()
        ratio, sign = outcome.ratio(name), "≥" if outcome.figure.more_is_better else "≤"
        met = ratio >= goal.ratio if outcome.figure.more_is_better else ratio <= goal.ratio
        verdict = ("met" if met else "missed") if outcome.quiet else "not proven: never quiet"
        row = (outcome.figure.title, f"{name}, {kind}", f"{sign} {goal.ratio:g}x", f"{ratio:.2f}x")
        table.add_row(*row, verdict)
        if verdict != "met":
            missed.append(", ".join((*row, verdict)))
    return table, missed
