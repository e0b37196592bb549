"""Bytes that a rank's share of a model takes: its weights, and each row of a step.

The planner predicts memory by it, and a start chooses how many tokens a step may have.
"""

import torch

from tpdet.checkpoint.model_config.quantisation import Quantisation
from tpdet.kernels.inputs.ordered import SCRATCH_BYTES
from tpdet.kernels.inputs.ordering import WHOLE_GROUP
from tpdet.kernels.order import CONVOLUTION_TAPS
from tpdet.layers.partition import Partition, state_shape
from tpdet.models.products import head_product, layer_products, norm_values, one_of_each_kind


def packed_value_bytes(form: Quantisation) -> float:
    """Bytes of a value on a GPU, with its shares of a scale of 16 bits (e8m0: 8) and a zero point.

    Eight rows have a scale of a block; one of a whole row is repeated for each group.
    """
    scale = 1.0 if form.kind == "mxfp4" else 2.0 / (8 if form.kind == "fp8 block" else 1)
    return form.bits / 8 + (scale + form.zero_points) / (form.group or WHOLE_GROUP)


def weight_bytes(partition: Partition, packed: Quantisation | None = None) -> int:
    """Shares of the products, the vocabulary's two tables (or the tied one), the norms.

    And of linear layers the convolution, and two fp32 numbers a value head.
    packed: the form in which products lie, but routers; None for numbers.
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
    shape = state_shape(partition)
    if shape is not None:
        values += shape.layers * shape.channels * CONVOLUTION_TAPS
        exact += shape.layers * shape.value_heads * 2
    factors = 4 if config.norm == "rms_plus_one" else size  # 1 + w is never rounded
    saved = 0
    if packed is not None:
        whole = sum(p.n * p.k * (p.experts or 1) for p in of_layers if p.kind != "head")
        saved = int(whole * (size - packed_value_bytes(packed)))
    return values * size + norm_values(config) * factors + 4 * exact - saved


def scratch_bytes(partition: Partition) -> int:
    """The numbers of the largest product that steps of many rows unpack, once a layer."""
    layers = one_of_each_kind(partition.config)
    every = (product for index in layers for product in layer_products(partition, index))
    sizes = [p.n * p.k * _itemsize(partition) for p in every if not p.experts]
    return max((size for size in sizes if size <= SCRATCH_BYTES), default=0)


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
