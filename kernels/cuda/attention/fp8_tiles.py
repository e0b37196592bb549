"""Tiles of keys and values in fp8 as operands in registers (Hopper), for models in bf16.

    codes      a tile of K or V: pairs of lanes as int16 [64, D / 2] in shared memory
    exponents  of a tile, bytes: of K, then of V, 128 apart
    place      of a lane in its 16, which are one group of a product's chain: even ones, then odd

A code's bits behind a zero exponent are q * 2^-120 in bf16, subnormal codes too: operands are that.
The power of two that a row lacks is applied elsewhere, exactly: to the scores of a key in fp32, and
to the weights by which values are multiplied, whose products are then the same. Rows of q take 2^64
of it, as products of q * 2^-120 would fall below fp32's least normal number; those with a value of
2^63 or more take none.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpdet.kernels.cuda.launch.warp_pipeline import reinterpreted
from tpdet.kernels.order import PAGE_TOKENS

EXPONENTS = gl.constexpr(64)  # bytes of a tile's exponents
EXPONENT_LINES = gl.constexpr(4)  # of 64 bytes in a stage: copies begin at multiples of 128
_UP, _LARGE = gl.constexpr(2.0**64), gl.constexpr(2.0**63)
_SCORE_BIAS = gl.constexpr(120 - 64)  # of a key's exponent byte: its factor's exponent field
_WEIGHT_BIAS = gl.constexpr(120)
_LARGEST_BYTE = gl.constexpr(134)  # of an exponent that is stored, 7; behind keys there are others
_NOT_FINITE, _NAN = gl.constexpr(255), gl.constexpr(0x7FC00000)

_SIGNED = "lop3.b32 {0}, t, 0x07F007F0, s, 0xE2;"  # bits of t there, signs elsewhere
_ODD = "and.b32 s, $2, 0x80808080; shr.b32 t, $2, 4;" + _SIGNED.format("$1")
_EVEN = "shl.b32 s, s, 8; shl.b32 t, $2, 4;" + _SIGNED.format("$0")
_NUMBERS = gl.constexpr("{.reg .b32 s, t;" + _ODD + _EVEN + "}")


@gluon.constexpr_function
def page_rows(head, fp8):
    """Rows of D values that a page of one key head has."""
    return PAGE_TOKENS + (PAGE_TOKENS // head) * fp8


@gluon.constexpr_function
def swapped_registers(columns):
    """Where threads have a product [64, columns], and pairs of lanes of keys [64, columns]."""
    registers = [[0, 1], [8, 0]] + [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.constexpr_function
def _value_layout(pairs):
    """Pairs of lanes of values [pairs, 64] likewise: a pair is rows r and r + 8."""
    registers = [[0, 1], [0, 8], [0, 16], [0, 32]]
    registers += [[32 << i, 0] for i in range((pairs // 32).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [pairs, 64])


@gluon.constexpr_function
def warp_maxima_layout(rows):
    """Where threads have one value of each of four warps [4, rows]: all of the rows they score."""
    registers = [[1, 0], [2, 0], [0, 1]]
    registers += [[0, 8 << i] for i in range((rows // 8).bit_length() - 1)]
    alike = [[0, 0], [0, 0]]
    return gl.DistributedLinearLayout(
        registers, [[0, 2], [0, 4], [0, 0], *alike], alike, [], [4, rows]
    )


@gluon.jit
def placed_lanes(HEAD: gl.constexpr, LAYOUT: gl.constexpr, FP8: gl.constexpr):
    """The lane at each place of a row [D]."""
    lane = gl.arange(0, HEAD, layout=LAYOUT)
    if FP8:
        lane = (lane & -16) | ((lane & 7) << 1) | ((lane >> 3) & 1)
    return lane


@gluon.jit
def key_numbers(codes, OPERAND: gl.constexpr):
    """Codes of keys [64, D / 2] -> q * 2^-120 [64, D], lanes by place."""
    PAIRS: gl.constexpr = codes.shape[1]
    packed = codes.load(swapped_registers(PAIRS))
    even, odd = gl.inline_asm_elementwise(
        _NUMBERS, "=r,=r,r", [packed], (gl.bfloat16, gl.bfloat16), True, 2
    )
    apart = gl.join(even, odd).reshape([64, PAIRS // 8, 8, 2])
    numbers = apart.permute([0, 1, 3, 2]).reshape([64, 2 * PAIRS])
    return gl.convert_layout(numbers, OPERAND, assert_trivial=True)


@gluon.jit
def value_numbers(codes, OPERAND: gl.constexpr):
    """Codes of values [64, D / 2] -> q * 2^-120 [D, 64], lanes by place."""
    PAIRS: gl.constexpr = codes.shape[1]
    packed = codes.permute((1, 0)).load(_value_layout(PAIRS))
    even, odd = gl.inline_asm_elementwise(
        _NUMBERS, "=r,=r,r", [packed], (gl.bfloat16, gl.bfloat16), True, 2
    )
    apart = gl.join(even, odd).reshape([PAIRS // 8, 8, 64, 2])
    numbers = apart.permute([0, 3, 1, 2]).reshape([2 * PAIRS, 64])
    return gl.convert_layout(numbers, OPERAND, assert_trivial=True)


@gluon.jit
def raised_query(q, LAYOUT: gl.constexpr):
    """q [R, D] times 2^64 or 1, and what scores of a row still lack of 2^64 [R]."""
    wide = q.to(gl.float32)
    small = gl.max(gl.abs(wide), 1) < _LARGE
    up = gl.where(small, _UP, 1.0)
    lack = gl.convert_layout(gl.where(small, 1.0, _UP), LAYOUT)
    return (wide * up[:, None]).to(q.dtype), lack


@gluon.jit
def _stored(exponents, first: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile's exponents, of K or of V [64] int32."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat = reinterpreted(exponents, gl.uint8, [EXPONENT_LINES * EXPONENTS], FLAT)
    return flat.slice(first, EXPONENTS).load(LAYOUT).to(gl.int32)


@gluon.jit
def score_factors(exponents, LAYOUT: gl.constexpr):
    """The factors [64] fp32 that scores of a tile's keys lack; NaN of a key that is not finite."""
    stored = _stored(exponents, 0, LAYOUT)
    field = gl.where(stored == _NOT_FINITE, _NAN, (stored + _SCORE_BIAS) << 23)
    return gl.cast(field, gl.float32, bitcast=True)


@gluon.jit
def weight_factors(exponents, LAYOUT: gl.constexpr):
    """The factors [64] bf16 of the weights of a tile's values; all are finite."""
    stored = _stored(exponents, 2 * EXPONENTS, LAYOUT)
    field = (gl.minimum(stored, _LARGEST_BYTE) + _WEIGHT_BIAS) << 7
    return gl.cast(field.to(gl.int16), gl.bfloat16, bitcast=True)
