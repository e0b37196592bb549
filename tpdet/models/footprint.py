"""Bytes that a rank's share of a model takes: its weights, and each row of a step.

The planner predicts memory by it, and a start chooses how many tokens a step may have.
"""

import torch

from tpdet.layers.partition import Partition
from tpdet.models.products import head_product, layer_products, norm_values


def weight_bytes(partition: Partition) -> int:
    """Shares of the products, the vocabulary's two tables (or the tied one), the norms."""
    config = partition.config
    head = head_product(partition)
    layers = (layer_products(partition, index) for index in range(config.num_layers))
    held = sum(p.n * (p.k + p.biased) * (p.experts or 1) for layer in layers for p in layer)
    tables = 1 if config.tie_word_embeddings or config.head != "tokens" else 2
    values = held + tables * head.n * head.k
    size = _itemsize(partition)
    exact = 0 if config.mixture is None or not config.mixture.choice_bias else config.experts
    exact *= sum(map(config.has_experts, range(config.num_layers)))
    factors = 4 if config.norm == "rms_plus_one" else size  # 1 + w is never rounded
    return values * size + norm_values(config) * factors + 4 * exact


def row_bytes(partition: Partition, slots: int) -> int:
    """The most that one row of a step has at a time: the stream, x, the widest block, its sums.

    Of the fp32 stream and of x, an exchange holds the old and the new; where row layers have
    biases, also the sum with the bias. slots: partial sums that a rank sends, each in fp32.
    """
    hidden, size = partition.config.hidden_size, _itemsize(partition)
    copies = 3 if partition.config.row_bias else 2
    columns = [p for p in layer_products(partition) if p.kind == "column" or p.product.gated]
    wide = max((p.product.outputs + p.written) * (p.chosen or 1) for p in columns)
    return copies * hidden * (4 + size) + wide * size + 4 * slots * hidden


def _itemsize(partition: Partition) -> int:
    dtype: torch.dtype = getattr(torch, partition.config.dtype)
    return dtype.itemsize
