"""What a start makes ready: everything that a step needs and that no step changes."""

from dataclasses import dataclass

import torch

from tpdet.cache.kv import KeyValuePages, allocate_pages, stored_dtype
from tpdet.cache.state_table import StateRoom
from tpdet.cache.states import allocate_states
from tpdet.checkpoint.model_config import ModelConfig
from tpdet.comm.exchange.fold import RankExchange
from tpdet.comm.world.world import World
from tpdet.config import EngineConfig
from tpdet.layers.partition import Partition, state_shape
from tpdet.models.decoder import Decoder
from tpdet.runner.start.compile_ahead import CompilingAhead
from tpdet.runner.start.contracts import Contracts
from tpdet.runner.start.loading import Loader
from tpdet.runner.start.start_times import StartTimes
from tpdet.runner.start.step_tokens import StepTokens
from tpdet.runner.step.shared_rows import RowSharing


@dataclass(frozen=True)
class LoadedModel:
    """One rank's share of a model in memory, over kernels that were checked against other ranks'.

    Its weights may still be on their way to the GPU (`Loading`).
    """

    config: EngineConfig
    partition: Partition
    device: torch.device
    architecture: str
    """The name of this machine's arithmetic, as `audit.receipt.architecture`."""
    max_model_len: int
    contracts: Contracts
    decoder: Decoder
    loader: Loader
    strict_exchange: RankExchange
    """Approximate arithmetic borrows its memory."""
    sharing: RowSharing
    sampled: torch.Tensor
    """Ids int64 that the last step sampled, for the rows of a step that was planned before."""
    step_tokens: StepTokens
    times: StartTimes
    ahead: CompilingAhead

    @property
    def world(self) -> World:
        """The ranks that share the model."""
        return self.partition.world

    @property
    def model_config(self) -> ModelConfig:
        """The whole model's configuration."""
        return self.partition.config

    @property
    def state_bytes(self) -> dict[str, float]:
        """Bytes of linear-attention states that this rank keeps of a sequence and of a snapshot."""
        shape, dtype = state_shape(self.partition), getattr(torch, self.model_config.dtype)
        if shape is None:
            return {}
        sizes = {"sequence": shape.slot_bytes(dtype), "snapshot": shape.snapshot_bytes(dtype)}
        return {kind: float(size) for kind, size in sizes.items()}

    def allocate_pages(self, count: int, room: StateRoom | None = None) -> KeyValuePages:
        """As `allocate_cache`, of this rank and on its device."""
        return allocate_cache(self.partition, count, room, self.device)


@dataclass(frozen=True)
class WarmedModel:
    """A loaded model whose weights are there, and which has run every size of step."""

    loaded: LoadedModel
    digest: str
    """Names the weights that were loaded at start; a reload changes it."""
    num_pages: int
    """Pages of the KV cache, alike on every rank."""
    state_room: StateRoom | None = None
    """Slots of linear-attention states, alike on every rank; None for a model without."""


def allocate_cache(
    partition: Partition, count: int, room: StateRoom | None, device: torch.device
) -> KeyValuePages:
    """Memory for `count` pages of a rank's keys and values of every layer.

    Linear layers have `room` for states instead. Raises ResourceError when memory is short.
    """
    model, key_heads = partition.config, len(partition.key_heads)
    dtype, layers = getattr(torch, model.dtype), model.attention_layers
    stored = stored_dtype(partition.kv_cache_dtype, model.dtype)
    pages = allocate_pages(layers, count, key_heads, model.head_dim, stored, device)
    shape = state_shape(partition)
    if shape is None or model.linear is None or room is None:
        return pages
    return pages.beside(allocate_states(shape, *room, dtype, device), model.linear.layers)
