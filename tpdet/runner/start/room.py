"""Whether GPUs have room for a model's weights, asked before anything is loaded."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from tpdet.cache.kv import page_bytes
from tpdet.comm.device import GpuMemory, gpu_memory
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.errors import ResourceError
from tpdet.layers.partition import Partition
from tpdet.models.footprint import weight_bytes


class Least(NamedTuple):
    """Bytes that a rank takes of its GPU at least: its weights, and the smallest KV cache."""

    weights: int
    cache: int


_decoder = msgspec.msgpack.Decoder(tuple[GpuMemory, Least])


def least_bytes(config: EngineConfig, partition: Partition) -> Least:
    """What a rank takes, beside all that its steps do.

    The cache is a page; where `kv_pages` says how many, these and the one where pad rows write.
    """
    model, keys = partition.config, len(partition.key_heads)
    page = page_bytes(model.num_layers, keys, model.head_dim, getattr(torch, model.dtype))
    pages = 1 if config.kv_pages is None else 1 + config.kv_pages
    return Least(weight_bytes(partition), pages * page)


def check_room(
    config: EngineConfig, partition: Partition, world: World, device: torch.device
) -> None:
    """Refuse weights that a GPU has no room for, together with those of ranks that share it.

    Collective. Raises ResourceError, the same one on every rank.
    """
    if device.type != "cuda":
        return
    mine = gpu_memory(), least_bytes(config, partition)
    # The gather waits for the last rank, so all have looked before one of them loads.
    said = [_decoder.decode(each) for each in world.gather_bytes(msgspec.msgpack.encode(mine))]
    for gpu in dict.fromkeys(memory.gpu for memory, _ in said):
        found = [memory for memory, _ in said if memory.gpu == gpu]
        ranks = [least for memory, least in said if memory.gpu == gpu]
        freest = max(found, key=lambda memory: memory.free)
        refusal = why_no_room(config, partition.config.dtype, ranks, freest)
        if refusal is not None:
            raise ResourceError(refusal)


def why_no_room(
    config: EngineConfig, dtype: str, ranks: Sequence[Least], memory: GpuMemory
) -> str | None:
    """Why a GPU has no room for what `ranks` take of it, with the remedy; None if it has."""
    shortage = describe_shortage(config, dtype, ranks, memory)
    return shortage and f"{shortage}: {_remedy(config, dtype, ranks, memory)}"


def describe_shortage(
    config: EngineConfig, dtype: str, ranks: Sequence[Least], memory: GpuMemory
) -> str | None:
    """What `ranks` take of a GPU and what it has left, where that is less; else None."""
    usable = usable_bytes(config, memory)
    if sum(map(sum, ranks)) <= usable:
        return None
    weights, cache = max(ranks)
    several = len(ranks) > 1
    where = f" on each of {len(ranks)} ranks that share a GPU" if several else ""
    left = f"the GPU has {size_text(usable)}"
    if usable < memory.total:
        left += f" of {size_text(memory.total)} left"
    rule = ""
    if config.kv_pages is None:
        rule = f", at --gpu-memory-utilization {config.gpu_memory_utilization:g}"
    return (
        f"weights of {config.model} in {dtype} take {size_text(weights)}{where}, the KV cache at "
        f"least {size_text(cache)}, and {left} for {'all' if several else 'both'}{rule}"
    )


def usable_bytes(config: EngineConfig, memory: GpuMemory) -> int:
    """How much of a GPU's free memory a start may take: any of it where `kv_pages` is set."""
    kept = 0.0 if config.kv_pages is not None else 1.0 - config.gpu_memory_utilization
    return max(0, memory.free - int(kept * memory.total))


def smaller_dtype(
    config: EngineConfig, dtype: str, ranks: Sequence[Least], memory: GpuMemory
) -> str:
    """The flag by which everything takes half as much, where that would do; else ""."""
    would_do = sum(map(sum, ranks)) // 2 <= usable_bytes(config, memory)
    return "use --dtype bfloat16" if dtype == "float32" and would_do else ""


def _remedy(config: EngineConfig, dtype: str, ranks: Sequence[Least], memory: GpuMemory) -> str:
    """What makes room: the flags that would help here."""
    needed = sum(map(sum, ranks))
    weights = sum(each.weights for each in ranks)
    found = [smaller_dtype(config, dtype, ranks, memory)]
    if config.kv_pages is None and needed <= memory.free:
        found.append("raise --gpu-memory-utilization")
    if config.kv_pages is not None and weights < memory.free:
        found.append("lower --kv-pages")
    if config.draft_model is not None:
        found.append("leave --draft-model out")
    if memory.free < needed <= memory.total:
        found.append("end what else runs on the GPU")
    found.append("use more GPUs (--tp)" if len(ranks) == 1 else "give each rank a GPU")
    *others, last = filter(None, found)
    return f"{', '.join(others)}, or {last}" if others else last


def size_text(count: int) -> str:
    """Bytes in the largest of GiB and MiB that they fill."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
