"""Words of codes and words of scales -> bf16, a few instructions a value; all exactly the rule.

    e4m3    cvt to fp16 and fp32 (exact), one fp32 product, one rounding: scales of any dtype
    int4    0x4300 | q is 128 + q; less 128 + zero is exact; times a bf16 scale is rounded once
    int4    of fp16 scales s = hi + lo (8, 3 bits): q * lo is exact, fma(q, hi, q * lo) rounds once
    zero points: of a scale stand beside it as bf16, 128 + zero, and are subtracted likewise
    int8    2^23 + q less 2^23 + 128 is exact in fp32; one fp32 product, one rounding
    e2m1    a subnormal or small bf16 times 2^126 is exact, and so is the power of two of the scale

A word holds 4 codes of 8 bits: bytes 0 and 1 are neighbouring columns, bytes 2 and 3 those 8
columns on. Of 4 bits nibbles i and i + 4 are neighbours, 8 * i columns on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpdet.kernels.inputs.ordered import (
    E2M1,
    E4M3,
    INT4,
    INT4_OF_HALF,
    INT4_ZERO,
    INT4_ZERO_OF_HALF,
    INT8,
)


def _e4m3():
    return """
    {
    .reg .b16 l, h, p0, p1, p2, p3; .reg .b32 a, b; .reg .f32 f0, f1, f2, f3;
    mov.b32 {l, h}, $4;
    cvt.rn.f16x2.e4m3x2 a, l;
    cvt.rn.f16x2.e4m3x2 b, h;
    mov.b32 {p0, p1}, a;
    mov.b32 {p2, p3}, b;
    cvt.f32.f16 f0, p0; cvt.f32.f16 f1, p1; cvt.f32.f16 f2, p2; cvt.f32.f16 f3, p3;
    mul.rn.f32 f0, f0, $5; mul.rn.f32 f1, f1, $5; mul.rn.f32 f2, f2, $5; mul.rn.f32 f3, f3, $5;
    cvt.rn.bf16x2.f32 a, f1, f0;
    cvt.rn.bf16x2.f32 b, f3, f2;
    mov.b32 {$0, $1}, a;
    mov.b32 {$2, $3}, b;
    }
    """


def _int8():
    lines = ["{", ".reg .b32 a, b, magic; .reg .f32 f0, f1, f2, f3;", "mov.b32 magic, 0x4B000000;"]
    for byte in range(4):
        f = f"f{byte}"
        lines += [
            f"prmt.b32 a, $4, magic, 0x744{byte};",  # 2^23 + q
            f"mov.b32 {f}, a;",
            f"sub.rn.f32 {f}, {f}, 0f4B000080;",
            f"mul.rn.f32 {f}, {f}, $5;",
        ]
    lines += [
        "cvt.rn.bf16x2.f32 a, f1, f0;",
        "cvt.rn.bf16x2.f32 b, f3, f2;",
        "mov.b32 {$0, $1}, a;",
        "mov.b32 {$2, $3}, b;",
    ]
    return "\n".join([*lines, "}"])


_Lines = tuple[list[str], list[str]]


def _int4(scaled: _Lines, pairs: range):
    """The word of codes and `scale` -> the values of some pairs of its nibbles.

    scaled: makes zero, pairs of 128 + the zero point, and turns t, pairs of q - zero, to weights.
    """
    word = 2 * len(pairs)
    lines = ["{", ".reg .b32 t, u, zero, hi, lo;", *scaled[0]]
    for count, pair in enumerate(pairs):
        shifted = f"${word}"
        if pair:
            lines.append(f"shr.u32 u, ${word}, {4 * pair};")
            shifted = "u"
        lines += [
            f"lop3.b32 t, {shifted}, 0x000F000F, 0x43004300, 0xEA;",
            "sub.rn.bf16x2 t, t, zero;",
            *scaled[1],
            f"mov.b32 {{${2 * count}, ${2 * count + 1}}}, t;",
        ]
    return "\n".join([*lines, "}"]).replace("scale", f"${word + 1}")


_EIGHT, _OWN_ZERO = "mov.b32 zero, 0x43084308;", "prmt.b32 zero, scale, scale, 0x3232;"
_ONE: _Lines = ([_EIGHT], ["mul.rn.bf16x2 t, t, scale;"])
_BY_PARTS = ["mul.rn.bf16x2 u, t, lo;", "fma.rn.bf16x2 t, t, hi, u;"]
_TWO: _Lines = (
    [_EIGHT, "prmt.b32 hi, scale, scale, 0x3232;", "prmt.b32 lo, scale, scale, 0x1010;"],
    _BY_PARTS,
)
_ONE_ZERO: _Lines = (
    [_OWN_ZERO, "prmt.b32 hi, scale, scale, 0x1010;"],
    ["mul.rn.bf16x2 t, t, hi;"],
)
_TWO_ZERO: _Lines = (
    [
        ".reg .b16 half, rest; .reg .f32 whole, high;",
        _OWN_ZERO,
        "mov.b32 {half, rest}, scale;",
        "cvt.f32.f16 whole, half;",
        "mov.b32 t, whole;",
        "and.b32 t, t, 0xFFFF0000;",
        "mov.b32 high, t;",
        "sub.rn.f32 whole, whole, high;",
        "mov.b32 u, whole;",
        "prmt.b32 hi, t, t, 0x3232;",
        "prmt.b32 lo, u, u, 0x3232;",
        "lop3.b32 lo, hi, 0x80008000, lo, 0xEA;",  # -0 where s is below 0: so are zeros
    ],
    _BY_PARTS,
)


def _e2m1(pairs: range):
    """As `_int4`."""
    word = 2 * len(pairs)
    lines = ["{", ".reg .b32 t, u, most;", "mov.b32 most, 0x7E807E80;"]
    for count, pair in enumerate(pairs):
        left, sign = 6 - 4 * pair, 12 - 4 * pair
        lines += [
            f"shl.b32 t, ${word}, {left};" if left > 0 else f"shr.u32 t, ${word}, {-left};",
            f"shl.b32 u, ${word}, {sign};",
            "and.b32 t, t, 0x01C001C0;",
            "lop3.b32 t, u, 0x80008000, t, 0xEA;",
            "mul.rn.bf16x2 t, t, most;",
            f"mul.rn.bf16x2 t, t, ${word + 1};",
            f"mov.b32 {{${2 * count}, ${2 * count + 1}}}, t;",
        ]
    return "\n".join([*lines, "}"])


def _codes(pairs: range) -> dict[int, str]:
    """The instructions of every recipe, of 4 bits for some pairs of a word."""
    return {
        E4M3: _e4m3(),
        INT4: _int4(_ONE, pairs),
        INT4_OF_HALF: _int4(_TWO, pairs),
        E2M1: _e2m1(pairs),
        INT4_ZERO: _int4(_ONE_ZERO, pairs),
        INT4_ZERO_OF_HALF: _int4(_TWO_ZERO, pairs),
        INT8: _int8(),
    }


_HALVES, _WHOLE = (_codes(range(2)), _codes(range(2, 4))), _codes(range(4))
_INT4, _INT4_HALF, _E2M1 = map(gl.constexpr, (INT4, INT4_OF_HALF, E2M1))


@gluon.constexpr_function
def by_float(recipe):
    """Whether it multiplies by scales in fp32."""
    return recipe in (E4M3, INT8)


@gluon.constexpr_function
def zeroed(recipe):
    """Whether it takes zero points."""
    return recipe in (INT4_ZERO, INT4_ZERO_OF_HALF)


@gluon.constexpr_function
def code_of(recipe, half=None):
    """The instructions of a recipe: of 4 bits for a word or a half of it."""
    return (_WHOLE if half is None else _HALVES[half])[recipe]


@gluon.jit
def four(words, scales, RECIPE: gl.constexpr, HALF: gl.constexpr):
    """Words and scale words -> columns 0, 1, 8 and 9 in bf16; of HALF 1 those 16 columns on."""
    if by_float(RECIPE):
        scales = scales.to(gl.float32, bitcast=True)
    a, b, c, d = gl.inline_asm_elementwise(
        code_of(RECIPE, HALF),
        "=h,=h,=h,=h,r," + ("f" if by_float(RECIPE) else "r"),
        [words, scales],
        (gl.int16, gl.int16, gl.int16, gl.int16),
        True,
        1,
    )
    B: gl.constexpr = gl.bfloat16
    return (
        a.to(B, bitcast=True),
        b.to(B, bitcast=True),
        c.to(B, bitcast=True),
        d.to(B, bitcast=True),
    )


@gluon.jit
def eight(words, scales, RECIPE: gl.constexpr):
    """Words and scale words -> columns 0, 1, 8, 9, 16, 17, 24, 25 in bf16."""
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        code_of(RECIPE),
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, scales],
        (gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
        True,
        1,
    )
    B: gl.constexpr = gl.bfloat16
    a, b, c, d = (
        a.to(B, bitcast=True),
        b.to(B, bitcast=True),
        c.to(B, bitcast=True),
        d.to(B, bitcast=True),
    )
    e, f, g, h = (
        e.to(B, bitcast=True),
        f.to(B, bitcast=True),
        g.to(B, bitcast=True),
        h.to(B, bitcast=True),
    )
    return a, b, c, d, e, f, g, h


@gluon.jit
def scale_words(scales, RECIPE: gl.constexpr):
    """Scales as stored -> a word each, as the recipe reads it; `with_zeros` follows where there
    are zero points."""
    if by_float(RECIPE):
        words = scales.to(gl.float32).to(gl.int32, bitcast=True)
    elif RECIPE == _INT4:
        half = scales.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        words = half | half << 16
    elif RECIPE == _INT4_HALF:
        whole = scales.to(gl.float32)
        high = whole.to(gl.int32, bitcast=True) & -65536
        rest = (whole - high.to(gl.float32, bitcast=True)).to(gl.int32, bitcast=True)
        words = high | ((rest >> 16) & 0x7FFF) | ((high >> 16) & 0x8000)
    elif RECIPE == _E2M1:
        exponent = scales.to(gl.int32)
        half = gl.where(exponent == 0, 0x0040, exponent << 7)
        words = half | half << 16
    else:
        words = scales.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return words


@gluon.jit
def with_zeros(words, zeros):
    """Words of scales with their zero points, as bf16 of 128 more."""
    return words | (zeros.to(gl.int32) + 0x4300) << 16
