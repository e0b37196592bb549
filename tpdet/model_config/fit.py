"""Checks that flags fit a model: tensor-parallel size, leaves, context. Needs no torch."""

from tpdet.errors import UsageError
from tpdet.kernels.exact.rotary_frequencies import MAX_POSITION
from tpdet.kernels.order import DEFAULT_LEAVES, leaf_count
from tpdet.model_config.model import ModelConfig


def model_leaves(config: ModelConfig, limit: int | None) -> int:
    """The number of leaves of a model's row-parallel layers. Raises UsageError if there is none."""
    reduced = (config.num_heads * config.head_dim, config.intermediate_size)
    try:
        return leaf_count(config.num_heads, reduced, limit or DEFAULT_LEAVES)
    except ValueError as error:
        raise UsageError(f"this model cannot be cut into leaves: {error}") from error


def check_ranks(config: ModelConfig, ranks: int, limit: int | None) -> int:
    """The model's number of leaves. Raises UsageError naming the sizes that fit."""
    leaves = model_leaves(config, limit)
    fit = [n for n in range(1, leaves + 1) if leaves % n == 0 and _heads_fit(config, n)]
    if ranks not in fit:
        sizes = ", ".join(str(n) for n in fit)
        raise UsageError(
            f"tensor-parallel size {ranks} does not fit a model of {config.num_heads} query "
            f"heads, {config.num_kv_heads} key heads and {leaves} leaves: use one of {sizes}"
        )
    return leaves


def context_length(wanted: int | None, model: ModelConfig) -> int:
    """The context in tokens. Raises UsageError past the model's context or any rotary table."""
    length = model.max_position if wanted is None else wanted
    if length > model.max_position:
        raise UsageError(
            f"max_model_len {length} is over the model's context of {model.max_position}: lower it"
        )
    if length > MAX_POSITION:
        raise UsageError(
            f"a context of {length} is over the {MAX_POSITION} positions that rotary tables can "
            "have: set a lower max_model_len"
        )
    return length


def _heads_fit(config: ModelConfig, ranks: int) -> bool:
    return config.num_kv_heads % ranks == 0 or ranks % config.num_kv_heads == 0
