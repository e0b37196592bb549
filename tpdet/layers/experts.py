"""Mixture of experts: a router, the experts of this rank, and their sums, lane by lane.

Experts lie whole on ranks, or each is cut over its outputs on all of them (`Partition.experts`):

    lanes      a rank has the experts of its lanes, and sends the roots of these
    columns    a rank has a part of every expert's outputs; ranks gather the rows between an
               expert's two products, and then the totals of the fold over all lanes

No bit depends on it: each output is one chain over all of K, and the fold is one expression.
"""

from dataclasses import replace
from functools import partial

import torch

from tpdet.checkpoint.model_config import ModelConfig
from tpdet.checkpoint.model_config.model import Mixture
from tpdet.checkpoint.pieces import Pieces, TensorRead
from tpdet.checkpoint.place import place
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.expert_columns import ExpertColumns, open_experts
from tpdet.comm.exchange.fold import Done, Pending
from tpdet.kernels import ops
from tpdet.kernels.inputs.experts import Lanes, SharedForm
from tpdet.kernels.inputs.gated import halves
from tpdet.kernels.inputs.norm import Finish
from tpdet.kernels.inputs.packed import PackedStack, WeightStack, interleaved_rows, numbers_of
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.inputs.shared_rows import SharedRows
from tpdet.kernels.order import fold_tree
from tpdet.kernels.partial_sums import relative_roots
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.linear import folding
from tpdet.layers.micro_batch import MicroBatch
from tpdet.layers.partition import Partition
from tpdet.layers.products import LayerProduct
from tpdet.layers.shared_expert import (
    IdleSharedExpert,
    SharedExpert,
    held_columns,
    joins_lanes,
    load_shared_expert,
)

_GATE_ROWS = 8
"""Rows of the router's weight for a shared expert's gate: one, and zeros, so that a row of outputs
is whole blocks of 16 bytes."""


