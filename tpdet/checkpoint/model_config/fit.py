"""Checks that flags fit a model: tensor-parallel size, leaves, context. Needs no torch."""

from dataclasses import dataclass
from math import gcd

from tpdet.checkpoint.model_config.expert_load import fullest_rank
from tpdet.checkpoint.model_config.model import HEAD_SIZES, LinearAttention, Mixture, ModelConfig
from tpdet.errors import UsageError
from tpdet.kernels.exact.rotary_frequencies import MAX_POSITION
from tpdet.kernels.order import DEFAULT_LEAVES, K_GROUP, Leaves, cut_leaves

EIGHTS = 8
"""Rows of gates, then of ups, that experts hold in turn, as in `kernels/inputs/gated.py`."""
_EXPERT_BYTES = 4.5e12  # a second: what an H200 reads
_NO_LEAVES = Leaves((0,))
_GATHER_SECONDS = 16e-6  # of one row of every choice, and of finding their places again


@dataclass(frozen=True)
class ModelLeaves:
    """The leaves of a model's row products, alike at every tensor-parallel size.

    attention: of the attention output, whole query heads; down: of the down product, blocks of 16;
    outputs: the same cut of the hidden size, by which row layers without a fold are cut. dense:
    whether a layer has that down product; shared: of a shared expert's; linear: of the output of
    linear attention, whole key heads with the value heads that each serves. The last two are
    without inputs if there is none.
    """

    count: int
    attention: Leaves
    down: Leaves
    outputs: Leaves
    dense: bool = True
    shared: Leaves = _NO_LEAVES
    linear: Leaves = _NO_LEAVES

    @property
    def row_products(self) -> tuple[Leaves, ...]:
        """The cuts of the row products whose ranks add to one another."""
        linear = (self.linear,) if self.linear.edges[-1] else ()
        return (self.attention, *linear, *((self.down,) if self.dense else ()))

    @property
    def edges(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What a contract names where leaves are not equal: the edges of each row product."""
        down = (("down", self.down.edges),) if self.dense or self.down.equal else ()
        shared = (("shared", self.shared.edges),) if self.shared.edges[-1] else ()
        return ("attention", self.attention.edges), *down, *shared  # equal ones were always named


def model_leaves(config: ModelConfig, leaves: int | None) -> ModelLeaves:
    """Cut a model into `leaves` leaves, DEFAULT_LEAVES if None, fewer if its parts need it.

    Raises UsageError where leaves that were asked for do not divide experts or linear key heads.
    """
    count, linear = leaves or DEFAULT_LEAVES, config.linear
    if config.mixture is not None:
        count = _dividing(config.mixture.routing.experts, "experts", count, leaves is not None)
    if linear is not None:
        of = "key heads of linear layers"
        count = _dividing(linear.key_heads, of, count, leaves is not None)
    shared = 0 if config.mixture is None else config.mixture.shared_width
    return ModelLeaves(
        count,
        cut_leaves(config.num_heads, config.head_dim, count),
        _in_blocks(config.intermediate_size, count),
        _in_blocks(config.hidden_size, count),
        config.has_dense_layers,
        _NO_LEAVES if not shared else _in_blocks(shared, count),
        _NO_LEAVES if linear is None else linear_leaves(linear, linear.value_size, count),
    )


def linear_leaves(linear: LinearAttention, size: int, count: int) -> Leaves:
    """Leaves of whole key heads, of a dimension with `size` elements for each value head."""
    return cut_leaves(linear.key_heads, linear.values_of_a_key * size, count)


def _in_blocks(width: int, leaves: int) -> Leaves:
    """Leaves of whole blocks of 16, of fewer where 16 does not divide the width."""
    block = gcd(width, K_GROUP)
    return cut_leaves(width // block, block, leaves)


def check_widths(config: ModelConfig, device: str) -> None:
    """Raises UsageError on a GPU for widths that its kernels do not have; a CPU has them all."""
    widths = {"hidden size": config.hidden_size, "intermediate size": config.intermediate_size}
    if config.mixture is not None:
        widths["experts' width"] = config.mixture.width
    if device == "cpu":
        return
    if config.head_dim not in HEAD_SIZES:
        raise UsageError(
            f"heads of {config.head_dim}: a GPU has kernels for {', '.join(map(str, HEAD_SIZES))}, "
            "run it with --device cpu"
        )
    for name, width in widths.items():
        if width % K_GROUP:
            raise UsageError(
                f"{name} {width}: a GPU's kernels need a multiple of {K_GROUP}, "
                "run it with --device cpu"
            )


def check_ranks(config: ModelConfig, ranks: int, leaves: int | None) -> ModelLeaves:
    """The model's leaves. Raises UsageError naming the sizes that fit.

    A size fits that divides the leaves and gives every rank a query head and a block of each layer.
    """
    found = model_leaves(config, leaves)
    fit = [n for n in range(1, found.count + 1) if found.count % n == 0 and _all_busy(found, n)]
    if ranks not in fit:
        sizes, linear = ", ".join(str(n) for n in fit), config.linear
        of_linear = f", {linear.key_heads} key heads of linear layers" if linear else ""
        raise UsageError(
            f"tensor-parallel size {ranks} does not fit a model of {config.num_heads} query "
            f"heads{of_linear} and {found.count} leaves: use one of {sizes}"
            + (", or more --leaves" if _more_leaves_fit(config, ranks, found.count) else "")
        )
    return found


def _dividing(parts: int, name: str, count: int, asked: bool) -> int:
    """The leaves, each of which has equally many of a model's `parts`: as many as divide them.

    Raises UsageError where so many were asked for and do not divide them.
    """
    while parts % count:
        if asked:
            fit = [str(n) for n in (1, 2, 4, 8, 16, 32, 64, 128) if parts % n == 0]
            raise UsageError(
                f"leaves {count} do not divide {parts} {name}: use one of {', '.join(fit)}"
            )
        count //= 2
    return count


def check_modes(config: ModelConfig, row_layers: str, approximate: bool) -> None:
    """Raises UsageError for settings that experts or linear layers do not have."""
    if config.linear is not None and approximate:
        raise UsageError(
            f"{config.family} has no approximate mode, as it has linear attention: leave "
            "--approximate and --on-slowdown out"
        )
    if config.mixture is None:
        return
    if row_layers != "fold":
        raise UsageError(
            f"row_layers {row_layers}: {config.family} adds the lanes of its experts over ranks, "
            "use --row-layers fold"
        )
    if approximate:
        raise UsageError(
            f"{config.family} has no approximate mode, as it has experts: leave --approximate and "
            "--on-slowdown out"
        )


def place_experts(config: ModelConfig, ranks: int, placement: str) -> str:
    """Where experts lie, "lanes" or "columns", for a wish that may be "auto".

    Raises UsageError for columns of a model that has no experts or cannot be cut so.
    """
    mixture = config.mixture
    if mixture is None and placement != "auto":
        raise UsageError(f"experts {placement}: {config.family} has no experts, leave it out")
    if mixture is None or ranks == 1 or placement == "lanes":
        return "lanes"
    wide = {"an expert's width": mixture.width, "the hidden size": config.hidden_size}
    for name, size in wide.items():
        if size % (EIGHTS * ranks):
            if placement == "auto":
                return "lanes"
            raise UsageError(
                f"experts columns: {ranks} ranks do not cut {name} {size} into whole blocks "
                f"of {EIGHTS}: use --experts lanes"
            )
    return placement if placement != "auto" else _faster_placement(config, mixture, ranks)


def _faster_placement(config: ModelConfig, mixture: Mixture, ranks: int) -> str:
    """Columns if the fullest rank's experts of one row cost more than the gather that they take.

    Of a step of many rows all experts are read, and both placements read alike.
    """
    routing, itemsize = mixture.routing, int(config.dtype[-2:]) // 8
    expert = 3 * mixture.width * config.hidden_size * itemsize
    fullest = fullest_rank(routing.experts, routing.chosen, 1, ranks)
    extra = (fullest - routing.chosen / ranks) * expert / _EXPERT_BYTES
    return "columns" if extra > _GATHER_SECONDS else "lanes"


def context_length(requested: int | None, model: ModelConfig) -> int:
    """The context in tokens. Raises UsageError past the model's context or any rotary table."""
    length = model.max_position if requested is None else requested
    if length > model.max_position:
        raise UsageError(
            f"max_model_len {length} is over the model's context of {model.max_position}"
            f"{_longer(model)}"
        )
    if length > MAX_POSITION:
        raise UsageError(
            f"a context of {length} is over the {MAX_POSITION} positions that rotary tables can "
            "have: set a lower max_model_len"
        )
    return length


def _longer(model: ModelConfig) -> str:
    """What its rotary scaling has to do with a model's context, and the remedy."""
    spec, original = model.rotary, model.rotary.original_max_position
    said = f", with {spec.kind} scaling of factor {spec.factor:g} counted in: lower it"
    if spec.kind == "default":
        return (
            ": lower it, or if the model's card says how to go on, write its rope_scaling into "
            "config.json"
        )
    if spec.kind == "longrope" or model.max_position <= original < original * spec.factor:
        return f", where {spec.kind} scaling would change its arithmetic: lower it"
    higher = "factor" if spec.kind == "yarn" else "max_position_embeddings"
    return f"{said}, or state a higher {higher} in config.json"


def _all_busy(leaves: ModelLeaves, ranks: int) -> bool:
    """Whether every rank gets inputs of both row products, and outputs."""
    share = leaves.count // ranks
    cuts = *leaves.row_products, leaves.outputs
    return all(
        cut.inputs(range(rank * share, (rank + 1) * share)) for cut in cuts for rank in range(ranks)
    )


def _more_leaves_fit(config: ModelConfig, ranks: int, leaves: int) -> bool:
    """Whether as many leaves as ranks, more than there are, would divide the model."""
    power_of_two = ranks & (ranks - 1) == 0
    key_heads = 0 if config.linear is None else config.linear.key_heads
    divided = config.experts % ranks == 0 and key_heads % ranks == 0
    return ranks > leaves and power_of_two and divided
