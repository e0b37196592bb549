"""Exchange kernels, compiled for Hopper, run with warps and ranks that take any turns.

Faults that stopped servers, or could, are put back as negative controls.
"""

import random
import re

import numpy
import pytest

pytest.importorskip("triton")

import torch

from tests.kernels.compiled.ptx.exchange_ranks import Columns, Folds, Rows
from tests.kernels.compiled.ptx.launches import compiled_for_hopper, launching_on
from tests.kernels.compiled.ptx.machine import Hang, Machine
from tests.kernels.compiled.ptx.memory import FLAG, Hazard
from tests.kernels.interpreted.sampling_rows import rows as logits_of
from tests.kernels.product_inputs import draw
from tests.lib.bits import assert_same_bits
from tests.lib.some_slow import some_slow
from tpdet.kernels.cuda.attention.attention import attend
from tpdet.kernels.cuda.attention.decode_launch import arrival_counters
from tpdet.kernels.cuda.attention.variants import AttentionVariant
from tpdet.kernels.cuda.experts import sorted_tokens
from tpdet.kernels.cuda.sampling.launch import sample_rows
from tpdet.kernels.inputs.paged_batch import PagedSequence, make_batch
from tpdet.kernels.inputs.row_params import RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard

MANY = 40  # schedules of a long search


@pytest.fixture(autouse=True, scope="module")
def _hopper():
    with numpy.errstate(all="ignore"), compiled_for_hopper():
        yield


def push_rows(seed, ranks=2, **how):
    """Rows of the stream, three launches."""
    made = Folds(ranks, seed, **how)
    for turn in range(3):
        made.stream_rows(1 + turn, turn)
    return made


def push_finished_rows(seed, ranks=2, **how):
    """Exchanges that end with flags, three; of three programs the last rank's third has no row."""
    made = Folds(ranks, seed, programs=3, **how)
    for turn in range(3):
        made.fold("direct", turn)
    return made


def mixed(seed, ranks=2, **how):
    """Exchanges of all kinds that share slots, in any order."""
    made, chosen = Folds(ranks, seed, programs=random.Random(seed).choice((2, 3)), **how), []
    choose = random.Random(seed)
    for turn in range(6):
        chosen.append(choose.choice(("one", "spread", "two", "direct", "rows", "gather")))
        if chosen[-1] == "rows":
            made.stream_rows(1 + turn % 3, turn)
        elif chosen[-1] == "gather":
            made.gather(5 + 1100 * (turn % 2), turn)
        else:
            made.fold(chosen[-1], turn)
    return made


def of_kind(kind):
    """Exchanges of sums of one kind."""

    def run(seed, ranks=2, **how):
        made = Folds(ranks, seed, **how)
        for turn in range(3):
            made.fold(kind, turn)
        return made

    return run


def columns(seed, ranks=2, **how):
    """Columns, without the norm and with it."""
    made = Columns(ranks, seed, **how)
    for turn in range(2):
        made.gather(2 + turn, turn)
        made.norm(3 - turn, turn)
    return made


def rows(seed, ranks=2, **how):
    """Rows of logits, and small payloads."""
    made = Rows(ranks, seed, **how)
    for turn in range(3):
        made.exchange(3 + turn, turn)
    return made


CASES = {
    "rows of the stream": push_rows,
    "flags": push_finished_rows,
    "one-shot": of_kind("one"),
    "spread": of_kind("spread"),
    "two-shot": of_kind("two"),
    "columns": columns,
    "logits": rows,
    "mixed": mixed,
}


def first_of(kind, work, seeds, **how):
    """The first failure of this kind; others are raised."""
    for seed in range(seeds):
        try:
            work(seed, **how).finish()
        except kind as found:
            return str(found)
    raise AssertionError(f"none of {seeds} schedules ends in {kind.__name__}")


