"""Decode attention by programs that stay, compiled for Hopper without a GPU.

The cases that run stand in `tests/kernels/interpreted/attention/test_streamed.py`.
"""

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from tests.kernels.compiled.attention.test_attention import (
    NAMES,
    fuses_exponents_alone,
    operand_types,
)
from tests.kernels.compiled.hopper_kernels import hopper_kernel
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda.attention.attention import attend
from tpdet.kernels.cuda.attention.decode import SplitStates
from tpdet.kernels.cuda.attention.decode_launch import streamed_form
from tpdet.kernels.cuda.attention.operands import AttentionShape
from tpdet.kernels.cuda.attention.streamed import BOX, attend_streamed
from tpdet.kernels.cuda.attention.variants import AttentionVariant, decode_variant, streams_of
from tpdet.kernels.cuda.hardware import B200, H100
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch

SPILLED = 8  # bytes
RESERVED = 1024  # bytes of shared memory that the driver takes for each program


def compiled(dtype, head, group, rows, stages=3, fp8=False):
    from triton.experimental.gluon.language import NVMMASharedLayout

    across = head // 2 if fp8 else head
    layout, lines = NVMMASharedLayout(min(128, 2 * across), 16, 2), NVMMASharedLayout(0, 8, 2)
    name = "i16" if fp8 else NAMES[dtype]
    tiles, boxes = (f"tensordesc<{name}[{n},{across}],{layout!r}>" for n in (64, BOX.value))
    types = {"operands": operand_types(dtype, fp8), "states": SplitStates(*3 * ["*fp32"])}
    exponents = f"tensordesc<u8[1,64],{lines!r}>" if fp8 else boxes
    types |= {"k_exponents": exponents, "v_exponents": exponents}
    types |= {"k_tiles": tiles, "v_tiles": tiles, "k_boxes": boxes, "v_boxes": boxes}
    types |= {"arrivals": "*i32", "lists": ("*i32", "*i32")}
    types |= dict.fromkeys(("widest", "sequences", "short_rows"), "i32")
    shape = AttentionShape(8, group, head, head, False, False)
    constants = {
        "SHAPE": shape,
        "FORM": streamed_form(AttentionVariant(rows, 4, stages, streamed=True), 512),
    }
    aligned = ("operands", "states", "arrivals", "lists")
    return hopper_kernel(attend_streamed, types, constants, aligned, {"num_warps": 4})


def loops_of(partition):
    """(what its first bound is made of, what its last is, its carried values) of every loop."""
    made, loops = {}, []

    def sources(name):
        how = made.get(name)
        if how is None or how[0] == "load":
            return {"load" if how else name}
        return set().union(*map(sources, how[1])) or {how[0]}

    for line in partition.splitlines():
        if loop := re.search(r"scf\.for (%\w+) = (%\w+) to (%\w+) step %\w+(.*)", line):
            index, first, last, more = loop.groups()
            made[index] = f"loop {len(loops)}", []
            loops.append((sources(first), sources(last), re.findall(r"(%\w+) = %\w+", more)))
        elif define := re.match(r"\s*(%\w+) = (?:\w+\.)?(\w+)(.*)", line):
            name, kind, rest = define.groups()
            names = re.findall(r"%\w+", rest)
            made[name] = ("load" if kind == "load" else rest.strip(), names)
    return loops


