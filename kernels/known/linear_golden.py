"""Golden vectors of linear attention: gates and factors, equal on every device, as one digest.

Compared at the start of a model with linear layers, whose contract id names the digest
(`order.LINEAR_GOLDEN_SHA256`). Only what no sum of rounded products enters: log decays, decays of
their sums, strengths, and factors of keys.
"""

import hashlib

import torch

from tpdet.kernels.cpu.pointwise.norm import reciprocal_length
from tpdet.kernels.exact.decays import decay_of, log_decays, sigmoid
from tpdet.kernels.inputs.linear_state import LENGTH_EPS, DeltaGates
from tpdet.kernels.known.fixed_inputs import fixed_values, raw_bytes
from tpdet.kernels.known.golden import hard_rows
from tpdet.kernels.order import CHUNK_TOKENS

_SEED = 0x6C696E65  # "line"
_HEADS, _SIZE = 32, 128


def linear_golden_digest() -> str:
    """SHA-256 (hex) over the gates and factors of fixed inputs."""
    digest = hashlib.sha256()
    a, b = golden_gates()
    rates, biases = fixed_values(_SEED, 3, (2, _HEADS)) * 4.0
    logs = log_decays(a, DeltaGates(rates, biases))
    sums = logs.cumsum(0)
    for answer in (logs, decay_of(sums), decay_of(sums[-1] - sums), sigmoid(b)):
        digest.update(raw_bytes(answer))
    keys = fixed_values(_SEED, 4, (16, _SIZE))
    for rows in (keys, keys.bfloat16().float(), hard_rows(keys)):
        digest.update(raw_bytes(reciprocal_length(rows, LENGTH_EPS)))
    return digest.hexdigest()


def golden_gates() -> tuple[torch.Tensor, torch.Tensor]:
    """a and b [64, 32] of a chunk, from near nothing to infinite."""
    a, b = (fixed_values(_SEED, n, (CHUNK_TOKENS, _HEADS)) * 8.0 for n in (1, 2))
    a[5, :4] = torch.tensor([torch.inf, -torch.inf, 1e30, -1e30])
    b[6, :4] = torch.tensor([torch.inf, -torch.inf, 100.0, -100.0])
    a[7, 4] = torch.nan
    return a, b
