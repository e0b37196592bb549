"""Golden vectors: operations that give the same bits on every device, as one digest.

`golden_digest` is recomputed at every start and compared with `order.GOLDEN_SHA256`, which is part
of the contract id: a library or a change that alters one of these bits cannot go unnoticed.
"""

import hashlib
import struct

import torch

from tpdet.kernels import order
from tpdet.kernels.cpu.pointwise.finish import fold_and_norm
from tpdet.kernels.cpu.pointwise.norm import rms_norm
from tpdet.kernels.exact.philox import philox_words
from tpdet.kernels.exact.rotary_frequencies import RotarySpec, inverse_frequencies
from tpdet.kernels.exact.rotary_tables import rotary_table
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.known.fixed_inputs import raw_bytes
from tpdet.kernels.partial_sums import whole_sum

_SPECS = (
    RotarySpec("default", 10000.0, 64),
    RotarySpec("default", 1000000.0, 128),
    RotarySpec("linear", 10000.0, 64, factor=4.0),
    RotarySpec("llama3", 500000.0, 128, factor=8.0, original_max_position=8192),
    RotarySpec("yarn", 1000000.0, 128, factor=4.0, original_max_position=32768),
)
_SEED = 0x7470646574  # "tpdet"
_LARGEST_TOTAL = 60_000.0  # finite in fp16


def golden_digest() -> str:
    """SHA-256 (hex) over fold trees, rotary tables, Philox words and norms of fixed inputs."""
    digest = hashlib.sha256()
    for name in order.FOLD_ORDERS:
        for leaves in (1, 2, 4, 8, 16):
            digest.update(order.describe(order.fold_tree(name, leaves)).encode())
    for spec in _SPECS:
        frequencies = inverse_frequencies(spec)
        digest.update(struct.pack(f"<{len(frequencies)}f", *frequencies))
        for table in rotary_table(spec, 300):
            digest.update(raw_bytes(table[::7]))
    words = philox_words(torch.arange(4096), seed=_SEED, position=17, choice=3)
    digest.update(raw_bytes(words))
    x = ((words - (1 << 31)).double() * 2.0**-28).float().view(16, 256)
    stream = torch.cat([x, hard_rows(x)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        norm = Norm(x[0].to(dtype), 1e-6)
        digest.update(raw_bytes(rms_norm(stream, norm)))
        total = stream.flip(0).clamp(-_LARGEST_TOTAL, _LARGEST_TOTAL).to(dtype)
        for rows in fold_and_norm(whole_sum(total), Finish(stream, norm)):
            digest.update(raw_bytes(rows))
    return digest.hexdigest()


def hard_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows of a residual stream in fp32 where a norm goes wrong first, from x [>= 6, N].

    In turn: all subnormal (down to 2^-149), one value of 3e38 among small ones, all near 2^127,
    exponents from -149 to 127 side by side, neighbours that cancel but for their last bits, zeros
    of both signs.
    """
    n = x.shape[1]
    tiny = torch.ldexp(torch.tensor(1.0), torch.tensor(-149))
    steps = torch.arange(n)
    spread = -149 + 276 * steps // (n - 1)
    large = torch.where(steps == n // 3, 3e38, x[1])
    near = torch.copysign(torch.ldexp(torch.tensor(1.0), torch.tensor(127)), x[2])
    wide = torch.copysign(torch.ldexp(torch.ones(n, dtype=torch.float64), spread).float(), x[3])
    base = x[4, steps // 2 * 2]
    cancelling = torch.where(steps % 2 == 0, base, -torch.nextafter(base, base * 2))
    zeros = torch.where(steps % 2 == 0, 0.0, -0.0)
    return torch.stack([(steps + 1) * tiny, large, near, wide, cancelling, zeros])
