"""Whether a rank's memory has room for a model's weights, and for how many KV pages beside them."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from tpdet.cache.kv import page_bytes, stored_dtype
from tpdet.cache.routes import route_bytes
from tpdet.cache.state_table import StateRoom
from tpdet.checkpoint.model_config.quantisation import Quantisation
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import GpuMemory, free_gpu_bytes, gpu_memory
from tpdet.config import EngineConfig
from tpdet.errors import ResourceError
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.layers.partition import Partition, state_shape
from tpdet.models.footprint import weight_bytes

_CACHE_SHARE = 0.25  # of the memory that is free after loading, for the KV cache on the CPU
SNAPSHOT_SHARE = 0.25
"""Snapshots of states get this share of the memory that running sequences' states leave."""
SNAPSHOTS_EACH = 4
"""Useful snapshots for each running sequence: two of its prompt and two that it decoded."""


class Least(NamedTuple):
    """Bytes that a rank takes of its GPU at least: its weights, and the smallest KV cache.

    slot: what the cache has of each sequence that may run, whatever its length: its states.
    """

    weights: int
    cache: int
    slot: int = 0

    @property
    def bytes(self) -> int:
        """All that it takes."""
        return self.weights + self.cache


class CacheSize(NamedTuple):
    """Pages of the KV cache, and slots for states; None for a model without linear attention."""

    pages: int
    states: StateRoom | None


_sizes = msgspec.msgpack.Decoder(tuple[GpuMemory, Least])
_fitting = msgspec.msgpack.Decoder(tuple[CacheSize, str])


def least_bytes(config: EngineConfig, partition: Partition) -> Least:
    """What a rank takes, beside all that its steps do.

    The cache is a page; where `kv_pages` says how many, these and the one where pad rows write. And
    states of linear attention, of as many sequences as may run.
    """
    pages = 1 if config.kv_pages is None else 1 + config.kv_pages
    cache = pages * _page_bytes(partition) + running_state_bytes(config, partition)
    shape = state_shape(partition)
    slot = 0 if shape is None else shape.slot_bytes(getattr(torch, partition.config.dtype))
    return Least(weight_bytes(partition, packed_form(config)), cache, slot)


def packed_form(config: EngineConfig) -> Quantisation | None:
    """The one form in which weights stay packed; None for numbers, and for several forms."""
    if config.weights != "packed":
        return None
    directory = resolve_model(config.model, config.revision)
    stored = read_stored_form(directory).quantisation
    return stored.forms[0] if stored is not None and len(stored.forms) == 1 else None


def check_room(config: EngineConfig, partition: Partition, device: torch.device) -> None:
    """Refuse weights that a GPU has no room for, together with those of ranks that share it.

    Collective. Raises ResourceError, the same one on every rank.
    """
    if device.type != "cuda":
        return
    own = msgspec.msgpack.encode((gpu_memory(), least_bytes(config, partition)))
    # The gather waits for the last rank, so all have looked before one of them loads.
    sizes = [_sizes.decode(data) for data in partition.world.gather_bytes(own)]
    for gpu in dict.fromkeys(memory.gpu for memory, _ in sizes):
        ranks = [least for memory, least in sizes if memory.gpu == gpu]
        seen = [memory for memory, _ in sizes if memory.gpu == gpu]
        freest = max(seen, key=lambda memory: memory.free)
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
    if _taken(ranks) <= usable:
        return None
    weights, cache, slot = max(ranks)
    several = len(ranks) > 1
    where = f" on each of {len(ranks)} ranks that share a GPU" if several else ""
    left = f"the GPU has {size_text(usable)}"
    if usable < memory.total:
        left += f" of {size_text(memory.total)} left"
    rule = ""
    if config.kv_pages is None:
        rule = f", at --gpu-memory-utilization {config.gpu_memory_utilization:g}"
    kept = f"the KV cache with states of {config.max_running} sequences" if slot else "the KV cache"
    return (
        f"weights of {config.model} in {dtype} take {size_text(weights)}{where}, {kept} at "
        f"least {size_text(cache)}, and {left} for {'all' if several else 'both'}{rule}"
    )


def _taken(ranks: Sequence[Least]) -> int:
    """Bytes that ranks of a GPU take together."""
    return sum(rank.bytes for rank in ranks)


def usable_bytes(config: EngineConfig, memory: GpuMemory) -> int:
    """How much of a GPU's free memory a start may take: any of it where `kv_pages` is set."""
    kept = 0.0 if config.kv_pages is not None else 1.0 - config.gpu_memory_utilization
    return max(0, memory.free - int(kept * memory.total))


def smaller_dtype(
    config: EngineConfig, dtype: str, ranks: Sequence[Least], memory: GpuMemory
) -> str:
    """The flag by which everything takes half as much, where that would do; else ""."""
    would_do = _taken(ranks) // 2 <= usable_bytes(config, memory)
    return "use --dtype bfloat16" if dtype == "float32" and would_do else ""


def _remedy(config: EngineConfig, dtype: str, ranks: Sequence[Least], memory: GpuMemory) -> str:
    """What makes room: the flags that would help here."""
    needed, of_sequence = _taken(ranks), sum(rank.slot for rank in ranks)
    weights = sum(each.weights for each in ranks)
    remedies = [smaller_dtype(config, dtype, ranks, memory)]
    if of_sequence:
        fitting = config.max_running + (usable_bytes(config, memory) - needed) // of_sequence
        remedies += [f"lower --max-num-seqs to {fitting}"] * (fitting > 0)
    if config.kv_pages is None and needed <= memory.free:
        remedies.append("raise --gpu-memory-utilization")
    if config.kv_pages is not None and weights < memory.free:
        remedies.append("lower --kv-pages")
    if config.draft_model is not None:
        remedies.append("leave --draft-model out")
    if memory.free < needed <= memory.total:
        remedies.append("end what else runs on the GPU")
    remedies.append("use more GPUs (--tp)" if len(ranks) == 1 else "give each rank a GPU")
    *others, last = filter(None, remedies)
    return f"{', '.join(others)}, or {last}" if others else last


