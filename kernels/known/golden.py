"""Golden vectors: operations that give the same bits on every device, as one digest.

`golden_digest` is recomputed at every start and compared with `order.GOLDEN_SHA256`, which is part
of the contract id: a library or a change that alters one of these bits cannot go unnoticed.
"""

import hashlib
import struct

import torch

from tpdet.kernels import order
from tpdet.kernels.cpu.pointwise.norm import rms_norm
from tpdet.kernels.exact.philox import philox_words
from tpdet.kernels.exact.rotary_frequencies import RotarySpec, inverse_frequencies
from tpdet.kernels.exact.rotary_tables import rotary_table
from tpdet.kernels.inputs.norm import Norm

_SPECS = (
    RotarySpec("default", 10000.0, 64),
    RotarySpec("default", 1000000.0, 128),
    RotarySpec("linear", 10000.0, 64, factor=4.0),
    RotarySpec("llama3", 500000.0, 128, factor=8.0, original_max_position=8192),
    RotarySpec("yarn", 1000000.0, 128, factor=4.0, original_max_position=32768),
)
_SEED = 0x7470646574  # "tpdet"


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
            digest.update(_bytes(table[::7]))
    words = philox_words(torch.arange(4096), seed=_SEED, position=17, choice=3)
    digest.update(_bytes(words))
    x = ((words - (1 << 31)).double() * 2.0**-28).float().view(16, 256)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        digest.update(_bytes(rms_norm(x.to(dtype), Norm(x[0].to(dtype), 1e-6))))
    return digest.hexdigest()


def _bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()
