"""Golden vectors of an fp8 KV cache: codes and exponents of fixed rows, as one digest.

Compared at the start of a model whose keys and values are kept in fp8; its contract id names the
digest (`order.KV_GOLDEN_SHA256`). `golden_rows` are also what every device's store is held to.
"""

import hashlib

import torch

from tpdet.kernels.exact.fp8_rows import decode_rows, encode_pairs
from tpdet.kernels.known.fixed_inputs import fixed_values, raw_bytes
from tpdet.kernels.known.golden import hard_rows

_SEED = 0x6B766638  # "kvf8"
_SIZE = 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kv_golden_digest() -> str:
    """SHA-256 (hex) over what fixed rows are stored as, and over what that reads as."""
    digest = hashlib.sha256()
    for dtype in _DTYPES:
        rows = golden_rows(dtype)
        for stored in encode_pairs(rows, rows.flip(0)):
            for part in (*stored, decode_rows(*stored, dtype).nan_to_num(nan=-1.0)):
                digest.update(raw_bytes(part))
    return digest.hexdigest()


def golden_rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows [R, 64]: usual ones, hard ones, and those where the rule has an edge.

    Of edges: every number that is half way between two codes, largest values around each bound of
    an exponent, all-zero rows of both signs, one huge channel, saturation, NaN and infinities.
    """
    usual = fixed_values(_SEED, 1, (16, _SIZE), torch.device("cpu"))
    spread = usual * torch.ldexp(torch.ones(16), torch.arange(-120, 136, 16))[:, None]
    near = torch.tensor([1.74, 1.75, 1.7578125, 1.8125, 1.99, 1.0, 0.99, 1.0078125])
    bounds = usual[:8] / 8.0
    bounds[:, 7] = near
    bounds = torch.cat([bounds * s for s in (1.0, -(2.0**-126), 2.0**15, 2.0**16, -(2.0**120))])
    step = torch.arange(2 * 127)
    huge = usual[:6].clone()
    huge[0, 5], huge[1, 0], huge[2, 63] = 60000.0, -57344.0, 3e38
    huge[3, 9], huge[4, 1], huge[5, 62] = torch.nan, torch.inf, -torch.inf
    zeros = torch.zeros(3, _SIZE)
    zeros[1] = -0.0
    zeros[2, 3] = 2.0**-149
    return torch.cat([usual, spread, hard_rows(usual), bounds, _halves(step), huge, zeros]).to(
        dtype
    )


def _halves(step: torch.Tensor) -> torch.Tensor:
    """Rows of neighbouring codes and what is half way between them; the largest value is 448."""
    codes = (step // 2).clamp(max=125).to(torch.uint8)
    exponents = torch.tensor(127, dtype=torch.uint8)
    low, high = (decode_rows(c, exponents, torch.float32) for c in (codes, codes + 1))
    values = torch.where(step % 2 == 0, low, (low + high) / 2)
    rows = torch.zeros(8, _SIZE)
    rows[:, 0] = 448.0
    rows[:, 1:33] = torch.nn.functional.pad(values, (0, 2)).view(8, 32)
    return torch.cat([rows, -rows * 2.0**-20])
