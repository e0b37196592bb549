"""An estimate of a step's seconds from the model and the GPU: what its products read and compute.

A product takes a launch and the longer of reading its weights and computing its rows. The rates are
those of `hardware.py`; norms, rotations and stores are in the rate of products over many rows.
"""

from collections.abc import Sequence

import torch

from tpdet.checkpoint.model_config.expert_load import fullest_rank
from tpdet.control.step_seconds import StepSeconds
from tpdet.kernels.cuda.cost.roofline import smooth_maximum
from tpdet.kernels.cuda.hardware import Gpu
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.models.products import head_product, layer_products

_LAUNCH, _SHARPNESS = 4e-6, 4.0  # of a product; of the bend between reading and computing
_EXCHANGE = 6e-6  # an exchange of few rows: H200 and H100, TP 2 to 4
_EXCHANGED = 7.2e-12  # of a value, over what products hide: H200, TP 2 and 4, 8,192 rows
_DECODE_ATTENTION = 0.75  # of the rate at which memory is read: 0.66 to 0.84 on an H200


def step_seconds(partition: Partition, gpu: Gpu, rows: int) -> float:
    """About how long a step of `rows` tokens takes that reads one prompt from its start."""
    return estimate_steps(partition, gpu, [rows]).of(rows, 0, rows * rows / 2)


def estimate_steps(partition: Partition, gpu: Gpu, rows: Sequence[int]) -> StepSeconds:
    """The table of steps of so many rows each, ascending, by this rank's share of a model."""
    config, heads = partition.config, len(partition.query_heads)
    layers, size = config.attention_layers, config.head_dim
    key_bytes = 2 * len(partition.key_heads) * size * _itemsize(partition)
    return StepSeconds(
        rows=tuple(rows),
        seconds=tuple(_products(partition, gpu, count) for count in rows),
        key=layers * key_bytes / (_DECODE_ATTENTION * gpu.read_rate),
        pair=layers * 4 * heads * size / gpu.attention_rate,
    )


def _products(partition: Partition, gpu: Gpu, rows: int) -> float:
    """Seconds of all products, and of the exchanges between them; the head's for one block."""
    config = partition.config
    layer = sum(_product(partition, gpu, product, rows) for product in layer_products(partition))
    if partition.world.size > 1:
        layer += 2 * (_EXCHANGE + rows * config.hidden_size * _EXCHANGED)
    head = _product(partition, gpu, head_product(partition), min(rows, HEAD_ROWS))
    return config.num_layers * layer + head


def _product(partition: Partition, gpu: Gpu, product: LayerProduct, rows: int) -> float:
    """Seconds of a product; of experts, those that the fullest rank's rows touch are read."""
    read, computed = 1.0, float(rows)
    if product.experts:
        total, chosen = partition.config.experts, product.chosen
        read = fullest_rank(total, chosen, rows, total // product.experts)
        computed *= chosen * product.experts / total
    weight = product.n * product.k
    reading = read * weight * _itemsize(partition) / gpu.read_rate
    computing = 2 * computed * weight / gpu.product_rate
    return _LAUNCH + float(smooth_maximum(reading, computing, _SHARPNESS))


def _itemsize(partition: Partition) -> int:
    dtype: torch.dtype = getattr(torch, partition.config.dtype)
    return dtype.itemsize
