"""The kernels that a start on a GPU would ask for, found on a machine without one.

    with on_gpu(H200):
        asked = kernels_of(config, model, context, rank, size)   # digest -> what is to be compiled

The rank's own start is rehearsed (`runner/start/warming.py`) with one layer of each kind, whose
weights nobody reads, over tensors of the CPU that the kernels take for a GPU's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.packing import Packing
from tpdet.checkpoint.resolve import resolve_model
from tpdet.checkpoint.source import UnreadWeights, open_weights
from tpdet.comm.world.rehearsal_world import RehearsalWorld
from tpdet.config import EngineConfig
from tpdet.kernels.cuda.compile.plain_form import TargetDriver
from tpdet.kernels.cuda.compile.recording import Recorded, recording
from tpdet.kernels.cuda.gemm import admission
from tpdet.kernels.cuda.hardware import MEMORY, Gpu, gpu_of, pretending
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.layers.arithmetic import make_arithmetic
from tpdet.layers.experts import open_columns_of_experts
from tpdet.layers.row_layers import row_rule
from tpdet.models.decoder import Decoder
from tpdet.models.products import table_products
from tpdet.models.warm_up import pages_needed
from tpdet.runner.start.contracts import name_contracts, partition_of
from tpdet.runner.start.kernel_checks import product_limits, try_packed
from tpdet.runner.start.loaded_model import allocate_cache
from tpdet.runner.start.step_tokens import choose_step_tokens
from tpdet.runner.start.warming import (
    FEWEST_STATES,
    rehearse_checks,
    rehearse_steps,
    room_for_samples,
)
from tpdet.runner.step.shared_rows import open_sharing
from tpdet.tools.compile.weightless import Weightless

_CPU = torch.device("cpu")


@contextmanager
def on_gpu(gpu: Gpu) -> Iterator[None]:
    """Kernels are chosen and compiled for this GPU, and none can be launched."""
    major, minor = gpu.capability
    there: Any = TargetDriver(GPUTarget("cuda", 10 * major + minor, 32))
    before = driver._active  # Triton's own way back makes a driver, for which there is no GPU
    driver.set_active(there)
    try:
        with pretending(gpu):
            yield
    finally:
        driver._active = before


def kernels_of(
    config: EngineConfig, model: ModelConfig, context: int, rank: int, size: int
) -> Recorded:
    """What one rank of `size` asks for, by digest; inside `on_gpu`.

    context: tokens of a sequence, at most. Raises UsageError for a size that does not fit.
    """
    partition = partition_of(config, one_layer_of_each_kind(model), RehearsalWorld(rank, size))
    dtype = getattr(torch, model.dtype)
    most = _most_tokens(config, model, size)
    rows = max(most, config.max_num_seqs)
    limits = product_limits(rows, HEAD_ROWS)
    with Weightless(), recording() as asked:
        rehearse_checks(partition, _CPU, limits)
        exchange = row_rule(partition).open_exchange(config.transport, partition, rows, dtype, _CPU)
        partition = partition.by(make_arithmetic(False, partition.world, exchange))
        partition = open_columns_of_experts(partition, rows)
        partition.arithmetic.admitted = admission.foreseen(
            table_products(partition), _CPU, limits, dtype
        )
        packing = _packing(config, model)
        decoder = Decoder(UnreadWeights(dtype, _CPU, packing), partition, context)
        if packing is not None:
            try_packed(packing, partition, limits["column"], _CPU)
        count = pages_needed(most, context)
        rehearse_steps(
            decoder,
            allocate_cache(partition, count, FEWEST_STATES, _CPU),
            room_for_samples(config, _CPU),
            open_sharing(config, exchange, partition, HEAD_ROWS),
            config,
            most,
            context,
            graphs=not config.enforce_eager and config.transport != "mpi",
        )
    return asked


def _packing(config: EngineConfig, model: ModelConfig) -> Packing | None:
    """How weights stay packed, as their files say it; None for dense ones."""
    if config.weights != "packed":
        return None
    directory = resolve_model(config.model, config.revision)
    form = config.load_format, config.seed
    packing = open_weights(directory, model, *form, False, _CPU, 1, True).packing
    packing.on_gpu = True
    return packing


def _most_tokens(config: EngineConfig, model: ModelConfig, size: int) -> int:
    """Tokens of a step that ranks of this size agree on."""
    gpu = gpu_of(_CPU)
    whole = (partition_of(config, model, RehearsalWorld(rank, size)) for rank in range(size))
    return min(choose_step_tokens(config, part, gpu, MEMORY[gpu]).most for part in whole)


def contract_of(config: EngineConfig, model: ModelConfig, size: int) -> str:
    """The contract id of a start at one size on a GPU."""
    return name_contracts(
        config, partition_of(config, model, RehearsalWorld(0, size)), "cuda"
    ).strict


def one_layer_of_each_kind(model: ModelConfig) -> ModelConfig:
    """The same model with the last layer of each kind: all windows, with experts or linear or not.

    So its last layer is of the last one's kind.
    """
    last = {model.kind_of(index): index for index in range(model.num_layers)}
    kept, mixture, linear = sorted(last.values()), model.mixture, model.linear
    if mixture is not None:
        dense = tuple(i for i, index in enumerate(kept) if not model.has_experts(index))
        mixture = replace(mixture, dense_layers=dense)
    if linear is not None:
        linear = replace(linear, layers=tuple(map(model.is_linear, kept)))
    windows = tuple(model.windows[index] for index in kept)
    return replace(model, num_layers=len(kept), windows=windows, mixture=mixture, linear=linear)
