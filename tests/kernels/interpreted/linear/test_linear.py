"""Linear attention's kernels in Triton's interpreter, against the CPU path byte by byte.

Products of the CPU path are summed here as the interpreter's are: groups of 16, in turn.
"""

from itertools import accumulate

import pytest
import torch

from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.kernels.linear_rows import (
    INPUTS,
    kept_at_cuts,
    linear_rows,
    linear_sequence,
    poisoned_state,
)
from tests.lib.pairwise import pairwise
from tests.lib.some_slow import some_slow
from tpdet.control.plan import PlanRows, Row
from tpdet.kernels.cpu.linear import convolution as cpu_convolution
from tpdet.kernels.cpu.linear import delta_rule as cpu_rule
from tpdet.kernels.cpu.linear import gated_norm as cpu_norm
from tpdet.kernels.cuda.launch.dependent import ALONE, FIRST, SECOND, pair_of_launches
from tpdet.kernels.cuda.linear import convolution, delta_rule, gated_norm
from tpdet.kernels.inputs.linear_state import StateMove
from tpdet.kernels.inputs.paged_batch import make_batch
from tpdet.kernels.order import K_GROUP
from tpdet.runner.graphs.packed_step import (
    BatchShape,
    StepShape,
    StepSpans,
    pack_step,
    packed_batches,
)


def grouped_chain(left, right):
    sums = torch.zeros(len(left), left.shape[1], right.shape[2])
    left, right = left.double(), right.double()
    for k in range(0, left.shape[2], K_GROUP):
        group = left[:, :, k : k + K_GROUP] @ right[:, k : k + K_GROUP]
        sums = (sums.double() + group).float()
    return sums


@pytest.fixture(autouse=True)
def _grouped_products(monkeypatch):
    monkeypatch.setattr(cpu_rule, "chain", grouped_chain)


def steps_of(rule, rows, state, steps):
    """o of (count, start, drafts, standing) steps of one sequence, one after the other."""
    parts = []
    for count, start, drafts, standing in steps:
        sequence = linear_sequence(0, count, start, 0, drafts, standing)
        part = rows.at(start, start + count)
        parts.append(rule.gated_delta(*part, state, make_batch((sequence,))))
    return torch.cat(parts)


PROMPT = ((70, 0, False, None),)
CHUNKS = (30, 0, False, None), (100, 30, False, None), (1, 130, False, None)
DRAFTS = (63, 0, False, None), (6, 63, True, 0), (1, 64, False, 0), (9, 65, True, 1)
ROWS_ALONE = tuple(
    (count, start, False, None)
    for count, start in ((20, 0), (1, 20), (1, 21), (19, 22), (1, 41), (21, 42), (1, 63), (1, 64))
)
CASES = [
    (torch.bfloat16, PROMPT, (1, 1, 32, 16)),
    (torch.float32, DRAFTS, (1, 2, 16, 32)),
    (torch.bfloat16, CHUNKS, (1, 3, 32, 48)),
    (torch.bfloat16, DRAFTS, (2, 1, 32, 48)),
    (torch.float16, CHUNKS, (1, 2, 48, 16)),
    (torch.bfloat16, ROWS_ALONE, (1, 2, 32, 48)),
    (torch.float32, ROWS_ALONE, (1, 1, 16, 32)),
]


