"""Dependent launches: what is launched so waits before it touches memory, and only where it can."""

import ast
import threading
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tests.kernels.compiled.hopper_kernels import check_waits_first, hopper_kernel
from tests.lib.kernels.driverless import compile_for_hopper
from tests.policy.test_policy import sources
from tpdet.kernels import ops
from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.cuda.gemm import column
from tpdet.kernels.cuda.launch.dependent import (
    ALONE,
    FIRST,
    SECOND,
    await_earlier,
    dependent_launch,
    pair_of_launches,
)
from tpdet.kernels.cuda.launch.multiprocessors import leaving
from tpdet.kernels.cuda.pointwise.activation import activate_and_multiply

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# Long kernels of prefill, where nothing is gained, and of draws that a decode step seldom has.
PLAIN = {
    "attend_blocks", "attend_warp_specialised", "count_parts",
    "hash_chunks", "join_nodes", "top_of_parts", "two_shot_direct",
}  # fmt: skip


@triton.jit
def waits_first(x, y, DEPENDENT: tl.constexpr):
    await_earlier(DEPENDENT)
    tl.store(y, tl.load(x))


@triton.jit
def waits_late(x, y, DEPENDENT: tl.constexpr):
    value = tl.load(x)
    await_earlier(DEPENDENT)
    tl.store(y, value)


@triton.jit
def waits_sometimes(x, y, DEPENDENT: tl.constexpr):
    if tl.program_id(0) > 0:
        await_earlier(DEPENDENT)
    tl.store(y, tl.load(x))


@triton.jit
def waits_twice(x, y, DEPENDENT: tl.constexpr):
    await_earlier(DEPENDENT)
    tl.store(y, tl.load(x))
    gdc_wait()


@triton.jit
def never_waits(x, y, DEPENDENT: tl.constexpr):
    tl.store(y, tl.load(x))


@triton.jit
def triggers(x, y, DEPENDENT: tl.constexpr):
    await_earlier(DEPENDENT)
    gdc_launch_dependents()
    tl.store(y, tl.load(x))


def compiled(kernel):
    return hopper_kernel(kernel, {"x": "*fp32", "y": "*fp32"}, {}, (), {"num_warps": 1})


def test_a_kernel_that_waits_first_passes():
    assert compiled(waits_first).ptx.count("griddepcontrol") == 1


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (waits_late, "before the wait"),
        (waits_sometimes, "a branch before the wait"),
        (waits_twice, "2 waits"),
        (never_waits, "0 waits"),
        (triggers, "let in early"),
    ],
)
def test_a_kernel_that_does_not_is_refused(kernel, why):
    with pytest.raises(AssertionError, match=why):
        compiled(kernel)


@pytest.mark.parametrize(
    "touch",
    [
        "@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];",
        "ld.volatile.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];",
        "st.global.b32 [ %rd2 + 0 ], { %r1 };",
        "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;",
        "cp.async.bulk.tensor.2d.shared::cluster.global [%r1], [%rd1, {%r2, %r3}], [%r4];",
        "@%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 8192;",
        "atom.global.gpu.relaxed.add.u64 %rd3, [%rd1], 1;",
        "prefetch.tensormap [%rd1];",
    ],
)
def test_every_kind_of_access_counts(touch):
    entry, wait = ".visible .entry kernel(.param .u64 p)\n{\n", "griddepcontrol.wait;\n"
    check_waits_first(f"{entry}ld.param.b64 %rd1, [p];\n{wait}{touch}\n}}")
    with pytest.raises(AssertionError, match="before the wait"):
        check_waits_first(f"{entry}ld.param.b64 %rd1, [p];\n{touch}\n{wait}}}")


@pytest.fixture
def capability(monkeypatch):
    """Sets what the GPU can do; another device stays one."""

    def pretend(*pair):
        gpu = replace(hardware.H200, capability=pair)
        known = {"cuda": gpu, "cpu": hardware.NO_GPU}
        monkeypatch.setattr(hardware, "gpu_of", lambda device: known[device.type])

    return pretend


