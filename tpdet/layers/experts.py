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
    router_bias: torch.Tensor | None = None
    gate_up: torch.Tensor | None = None
    down: torch.Tensor | None = None
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = None, None

    def __init__(self, source: WeightSource, partition: Partition, name: str) -> None:
        config, mixture = partition.config, _mixture(partition.config)
        self._arithmetic = partition.arithmetic
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
            LayerProduct(
                "router", Product("head", mixture.routing.experts, hidden), mixture.biased
            ),
            LayerProduct(
                "expert_gate_up",
                Product("gated", 2 * mixture.width, hidden),
                mixture.biased,
                experts=held,
                chosen=chosen,
            ),
            LayerProduct(
                "expert_down",
                Product("column", hidden, mixture.width),
                mixture.biased,
                experts=held,
                chosen=chosen,
            ),
        )

    @staticmethod
    def sized_tensors(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
        """The checkpoint's shapes that show the number of experts and their width."""
        mixture, hidden = _mixture(config), config.hidden_size
        last = f"{name}.experts.{mixture.routing.experts - 1}.{mixture.projections[0]}"
        return {
            f"{name}.{mixture.router}.weight": (mixture.routing.experts, hidden),
            f"{last}.weight": (mixture.width, hidden),
        }

    @staticmethod
    def norm_values(config: ModelConfig) -> int:
        """Values of the block's norms: it has none."""
        return 0

    def load(self, source: WeightSource) -> None:
        """Read the weights, in place if there are some already."""
        experts, hidden, width = self._mixture.routing.experts, self._hidden, self._mixture.width
        whole, router = Pieces.whole(), f"{self._name}.{self._mixture.router}"
        read = source.read(f"{router}.weight", (experts, hidden), whole)
        self.router = place(self.router, read)
        shapes = (width, hidden), (width, hidden), (hidden, width)
        named = [*zip(self._mixture.projections, shapes, strict=True)]
        parts: list[tuple[str, tuple[int, ...]]] = [(f"{p}.weight", shape) for p, shape in named]
        if self._mixture.biased:
            read = source.read(f"{router}.bias", (experts,), whole)
            self.router_bias = place(self.router_bias, read)
            parts += [(f"{p}.bias", shape[:1]) for p, shape in named]
        asked = []
        for expert in range(experts):
            for part, shape in parts:
                name = f"{self._name}.experts.{expert}.{part}"
                if expert in self._lanes.experts:
                    asked.append((name, shape, whole))
                else:
                    source.leave(name, shape)
        found, each = source.read_all(asked), len(parts)
        gates, ups, downs, *biases = (found[i::each] for i in range(each))
        self.gate_up = place(self.gate_up, torch.stack([*map(interleaved, gates, ups)]))
        self.down = place(self.down, torch.stack(downs))
        if biases:
            of_gate_up = torch.stack([*map(interleaved, biases[0], biases[1])])
            old_gate_up, old_down = self.biases
            self.biases = place(old_gate_up, of_gate_up), place(old_down, torch.stack(biases[2]))

    def __call__(self, rows: MicroBatch, following: Norm) -> Pending:
        """The rows' x and residual stream -> the stream with the block's result, and its norm."""
        assert self.router is not None and self.gate_up is not None and self.down is not None
        logits = self._arithmetic.column(rows.x_MH, self.router, self.router_bias, torch.float32)
        ids, weights, places = ops.choose_experts(
            logits, None, rows.batch, self._mixture.routing, self._lanes.experts
        )
        sums = ops.expert_sums(
            rows.x_MH,
            ids,
            weights,
            self.gate_up,
            self.down,
            self.biases,
            self._lanes,
            activation=self._mixture.activation,
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
