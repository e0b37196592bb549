"""What one kernel moves and computes: the work whose seconds its cost tells (`constants`)."""

from collections.abc import Iterable, Sequence

import torch

from tpdet.cache.states import StateShape
from tpdet.checkpoint.model_config.expert_load import fullest_rank
from tpdet.kernels.order import CHUNK_TOKENS, PAGE_TOKENS
from tpdet.layers.products import LayerProduct

_COLUMNS = 64  # of a state, which a program of the pass over chunks has


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
    of_rank, chosen = experts[0].experts, experts[0].chosen
    touched = fullest_rank(total, chosen, rows, total // of_rank)
    share = rows * chosen * of_rank / total
    weights = sum(product.n * product.k for product in experts)
    moved = sum(product.n + product.k for product in experts)
    return 2.0 * touched * weights, 2.0 * share * weights, 2.0 * share * moved


def decode_attention_work(
    batch: int, context: int, key_heads: int, head_dim: int
) -> tuple[float, float, float]:
    """(bytes of keys and values, heads of all sequences, splits of one) in one layer, in bf16."""
    heads = float(batch * key_heads)
    return heads * context * head_dim * 4, heads, float(-(-context // PAGE_TOKENS))


def linear_decode_work(shape: StateShape, batch: int) -> tuple[float, float, float]:
    """(bytes of states, bytes of prompts' rows, turns of chunks) of a row of each sequence, bf16.

    In one layer with linear attention, beside its products.
    """
    return batch * shape.read_bytes(torch.bfloat16), 0.0, 0.0


def linear_prefill_work(
    shape: StateShape, prompts: int, tokens: int, multiprocessors: int
) -> tuple[float, float, float]:
    """`linear_decode_work` of `prompts` with so many tokens each, from their first one on.

    A program passes over a sequence's chunks one after the other, for 64 columns of a head; each
    multiprocessor has one at a time.
    """
    values = shape.channels + shape.value_heads * shape.value_size
    chunks = -(-tokens // CHUNK_TOKENS)
    programs = prompts * shape.value_heads * -(-shape.value_size // _COLUMNS)
    turns = chunks * max(1.0, programs / multiprocessors)
    return 0.0, 2.0 * prompts * tokens * values, turns


def layer_bytes(rows: int, products: Iterable[LayerProduct]) -> float:
    """Bytes that the kernels between one layer's products move, in bf16.

    Each reads a product's outputs and writes what the product says; exchanges are counted apart.
    """
    return float(rows * 2 * sum(it.n + it.written for it in products if it.written))
