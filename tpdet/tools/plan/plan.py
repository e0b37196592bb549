"""Plans a model on a number of nodes, and recommends its tensor-parallel size."""

from dataclasses import dataclass, field, replace

import msgspec

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.expert_load import fullest_rank, touched_experts
from tpdet.errors import UsageError
from tpdet.kernels.cuda.hardware import KNOWN, RATES
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, PAGE_TOKENS
from tpdet.tools.measurement.floor import decode_work
from tpdet.tools.plan.constants import load_constants
from tpdet.tools.plan.draft import DraftPlan, DraftRequest, draft_plan
from tpdet.tools.plan.hardware import GIB, Hardware, Network, hardware_of
from tpdet.tools.plan.memory import Memory, rank_memory
from tpdet.tools.plan.step import PlanWorld, decode_parts, limit_of, prefill_parts, step_seconds

MEASURED_GPUS = 4
"""GPUs of a node whose exchanges were measured, at most."""


@dataclass(frozen=True)
class PlanRequest:
    """The question of a plan. context: tokens of each sequence; batch: sequences of one world.

    leaves: as --leaves; tp: None for the recommended size; most_ms: the longest time between two
    tokens; nodes: hosts, of `gpus` GPUs each; draft: the draft model, on rank 0 of each world;
    packed: the format of `tpdet quantise` in which weights of layers stay; kv_cache_dtype: as the
    setting.
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
    draft: DraftRequest | None = None
    packed: str | None = None
    kv_cache_dtype: str = "auto"

    @property
    def hardware(self) -> Hardware:
        """The GPU and the node."""
        hardware = hardware_of(self.gpu)
        if self.gpus is None:
            return hardware
        return replace(hardware, gpus=self.gpus)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one size: bytes of a rank, tokens a second of all worlds, parts in ms a step.

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
    draft: DraftPlan | None = None


class RecommendedSize(msgspec.Struct, frozen=True):
    """The recommended size, 0 where none fits, with the reason, and the plans of all sizes."""

    tp: int
    reason: str
    sizes: tuple[Plan, ...]


def plan_size(request: PlanRequest, tp: int) -> Plan:
    """The plan of one size. Raises UsageError where it does not fit the model or the nodes."""
    hardware, world = request.hardware, plan_world(request, tp)
    worlds = request.nodes * hardware.gpus // tp
    kept = request.utilization, request.packed, request.batch, request.kv_cache_dtype
    memory = rank_memory(world, request.context, *kept)
    draft = None
    if request.draft is not None:
        sizes = request.batch, request.context, request.utilization
        draft = draft_plan(request.draft, world, *sizes)
        memory = replace(memory, draft=draft.bytes)
    sequences = memory.sequences(request.context)
    decode = decode_parts(world, request.batch, request.context)
    prefill = prefill_parts(world, request.context)
    seconds = step_seconds(decode)
    sequence = request.batch, request.context, request.kv_cache_dtype
    work = decode_work(request.config, *sequence).over(tp)
    return Plan(
        model=request.model,
        gpu=request.gpu,
        nodes=request.nodes,
        tp=tp,
        worlds=worlds,
        context=request.context,
        batch=request.batch,
        leaves=world.partition.leaves,
        fold_order=request.fold_order,
        memory=_memory_fields(memory),
        kv_pages=memory.pages,
        kv_tokens=memory.tokens,
        kv_sequences=sequences,
        fits=sequences >= request.batch and (draft is None or draft.kv_pages > 0),
        decode_ms=1e3 * seconds,
        floor_ms=1e3 * work.seconds(RATES[KNOWN[request.gpu].name]),
        decode_parts={name: 1e3 * part for name, part in decode.items()},
        decode_limit=limit_of(decode),
        decode_tokens=worlds * request.batch / seconds,
        prefill_tokens=worlds * request.budget / step_seconds(prefill),
        prefill_limit=limit_of(prefill),
        notes=(
            *_notes(world),
            *_stored_notes(request),
            *_expert_notes(world, request.batch),
            *_state_notes(world, memory),
            *_draft_notes(request, draft, sequences),
        ),
        draft=draft,
    )


def plan_world(request: PlanRequest, tp: int) -> PlanWorld:
    """The world of one size. Raises UsageError where it does not fit the model or the nodes."""
    hardware = request.hardware
    total = request.nodes * hardware.gpus
    if tp > total:
        raise UsageError(
            f"--tp {tp} is more than {request.nodes} nodes of {hardware.gpus} GPUs have"
        )
    if tp > hardware.gpus and tp % hardware.gpus:
        raise UsageError(f"--tp {tp} is no multiple of the {hardware.gpus} GPUs of a node")
    return PlanWorld(
        request.config,
        tp,
        load_constants(request.gpu),
        hardware,
        request.network,
        budget=request.budget,
        fold_order=request.fold_order,
        leaves=request.leaves,
    )


def plan_sizes(request: PlanRequest) -> list[Plan]:
    """Plans of every size that the model and the nodes allow, even if memory is short."""
    sizes, tp = [], 1
    while tp <= request.nodes * request.hardware.gpus:
        try:
            sizes.append(plan_size(request, tp))
        except UsageError:  # too many ranks for the model's leaves or heads
            break
        tp *= 2
    return sizes


def choose_size(request: PlanRequest) -> RecommendedSize:
    """The size with most tokens a second of all worlds, among those whose memory holds the batch.

    A size whose step takes longer than `most_ms` is chosen only where none is faster.
    """
    sizes = plan_sizes(request)
    fitting = [plan for plan in sizes if plan.fits]
    if not fitting:
        most = max(sizes, key=lambda plan: plan.kv_sequences)
        return RecommendedSize(
            0,
            f"no size holds {request.batch} sequences of {request.context:,} tokens: TP {most.tp} "
            f"holds {most.kv_sequences:,}; lower --batch or --context, "
            f"{'leave --draft-model out, ' * (request.draft is not None)}or add leaves or nodes",
            tuple(sizes),
        )
    smallest = fitting[0].tp
    quick = [plan for plan in fitting if plan.decode_ms <= request.most_ms]
    if not quick:
        best = min(fitting, key=lambda plan: plan.decode_ms)
        reason = f"no size stays under {request.most_ms:g} ms a step; this one comes nearest"
    else:
        best = max(quick, key=lambda plan: plan.decode_tokens)
        reason = (
            f"most tokens a second ({best.decode_tokens:,.0f}) of those under {request.most_ms:g} "
            f"ms a step, {best.worlds} world{'s' * (best.worlds > 1)} on {request.nodes} "
            f"node{'s' * (request.nodes > 1)}"
        )
    if smallest > 1:
        reason += f"; under TP {smallest} memory does not hold the batch"
    return RecommendedSize(best.tp, reason, tuple(sizes))


def _memory_fields(memory: Memory) -> dict[str, int]:
    return {
        "usable": memory.usable,
        "weights": memory.weights,
        "rotary tables": memory.tables,
        "exchange slots": memory.slots,
        "workspaces": memory.workspaces,
        "reserved": memory.reserved,
        **({"draft model": memory.draft} if memory.draft else {}),
        **({"unpacked weights": memory.scratch} if memory.scratch else {}),
        **({"states": memory.states} if memory.slot else {}),
        **({"snapshots": memory.snapshots * memory.snapshot} if memory.slot else {}),
        "left for KV": memory.left,
    }


def _notes(world: PlanWorld) -> tuple[str, ...]:
    notes = []
    if world.config.dtype != "bfloat16":
        notes.append(f"memory is planned for {world.config.dtype}, times are those of bfloat16")
    levels = world.levels
    if levels.local > MEASURED_GPUS:
        notes.append(
            f"exchanges of more than {MEASURED_GPUS} GPUs were not measured: their cost is "
            "extrapolated"
        )
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


def _stored_notes(request: PlanRequest) -> tuple[str, ...]:
    """What is planned of packed weights and of pages in fp8."""
    notes = []
    if request.packed is not None:
        notes.append(f"weights stay packed as {request.packed}: times are those of bfloat16")
    if request.kv_cache_dtype == "fp8":
        notes.append("keys and values are in fp8: times are those of bfloat16")
    return tuple(notes)


def _expert_notes(world: PlanWorld, batch: int) -> tuple[str, ...]:
    """Where experts lie, and how many of them a step reads; () for a dense model."""
    mixture = world.config.mixture
    if mixture is None:
        return ()
    experts, chosen = mixture.routing.experts, mixture.routing.chosen
    touched, columns = touched_experts(experts, chosen, batch), world.partition.experts is not None
    fullest = touched if columns else fullest_rank(experts, chosen, batch, world.ranks)
    placed = f"a 1/{world.ranks} of each" if columns else "whole"
    return (
        f"experts ({'columns' if columns else 'lanes'}): a step of {batch} touches {touched:.1f} "
        f"of {experts} a layer if rows choose evenly; the fullest rank reads {fullest:.1f}, "
        f"{placed}",
    )


def _state_notes(world: PlanWorld, memory: Memory) -> tuple[str, ...]:
    """What states of linear attention take, and what is not timed; () for a model without."""
    if not memory.slot:
        return ()
    untimed = "of linear attention products alone are timed: its other kernels have no constants"
    return (
        f"states of linear attention take {memory.slot / 2**20:.1f} MiB for each of the "
        f"{memory.batch} sequences of the batch and {memory.snapshot / 2**20:.1f} MiB for each of "
        f"{memory.snapshots:,} snapshots at page ends",
        *([untimed] if world.constants.linear is None else []),
    )


def _draft_notes(request: PlanRequest, draft: DraftPlan | None, sequences: int) -> tuple[str, ...]:
    """What of a draft model does not fit, with the remedy. sequences: those beside it."""
    if request.draft is None or draft is None:
        return ()
    notes = []
    longest = request.draft.config.max_position
    if longest < request.context:
        notes.append(f"the draft model has a context of {longest:,}: its drafts end there")
    if not request.draft.compared:
        notes.append("the tokenizers were not compared: a start does, where both are directories")
    without = draft.pages_without // -(-request.context // PAGE_TOKENS)
    if sequences < min(request.batch, without) or not draft.kv_pages:
        notes.append(
            f"beside the draft model, which takes {draft.bytes / GIB:.1f} GiB of rank 0, "
            f"{sequences:,} sequences fit, without it {without:,}: take a smaller one, leave "
            "--draft-model out, raise --gpu-memory-utilization, or use more GPUs (--tp)"
        )
    return tuple(notes)