@pytest.mark.parametrize(("dtype", "steps", "heads"), some_slow(CASES[:2], CASES))
def test_prompts_decode_rows_and_drafts_have_the_bits_of_the_cpu(dtype, steps, heads):
    """Rows and states: the ring holds what a later step may read, the boundary all of it."""
    last = max(start + count for count, start, _, _ in steps)
    rows = linear_rows(last, *heads, dtype=dtype)
    states = poisoned_state(rows), poisoned_state(rows)
    wanted, got = (
        steps_of(rule, rows, state, steps)
        for rule, state in zip((cpu_rule, delta_rule), states, strict=True)
    )
    assert_same_bits(got, wanted, f"{dtype} {steps}")
    assert_same_bits(states[1].boundary, states[0].boundary, "boundary")
    chunk = torch.arange((last - 1) // 64 * 64, last) % 128
    for name in ("keys", "updates", "inverses", "decays"):
        left, right = (getattr(state, name)[:, chunk] for state in states)
        assert_same_bits(right, left, name)


@pytest.mark.parametrize(
    ("dtype", "steps"),
    some_slow(
        [(torch.bfloat16, (200,))],
        [
            (torch.bfloat16, (200,)),
            (torch.float32, (30, 170)),
            (torch.bfloat16, (64, 136)),
            (torch.float32, (127, 2, 71)),
        ],
    ),
)
def test_snapshots_within_a_step_have_the_bytes_of_those_at_a_cut(dtype, steps):
    """A snapshot's states are the CPU's, and the rows before them are those that came."""
    rows = linear_rows(200, 1, 2, 16, 16, dtype=dtype)
    x = torch.randn(200, 48 + 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    state, first = poisoned_state(rows, 2, 2), 0
    for count in steps:
        batch = make_batch((linear_sequence(0, count, first, 1, snapshots=((1, 2), (2, 3))),))
        last = first + count
        convolution.short_convolution(x[first:last], x[:4].t(), state, batch)
        delta_rule.gated_delta(*rows.at(first, last), state, batch)
        first = last
    wanted = kept_at_cuts(cpu_rule, rows, (1, 2))
    assert_same_bits(state.boundary[2:], wanted, "states")
    tails = torch.stack([x[61:64], x[125:128]])
    assert_same_bits(state.tails, tails, "rows before them")
    assert not same_bits(kept_at_cuts(cpu_rule, rows.at(1, 200), (1, 2)), wanted), "a row late"


@pytest.mark.parametrize("wrong", some_slow([torch.inf], [torch.inf, torch.nan]))
def test_a_row_that_is_not_finite_reaches_no_earlier_one(wrong):
    """As a prompt's row or a draft's; keys and values apart."""
    rows = linear_rows(34, 1, 2, 16, 16)
    wanted = steps_of(delta_rule, rows, poisoned_state(rows), ((34, 0, False, None),))
    for name in "kv":
        bad = rows._replace(**{name: getattr(rows, name).clone()})
        getattr(bad, name)[21, :, 3] = wrong
        got = steps_of(delta_rule, bad, poisoned_state(rows), ((34, 0, False, None),))
        assert_same_bits(got[:21], wanted[:21], f"rows before a bad {name}")
        on_cpu = steps_of(cpu_rule, bad, poisoned_state(rows), ((34, 0, False, None),))
        assert_same_bits(got.isnan(), on_cpu.isnan(), f"where a bad {name} shows")
        if same_bits(got[21:], wanted[21:]):
            raise AssertionError("the bad row reached no bit: this test shows nothing")


def test_several_sequences_and_states_moved_out_of_place_have_the_bits_of_the_cpu():
    rows = linear_rows(64 + 5 + 20, 1, 2, 16, 16, dtype=torch.bfloat16)
    states = poisoned_state(rows, 4), poisoned_state(rows, 4)
    outputs = []
    for rule, state in zip((cpu_rule, delta_rule), states, strict=True):
        first = make_batch((linear_sequence(0, 64, 0, 2), linear_sequence(64, 5, 0, 1)))
        rule.gated_delta(*rows.at(0, 69), state, first)
        rule.advance_states((state,), (StateMove(2, 3, 0),))
        late = linear_sequence(0, 1, 64, 2), linear_sequence(1, 19, 5, 1)
        outputs.append(rule.gated_delta(*rows.at(69, 89), state, make_batch(late)))
    assert_same_bits(outputs[1], outputs[0], "late rows")
    assert_same_bits(states[1].boundary, states[0].boundary, "boundaries")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_has_the_bits_of_one_run_and_is_near_the_cpu(dtype):
    """Exponentials are those of the device, so only they differ from the CPU's."""
    rows = linear_rows(200, 1, 1, 16, 16, dtype=dtype)
    channels = 48
    x = torch.randn(200, channels, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = torch.randn(channels, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    state, outputs = poisoned_state(rows), []
    whole = make_batch((linear_sequence(0, 200, 0),))
    wanted = convolution.short_convolution(x, weight, state, whole)
    on_cpu = poisoned_state(rows)
    near = cpu_convolution.short_convolution(x, weight, on_cpu, whole)
    bound = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
    assert ((wanted - near).abs() <= bound * near.abs() + 1e-7).all()
    assert_same_bits(state.inputs, on_cpu.inputs, "ring")
    assert state.inputs.shape[1] == INPUTS
    state, first = poisoned_state(rows), 0
    askew = torch.cat([weight.new_zeros(2), weight.flatten()])[2:].view(channels, 4)
    for count in (1, 2, 1, 70, 126):
        batch, taps = make_batch((linear_sequence(0, count, first),)), askew if first else weight
        part = x[first : first + count]
        outputs.append(convolution.short_convolution(part, taps, state, batch))
        first += count
    assert_same_bits(torch.cat(outputs), wanted, "steps")
    assert_same_bits(state.inputs, on_cpu.inputs, "ring of steps")


@pytest.mark.parametrize(("counts", "paired"), [((1, 1), True), ((1, 3), False), ((3,), False)])
def test_a_convolution_of_single_rows_is_a_pair_with_what_moves_states_on(
    counts, paired, monkeypatch
):
    rows, turns = linear_rows(sum(counts), 1, 1, 16, 16, dtype=torch.bfloat16), []
    told = lambda device, turn=ALONE: turns.append(turn) or {"DEPENDENT": 0}
    for module in (convolution, delta_rule):
        monkeypatch.setattr(module, "dependent_launch", told)
    state, firsts = poisoned_state(rows, len(counts)), (0, *accumulate(counts))
    sequences = (linear_sequence(firsts[i], count, 0, i) for i, count in enumerate(counts))
    batch = make_batch(tuple(sequences))
    x, weight = torch.zeros(sum(counts), 48).bfloat16(), torch.zeros(48, 4).bfloat16()
    with pair_of_launches():
        convolution.short_convolution(x, weight, state, batch)
        delta_rule.gated_delta(*rows, state, batch)
    alone = turns[2:] if paired else turns
    assert not paired or turns[:2] == [FIRST, SECOND]
    convolution.short_convolution(x, weight, state, batch)
    assert {*alone, *turns[-1:]} == {ALONE}


def test_a_packed_step_convolves_its_rows_and_no_pad():
    """A row alone, and a run whose last row is the only one of the second half."""
    rows = linear_rows(1, 1, 1, 16, 16)
    x = torch.randn(26, 48, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(48, 4, generator=torch.Generator().manual_seed(2))
    state, alone = poisoned_state(rows, 3), poisoned_state(rows, 3)
    before = make_batch((linear_sequence(0, 20, 0),))
    for each in (state, alone):
        convolution.short_convolution(x[:20], weight, each, before)
    both = make_batch((linear_sequence(0, 1, 20), linear_sequence(1, 5, 0, 1)))
    wanted = convolution.short_convolution(x[20:], weight, alone, both)
    of = ((0, 20, 1), (1, 0, 5))  # slot, start, rows
    plan = PlanRows.of(
        [Row(i, 0, 0, start, (5,) * n, (i,), (i,), 1, 0, i, 0) for i, start, n in of]
    )
    halves = BatchShape(5, 2, 3, 4, 1, linear=True), BatchShape(6, 2, 3, 0, 1, linear=True)
    shape = StepShape(halves)
    buffer = torch.zeros(shape.words, dtype=torch.int32)
    pack_step(plan, shape, StepSpans.of(plan, 1, 5).within(shape), buffer, 5)
    pads = torch.full((5, 48), torch.nan)
    parts = zip(
        torch.cat([x[20:], pads]).split([5, 6]), packed_batches(shape, buffer, 5)[1], strict=True
    )
    got = [convolution.short_convolution(part, weight, state, batch) for part, batch in parts]
    assert_same_bits(torch.cat(got)[:6], wanted, "rows")
    assert_same_bits(state.inputs, alone.inputs, "ring")


def test_the_gated_norm_is_near_the_cpu_and_a_row_has_its_own_bits():
    for dtype, size in pairwise((torch.float32, torch.bfloat16), (32, 48)):
        generator = torch.Generator().manual_seed(size)
        o, wide = (torch.randn(9, 3, n, generator=generator).to(dtype) for n in (size, 2 * size))
        z, weight = wide[..., :size], torch.randn(size, generator=generator)
        got = gated_norm.gated_norm(o, z, weight, 1e-6)
        near = cpu_norm.gated_norm(o, z, weight, 1e-6)
        bound = 2.0**-7 if dtype == torch.bfloat16 else 2e-6
        assert ((got - near).abs() <= bound * near.abs() + 1e-7).all()
        alone = gated_norm.gated_norm(o[4:5, 1:2], z[4:5, 1:2], weight, 1e-6)
        assert_same_bits(alone, got[4:5, 1:2], "a head alone")
