"""Fixed-point masses against rounded conversions, in Triton's interpreter or on a GPU."""

import torch
import triton
import triton.language as tl

from tpdet.kernels.cuda.sampling import noise


@triton.jit
def masses_of(x, ours, plain, BLOCK: tl.constexpr):
    """Fixed-point masses against 0, as the kernels make them and by rounding and conversion."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(ours + at, noise.fixed_point(value, 0.0))
    scaled = tl.exp2((value - 0.0) * 1.4426950408889634).to(tl.float64) * 1099511627776.0
    rounded = (scaled + 6755399441055744.0) - 6755399441055744.0
    tl.store(plain + at, rounded.to(tl.int64))


def masses_are_rounded_conversions(device="cpu", count=1 << 16):
    steps = torch.arange(count - 1024, device=device, dtype=torch.float32) * (-40.0 / count)
    x = torch.cat([steps, torch.full((1024,), -torch.inf, device=device)])
    ours, plain = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
    masses_of[count // 1024,](x, ours, plain, 1024, enable_fp_fusion=False)
    assert torch.equal(ours, plain) and int(ours.max()) == 1 << 40
