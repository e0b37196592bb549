"""PTX as Python: a kernel becomes a generator that runs one warp, 32 lanes in numpy arrays.

    run = translated(ptx)          # run(warp) yields before whatever other warps can see
    for _ in run(warp): ...

A register holds bits [32]: uint16, uint32, uint64, or bool for a predicate. `warp` gives and takes
what is in memory (`machine.Warp`). Loads, stores and atomics of global memory and barriers yield
first. Lanes that branch apart run in turn, those at the first label first, until they meet. What
is not known raises NotImplementedError. Arithmetic rounds once (no approximation of `ex2` has the
GPU's bits).
"""

import copy
import re
from functools import cache

import numpy

from tests.kernels.compiled.ptx import arithmetic

LANES = 32
END = 1 << 30  # the label of lanes that have ended
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_SPECIAL = re.compile(r"%(tid|ctaid|nctaid|ntid)\.([xyz])$")
_WIDTHS = {"%p": 1, "%rs": 2, "%r": 4, "%f": 4, "%rd": 8, "%fd": 8}
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


@cache
def translated(ptx):
    """The generator function of the only kernel of `ptx`; its `parameters` are names and bits."""
    text = re.sub(r"//[^\n]*", "", ptx)
    head = text[text.index(".entry") :]
    body = head[head.index("\n{") + 2 :]
    body = body[: body.index("\n}")]
    names = re.findall(r"\.param \.[a-z](\d+)[^,)]*?(\w+_param_\d+)", head[: head.index("\n{")])
    blocks = _blocks(_statements(body))
    numbers = {label: number for number, (label, _) in enumerate(blocks)}
    lines = ["def run(warp):", "    label, active, lanes = 0, None, None"]
    for name in sorted({*re.findall(r"%[a-z]+\d+", body)}):
        lines.append(f"    {register(name)} = warp.empty[{_WIDTHS[re.match(r'%[a-z]+', name)[0]]}]")
    lines.append("    while True:")
    for number, (_, statements) in enumerate(blocks):
        lines += _block(number, [_Statement(*each, numbers) for each in statements])
    space = {"numpy": numpy, "full": _full, "END": END, **vars(arithmetic)}
    exec(compile("\n".join(lines), f"<{names[0][1] if names else 'kernel'}>", "exec"), space)
    run = space["run"]
    run.parameters = [(name, int(bits)) for bits, name in names]
    run.threads = int(re.search(r"\.reqntid (\d+)", text)[1])
    run.source = lines
    return run


def _block(number, statements):
    """A basic block: as all lanes run it, and as some do while others wait at another label."""
    together = [line for each in statements for line in each.lines()]
    apart = [line for each in statements for line in each.of_some().lines()]
    meet = ["label, active = warp.next_lanes(lanes)", "if label == END: return"]
    lines = [f"if label == {number}:", f"    label = {number + 1}", "    if active is None:"]
    lines += [f"        {line}" for line in together or ["pass"]]
    lines += ["    else:", f"        lanes = numpy.where(active, {number + 1}, lanes)"]
    lines += [f"        {line}" for line in [*apart, *meet]]
    return [f"        {line}" for line in lines]


def _full(value, dtype):
    return numpy.full(LANES, value, dtype)


def _statements(body):
    """(negated, guard, opcode, operands) or (label,) of everything that runs."""
    text = re.sub(r"\n\s*\.(loc|file|section)[^\n]*", "\n", body)
    at, end = 0, len(text)
    while at < end:
        if match := re.compile(r"[\s{};]+").match(text, at):  # scopes of inline assembly
            at = match.end()
        elif match := re.compile(r"(\$?\w+):").match(text, at):
            yield (match[1],)
            at = match.end()
        else:
            stop = text.index(";", at)
            statement, at = text[at:stop].strip(), stop
            if not statement.startswith("."):
                match = _STATEMENT.fullmatch(statement)
                if match is None:
                    raise NotImplementedError(f"PTX: {statement}")
                yield match[1], match[2], match[3], _operands(match[4])


def _operands(text):
    """Operands, what stands in braces or brackets as one."""
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)
    return [part.strip() for part in parts if part.strip()]


def _blocks(statements):
    """Basic blocks: (label or None, statements); a branch ends one."""
    blocks = [("", [])]
    for each in statements:
        if len(each) == 1:
            if "$L__BB" in each[0]:
                blocks.append((each[0], []))
            continue
        blocks[-1][1].append(each)
        if each[2].split(".")[0] in ("bra", "ret", "exit"):
            blocks.append((None, []))
    return blocks


def register(name):
    """A register's name in Python."""
    return name.lstrip("%").replace("$", "_")


