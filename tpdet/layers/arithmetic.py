"""Which arithmetic the layers use: the contract's, or a stock engine's.

A layer asks its arithmetic for products, attention and the exchange, and does not know which one
it has: the engine decides (`engine/arithmetic_switch.py`). Norms, rotary embedding, activation and
sampling are the same in both.
"""

import torch
from torch.nn.functional import linear

from tpdet.cache.kv import LayerPages
from tpdet.comm.exchange.all_reduce import AllReduceExchange
from tpdet.comm.exchange.fold import RankExchange
from tpdet.comm.world.world import World
from tpdet.kernels import ops
from tpdet.kernels.inputs.packed import Weight, WeightStack
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import Expression
from tpdet.kernels.partial_sums import PartialSums
from tpdet.kernels.stock import attention as stock_attention


class Arithmetic:
    """The contract's (docs/numerics.md): bits that no circumstance changes.

    Its methods are the parts of a layer's work whose additions may be done in more than one order.
    """

    fixed_shapes = True
    """Whether shapes alone decide the launch of prompt attention, so that a graph may hold it."""

    def __init__(self, exchange: RankExchange) -> None:
        self.exchange = exchange
        self.admitted: object = None
        """What the start-up check of the GPU's shape table found for the products; or None."""

    def column(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x [M, K], weight [N, K], bias [N] -> [M, N] in out_dtype (x's if None).

        One chain over K, one rounding.
        """
        return ops.column_gemm(x, weight, bias, out_dtype, admitted=self.admitted)

    def gated(self, x: torch.Tensor, weight: Weight, activation: str) -> torch.Tensor:
        """x [M, K], interleaved weight [2 * I, K] -> act(gate) * up [M, I] in x's dtype.

        Chains in fp32, rounded once after the multiplication.
        """
        return ops.gated_gemm(x, weight, admitted=self.admitted, activation=activation)

    def lay_out(self, weight_LNK: torch.Tensor) -> torch.Tensor:
        """A row layer's weight [L, N, K], anyhow strided, as `row` wants it: [L', N, L K / L'].

        Leaf-major: a leaf's operands have one layout whatever the number of ranks.
        """
        return weight_LNK.contiguous()

    def row(
        self,
        x: torch.Tensor,
        weight_LNK: WeightStack,
        roots: tuple[Expression, ...],
        widths: tuple[int, ...] = (),
    ) -> PartialSums:
        """x [M, L * K], a weight of `lay_out` -> this rank's sums, for `exchange`.

        fp32 sums of leaves or subtrees. widths: of unequal leaves, which lie side by side in the
        weight [1, N, their sum].
        """
        return ops.leaf_sums(x, weight_LNK, roots, admitted=self.admitted, widths=widths)

    def attend(
        self,
        q: torch.Tensor,
        pages: LayerPages,
        batch: PagedBatch,
        window: int | None,
        cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [M, Hq, D] over the pages -> [M, Hq, D], by fixed splits, merged in order.

        cap: of scores, 0 for none; sinks: fp32 [Hq], or None.
        """
        return ops.paged_attention(q, pages.keys, pages.values, batch, window, cap, sinks)


class StockArithmetic(Arithmetic):
    """The library's products, attention and all-reduce: docs/approximate.md. Not deterministic."""

    fixed_shapes = False  # as many keys are gathered as the step's sequences have

    def __init__(self, exchange: RankExchange) -> None:
        super().__init__(exchange)  # nothing is admitted: the library chooses for itself
        self._planned: tuple[PagedBatch, stock_attention.Gathered | None] | None = None

    def column(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`torch.nn.functional.linear` in x's dtype."""
        return linear(x, _dense(weight), bias).to(out_dtype or x.dtype)

    def gated(self, x: torch.Tensor, weight: Weight, activation: str) -> torch.Tensor:
        """Gate and up rounded to x's dtype, as in stock engines; then the activation."""
        return ops.activate_and_multiply(linear(x, _dense(weight)), activation=activation)

    def lay_out(self, weight_LNK: torch.Tensor) -> torch.Tensor:
        """[1, N, L * K]; a weight that lies leaf by leaf is laid out anew in its own memory."""
        leaves, rows, width = weight_LNK.shape
        flat = weight_LNK.permute(1, 0, 2).reshape(1, rows, leaves * width)
        if leaves > 1 and weight_LNK.is_contiguous():
            return weight_LNK.view(flat.shape).copy_(flat)
        return flat

    def row(
        self,
        x: torch.Tensor,
        weight_LNK: WeightStack,
        roots: tuple[Expression, ...],
        widths: tuple[int, ...] = (),
    ) -> PartialSums:
        """One product [1, M, N], rounded to the model's dtype before it is exchanged."""
        assert isinstance(weight_LNK, torch.Tensor)
        return PartialSums(linear(x, weight_LNK[0])[None], (0,))

    def attend(
        self,
        q: torch.Tensor,
        pages: LayerPages,
        batch: PagedBatch,
        window: int | None,
        cap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`stock_attention`, planned once a step. It has neither cap nor sinks: ours then."""
        if cap or sinks is not None:
            return super().attend(q, pages, batch, window, cap, sinks)
        if self._planned is None or self._planned[0] is not batch:
            self._planned = batch, stock_attention.gather_plan(batch, q.device)
        return stock_attention.paged_attention(
            q, pages.keys, pages.values, batch, window, self._planned[1]
        )


def _dense(weight: Weight) -> torch.Tensor:
    """A weight that the library can read: a configuration has packed ones or this arithmetic."""
    assert isinstance(weight, torch.Tensor)
    return weight


def make_arithmetic(approximate: bool, world: World, exchange: RankExchange) -> Arithmetic:
    """Stock arithmetic or the contract's; `exchange` is the strict one."""
    if approximate:
        return StockArithmetic(AllReduceExchange(world, exchange.carrier))
    return Arithmetic(exchange)
