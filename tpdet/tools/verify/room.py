"""Whether the GPUs of this host have room for worlds of ranks, asked before any of them starts."""

from collections.abc import Iterable, Sequence

import torch

from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import GpuMemory
from tpdet.comm.world.rehearsal_world import RehearsalWorld
from tpdet.config import EngineConfig
from tpdet.errors import ResourceError
from tpdet.runner.start.contracts import partition_of
from tpdet.runner.start.memory import (
    Least,
    describe_shortage,
    least_bytes,
    smaller_dtype,
    why_no_room,
)
from tpdet.speculative.draft_model.start import held_bytes
from tpdet.tools.verify.cases import kv_pages
from tpdet.tools.worlds.spec import VerifySpec, mode_settings
from tpdet.tools.worlds.ways import Way

_PROCESS_BYTES = 3 << 30
"""Of a GPU, about, for each rank: the driver's context, kernels, slots, tensors of a step."""


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
        for ranks in _by_gpu(config, model, tp, len(gpus)):
            refusal = why_no_room(config, model.dtype, ranks, smallest(gpus))
            if refusal is not None:
                raise ResourceError(f"TP {tp}: {refusal}")


def check_worlds(
    spec: VerifySpec, worlds: Iterable[tuple[int, Way]], gpus: Sequence[GpuMemory]
) -> None:
    """The same for the worlds of a verification, as far as this host's GPUs are theirs."""
    here = dict.fromkeys(tp for tp, way in worlds if way.launcher != "slurm")
    for config, model in _settings(spec):
        for tp in here:
            for ranks in _by_gpu(config, model, tp, len(gpus)):
                shortage = describe_shortage(config, model.dtype, ranks, smallest(gpus))
                if shortage is not None:
                    smaller = smaller_dtype(config, model.dtype, ranks, smallest(gpus))
                    others = f"{smaller}{smaller and ', '}leave {tp} out of --tp"
                    raise ResourceError(f"TP {tp}: {shortage}: {others}, or use more GPUs")


def needed_bytes(spec: VerifySpec, tp: int, part: str, gpus: int) -> int:
    """About what a world of `tp` ranks takes of each of its GPUs while it runs a part."""
    needed = 0
    for config, model in _settings(spec):
        drafting = part == "steps" and "draft_model" in spec.relations
        other = held_bytes(model, kv_pages(spec)) if drafting else 0
        for ranks in _by_gpu(config, model, tp, gpus):
            own = sum(map(sum, ranks)) + len(ranks) * _PROCESS_BYTES
            needed = max(needed, own + other)
    return needed


def _settings(spec: VerifySpec) -> list[tuple[EngineConfig, ModelConfig]]:
    """The settings of each dtype and rule of row layers, with the model as they load it."""
    found = []
    for dtype in spec.dtypes:
        model = load_model_config(resolve_model(spec.model), dtype)
        for mode in dict.fromkeys((spec.modes[0], spec.modes[-1])):
            config = EngineConfig.from_values(
                model=spec.model,
                dtype=dtype,
                leaves=spec.leaves,
                kv_pages=kv_pages(spec),
                **mode_settings(mode),
            )
            found.append((config, model))
    return found


def _by_gpu(config: EngineConfig, model: ModelConfig, tp: int, gpus: int) -> list[list[Least]]:
    """What the ranks of a world take at least, GPU by GPU: neighbours share one (`open_world`)."""
    together = -(-tp // min(tp, gpus))
    ranks = [RehearsalWorld(rank, tp) for rank in range(tp)]
    taken = [least_bytes(config, partition_of(config, model, world)) for world in ranks]
    return [taken[first : first + together] for first in range(0, tp, together)]
