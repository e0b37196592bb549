"""Forms of the gated delta rule in Gluon, emulated between the interpreted kernels.

They are held against the CPU's bits; and their admission at a start, which runs the same way here.
"""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.interpreted.emulated.warps import Pointer, run_program
from tests.kernels.interpreted.linear.test_linear import ROWS_ALONE, grouped_chain, steps_of
from tests.kernels.interpreted.test_gluon_gemm import described
from tests.lib.bits import assert_same_bits
from tests.lib.kernels.linear_rows import linear_rows, poisoned_state
from tpdet.kernels.cpu.linear import delta_rule as cpu_rule
from tpdet.kernels.cuda.launch import warp_pipeline
from tpdet.kernels.cuda.linear import (
    admission,
    decode_launch,
    decode_rows,
    delta_rule,
    forms,
    transposed,
    whole_chunks,
    whole_chunks_launch,
)

CPU = torch.device("cpu")


def pointers(x):
    return SimpleNamespace(**{name: Pointer(part) for name, part in x._asdict().items()})


def run_whole_chunks(step, state, scratch, tables, out, shape):
    """`launch_whole_chunks`: every program in turn."""
    tiles = {name: described(getattr(step, name).flatten(1)) for name in "qkv"}
    arguments = {f"{name}_tiles": tile for name, tile in tiles.items()} | {
        "term_tiles": described(scratch.tiles.view(-1, 16)),
        "out_tiles": described(out.view(len(out), -1)),
        "vectors": Pointer(scratch.vectors),
        "boundary": Pointer(state.boundary),
        "tables": pointers(tables),
        "SHAPE": shape,
        "KEY_STAGES": whole_chunks_launch.KEY_STAGES,
        "STAGES": whole_chunks_launch.STAGES,
        "DEPENDENT": False,
    }
    heads, kernel = shape.KEY_HEADS * shape.GROUP, whole_chunks.pass_whole_chunks
    runs = len(tables.runs if shape.ALONE else tables.states)
    for program in product(*map(range, (heads, shape.VALUE_SIZE // 64, runs))):
        run_program(kernel, (), program, arguments, others=(warp_pipeline, transposed))


class DecodeRows:
    """`decode_rows`, launched: every program in turn."""

    def __getitem__(self, grid):
        def launch(v, v_stride, state, scratch, tables, out, SHAPE, WARPS, TILES, **_):
            arguments = {
                "v": Pointer(v),
                "v_stride": v_stride,
                "state": pointers(state),
                "scratch": pointers(scratch),
                "tables": pointers(tables),
                "out": Pointer(out),
                "SHAPE": SHAPE,
                "WARPS": WARPS,
                "TILES": TILES,
                "DEPENDENT": False,
            }
            for program in product(*map(range, grid)):
                run_program(decode_rows.decode_rows, (), program, arguments, others=(transposed,))

        return launch


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    monkeypatch.setattr(cpu_rule, "chain", grouped_chain)
    monkeypatch.setattr(delta_rule, "launch_whole_chunks", run_whole_chunks)
    monkeypatch.setattr(decode_launch, "decode_rows", DecodeRows())
    monkeypatch.setattr(admission, "takes_rows_alone", lambda *_: True)
    monkeypatch.setattr(admission, "takes_whole_chunks", lambda *_: True)
    monkeypatch.setattr(forms, "_admitted", {})


def on_cpu_and_by(form, rows, steps):
    """o and the states, by the CPU's rule and by a form."""
    (_, key_heads, key_size), (_, value_heads, value_size) = rows.k.shape, rows.v.shape
    forms.admit(CPU, (key_heads, value_heads, key_size, value_size), frozenset([form]))
    for rule in (cpu_rule, delta_rule):
        state = poisoned_state(rows)
        yield steps_of(rule, rows, state, steps), state


@pytest.mark.parametrize(
    "heads",
    [
        (1, 1, 32, 64),
        *(pytest.param(more, marks=pytest.mark.slow) for more in ((2, 2, 64, 96), (1, 3, 32, 48))),
    ],
)
def test_rows_alone_have_the_bits_of_the_cpu(heads):
    rows = linear_rows(65, *heads, dtype=torch.bfloat16)
    (wanted, state), (got, made) = on_cpu_and_by(forms.ALONE, rows, ROWS_ALONE)
    assert_same_bits(got, wanted, "o")
    for name in ("keys", "updates", "inverses", "decays"):
        assert_same_bits(getattr(made, name)[:, :65], getattr(state, name)[:, :65], name)
    assert_same_bits(made.boundary, state.boundary, "boundary")


def test_whole_chunks_have_the_bits_of_the_cpu():
    rows = linear_rows(350, 1, 1, 128, 64, dtype=torch.bfloat16)
    steps = (30, 0, False, None), (320, 30, False, None)
    (wanted, state), (got, made) = on_cpu_and_by(forms.WHOLE, rows, steps)
    assert_same_bits(got, wanted, "o")
    assert_same_bits(made.boundary, state.boundary, "boundary")


@pytest.mark.slow
def test_a_start_takes_the_forms_that_have_the_general_ones_bytes():
    heads = 1, 2, 64, 64
    assert admission.admit_forms(heads, CPU) == ([forms.ALONE, forms.WHOLE], [])
    assert forms.admitted(forms.ALONE, CPU, heads) and forms.admitted(forms.WHOLE, CPU, heads)
    assert not forms.admitted(forms.WHOLE, CPU, (1, 1, 64, 64)), "heads that were not tried"


def test_a_form_with_other_bytes_or_that_fails_is_not_taken(monkeypatch):
    def fails(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(delta_rule, "launch_whole_chunks", lambda *_: None)
    monkeypatch.setattr(delta_rule, "launch_decode", fails)
    kept, failed = admission.admit_forms((1, 1, 64, 64), CPU)
    assert not kept and not forms.admitted(forms.WHOLE, CPU, (1, 1, 64, 64))
    assert failed == [
        "rows alone: RuntimeError: no such instruction",
        "whole chunks: other bytes than the general form",
    ]
