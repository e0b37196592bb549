"""Observers of rank 0's steps: what they see reaches no bit of an answer."""

from tpdet.control.plan import StepPlan


class StepObserver:
    """Hears of each step that rank 0 commits; by default it does nothing about it."""

    def begin(self, pending: bool) -> None:
        """A step is about to be ended; pending: it was launched while the one before it ran."""

    def running(self) -> None:
        """The step runs, and what may follow it is launched: do what could wait for that."""

    def end(self, plan: StepPlan, synchronous: bool) -> None:
        """The step has run, and is not committed yet.

        synchronous: the results of the step before had been read when it was launched.
        """

    def idle(self) -> None:
        """No request is left: the next step does not follow the last one."""
