"""Bits of linear attention's kernels on a GPU: one check a function."""

import os
from functools import cache

import torch

from tests.gpu.lib.checks import Differences, poisoned_workspaces, same
from tests.gpu.lib.suite import Check
from tests.gpu.linear.delta_rule import delta_rule as in_torch
from tests.lib.kernels.linear_rows import (
    LinearRows,
    kept_at_cuts,
    linear_rows,
    linear_sequence,
    poisoned_state,
)
from tpdet.kernels.cpu.linear import convolution as cpu_convolution
from tpdet.kernels.cpu.linear import gated_norm as cpu_norm
from tpdet.kernels.cpu.pointwise.norm import reciprocal_length
from tpdet.kernels.cuda.compile.pool import compile_all
from tpdet.kernels.cuda.compile.recording import recording
from tpdet.kernels.cuda.linear import convolution, delta_rule, gated_norm
from tpdet.kernels.cuda.linear.admission import admit_forms
from tpdet.kernels.cuda.linear.chunk_factors import chunk_factors
from tpdet.kernels.cuda.linear.gates import DeltaStep, factors_of
from tpdet.kernels.cuda.linear.tables import Tables
from tpdet.kernels.exact.decays import decay_of, log_decays, sigmoid
from tpdet.kernels.inputs.linear_state import LENGTH_EPS, DeltaGates, LinearState, StateMove
from tpdet.kernels.inputs.paged_batch import make_batch

FULL = {"key_heads": 16, "group": 2, "key_size": 128, "value_size": 128}
CASES = (
    (torch.bfloat16, FULL),
    (torch.bfloat16, {"key_heads": 2, "group": 3, "key_size": 64, "value_size": 96}),
    (torch.float16, {"key_heads": 2, "group": 1, "key_size": 32, "value_size": 32}),
    (torch.float32, {"key_heads": 1, "group": 2, "key_size": 32, "value_size": 48}),
)


@cache
def admission():
    """The forms of FULL heads that have the general one's bytes, and what was wrong with others.

    Their kernels are compiled side by side: one after the other they take minutes.
    """
    tried = (16, 32, 128, 128), torch.device("cuda")
    with recording() as asked:
        admit_forms(*tried)
    assert not compile_all(asked.values(), len(os.sched_getaffinity(0)))
    return admit_forms(*tried)


def on_gpu(rows):
    admission()  # heads of other sizes have the general form, and so its bits
    gates = DeltaGates(*(x.cuda() for x in rows.gates))
    return LinearRows(*(x.cuda() for x in rows[:5]), gates)


def state_of(rows, slots=1, snapshots=0):
    return LinearState(*(x.cuda() for x in poisoned_state(rows, slots, snapshots)))


def run(rows, state, start, count, *, drafts=False, standing=None, slot=0):
    """o of the rows [start, start + count) of one sequence."""
    sequence = linear_sequence(0, count, start, slot, drafts, standing)
    part = rows.at(start, start + count)
    return delta_rule.gated_delta(*part, state, make_batch((sequence,), "cuda"))


def all_forms_have_the_bits_of_the_general_one():
    kept, failed = admission()
    assert len(kept) == 2 and not failed, failed


def steps_give_the_bits_of_one():
    wrong = Differences()
    for dtype, heads in CASES:
        rows = on_gpu(linear_rows(400, **heads, dtype=dtype))
        state = state_of(rows)
        wanted = run(rows, state, 0, 400)
        for steps in ([63] * 7, [64] * 7, [65] * 7, [1] * 140, [100, 1, 1, 90, 1, 207]):
            other, first, parts = state_of(rows), 0, []
            for count in steps:
                count = min(count, 400 - first)
                if count > 0:
                    parts.append(run(rows, other, first, count))
                first += count
            got = torch.cat(parts)
            wrong.keep(same, got, wanted[: len(got)], f"{dtype} steps of {steps[0]}")
            if len(got) == 400:
                wrong.keep(same, other.boundary, state.boundary, f"{dtype} boundary {steps[0]}")
    return wrong.finish()