class _Statement:
    """One instruction, as lines of Python."""

    def __init__(self, negated, guard, opcode, operands, labels):
        self.opcode, self.operands, self.labels = opcode, operands, labels
        self.guard = f"~{register(guard)}" if negated else register(guard) if guard else None
        self.words = opcode.replace("::", ".").split(".")
        self.apart = False

    def of_some(self):
        """The same for lanes that are `active` while others are not."""
        made = copy.copy(self)
        made.guard = f"(active & {self.guard})" if self.guard else "active"
        made.apart = True
        return made

    def lines(self):
        name = self.words[0]
        special = getattr(self, f"_{name}", None)
        return special() if special else self._computed()

    def _value(self, text, kind):
        """An operand as an expression of the kind "u32", "s64", "f32", "pred"; bits are cast."""
        if text.startswith("%"):
            if match := _SPECIAL.match(text):
                return f"warp.special('{match[1]}', '{match[2]}')"
            if text == "%globaltimer":
                return "warp.clock()"
            if text == "%laneid":
                return "warp.lanes"
            name, bits = register(text), re.sub(r"\D", "", kind)
            if kind != "pred" and _WIDTHS[re.match(r"%[a-z]+", text)[0]] * 8 > int(bits):
                name = f"{name}.astype(numpy.uint{bits})"  # the lower bits
            return arithmetic.viewed(name, kind)
        if re.match(r"[A-Za-z_$]", text):
            return f"full({_symbol(text)}, numpy.uint{kind[1:]})"
        return arithmetic.constant(text, kind)

    def _assign(self, target, expression):
        """Lines that set a register, of guarded lanes only."""
        name = register(target)
        if name == "_":
            return []
        if self.guard is None:
            return [f"{name} = {expression}"]
        return [f"{name} = numpy.where({self.guard}, {expression}, {name})"]

    def _computed(self):
        """All that reads registers and writes one."""
        target, *sources = self.operands
        expression = arithmetic.expression(self.opcode, self.words, sources, self._value)
        return self._assign(target, expression)

    def _mov(self):
        target, source = self.operands
        kind = self.words[1]
        if target.startswith("{"):  # the halves of a register
            parts = self._listed(target)
            half = int(kind[1:]) // len(parts)
            bits = self._value(source, f"u{kind[1:]}")
            given = f"whole = {bits}"
            return [given] + [
                line
                for i, part in enumerate(parts)
                for line in self._assign(part, f"(whole >> {half * i}).astype(numpy.uint{half})")
            ]
        if source.startswith("{"):
            parts = [part.strip() for part in source[1:-1].split(",")]
            size = int(kind[1:])
            half = size // len(parts)
            joined = " | ".join(
                f"({self._value(part, f'u{half}')}.astype(numpy.uint{size}) << {half * i})"
                for i, part in enumerate(parts)
            )
            return self._assign(target, joined)
        if kind == "pred":
            return self._assign(target, f"full({int(source) != 0}, bool)")
        value = self._value(source, f"u{kind[1:]}")
        if not source.startswith("%") and not re.match(r"[A-Za-z_$]", source):
            value = f"full({value}, numpy.uint{kind[1:]})"
        return self._assign(target, value)

    def _bra(self):
        return self._jump(self.labels[self.operands[0]])

    def _ret(self):
        return self._jump("END")

    _exit = _ret

    def _jump(self, label):
        if self.apart:
            return [f"lanes = numpy.where({self.guard}, {label}, lanes)"]
        go = "return" if label == "END" else f"label = {label}"
        if self.guard is None:
            return [go]
        return [
            f"answer = warp.answer({self.guard})",
            "if answer is None:",
            f"    lanes = numpy.where({self.guard}, {label}, label)",
            "    label, active = warp.next_lanes(lanes)",
            "elif answer:",
            f"    {go}",
        ]

    def _bar(self):
        if self.words[1] == "warp":
            return []
        if self.apart:
            return ["raise NotImplementedError('PTX: a barrier for some lanes of a warp')"]
        if self.operands != ["0"]:
            raise NotImplementedError(f"PTX: {self.opcode} {self.operands}")
        return ["yield from warp.barrier()"]

    _barrier = _bar

    def _griddepcontrol(self):
        if self.words[1] != "wait":
            raise NotImplementedError(f"PTX: {self.opcode}")
        return ["yield from warp.await_earlier()"]

    def _fence(self):
        if self.words[-1] not in ("sys", "gpu", "gl"):
            raise NotImplementedError(f"PTX: {self.opcode}")
        return ["warp.fence()"]

    _membar = _fence

    def _address(self, text):
        """A byte address [32], uint64."""
        parts = [part.strip() for part in text[1:-1].split("+")]
        base = parts[0]
        if base.startswith("%"):
            base = f"{register(base)}.astype(numpy.uint64)"
        else:
            base = f"full({_symbol(base)}, numpy.uint64)"
        more = sum(int(part, 0) for part in parts[1:])
        return f"{base} + numpy.uint64({more})" if more else base

    def _space(self):
        named = [word for word in self.words if word in ("global", "shared", "param")]
        return named[0] if named else "global"

    def _vector(self):
        """(registers a lane, bytes of each)."""
        count = next((int(word[1]) for word in self.words if re.fullmatch(r"v[248]", word)), 1)
        return count, _SIZES[re.search(r"\d+$", self.words[-1])[0]]

    def _listed(self, text):
        inside = text[1:-1] if text.startswith("{") else text
        return [part.strip() for part in inside.split(",")]

    def _ld(self):
        space, (count, size) = self._space(), self._vector()
        targets = self._listed(self.operands[0])
        if space == "param":
            name = self.operands[1][1:-1]
            given = f"warp.parameter('{name}', {size * 8})"
            return self._assign(targets[0], self._extended(given, targets[0], size))
        mask = self.guard or "warp.all"
        how = f"{self._address(self.operands[1])}, {mask}, {count}, {size}"
        if space == "shared":
            found = f"warp.load_shared({how})"
        else:
            strong = "volatile" in self.words or "relaxed" in self.words
            kind = "acquire" if "acquire" in self.words else "strong" if strong else "weak"
            found = f"yield from warp.load({how}, '{kind}')"
        lines = [f"loaded = {found}"]
        for i, target in enumerate(targets):
            if target == "_":
                continue
            name = register(target)
            value = self._extended(f"loaded[{i}]", target, size)
            if self.guard:
                value = f"numpy.where({mask}, {value}, {name})"
            lines.append(f"{name} = {value}")
        return lines

    def _extended(self, value, target, size):
        """Loaded bits in a register that may be wider, by sign where the type has one."""
        width = _WIDTHS[re.match(r"%[a-z]+", target)[0]]
        if width == size:
            return value
        kind = self.words[-1][0] if self.words[-1][0] == "s" else "u"
        numbers = f"{value}.view(numpy.int{size * 8})" if kind == "s" else value
        whole = f"{numbers}.astype(numpy.{'int' if kind == 's' else 'uint'}{width * 8})"
        return f"bits({whole}, numpy.uint{width * 8})"

    def _ldmatrix(self):
        targets = self._listed(self.operands[0])
        how = f"{self._address(self.operands[1])}, {len(targets)}, {'trans' in self.words}"
        lines = [f"loaded = warp.load_matrices({how})"]
        return lines + [
            line for i, name in enumerate(targets) for line in self._assign(name, f"loaded[{i}]")
        ]

    def _stmatrix(self):
        values = ", ".join(self._value(part, "u32") for part in self._listed(self.operands[1]))
        at, transposed = self._address(self.operands[0]), "trans" in self.words
        return [f"warp.store_matrices({at}, ({values},), {transposed})"]

    def _mma(self):
        targets, *sources = map(self._listed, self.operands)
        if self.words[3] != "m16n8k16" or self.words[-2] not in ("f16", "bf16"):
            raise NotImplementedError(f"PTX: {self.opcode}")
        given = ["(" + ", ".join(self._value(x, "u32") for x in some) + ",)" for some in sources]
        lines = [f"product = matrix_product({', '.join(given)}, '{self.words[-2]}')"]
        return lines + [
            line for i, name in enumerate(targets) for line in self._assign(name, f"product[{i}]")
        ]

    def _st(self):
        space, (_, size) = self._space(), self._vector()
        kind = f"u{size * 8}"
        values = [self._value(part, kind) for part in self._listed(self.operands[1])]
        cast = f".astype(numpy.uint{size * 8})" if size < 4 else ""
        values = ", ".join(f"{value}{cast}" for value in values)
        mask = self.guard or "warp.all"
        how = f"{self._address(self.operands[0])}, {mask}, ({values},), {size}"
        if space == "shared":
            return [f"warp.store_shared({how})"]
        return [f"yield from warp.store({how}, {'release' in self.words})"]

    def _atomic(self, target, address, values):
        operation = next(
            word
            for word in self.words[1:]
            if word in ("add", "min", "max", "exch", "cas", "or", "and", "inc", "xor")
        )
        kind = self.words[-1].replace("b", "u")
        values = ", ".join(self._value(value, kind) for value in values)
        order = next((w for w in self.words if w in ("acq_rel", "acquire", "release")), "relaxed")
        mask = self.guard or "warp.all"
        rest = f"{self._address(address)}, {mask}, ({values},), '{operation}', '{kind}', '{order}'"
        shared = self._space() == "shared"
        call = f"warp.atomic_shared({rest})" if shared else f"(yield from warp.atomic({rest}))"
        if target is None or target == "_":
            return [call]
        name = register(target)
        return [f"found = {call}", *self._assign(target, "found")] if name else [call]

    def _atom(self):
        target, address, *values = self.operands
        return self._atomic(target, address, values)

    def _red(self):
        if self.words[1] == "async":
            raise NotImplementedError(f"PTX: {self.opcode}")
        address, *values = self.operands
        return self._atomic(None, address, values)


def _symbol(text):
    """An address in shared memory: of `global_smem`, where it begins."""
    parts = text.split("+")
    if parts[0] != "global_smem":
        raise NotImplementedError(f"PTX: the symbol {text}")
    return sum(int(part) for part in parts[1:])
