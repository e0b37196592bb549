"""The layers' operations as autograd records them: the kernels' operators in place of the kernels.

A decoder runs unchanged while a `Recording` is in use. Pages hold nothing then: keys and values of
a layer go from the rotation to attention as tensors, so that gradients find them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tpdet.cache.kv import KeyValuePages, LayerPages
from tpdet.comm.world.world import World
from tpdet.errors import UsageError
from tpdet.kernels import ops
from tpdet.kernels.inputs.experts import Lanes, Routing
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.inputs.product import write_roots
from tpdet.kernels.inputs.shared_rows import SharedRows
from tpdet.kernels.partial_sums import PartialSums
from tpdet.nn.operators import attention, experts, pointwise, products, vocabulary

_Pages = tuple[Tensor, Tensor]


class Recording:
    """The operations of one forward pass over packed sequences, each from its position 0 on."""

    def __init__(self, layers: int) -> None:
        self._rotated: dict[int, _Pages] = {}
        empty = [LayerPages(torch.empty(0), torch.empty(0)) for _ in range(layers)]
        self.pages = KeyValuePages(tuple(empty))
        """What the decoder takes for pages: nothing but names of layers."""
        own = self.rotate_and_store, self.paged_attention
        self._operations = OPERATIONS | {operation.__name__: operation for operation in own}

    def running(self) -> AbstractContextManager[None]:
        """While inside, layers run by the operators."""
        return ops.recorded(self._operations)

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: _Pages,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        pages: _Pages,
        batch: PagedBatch,
    ) -> Tensor:
        """As `ops.rotate_and_store`; keys and values are kept for `paged_attention`."""
        cos, sin = (table[batch.positions] for table in tables)
        keys: Tensor = pointwise.rotary(k, cos, sin, norms[1], eps)
        self._rotated[id(pages[0])] = keys, v
        return pointwise.rotary(q, cos, sin, norms[0], eps)

    def paged_attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: PagedBatch,
        window: int | None = None,
        cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `ops.paged_attention`, over the keys and values that were kept."""
        keys, values = self._rotated.pop(id(k_pages))
        lengths = [sequence.count for sequence in batch.sequences]
        return attention.attention(q, keys, values, lengths, window, cap, sinks)


def _columns(
    x: Tensor, weight: Tensor, bias: Any = None, out_dtype: Any = None, *, admitted: Any = None
) -> Tensor:
    return products.columns(x, weight, bias, out_dtype)


def _gated(x: Tensor, weight: Tensor, *, admitted: Any = None, activation: str = "silu") -> Tensor:
    return products.gated_columns(x, weight, activation)


def _rows(
    x: Tensor, weight: Tensor, roots: Any, *, admitted: Any = None, widths: Sequence[int] = ()
) -> PartialSums:
    """The leaves, folded to the roots."""
    values = products.rows(x, weight, write_roots(roots), len(roots), [*widths])
    return PartialSums(values, tuple(range(len(roots))))


def _fold(sums: PartialSums, slots: int) -> Tensor:
    return products.fold_roots(sums.values, write_roots(sums.roots), slots)


def _fold_and_norm(sums: PartialSums, finish: Finish) -> tuple[Tensor, Tensor]:
    norm = finish.behind if finish.norm is None else finish.norm
    assert norm is not None  # one of them is there
    weights = (None if each is None else each.weight for each in (finish.norm, finish.behind))
    how = norm.eps, norm.formula, norm.dtype
    root = write_roots(sums.roots)
    return pointwise.fold_and_norm(sums.values, root, finish.residual, *weights, *how)


def _norm(x: Tensor, norm: Norm) -> Tensor:
    return pointwise.norm(x, norm.weight, norm.eps, norm.formula, norm.dtype)


def _norm_by_mass(x: Tensor, largest: Tensor, mass: Tensor, count: int, norm: Norm) -> Tensor:
    """The norm of whole rows. Raises UsageError for parts of rows."""
    if x.shape[1] != count:
        raise UsageError(
            "gradients of a norm over all heads need one rank: use a world of one, or torch.no_grad"
        )
    return _norm(x, norm)


def _choose(
    logits: Tensor, bias: Any, batch: PagedBatch, routing: Routing, held: Any = None
) -> tuple[Tensor, Tensor, None]:
    """The ids and weights that the router chooses; no token is sorted."""
    rule = routing.chosen, routing.sigmoid, routing.over_chosen, routing.scale
    weights, ids = experts.choose_experts(logits, bias, *rule)
    return ids, weights, None


def _expert_sums(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    lanes: Lanes,
    shared: Tensor | SharedRows | None = None,
    activation: str = "silu",
    *,
    sorted_tokens: object = None,
) -> PartialSums:
    if isinstance(shared, SharedRows):
        leaves = _rows(shared.mixed, shared.down, tuple(range(lanes.held))).values
        gate = shared.gate
        shared = leaves if gate is None else ops.gate_lanes(leaves, gate.contiguous())
    part = lanes.experts.start, lanes.total, lanes.held, write_roots(lanes.roots)
    values = experts.experts(x, ids, weights, gate_up, down, *biases, shared, *part, activation)
    return PartialSums(values, tuple(range(len(lanes.roots))))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "column_gemm": _columns,
    "gated_gemm": _gated,
    "leaf_sums": _rows,
    "fold_roots": _fold,
    "fold_and_norm": _fold_and_norm,
    "rms_norm": _norm,
    "norm_by_mass": _norm_by_mass,
    "activate_alone": pointwise.activate,
    "soft_cap": pointwise.soft_cap,
    "embed": vocabulary.embedding,
    "choose_experts": _choose,
    "expert_sums": _expert_sums,
}
"""What stands for each operation of `kernels/ops`, whose arguments they take."""


class RecordedWorld:
    """A world whose all-gather has a gradient: what every rank's outputs ask of a rank's input.

    Sums are taken in the order of ranks. Everything else is the world's own.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`: [ranks, *x.shape]. Collective, and so is its backward."""
        if not torch.is_grad_enabled() or not x.is_floating_point():
            return self._world.all_gather(x)
        # All ranks go back together, also one whose part has no gradient.
        known = x if x.requires_grad else x.detach().requires_grad_()
        return _Gathered.apply(known, self._world)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return in_rank_order(ctx.world.all_to_all(gradients[0].contiguous())), None


class Shared(torch.autograd.Function):
    """Values that all ranks have: the gradient of one is the sum of what each rank derived."""

    @staticmethod
    def forward(ctx: Any, world: World, *values: Tensor) -> tuple[Tensor, ...]:
        """The values."""
        ctx.world = world
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """The sums over ranks, equal on all of them. Collective."""
        gather = ctx.world.all_gather
        return None, *(in_rank_order(gather(gradient.contiguous())) for gradient in gradients)


class Repeated(torch.autograd.Function):
    """A result that every rank has: each rank's loss counts as its share of one loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        """`x` itself."""
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """This rank's share; numbers of ranks are powers of two, so it is exact."""
        return gradients[0] / ctx.ranks, None


def in_rank_order(parts: Tensor) -> Tensor:
    """The sum of [ranks, ...], rank 0 first."""
    return reduce(torch.add, parts.unbind())