def size_text(count: int) -> str:
    """Bytes in the largest of GiB and MiB that they fill."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def agreed_pages(
    config: EngineConfig, partition: Partition, context: int, device: torch.device, graphs: int = 0
) -> CacheSize:
    """The size of the KV cache: as large as the rank with the least room has it. Collective.

    Raises as `pages_that_fit` and `states_that_fit`, on every rank what the first one raises that
    has no room.
    """
    world = partition.world
    world.barrier()  # ranks that share memory look at it when all have loaded
    size, refusal = CacheSize(0, None), ""
    try:
        states = states_that_fit(config, partition, device, graphs)
        pages = config.kv_pages
        if pages is None:
            held = graphs + state_bytes(partition, states)
            pages = pages_that_fit(config, partition, context, device, held)
        size = CacheSize(pages, states)
    except ResourceError as error:
        refusal = str(error)
    everyone = world.gather_bytes(msgspec.msgpack.encode((size, refusal)))
    sizes, refusals = zip(*map(_fitting.decode, everyone), strict=True)
    if any(refusals):
        raise ResourceError(next(filter(None, refusals)))
    rooms = [size.states for size in sizes if size.states is not None]
    return CacheSize(min(size.pages for size in sizes), min(rooms) if rooms else None)


def state_bytes(partition: Partition, room: StateRoom | None) -> int:
    """Bytes of this rank's states of linear attention, with the slot where pad rows write."""
    shape = state_shape(partition)
    if shape is None or room is None:
        return 0
    dtype = getattr(torch, partition.config.dtype)
    snapshots = room.snapshots * shape.snapshot_bytes(dtype)
    return (room.running + 1) * shape.slot_bytes(dtype) + snapshots


def running_state_bytes(config: EngineConfig, partition: Partition) -> int:
    """Bytes of this rank's states of as many sequences as may run; 0 without linear attention."""
    return state_bytes(partition, StateRoom(config.max_running, 0))


def states_that_fit(
    config: EngineConfig, partition: Partition, device: torch.device, graphs: int = 0
) -> StateRoom | None:
    """Slots of states: of as many sequences as may run, and of the snapshots that fit beside them.

    None for a model without linear attention. Raises ResourceError where the former do not fit.
    """
    shape, running = state_shape(partition), config.max_running
    if shape is None:
        return None
    dtype = getattr(torch, partition.config.dtype)
    room = cache_bytes(config, partition, device) - graphs
    needed = running_state_bytes(config, partition)
    if needed > room:
        fitting = max(0, room // shape.slot_bytes(dtype) - 1)
        remedy = f"lower --max-num-seqs to {fitting}, or " if fitting else ""
        raise ResourceError(
            f"states of linear attention take {size_text(shape.slot_bytes(dtype))} a sequence, "
            f"{size_text(needed)} for the {running} that may run, and there are "
            f"{size_text(max(0, room))} for them: {remedy}use more ranks (--tp)"
        )
    if not config.enable_prefix_caching:
        return StateRoom(running, 0)
    pages = (config.kv_pages or 0) * _page_bytes(partition)
    spare, size = room - needed - pages, shape.snapshot_bytes(dtype)
    return StateRoom(running, snapshots_for(running, spare, size))


def snapshots_for(running: int, spare: int, size: int) -> int:
    """Snapshots of `size` bytes, of `spare` bytes that `running` sequences' states leave."""
    return min(SNAPSHOTS_EACH * running, max(0, int(SNAPSHOT_SHARE * spare)) // size)


def cache_bytes(config: EngineConfig, partition: Partition, device: torch.device) -> int:
    """Bytes that a rank may take for its KV cache; ranks of a CPU are taken to share its memory."""
    if device.type == "cuda":
        return free_gpu_bytes(config.gpu_memory_utilization)
    return int(_CACHE_SHARE * _available_memory()) // partition.world.size


def pages_that_fit(
    config: EngineConfig, partition: Partition, context: int, device: torch.device, graphs: int = 0
) -> int:
    """As many pages as all sequences could use, but no more than a share of free memory holds.

    context: positions a sequence may have; graphs: bytes that these, and states, will take. Raises
    ResourceError when a GPU has no room for one page.
    """
    size = _page_bytes(partition)
    if config.enable_return_routed_experts:
        size += route_bytes(partition.config)
    useful = config.max_running * -(-context // PAGE_TOKENS)
    fitting = max(0, cache_bytes(config, partition, device) - graphs) // size
    if device.type == "cuda":
        if fitting < 1:
            smaller = ", leave --draft-model out" if config.draft_model is not None else ""
            raise ResourceError(
                f"{config.model} leaves no GPU memory for a KV page of {size / 2**20:.1f} MiB at "
                f"--gpu-memory-utilization {config.gpu_memory_utilization}: raise it, lower "
                f"--max-num-batched-tokens{smaller}, or use more GPUs (--tp)"
            )
        return min(useful, fitting)
    return max(1, min(useful, fitting))


def _page_bytes(partition: Partition) -> int:
    """Bytes of a page of this rank's keys and values, of all layers."""
    model, keys = partition.config, len(partition.key_heads)
    stored = stored_dtype(partition.kv_cache_dtype, model.dtype)
    return page_bytes(model.attention_layers, keys, model.head_dim, stored)


def _available_memory() -> int:
    """Bytes of memory that can be taken without swapping."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, value = line.split(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
