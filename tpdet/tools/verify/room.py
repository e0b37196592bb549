"""Whether the GPUs of this host have room for worlds of ranks, asked before any of them starts."""

from collections.abc import Iterable, Sequence

from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import GpuMemory
from tpdet.config import EngineConfig
from tpdet.errors import ResourceError
from tpdet.runner.start.memory import describe_shortage, smaller_dtype
from tpdet.speculative.draft_model.start import held_bytes
from tpdet.tools.verify.cases import kv_pages
from tpdet.tools.verify.spec import VerifySpec, mode_settings
from tpdet.tools.worlds.room import by_gpu, smallest
from tpdet.tools.worlds.ways import LaunchWay

_PROCESS_BYTES = 3 << 30
"""A rank takes about so much for the driver's context, kernels, slots, tensors of a step."""


def check_worlds(
    spec: VerifySpec, worlds: Iterable[tuple[int, LaunchWay]], gpus: Sequence[GpuMemory]
) -> None:
    """The same for the worlds of a verification, as far as this host's GPUs are theirs."""
    here = dict.fromkeys(tp for tp, way in worlds if way.launcher != "slurm")
    for config, model in _settings(spec):
        for tp in here:
            for ranks in by_gpu(config, model, tp, len(gpus)):
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
        for ranks in by_gpu(config, model, tp, gpus):
            own = sum(map(sum, ranks)) + len(ranks) * _PROCESS_BYTES
            needed = max(needed, own + other)
    return needed


def _settings(spec: VerifySpec) -> list[tuple[EngineConfig, ModelConfig]]:
    """The settings of each dtype and rule of row layers, with the model as they load it."""
    settings = []
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
            settings.append((config, model))
    return settings
