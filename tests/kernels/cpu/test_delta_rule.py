"""The gated delta rule on the CPU: a row's bits are its own, whatever step computes it."""

from itertools import product

import pytest
import torch

from tests.lib.bits import assert_same_bits, same_bits
from tests.lib.kernels.linear_rows import kept_at_cuts, linear_rows, linear_sequence, poisoned_state
from tests.lib.some_slow import some_slow
from tpdet.kernels import ops
from tpdet.kernels.cpu.linear import delta_rule
from tpdet.kernels.cpu.linear.delta_rule import advance_states
from tpdet.kernels.exact import decays
from tpdet.kernels.inputs.linear_state import DeltaGates, StateMove
from tpdet.kernels.inputs.paged_batch import make_batch

ROWS = 170
DTYPES = torch.float32, torch.bfloat16


def compute(rows, state, *sequences):
    """o of one step, whose rows are those of all sequences in turn."""
    return ops.gated_delta(*rows, state, make_batch(sequences))


def compute_in_steps(rows, state, steps, slot=0):
    """o of one sequence from position 0, in steps of so many rows; the last ones as they fit."""
    parts, first = [], 0
    for count in steps:
        last = min(first + count, len(rows.q))
        sequence = linear_sequence(0, last - first, first, slot)
        parts.append(compute(rows.at(first, last), state, sequence))
        first = last
    return torch.cat(parts)


