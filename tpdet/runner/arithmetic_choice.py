"""Which arithmetic a rank computes by: the operator's choice, and rank 0's plans within it."""

import hashlib
import json
import logging

import torch

from tpdet.comm.exchange.all_reduce import AllReduceExchange
from tpdet.comm.exchange.fold import RankExchange
from tpdet.comm.world.world import World
from tpdet.config import APPROXIMATE, EngineConfig
from tpdet.control.plan import StepPlan
from tpdet.errors import IntegrityError
from tpdet.kernels.order import Contract
from tpdet.layers.arithmetic import Arithmetic, StockArithmetic, StrictArithmetic
from tpdet.layers.partition import Partition

_log = logging.getLogger("tpdet.engine")


class ArithmeticChoice:
    """Strict, unless the operator asked for approximate, or for a change to it when too slow.

    The change is for good: strict answers need a new start.
    """

    def __init__(self, config: EngineConfig, world: World, contract: str) -> None:
        """contract: the strict contract id."""
        self.approximate = config.approximate
        self._permitted = config.may_be_approximate
        self._world = world
        self._contracts = contract, approximate_contract(contract, world.size)

    def contract(self, approximate: bool | None = None) -> str:
        """The contract id in use, or that of either arithmetic."""
        return self._contracts[self.approximate if approximate is None else approximate]

    def make(self, exchange: RankExchange) -> Arithmetic:
        """The arithmetic in use; `exchange` is the strict one."""
        if not self.approximate:
            return StrictArithmetic(exchange)
        return StockArithmetic(AllReduceExchange(self._world, exchange))

    def follow(self, plan: StepPlan) -> bool:
        """Whether a plan begins approximate arithmetic. Raises IntegrityError if it may not."""
        if plan.approximate == self.approximate:
            return False
        if self.approximate or not self._permitted:
            wanted = APPROXIMATE if plan.approximate else "strict"
            raise IntegrityError(
                f"step {plan.step} is planned for {wanted} arithmetic, which rank "
                f"{self._world.rank} may not change to"
            )
        self.approximate = True
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


def strict_contract(config: EngineConfig, partition: Partition, device: str) -> str:
    """The contract id of the deterministic arithmetic, on a "cpu" or "cuda"."""
    return Contract(
        device,
        partition.config.dtype,
        partition.leaves,
        config.fold_order,
        row_layers=config.row_layers,
    ).identifier


def approximate_contract(contract: str, ranks: int) -> str:
    """`approximate-` and 64 hex digits: what may change the bits beside a strict contract.

    The number of ranks and the library are among it. It names answers, it promises no bit.
    """
    body = {"beside": contract, "ranks": ranks, "torch": torch.__version__}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return f"{APPROXIMATE}-{digest}"
