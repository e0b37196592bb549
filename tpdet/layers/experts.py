"""Mixture of experts: a router, the experts of this rank, and their sums, lane by lane."""

import torch

from tpdet.comm.exchange.fold import Done, Pending
from tpdet.kernels import ops
from tpdet.kernels.inputs.experts import Lanes
from tpdet.kernels.inputs.gated import interleaved
from tpdet.kernels.inputs.norm import Norm
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.partial_sums import relative_roots
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.linear import folding
from tpdet.layers.micro_batch import MicroBatch
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.model_config import ModelConfig
from tpdet.model_config.model import Mixture
from tpdet.weights.pieces import Pieces
from tpdet.weights.place import place
from tpdet.weights.source import WeightSource


class ExpertMlp:
    """The sum over a row's experts of w * down(act(gate(x)) * up(x)), added to the stream.

    Each rank holds whole experts, neighbours by id: those of its lanes. All ranks route alike.
    """

    router: torch.Tensor | None = None
    gate_up: torch.Tensor | None = None
    down: torch.Tensor | None = None

    def __init__(self, source: WeightSource, partition: Partition, name: str) -> None:
        config, mixture = partition.config, _mixture(partition.config)
        self._arithmetic, self._activation = partition.arithmetic, config.activation
        self._exchange = folding(partition.exchange)
        self._name, self._mixture, self._hidden = name, mixture, config.hidden_size
        self._plan = partition.plan
        roots = relative_roots(self._plan.roots[partition.world.rank])
        held = held_experts(partition)
        self._lanes = Lanes(held, mixture.routing.experts, len(partition.mine), roots)
        self.load(source)

    @staticmethod
    def products(partition: Partition) -> tuple[LayerProduct, ...]:
        """Its products, as this rank holds them."""
        mixture, hidden = _mixture(partition.config), partition.config.hidden_size
        held, chosen = len(held_experts(partition)), mixture.routing.chosen
        return (
            LayerProduct("router", Product("head", mixture.routing.experts, hidden)),
            LayerProduct(
                "expert_gate_up",
                Product("gated", 2 * mixture.width, hidden),
                experts=held,
                chosen=chosen,
            ),
            LayerProduct(
                "expert_down", Product("column", hidden, mixture.width), experts=held, chosen=chosen
            ),
        )

    @staticmethod
    def sized_tensors(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
        """The checkpoint's shapes that show the number of experts and their width."""
        mixture, hidden = _mixture(config), config.hidden_size
        last = f"{name}.experts.{mixture.routing.experts - 1}.{mixture.projections[0]}"
        return {
            f"{name}.gate.weight": (mixture.routing.experts, hidden),
            f"{last}.weight": (mixture.width, hidden),
        }

    @staticmethod
    def norm_values(config: ModelConfig) -> int:
        """Values of the block's norms: it has none."""
        return 0

    def load(self, source: WeightSource) -> None:
        """Read the weights, in place if there are some already."""
        experts, hidden, width = self._mixture.routing.experts, self._hidden, self._mixture.width
        shapes = (width, hidden), (width, hidden), (hidden, width)
        whole = Pieces.whole()
        router = source.read(f"{self._name}.gate.weight", (experts, hidden), whole)
        self.router = place(self.router, router)
        asked = []
        for expert in range(experts):
            of_expert = f"{self._name}.experts.{expert}"
            for each, shape in zip(self._mixture.projections, shapes, strict=True):
                if expert in self._lanes.experts:
                    asked.append((f"{of_expert}.{each}.weight", shape, whole))
                else:
                    source.leave(f"{of_expert}.{each}.weight", shape)
        read = source.read_all(asked)
        self.gate_up = place(self.gate_up, torch.stack([*map(interleaved, read[::3], read[1::3])]))
        self.down = place(self.down, torch.stack(read[2::3]))

    def __call__(self, rows: MicroBatch, following: Norm) -> Pending:
        """The rows' x and residual stream -> the stream with the block's result, and its norm."""
        assert self.router is not None and self.gate_up is not None and self.down is not None
        logits = self._arithmetic.column(rows.x_MH, self.router, None, torch.float32)
        ids, weights, places = ops.choose_experts(
            logits, None, rows.batch, self._mixture.routing, self._lanes.experts
        )
        sums = ops.expert_sums(
            rows.x_MH,
            ids,
            weights,
            self.gate_up,
            self.down,
            (None, None),
            self._lanes,
            activation=self._activation,
            places=places,
        )
        sent = sums, rows.hidden_MH, following, self._plan
        if rows.overlapped:
            return self._exchange.begin(*sent)
        return Done(*self._exchange.fold_and_norm(*sent))

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Multiply and exchange by this from now on."""
        self._arithmetic, self._exchange = arithmetic, folding(arithmetic.exchange)


def held_experts(partition: Partition) -> range:
    """Experts of a rank: those of its lanes, which are equal groups of neighbours."""
    share = _mixture(partition.config).routing.experts // partition.leaves
    return range(partition.mine.start * share, partition.mine.stop * share)


def _mixture(config: ModelConfig) -> Mixture:
    if config.mixture is None:
        raise ValueError(f"{config.family} has no experts")
    return config.mixture