@pytest.mark.parametrize("pair", [(9, 0), (10, 0), (12, 0)])
def test_launches_are_dependent_from_capability_9(capability, pair):
    capability(*pair)
    assert dependent_launch(GPU) == {"DEPENDENT": True, "launch_pdl": True}


@pytest.mark.parametrize("pair", [(8, 0), (8, 9)])
def test_launches_are_plain_on_older_gpus_and_on_the_cpu(capability, pair):
    capability(*pair)
    assert dependent_launch(GPU) == {"DEPENDENT": False}
    capability(9, 0)
    assert dependent_launch(CPU) == {"DEPENDENT": False}


def test_launches_are_plain_while_something_is_overlapped(capability):
    capability(9, 0)
    with leaving(20):
        assert dependent_launch(GPU) == {"DEPENDENT": False}
    with leaving(0):
        assert dependent_launch(GPU)["DEPENDENT"]


def test_a_kernel_compiled_ahead_is_the_one_that_is_launched(monkeypatch, tmp_path):
    compile_for_hopper(monkeypatch, tmp_path)
    monkeypatch.setattr(hardware, "gpu_of", lambda device: hardware.H200)
    with recording() as asked:
        activate_and_multiply(torch.zeros(2, 64), torch.float32)
    (each,) = asked.values()
    each.compile()
    with recording() as again:
        activate_and_multiply(torch.zeros(2, 64), torch.float32)
        assert not again
        with leaving(20):
            activate_and_multiply(torch.zeros(2, 64), torch.float32)
    assert len(again) == 1, "a plain launch is another kernel"


@pytest.fixture
def turns(monkeypatch):
    """The turns of products of one leaf as they are launched."""
    launched = []
    run = lambda operands, tile, sms: launched.append(operands.turn)
    monkeypatch.setattr(column, "run_chain", run)
    return launched


def product(rows, x=None):
    x = torch.zeros(rows, 64) if x is None else x
    column.column_gemm(x, torch.zeros(32, 64))


@pytest.mark.parametrize(("rows", "wanted"), [(256, [FIRST, SECOND]), (257, [ALONE, ALONE])])
def test_two_products_of_few_rows_are_a_pair(turns, rows, wanted):
    with pair_of_launches():
        product(rows)
        product(rows)
    assert turns == wanted


def test_a_product_behind_a_copy_and_one_behind_a_pair_are_alone(turns):
    with pair_of_launches():
        product(4)
        product(4, torch.zeros(64, 4).t())
        product(4)
    product(4)
    assert turns == [FIRST, ALONE, ALONE, ALONE]


def test_a_pair_that_failed_leaves_nothing_behind(turns):
    with pytest.raises(ValueError, match="one dtype"), pair_of_launches():
        column.column_gemm(torch.zeros(4, 64).half(), torch.zeros(32, 64))
    product(4)
    assert turns == [ALONE]


def test_a_product_of_no_rows_is_not_the_first_of_a_pair(turns):
    with pair_of_launches():
        product(0)
        product(4)
    assert turns == [ALONE, FIRST]


def test_a_product_of_another_thread_is_in_no_pair(turns):
    with pair_of_launches():
        other = threading.Thread(target=product, args=(4,))
        other.start()
        other.join()
        product(4)
        product(4)
    assert turns == [ALONE, FIRST, SECOND]


def test_what_is_recorded_for_gradients_is_no_pair(turns, monkeypatch):
    monkeypatch.setattr(hardware, "room_of", lambda kind: "cuda")
    with ops.recorded({"column_gemm": column.column_gemm}), ops.pair_of_launches(GPU):
        product(4)
    with ops.pair_of_launches(GPU):
        product(4)
    assert turns == [ALONE, FIRST]


def kernels_of(trees):
    """Functions that are compiled, by name."""
    return {
        node.name: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(each) for each in node.decorator_list)
    }


def takes_part(node):
    return "DEPENDENT" in [each.arg for each in node.args.args]


def first_statement(node):
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return ast.unparse(body[0])


