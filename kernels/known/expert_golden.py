"""Golden vectors of experts: what every device chooses and adds alike, as one digest.

Compared at the start of a model with experts. Only what no exponential enters: choices by logits,
with ties, infinities and NaN; the weights of equal logits; and folded lanes of rows whose products
are exact. Contract ids are older than this digest and do not name it.
"""

import hashlib

import torch

from tpdet.kernels import order
from tpdet.kernels.inputs.experts import Lanes, Routing
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.known.fixed_inputs import fixed_values, raw_bytes
from tpdet.kernels.ops import choose_experts, sums_of_rows

EXPERT_GOLDEN_SHA256 = "12d77ef0a8bc1ae919865c6dc0bfa6e295ba0ac5015030f8980d315b1a0507c3"
_SEED = 0x65787074  # "expt"
_ROWS, _EXPERTS, _CHOSEN, _WIDTH = 24, 32, 4, 64


def expert_golden_digest(device: torch.device) -> str:
    """SHA-256 (hex) over choices, weights and folded lanes of fixed inputs on a device."""
    digest = hashlib.sha256()
    batch = make_batch((PagedSequence(0, _ROWS, 0, (0,)),), device)
    logits = golden_logits().to(device)
    ids, _, _ = choose_experts(logits, None, batch, Routing(_EXPERTS, _CHOSEN))
    digest.update(raw_bytes(ids))
    alike = torch.zeros_like(logits)
    for over_chosen in (True, False):
        routing = Routing(_EXPERTS, _CHOSEN, over_chosen=over_chosen, scale=2.5)
        for answer in choose_experts(alike, None, batch, routing)[:2]:
            digest.update(raw_bytes(answer))
    mixed = fixed_values(_SEED, 2, (_ROWS, _CHOSEN, _WIDTH)).to(device)
    weights = fixed_values(_SEED, 3, (_ROWS, _CHOSEN)).abs().to(device)
    # One power of two in each row of the weight: a chain of one product that is exact.
    scale = torch.ldexp(torch.ones(_EXPERTS), torch.arange(_EXPERTS) % 7 - 3)
    down = (torch.eye(_WIDTH) * scale[:, None, None]).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        for name in order.FOLD_ORDERS:
            for count in (1, 4, 8):
                root = order.fold_tree(name, count)
                lanes = Lanes(range(_EXPERTS), _EXPERTS, count, (root,))
                rows = mixed.to(dtype)
                sums = sums_of_rows(rows, ids, weights, down.to(dtype), None, lanes)
                digest.update(raw_bytes(sums.values))
    return digest.hexdigest()


def golden_logits() -> torch.Tensor:
    """fp32 [24, 32] whose rows have, in turn: no ties, some, only ties, infinities, NaN."""
    logits = fixed_values(_SEED, 1, (_ROWS, _EXPERTS))
    logits[1::5] = (logits[1::5] * 4).round() / 4
    logits[2::5] = 0.5
    logits[3::5, 3::4] = torch.inf
    logits[3::5, 2::4] = -torch.inf
    logits[4::5, 1::3] = torch.nan
    return logits
