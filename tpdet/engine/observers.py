"""Observers of rank 0's steps: what they see reaches no bit of an answer."""

from tpdet.control.plan import StepPlan
from tpdet.scheduler.policy import Policy


class StepObserver:
    """Hears of each step that rank 0 commits; by default it does nothing about it."""

    def begin(self, pending: bool) -> None:
        """A step is about to be ended; pending: it was launched while the one before it ran."""

    def running(self) -> None:
        """The step runs, and what may follow it has been launched."""

    def end(self, plan: StepPlan, awaited: bool) -> None:
        """The step has run, and is not committed yet.

        awaited: the results of the step before had been read when it was launched.
        """

    def idle(self) -> None:
        """No request is left."""


class DraftTimes(StepObserver):
    """Tells drafting what its drafts cost: the time from the end of one step to that of the next.

    While a step runs, drafting learns of the steps before it.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ended = 0.0  # seconds of the clock; 0: the engine was idle since

    def running(self) -> None:
        """Let drafting learn."""
        self._policy.drafting.think()

    def end(self, plan: StepPlan, awaited: bool) -> None:
        """Pass on the time since the step before has ended; prompts count as no positions."""
        drafting = self._policy.drafting
        before, self._ended = self._ended, drafting.clock()
        if before:
            rows = plan.rows
            decodes = bool((rows.count == rows.samples).all())
            positions = int(rows.count.sum()) if decodes else 0
            drafting.took(positions, awaited, self._ended - before)

    def idle(self) -> None:
        """Forget when the last step ended."""
        self._ended = 0.0
