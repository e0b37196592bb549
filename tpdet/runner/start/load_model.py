"""The start of one rank, from a configuration to a `WarmedModel`: six steps, in this order."""

from functools import partial

import torch

from tpdet.checkpoint.weight_files import read_ahead
from tpdet.comm.arithmetic_environment import check_environment
from tpdet.comm.device import current_device, gpu_bytes, resolve_device
from tpdet.comm.exchange.fold import RankExchange
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.kernels.cuda.hardware import gpu_of
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.layers.arithmetic import make_arithmetic
from tpdet.layers.experts import open_columns_of_experts
from tpdet.layers.partition import Partition
from tpdet.layers.row_layers import row_rule
from tpdet.runner.start.compile_ahead import CompilingAhead, open_kernel_cache
from tpdet.runner.start.contracts import name_contracts, partition_of
from tpdet.runner.start.kernel_checks import (
    admit_linear_forms,
    admit_products,
    agree_to_start,
    check_kernels,
    compare_answers,
    product_limits,
    try_packed,
    tune_command,
)
from tpdet.runner.start.loaded_model import LoadedModel, WarmedModel
from tpdet.runner.start.loading import Loader, Loading, read_model
from tpdet.runner.start.memory import agreed_pages, check_room
from tpdet.runner.start.start_times import LOADING, TRYING, StartTimes
from tpdet.runner.start.step_tokens import agreed_step_tokens, choose_step_tokens
from tpdet.runner.start.warming import room_for_samples, warm_engine
from tpdet.runner.step.shared_rows import open_sharing

LOAD_TIMEOUT = 3600.0
"""Seconds that the ranks may be apart while they read weights."""

_SHARE_OF_TIMEOUT = 0.8


def load_model(config: EngineConfig, world: World, times: StartTimes) -> WarmedModel:
    """Load this rank's share, and run it once. Collective; every refusal of a start is raised here.

    Flags, the checkpoint, too small a GPU, kernels that break the contract, ranks that differ.
    """
    kind = resolve_device(config.device)
    check_environment(kind)
    device, on_gpu = current_device(kind), kind == "cuda"
    enabled, precompiled = config.compile_ahead and on_gpu, config.kernel_cache is not None
    ahead = CompilingAhead(world, times, LOAD_TIMEOUT, enabled, precompiled)
    # 1. What is loaded, and how it is cut.
    directory, model, positions = read_model(config, kind)
    if on_gpu and config.load_format != "dummy" and world.local_rank == 0:
        read_ahead(directory)  # once on a host, while kernels are compiled
    partition = partition_of(config, model, world)
    check_room(config, partition, device)
    contracts = name_contracts(config, partition, kind)
    open_kernel_cache(config, contracts.strict, world.size, device)
    chosen = choose_step_tokens(config, partition, gpu_of(device), gpu_bytes(device))
    step_tokens = agreed_step_tokens(chosen, world)
    rows = max(step_tokens.most, config.max_num_seqs)
    # 2. The kernels of this machine keep the contract, and all ranks agree on what they do.
    limits = product_limits(rows, HEAD_ROWS) if on_gpu and not config.approximate else None
    check_kernels(partition, kind)
    agree_to_start(config, partition, contracts, kind)
    architecture = compare_answers(partition, device, limits, ahead)
    times.mark("checks")
    times.doing = LOADING
    # 3. The exchange, and the arithmetic that uses it.
    partition, strict_exchange = _open_arithmetic(config, partition, rows, device)
    # 4. The weights: on a GPU they are read while kernels are compiled.
    loader = Loader(config, model, world, device)
    with loader.begin(directory, partition, positions, ahead.enabled) as loading:
        sharing = open_sharing(config, strict_exchange, partition, HEAD_ROWS)
        times.mark("load")
        # 5. The shape table's kernels give the contract's bits.
        times.doing = TRYING
        if limits is not None:
            _admit(config, loading, partition, limits, device, ahead)
            times.mark("admission")
        loaded = LoadedModel(
            config=config,
            partition=partition,
            device=device,
            architecture=architecture,
            max_model_len=positions,
            contracts=contracts,
            decoder=loading.decoder,
            loader=loader,
            strict_exchange=strict_exchange,
            sharing=sharing,
            sampled=room_for_samples(config, device),
            step_tokens=step_tokens,
            times=times,
            ahead=ahead,
        )
        # 6. Every size of step, once, and the KV pages that the rest of the memory has room for.
        warmed = _warm(loaded, loading)
    _wait_as_steps_do(loaded)
    return warmed


def _admit(
    config: EngineConfig,
    loading: Loading,
    partition: Partition,
    limits: dict[str, int],
    device: torch.device,
    ahead: CompilingAhead,
) -> None:
    """Try the kernels of products and of linear layers, most compiled beforehand. Collective."""
    packing, tuning = loading.packing, tune_command(config, partition.world.size)
    if packing.enabled:
        tried = partial(try_packed, packing, partition, limits["column"], device)
        ahead.compile(tried, "load")
    admit_linear_forms(partition, device)
    admit_products(partition, device, limits, tuning, loading.wait, packing)


def _open_arithmetic(
    config: EngineConfig, partition: Partition, rows: int, device: torch.device
) -> tuple[Partition, RankExchange]:
    """The partition by the arithmetic, and the strict one's exchange; steps of up to `rows`.

    Collective.
    """
    world = partition.world
    world.set_timeout(max(LOAD_TIMEOUT, config.step_timeout))
    dtype = getattr(torch, partition.config.dtype)
    exchange = row_rule(partition).open_exchange(config.transport, partition, rows, dtype, device)
    arithmetic = make_arithmetic(config.approximate, world, exchange)
    return open_columns_of_experts(partition.by(arithmetic), rows), exchange


def _warm(loaded: LoadedModel, loading: Loading) -> WarmedModel:
    """Have the weights, run every size of step on a GPU, and count the pages. Collective."""
    graph_bytes, on_gpu = 0, loaded.device.type == "cuda"
    if on_gpu:
        graph_bytes = warm_engine(loaded, loading.finish)
    else:
        loading.finish()
    loaded.times.mark("warm-up" if on_gpu else "load")
    config, context = loaded.config, loaded.max_model_len
    size = agreed_pages(config, loaded.partition, context, loaded.device, graph_bytes)
    return WarmedModel(loaded, loading.digest, *size)


def _wait_as_steps_do(loaded: LoadedModel) -> None:
    """A rank that waits in a kernel gives up before the host that waits for the kernel does."""
    timeout = loaded.config.step_timeout
    loaded.world.set_timeout(timeout)
    loaded.decoder.exchange.carrier.set_timeout(_SHARE_OF_TIMEOUT * timeout)