def drafts_that_were_wrong_leave_nothing():
    wrong = Differences()
    rows = on_gpu(linear_rows(300, **FULL, dtype=torch.bfloat16))
    wanted = run(rows, state_of(rows), 0, 300)
    for start in (40, 63, 64, 127):
        for length in (4, 63, 64, 65):
            if start % 64 + length > 127:
                continue
            for kept in {1, min(length, 64 - start % 64), min(length, 65 - start % 64)}:
                state = state_of(rows)
                run(rows, state, 0, start)
                drafts = on_gpu(linear_rows(start + length, **FULL, dtype=torch.bfloat16, seed=9))
                drafts.k[start + kept :] = torch.inf
                drafts.v[start + kept :] = torch.nan
                for right, drawn in zip(rows[:5], drafts[:5], strict=True):
                    drawn[: start + kept] = right[: start + kept]
                made = run(drafts, state, start, length, drafts=True)[:kept]
                what = f"{length} rows from {start}, {kept} right"
                wrong.keep(same, made, wanted[start : start + kept], what)
                begin = start + kept
                rest = run(rows, state, begin, 300 - begin, standing=start // 64)
                wrong.keep(same, rest, wanted[begin:], f"after {what}")
    return wrong.finish()


def neighbours_and_heads_reach_no_bit():
    wrong = Differences()
    starts, counts = (0, 37, 64, 130, 191, 255), (150, 1, 9, 70, 1, 1)
    rows = [on_gpu(linear_rows(256, **FULL, dtype=torch.bfloat16, seed=i)) for i in range(6)]
    state, parts, sequences, wanted = state_of(rows[0], 6), [], [], []
    for slot, (each, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        if start:
            run(each, state, 0, start, slot=slot)
        sequences.append(linear_sequence(sum(counts[:slot]), count, start, slot, drafts=count == 9))
        parts.append(each.at(start, start + count))
        wanted.append(run(each, state_of(each), 0, start + count)[start:])
    joined = (torch.cat(x) for x in list(zip(*parts, strict=True))[:5])
    batch = make_batch(tuple(sequences), "cuda")
    got = delta_rule.gated_delta(*joined, rows[0].gates, state, batch)
    wrong.keep(same, got, torch.cat(wanted), "six sequences")
    for ranks in (2, 4, 8):
        share = 16 // ranks
        cuts = [rows[0].heads(rank * share, (rank + 1) * share) for rank in range(ranks)]
        got = torch.cat([run(cut, state_of(cut), 0, 256) for cut in cuts], 1)
        wrong.keep(same, got, run(rows[0], state_of(rows[0]), 0, 256), f"{ranks} ranks")
    return wrong.finish()


def a_moved_state_stands_where_its_rows_end():
    rows = on_gpu(linear_rows(200, **FULL, dtype=torch.bfloat16))
    wanted = run(rows, state_of(rows), 0, 200)
    state = state_of(rows, 3)
    run(rows, state, 0, 70)
    run(rows, state, 70, 58)  # chunk 1 is full, and stands behind chunk 0
    delta_rule.advance_states((state,), (StateMove(0, 2, 1),))
    same(run(rows, state, 128, 72, slot=2, standing=2), wanted[128:], "from the snapshot")
    same(run(rows, state, 128, 72, standing=1), wanted[128:], "from the slot itself")


def snapshots_within_a_step_have_the_bytes_of_those_at_a_cut():
    wrong, chunks = Differences(), (1, 2, 4)
    kept = tuple((chunk, place) for place, chunk in enumerate(chunks, 1))
    for dtype, heads in CASES:
        rows = on_gpu(linear_rows(400, **heads, dtype=dtype))
        wanted = kept_at_cuts(delta_rule, rows, chunks)
        o = run(rows, state_of(rows), 0, 400)
        x = torch.randn(400, poisoned_state(rows).inputs.shape[2], device="cuda").to(dtype)
        tails = torch.stack([x[chunk * 64 - 3 : chunk * 64] for chunk in chunks])
        for steps in ((400,), (30, 370), (64, 336), (127, 2, 271)):
            state, first, parts = state_of(rows, 1, 3), 0, []
            for count in steps:
                last = first + count
                batch = make_batch((linear_sequence(0, count, first, snapshots=kept),), "cuda")
                convolution.short_convolution(x[first:last], x[:4].t(), state, batch)
                parts.append(delta_rule.gated_delta(*rows.at(first, last), state, batch))
                first = last
            what = f"{dtype} steps of {steps}"
            wrong.keep(same, torch.cat(parts), o, what)
            wrong.keep(same, state.boundary[1:], wanted, f"snapshots, {what}")
            wrong.keep(same, state.tails, tails, f"rows before snapshots, {what}")
        late = kept_at_cuts(delta_rule, rows.at(1, 400), chunks)
        assert not torch.equal(late, wanted), "snapshots a row late are the same"
    return wrong.finish()


def factors_have_the_bits_of_the_cpu():
    rows = linear_rows(2944, **FULL, dtype=torch.bfloat16)
    a, b = rows.a * 20, rows.b * 30
    a[7], b[8], a[9], b[9] = torch.nan, torch.nan, torch.inf, -torch.inf
    here = on_gpu(rows._replace(a=a, b=b))
    state, batch = state_of(here), make_batch((linear_sequence(0, 2944, 0),), "cuda")
    shape, pieces = delta_rule.shape_of(state), len(batch.pieces)
    scratch = delta_rule.chunk_scratch(shape, pieces, here.k)
    step = DeltaStep(*here[:5], *(x.stride(0) for x in here[:5]))
    form = {"SHAPE": shape, "DEPENDENT": False, "num_warps": 4, "enable_fp_fusion": False}
    read = step, factors_of(step, here.gates), state, scratch, Tables.of(batch)
    chunk_factors[(32, pieces)](*read, **form)
    vectors = scratch.vectors.permute(2, 0, 3, 1).flatten(1, 2).cpu()  # [8, M, Hv]
    key = reciprocal_length(rows.k.float(), LENGTH_EPS).repeat_interleave(2, 1)
    same(vectors[3], key, "keys' factors")
    query = reciprocal_length(rows.q.float(), LENGTH_EPS) * 128**-0.5
    same(vectors[4], query.repeat_interleave(2, 1), "queries' factors")
    # int64 as two halves of 32 bits
    logs, made = log_decays(a, rows.gates), scratch.decays.transpose(1, 2).flatten(0, 1).cpu()
    same(made.contiguous().view(torch.int32), logs.view(torch.int32), "log decays")
    strength = sigmoid(b) * key
    finite = ~strength.isnan()
    same(vectors[2][finite], strength[finite], "strengths")
    assert vectors[2][8].isnan().all(), "NaN stays NaN"
    assert decay_of(logs).isfinite().all()


def errors_are_those_of_two_terms():
    """Over o's size, against fp64: no more than o's own rounding, and 2e-5 before it."""
    told = {}
    for dtype, limit in ((torch.bfloat16, None), (torch.float32, 2e-6)):
        size = FULL if limit is None else CASES[3][1] | {"value_size": 32}
        rows = on_gpu(linear_rows(4992, **size, dtype=dtype))
        got = run(rows, state_of(rows), 0, 4992).double()
        group = rows.v.shape[1] // rows.k.shape[1]
        q, k = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (rows.q, rows.k))
        decay = (log_decays(rows.a, rows.gates).double() * 2.0**-40).transpose(0, 1)
        strength = sigmoid(rows.b).transpose(0, 1)
        exact = in_torch(q, k, rows.v.transpose(0, 1), decay, strength, "fp64").transpose(0, 1)
        scale = exact.square().mean().sqrt()
        error = (got - exact).square().mean().sqrt() / scale
        rounding = (exact.to(dtype).double() - exact).square().mean().sqrt() / scale
        told[f"error {dtype}"], told[f"rounding {dtype}"] = float(error), float(rounding)
        assert error <= (limit or 1.001 * rounding), told
    return told


def a_bad_row_reaches_no_earlier_one():
    rows = on_gpu(linear_rows(100, **FULL, dtype=torch.bfloat16))
    wanted = run(rows, state_of(rows), 0, 100)
    for name in "qkv":
        for value in (torch.inf, torch.nan):
            bad = rows._replace(**{name: getattr(rows, name).clone()})
            getattr(bad, name)[53, :, 3] = value
            got = run(bad, state_of(rows), 0, 100)
            same(got[:53], wanted[:53], f"rows before {name} {value}")
            assert not torch.equal(got[53], wanted[53]), "the bad row does not show"


def poison_changes_nothing():
    rows = on_gpu(linear_rows(130, **FULL, dtype=torch.bfloat16))
    wanted = run(rows, state_of(rows), 0, 130)
    with poisoned_workspaces():
        same(run(rows, state_of(rows), 0, 130), wanted, "poisoned workspaces")


def convolutions_and_norms_have_bits_of_their_own():
    wrong = Differences()
    rows = on_gpu(linear_rows(1, **FULL, dtype=torch.bfloat16))
    channels = poisoned_state(rows).inputs.shape[2]
    x = torch.randn(500, channels, device="cuda").bfloat16()
    weight = torch.randn(channels, 4, device="cuda").bfloat16()
    state = state_of(rows)
    whole = make_batch((linear_sequence(0, 500, 0),), "cuda")
    wanted = convolution.short_convolution(x, weight, state, whole)
    on_cpu = poisoned_state(LinearRows(*(part.cpu() for part in rows[:5]), rows.gates))
    near = cpu_convolution.short_convolution(x.cpu(), weight.cpu(), on_cpu, whole)
    assert ((wanted.cpu() - near).abs() <= 2.0**-7 * near.abs() + 1e-7).all(), "convolution"
    other, first, parts = state_of(rows), 0, []
    for count in (1, 2, 1, 70, 126, 300):
        batch = make_batch((linear_sequence(0, count, first),), "cuda")
        part = x[first : first + count]
        parts.append(convolution.short_convolution(part, weight, other, batch))
        first += count
    wrong.keep(same, torch.cat(parts), wanted, "convolution in steps")
    wrong.keep(same, other.inputs, state.inputs, "ring of inputs")
    wrong.keep(same, state.inputs.cpu(), on_cpu.inputs, "ring of inputs, CPU")
    o, z = (torch.randn(300, 32, 128, device="cuda").bfloat16() for _ in "oz")
    factor = torch.randn(128, device="cuda")
    got = gated_norm.gated_norm(o, z, factor, 1e-6)
    near = cpu_norm.gated_norm(o.cpu(), z.cpu(), factor.cpu(), 1e-6)
    assert ((got.cpu() - near).abs() <= 2.0**-7 * near.abs() + 1e-7).all(), "gated norm"
    alone = gated_norm.gated_norm(o[7:8, 3:5], z[7:8, 3:5], factor, 1e-6)
    wrong.keep(same, alone, got[7:8, 3:5], "two heads alone")
    return wrong.finish()


def linear_checks():
    """Every check of linear attention."""
    return [
        Check("forms", all_forms_have_the_bits_of_the_general_one),
        Check("steps", steps_give_the_bits_of_one),
        Check("drafts", drafts_that_were_wrong_leave_nothing),
        Check("neighbours and heads", neighbours_and_heads_reach_no_bit),
        Check("moved states", a_moved_state_stands_where_its_rows_end),
        Check("snapshots within a step", snapshots_within_a_step_have_the_bytes_of_those_at_a_cut),
        Check("factors as on the CPU", factors_have_the_bits_of_the_cpu),
        Check("errors", errors_are_those_of_two_terms),
        Check("bad rows", a_bad_row_reaches_no_earlier_one),
        Check("poison", poison_changes_nothing),
        Check("convolution and norm", convolutions_and_norms_have_bits_of_their_own),
    ]