def waits_last(node):
    """How often it waits for the first of a pair; the last statement counts, and no other."""
    last = ast.unparse(node.body[-1]) == "await_first(DEPENDENT)"
    return last and ast.unparse(node).count("await_first(")


HOST_FUNCTION = "dependent_launch"


def host_functions_of(trees):
    """Names of the host function and of those that return its options with others."""
    passing = {True: {HOST_FUNCTION}, False: set()}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name != HOST_FUNCTION:
                returned = node.body[-1]
                passes = isinstance(returned, ast.Return) and isinstance(returned.value, ast.Dict)
                passes = passes and f"**{HOST_FUNCTION}(" in ast.unparse(returned)
                passing[passes].add(node.name)
    return tuple(f"{name}(" for name in passing[True] - passing[False])


def launches_of(tree, through):
    """(kernel, host functions of its launch) of every launch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            starred = [ast.unparse(word.value) for word in node.keywords if word.arg is None]
            told = [text for text in starred if text.startswith(through)]
            yield ast.unparse(node.func.value).split(".")[-1], told


def unfit(trees):
    """What is launched dependent without waiting first, or could be."""
    kernels = kernels_of(trees)
    wrong = [
        f"{name} waits late"
        for name, node in kernels.items()
        if takes_part(node)
        and name not in ("await_earlier", "await_first")
        and first_statement(node) != "await_earlier(DEPENDENT)"
    ]
    through = host_functions_of(trees)
    for path, tree in trees.items():
        for name, told in launches_of(tree, through):
            if name in kernels and takes_part(kernels[name]) != bool(told):
                wrong.append(f"{path.name} launches {name}")
            elif any("turn" in text for text in told) and waits_last(kernels[name]) != 1:
                wrong.append(f"{name} waits for no first")
    return wrong


def test_what_is_launched_dependent_waits_first():
    texts = {path: path.read_text() for path in sources()}
    assert [path.name for path, text in texts.items() if "launch_pdl" in text] == ["dependent.py"]
    of_kernels = lambda path, text: "kernels" in path.parts or "triton" in text
    trees = {path: ast.parse(text) for path, text in texts.items() if of_kernels(path, text)}
    assert not unfit(trees)
    kernels = kernels_of(trees)
    launches = [launch for tree in trees.values() for launch in launches_of(tree, ())]
    launched = {name for name, _ in launches} & set(kernels)
    assert {name for name in launched if not takes_part(kernels[name])} == PLAIN
    assert len(launched) == 80


GOOD = """
@triton.jit
def copy(x, DEPENDENT: tl.constexpr):
    "Copies."
    await_earlier(DEPENDENT)
    tl.store(x, tl.load(x))

def run(x):
    copy[1,](x, num_warps=1, **dependent_launch(x.device))
"""


def test_what_is_not_fit_is_found():
    found = lambda text: unfit({Path("copy.py"): ast.parse(text)})
    assert not found(GOOD)
    late = GOOD.replace("    await", "    y = tl.load(x)\n    await")
    by_hand = GOOD.replace("**dependent_launch(x.device)", "DEPENDENT=True")
    without = GOOD.replace(", DEPENDENT: tl.constexpr", "").replace("await_earlier(DEPENDENT)", "1")
    others = GOOD.replace("num_warps=1, **dependent_launch(x.device)", "**options(x.device)")
    assert not found(f"{others}\ndef options(device):\n    return {{**dependent_launch(device)}}")
    assert found(f"{others}\ndef options(device):\n    return {{}}") == ["copy.py launches copy"]
    assert found(late) == ["copy waits late"]
    paired = GOOD.replace("(x.device))", "(x.device, turn))")
    assert found(paired) == ["copy waits for no first"]
    ends = "    tl.store(x, tl.load(x))\n"
    assert not found(paired.replace(ends, f"{ends}    await_first(DEPENDENT)\n"))
    assert found(paired.replace(ends, f"    await_first(DEPENDENT)\n{ends}"))
    assert found(by_hand) == ["copy.py launches copy"]
    assert found(without) == ["copy.py launches copy"]
