"""The planner's formulas for the seconds of one kernel, which are also fitted to figures."""

from collections.abc import Iterable, Sequence

from tpdet.checkpoint.model_config.expert_load import fullest_rank
from tpdet.kernels.cuda.cost.roofline import roofline
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.layers.products import LayerProduct
from tpdet.tools.plan.constants import (
    DecodeAttentionCost,
    PrefillAttentionCost,
    ProductCost,
    SamplingCost,
)


def product_work(kind: str, rows: int, n: int, k: int, roots: int) -> tuple[float, float, float]:
    """(bytes of the bf16 weight, operations, bytes of inputs and outputs) of a rank's product.

    The output is bf16 (`column`; of gated kinds, n / 2 values), fp32 (`head`) or `roots` fp32 sums
    (`row`).
    """
    out = {"column": 2 * n, "gated": n, "geglu": n, "head": 4 * n, "row": 4 * n * roots}[kind]
    return 2.0 * n * k, 2.0 * rows * n * k, float(rows * (2 * k + out))


def experts_work(
    experts: Sequence[LayerProduct], total: int, rows: int
) -> tuple[float, float, float]:
    """(bytes of the touched bf16 weights, operations, bytes of rows) of a layer's experts.

    experts: both products, as a rank holds them, of `total` experts: those of the fullest rank are
    read, and its rows are an even share.
    """
    held, chosen = experts[0].experts, experts[0].chosen
    touched = fullest_rank(total, chosen, rows, total // held)
    mine = rows * chosen * held / total
    weights = sum(each.n * each.k for each in experts)
    moved = sum(each.n + each.k for each in experts)
    return 2.0 * touched * weights, 2.0 * mine * weights, 2.0 * mine * moved


def product_seconds(cost: ProductCost, work: tuple[float, float, float]) -> float:
    """Seconds of a product, or a layer's experts: launch, smooth roofline, and activations."""
    weight, flops, activations = work
    reading, computing = weight / cost.bytes, flops / cost.flops
    rest = activations / cost.activations
    return float(roofline(cost.launch, computing, reading, rest, cost.sharpness))


def decode_attention_work(
    batch: int, context: int, key_heads: int, head_dim: int
) -> tuple[float, float, float]:
    """(bytes of keys and values, heads of all sequences, splits of one) in one layer, in bf16."""
    heads = float(batch * key_heads)
    return heads * context * head_dim * 4, heads, float(-(-context // PAGE_TOKENS))


def decode_attention_seconds(cost: DecodeAttentionCost, work: tuple[float, float, float]) -> float:
    """Seconds of one layer's attention in a decode step."""
    cached, heads, splits = work
    return cost.launch + cached / cost.bytes + heads * cost.head + splits * cost.split


def prefill_attention_seconds(cost: PrefillAttentionCost, flops: float) -> float:
    """Seconds of one layer's attention in a prefill step of `flops` operations on visible keys."""
    return cost.launch + flops / cost.flops


def sampling_seconds(cost: SamplingCost, ranks: int, rows: int, columns: int) -> float:
    """Seconds of greedy sampling of `rows` rows, from `columns` fp32 logits of a rank."""
    return cost.launch + (cost.ranks if ranks > 1 else 0.0) + rows * columns * 4 / cost.bytes


def layer_bytes(rows: int, products: Iterable[LayerProduct]) -> float:
    """Bytes that the kernels between one layer's products move, in bf16.

    Each reads a product's outputs and writes what the product says; exchanges are counted apart.
    """
    return float(rows * 2 * sum(each.n + each.written for each in products if each.written))
