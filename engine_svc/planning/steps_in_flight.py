"""The steps between their plan and their commit, and the requests that ended while they run."""

from collections.abc import Mapping

from engine_svc.planning.request import Request
from engine_svc.planning.step import RowStep, StepPlan


class StepsInFlight:
    """`plans` are those that compute works on, in the order in which the scheduler added them.

    A request that ends keeps its row and its blocks until the last step has landed that works on
    them: nobody else may have them before.
    """

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self._ended: list[tuple[StepPlan, Request]] = []
        # What was asked for last, and for which plan.
        self._indexed: StepPlan | None = None
        self._steps_by_row: Mapping[int, RowStep] = {}

    def land(self, plan: StepPlan) -> None:
        """The oldest step is computed."""
        assert self.plans and plan is self.plans[0], "this is not the oldest plan in flight"
        del self.plans[0]

    def steps_by_row(self, plan: StepPlan) -> Mapping[int, RowStep]:
        """What a plan in flight does with each of its rows."""
        if plan is not self._indexed:
            self._indexed = plan
            self._steps_by_row = {step.row: step for step in plan.steps}
        return self._steps_by_row

    def keep(self, request: Request) -> bool:
        """Whether a step in flight works on a request that ends; `take_landed` has it later."""
        for plan in reversed(self.plans):
            if request.row in self.steps_by_row(plan):
                self._ended.append((plan, request))
                return True
        return False

    def take_landed(self) -> list[Request]:
        """The requests kept on which no step works any more."""
        if not self._ended:
            return []
        in_flight = {id(plan) for plan in self.plans}
        landed = [request for plan, request in self._ended if id(plan) not in in_flight]
        self._ended = [entry for entry in self._ended if id(entry[0]) in in_flight]
        return landed