@pytest.mark.parametrize("name", some_slow(["rows of the stream", "flags"], CASES))
def test_every_schedule_ends_with_the_same_bits(name):
    for seed in range(3):
        CASES[name](seed).finish()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_many_schedules_end_with_the_same_bits(name, ranks):
    for seed in range(3, 3 + MANY * 2 // ranks**2):
        CASES[name](seed, ranks).finish()


def without_barrier_before_arming(ptx):
    """The fault that stopped a server: warps arm a word of each rank that others have not seen."""
    lines = r"(?:(?!\tbar|[^\n]*\tbra|\$L__BB)[^\n]*\n){0,30}?"
    arming = rf"\tbar\.sync \t0;\n({lines}\tmov\.b32 \t%r\d+, -1;\n)"
    changed, count = re.subn(arming, r"\1", ptx, count=1)
    assert count, "no barrier before a store that arms"
    return changed


def test_words_armed_too_early_are_found():
    how = {"change": without_barrier_before_arming}
    found = first_of(Hazard, push_rows, 3, **how)
    assert "(a strong load) looked at, and does not know that this is over" in found
    assert "polls" in first_of(Hang, push_rows, 60, strict=False, **how)


def without_the_next_flag(ptx):
    """The kernel as it was when it awaited one value of a flag."""
    between = r"(?:(?:\.loc|//|\$L__tmp)[^\n]*\s+)*"
    following = rf"(add\.s64 \t%rd\d+, %rd\d+, )1(;\s*{between}mul\.hi\.s64)"
    changed, count = re.subn(following, r"\g<1>0\2", ptx)
    assert count == ("two_shot_direct" in ptx)
    return changed


def test_a_flag_that_is_overtaken_is_found():
    """A program without rows raises its flag for the next exchange before a peer saw the last."""
    late = lambda warp: warp.looks == FLAG and (warp.block.rank, warp.block.index) == (0, (2, 0, 0))
    how = {"change": without_the_next_flag, "lags": late}
    assert "polls" in first_of(Hang, push_finished_rows, 3, **how)
    push_finished_rows(0, lags=late).finish()


@pytest.mark.parametrize(
    ("strong", "weak"),
    [
        ("fence.acq_rel.sys", "bar.warp.sync -1"),
        ("atom.global.sys.release.exch", "atom.global.sys.relaxed.exch"),
    ],
)
def test_rows_behind_a_flag_without_its_order_are_found(strong, weak):
    def change(ptx):
        assert (strong in ptx) == ("two_shot_direct" in ptx)
        return ptx.replace(strong, weak)

    found = first_of(Hazard, push_finished_rows, 3, change=change)
    assert "may not be visible yet" in found


def test_a_kernel_that_does_not_wait_for_earlier_ones_is_found():
    change = lambda ptx: ptx.replace("griddepcontrol.wait", "bar.warp.sync -1")
    assert first_of(Hazard, of_kind("one"), 3, change=change)


def test_programs_that_do_not_run_at_once_hang():
    """Negative control: exchanges ask for all their programs at once (`Peers.programs`)."""
    assert "polls" in first_of(Hang, push_rows, 20, resident=1)


def alone(seed, work, change=lambda ptx: ptx):
    """What a rank's launches leave; what `work` returns is right once they have run."""
    machine = Machine(1, seed, left=0.3)
    with launching_on(machine, 0, change):
        found = work()
    machine.finish()
    return found


def answer_rows():
    """Answers of rows without filters: the last program of a row adds the others' sums."""
    ways = [RowParams(seed=row, position=row, temperature=float(row)) for row in range(2)]
    return sample_rows(logits_of("tied", 2, 2500), ways, Shard(0, 2500)).packed.split(1)


def filter_rows():
    """Rows whose candidates fit no list: the last program that counts chooses the window."""
    filters = ((2.0, 5000, 0.99), (1.3, 0, 0.7), (1.0, 3000, 1.0))
    ways = [
        RowParams(seed=row, position=row, temperature=heat, top_k=most, top_p=mass)
        for row, (heat, most, mass) in enumerate(filters)
    ]
    return sample_rows(logits_of("zeros", 3, 9001), ways, Shard(0, 9001)).packed.split(1)


def attend_twice():
    """Decode attention over three splits: the last program merges, and resets the counter."""
    q = draw(1, 2, 16, dtype=torch.float16)
    pages = [draw(6, 1, 256, 16, dtype=torch.float16, seed=seed) for seed in (1, 2)]
    batch = make_batch((PagedSequence(0, 1, 700, (4, 1, 2)),))
    variants = AttentionVariant(64, 4, 1), AttentionVariant(16, 4, 1, fused=True)
    arrival_counters(1, q.device).zero_()  # whatever a schedule that failed left
    return [attend(q, *pages, batch, None, *variants) for _ in range(2)]


ALONE = {"answers": answer_rows, "filters": filter_rows, "decode attention": attend_twice}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_whoever_comes_last_the_bits_are_the_same(name):
    first, *others = (alone(seed, ALONE[name]) for seed in range(3))
    for other in others:
        for wanted, found in zip(first, other, strict=True):
            assert_same_bits(found, wanted, name)
    if name == "decode attention":
        assert_same_bits(*first, "the second launch")


@pytest.mark.parametrize("name", some_slow(["answers"], ["answers", "decode attention"]))
def test_what_the_last_program_reads_must_be_acquired(name):
    change = lambda ptx: ptx.replace("acq_rel", "relaxed")
    for seed in range(3):
        with pytest.raises(Hazard, match=r"may not be visible yet|does not know"):
            alone(seed, ALONE[name], change)


@pytest.mark.slow
@pytest.mark.parametrize(("most", "by_token"), [(1 << 20, False), (1 << 20, True), (1, False)])
def test_each_choice_of_an_expert_has_a_row_of_its_own(most, by_token, monkeypatch):
    """The order within an expert's rows is the schedule's, and in no sum."""
    monkeypatch.setattr(sorted_tokens, "ONE_PROGRAM", most)
    tokens, experts, rows_of_block = 90, range(2, 8), 128 if by_token else 16
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(tokens)]).int()
    for seed in range(6):
        found = alone(
            seed, lambda: sorted_tokens.sort_tokens(ids, experts, rows_of_block, by_token)
        )
        places = found.positions.tolist()
        held = [
            (place, expert)
            for row, of_row in zip(places, ids.tolist(), strict=True)
            for place, expert in zip(row, of_row, strict=True)
            if expert in experts
        ]
        assert len({place for place, _ in held}) == len(held)
        for place, expert in held:
            assert found.expert_ids[1 + place // rows_of_block] == expert - experts.start
