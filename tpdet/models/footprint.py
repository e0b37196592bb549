"""Bytes that a rank's share of a model takes: its weights, and each row of a step.

The planner predicts memory by it, and a start chooses how many tokens a step may have.
"""

import torch

from tpdet.layers.partition import Partition
from tpdet.models.products import (
    head_product,
    layer_products,
    norm_values,
    one_of_each_kind,
)

PACKED_BYTES = {"fp8 block": 1 + 2 / 1024, "packed int": 1 / 2 + 2 / 128, "mxfp4": 1 / 2 + 1 / 32}
"""Bytes of a value and its share of a scale on a GPU, by `Quantisation.kind`: int of 4 bits in
groups of 128, scales of 16 bits, of which a block has one for 8 rows."""


def weight_bytes(partition: Partition, packed: str | None = None) -> int:
    """Shares of the products, the vocabulary's two tables (or the tied one), the norms.

    packed: the kind of PACKED_BYTES in which products lie, but those of single experts; None for
    numbers.
    """
    config = partition.config
    head = head_product(partition)
    layers = (layer_products(partition, index) for index in range(config.num_layers))
    of_layers = [product for layer in layers for product in layer]
    held = sum(p.n * (p.k + p.biased) * (p.experts or 1) for p in of_layers)
    tables = 1 if config.tie_word_embeddings or config.head != "tokens" else 2
    values = held + tables * head.n * head.k
    size = _itemsize(partition)
    exact = 0 if config.mixture is None or not config.mixture.choice_bias else config.experts
    exact *= sum(map(config.has_experts, range(config.num_layers)))
    factors = 4 if config.norm == "rms_plus_one" else size  # 1 + w is never rounded
    saved = 0
    if packed is not None:
        whole = sum(p.n * p.k for p in of_layers if not p.experts)
        saved = int(whole * (size - PACKED_BYTES[packed]))
    return values * size + norm_values(config) * factors + 4 * exact - saved


def scratch_bytes(partition: Partition) -> int:
    """The numbers of the largest product that steps of many rows unpack."""
    products = (p for p in layer_products(partition) if not p.experts)
    return max(p.n * p.k for p in products) * _itemsize(partition)


def row_bytes(partition: Partition, slots: int) -> int:
    """The most that one row of a step has at a time: the stream, x, the widest block, its sums.

    Of the fp32 stream and of x, an exchange holds the old and the new; where row layers have
    biases, also the sum with the bias. slots: partial sums that a rank sends, each in fp32.
    """
    hidden, size = partition.config.hidden_size, _itemsize(partition)
    copies = 3 if partition.config.row_bias else 2
    layers = one_of_each_kind(partition.config)
    every = [product for index in layers for product in layer_products(partition, index)]
    columns = [p for p in every if p.kind == "column" or p.product.gated]
    wide = max((p.product.outputs + p.written) * (p.chosen or 1) for p in columns)
    return copies * hidden * (4 + size) + wide * size + 4 * slots * hidden


def _itemsize(partition: Partition) -> int:
    dtype: torch.dtype = getattr(torch, partition.config.dtype)
    return dtype.itemsize
