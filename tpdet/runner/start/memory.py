"""The number of KV pages that a rank has room for."""

import os

import msgspec
import torch

from tpdet.cache.kv import page_bytes
from tpdet.cache.routes import route_bytes
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.comm.device import free_gpu_bytes
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.errors import ResourceError
from tpdet.kernels.order import PAGE_TOKENS

_CACHE_SHARE = 0.25  # of the memory that is free after loading, for the KV cache on the CPU
_fitting = msgspec.msgpack.Decoder(tuple[int, str])


def pages_that_fit(
    config: EngineConfig,
    model: ModelConfig,
    key_heads: int,
    context: int,
    ranks: int,
    device: torch.device,
    held: int = 0,
) -> int:
    """As many pages as all sequences could use, but no more than a share of free memory holds.

    key_heads: of this rank; context: positions a sequence may have; ranks: on this host's memory;
    held: bytes of a GPU that graphs will take.
    Raises ResourceError when a GPU has no room for one.
    """
    size = page_bytes(model.num_layers, key_heads, model.head_dim, getattr(torch, model.dtype))
    if config.enable_return_routed_experts:
        size += route_bytes(model)
    useful = config.max_running * -(-context // PAGE_TOKENS)
    if device.type == "cuda":
        fitting = max(0, free_gpu_bytes(config.gpu_memory_utilization) - held) // size
        if fitting < 1:
            smaller = ", leave --draft-model out" if config.draft_model is not None else ""
            raise ResourceError(
                f"{config.model} leaves no GPU memory for a KV page of {size / 2**20:.1f} MiB at "
                f"--gpu-memory-utilization {config.gpu_memory_utilization}: raise it, lower "
                f"--max-num-batched-tokens{smaller}, or use more GPUs (--tp)"
            )
        return min(useful, fitting)
    fitting = int(_CACHE_SHARE * _available_memory()) // (size * ranks)
    return max(1, min(useful, fitting))


def agreed_pages(
    config: EngineConfig,
    model: ModelConfig,
    key_heads: int,
    context: int,
    world: World,
    device: torch.device,
    held: int = 0,
) -> int:
    """Pages of the KV cache: as many as the rank with the least room has.

    Raises as `pages_that_fit`, on every rank what the first one raises that has no room.
    """
    world.barrier()  # ranks that share memory look at it when all have loaded
    pages, refusal = config.kv_pages, ""
    if pages is None:
        try:
            pages = pages_that_fit(config, model, key_heads, context, world.size, device, held)
        except ResourceError as error:
            pages, refusal = 0, str(error)
    said = world.gather_bytes(msgspec.msgpack.encode((pages, refusal)))
    everyone = [_fitting.decode(each) for each in said]
    for _, why in everyone:
        if why:
            raise ResourceError(why)
    return min(fitting for fitting, _ in everyone)


def _available_memory() -> int:
    """Bytes of memory that can be taken without swapping."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, value = line.split(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
