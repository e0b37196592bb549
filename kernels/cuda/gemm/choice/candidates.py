"""Tiles that a column product may be tuned over, by row bucket: all of one bit class.

They reach further than the static choice of `gemm_variants`: more stages (a narrow shard has few
programs, so each must keep many bytes in flight), tiles of 8 or 16 weight rows with 512 steps of K
(many programs, `mma.sync`), and the weight on the M side of descriptor tiles.
"""

from collections.abc import Iterator
from dataclasses import replace

from tpdet.kernels.cuda.gemm.choice.root_form import TRADES_DEPTH
from tpdet.kernels.cuda.gemm.choice.variants import Variant
from tpdet.kernels.cuda.hardware import H200

_NARROW = 3072  # columns up to which one tile of 64 a program leaves processors idle
_WIDE = 12288

# rows, columns, depth, warps, stages
_POINTER_SWAP_16 = (
    (16, 64, 128, 4, 5), (16, 64, 128, 4, 4), (16, 64, 128, 4, 7), (16, 64, 256, 4, 3),
    (16, 64, 256, 4, 4), (16, 128, 128, 4, 4), (16, 128, 64, 4, 6),
)  # fmt: skip
_POINTER_SWAP_32 = (
    (32, 64, 128, 4, 4), (32, 64, 128, 4, 6), (32, 64, 256, 4, 3), (32, 64, 256, 4, 4),
    (32, 128, 128, 4, 4), (32, 128, 64, 4, 6),
)  # fmt: skip
_POINTER_SWAP_64 = (
    (64, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 128, 64, 4, 5), (64, 128, 128, 4, 3),
)  # fmt: skip
_POINTER_64 = ((64, 64, 128, 4, 4), (64, 32, 128, 4, 4), (64, 128, 64, 4, 5), (64, 128, 64, 4, 7))
# Many small programs: one chain of mma.sync each.
# No pointer tile of 8 x 64: ptxas serialises its wgmma (warning C7515).
_NARROW_SWAP_8 = (
    (8, 16, 512, 1, 4), (8, 16, 512, 2, 4), (8, 16, 256, 2, 6), (8, 32, 256, 2, 5),
    (8, 32, 512, 4, 4),
)  # fmt: skip
_NARROW_SWAP_16 = (
    (16, 16, 512, 1, 4), (16, 16, 512, 4, 4), (16, 16, 256, 2, 6), (16, 32, 256, 2, 5),
    (16, 32, 512, 4, 4), (16, 64, 128, 4, 9), (16, 64, 256, 4, 5),
)  # fmt: skip
_NARROW_PLAIN_16 = (
    (16, 8, 512, 4, 4),
    (16, 16, 512, 2, 4),
    (16, 16, 256, 4, 6),
    (16, 32, 256, 4, 5),
)
_NARROW_32 = ((32, 16, 256, 4, 5), (32, 32, 256, 4, 4), (32, 32, 256, 4, 5), (32, 32, 128, 4, 6))
_NARROW_64 = (
    (64, 32, 256, 4, 3), (64, 32, 256, 4, 4), (64, 32, 128, 4, 7), (64, 16, 256, 4, 4),
    (32, 32, 256, 4, 5),
)  # fmt: skip

_DESCRIPTOR_SWAP_8 = ((8, 64, 128, 4, 6), (8, 64, 128, 4, 11), (8, 64, 256, 4, 5))
_DESCRIPTOR_SWAP_16 = (
    (16, 64, 128, 4, 6), (16, 64, 128, 4, 10), (16, 64, 256, 4, 5), (16, 128, 128, 4, 5),
)  # fmt: skip
_DESCRIPTOR_SWAP_32 = (
    (32, 64, 128, 4, 5), (32, 64, 128, 4, 8), (32, 64, 256, 4, 4), (32, 128, 64, 4, 7),
    (32, 128, 128, 4, 4),
)  # fmt: skip
_DESCRIPTOR_SWAP_64 = (
    (64, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 128, 64, 4, 6), (64, 128, 128, 4, 4),
    (64, 128, 64, 8, 6),
)  # fmt: skip
_DESCRIPTOR_64 = (
    (64, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 128, 64, 4, 5), (64, 128, 64, 4, 8),
    (64, 128, 128, 4, 4), (64, 256, 64, 4, 4), (64, 256, 64, 8, 4),
)  # fmt: skip
_DESCRIPTOR_NARROW_64 = ((64, 32, 128, 4, 6), (64, 32, 256, 4, 4), (64, 16, 256, 4, 5))
_DESCRIPTOR_128 = (
    (128, 64, 64, 4, 6), (128, 64, 128, 4, 4), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4),
    (128, 128, 64, 8, 6), (128, 128, 128, 8, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
)  # fmt: skip
_DESCRIPTOR_SWAP_128 = ((128, 64, 128, 4, 4), (128, 128, 64, 8, 5), (128, 128, 128, 8, 3))
_TRADES_MANY = ((128, 256, 64, 4, 3), (128, 128, 64, 4, 5), (128, 128, 64, 4, 6))
_DESCRIPTOR_MANY = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4),
    (128, 128, 64, 8, 4), (128, 128, 128, 8, 3), (128, 64, 64, 4, 6), (64, 128, 64, 4, 6),
)  # fmt: skip


