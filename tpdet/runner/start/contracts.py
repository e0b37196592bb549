"""A model's cut over a world, and its contract ids: of strict and of approximate arithmetic."""

import hashlib
import json
from dataclasses import dataclass

import torch

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.comm.world.world import World
from tpdet.config import APPROXIMATE, EngineConfig
from tpdet.kernels.order import Contract
from tpdet.layers.partition import Partition, make_partition


@dataclass(frozen=True)
class Contracts:
    """`strict` promises bits; `approximate` names answers and promises no bit."""

    strict: str
    approximate: str

    def of(self, approximate: bool) -> str:
        """The id of one arithmetic."""
        return self.approximate if approximate else self.strict


def partition_of(config: EngineConfig, model: ModelConfig, world: World) -> Partition:
    """A rank's share of a model, as the settings cut it. Raises UsageError."""
    cut = config.fold_order, config.leaves, config.row_layers, config.experts
    return make_partition(model, world, *cut, config.kv_cache_dtype)


def name_contracts(config: EngineConfig, partition: Partition, device: str) -> Contracts:
    """Both ids, on a "cpu" or "cuda"."""
    strict = Contract(
        device,
        partition.config.dtype,
        partition.leaves,
        config.fold_order,
        row_layers=config.row_layers,
        edges=partition.cut.edges,
        experts=partition.config.experts,
        linear=partition.config.linear is not None,
        kv_cache_dtype=config.kv_cache_dtype,
    ).identifier
    return Contracts(strict, _approximate(strict, partition.world.size))


def _approximate(strict: str, ranks: int) -> str:
    """`approximate-` and 64 hex digits of what may change the bits beside a strict contract.

    The number of ranks and the version of the library are among it.
    """
    body = {"beside": strict, "ranks": ranks, "torch": torch.__version__}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return f"{APPROXIMATE}-{digest}"
