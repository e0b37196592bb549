"""Dependent launches on a GPU: the bits of plain ones, launched singly and out of a CUDA graph.

A chain of a decode step's kernels writes over the same memory turn after turn, from inputs that
change every turn: a program that read before its predecessor's stores were there would read another
turn's values. That this would be noticed shows a reader that does not wait, after a kernel that
lets it in early.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from tests.gpu.lib.checks import draw
from tests.gpu.lib.suite import Check
from tpdet.kernels import order
from tpdet.kernels.cuda.gemm import column as gemm
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.cuda.gemm.gated import gated_gemm
from tpdet.kernels.cuda.launch import dependent
from tpdet.kernels.cuda.pointwise import activation, finish, norm, rotary
from tpdet.kernels.inputs.norm import Finish, Norm
from tpdet.kernels.partial_sums import relative_roots

HIDDEN, WIDTH, LEAVES, LAYERS, TURNS = 4096, 12288, 8, 4, 400


class Chain:
    """Layers of norm, gated product, leaves, their fold with the next norm, rotation.

    Every other layer's gates and ups are a column product with SiLU behind it. Before either goes a
    small product of the same rows: the two are a pair.
    """

    def __init__(self):
        self.up = [draw(2 * WIDTH, HIDDEN, seed=i) / 64 for i in range(LAYERS)]
        self.small = [draw(128, HIDDEN, seed=30 + i) / 64 for i in range(LAYERS)]
        shape = LEAVES, HIDDEN, WIDTH // LEAVES
        self.down = [draw(*shape, seed=9 + i) / 64 for i in range(LAYERS)]
        self.weight = draw(HIDDEN, seed=99)
        self.angle = draw(256, 64, dtype=torch.float32, seed=98)
        (roots,) = order.fold_plan(order.DEFAULT_FOLD_ORDER, LEAVES, 1).roots
        self.roots = relative_roots(roots)

    def __call__(self, x):
        y = norm.rms_norm(x, Norm(self.weight, 1e-6))
        cos, sin = self.angle[: len(x)].cos(), self.angle[: len(x)].sin()
        found = []
        for layer, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            with dependent.pair_of_launches():
                small = gemm.column_gemm(y, self.small[layer], None, torch.float32)
                second = (
                    gemm.column_gemm(y, up, None, torch.float32) if layer % 2 else gated_gemm(y, up)
                )
            found.append(activation.activate_and_multiply(small, torch.bfloat16))
            mixed = (
                activation.activate_and_multiply(second, torch.bfloat16) if layer % 2 else second
            )
            sums = leaf_gemm.leaf_sums(mixed, down, self.roots)
            x, y = finish.fold_and_norm(sums, Finish(x, Norm(self.weight, 1e-6)))
            turned = rotary.rotate_heads(y.view(len(y), -1, 128), cos, sin, None, 1e-6)
            y = turned.view(y.shape)
        return torch.cat([y, *found], 1)


def plainly(run):
    """What `run` gives where every launch is plain."""
    before = dependent.all_free
    dependent.all_free = lambda: False
    try:
        return run()
    finally:
        dependent.all_free = before


def captured(chain, x):
    """The chain over x's memory as a graph, and its result."""
    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    return graph, y


def chains_have_the_bits_of_plain_launches(rows):
    if not dependent.dependent_launch(torch.device("cuda", 0))["DEPENDENT"]:
        raise RuntimeError("launches are plain on this GPU: nothing is compared")
    chain, x = Chain(), torch.empty(rows, HIDDEN, dtype=torch.float32, device="cuda")
    inputs = [draw(rows, HIDDEN, dtype=torch.float32, seed=100 + i) for i in range(3)]
    wanted = plainly(lambda: [chain(each).view(torch.int16).clone() for each in inputs])
    if torch.equal(wanted[0], wanted[1]):
        raise AssertionError("the inputs make no difference")
    graph, y = captured(chain, x)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(TURNS):
        x.copy_(inputs[turn % 3])
        graph.replay()
        wrong += (y.view(torch.int16) != wanted[turn % 3]).sum()
        if turn % 4 == 0:
            x.copy_(inputs[turn % 3])
            wrong += (chain(x).view(torch.int16) != wanted[turn % 3]).sum()
    if int(wrong):
        raise AssertionError(f"{int(wrong)} values differ in {TURNS} turns")
    return {"turns": TURNS}


@triton.jit(do_not_specialize=["looks"])
def _late(x, y, looks, BLOCK: tl.constexpr):
    """y = x + 1, stored long after the next kernel's programs were let in."""
    gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at)
    for _ in range(looks):
        value = tl.load(x + at, volatile=True)
    tl.store(y + at, value + 1)


@triton.jit
def _read(y, z, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """z = y."""
    dependent.await_earlier(DEPENDENT)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + at, tl.load(y + at))


def wrong_values(**options):
    """How many values a reader launched by `options` takes before they are there."""
    x = torch.zeros(32, 256, dtype=torch.int32, device="cuda")
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def step():
        _late[32,](x, y, 2000, BLOCK=256)
        _read[32,](y, z, BLOCK=256, **options)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(TURNS):
        x.fill_(turn)
        if turn % 2:
            graph.replay()
        else:
            step()
        wrong += (z != turn + 1).sum()
    return int(wrong)


@triton.jit
def _raise(x, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """x += 1, by one program."""
    dependent.await_earlier(DEPENDENT)
    at = x + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) + 1)


@triton.jit
def _look(x, y, looks, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """y = x, a copy of each program; looks: how often one looks again before it ends."""
    dependent.await_earlier(DEPENDENT)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    for _ in range(looks):
        tl.load(x + at, volatile=True)
    tl.store(y + tl.program_id(0) * BLOCK + at, value)
    dependent.await_first(DEPENDENT)


def the_second_of_a_pair_sees_what_came_before_the_first():
    """Values that every multiprocessor has read a moment ago, and that one has changed since."""
    x = torch.zeros(256, dtype=torch.int32, device="cuda")
    first, second = (torch.zeros(n, 256, dtype=torch.int32, device="cuda") for n in (4, 1056))
    launch = lambda turn: dependent.dependent_launch(x.device, turn)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def step():
        for _ in range(20):
            _look[1056,](x, second, 0, BLOCK=256, num_warps=1, **launch(dependent.ALONE))
            _raise[1,](x, BLOCK=256, num_warps=1, **launch(dependent.ALONE))
            _look[4,](x, first, 500, BLOCK=256, num_warps=1, **launch(dependent.FIRST))
            _look[1056,](x, second, 0, BLOCK=256, num_warps=1, **launch(dependent.SECOND))
            wrong.add_((second != x).sum() + (first != x).sum())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(TURNS // 20):
        graph.replay()
        step()
    if int(wrong):
        raise AssertionError(f"{int(wrong)} values of another turn")


def a_program_that_waits_sees_everything():
    if wrong := wrong_values(**dependent.dependent_launch(torch.device("cuda", 0))):
        raise AssertionError(f"{wrong} values of another turn")


def one_that_does_not_is_noticed():
    if not wrong_values(DEPENDENT=False, launch_pdl=True):
        raise AssertionError("nothing here shows whether a program waits")


def dependent_checks():
    """Every check."""
    chains = [
        Check(f"a chain of {rows} rows", chains_have_the_bits_of_plain_launches, (rows,))
        for rows in (1, 16, 64, 256)
    ]
    return [
        *chains,
        Check("a pair", the_second_of_a_pair_sees_what_came_before_the_first),
        Check("a reader that waits", a_program_that_waits_sees_everything),
        Check("a reader that does not", one_that_does_not_is_noticed),
    ]
