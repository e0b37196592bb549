"""The warps that make numbers of tiles of keys and values in fp8 (Hopper).

    codes      K and V of a tile [64, D] uint8, in stages that a warp copies to
    numbers    the same in bf16 or fp16, in stages from which other warps multiply
    factors    of a split, int32 [8, 64] in shared memory: four tiles of K, then of V

They stand between the warp that copies and those that add up, which so read tiles as if these had
been copied. q * 2^e is exact: a code's bits behind a zero exponent are q * 2^-120 in bf16 and
q * 2^-8 in fp16, and one product by a power of two follows, NaN for a row that is not finite.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tpdet.kernels.cuda.attention.split import PAGE, TILE, TILES
from tpdet.kernels.cuda.attention.tile_line import end_sequence, sequence_of
from tpdet.kernels.cuda.launch.warp_pipeline import (
    reinterpreted,
    slot_of,
    wait_free,
    wait_full,
)
from tpdet.kernels.order import PAGE_TOKENS, TILE_TOKENS

CONVERT_WARPS = gl.constexpr(4)
_WORDS = gl.constexpr(2 * PAGE_TOKENS // 4)  # of a split's exponents: a thread has one
_PARTS = gl.constexpr(2)  # of a tile: fewer registers
_PART = gl.constexpr(TILE_TOKENS // 2)
_NOT_FINITE = gl.constexpr(255)


def _numbers_code(shift, kept, kind):
    """Four codes $2 times a pair of factors $3 -> two pairs $0 and $1."""
    lines = ["{", ".reg .b32 a, t;"]
    for pair, picked in enumerate(("0x1404", "0x3424")):
        lines += [
            f"prmt.b32 a, $2, 0, {picked};",
            f"shr.b32 t, a, {shift};",
            f"and.b32 t, t, {kept};",
            "lop3.b32 t, a, 0x80008000, t, 0xEA;",
            f"mul.rn.{kind} ${pair}, t, $3;",
        ]
    return "\n".join([*lines, "}"])


_TO_BFLOAT = _numbers_code(4, "0x07F007F0", "bf16x2")
_TO_HALF = _numbers_code(1, "0x3F803F80", "f16x2")


@gluon.constexpr_function
def _code_of(dtype):
    return _TO_BFLOAT if dtype == gl.bfloat16 else _TO_HALF


@gluon.constexpr_function
def page_rows(dtype, head):
    """Rows of D elements that a page of one key head has."""
    return PAGE_TOKENS + (PAGE_TOKENS // head) * (dtype == gl.uint8)


@gluon.constexpr_function
def _rows_layout(head):
    """A layout of [64, D]: 8 values a thread, row beside row."""
    return gl.BlockedLayout([1, 8], [256 // head, head // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def _bytes_layout():
    """A layout of words [128] by their bytes [128, 4]."""
    return gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])


@gluon.jit
def allocate_factors():
    """Room for a split's factors."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [2 * TILES, TILE], LAYOUT)


@gluon.jit
def _keep_factors(factors, pages, number, head, dtype: gl.constexpr, SHAPE: gl.constexpr):
    """The factors of a split, by the exponents of its page: a pair of 2-byte values each."""
    BYTES: gl.constexpr = _bytes_layout()
    PAIRS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # 1. a word of exponents for each thread: of K, then of V
    thread = gl.arange(0, _WORDS, layout=gl.SliceLayout(1, BYTES))
    page = (number.to(gl.int64) * SHAPE.KEY_HEADS + head) * (PAGE * (SHAPE.HEAD + 1) // 4)
    word_at = page + (PAGE * SHAPE.HEAD // 4 + thread % (_WORDS // 2))
    of_keys = thread < _WORDS // 2
    word = gl.load(pages.words[0] + word_at, mask=of_keys, other=0)
    word = word | gl.load(pages.words[1] + word_at, mask=thread >= _WORDS // 2, other=0)
    # 2. its four factors
    byte = gl.arange(0, 4, layout=gl.SliceLayout(0, BYTES))
    stored = (word[:, None] >> (8 * byte)[None, :]) & 255
    if dtype == gl.bfloat16:
        factor = gl.where(stored == _NOT_FINITE, 0x7FC0, (stored + 120) << 7)
    else:
        factor = gl.where(stored == _NOT_FINITE, 0x7E00, (stored - 104) << 10)
    reinterpreted(factors, gl.int32, [_WORDS, 4], PAIRS).store(factor | factor << 16)
    tl.debug_barrier()


@gluon.jit
def _write_numbers(codes, factors, first_key, length, out):
    """The numbers of a tile's codes [64, D] to `out`, zeros from key `length` on."""
    LAYOUT: gl.constexpr = _rows_layout(out.shape[1])
    for part in gl.static_range(_PARTS):
        factor = factors.slice(part * _PART, _PART).load(gl.SliceLayout(1, LAYOUT))
        first = first_key + part * _PART
        if first + _PART > length:
            key = first + gl.arange(0, _PART, layout=gl.SliceLayout(1, LAYOUT))
            factor = gl.where(key < length, factor, 0)
        factor = gl.expand_dims(factor, 1)
        loaded, factor = gl.broadcast(codes.slice(part * _PART, _PART).load(LAYOUT), factor)
        numbers = gl.inline_asm_elementwise(
            _code_of(out.dtype), "=r,=r,r,r,r,r,r", [loaded, factor], out.dtype, True, 4
        )
        out.slice(part * _PART, _PART).store(numbers)
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def convert(codes, numbers, factors, pages, line, SHAPE: gl.constexpr):
    """Four warps: all tiles of the program's part, one after another."""
    KEY_HEADS: gl.constexpr = SHAPE.KEY_HEADS
    step = 0
    for sequence in range(line.begin.sequence, end_sequence(line)):
        _row, count, start, splits, begin, end = sequence_of(line, sequence, KEY_HEADS)
        for unit in range(begin, end):
            head = unit // splits
            split = unit - head * splits
            number = gl.load(pages.tables + sequence * pages.widest + split)
            _keep_factors(factors, pages, number, head, numbers.k.dtype, SHAPE)
            keys = gl.minimum(start + count - split * PAGE, PAGE)
            for tile in range(0, gl.cdiv(keys, TILE)):
                taken = slot_of(codes.k_free, step)
                slot = slot_of(numbers.k_free, step)
                first_key = tile * TILE
                # 1. keys
                wait_full(codes.k_full, step)
                wait_free(numbers.k_free, step)
                of_keys = factors.index(tile)
                _write_numbers(
                    codes.k.index(taken), of_keys, first_key, keys, numbers.k.index(slot)
                )
                mbarrier.arrive(codes.k_free.index(taken), count=1)
                mbarrier.arrive(numbers.k_full.index(slot), count=1)
                # 2. values
                wait_full(codes.v_full, step)
                wait_free(numbers.v_free, step)
                of_values = factors.index(TILES + tile)
                _write_numbers(
                    codes.v.index(taken), of_values, first_key, keys, numbers.v.index(slot)
                )
                mbarrier.arrive(codes.v_free.index(taken), count=1)
                mbarrier.arrive(numbers.v_full.index(slot), count=1)
                step += 1
