"""What this machine's kernels must show before a model is loaded."""

import logging
import os

import torch

from tpdet.errors import DisagreementError, TpdetError
from tpdet.kernels.cpu.admission import check_bit_classes
from tpdet.kernels.golden import golden_digest
from tpdet.kernels.order import GOLDEN_SHA256
from tpdet.layers.partition import Partition
from tpdet.layers.row_layers import row_rule
from tpdet.model_config import ModelConfig

_log = logging.getLogger("tpdet.engine")


def check_kernels(config: ModelConfig, partition: Partition, device: str) -> None:
    """Golden vectors and bit classes of this machine. Raises DisagreementError or TpdetError.

    Raises UsageError for row layers that cannot be cut as asked.
    """
    found = golden_digest()
    if found != GOLDEN_SHA256:
        raise DisagreementError(
            f"golden vectors have digest {found[:16]}, the contract's is {GOLDEN_SHA256[:16]}: "
            "this build of torch breaks the arithmetic contract"
        )
    hidden, extents = config.hidden_size, row_rule(partition).extents
    inputs = config.num_heads * config.head_dim, config.intermediate_size
    reduced = [hidden, *(extents(partition, (hidden, width))[2] for width in inputs)]
    if device != "cpu":
        return
    try:
        check_bit_classes(reduced, config.head_dim)
    except RuntimeError as error:
        raise TpdetError(str(error)) from error


def admit_products(partition: Partition, device: torch.device, limits: dict[str, int]) -> None:
    """Try what the GPU's shape table names for this rank's products, and use it from now on.

    limits: the most rows of each kind of product. Raises TpdetError for an entry that fails.
    """
    from tpdet.kernels.cuda import admission  # these need Triton
    from tpdet.layers.product_shapes import rank_products

    model = partition.config
    try:
        found = admission.check(
            rank_products(partition), device, limits, dtype=getattr(torch, model.dtype)
        )
    except (RuntimeError, ValueError) as error:
        raise TpdetError(f"shape table: {error}") from error
    _log.info("%s", found)


def threads_per_rank() -> int:
    """Worker threads: OMP_NUM_THREADS if set, else this rank's share of the processors."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdecimal() and int(named) > 0:
        return int(named)
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return max(1, len(os.sched_getaffinity(0)) // ranks)
