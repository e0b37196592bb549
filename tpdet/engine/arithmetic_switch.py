"""The switch from strict to approximate arithmetic: one on each rank, which its engine owns.

The configuration says how an engine begins and whether it may change. Rank 0 decides when; its
plans say by which arithmetic a step is computed, and the other ranks follow them. The change is
for good: strict answers need a new start.
"""

import logging

from tpdet.comm.world.world import World
from tpdet.config import APPROXIMATE, EngineConfig
from tpdet.control.plan import StepPlan
from tpdet.errors import IntegrityError
from tpdet.runner import Contracts

_log = logging.getLogger("tpdet.engine")


class ArithmeticSwitch:
    """`approximate`: how steps are planned on rank 0, and computed on the others."""

    def __init__(self, config: EngineConfig, world: World, contracts: Contracts) -> None:
        self.approximate = self._computes_approximately = config.approximate
        self._permitted = config.may_be_approximate
        self._world = world
        self._contracts = contracts

    @property
    def contract(self) -> str:
        """The contract id of the arithmetic in use."""
        return self._contracts.of(self.approximate)

    def turn(self) -> None:
        """Plan for approximate arithmetic from now on (rank 0)."""
        self.approximate = True

    def follow(self, plan: StepPlan) -> bool:
        """Whether a plan changes to approximate arithmetic. Raises IntegrityError if it may not."""
        if plan.approximate == self._computes_approximately:
            return False
        if self._computes_approximately or not self._permitted:
            arithmetic = APPROXIMATE if plan.approximate else "strict"
            raise IntegrityError(
                f"step {plan.step} is planned for {arithmetic} arithmetic, which rank "
                f"{self._world.rank} may not change to"
            )
        self.approximate = self._computes_approximately = True
        return True

    def announce(self, fingerprint: str) -> None:
        """Say in rank 0's log, at start, if answers are approximate or may become so."""
        if self._world.rank > 0 or not self._permitted:
            return
        _log.warning(
            "%s: answers are not deterministic and carry system fingerprint %s",
            "approximate arithmetic, as asked"
            if self.approximate
            else "approximate arithmetic if strict steps get too slow, as asked; then",
            fingerprint,
        )
