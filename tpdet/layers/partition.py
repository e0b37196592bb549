"""How one model is cut over ranks: leaves first, then whole leaves to ranks."""

from dataclasses import dataclass, replace

from tpdet.cache.states import StateShape
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.fit import ModelLeaves, check_ranks, place_experts
from tpdet.checkpoint.pieces import Pieces
from tpdet.comm.exchange.expert_columns import ExpertColumns, GatheredExperts
from tpdet.comm.exchange.fold import GatherExchange, RankExchange
from tpdet.comm.world.world import World
from tpdet.kernels.order import FoldPlan, Leaves, fold_plan
from tpdet.layers.arithmetic import Arithmetic

_VOCABULARY_GROUP = 16


@dataclass(frozen=True)
class Partition:
    """A rank's share of a model: its leaves, `mine` of them here, and the fold's plan.

    `row_layers` names how its row layers are cut: see tpdet.layers.row_layers. `experts` gathers
    the columns of experts that are cut over their outputs; None where experts lie whole on ranks.
    `kv_cache_dtype`: of the pages of its key heads, as the setting.
    """

    config: ModelConfig
    world: World
    fold_order: str
    cut: ModelLeaves
    arithmetic: Arithmetic
    row_layers: str = "fold"
    experts: ExpertColumns | None = None
    kv_cache_dtype: str = "auto"

    def by(self, arithmetic: Arithmetic) -> "Partition":
        """The same cut computed by another arithmetic, made for this plan and world."""
        return replace(self, arithmetic=arithmetic)

    @property
    def exchange(self) -> RankExchange:
        """The arithmetic's exchange."""
        return self.arithmetic.exchange

    @property
    def plan(self) -> FoldPlan:
        """The fold of a product without empty leaves."""
        return fold_plan(self.fold_order, self.leaves, self.world.size)

    def plan_of(self, product: Leaves) -> FoldPlan:
        """The fold of a product: its empty leaves are in no sum."""
        return fold_plan(self.fold_order, self.leaves, self.world.size, product.empty)

    @property
    def leaves(self) -> int:
        """Leaves of the whole model."""
        return self.cut.count

    @property
    def mine(self) -> range:
        """Leaves of this rank."""
        share = self.leaves // self.world.size
        return range(self.world.rank * share, (self.world.rank + 1) * share)

    def by_leaf(self, cut: Leaves, dim: int) -> Pieces:
        """Cut a dimension by leaves; this rank's are read."""
        return Pieces(dim, cut.bounds, self.mine)

    def by_rank(self, cut: Leaves) -> tuple[int, ...]:
        """How much of a dimension that is cut by leaves every rank holds."""
        edges, share = cut.edges, self.leaves // self.world.size
        return tuple(edges[i + share] - edges[i] for i in range(0, self.leaves, share))

    @property
    def query_heads(self) -> range:
        """Query heads of this rank."""
        held, size = self.cut.attention.inputs(self.mine), self.config.head_dim
        return range(held.start // size, held.stop // size)

    @property
    def key_heads(self) -> range:
        """Key heads that this rank's query heads read; neighbours may hold the same one."""
        each, held = self._queries_of_a_key, self.query_heads
        return range(held.start // each, (held.stop - 1) // each + 1)

    @property
    def first_read_key_heads(self) -> int:
        """How many of `key_heads`, the last ones, no rank before this one holds too."""
        each, held = self._queries_of_a_key, self.query_heads
        return self.key_heads.stop - -(-held.start // each)

    @property
    def padded_heads(self) -> tuple[int, int]:
        """Query heads of zeros before and after this rank's: each key head has equally many then.

        None are needed for a single key head, and where key heads are not shared with neighbours.
        """
        each, held = self._queries_of_a_key, self.query_heads
        return (0, 0) if len(self.key_heads) == 1 else (held.start % each, -held.stop % each)

    @property
    def _queries_of_a_key(self) -> int:
        return self.config.num_heads // self.config.num_kv_heads

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


def state_shape(partition: Partition) -> StateShape | None:
    """A rank's share of the states of linear layers; None for a model without any."""
    linear = partition.config.linear
    if linear is None:
        return None
    keys = linear.key_heads // partition.world.size
    values = keys * linear.values_of_a_key
    return StateShape(sum(linear.layers), keys, values, linear.key_size, linear.value_size)


def make_partition(
    config: ModelConfig,
    world: World,
    fold_order: str,
    leaves: int | None,
    row_layers: str = "fold",
    experts: str = "auto",
    kv_cache_dtype: str = "auto",
) -> Partition:
    """Cut `config` over `world`. Raises UsageError naming the tensor-parallel sizes that fit."""
    cut = check_ranks(config, world.size, leaves)
    placed = place_experts(config, world.size, experts)
    plan = fold_plan(fold_order, cut.count, world.size)
    exchange = GatherExchange(plan, world)
    columns = GatheredExperts(exchange) if placed == "columns" else None
    arithmetic = Arithmetic(exchange)
    return Partition(
        config, world, fold_order, cut, arithmetic, row_layers, columns, kv_cache_dtype
    )