def column_candidates(
    m: int, n: int, k: int, *, wide_out: bool, descriptors: bool
) -> tuple[Variant, ...]:
    """Tiles worth measuring for `m` rows (a bucket) of a [n, k] weight; `wide_out`: fp32 output.

    Without repeats, each with a depth that divides k, none over the shared memory.
    """
    raw = [*_pointer(m, n), *(_descriptor(m, n) if descriptors else ())]
    if descriptors and not wide_out and m >= 512 and n % 8 == 0 and k % TRADES_DEPTH == 0:
        raw += [replace(t, trades=True) for t in _tiles(_TRADES_MANY, descriptor=True)]
    found = (_pieces(tile.at(k), wide_out) for tile in raw)
    size = 4 if wide_out else 2
    return tuple(dict.fromkeys(t for t in found if t.shared_bytes(size) <= H200.shared_bytes))


def _pointer(m: int, n: int) -> Iterator[Variant]:
    narrow = n <= _NARROW
    if m <= 8:
        yield from _tiles(narrow * _NARROW_SWAP_8, swap=True)
    if m <= 16:
        yield from _tiles(_POINTER_SWAP_16 + narrow * _NARROW_SWAP_16, swap=True)
        yield from _tiles(narrow * _NARROW_PLAIN_16)
    elif m <= 32:
        yield from _tiles(_POINTER_SWAP_32, swap=True)
        yield from _tiles(narrow * (_NARROW_32 + _NARROW_PLAIN_16))
    elif m <= 64:
        yield from _tiles(_POINTER_SWAP_64 + narrow * _POINTER_SWAP_32, swap=True)
        yield from _tiles(_POINTER_64 + narrow * _NARROW_64)
    elif m <= 128:
        yield from _tiles(((64, 64, 128, 4, 4), (64, 128, 64, 4, 5)))
    elif m > 128 and n <= _NARROW:
        yield from _tiles(((128, 128, 64, 8, 3),))


def _descriptor(m: int, n: int) -> Iterator[Variant]:
    narrow = n <= _NARROW
    if m <= 8:
        yield from _tiles(_DESCRIPTOR_SWAP_8, swap=True, descriptor=True)
    if m <= 16:
        yield from _tiles(_DESCRIPTOR_SWAP_16, swap=True, descriptor=True)
    elif m <= 32:
        yield from _tiles(_DESCRIPTOR_SWAP_32, swap=True, descriptor=True)
        yield from _tiles(narrow * _DESCRIPTOR_SWAP_16, swap=True, descriptor=True)
    elif m <= 64:
        yield from _tiles(
            _DESCRIPTOR_SWAP_64 + narrow * _DESCRIPTOR_SWAP_32, swap=True, descriptor=True
        )
        yield from _tiles(_DESCRIPTOR_64 + narrow * _DESCRIPTOR_NARROW_64, descriptor=True)
    elif m <= 256:
        yield from _tiles(_DESCRIPTOR_64 + _DESCRIPTOR_128, descriptor=True)
        yield from _tiles(_DESCRIPTOR_SWAP_128 + _DESCRIPTOR_SWAP_64, swap=True, descriptor=True)
        yield from _tiles(narrow * _DESCRIPTOR_NARROW_64, descriptor=True)
        if n > _NARROW:
            yield from (
                replace(tile, ctas=2) for tile in _tiles(_DESCRIPTOR_64[:3], descriptor=True)
            )
    else:
        many = _DESCRIPTOR_MANY if n <= _WIDE or m <= 512 else _DESCRIPTOR_MANY[:6]
        yield from _tiles(many, descriptor=True)
        if m <= 512:
            yield from _tiles(_DESCRIPTOR_64 + _DESCRIPTOR_128, descriptor=True)


def _tiles(
    sizes: tuple[tuple[int, int, int, int, int], ...], swap: bool = False, descriptor: bool = False
) -> Iterator[Variant]:
    for size in sizes:
        yield Variant(*size, swap=swap, descriptor=descriptor)


def _pieces(tile: Variant, wide_out: bool) -> Variant:
    """A wide fp32 tile does not fit beside the stages: store it in two pieces."""
    large = tile.descriptor and wide_out and tile.rows * tile.columns >= 128 * 256
    return replace(tile, halves=2) if large else tile