class ExpertMlp:
    """The sum over a row's experts of w * down(act(gate(x)) * up(x)), added to the stream.

    All ranks route alike. Whole experts of a rank are neighbours by id. The gate of a shared expert
    is one more output of the router's product.
    """

    router: torch.Tensor | None = None
    """[E, H], with a shared expert's gate [E + _GATE_ROWS, H]."""
    router_bias: torch.Tensor | None = None
    choice_bias: torch.Tensor | None = None
    gate_up: WeightStack | None = None
    down: WeightStack | None = None
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    routes: torch.Tensor | None = None
    """int16 [slots of pages, k]: where the ids of each row are kept, if they are."""

    def __init__(self, source: WeightSource, partition: Partition, name: str) -> None:
        config, mixture = partition.config, _mixture(partition.config)
        self._arithmetic = partition.arithmetic
        self._exchange = folding(partition.exchange)
        self._name, self._mixture, self._hidden = name, mixture, config.hidden_size
        self._plan, self._columns = partition.plan, partition.experts
        self._lanes = held_lanes(partition)
        self._parts = held_outputs(partition)
        self._shared: SharedExpert | IdleSharedExpert | None = None
        self._load(source)
        if mixture.shared:
            self._shared = load_shared_expert(source, partition, f"{name}.{mixture.shared}")

    @staticmethod
    def products(partition: Partition) -> tuple[LayerProduct, ...]:
        """Its products, as this rank holds them."""
        mixture, hidden = _mixture(partition.config), partition.config.hidden_size
        held, chosen = len(held_experts(partition)), mixture.routing.chosen
        scores = mixture.routing.experts + _GATE_ROWS * bool(mixture.shared_gate)
        (width, outputs), biased = map(len, held_outputs(partition)), mixture.biased
        gate_up = Product("gated", 2 * width, hidden)
        down = Product("column", outputs, mixture.width)
        return (
            LayerProduct("router", Product("head", scores, hidden), biased),
            LayerProduct("expert_gate_up", gate_up, biased, experts=held, chosen=chosen),
            LayerProduct("expert_down", down, biased, experts=held, chosen=chosen),
            *(SharedExpert.products(partition) if mixture.shared else ()),
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
        """Read the weights again, in place."""
        self._load(source)
        if self._shared is not None:
            self._shared.load(source)

    def _load(self, source: WeightSource) -> None:
        experts, hidden, width = self._mixture.routing.experts, self._hidden, self._mixture.width
        whole, router = Pieces.whole(), f"{self._name}.{self._mixture.router}"
        scores = [TensorRead(f"{router}.weight", (experts, hidden), whole)]
        if self._mixture.shared_gate:
            gate = f"{self._name}.{self._mixture.shared_gate}.weight"
            scores.append(TensorRead(gate, (1, hidden), whole))
        source.read_for(self._place_router, *scores)
        if self._mixture.choice_bias:
            name = f"{router}.{self._mixture.choice_bias}"
            exact = TensorRead(name, (experts,), Pieces.whole(exact=True))
            source.read_for(self._place_choice_bias, exact)
        shapes = (width, hidden), (width, hidden), (hidden, width)
        of_width, of_hidden = (Pieces.whole(kept) for kept in self._parts)
        cuts = of_width, of_width, of_hidden
        named = [*zip(self._mixture.projections, shapes, cuts, strict=True)]
        packed = all(self._packs(source, expert) for expert in self._lanes.experts)
        parts: list[tuple[str, tuple[int, ...], Pieces]]
        parts = [(f"{p}.weight", shape, cut) for p, shape, cut in named]
        if self._mixture.biased:
            source.read_for(
                self._place_router_bias, TensorRead(f"{router}.bias", (experts,), whole)
            )
            parts += [(f"{p}.bias", shape[:1], cut) for p, shape, cut in named]
        asked, targets = [], self._make_room(source, packed)
        for expert in range(experts):
            for part, shape, cut in parts:
                name = self._of_expert(expert, part)
                if expert in self._lanes.experts:
                    asked.append(TensorRead(name, shape, cut))
                else:
                    source.leave(name, shape)
        if packed:
            weights = [read for read in asked if read.name.endswith(".weight")]
            asked = [read for read in asked if read.name.endswith(".bias")]
            self._read_packed(source, weights)
        source.read_into(asked, targets)

    def _of_expert(self, expert: int, part: str) -> str:
        """The name of an expert's tensor."""
        return f"{self._name}.experts.{expert}.{part}"

    def _packs(self, source: WeightSource, expert: int) -> bool:
        """Whether an expert's weights can stay packed: gate and up are joined."""
        gate, up, down = (
            self._of_expert(expert, f"{part}.weight") for part in self._mixture.projections
        )
        hidden, width = self._hidden, self._mixture.width
        packs = source.packing.packs
        return packs([gate, up], [hidden]) and packs([down], [width])

    def _read_packed(self, source: WeightSource, weights: list[TensorRead]) -> None:
        """Read gate, up and down of each expert as codes and scales."""
        gate_up, down = [], []
        for expert in range(0, len(weights), 3):
            parts = [source.read_packed(read) for read in weights[expert : expert + 3]]
            gate_up.append(interleaved_rows(*parts[:2]))
            down.append(parts[2])
        lay_out = source.packing.laid_out_experts
        self.gate_up = lay_out(PackedStack(gate_up), self.gate_up)
        self.down = lay_out(PackedStack(down), self.down)

    def _place_router(self, read: torch.Tensor, gate: torch.Tensor | None = None) -> None:
        if gate is not None:
            read = torch.cat([read, gate, gate.new_zeros(_GATE_ROWS - 1, gate.shape[1])])
        self.router = place(self.router, read)

    def _place_router_bias(self, read: torch.Tensor) -> None:
        self.router_bias = place(self.router_bias, read)

    def _place_choice_bias(self, read: torch.Tensor) -> None:
        self.choice_bias = place(self.choice_bias, read)

    def _make_room(self, source: WeightSource, packed: bool) -> list[torch.Tensor]:
        """Where gate, up and down of each expert go, and then their biases: expert by expert.

        packed: only biases are read to where there is room.
        """
        held, (width, outputs) = len(self._lanes.experts), map(len, self._parts)
        weights: list[list[torch.Tensor]] = [[] for _ in range(held)]
        if not packed:
            shape = held, 2 * width, self._hidden
            self.gate_up = gate_up = source.memory_for(numbers_of(self.gate_up), shape)
            shape = held, outputs, self._mixture.width
            self.down = down = source.memory_for(numbers_of(self.down), shape)
            weights = [[*halves(gate_up[i]), down[i]] for i in range(held)]
        of_gate_up, of_down = self.biases
        if self._mixture.biased:
            of_gate_up = source.memory_for(of_gate_up, (held, 2 * width))
            of_down = source.memory_for(of_down, (held, outputs))
        self.biases = of_gate_up, of_down
        targets = []
        for i in range(held):
            targets += weights[i]
            if of_gate_up is not None and of_down is not None:
                targets += [*halves(of_gate_up[i]), of_down[i]]
        return targets

    def __call__(self, rows: MicroBatch, finish: Finish) -> Pending:
        """The rows' x -> what becomes of the block's result: the stream and its norm."""
        assert self.gate_up is not None and self.down is not None
        scores, mixed = self._scores_and_mixed(rows.x_MH)
        experts = self._mixture.routing.experts
        logits, gate = scores[:, :experts], scores[:, experts : experts + 1]
        held = self._lanes.experts if self._columns is None else None
        ids, weights, sorted_tokens = ops.choose_experts(
            logits, self.choice_bias, rows.batch, self._mixture.routing, held
        )
        if self.routes is not None:
            self.routes.index_copy_(0, rows.batch.slots, ids.to(self.routes.dtype))
        shared = None
        if self._shared is not None and mixed is not None:
            shared = self._shared(mixed, gate if self._mixture.shared_gate else None)
        if self._columns is not None:
            return self._by_columns(self._columns, rows, finish, (ids, weights), shared)
        sums = ops.expert_sums(
            rows.x_MH,
            ids,
            weights,
            self.gate_up,
            self.down,
            self.biases,
            self._lanes,
            shared,
            activation=self._mixture.activation,
            sorted_tokens=sorted_tokens,
        )
        return rows.exchanged(self._exchange, sums, finish, self._plan)

    def _scores_and_mixed(self, x_MH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The router's scores fp32 [M, outputs]; what a shared expert's `down` reads."""
        assert self.router is not None
        scores = partial(
            self._arithmetic.column, x_MH, self.router, self.router_bias, torch.float32
        )
        if self._shared is None:
            return scores(), None
        with ops.pair_of_launches(x_MH.device):
            return scores(), self._shared.gated(x_MH)

    def _by_columns(
        self,
        columns: ExpertColumns,
        rows: MicroBatch,
        finish: Finish,
        chosen: tuple[torch.Tensor, torch.Tensor],
        shared: torch.Tensor | SharedRows | None,
    ) -> Pending:
        """Both products of all experts, of this rank's outputs; two gathers. chosen: ids, w."""
        assert self.gate_up is not None and self.down is not None
        lanes = self._lanes
        of_gate_up, of_down = self.biases
        held = lanes.experts, lanes.total, self._mixture.activation
        mixed = ops.expert_rows(rows.x_MH, chosen[0], self.gate_up, of_gate_up, *held)
        whole = columns.gather(mixed)
        sums = ops.sums_of_rows(whole, *chosen, self.down, of_down, lanes, shared)
        return Done(*columns.add(sums.values[0], finish))

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Multiply and exchange by this from now on."""
        self._arithmetic, self._exchange = arithmetic, folding(arithmetic.exchange)


def held_experts(partition: Partition) -> range:
    """Experts that a rank holds, or holds a part of: all, or those of its lanes."""
    experts = _mixture(partition.config).routing.experts
    share = experts // partition.leaves
    if partition.experts is not None:
        return range(experts)
    return range(partition.mine.start * share, partition.mine.stop * share)


def held_lanes(partition: Partition) -> Lanes:
    """A rank's experts, by lane, and what it makes of its lanes."""
    roots, held = relative_roots(partition.plan.roots[partition.world.rank]), len(partition.mine)
    if partition.experts is not None:
        roots, held = (fold_tree(partition.fold_order, partition.leaves),), partition.leaves
    return Lanes(held_experts(partition), _mixture(partition.config).routing.experts, held, roots)


def shared_form(partition: Partition) -> SharedForm | None:
    """A shared expert's leaves that join lanes on this rank; None without any."""
    mixture = partition.config.mixture
    if mixture is None or not mixture.shared or not joins_lanes(partition):
        return None
    leaf, *_ = partition.cut.shared.widths(range(1))
    gated = bool(mixture.shared_gate)
    return SharedForm(held_lanes(partition), leaf, mixture.routing.chosen, gated)


def held_outputs(partition: Partition) -> tuple[range, range]:
    """Outputs of gate or up, and of down, that a rank holds of each of its experts."""
    width, world = _mixture(partition.config).width, partition.world
    if partition.experts is None:
        return range(width), held_columns(partition)
    share = width // world.size
    return range(world.rank * share, (world.rank + 1) * share), held_columns(partition)


def open_columns_of_experts(partition: Partition, rows: int) -> Partition:
    """With the gathers that go with its exchange, for steps of up to `rows`. Collective."""
    if partition.experts is None:
        return partition
    config, mixture = partition.config, _mixture(partition.config)
    shape = mixture.routing.chosen, mixture.width, config.hidden_size
    dtype = getattr(torch, config.dtype)
    return replace(partition, experts=open_experts(partition.exchange, rows, shape, dtype))


def _mixture(config: ModelConfig) -> Mixture:
    if config.mixture is None:
        raise ValueError(f"{config.family} has no experts")
    return config.mixture
