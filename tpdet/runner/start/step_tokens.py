"""How many tokens a step has, unless a setting says so: it follows the device and the load.

On a GPU a step has room for 8,192 tokens (on Hopper GPUs of 132 multiprocessors 8,448 at TP 1 and
7,168 at TP 2: `whole_tokens`), if that takes little of the KV cache. In a step in which sequences
decode, readers wait for the prompts beside them. So it has as few as read prompts at nearly full
speed (`scheduler/prompt_budget.py`), and never more than take `STEP_SECONDS`. The times are
computed from the model and the GPU (`step_estimate.py`), and no clock is read: the same requests
make the same steps after every start. No bit of an answer depends on any of it.
"""

from dataclasses import dataclass, replace

import msgspec

from tpdet.comm.exchange.peer import OVERLAP_PROGRAMS
from tpdet.comm.exchange.slot_layout import by_ranks
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.control.step_seconds import StepSeconds
from tpdet.kernels.cuda.hardware import NO_GPU, Gpu
from tpdet.layers.partition import Partition
from tpdet.models.footprint import row_bytes, weight_bytes
from tpdet.runner.graphs.step_graphs import step_rows
from tpdet.runner.start.step_estimate import estimate_steps

MOST_TOKENS = 8192
LEAST_TOKENS = 2048
"""From so many on, more tokens a step gain a few per cent only; on a CPU nothing."""

STEP_SECONDS = 0.16
"""What a step with prompts takes at most, about, while sequences decode."""

CACHE_SHARE = 0.02
"""The part of the KV cache's memory for the tokens of a step over `LEAST_TOKENS`."""

_TILE_ROWS = 128  # of the tiles of long products on Hopper
_TIMES_ROW_BYTES = 2  # a step's tensors lie in the allocator's memory, and in that of the graphs
_FINE = 512


@dataclass(frozen=True)
class StepTokens:
    """Tokens of a step, at most. most: of any; mixed: of one in which sequences decode.

    cache_share: of the KV cache's memory that `most` takes over `LEAST_TOKENS`; 0.0 if none.
    seconds: of steps, by which those with decoding rows are cut finer than `mixed`; None: they are
    not.
    """

    most: int
    mixed: int
    cache_share: float = 0.0
    seconds: StepSeconds | None = None

    def of_engine(self, asked: int | None, streams: bool) -> "StepTokens":
        """The limits of one engine; asked: its `max_num_batched_tokens`, perhaps not the start's.

        streams: readers wait for each token; else steps beside decoding sequences are as large.
        """
        if asked is not None:
            return StepTokens(asked, asked)
        return self if streams else replace(self, mixed=self.most, seconds=None)

    def __str__(self) -> str:
        text = f"up to {self.most:,} tokens a step"
        if self.mixed != self.most:
            text += f", {self.mixed:,} while sequences decode"
        if self.seconds is not None:
            text += ", then as few as read prompts at nearly full speed"
        if self.cache_share:
            text += f"; over {LEAST_TOKENS:,} they take {self.cache_share:.1%} of the KV cache"
        return text


def choose_step_tokens(
    config: EngineConfig, partition: Partition, gpu: Gpu, memory: int
) -> StepTokens:
    """What `max_num_batched_tokens` says, else what fits the device and this rank's share.

    gpu: NO_GPU for a CPU; memory: bytes of the GPU that this rank may use, weights and all.
    """
    asked = config.max_num_batched_tokens
    if asked is not None:
        return StepTokens(asked, asked)
    if gpu == NO_GPU:
        return StepTokens(LEAST_TOKENS, LEAST_TOKENS)
    # Decode rows leave half of the least to prompts.
    least = min(max(LEAST_TOKENS, _rounded(2 * config.max_running)), MOST_TOKENS)
    sizes = [whole_tokens(gpu, partition.world.size), *range(MOST_TOKENS, least, -_FINE)]
    most = next((n for n in sizes if _share(config, partition, n, memory) <= CACHE_SHARE), least)
    seconds = estimate_steps(partition, gpu, step_rows(most))
    graphs = [rows for rows in seconds.rows if rows >= least]
    quick = [rows for rows in graphs if seconds.of(rows, 0, rows * rows / 2) <= STEP_SECONDS]
    mixed = max(quick, default=graphs[0])
    if config.fixed_batch is not None:  # no step's size tells whether others decode
        return StepTokens(mixed, mixed, _share(config, partition, mixed, memory))
    return StepTokens(most, mixed, _share(config, partition, most, memory), seconds)


def whole_tokens(gpu: Gpu, ranks: int) -> int:
    """`MOST_TOKENS`, or near it as many as give each multiprocessor as many tiles as any other.

    A product has an even number of tiles side by side as a rule, so half a tile's rows for each
    multiprocessor do, 8,448 of 132, and attention's items are alike. Exchanges of several ranks
    take a part of the multiprocessors: 112 are left at TP 2, for 7,168 rows in two micro-batches.
    """
    taken = by_ranks(OVERLAP_PROGRAMS, ranks) if ranks > 1 else 0
    whole = (gpu.multiprocessors - taken) * _TILE_ROWS // 2
    near = 8 * abs(whole - MOST_TOKENS) <= MOST_TOKENS
    return whole if gpu.wgmma and near else MOST_TOKENS


def agreed_step_tokens(chosen: StepTokens, world: World) -> StepTokens:
    """The fewest that a rank chose: shares of a model may differ. Collective."""
    data = msgspec.msgpack.encode(chosen)
    everyone = [msgspec.msgpack.decode(each, type=StepTokens) for each in world.gather_bytes(data)]
    return StepTokens(
        min(each.most for each in everyone),
        min(each.mixed for each in everyone),
        max(each.cache_share for each in everyone),
        everyone[0].seconds,  # rank 0 schedules
    )


def _share(config: EngineConfig, partition: Partition, most: int, memory: int) -> float:
    """The share of the KV cache's memory that `most` tokens take over `LEAST_TOKENS`."""
    slots, hidden = partition.plan.slots, partition.config.hidden_size
    each = _TIMES_ROW_BYTES * row_bytes(partition, slots)
    if partition.world.size > 1:
        each += 8 * hidden * (slots + 1)  # the slots that peers write to (slot_layout)
    taken = max(0, most - LEAST_TOKENS) * each
    if config.kv_pages is not None or not taken:
        return 0.0
    cache = int(config.gpu_memory_utilization * memory) - weight_bytes(partition)
    return taken / cache if cache > 0 else 1.0


def _rounded(tokens: int) -> int:
    return -(-tokens // _FINE) * _FINE
