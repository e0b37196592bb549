"""Predicts the bytes of one rank's GPU: weights, slots of exchanges, workspaces, KV pages, states.

Weights, rotary tables, slots, pages and the states of linear attention are counted as the runtime
allocates them. Workspaces are the largest tensors of a step that live at the same time;
`Hardware.reserved` stands for the rest.
"""

from dataclasses import dataclass

import torch

from tpdet.cache.kv import page_bytes, stored_dtype
from tpdet.checkpoint.model_config.quantisation import Quantisation
from tpdet.comm.exchange.peer_carrier import gather_bytes
from tpdet.comm.exchange.slot_layout import SlotLayout
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.layers.partition import state_shape
from tpdet.models.footprint import row_bytes, scratch_bytes, weight_bytes
from tpdet.models.products import head_product
from tpdet.runner.start.memory import snapshots_for
from tpdet.tools.plan.step import PlanWorld


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank's GPU. `usable` is the share the engine may use (gpu_memory_utilization).

    `draft`: what a draft model takes, on rank 0. `scratch`: where packed weights become numbers.
    `slot`, `snapshot`: states of linear attention, of one sequence and at one page end; 0 for a
    model without. `batch`: sequences that run.
    """

    usable: int
    weights: int
    tables: int
    slots: int
    workspaces: int
    reserved: int
    page: int
    batch: int
    draft: int = 0
    scratch: int = 0
    slot: int = 0
    snapshot: int = 0

    @property
    def fixed(self) -> int:
        """Bytes of everything except what sequences have: KV pages and states."""
        tensors = self.weights + self.tables + self.slots + self.workspaces
        return tensors + self.reserved + self.draft + self.scratch

    @property
    def states(self) -> int:
        """Bytes of the states of running sequences, and of the slot where pad rows write."""
        return (self.batch + 1) * self.slot if self.slot else 0

    @property
    def snapshots(self) -> int:
        """Snapshots of states that a start makes room for."""
        if not self.snapshot:
            return 0
        return snapshots_for(self.batch, self.usable - self.fixed - self.states, self.snapshot)

    @property
    def left(self) -> int:
        """Bytes for KV pages."""
        kept = self.fixed + self.states + self.snapshots * self.snapshot
        return max(0, self.usable - kept)

    @property
    def pages(self) -> int:
        """KV pages that fit; 0 when the rest alone does not fit."""
        return self.left // self.page

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.pages * PAGE_TOKENS

    def sequences(self, context: int) -> int:
        """Sequences of `context` tokens whose pages fit, and their states, without snapshots."""
        pages = -(-context // PAGE_TOKENS)
        if not self.slot:
            return self.pages // pages
        left = self.usable - self.fixed - self.slot
        return max(0, left) // (pages * self.page + self.slot)


PACKED_FORMS = {
    "fp8-block": Quantisation("fp8 block", 8, 128),
    "int4-g128": Quantisation("packed int", 4, 128),
    "mxfp4": Quantisation("mxfp4", 4, 32),
}
"""What `tpdet quantise` writes, by its formats."""


def rank_memory(
    world: PlanWorld,
    positions: int,
    utilization: float,
    packed: str | None = None,
    batch: int = 1,
    kv_cache_dtype: str = "auto",
) -> Memory:
    """The memory of a rank. positions: the longest sequence; utilization: the share to use.

    packed: the format of `tpdet quantise` in which weights of layers stay. batch: sequences that
    run; kv_cache_dtype: of pages, as the setting.
    """
    config = world.config
    dtype: torch.dtype = getattr(torch, config.dtype)
    keys, shape = len(world.partition.key_heads), state_shape(world.partition)
    stored = stored_dtype(kv_cache_dtype, config.dtype)
    return Memory(
        usable=int(utilization * world.hardware.memory),
        weights=weight_bytes(world.partition, None if packed is None else PACKED_FORMS[packed]),
        tables=4 * positions * config.head_dim * len(config.rotaries),
        slots=_slot_bytes(world, dtype),
        workspaces=_workspace_bytes(world),
        reserved=world.hardware.reserved,
        page=page_bytes(config.attention_layers, keys, config.head_dim, stored),
        scratch=0 if packed is None else scratch_bytes(world.partition),
        batch=batch,
        slot=0 if shape is None else shape.slot_bytes(dtype),
        snapshot=0 if shape is None else shape.snapshot_bytes(dtype),
    )


def _slot_bytes(world: PlanWorld, dtype: torch.dtype) -> int:
    """Bytes that peers of the node write to, and that take other nodes' partials."""
    levels, hidden = world.levels, world.config.hidden_size
    inside = 0
    if levels.local > 1:
        inside = gather_bytes(levels.local)
        inside += SlotLayout(levels.local, levels.slots, world.budget, hidden, dtype).bytes
    if levels.nodes == 1:
        return inside
    rows = max(levels.one_shot_rows, -(-world.budget // levels.local))
    return inside + 4 * levels.nodes * levels.node_slots * rows * hidden


def _workspace_bytes(world: PlanWorld) -> int:
    """The rows of a step, and the logits of HEAD_ROWS rows."""
    head = head_product(world.partition).n
    logits = 4 * HEAD_ROWS * (2 * head + 3 * head * world.ranks)
    return world.budget * row_bytes(world.partition, world.levels.slots) + logits
