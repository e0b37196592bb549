"""What the libraries under the CPU path compute, as one digest: products, functions, small numbers.

A BLAS chooses its code by the processor's maker, its instruction set and environment variables, and
the bits follow. So processors and settings are named by what they make of fixed inputs, which come
from Philox words and are equal everywhere.
"""

import hashlib
from collections.abc import Iterator

import torch

from tpdet.kernels.cpu.gemm.column import COLUMNS, ROWS, TALL_ROWS
from tpdet.kernels.exact.philox import philox_words
from tpdet.kernels.known.fixed_inputs import raw_bytes
from tpdet.kernels.order import PAGE_TOKENS, TILE_TOKENS

_SEED = 0x6C696273  # "libs"
_CHAINS = (16, 64, 176, 256, 384, 512, 896, 1536, 2048, 4096, 8192, 14336)
"""Lengths of products: a BLAS cuts long ones by blocks of its own."""
_HEADS = (16, 64, 80, 128, 256)
_COUNT = 1 << 16
_SMALL = 2.0**-70
"""Times itself it is subnormal, with which a processor may be set to compute as zero."""


def library_digest() -> str:
    """SHA-256 (hex) over products and functions of fixed inputs, by this process's libraries."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the CPU path does
    try:
        digest = hashlib.sha256()
        for answer in _answers():
            digest.update(raw_bytes(answer))
        return digest.hexdigest()
    finally:
        torch.set_num_threads(threads)


def _answers() -> Iterator[torch.Tensor]:
    words = philox_words(torch.arange(_COUNT), seed=_SEED, position=0, choice=0)
    values = ((words >> 8) - (1 << 23)).float() * 2.0**-23
    for k in _CHAINS:
        x, weight = _matrix(values, TALL_ROWS, k), _matrix(values, COLUMNS, k)
        for rows in (ROWS, TALL_ROWS):
            yield torch.mm(x[:rows], weight.t())
    for head in _HEADS:
        for k, n in ((head, PAGE_TOKENS), (TILE_TOKENS, head)):
            x, y = (_matrix(values, 2 * rows, k).view(2, rows, k) for rows in (ROWS, n))
            yield torch.bmm(x, y.transpose(1, 2).contiguous())
    yield torch.mm(_matrix(values, ROWS, 64) * _SMALL, _matrix(values, 64, 64) * _SMALL)
    yield values * 2.0**-130 * 0.5
    for numbers in (values, values.double()):
        yield from (torch.exp(numbers * 20), torch.log(numbers.abs() + 2.0**-30))
        yield from (torch.sqrt(numbers.abs()), torch.cos(numbers * 99), torch.sin(numbers * 99))
        yield torch.tanh(numbers * 4)


def _matrix(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The values in turn, as often as it takes; the shape moves where they begin."""
    count = rows * columns
    turned = values.roll(rows + columns)
    return turned.repeat(-(-count // len(values)))[:count].view(rows, columns)
