"""Gluon's Hopper primitives in torch and threads: for `prefill_warp_specialised.py`, `streamed.py`
and `warp_specialised.py`.

Triton's interpreter knows no Gluon. Here the kernel's own source runs as Python: the producer and
each consumer are a thread, barriers block, a copy arrives late, and a matrix product or a store
reads its operands only when it is waited for, so that a slot released, filled or read too early
gives other bits or never ends. Registers, layouts and what happens between the warps of one
consumer are not emulated.
"""

import threading
import time
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace

import numpy
import torch
from triton.runtime import interpreter

from tpdet.kernels import order

WAIT_SECONDS = 20
_UNWRITTEN = 0x5A5A5A5A  # integers in shared memory; of bytes the last one


def grouped_product(a, b, total):
    """total + a @ b, groups of 16 in turn, rounded once a group (as the interpreted tests do)."""
    left, right = a.double(), b.double()
    for k in range(0, a.shape[1], order.K_GROUP):
        group = left[:, k : k + order.K_GROUP] @ right[k : k + order.K_GROUP]
        total = (total.double() + group).float()
    return total


def fused(a, b, c):
    """a * b + c of fp32, rounded as Triton's interpreter does."""
    whole = numpy.zeros(a.shape, numpy.float32)
    a, b, c = (numpy.asarray(x, numpy.float32) + whole for x in (a, b, c))
    rounded_once = getattr(interpreter._interpreter, "fma_fp32", None)
    return torch.from_numpy(rounded_once(a, b, c) if rounded_once else a * b + c)


def numbers_of_codes(pairs):
    """What `fp8_tiles` makes of pairs of codes int16: q * 2^-120 of the even lanes, of the odd."""
    codes = pairs.contiguous().view(torch.float8_e4m3fn).view(*pairs.shape, 2)
    return tuple((codes.float() * 2.0**-120).to(torch.bfloat16).unbind(-1))


class Pointer:
    """A tensor's storage from an element on."""

    def __init__(self, tensor, at=0):
        self.flat, self.at = tensor.reshape(-1), at
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more):
        return Pointer(self.flat, self.at + more)


def loaded(pointer, mask, other):
    """What stands where a tensor of pointers points; `other` where a mask is false."""
    live = torch.ones_like(pointer.at, dtype=torch.bool) if mask is None else mask
    at = torch.where(live, pointer.at, 0)
    return torch.where(live, pointer.flat[at], torch.tensor(other, dtype=pointer.flat.dtype))


class Scalar(int):
    """An integer that was loaded."""

    def to(self, _):
        return self


class Shared:
    """Shared memory, NaN until written."""

    def __init__(self, tensor):
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, tensor.shape
        self.layout = None

    def index(self, slot):
        return Shared(self.tensor[slot])

    def permute(self, axes):
        return Shared(self.tensor.permute(axes))

    def reshape(self, shape):
        return Shared(self.tensor.reshape(shape))

    def slice(self, first, count, axis=0):
        return Shared(self.tensor.narrow(axis, first, count))

    def load(self, _):
        return self.tensor.clone()

    def store(self, value):
        self.tensor.copy_(value)


class Barrier:
    """An mbarrier: a phase ends when its arrivals and bytes are all in."""

    def __init__(self):
        self.changed, self.ended, self.bytes = threading.Condition(), 0, 0

    def start(self, count):
        self.count = self.missing = count

    def arrive(self, count=1, expected=0, landed=0):
        with self.changed:
            self.missing, self.bytes = self.missing - count, self.bytes + expected - landed
            if self.missing < 0:
                raise AssertionError("more arrivals than the barrier was made for")
            if self.missing == 0 and self.bytes == 0:
                self.ended, self.missing = self.ended + 1, self.count
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            if not self.changed.wait_for(lambda: self.ended & 1 != parity, WAIT_SECONDS):
                raise AssertionError("a wait that nothing ends")


class Barriers:
    def __init__(self, count):
        self.barriers, self.shape = [Barrier() for _ in range(count)], (count, 1)

    def index(self, slot):
        return self.barriers[slot]


class Product:
    """A product that runs: its operands are read when it is waited for."""

    def __init__(self, a, b, acc):
        self.operands, self.value = (a, b, acc), None

    def finish(self):
        if self.value is None:
            a, b, acc = (x.tensor if isinstance(x, Shared) else x for x in self.operands)
            self.value = grouped_product(a, b, acc.value if isinstance(acc, Product) else acc)
        return self.value


