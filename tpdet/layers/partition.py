"""How one model is cut over ranks: leaves first, then whole leaves to ranks."""

from dataclasses import dataclass, replace

from tpdet.comm.exchange.fold import GatherExchange, RankExchange
from tpdet.comm.world.world import World
from tpdet.kernels.order import FoldPlan, fold_plan
from tpdet.layers.arithmetic import Arithmetic, StrictArithmetic
from tpdet.model_config import ModelConfig
from tpdet.model_config.fit import check_ranks
from tpdet.weights.pieces import Pieces

_VOCABULARY_GROUP = 16


@dataclass(frozen=True)
class Partition:
    """A rank's share of a model: `leaves` in all, `mine` of them here, and the fold's plan.

    `row_layers` names how its row layers are cut: see tpdet.layers.row_layers.
    """

    config: ModelConfig
    world: World
    plan: FoldPlan
    arithmetic: Arithmetic
    row_layers: str = "fold"

    def by(self, arithmetic: Arithmetic) -> "Partition":
        """The same cut computed by another arithmetic, made for this plan and world."""
        return replace(self, arithmetic=arithmetic)

    @property
    def exchange(self) -> RankExchange:
        """The arithmetic's exchange."""
        return self.arithmetic.exchange

    @property
    def leaves(self) -> int:
        """Leaves of the whole model."""
        return self.plan.leaves

    @property
    def mine(self) -> range:
        """Leaves of this rank."""
        share = self.leaves // self.world.size
        return range(self.world.rank * share, (self.world.rank + 1) * share)

    def by_leaf(self, extent: int, dim: int) -> Pieces:
        """Cut `extent` into equal leaves along `dim`; this rank's leaves are read."""
        width = extent // self.leaves
        bounds = tuple((i * width, (i + 1) * width) for i in range(self.leaves))
        return Pieces(dim, bounds, self.mine)

    @property
    def query_heads(self) -> int:
        """Query heads of this rank."""
        return self.config.num_heads // self.world.size

    @property
    def key_heads(self) -> range:
        """Key heads this rank reads; neighbours share one when there are fewer than ranks."""
        per_key_head = self.config.num_heads // self.config.num_kv_heads
        first = self.world.rank * self.query_heads
        return range(first // per_key_head, (first + self.query_heads - 1) // per_key_head + 1)

    def by_key_head(self) -> Pieces:
        """Cut key or value rows by head."""
        width = self.config.head_dim
        bounds = tuple((i * width, (i + 1) * width) for i in range(self.config.num_kv_heads))
        return Pieces(0, bounds, self.key_heads)

    @property
    def vocabulary_share(self) -> int:
        """Rows of the vocabulary a leaf holds, the last ones padding: a multiple of 16."""
        share = -(-self.config.vocab_size // self.leaves)
        return -(-share // _VOCABULARY_GROUP) * _VOCABULARY_GROUP

    def by_vocabulary(self) -> Pieces:
        """Cut the vocabulary into `leaves` ranges of equal size, the last ones cut short."""
        size, share = self.config.vocab_size, self.vocabulary_share
        bounds = tuple(
            (min(i * share, size), min((i + 1) * share, size)) for i in range(self.leaves)
        )
        return Pieces(0, bounds, self.mine)


def make_partition(
    config: ModelConfig,
    world: World,
    fold_order: str,
    limit: int | None,
    row_layers: str = "fold",
) -> Partition:
    """Cut `config` over `world`. Raises UsageError naming the tensor-parallel sizes that fit."""
    leaves = check_ranks(config, world.size, limit)
    plan = fold_plan(fold_order, leaves, world.size)
    arithmetic = StrictArithmetic(GatherExchange(plan, world))
    return Partition(config, world, plan, arithmetic, row_layers)
