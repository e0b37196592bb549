"""What PTX instructions compute from registers, as expressions of numpy."""

import re
import struct

import numpy

LANES = 32


def viewed(name, kind):
    """A register's bits as numbers of a kind; unsigned and predicates are stored so."""
    if kind[0] in "ub" or kind == "pred":
        return name
    return f"{name}.view(numpy.{_dtype(kind)})"


def _dtype(kind):
    if kind == "pred":
        return "bool"
    return {"u": "uint", "b": "uint", "s": "int", "f": "float"}[kind[0]] + kind[1:]


def constant(text, kind):
    """An immediate as a numpy scalar."""
    if kind == "pred":
        return str(text not in ("0", "false"))
    bits = int(re.sub(r"\D", "", kind))
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        value = int(text[2:], 16)
        bits, is_float = 32, True
    elif re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        value = int(text[2:], 16)
        bits, is_float = 64, True
    else:
        value, is_float = int(text, 0), False
    value &= (1 << bits) - 1
    if kind[0] == "f" and is_float:
        number = struct.unpack("<f" if bits == 32 else "<d", value.to_bytes(bits // 8, "little"))[0]
        return (
            f"numpy.float{bits}({number!r})"
            if numpy.isfinite(number)
            else (f"numpy.uint{bits}({value}).view(numpy.float{bits})")
        )
    if kind[0] == "s" and value >> (bits - 1):
        value -= 1 << bits
    return f"numpy.{_dtype(kind)}({value})"


def bits_of(expression, kind):
    """Numbers of a kind as a register's bits."""
    if kind == "pred":
        return expression
    return f"bits({expression}, numpy.uint{kind[1:]})"


def bits(values, dtype):
    """An array [32] of a register's type, of values that may be one for all lanes."""
    values = numpy.asarray(values)
    if values.ndim == 0:
        values = numpy.full(LANES, values)
    if values.dtype == dtype:
        return values
    if values.dtype.itemsize != numpy.dtype(dtype).itemsize:
        raise TypeError(f"{values.dtype} in a register of {numpy.dtype(dtype)}")
    return values.view(dtype)


_BINARY = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "and": "({} & {})",
    "or": "({} | {})",
    "xor": "({} ^ {})",
    "min": "numpy.fmin({}, {})",
    "max": "numpy.fmax({}, {})",
    "rem": "remainder({}, {})",
}
_REDUCED = {
    "add": "add", "max": "maximum", "min": "minimum",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip
_WHOLE = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}
_JOINED = {"and": "&", "or": "|", "xor": "^"}
_COMPARED = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip


def expression(opcode, words, sources, value):
    """The result's bits; value(text, kind) gives an operand."""
    name, kind = words[0], words[-1]
    all_of = lambda kind: [value(source, kind) for source in sources]
    if name in ("add", "sub", "min", "max", "rem") or name in ("and", "or", "xor"):
        if name in ("add", "sub") and kind[0] == "f" and ("rz" in words or "rm" in words):
            raise NotImplementedError(f"PTX: {opcode}")
        return bits_of(_BINARY[name].format(*all_of(kind.replace("b", "u"))), kind)
    if name == "setp":
        return _comparison(words, sources, value)
    if name == "mul" and kind[0] != "f":
        return _product(words, sources, value)
    if name == "mul":
        return bits_of("({} * {})".format(*all_of(kind)), kind)
    if name == "mad":
        added = f"u{int(kind[1:]) * (2 if 'wide' in words else 1)}"
        return f"({_product(words, sources[:2], value)} + {value(sources[2], added)})"
    if name == "fma":
        return bits_of("fused({}, {}, {})".format(*all_of(kind)), kind)
    if name == "div":
        how = "({} / {})" if kind[0] == "f" else "quotient({}, {})"
        return bits_of(how.format(*all_of(kind)), kind)
    if name in ("neg", "abs", "not", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "cvt", "popc", "clz"):
        return _unary(opcode, words, sources, value)
    if name == "shl":
        return f"shifted_left({value(sources[0], 'u' + kind[1:])}, {value(sources[1], 'u32')})"
    if name == "shr":
        signed = f"shifted_right({value(sources[0], kind)}, {value(sources[1], 'u32')})"
        return bits_of(signed, kind)
    if name == "selp":
        first, second, chosen = sources
        kind = f"u{kind[1:]}"
        return f"numpy.where({value(chosen, 'pred')}, {value(first, kind)}, {value(second, kind)})"
    if name == "bfe":
        return bits_of(f"field({value(sources[0], kind)}, {sources[1]}, {sources[2]})", kind)
    if name == "redux":
        reduce, kind = f"numpy.{_REDUCED[words[2]]}.reduce", kind.replace("b", "u")
        return bits_of(f"{reduce}({value(sources[0], kind)}, dtype=numpy.{_dtype(kind)})", kind)
    if name == "shfl":
        how = {"bfly": "butterfly", "idx": "indexed", "up": "up", "down": "down"}[words[2]]
        given = ", ".join(value(source, "u32") for source in sources[:3])
        return f"{how}({given})"
    if name == "vote":
        return _vote(words, sources, value)
    if name == "prmt":
        return "permuted({}, {}, {})".format(*all_of("u32"))
    if name == "lop3":
        return "looked_up({}, {}, {}, {})".format(*all_of("u32"))
    if name == "shf":
        return "funnel_{}({}, {}, {})".format(words[1], *all_of("u32"))
    raise NotImplementedError(f"PTX: {opcode}")


def _comparison(words, sources, value):
    kind = words[-1].replace("b", "u")
    first, second = (value(source, kind) for source in sources[:2])
    how, unordered = words[1], f"(numpy.isnan({first}) | numpy.isnan({second}))"
    if how in ("nan", "num"):
        found = unordered if how == "nan" else f"~{unordered}"
    elif kind[0] == "f" and how.endswith("u"):
        found = f"(({first} {_COMPARED[how[:-1]]} {second}) | {unordered})"
    elif kind[0] == "f" and how == "ne":
        found = f"(({first} != {second}) & ~{unordered})"
    else:
        found = f"({first} {_COMPARED[how]} {second})"
    if words[2] in _JOINED:
        found = f"({found} {_JOINED[words[2]]} {value(sources[2], 'pred')})"
    return f"bits({found}, bool)"


def _product(words, sources, value):
    kind = words[-1]
    first, second = (value(source, kind) for source in sources)
    if words[1] == "wide":
        twice = 2 * int(kind[1:])
        whole = f"numpy.{_dtype(kind[0] + str(twice))}"
        return bits_of(f"wide_product({first}, {second}, {whole})", f"u{twice}")
    if words[1] == "hi":
        return bits_of(f"high_product({first}, {second}, numpy.{_dtype(kind)})", kind)
    return bits_of(f"({first} * {second})", kind)


def _unary(opcode, words, sources, value):
    name, kind = words[0], words[-1]
    if name == "cvt":
        return _conversion(opcode, words, sources, value)
    found = value(sources[0], kind.replace("b", "u"))
    simple = {
        "neg": "(-{})", "abs": "numpy.abs({})", "sqrt": "numpy.sqrt({})", "rcp": "(1 / {})",
        "ex2": "numpy.exp2({})", "lg2": "numpy.log2({})", "rsqrt": "(1 / numpy.sqrt({}))",
        "popc": "ones({})", "clz": "leading_zeros({})",
    }  # fmt: skip
    if name == "not":
        return f"bits(~{found}, bool)" if kind == "pred" else f"(~{found})"
    if name in ("popc", "clz"):
        return simple[name].format(found)
    return bits_of(simple[name].format(found), kind)


def _conversion(opcode, words, sources, value):
    source, to, given = sources[0], words[-2], words[-1]
    if given == "bf16":
        wide = f"{value(source, 'u16')}.astype(numpy.uint32)"
        return f"bits({wide} << numpy.uint32(16), numpy.uint32)"
    if to == "bf16":
        return f"rounded_bfloat({value(source, 'f32')})"
    if to == "bf16x2":
        rounded = (f"rounded_bfloat({value(each, 'f32')})" for each in sources)
        high, low = (f"{each}.astype(numpy.uint32)" for each in rounded)
        return f"({high} << numpy.uint32(16) | {low})"
    found = f"bits({value(source, given.replace('b', 'u'))}, numpy.{_dtype(given)})"
    wanted = f"numpy.{_dtype(to)}"
    if given[0] == "f" and to[0] in "su":
        rounding = next(_WHOLE[word] for word in words if word in _WHOLE)
        return bits_of(f"clamped(numpy.{rounding}({found}), {wanted})", f"u{to[1:]}")
    if given[0] == "f" and to == given:
        rounding = next((_WHOLE[word] for word in words if word in _WHOLE), "positive")
        return bits_of(f"numpy.{rounding}({found})", to)
    size = re.sub(r"\D", "", to)
    return bits_of(f"{found}.astype({wanted})", f"u{size}")


def _vote(words, sources, value):
    predicate = value(sources[0], "pred")
    if words[2] == "ballot":
        return f"ballot({predicate})"
    return f"bits({predicate}.{words[2]}(), bool)"


def remainder(a, b):
    """C's: of the sign of the dividend."""
    return a - quotient(a, b) * b


def quotient(a, b):
    """Towards zero; of a division by zero all bits, as the GPU gives."""
    a, b = numpy.broadcast_arrays(a, b)
    safe = numpy.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return a // safe
    found = numpy.abs(a) // numpy.abs(safe)
    return numpy.where((a < 0) != (safe < 0), -found, found).astype(a.dtype)


def wide_product(a, b, dtype):
    """The whole product, in a type of twice the width."""
    return numpy.asarray(a).astype(dtype) * numpy.asarray(b).astype(dtype)


def high_product(a, b, dtype):
    """The upper half of a product."""
    bits = dtype().itemsize * 8
    a, b = (numpy.broadcast_to(x, LANES).tolist() for x in (a, b))
    pairs = zip(a, b, strict=True)
    return numpy.array([x * y >> bits for x, y in pairs], dtype)


def fused(a, b, c):
    """a * b + c: fp32 by way of fp64, fp64 in two roundings."""
    if a.dtype == numpy.float32:
        return (numpy.float64(a) * numpy.float64(b) + numpy.float64(c)).astype(numpy.float32)
    return a * b + c


def shifted_left(a, count):
    """Zero from a register's width on."""
    bits = a.dtype.itemsize * 8
    count = numpy.minimum(count, bits).astype(a.dtype)
    return numpy.where(count >= bits, a.dtype.type(0), a << (count % a.dtype.type(bits)))


def shifted_right(a, count):
    """Sign or zero from a register's width on."""
    bits = a.dtype.itemsize * 8
    if a.dtype.kind == "i":
        return a >> numpy.minimum(count, bits - 1).astype(a.dtype)
    count = numpy.minimum(count, bits).astype(a.dtype)
    return numpy.where(count >= bits, a.dtype.type(0), a >> (count % a.dtype.type(bits)))


def field(a, first, length):
    """Bits `first` and following of a, extended by the sign where a has one."""
    bits, first, length = a.dtype.itemsize * 8, int(first), int(length)
    up = a.dtype.type(bits - first - length)
    return (a << up) >> a.dtype.type(bits - length)


def butterfly(a, mask, _):
    """Lane i gets what lane i ^ mask has."""
    return a[numpy.arange(LANES) ^ int(numpy.ravel(mask)[0])]


def indexed(a, lane, clamp):
    """Lane i gets what the lane has that it names, within its segment."""
    held = int(numpy.ravel(clamp)[0]) >> 8 & 31
    own = numpy.arange(LANES) & held
    return a[own | (numpy.broadcast_to(lane, LANES).astype(int) & 31 & ~held)]


def up(a, delta, clamp):
    """Lane i gets what lane i - delta has; the first keep their own."""
    at = numpy.arange(LANES) - int(numpy.ravel(delta)[0])
    first = numpy.arange(LANES) & (int(numpy.ravel(clamp)[0]) >> 8 & 31)
    return a[numpy.where(at >= first, at, numpy.arange(LANES))]


def down(a, delta, _):
    """Lane i gets what lane i + delta has; the last keep their own."""
    at = numpy.arange(LANES) + int(numpy.ravel(delta)[0])
    return a[numpy.where(at < LANES, at, numpy.arange(LANES))]


def ballot(predicate):
    """A bit for each lane."""
    return numpy.full(LANES, sum(1 << i for i, each in enumerate(predicate.tolist()) if each), "u4")


def rounded_bfloat(a):
    """fp32 to the nearest bf16, ties to even; a NaN becomes 0x7FFF."""
    whole = a.view(numpy.uint32)
    rounded = (whole + numpy.uint32(0x7FFF) + (whole >> numpy.uint32(16) & numpy.uint32(1))) >> 16
    return numpy.where(numpy.isnan(a), numpy.uint32(0x7FFF), rounded).astype(numpy.uint16)


def clamped(a, dtype):
    """Whole floats as integers, saturated; a NaN is 0."""
    limits = numpy.iinfo(dtype)
    low, high = a <= float(limits.min), a >= float(limits.max)
    inside = numpy.where(low | high | numpy.isnan(a), 0, a).astype(dtype)
    return numpy.where(high, limits.max, numpy.where(low, limits.min, inside)).astype(dtype)


def ones(a):
    """Bits that are set."""
    return numpy.array([each.bit_count() for each in a.tolist()], numpy.uint32)


def leading_zeros(a):
    """Zeros above the highest bit."""
    bits = a.dtype.itemsize * 8
    return numpy.array([bits - each.bit_length() for each in a.tolist()], numpy.uint32)


def permuted(a, b, chosen):
    """Bytes of a and b that the lower four digits of `chosen` name."""
    a, b, chosen = (numpy.broadcast_to(x, LANES).astype(numpy.uint64) for x in (a, b, chosen))
    both, found = a | b << numpy.uint64(32), numpy.zeros(LANES, numpy.uint64)
    for i in range(4):
        digit = chosen >> numpy.uint64(4 * i) & numpy.uint64(15)
        byte = both >> ((digit & numpy.uint64(7)) * numpy.uint64(8)) & numpy.uint64(255)
        sign = (byte >> numpy.uint64(7)) * numpy.uint64(255)
        found |= numpy.where(digit & numpy.uint64(8), sign, byte) << numpy.uint64(8 * i)
    return found.astype(numpy.uint32)


def looked_up(a, b, c, table):
    """Any function of three bits."""
    table, found = int(numpy.ravel(table)[0]), numpy.zeros(LANES, numpy.uint32)
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def funnel_l(low, high, count):
    """The upper word of high:low, shifted left (wrapped)."""
    return _funnel(low, high, numpy.uint64(32) - (numpy.broadcast_to(count, LANES) & 31))


def funnel_r(low, high, count):
    """The lower word of high:low, shifted right (wrapped)."""
    return _funnel(low, high, numpy.broadcast_to(count, LANES) & 31)


def _funnel(low, high, count):
    low, high = (numpy.broadcast_to(x, LANES).astype(numpy.uint64) for x in (low, high))
    both = low | high << numpy.uint64(32)
    return (both >> count.astype(numpy.uint64)).astype(numpy.uint32)


_ROW, _PAIR = numpy.arange(LANES) // 4, numpy.arange(LANES) % 4 * 2


def matrix_product(a, b, c, dtype):
    """mma m16n8k16 of a warp's registers: A (4), B (2), C (4) fp32 -> D (4); summed in fp64."""
    left, right = numpy.zeros((16, 16)), numpy.zeros((16, 8))
    for i, bits in enumerate(a):
        for half, value in enumerate(_halves(bits, dtype)):
            left[_ROW + i % 2 * 8, _PAIR + i // 2 * 8 + half] = value
    for i, bits in enumerate(b):
        for half, value in enumerate(_halves(bits, dtype)):
            right[_PAIR + i * 8 + half, _ROW] = value
    whole = left @ right
    found = []
    for i, bits in enumerate(c):
        product = whole[_ROW + i // 2 * 8, _PAIR + i % 2]
        total = bits.view(numpy.float32).astype(numpy.float64) + product
        found.append(total.astype(numpy.float32).view(numpy.uint32))
    return found


def _halves(bits, dtype):
    """The two numbers of 2 bytes in each register, the lower first."""
    for half in (bits & numpy.uint32(0xFFFF), bits >> numpy.uint32(16)):
        if dtype == "f16":
            yield half.astype(numpy.uint16).view(numpy.float16).astype(numpy.float64)
        else:
            yield (half << numpy.uint32(16)).view(numpy.float32).astype(numpy.float64)
