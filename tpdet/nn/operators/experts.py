"""The router's choice of experts, and the sums of experts by lanes.

Shapes: M rows, E experts of a rank of `total`, k chosen of a row, H hidden, I width of an expert.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from tpdet.kernels import ops
from tpdet.kernels.inputs.activations import (
    CLAMP_LIMIT,
    CLAMP_STEEPNESS,
    CLAMPED,
    GELU_CUBIC,
    GELU_LINEAR,
)
from tpdet.kernels.inputs.experts import Lanes, Routing
from tpdet.kernels.inputs.gated import gate_and_up, interleaved
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.inputs.product import read_roots
from tpdet.kernels.order import operands
from tpdet.nn.operators.attention import page_count
from tpdet.nn.operators.declare import DEVICES, operator, wide


def _chosen_shape(logits: Tensor, bias: Any, chosen: int, *_: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], chosen
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


def _chosen_weights(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    """The gradient of logits by that of weights; the choice itself has none."""
    logits, ids = ctx.saved_tensors
    sigmoid, over_chosen, scale = ctx.rule
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        score = torch.sigmoid(leaf) if sigmoid else (leaf - leaf.detach().amax(1, True)).exp()
        own = score.gather(1, ids.long())
        weights = own / (own if over_chosen else score).sum(1, keepdim=True) * scale
    (result,) = torch.autograd.grad([weights], [leaf], [gradient])
    return result, None, None, None, None, None


def _keep_choice(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.rule = inputs[3:]


@operator(_chosen_shape)
def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    chosen: int,
    sigmoid: bool = False,
    over_chosen: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """logits fp32 [M, E], bias or None -> weights fp32, ascending ids int32 [M, k]: `Routing`."""
    count = len(logits)
    one = PagedSequence(0, count, 0, (0,) * page_count(count))
    routing = Routing(logits.shape[1], chosen, sigmoid, over_chosen, scale)
    batch = make_batch((one,), logits.device)
    ids, weights, _ = ops.choose_experts(logits, bias, batch, routing)
    return weights, ids


choose_experts.register_autograd(_chosen_weights, setup_context=_keep_choice)


@operator(
    lambda x, ids, weights, gate_up, down, *others: weights.new_empty(
        len(read_roots(others[-2])), x.shape[0], down.shape[1]
    )
)
def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    first: int,
    total: int,
    lanes: int,
    roots: str,
    activation: str,
) -> Tensor:
    """x [M, H], ids and weights [M, k] -> roots of this rank's lanes [slots, M, H] fp32.

    gate_up [E, 2 * I, H] interleaved, down [E, H, I], biases [E, 2 * I] and [E, H] or None: of the
    experts `first`, `first + 1`, ... of `total`, in `lanes` equal groups. shared: fp32
    [lanes, M, H], which is added to each lane last, or None. roots: such as "(0+1) 2", over lanes.
    """
    part = Lanes(range(first, first + len(down)), total, lanes, read_roots(roots))
    biases = gate_up_bias, down_bias
    return ops.expert_sums(
        x, ids, weights, gate_up, down, biases, part, shared, activation=activation
    ).values


@custom_op("tpdet::experts_backward", mutates_args=(), device_types=DEVICES)
def _experts_backward(
    gradient: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    first: int,
    activation: str,
) -> list[Tensor]:
    """gradient: of the lanes [lanes, M, H] -> of x, the weights, both products and their biases.

    The rows of one expert are all different, so no call adds two numbers to one place.
    """
    of_x, of_weights = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(weights)
    results: list[list[Tensor]] = [[], [], [], []]
    of_lane = len(down) // len(gradient)
    for index in range(len(down)):
        rows, choice = torch.where(ids == first + index)
        entry, leaving = wide(gate_up[index]), wide(down[index])
        inputs, outward = wide(x[rows]), gradient[index // of_lane, rows]
        between = inputs @ entry.t()
        if gate_up_bias is not None:
            between = between + wide(gate_up_bias[index])
        mixed, by_gate, by_up = _gated_slopes(*gate_and_up(between), activation)
        y = mixed @ leaving.t()
        if down_bias is not None:
            y = y + wide(down_bias[index])
        of_weights[rows, choice] = (outward * y).sum(1)
        of_y = outward * weights[rows, choice, None]
        of_mixed = of_y @ leaving
        of_between = interleaved((of_mixed * by_gate).t(), (of_mixed * by_up).t()).t()
        of_x[rows] = of_x[rows] + of_between @ entry
        own = of_between.t() @ inputs, of_y.t() @ mixed, of_between.sum(0), of_y.sum(0)
        for result, part in zip(results, own, strict=True):
            result.append(part)
    types = gate_up.dtype, down.dtype, gate_up.dtype, down.dtype
    stacked = [torch.stack(parts).to(dtype) for parts, dtype in zip(results, types, strict=True)]
    return [of_x.to(x.dtype), of_weights, *stacked]


@_experts_backward.register_fake
def _(gradient: Tensor, *inputs: Any) -> list[Tensor]:
    x, _, weights, gate_up, down = inputs[:5]
    biases = gate_up.new_empty(gate_up.shape[:2]), down.new_empty(down.shape[:2])
    return [*map(torch.empty_like, (x, weights, gate_up, down)), *biases]


def _gated_slopes(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """y = act(gate) * up as `gated_values`, and its derivatives by gate and by up."""
    free_gate = free_up = torch.ones_like(gate)
    steep = steepness = torch.ones_like(gate)
    if activation == CLAMPED:
        free_gate, free_up = (gate <= CLAMP_LIMIT).to(gate), (up.abs() <= CLAMP_LIMIT).to(up)
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT) + 1.0
        steep = steepness = steep * CLAMP_STEEPNESS
    if activation == "gelu_tanh":
        square = gate.square() * GELU_CUBIC
        steep, steepness = GELU_LINEAR + square, GELU_LINEAR + 3.0 * square
    share = torch.sigmoid(gate * steep)
    value = gate * share
    slope = share + value * (1.0 - share) * steepness
    return value * up, slope * up * free_gate, value * free_up


def _keep_experts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.shared, (ctx.first, _, ctx.lanes, ctx.roots, ctx.activation) = inputs[7], inputs[8:]


def _of_experts(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, ids, weights, gate_up, down, gate_up_bias, down_bias = ctx.saved_tensors
    by_lane: list[Any] = [None] * ctx.lanes
    for root, expression in zip(gradient, read_roots(ctx.roots), strict=True):
        for lane in operands(expression):
            by_lane[lane] = root
    lanes = torch.stack(by_lane)
    products = gate_up, down, gate_up_bias, down_bias
    results = _experts_backward(lanes, x, ids, weights, *products, ctx.first, ctx.activation)
    of_x, of_weights, of_gate_up, of_down, *of_biases = results
    biases = (
        None if bias is None else of for bias, of in zip(products[2:], of_biases, strict=True)
    )
    shared = None if ctx.shared is None else lanes
    return (of_x, None, of_weights, of_gate_up, of_down, *biases, shared, *[None] * 5)


experts.register_autograd(_of_experts, setup_context=_keep_experts)
