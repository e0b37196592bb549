"""Words of codes and words of scales -> bf16, a few instructions a value; all exactly the rule.

    e4m3    cvt to fp16 and fp32 (exact), one fp32 product, one rounding: scales of any dtype
    int4    0x4300 | q is 128 + q; less 128 + zero is exact; times a bf16 scale is rounded once
    int4    of fp16 scales s = hi + lo (8, 3 bits): q * lo is exact, fma(q, hi, q * lo) rounds once
    e2m1    a subnormal or small bf16 times 2^126 is exact, and so is the power of two of the scale

A word holds 4 codes of 8 bits: bytes 0 and 1 are neighbouring columns, bytes 2 and 3 those 8
columns on. Of 4 bits nibbles i and i + 4 are neighbours, 8 * i columns on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tpdet.kernels.inputs.ordered import E2M1, E4M3, INT4, INT4_OF_HALF


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


def _int4(scaled):
    """Words $8 (codes) and $9 (scale) -> 8 values; scaled: makes t, pairs of q - zero, weights."""
    lines = ["{", ".reg .b32 t, u, zero, hi, lo;", "mov.b32 zero, 0x43084308;", *scaled[0]]
    for pair in range(4):
        shifted = "$8"
        if pair:
            lines.append(f"shr.u32 u, $8, {4 * pair};")
            shifted = "u"
        lines += [
            f"lop3.b32 t, {shifted}, 0x000F000F, 0x43004300, 0xEA;",
            "sub.rn.bf16x2 t, t, zero;",
            *scaled[1],
            f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, t;",
        ]
    return "\n".join([*lines, "}"])


_Lines = tuple[list[str], list[str]]
_ONE: _Lines = ([], ["mul.rn.bf16x2 t, t, $9;"])
_TWO: _Lines = (
    ["prmt.b32 hi, $9, $9, 0x3232;", "prmt.b32 lo, $9, $9, 0x1010;"],
    ["mul.rn.bf16x2 u, t, lo;", "fma.rn.bf16x2 t, t, hi, u;"],
)


def _e2m1():
    lines = ["{", ".reg .b32 t, u, most;", "mov.b32 most, 0x7E807E80;"]
    for pair in range(4):
        left, sign = 6 - 4 * pair, 12 - 4 * pair
        lines += [
            f"shl.b32 t, $8, {left};" if left > 0 else f"shr.u32 t, $8, {-left};",
            f"shl.b32 u, $8, {sign};",
            "and.b32 t, t, 0x01C001C0;",
            "lop3.b32 t, u, 0x80008000, t, 0xEA;",
            "mul.rn.bf16x2 t, t, most;",
            "mul.rn.bf16x2 t, t, $9;",
            f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, t;",
        ]
    return "\n".join([*lines, "}"])


_CODE = {E4M3: _e4m3(), INT4: _int4(_ONE), INT4_OF_HALF: _int4(_TWO), E2M1: _e2m1()}
_E4M3, _INT4, _INT4_HALF = map(gl.constexpr, (E4M3, INT4, INT4_OF_HALF))


@gluon.constexpr_function
def code_of(recipe):
    """The instructions of a recipe."""
    return _CODE[recipe]


@gluon.jit
def four(words, scales, RECIPE: gl.constexpr):
    """Words and scale words (fp32) -> columns 0, 1, 8 and 9 in bf16."""
    a, b, c, d = gl.inline_asm_elementwise(
        code_of(RECIPE),
        "=h,=h,=h,=h,r,f",
        [words, scales.to(gl.float32, bitcast=True)],
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
    """Scales as stored -> a word each, as the recipe reads it."""
    if RECIPE == _E4M3:
        words = scales.to(gl.float32).to(gl.int32, bitcast=True)
    elif RECIPE == _INT4:
        half = scales.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        words = half | half << 16
    elif RECIPE == _INT4_HALF:
        whole = scales.to(gl.float32)
        high = whole.to(gl.int32, bitcast=True) & -65536
        rest = (whole - high.to(gl.float32, bitcast=True)).to(gl.int32, bitcast=True)
        words = high | ((rest >> 16) & 0x7FFF) | ((high >> 16) & 0x8000)
    else:
        exponent = scales.to(gl.int32)
        half = gl.where(exponent == 0, 0x0040, exponent << 7)
        words = half | half << 16
    return words