@pytest.mark.parametrize(
    ("dtype", "head", "group", "rows"),
    some_slow(
        [(torch.bfloat16, 128, 4, 8)],
        [(torch.bfloat16, 128, 4, 8), (torch.float16, 64, 7, 8), (torch.bfloat16, 128, 8, 16)],
    ),
)
def test_a_warp_copies_ahead_and_walks_what_the_others_walk(dtype, head, group, rows):
    done = compiled(dtype, head, group, rows)
    atomics = re.findall(r"(?<![a-z])(?:atom|red)\.[\w.]+", done.ptx)
    assert set(atomics) == {"atom.global.gpu.acq_rel.add.u32"}
    assert fuses_exponents_alone(done.ptx)
    assert "serialized" not in done.log and "C7515" not in done.log, done.log
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill stores", done.log)) <= SPILLED
    assert f"wgmma.mma_async.sync.aligned.m64n{rows}k16" in done.ptx and "mma.sync" not in done.ptx
    assert "wgmma.wait_group.sync.aligned 2;" in done.ptx, "sums do not run under the weights"
    assert "div.rn.f32" in done.ptx and "cp.async.bulk.tensor" in done.ptx
    assert re.search(r"add(\.rn)?\.f32\s+%\w+, %\w+, 0f00000000", done.ptx), "`+ 0.0` is gone"
    # Two programs have room on a multiprocessor.
    (limit,), (threads,) = (
        re.findall(rf"\.{name} (\d+)", done.ptx) for name in ("maxnreg", "reqntid")
    )
    assert 2 * int(limit) * int(threads) <= 1 << 16
    assert 2 * (done.shared + RESERVED) <= H100.shared_bytes + RESERVED
    copying = done.ttgir[done.ttgir.index("partition0") :]
    assert walks_all(copying)
    dropped = re.sub(r"(%\w+ = arith\.subi) %\w+, %\w+", r"\1 %none, %none", copying)
    assert not walks_all(dropped), "this test sees nothing"


def walks_all(partition):
    """Whether no bound of the copying warp's loops has become a constant, as Triton 3.6 makes some.

    Its loops are over sequences, their units and a unit's tiles, and carry the number of tiles.
    """
    loops = loops_of(partition)
    if len(loops) != 3 or any(len(carried) != 1 for _, _, carried in loops):
        return False
    _, (first, last, _), (_, tiles, _) = loops
    return "loop 0" in first & last and "load" in last and {"load", "loop 1"} <= tiles


def test_it_is_chosen_where_programs_have_many_splits_each():
    dtype = torch.bfloat16
    eight, sixteen = (AttentionVariant(n, 4, 3, swapped=True, streamed=True) for n in (8, 16))
    for rows, splits, sequences, key_heads, wanted in (
        (4, 256, 256, 8, eight),
        (8, 512, 64, 8, eight),
        (4, 256, 64, 8, None),  # 128 of them may be pads
        (4, 256, 256, 4, None),
        (4, 16384, 256, 8, None),  # so many splits of a sequence merge side by side
        (16, 512, 256, 8, sixteen),
        (16, 256, 256, 8, None),
        (32, 512, 256, 8, None),
    ):
        got = decode_variant(dtype, 128, rows, splits, sequences, key_heads, streams=True)
        assert got == wanted if wanted else not got.streamed
    assert streams_of(dtype, 128, H100) and streams_of(torch.float16, 64, H100)
    assert streams_of(dtype, 64, H100, fp8=True) and not streams_of(
        torch.float16, 64, H100, fp8=True
    )
    assert not streams_of(dtype, 256, H100) and not streams_of(torch.float32, 128, H100)
    assert not streams_of(dtype, 128, H100, plain=False) and not streams_of(dtype, 128, B200)


@pytest.mark.parametrize("other", [{"rows": 32}, {"warps": 8}])
def test_a_streamed_variant_of_another_form_cannot_be_made(other):
    streamed = AttentionVariant(8, 4, 3, swapped=True, streamed=True)
    with pytest.raises(ValueError, match=r"has one of \(8, 16\) rows and 4 warps"):
        replace(streamed, **other)


@pytest.mark.parametrize(("head", "rows", "window"), [(96, 1, None), (128, 5, None), (128, 1, 100)])
def test_what_has_no_kernel_is_refused(head, rows, window):
    q, pages = (torch.zeros(*n, dtype=torch.float16) for n in ((rows, 2, head), (1, 1, 256, head)))
    batch = make_batch((PagedSequence(0, rows, 0, (0,)),))
    streamed = AttentionVariant(8, 4, 3, swapped=True, streamed=True)
    with pytest.raises(ValueError, match=f"{2 * rows} rows of torch.float16 heads of {head}"):
        attend(q, pages, pages, batch, window, AttentionVariant(16, 4, 1), streamed)
