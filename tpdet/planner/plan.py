"""A plan: what one model does on so many nodes, and the tensor-parallel size it should have."""

from dataclasses import dataclass, field

import msgspec

from tpdet.bench.report.floor import RATES, Rates, decode_work
from tpdet.errors import UsageError
from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.model_config import ModelConfig
from tpdet.planner.constants import load_constants
from tpdet.planner.hardware import Hardware, Network, hardware_of
from tpdet.planner.memory import Memory, rank_memory
from tpdet.planner.step import (
    Parts,
    World,
    decode_parts,
    limit_of,
    make_world,
    prefill_parts,
    step_seconds,
)
from tpdet.verify.report import short_name


@dataclass(frozen=True)
class Wish:
    """What is asked for. context: tokens of each sequence; batch: sequences a world decodes.

    leaves: as --leaves; tp None: the recommended one; most_ms: what a reader may wait for a token;
    nodes: hosts, of `gpus` GPUs each.
    """

    model: str
    config: ModelConfig
    gpu: str
    context: int
    batch: int
    nodes: int = 1
    gpus: int | None = None
    tp: int | None = None
    leaves: int | None = None
    fold_order: str = DEFAULT_FOLD_ORDER
    budget: int = 8192
    utilization: float = 0.9
    most_ms: float = 50.0
    network: Network = field(default_factory=Network)

    @property
    def hardware(self) -> Hardware:
        """The GPU's and node's."""
        hardware = hardware_of(self.gpu)
        if self.gpus is None:
            return hardware
        return Hardware(hardware.memory, hardware.reserved, hardware.multiprocessors, self.gpus)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One size. Bytes are of a rank, tokens a second of all worlds together, parts in ms a step.

    `floor_ms` is the roofline of the step's bytes and operations over all its GPUs.
    """

    model: str
    gpu: str
    nodes: int
    tp: int
    worlds: int
    context: int
    batch: int
    leaves: int
    fold_order: str
    memory: dict[str, int]
    kv_pages: int
    kv_tokens: int
    kv_sequences: int
    fits: bool
    decode_ms: float
    floor_ms: float
    decode_parts: dict[str, float]
    decode_limit: str
    decode_tokens: float
    prefill_tokens: float
    prefill_limit: str
    notes: tuple[str, ...] = ()


class Choice(msgspec.Struct, frozen=True):
    """The recommended size and why, 0 where none fits; and every size that was weighed."""

    tp: int
    reason: str
    sizes: tuple[Plan, ...]


def plan_size(wish: Wish, tp: int) -> Plan:
    """The plan of one size. Raises UsageError where it does not fit the model or the nodes."""
    hardware, world = wish.hardware, plan_world(wish, tp)
    worlds = wish.nodes * hardware.gpus // tp
    memory = rank_memory(world, wish.context, wish.utilization)
    decode = decode_parts(world, wish.batch, wish.context)
    prefill = prefill_parts(world, wish.context)
    seconds = step_seconds(decode)
    work = decode_work(wish.config, wish.batch, wish.context).over(tp)
    return Plan(
        model=wish.model,
        gpu=wish.gpu,
        nodes=wish.nodes,
        tp=tp,
        worlds=worlds,
        context=wish.context,
        batch=wish.batch,
        leaves=world.partition.leaves,
        fold_order=wish.fold_order,
        memory=_memory_fields(memory),
        kv_pages=memory.pages,
        kv_tokens=memory.tokens,
        kv_sequences=memory.sequences(wish.context),
        fits=memory.sequences(wish.context) >= wish.batch,
        decode_ms=1e3 * seconds,
        floor_ms=1e3 * work.seconds(_rates(wish.gpu)),
        decode_parts=_milliseconds(decode),
        decode_limit=limit_of(decode),
        decode_tokens=worlds * wish.batch / seconds,
        prefill_tokens=worlds * wish.budget / step_seconds(prefill),
        prefill_limit=limit_of(prefill),
        notes=_notes(world),
    )


def plan_world(wish: Wish, tp: int) -> World:
    """The world of one size. Raises UsageError where it does not fit the model or the nodes."""
    hardware = wish.hardware
    total = wish.nodes * hardware.gpus
    if tp > total:
        raise UsageError(f"--tp {tp} is more than {wish.nodes} nodes of {hardware.gpus} GPUs have")
    if tp > hardware.gpus and tp % hardware.gpus:
        raise UsageError(f"--tp {tp} is no multiple of the {hardware.gpus} GPUs of a node")
    return make_world(
        wish.config,
        tp,
        load_constants(wish.gpu),
        hardware,
        wish.network,
        budget=wish.budget,
        fold_order=wish.fold_order,
        leaves=wish.leaves,
    )


def choose_size(wish: Wish) -> Choice:
    """Of the sizes whose memory holds the batch, the one with most tokens a second of all worlds.

    One whose step takes longer than `most_ms` only counts where none is faster.
    """
    sizes = []
    tp = 1
    while tp <= wish.nodes * wish.hardware.gpus:
        try:
            sizes.append(plan_size(wish, tp))
        except UsageError:  # too many ranks for the model's leaves or heads
            break
        tp *= 2
    fitting = [plan for plan in sizes if plan.fits]
    if not fitting:
        most = max(sizes, key=lambda plan: plan.kv_sequences)
        return Choice(
            0,
            f"no size holds {wish.batch} sequences of {wish.context:,} tokens: TP {most.tp} holds "
            f"{most.kv_sequences:,}; lower --batch or --context, or add leaves or nodes",
            tuple(sizes),
        )
    smallest = fitting[0].tp
    quick = [plan for plan in fitting if plan.decode_ms <= wish.most_ms]
    if not quick:
        best = min(fitting, key=lambda plan: plan.decode_ms)
        reason = f"no size stays under {wish.most_ms:g} ms a step; this one comes nearest"
    else:
        best = max(quick, key=lambda plan: plan.decode_tokens)
        reason = (
            f"most tokens a second ({best.decode_tokens:,.0f}) of those under {wish.most_ms:g} ms "
            f"a step, {best.worlds} world{'s' * (best.worlds > 1)} on {wish.nodes} "
            f"node{'s' * (wish.nodes > 1)}"
        )
    if smallest > 1:
        reason += f"; under TP {smallest} memory does not hold the batch"
    return Choice(best.tp, reason, tuple(sizes))


def _memory_fields(memory: Memory) -> dict[str, int]:
    return {
        "usable": memory.usable,
        "weights": memory.weights,
        "rotary tables": memory.tables,
        "exchange slots": memory.slots,
        "workspaces": memory.workspaces,
        "reserved": memory.reserved,
        "left for KV": max(0, memory.usable - memory.fixed),
    }


def _milliseconds(parts: Parts) -> dict[str, float]:
    return {name: 1e3 * seconds for name, seconds in parts.items()}


def _notes(world: World) -> tuple[str, ...]:
    notes = []
    if world.config.dtype != "bfloat16":
        notes.append(f"the model is {world.config.dtype}: memory is its own, times are bfloat16's")
    levels = world.levels
    if levels.local > 4 or levels.nodes > 1:
        notes.append("exchanges of more than 4 GPUs were not measured: their cost is extrapolated")
    if levels.nodes > 1:
        notes.append(
            f"a world over {levels.nodes} nodes folds in two levels, inside each node and then "
            "between nodes; the network's figures are assumed (--network-gbps, --network-us), not "
            "measured"
        )
        if levels.node_slots > 1:
            notes.append(
                f"in this fold order a node sends {levels.node_slots} partials: tree sends one"
            )
    if len(world.partition.key_heads) * world.ranks > world.config.num_kv_heads:
        notes.append("ranks share key heads: the KV cache of a rank shrinks no further")
    return tuple(notes)


def _rates(gpu: str) -> Rates:
    return next(rates for name, rates in RATES.items() if short_name(name) == gpu)
