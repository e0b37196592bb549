"""The start of one rank: from a configuration to a `LoadedModel`, in six steps."""

from dataclasses import replace
from pathlib import Path

import torch

from tpdet.checkpoint.read_ahead import read_ahead
from tpdet.comm.arithmetic_environment import check_environment
from tpdet.comm.device import current_device, gpu_bytes, resolve_device
from tpdet.comm.exchange.fold import RankExchange
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.kernels.cpu import threads
from tpdet.kernels.cuda.hardware import gpu_of
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.layers.arithmetic import make_arithmetic
from tpdet.layers.experts import open_columns_of_experts
from tpdet.layers.partition import Partition
from tpdet.layers.row_layers import row_rule
from tpdet.runner.start.compile_ahead import CompilingAhead, open_kernel_cache
from tpdet.runner.start.contracts import Contracts, name_contracts, partition_of
from tpdet.runner.start.kernel_checks import (
    admit_products,
    agree_to_start,
    check_kernels,
    compare_answers,
    product_limits,
    threads_per_rank,
    tune_command,
)
from tpdet.runner.start.loaded_model import LoadedModel
from tpdet.runner.start.loading import Loader, Loading, read_model
from tpdet.runner.start.memory import agreed_pages
from tpdet.runner.start.rehearsal import room_for_samples
from tpdet.runner.start.room import check_room
from tpdet.runner.start.start_times import LOADING, TRYING, StartTimes
from tpdet.runner.start.step_tokens import agreed_step_tokens, choose_step_tokens
from tpdet.runner.start.warming import warm_engine
from tpdet.runner.step.shared_rows import open_sharing

LOAD_TIMEOUT = 3600.0
"""Seconds that the ranks may be apart while they read weights."""

_SHARE_OF_TIMEOUT = 0.8
_LOCAL_FACTS = ("model", "tokenizer", "chat_template", "kernel_cache", "draft_model")
"""Paths may differ from host to host."""


def load_model(config: EngineConfig, world: World, times: StartTimes) -> LoadedModel:
    """Load this rank's share. Collective; every refusal of a start is raised here.

    Flags, the checkpoint, too small a GPU, kernels that break the contract, ranks that differ.
    """
    device = _device(config.device)
    on_gpu = device.type == "cuda"
    ahead = _compiling_ahead(config, world, times, on_gpu)
    # 1. What is loaded, and how it is cut.
    directory, model, positions = read_model(config, device.type)
    _read_ahead(config, world, directory, on_gpu)
    partition = partition_of(config, model, world)
    check_room(config, partition, world, device)
    contracts = name_contracts(config, partition, device.type)
    open_kernel_cache(config, contracts.strict, world.size, device)
    chosen = choose_step_tokens(config, partition, gpu_of(device), gpu_bytes(device))
    step_tokens = agreed_step_tokens(chosen, world)
    rows = max(step_tokens.most, config.max_num_seqs)
    # 2. The kernels of this machine keep the contract, and all ranks agree on what they do.
    limits = product_limits(rows, HEAD_ROWS) if on_gpu and not config.approximate else None
    named = _check(config, partition, contracts, device, limits, ahead)
    times.mark("checks")
    # 3. The exchange, and the arithmetic that uses it.
    times.doing = LOADING
    partition, strict_exchange = _open_arithmetic(config, partition, rows, device)
    # 4. The weights: on a GPU they are read while kernels are compiled.
    loader = Loader(config, model, world, device)
    with loader.begin(directory, partition, positions, ahead.enabled) as loading:
        sharing = open_sharing(config, strict_exchange, partition, HEAD_ROWS)
        times.mark("load")
        # 5. The shape table's kernels give the contract's bits.
        times.doing = TRYING
        if limits is not None:
            command = tune_command(config, world.size)
            admit_products(partition, device, limits, command, loading.wait)
            times.mark("admission")
        loaded = LoadedModel(
            config=config,
            world=world,
            device=device,
            architecture=named,
            model_config=model,
            max_model_len=positions,
            contracts=contracts,
            decoder=loading.decoder,
            digest="",
            loader=loader,
            strict_exchange=strict_exchange,
            sharing=sharing,
            key_heads=len(partition.key_heads),
            sampled=room_for_samples(config, device),
            step_tokens=step_tokens,
            num_pages=0,
            times=times,
            ahead=ahead,
        )
        # 6. Every size of step, once, and the KV pages that the rest of the memory has room for.
        pages = _warm_and_count_pages(loaded, loading)
    _wait_as_steps_do(loaded)
    return replace(loaded, digest=loading.digest, num_pages=pages)


def _device(wanted: str) -> torch.device:
    kind = resolve_device(wanted)
    check_environment(kind)
    return current_device(kind)


def _compiling_ahead(
    config: EngineConfig, world: World, times: StartTimes, on_gpu: bool
) -> CompilingAhead:
    enabled, precompiled = config.compile_ahead and on_gpu, config.kernel_cache is not None
    return CompilingAhead(world, times, LOAD_TIMEOUT, enabled, precompiled)


def _read_ahead(config: EngineConfig, world: World, directory: Path, on_gpu: bool) -> None:
    """Have the weights read while kernels are compiled, once on a host."""
    if on_gpu and config.load_format != "dummy" and world.local_rank == 0:
        read_ahead(directory)


def _wait_as_steps_do(loaded: LoadedModel) -> None:
    """A rank that waits in a kernel gives up before the host that waits for the kernel does."""
    timeout = loaded.config.step_timeout
    loaded.world.set_timeout(timeout)
    loaded.decoder.exchange.carrier.set_timeout(_SHARE_OF_TIMEOUT * timeout)


def _open_arithmetic(
    config: EngineConfig, partition: Partition, rows: int, device: torch.device
) -> tuple[Partition, RankExchange]:
    """The partition by the arithmetic, and the strict one's exchange; steps of up to `rows`.

    Collective.
    """
    world = partition.world
    world.set_timeout(max(LOAD_TIMEOUT, config.step_timeout))
    dtype = getattr(torch, partition.config.dtype)
    of = config.transport, partition, rows, dtype, device
    exchange = row_rule(partition).open_exchange(*of)
    arithmetic = make_arithmetic(config.approximate, world, exchange)
    return open_columns_of_experts(partition.by(arithmetic), rows), exchange


def _warm_and_count_pages(loaded: LoadedModel, loading: Loading) -> int:
    """Have the weights, warm up on a GPU; the number of KV pages, alike on every rank."""
    held = 0
    if loaded.device.type == "cuda":
        held = warm_engine(loaded, loading.finish)
        loaded.times.mark("warm-up")
    else:
        loading.finish()
        loaded.times.mark("load")
    return agreed_pages(
        loaded.config,
        loaded.model_config,
        loaded.key_heads,
        loaded.max_model_len,
        loaded.world,
        loaded.device,
        held,
    )


def _check(
    config: EngineConfig,
    partition: Partition,
    contracts: Contracts,
    device: torch.device,
    limits: dict[str, int] | None,
    ahead: CompilingAhead,
) -> str:
    """Golden vectors, settings and known answers; as `compare_answers`."""
    world, model = partition.world, partition.config
    if device.type == "cpu":
        threads.configure(threads_per_rank(world.local_size))
    check_kernels(model, partition, device.type)
    settings = config.model_dump(exclude={*_LOCAL_FACTS})
    settings["contract"] = contracts.of(config.approximate)
    agree_to_start(world, settings, model, device.type)
    return compare_answers(world, partition, device, limits, ahead)
