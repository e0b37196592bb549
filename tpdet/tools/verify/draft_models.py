"""Draft models for the probes: the model itself, which is right, and another one, which is not."""

import gc

import msgspec
import torch

from tpdet.checkpoint.model_config import load_model_config
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import free_gpu_bytes, resolve_device
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.speculative.draft_model.start import held_bytes
from tpdet.tools.verify.drafted import OTHER
from tpdet.tools.verify.spec import VerifySpec

_BESIDE = 4 << 30  # bytes of a GPU that a draft model takes beside weights and pages


def with_draft_model(kind: str, spec: VerifySpec, config: EngineConfig) -> EngineConfig:
    """`config` with a draft model of a kind. Another model than itself is the one that was given.

    If none was, it is one of the same shape with random weights of another seed.
    """
    given = spec.draft_model if kind == OTHER else None
    changes: dict[str, object] = {"drafts": "auto", "skip_tokenizer_init": given is None}
    changes["draft_model"] = str(resolve_model(given or spec.model))
    if kind == OTHER and given is None:
        changes |= {"load_format": "dummy", "seed": config.seed + 1}
    return config.model_copy(update=changes)


def why_no_room(config: EngineConfig, world: World) -> str | None:
    """Why rank 0 has no room for a draft model; None if it has. Collective.

    It is whole on one rank, where the model itself may have needed several.
    """
    reason: str | None = None
    if world.rank == 0 and resolve_device(config.device) == "cuda":
        assert config.draft_model is not None and config.kv_pages is not None
        model = load_model_config(resolve_model(config.draft_model), config.dtype)
        needed = held_bytes(model, config.kv_pages) + _BESIDE
        gc.collect()  # the draft model before it, which its engine holds
        torch.cuda.empty_cache()
        free = free_gpu_bytes(config.gpu_memory_utilization)
        if needed > free:
            reason = (
                f"a draft model of {needed / 2**30:.1f} GiB: rank 0's GPU has {free / 2**30:.1f} "
                "GiB left; name a smaller one with --draft-model"
            )
    return msgspec.json.decode(world.broadcast_bytes(msgspec.json.encode(reason)), type=str | None)
