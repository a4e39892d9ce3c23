"""What the stand-in for a graph's capture lets pass, and what it refuses."""

from collections.abc import Callable

import pytest
import torch

from engine_svc.compute.graph_rehearsal import (
    CaptureError,
    CaptureRules,
    RehearsedGraph,
    RepeatedRun,
)

X = torch.arange(12, dtype=torch.float32).view(3, 4)
OUT = torch.zeros(3, 4)
SQUARE = torch.zeros(3, 3)
ROWS = torch.tensor([2, 0])
MASK = X > 4


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.add(X, 1, out=OUT),
        lambda: OUT.copy_(X).clamp_(min=2).mul_(X),
        lambda: torch.index_select(X, 0, ROWS, out=OUT[:2]),
        lambda: OUT.index_copy_(0, ROWS, X[:2]),
        lambda: torch.mm(X, X.T, out=SQUARE),
        lambda: OUT.view(-1)[3:7].unflatten(0, (2, 2)).fill_(float(X.shape[0])),
    ],
)
def test_ops_on_memory_that_is_there_pass(run: Callable[[], object]) -> None:
    with torch.inference_mode(), CaptureRules() as rules:
        run()
    assert rules.calls


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: int(ROWS[0]), "waits for the device"),
        (lambda: X.sum().item(), "makes memory|waits for the device"),
        (lambda: ROWS.tolist(), "waits for the device"),
        (lambda: ROWS.numpy(), "waits for the device"),
        (lambda: OUT.cpu(), "waits for the device"),
        (lambda: bool(torch.equal(X, OUT)), "waits for the device"),
        (lambda: OUT.fill_(1) if X[0, 0] > 1 else None, "makes memory|waits for the device"),
        (lambda: torch.nonzero(X), "depends on data"),
        (lambda: torch.masked_select(X, X > 3), "makes memory|depends on data"),
        (lambda: torch.unique(ROWS), "depends on data"),
        (lambda: X[MASK], "depends on data"),
        (lambda: torch.repeat_interleave(ROWS, ROWS), "depends on data"),
        (lambda: torch.bincount(ROWS), "depends on data"),
        (lambda: X + 1, "makes memory"),
        (lambda: X.index_select(0, ROWS), "makes memory"),
        (lambda: torch.zeros(3), "makes memory"),
        (lambda: X.double(), "makes memory"),
        (lambda: X.T.contiguous(), "makes memory"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(run: Callable[[], object], message: str) -> None:
    with torch.inference_mode(), pytest.raises(CaptureError, match=message), CaptureRules():
        run()
    # The rules hold inside alone.
    with torch.inference_mode():
        run()


def test_a_step_that_runs_op_by_op_may_make_memory_but_not_wait() -> None:
    with torch.inference_mode(), CaptureRules(allows_memory=True):
        total = (X + 1).sum()
        with pytest.raises(CaptureError, match="waits for the device"):
            total.item()
        with pytest.raises(CaptureError, match="depends on data"):
            torch.nonzero(X)


def test_a_replay_reads_and_writes_the_same_memory_again() -> None:
    source, result = torch.ones(4), torch.zeros(4)
    for kind in (RepeatedRun, RehearsedGraph):
        graph = kind(lambda: torch.mul(source, 2, out=result))
        assert result.tolist() == [2.0 * value for value in source.tolist()]
        source.fill_(5)
        graph.replay()
        assert result.tolist() == [10.0] * 4
        source.fill_(1)


@pytest.mark.parametrize("other", ["number", "shape", "more", "less"])
def test_a_replay_with_other_ops_than_the_capture_is_refused(other: str) -> None:
    state = {"number": 2, "shape": 4, "more": 1}
    result = torch.zeros(4)

    def run() -> None:
        for _ in range(state["more"]):
            result[: state["shape"]].fill_(state["number"])

    graph = RehearsedGraph(run)
    graph.replay()
    state |= {"number": {"number": 3}, "shape": {"shape": 3}, "more": {"more": 2}}.get(
        other, {"more": 0}
    )
    with pytest.raises(CaptureError, match=r"in the replay it is|were captured"):
        graph.replay()
