"""The router, top-k gating: which experts a row chooses by its best scores, and their weights.

    score_i = l_i, or s_i + b_i with s_i = 1 / (1 + exp(-l_i))         fp32
    order:  larger score first, then the lower id; NaN last
    p_i     = int64(rint(exp(l_i - max l) * 2^40)), or
              int64(rint(s_i * 2^(40 - x))), x the exponent of the largest s that is counted
    w_i     = fp32(fp64(p_i) / fp64(sum of p)), over the chosen or over all; times the scale in fp32

A NaN is no maximum, and its p is 0. Where the sum is 0, w is +0.

    M, E, k  rows, experts, chosen of a row
    logits [M, E] fp32; ids int32 and weights fp32 [M, k], ids ascending

Sums are of integers, so their order reaches no bit.
"""

import torch

from tpdet.kernels.inputs.experts import Routing
from tpdet.kernels.order import MASS_BITS


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    spans: torch.Tensor,
    routing: Routing,
    held: range | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """logits [M, E] fp32, bias [E] fp32 or None -> ids, weights [M, k]; no token is sorted.

    spans, held: as the GPU's; a step on the CPU has no padding rows.
    """
    logits = logits.contiguous()
    score = 1.0 / (1.0 + torch.exp(-logits)) if routing.sigmoid else logits
    compared = score if bias is None else score + bias
    # Stable, so that equal scores stay in the order of their ids; NaN comes behind -inf.
    order = torch.argsort(_numbers(compared, -torch.inf), dim=1, descending=True, stable=True)
    unknown = torch.isnan(compared).to(torch.int8).gather(1, order)
    order = order.gather(1, torch.argsort(unknown, dim=1, stable=True))
    ids = order[:, : routing.chosen].sort(dim=1).values
    if routing.sigmoid:
        masses = _of_scores(score, score.gather(1, ids) if routing.over_chosen else score)
    else:
        masses = _of_logits(logits)
    own = masses.gather(1, ids)
    total = (own if routing.over_chosen else masses).sum(1, keepdim=True)
    weights = (own.double() / total.clamp(min=1).double()).float() * routing.scale
    return ids.to(torch.int32), weights, None


def _of_logits(logits: torch.Tensor) -> torch.Tensor:
    largest = _numbers(logits, -torch.inf).max(dim=1, keepdim=True).values
    return _integers(torch.exp(logits - largest) * float(1 << MASS_BITS))


def _of_scores(scores: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    largest = _numbers(counted, 0.0).max(dim=1, keepdim=True).values
    _, exponent = torch.frexp(largest)  # largest = m * 2^exponent with m in [1/2, 1)
    return _integers(torch.ldexp(scores.double(), MASS_BITS - (exponent - 1)))


def _integers(values: torch.Tensor) -> torch.Tensor:
    return _numbers(values.double(), 0.0).round_().to(torch.int64)


def _numbers(values: torch.Tensor, instead: float) -> torch.Tensor:
    """`values` with another number in place of NaN."""
    return torch.where(torch.isnan(values), instead, values)
