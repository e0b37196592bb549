"""What may be done with running requests from outside, between steps; on rank 0."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tpdet.requests.request import TokenOutput

if TYPE_CHECKING:
    from tpdet.engine.engine import EngineOutput
    from tpdet.scheduler.scheduler import Scheduler


class Interventions:
    """Requests of one engine are frozen, settled, ended early or computed again.

    settle: commits the steps that were launched, and launches none. identity: names the weights
    and the contract under which pages are shared now. usable: whether the weights are whole.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        settle: "Callable[[], list[EngineOutput]]",
        identity: Callable[[], bytes | None],
        usable: Callable[[], bool],
    ) -> None:
        self._scheduler, self.settle, self._identity = scheduler, settle, identity
        self._keep_keys = False
        self._usable = usable

    @property
    def may_step(self) -> bool:
        """Whether the engine has work that is not frozen, and whole weights: a step to run."""
        return self._scheduler.has_work and not self._scheduler.frozen and self._usable()

    def freeze(self, frozen: bool, keep_keys: bool = False) -> None:
        """Let the engine plan no more steps, or plan again; `settle` ends those that run.

        keep_keys: an update of the weights meanwhile leaves running requests their old keys.
        """
        self._scheduler.frozen, self._keep_keys = frozen, frozen and keep_keys

    def request_ids(self) -> list[str]:
        """Ids of the requests that run or wait, in the order of their admission."""
        policy = self._scheduler.policy
        live = {(s.key[0], s.request_id) for s in (*policy.running, *policy.waiting)}
        return [request_id for _, request_id in sorted(live)]

    def end(self, request_id: str) -> list[TokenOutput]:
        """End a request whose reader is still there: the last output of each of its choices."""
        return self._scheduler.abort(request_id)

    def recompute(self, other_weights: bool = False) -> None:
        """Have every running request prefilled again from its ids so far (`Scheduler.recompute`).

        Raises IntegrityError while a step is pending: `settle` first.
        """
        keep_keys = other_weights and self._keep_keys
        self._scheduler.recompute(self._identity(), other_weights, keep_keys)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, except for pages that a request holds."""
        self._scheduler.forget_prefixes()
