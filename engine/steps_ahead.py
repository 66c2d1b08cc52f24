"""The host works while the device does: a step is begun before the last one's tokens are known.

    launch n+1 ── collect n ── commit, emit, post n ── take in requests ── launch n+2 ── collect n+1

An executor without the two halves of OverlappingExecutor runs one step after the other.
"""

from dataclasses import dataclass

from engine.scheduler import Scheduler
from engine.step_time import StepShape
from engine.types import Executor, OverlappingExecutor, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Step:
    plan: StepPlan
    shape: StepShape


class StepsAhead:
    """`begun`: the step that the device runs already, which is the next to be taken in."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self._executor = executor
        self._halves = executor if isinstance(executor, OverlappingExecutor) else None
        self._scheduler = scheduler
        self.begun: Step | None = None

    def run(self, step: Step) -> StepResult:
        """The result of `step`: of `begun`, or of a new one where nothing is begun.

        Before it waits, it begins the step that follows, if that can be foreseen.
        """
        if self._halves is None:
            return self._executor.execute(step.plan)
        if step is not self.begun:
            self._halves.launch(step.plan)
        self.begun = None
        plan = self._scheduler.foresee(step.plan)
        if plan is not None:
            self.begun = Step(plan, self._scheduler.planner.shape)
            self._halves.launch(plan)
        return self._halves.collect()

    def abandon(self) -> list[Step]:
        """Forgets what is in flight after a failure; the step that was begun, if one was."""
        if self._halves is not None:
            self._halves.abandon()
        begun, self.begun = self.begun, None
        return [] if begun is None else [begun]
