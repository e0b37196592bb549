"""The short convolution of linear attention: four taps of each channel, then SiLU.

    y[p, c] = round(silu(((w0 * x[p-3] + w1 * x[p-2]) + w2 * x[p-1]) + w3 * x[p]))      fp32, no fma

x at positions below 0 is +0. SiLU is that of `cpu/pointwise/activation.py`.
"""

import torch

from tpdet.kernels.cpu.pointwise.activation import activate_alone
from tpdet.kernels.inputs.linear_state import TAPS, LinearState
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.kernels.order import CHUNK_TOKENS


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, state: LinearState, batch: PagedBatch
) -> torch.Tensor:
    """x [M, C], weight [C, 4] -> [M, C] in x's dtype; stores x in the state's ring of inputs.

    Of a run longer than the ring its last rows are stored, and those before each snapshot in its
    tail. Rows that no sequence names are zeros.
    """
    ring = state.inputs.shape[1]
    taps = weight.float().t()
    y = torch.zeros_like(x)
    for sequence in batch.sequences:
        if not sequence.count:
            continue
        rows = x[sequence.first_row : sequence.first_row + sequence.count]
        stored = state.inputs[sequence.slot]
        before = torch.arange(sequence.start - TAPS + 1, sequence.start) % ring
        seen = torch.cat([stored[before], rows])
        wide = seen.float()
        total = taps[0] * wide[: sequence.count]
        for tap in range(1, TAPS):
            total = total + taps[tap] * wide[tap : tap + sequence.count]
        y[sequence.first_row : sequence.first_row + sequence.count] = activate_alone(
            total, "silu"
        ).to(x.dtype)
        for chunk, snapshot in sequence.kept.items():
            first = chunk * CHUNK_TOKENS - sequence.start
            state.tails[snapshot - len(state.inputs)] = seen[first : first + TAPS - 1]
        kept = seen[-ring:]
        stored[torch.arange(sequence.length - len(kept), sequence.length) % ring] = kept
    return y
