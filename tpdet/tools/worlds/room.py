"""Whether the GPUs of this host have room for a model's ranks, asked before any of them starts."""

from collections.abc import Iterable, Sequence

import torch

from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import GpuMemory
from tpdet.comm.world.rehearsal_world import RehearsalWorld
from tpdet.config import EngineConfig
from tpdet.errors import ResourceError
from tpdet.runner.start.contracts import partition_of
from tpdet.runner.start.memory import Least, least_bytes, why_no_room


def gpus_here() -> list[GpuMemory]:
    """The GPUs that this process sees, each as if nobody used it; no context is made on them."""
    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [GpuMemory(str(gpu.uuid), gpu.total_memory, gpu.total_memory) for gpu in every]


def smallest(gpus: Sequence[GpuMemory]) -> GpuMemory:
    """The GPU with the least memory."""
    return min(gpus, key=lambda gpu: gpu.total)


def check_sizes(config: EngineConfig, tps: Iterable[int], gpus: Sequence[GpuMemory]) -> None:
    """Refuse (ResourceError) a size whose ranks' weights the GPUs cannot hold."""
    model = load_model_config(resolve_model(config.model, config.revision), config.dtype)
    for tp in tps:
        for ranks in by_gpu(config, model, tp, len(gpus)):
            refusal = why_no_room(config, model.dtype, ranks, smallest(gpus))
            if refusal is not None:
                raise ResourceError(f"TP {tp}: {refusal}")


def by_gpu(config: EngineConfig, model: ModelConfig, tp: int, gpus: int) -> list[list[Least]]:
    """What the ranks of a world take at least, GPU by GPU: neighbours share one (`open_world`)."""
    together = -(-tp // min(tp, gpus))
    ranks = [RehearsalWorld(rank, tp) for rank in range(tp)]
    taken = [least_bytes(config, partition_of(config, model, world)) for world in ranks]
    return [taken[first : first + together] for first in range(0, tp, together)]