def whole(rows, state=None):
    return compute_in_steps(rows, state or poisoned_state(rows), [len(rows.q)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_of_any_size_give_the_bits_of_one(dtype):
    rows = linear_rows(ROWS, dtype=dtype)
    state = poisoned_state(rows)
    wanted = whole(rows, state)
    for steps in ([63] * 4, [64] * 4, [65] * 4, [100, 1, 1, 26, 1, 41], [15, 1, 16, 17, 121]):
        other = poisoned_state(rows)
        assert_same_bits(compute_in_steps(rows, other, steps), wanted, f"{steps}")
        assert_same_bits(other.boundary, state.boundary, f"boundary {steps}")
    alone = rows.at(0, 70)
    assert_same_bits(compute_in_steps(alone, poisoned_state(rows), [1] * 70), wanted[:70], "decode")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [(ROWS + 60,), (70, 160), (64, 166), (127, 2, 101)])
def test_snapshots_within_a_step_have_the_bytes_of_those_at_a_cut(dtype, steps):
    """Two in a step, one in each, at a step's first row, and between two rows."""
    rows, chunks = linear_rows(ROWS + 60, dtype=dtype), (1, 2, 3)
    kept = tuple((chunk, chunk) for chunk in chunks)  # behind one slot
    state, first, parts = poisoned_state(rows, 1, 3), 0, []
    for count in steps:
        sequence = linear_sequence(0, count, first, snapshots=kept)
        parts.append(compute(rows.at(first, first + count), state, sequence))
        first += count
    assert_same_bits(torch.cat(parts), whole(rows), "rows")
    wanted = kept_at_cuts(delta_rule, rows, chunks)
    assert_same_bits(state.boundary[1:], wanted, "snapshots")
    late = kept_at_cuts(delta_rule, rows.at(1, len(rows.q)), chunks)
    assert not same_bits(late, wanted), "a row late is another state: else this shows nothing"


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_heads_on_any_number_of_ranks_give_the_bits_of_all(parts):
    for group in (1, 2, 3):
        rows = linear_rows(70, key_heads=8, group=group, key_size=16, value_size=16)
        share = 8 // parts
        cuts = [rows.heads(rank * share, (rank + 1) * share) for rank in range(parts)]
        got = torch.cat([compute_in_steps(cut, poisoned_state(cut), [66, 4]) for cut in cuts], 1)
        assert_same_bits(got, whole(rows), f"{parts} ranks, {group} value heads a key head")


def test_neighbours_reach_no_bit():
    """Prompt, decode and draft rows side by side, each at another place of its chunk."""
    starts, counts = (0, 37, 64, 100, 169), (150, 1, 9, 70, 1)
    rows = [linear_rows(ROWS, seed=seed) for seed in range(5)]
    state, parts, sequences, wanted = poisoned_state(rows[0], 5), [], [], []
    for slot, (each, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        if start:
            compute_in_steps(each.at(0, start), state, [start], slot)
        part = each.at(start, start + count)
        first_row = sum(counts[:slot])
        sequences.append(linear_sequence(first_row, count, start, slot, drafts=count in (9, 70)))
        parts.append(part)
        wanted.append(whole(each.at(0, start + count))[start:])
    joined = [torch.cat(x) for x in list(zip(*parts, strict=True))[:5]]
    got = compute(parts[0]._replace(**dict(zip("qkvab", joined, strict=True))), state, *sequences)
    assert_same_bits(got, torch.cat(wanted), "five sequences")


@pytest.mark.parametrize(
    ("start", "wrong"),
    some_slow(
        [(40, torch.inf), (63, torch.nan), (64, 1.0)],
        [*product((40, 63, 64, 127), (torch.inf, torch.nan, 1.0))],
    ),
)
def test_drafts_that_were_wrong_leave_nothing(start, wrong):
    """Runs of 4, 63, 64 and 65 rows, of which only the first are right, or those of a chunk."""
    rows = linear_rows(ROWS, seed=3)
    wanted = whole(rows)
    for run in (4, 63, 64, 65):
        for kept in {1, min(run, 64 - start % 64), min(run, 65 - start % 64)}:
            if start % 64 + run > 128:
                continue
            state = poisoned_state(rows)
            if start:
                compute_in_steps(rows.at(0, start), state, [start])
            drafts = linear_rows(run, seed=9)
            drafts.v[kept:] *= wrong
            drafts.k[kept:] *= 1.0 if wrong == 1.0 else wrong
            for right, drawn in zip(rows[:5], drafts[:5], strict=True):
                drawn[:kept] = right[start : start + kept]
            made = compute(drafts, state, linear_sequence(0, run, start, drafts=True))
            assert_same_bits(made[:kept], wanted[start : start + kept], f"{run} rows, {kept} right")
            begin = start + kept
            rest = rows.at(begin, ROWS)
            sequence = linear_sequence(0, ROWS - begin, begin, standing=start // 64)
            assert_same_bits(compute(rest, state, sequence), wanted[begin:], f"after {run} {kept}")


def test_a_state_that_stands_elsewhere_or_drafts_across_two_ends_are_refused():
    rows = linear_rows(130)
    state = poisoned_state(rows)
    with pytest.raises(ValueError, match="stands for chunk 0, and rows begin in chunk 2"):
        compute(rows.at(0, 1), state, linear_sequence(0, 1, 128, standing=0))
    with pytest.raises(ValueError, match="cross two ends of chunks"):
        compute(rows, state, linear_sequence(0, 130, 1, drafts=True))


def test_a_snapshot_has_the_state_of_its_position_and_one_a_row_late_another():
    rows = linear_rows(ROWS)
    wanted = whole(rows)
    state = poisoned_state(rows, 3)
    compute_in_steps(rows.at(0, 70), state, [64])
    advance_states((state,), (StateMove(0, 1, 0),))
    sequence = linear_sequence(0, ROWS - 64, 64, slot=1, standing=1)
    assert_same_bits(compute(rows.at(64, ROWS), state, sequence), wanted[64:], "from the snapshot")
    late = rows._replace(**{name: x.roll(-1, 0) for name, x in zip("qkvab", rows[:5], strict=True)})
    compute_in_steps(late.at(0, 64), state, [64])
    advance_states((state,), (StateMove(0, 2, 0),))
    sequence = linear_sequence(0, ROWS - 64, 64, slot=2, standing=1)
    if same_bits(compute(rows.at(64, ROWS), state, sequence), wanted[64:]):
        raise AssertionError("a snapshot of other rows reached no bit: this test shows nothing")


def recurrence(rows, dtype=torch.float64):
    """o by the recurrence that defines the layer, one row at a time."""
    group = rows.v.shape[1] // rows.k.shape[1]
    q, k = (x.to(dtype).repeat_interleave(group, 1) for x in (rows.q, rows.k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, v = q * k.shape[2] ** -0.5, rows.v.to(dtype)
    step = torch.nn.functional.softplus(rows.a.to(dtype) + rows.gates.dt_bias.to(dtype))
    decay = (-rows.gates.a_log.to(dtype).exp() * step).exp()[..., None, None]
    strength = torch.sigmoid(rows.b.to(dtype))[..., None]
    state, outputs = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=dtype), []
    for i in range(len(q)):
        state = decay[i] * state
        update = strength[i] * (v[i] - torch.einsum("hkv,hk->hv", state, k[i]))
        state = state + k[i, :, :, None] * update[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[i]))
    return torch.stack(outputs)


@pytest.mark.parametrize("count", some_slow([200], [200, 5000]))
def test_errors_are_no_larger_than_those_of_transformers(count):
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    rows = linear_rows(count, key_heads=1, group=2)
    exact = recurrence(rows)
    step = torch.nn.functional.softplus(rows.a + rows.gates.dt_bias)
    theirs = modeling.torch_chunk_gated_delta_rule(
        *(x[None] for x in rows[:3]),
        (-rows.gates.a_log.exp() * step)[None],
        torch.sigmoid(rows.b)[None],
        use_qk_l2norm_in_kernel=True,
    )[0][0]
    ours = whole(rows)
    errors = [(x.double() - exact).abs() for x in (ours, theirs)]
    assert errors[0].max() <= 1.2 * errors[1].max() and errors[0].mean() <= errors[1].mean()
    assert errors[0].max() <= 3e-7
    narrow = rows._replace(**{n: getattr(rows, n).bfloat16() for n in "qkv"}).at(0, 200)
    error = (whole(narrow).double() - recurrence(narrow)).abs().max()
    assert error <= 2.0**-8 * exact.abs().max(), "more than the rounding of o"


def test_other_rules_for_a_row_show():
    """Negative controls: the recurrence for decode; decays as a running product in fp32."""
    rows = linear_rows(90)
    wanted = whole(rows)
    if same_bits(recurrence(rows, torch.float32)[80], wanted[80]):
        raise AssertionError("the recurrence has the bits of chunks: this test shows nothing")
    logs = decays.log_decays(rows.a, rows.gates)
    running = decays.decay_of(logs[:64]).cumprod(0)
    exact = decays.decay_of(logs[:64].cumsum(0))
    if same_bits(running, exact):
        raise AssertionError("a running product has the decays' bits: this test shows nothing")


def test_gates_are_near_those_of_math_and_hold_at_their_ends():
    x = torch.cat([torch.linspace(-60, 60, 4001), torch.tensor([-1e30, 1e30, 0.0])])
    gates = DeltaGates(torch.tensor([0.0]), torch.tensor([0.0]))
    logs = decays.log_decays(x[:, None], gates)[:, 0]
    wanted = -torch.nn.functional.softplus(x.double(), threshold=100).clamp(max=128.0)
    assert (logs.double() * 2.0**-40 - wanted).abs().max() <= 2.0**-40
    assert logs[-2] == -128 * 2**40 and logs[-3] == 0
    assert decays.log_decays(torch.tensor([[torch.nan]]), gates) == -128 * 2**40
    totals = torch.cat([-torch.logspace(0, 15, 500, base=10).long(), torch.tensor([-(2**53), 0])])
    error = decays.decay_of(totals).double() / (totals.double() * 2.0**-40).exp() - 1
    assert error[totals > -80 * 2**40].abs().max() <= 2.0**-24 and decays.decay_of(totals)[-2] == 0
    assert (decays.sigmoid(x) - torch.sigmoid(x.double())).abs().max() <= 2.0**-25
    assert decays.sigmoid(torch.tensor([torch.nan])).isnan()


def test_products_of_two_terms_are_near_those_of_fp32():
    """And one term is not: what the contract's two terms are for."""
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(2, *shape, generator=generator) for shape in ((16, 64), (64, 32)))
    exact = left.double() @ right.double()
    two, one = (
        (total - exact).abs().max()
        for total in (
            delta_rule.product(left, right, 2, 2),
            left.bfloat16().double() @ right.bfloat16().double(),
        )
    )
    assert two <= 2e-4 < one
