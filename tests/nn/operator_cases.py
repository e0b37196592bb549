"""Arguments of each operator of `tpdet.nn`, and what torch itself makes of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tpdet.kernels.inputs.gated import gate_and_up, interleaved
from tpdet.nn.operators import attention, experts, pointwise, products, vocabulary

LENGTHS = [70, 1, 9]
ROWS, HEADS, KEY_HEADS, HEAD = sum(LENGTHS), 4, 2, 64
EXPERTS, LANES, CHOSEN = 8, 4, 3


class OperatorCase(NamedTuple):
    """An operator, its arguments, and the same by torch; `exact` None: it has no gradient."""

    name: str
    operator: Any
    arguments: tuple[Any, ...]
    exact: Callable[..., Any] | None = None


def cases(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[OperatorCase]:
    """Every operator once or more, on small random numbers."""
    draw = torch.Generator().manual_seed(7)

    def random(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(device, of)

    def exact(*shape: int) -> torch.Tensor:
        return random(*shape, of=torch.float32)

    x, roots = random(21, 128), "(0+1)+2 3"
    return [
        OperatorCase("columns", products.columns, (x, random(48, 128), random(48), None), _linear),
        OperatorCase(
            "columns_wide",
            products.columns,
            (x, random(48, 128), None, torch.float32),
            _linear,
        ),
        OperatorCase(
            "gated_columns", products.gated_columns, (x, _joined(random, 32), "silu"), _gated
        ),
        OperatorCase("rows", products.rows, (x, random(4, 48, 32), roots, 3, None), _rows),
        OperatorCase(
            "rows_unequal",
            products.rows,
            (x, random(1, 48, 128), roots, 2, [48, 16, 32, 32]),
            _rows,
        ),
        OperatorCase("fold_roots", products.fold_roots, (exact(4, 9, 48), roots, 3), _fold_roots),
        OperatorCase("norm", pointwise.norm, (exact(9, 64), random(64), 1e-6, "rms", dtype), _norm),
        OperatorCase(
            "layer_norm", pointwise.norm, (exact(9, 64), random(2, 64), 1e-5, "layer", dtype), _norm
        ),
        OperatorCase("fold_and_norm", pointwise.fold_and_norm, _finish(random, exact, dtype), _end),
        OperatorCase(
            "rotary", pointwise.rotary, (random(9, 2, 64), *_angles(exact), random(64), 1e-6), _turn
        ),
        OperatorCase("activate", pointwise.activate, (random(9, 32), "gelu_tanh"), _alone),
        *(
            OperatorCase(
                f"multiply_{kind}",
                pointwise.activate_and_multiply,
                (3.0 * random(9, 64), kind, None),
                _multiplied,
            )
            for kind in ("silu", "gelu_tanh")
        ),
        OperatorCase("soft_cap", pointwise.soft_cap, (9.0 * exact(9, 64), 5.0), _cap),
        *_attention_cases(random, exact),
        OperatorCase(
            "embedding",
            vocabulary.embedding,
            (torch.tensor([3, 1, 3, 3], device=device), random(11, 64)),
            functional.embedding,
        ),
        *(
            OperatorCase(
                f"log_probabilities_{heat}",
                vocabulary.log_probabilities,
                (3.0 * exact(5, 100), torch.tensor([3, 99, 0, 7, 7], device=device), heat),
                _picked,
            )
            for heat in (1.0, 0.7)
        ),
        *_expert_cases(random, exact),
    ]


def _joined(random: Callable[..., torch.Tensor], width: int) -> torch.Tensor:
    return interleaved(random(width, 128), random(width, 128))


def _linear(x: Any, weight: Any, bias: Any, dtype: Any) -> torch.Tensor:
    return functional.linear(x, weight, bias)


def _gated(x: Any, weight: Any, activation: str) -> torch.Tensor:
    gate, up = gate_and_up(functional.linear(x, weight))
    return functional.silu(gate) * up


def _rows(x: Any, weight: Any, roots: str, slots: int, widths: Any) -> torch.Tensor:
    leaves = weight[0].split(widths, 1) if widths else [*weight]
    parts = x.split([leaf.shape[1] for leaf in leaves], 1)
    sums = [part @ leaf.t() for part, leaf in zip(parts, leaves, strict=True)]
    return _fold_roots(torch.stack(sums), roots, slots)


def _fold_roots(values: Any, roots: str, slots: int) -> torch.Tensor:
    both = torch.stack([values[:3].sum(0), values[3]])
    return functional.pad(both, (0, 0, 0, 0, 0, slots - 2))


def _norm(x: Any, weight: Any, eps: float, kind: str, dtype: Any) -> torch.Tensor:
    if kind == "layer":
        return functional.layer_norm(x, x.shape[-1:], weight[0], weight[1], eps)
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def _finish(random: Any, exact: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    sums, residual = exact(3, 9, 64), exact(9, 64)
    return sums, "(0+1)+2", residual, random(64), random(64), 1e-6, "rms", dtype


def _end(
    values: Any, root: str, residual: Any, weight: Any, behind: Any, eps: float, *_: Any
) -> Any:
    size = values.shape[-1:]
    h = functional.rms_norm(values.sum(0), size, behind, eps) + residual
    return h, functional.rms_norm(h, size, weight, eps)


def _angles(exact: Any) -> tuple[torch.Tensor, torch.Tensor]:
    angle = exact(9, 32)
    return angle.cos(), angle.sin()


def _turn(x: Any, cos: Any, sin: Any, weight: Any, eps: float) -> torch.Tensor:
    x = functional.rms_norm(x, x.shape[-1:], weight, eps)
    turned = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def _alone(x: Any, activation: str) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _multiplied(gate_up: Any, activation: str, dtype: Any) -> torch.Tensor:
    return _activated(*gate_and_up(gate_up), activation)


def _activated(gate: Any, up: Any, activation: str) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(gate) * up
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1.0) * gate * torch.sigmoid(1.702 * gate)


def _cap(x: Any, cap: float) -> torch.Tensor:
    return torch.tanh(x / cap) * cap


def _attention_cases(random: Any, exact: Any) -> list[OperatorCase]:
    q, k, v = (
        random(ROWS, HEADS, HEAD),
        random(ROWS, KEY_HEADS, HEAD),
        random(ROWS, KEY_HEADS, HEAD),
    )
    ways = {"": (None, 0.0, None), "_window": (9, 0.0, None), "_capped": (None, 2.0, None),
            "_sinks": (None, 0.0, exact(HEADS))}  # fmt: skip
    return [
        OperatorCase(f"attention{way}", attention.attention, (q, k, v, LENGTHS, *seen), _attend)
        for way, seen in ways.items()
    ]


def _attend(
    q: Any, k: Any, v: Any, lengths: list[int], window: Any, cap: float, sinks: Any
) -> torch.Tensor:
    results = []
    for queries, keys, values in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        keys, values = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (keys, values))
        score = torch.einsum("thd,shd->hts", queries, keys) / HEAD**0.5
        score = torch.tanh(score / cap) * cap if cap else score
        place = torch.arange(len(queries), device=q.device)
        hidden = place[:, None] < place
        if window is not None:
            hidden = hidden | (place[:, None] - place >= window)
        weight = score.masked_fill(hidden, -torch.inf).exp()
        mass = weight.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
        results.append(torch.einsum("hts,shd->thd", weight / mass, values))
    return torch.cat(results)


def _picked(logits: Any, ids: Any, temperature: float) -> torch.Tensor:
    return -functional.cross_entropy(logits / temperature, ids, reduction="none")


def _expert_cases(random: Any, exact: Any) -> list[OperatorCase]:
    logits = exact(21, EXPERTS)
    ids = logits.topk(CHOSEN).indices.sort(1).values.int()
    weights = logits.softmax(1).gather(1, ids.long())
    gate_up = torch.stack([_joined(random, 32) for _ in range(EXPERTS)])
    products_ = gate_up / 8, random(EXPERTS, 128, 32) / 5
    biases, shared = (random(EXPERTS, 64), random(EXPERTS, 128)), exact(LANES, 21, 128)
    last = 0, EXPERTS, LANES, "(0+1)+2 3"
    routers = [
        OperatorCase(
            f"choose_experts{number}",
            experts.choose_experts,
            (logits, exact(EXPERTS) / 9 if sigmoid else None, CHOSEN, sigmoid, over, 1.5),
            _chosen,
        )
        for number, (sigmoid, over) in enumerate([(False, True), (False, False), (True, True)])
    ]
    x = random(21, 128)
    return [
        *routers,
        OperatorCase(
            "experts",
            experts.experts,
            (x, ids, weights, *products_, None, None, None, *last, "silu"),
            _mixed,
        ),
        OperatorCase(
            "experts_clamped",
            experts.experts,
            (x, ids, weights, *products_, *biases, shared, *last, "clamped"),
            _mixed,
        ),
    ]


def _chosen(
    logits: Any, bias: Any, chosen: int, sigmoid: bool, over: bool, scale: float
) -> tuple[Any, Any]:
    scores = torch.sigmoid(logits) if sigmoid else logits.softmax(1)
    order = scores if bias is None else scores + bias
    ids = order.topk(chosen).indices.sort(1).values
    own = scores.gather(1, ids)
    return scale * own / (own if over else scores).sum(1, keepdim=True), ids.int()


def _mixed(
    x: Any,
    ids: Any,
    weights: Any,
    gate_up: Any,
    down: Any,
    gate_up_bias: Any,
    down_bias: Any,
    shared: Any,
    first: int,
    total: int,
    lanes: int,
    roots: str,
    activation: str,
) -> torch.Tensor:
    """Every expert of every row, with weight 0 where it was not chosen."""
    dense = torch.zeros(len(x), total, dtype=weights.dtype, device=x.device)
    dense = dense.scatter(1, ids.long(), weights)
    between = torch.einsum("mh,eih->emi", x, gate_up)
    if gate_up_bias is not None:
        between = between + gate_up_bias[:, None]
    mixed = _activated(*gate_and_up(between.flatten(0, 1)), activation).unflatten(0, (total, -1))
    y = torch.einsum("emi,ehi->emh", mixed, down)
    if down_bias is not None:
        y = y + down_bias[:, None]
    by_lane = (dense.t()[..., None] * y).unflatten(0, (lanes, -1)).sum(1)
    by_lane = by_lane if shared is None else by_lane + shared
    return torch.stack([by_lane[:3].sum(0), by_lane[3]])