class Machine:
    """One program's primitives, by the names the kernel knows them under."""

    def __init__(self):
        self.local, self.failures, self.landing = threading.local(), [], []

    def warpgroup_mma(self, a, b, acc, use_acc=True, is_async=False):
        if not is_async:
            raise AssertionError("the emulation has asynchronous products alone")
        product = Product(a, b, acc if use_acc else torch.zeros_like(acc))
        self.local.__dict__.setdefault("under_way", []).append(product)
        return product

    def warpgroup_mma_wait(self, outstanding, deps):
        under_way = self.local.__dict__.setdefault("under_way", [])
        while len(under_way) > outstanding:
            under_way.pop(0).finish()
        # What still runs stays a Product: another may add to it, no more.
        ended = lambda x: isinstance(x, Product) and x.value is not None
        done = tuple(x.value if ended(x) else x for x in deps)
        return done if len(done) > 1 else done[0]

    def copy(self, descriptor, at, barrier, slot):
        def land():
            time.sleep(0.001)
            cut = [slice(first, first + size) for first, size in zip(at, slot.shape, strict=True)]
            inside = descriptor.tensor[tuple(cut)]
            block = torch.zeros(slot.shape, dtype=inside.dtype)
            block[tuple(slice(0, size) for size in inside.shape)] = inside
            slot.store(block)
            barrier.arrive(0, landed=block.numel() * block.element_size())

        thread = threading.Thread(target=land)
        self.landing.append(thread)
        thread.start()

    def ask(self, slot, pointer, mask):
        """What is asked for comes when its group is waited for."""
        self.local.__dict__.setdefault("asked", []).append((slot, pointer, mask))

    def end_group(self):
        groups = self.local.__dict__.setdefault("groups", [])
        groups.append(self.local.__dict__.pop("asked", []))

    def wait_groups(self, outstanding):
        groups = self.local.__dict__.setdefault("groups", [])
        while len(groups) > outstanding:
            for slot, pointer, mask in groups.pop(0):
                slot.store(loaded(pointer, mask, 0))

    def send(self, descriptor, at, slot):
        self.local.__dict__.setdefault("leaving", []).append((descriptor, at, slot))

    def store_wait(self, outstanding):
        leaving = self.local.__dict__.setdefault("leaving", [])
        while len(leaving) > outstanding:
            descriptor, (first, left), slot = leaving.pop(0)
            height, width = slot.shape
            onto = descriptor.tensor[first : first + height, left : left + width]
            onto.copy_(slot.tensor[: onto.shape[0], : onto.shape[1]])

    def run_warps(self, consume, pipeline, buffers, taken, _, produce, produced, __, count=2):
        consumers = [(consume, (i, pipeline, buffers.index(i), *taken)) for i in range(count)]
        self.warp_specialize([*consumers, (produce, produced)])

    def warp_specialize(self, partitions, *_):
        def run(function, arguments):
            try:
                function(*arguments)
                if getattr(self.local, "leaving", None):
                    raise AssertionError("a tile has left that nobody waited for")
            except BaseException as error:
                self.failures.append(error)

        threads = [threading.Thread(target=run, args=partition) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in [*threads, *self.landing]:
            thread.join()
        if self.failures:
            raise self.failures[0]


def language(machine, program, programs):
    """The names of `gluon.language` that the kernel uses."""
    anything = lambda *_, **__: None
    tensor = lambda x, like: x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=like)

    def where(condition, x, y):
        if isinstance(condition, bool) and not isinstance(y, torch.Tensor):
            return x if condition else y
        like = next((v.dtype for v in (x, y) if isinstance(v, torch.Tensor)), None)
        return torch.where(tensor(condition, torch.bool), tensor(x, like), tensor(y, like))

    def load(pointer, mask=None, other=0.0, cache_modifier=None, volatile=False):
        if isinstance(pointer.at, int):
            value = pointer.flat[pointer.at]
            return value if value.is_floating_point() else Scalar(value)
        return loaded(pointer, mask, other)

    def store(pointer, value, mask=None):
        if isinstance(pointer.at, int):
            pointer.flat[pointer.at] = value
            return
        live = torch.ones_like(pointer.at, dtype=torch.bool) if mask is None else mask
        live = live.expand(value.shape)
        pointer.flat[pointer.at[live]] = value[live]

    def atomic_add(pointer, value, sem):
        before = int(pointer.flat[pointer.at])
        pointer.flat[pointer.at] += value
        return before

    def reduced(integers, reduce):
        """A reduction of a vector of integers is one number; else it goes along an axis."""

        def run(x, axis):
            if not x.is_floating_point():
                return int(integers(x)) if x.dim() == 1 else integers(x, axis).to(x.dtype)
            return torch.as_tensor(reduce(x.numpy(), axis))

        return run

    def allocate(dtype, shape, layout, value=None):
        if dtype == torch.int64:
            return Barriers(shape[0])
        unwritten = _UNWRITTEN & (1 << 8 * dtype.itemsize) - 1
        unwritten = torch.nan if dtype.is_floating_point else unwritten
        return Shared(torch.full(shape, unwritten, dtype=dtype) if value is None else value)

    def assembly(code, _, arguments, dtype, *__, **___):
        if code.startswith("{.reg .b32 s, t;and.b32 s, $2, 0x80808080;"):
            return numbers_of_codes(*arguments)
        if "cvt.rn.bf16x2.f32 $1" in code:
            high = arguments[0].bfloat16()
            return high, (arguments[0] - high.float()).bfloat16()
        if code.startswith("mov.b32 "):
            return arguments[0].to(dtype)
        raise AssertionError(f"no emulation of {code}")

    through_numpy = lambda f: lambda *xs: torch.from_numpy(f(*(x.numpy() for x in xs)))
    return SimpleNamespace(
        constexpr=None,
        bfloat16=torch.bfloat16,
        uint8=torch.uint8,
        int16=torch.int16,
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        int1=torch.bool,
        NVMMADistributedLayout=anything,
        NVMMASharedLayout=anything,
        SliceLayout=anything,
        DotOperandLayout=anything,
        BlockedLayout=anything,
        convert_layout=lambda x, _, **__: x,
        program_id=lambda axis: program[axis] if isinstance(program, tuple) else program,
        num_programs=lambda _: programs,
        where=where,
        load=load,
        store=store,
        cdiv=lambda a, b: -(-a // b),
        cast=lambda x, dtype, bitcast=False: x.view(dtype) if bitcast else x,
        arange=lambda first, end, layout: torch.arange(first, end),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        minimum=lambda a, b: a.clamp(max=b) if isinstance(a, torch.Tensor) else min(a, b),
        abs=torch.abs,
        static_range=range,
        maximum=lambda a, b: max(a, b) if isinstance(a, int) else through_numpy(numpy.fmax)(a, b),
        max=reduced(torch.max, numpy.fmax.reduce),
        min=reduced(torch.min, numpy.fmin.reduce),
        sum=reduced(torch.sum, numpy.add.reduce),
        associative_scan=lambda x, _, combine: torch.cat([*accumulate(x.split(1), combine)]),
        atomic_add=atomic_add,
        warp_specialize=machine.warp_specialize,
        exp2=through_numpy(numpy.exp2),
        div_rn=lambda a, b: a / b,
        fma=fused,
        inline_asm_elementwise=assembly,
        broadcast_to=lambda x, shape: x.expand(shape),
        broadcast=lambda *xs: torch.broadcast_tensors(*xs),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        join=lambda a, b: torch.stack([a, b], -1),
        DistributedLinearLayout=anything,
        SwizzledSharedLayout=anything,
        allocate_shared_memory=allocate,
    )


def run_program(kernel, shared_arithmetic, program, arguments, programs=1, others=()):
    """Run one program of a Gluon kernel's module.

    `shared_arithmetic` are the Triton modules it calls, `others` the Gluon modules; their names are
    replaced while it runs.
    """
    machine = Machine()
    names = {
        "gl": language(machine, program, programs),
        "tl": SimpleNamespace(debug_barrier=lambda: None),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.start(count),
            expect=lambda barrier, size: barrier.arrive(expected=size),
            arrive=lambda barrier, count, pred=True: barrier.arrive(count) if pred else None,
            wait=lambda barrier, parity: barrier.wait(parity),
        ),
        "run_warps": machine.run_warps,
        "limit_registers": lambda registers: None,
        "copy_tile": machine.copy,
        "copy_to_shared": machine.ask,
        "async_copy": SimpleNamespace(
            commit_group=machine.end_group, wait_group=machine.wait_groups
        ),
        "send_tile": machine.send,
        "reinterpreted": lambda x, dtype, shape, _: Shared(x.tensor.view(dtype).view(shape)),
        "tma": SimpleNamespace(store_wait=machine.store_wait),
        "fence_async_shared": lambda: None,
        "mma_v2": grouped_product,
        "warpgroup_mma": machine.warpgroup_mma,
        "warpgroup_mma_wait": machine.warpgroup_mma_wait,
    }
    arithmetic = [*map(vars, shared_arithmetic)]
    gluon = [*map(vars, others), kernel.fn.__globals__]
    with _restored([*arithmetic, *gluon]), _halves_by_split():
        for space in (*arithmetic, *gluon):
            for name, value in list(space.items()):
                if hasattr(value, "fn"):
                    space[name] = value.fn
                elif type(value).__name__ == "constexpr":
                    space[name] = value.value
        for space in arithmetic:
            space["tl"] = names["gl"]
        for space in gluon:
            space.update(names)
        kernel.fn(**arguments)


@contextmanager
def _halves_by_split():
    """Within, `x.split()` gives the two halves of x's last axis of two, as Triton's does."""
    of_torch = torch.Tensor.split
    pair = lambda x, *told, **named: of_torch(x, *told, **named) if told or named else x.unbind(-1)
    torch.Tensor.split = pair
    try:
        yield
    finally:
        torch.Tensor.split = of_torch


@contextmanager
def _restored(spaces):
    """Within, names of modules may be replaced; afterwards all stand as before."""
    before = [dict(space) for space in spaces]
    try:
        yield
    finally:
        for space, kept in zip(spaces, before, strict=True):
            space.clear()
            space.update(kept)
