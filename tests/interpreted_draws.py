"""The kernels that draw many rows at once, in Triton's interpreter, beside the row-by-row ones.

    TRITON_INTERPRET=1 python -m tests.interpreted_draws [few] [case]

prints one JSON line, a traceback for each case that failed; `few`: on two kinds of data only.
"""

import json
import sys
import traceback

import numpy as np
import torch

from tests.draw_reference import answers, over_shards, prepare, reference, same_answers, tops
from tests.interpreted_launches import (
    a_step_by_shares_launches_no_more_than_this,
    memory_that_nobody_wrote_is_never_read,
)
from tests.interpreted_noise import (
    masses_are_rounded_conversions,
    philox_words_are_the_cpus,
    rough_noise_is_near_the_noise,
)
from tpdet.kernels.cpu import sampling as cpu_sampling
from tpdet.kernels.cpu.gumbel import gumbel_noise as cpu_noise
from tpdet.kernels.cpu.log_softmax import fixed_point_mass
from tpdet.kernels.cuda import filter_rows, row_draws, sampling
from tpdet.kernels.draw import Draw
from tpdet.kernels.shard import Shard

V = 9001  # more than one part, and a part cut short
WAYS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.6, "min_p": 0.2, "repetition_penalty": 1.3, "prompt_ids": (1, 2, 3, 8999),
     "output_ids": (5, 5, 7), "frequency_penalty": 0.5, "presence_penalty": 0.1},
    {"temperature": 0.0, "bias": {7: 90.0, 8: 90.0}, "forbidden": (7,)},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 2.0, "top_k": 5000, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 1, "bias": {8000: 40.0}},
    {"temperature": 1e-3, "top_k": V + 7, "top_p": 0.5},
    {"temperature": 50.0, "top_k": V - 1},
    {"temperature": 1.0, "top_p": 0.999, "min_p": 1.0},
)  # fmt: skip


def draws(count, first=0):
    return [
        Draw(seed=i * 0x9E3779B97F4A7C15 % 2**64, position=40 + i, choice=i % 3,
             **WAYS[(i + first) % len(WAYS)])
        for i in range(count)
    ]  # fmt: skip


def rows(kind, count=12, vocabulary=V):
    x = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(7))
    if kind == "random":
        x = x * 3
    if kind == "tied":
        x = torch.round(x * 2)
    if kind == "flat":
        x = x * 1e-3
    if kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    if kind == "peaked":
        x[:, 17] += 60
    if kind == "holes":
        x[:, ::3] = -torch.inf
        x[:, 5:9] = 4.0
    if kind == "huge":
        x = x * 5e37
    return x


FEW = ("random", "tied")
QUICKLY = "few" in sys.argv[1:]
KINDS = FEW if QUICKLY else (*FEW, "zeros", "peaked", "holes", "huge")


def whole(x, how):
    return row_draws.draw_rows(x, how, Shard(0, x.shape[1]))


def answers_every_way_as_the_row_by_row_kernels_do():
    for kind in KINDS:
        x, how = rows(kind), draws(12)
        same_answers(whole(x, how), reference(x, how), kind)


def greedy_and_plain_draws_are_the_cpus():
    for kind in KINDS:
        x = rows(kind, 6, 5003)
        how = [Draw(t, 2**63 + i, 9, i) for i, t in enumerate((0.0, 1.0, 0.3, 3.0, 1e-4, 1e4))]
        found = whole(x, how).tokens.tolist()
        expected = [cpu_sampling.choose_token(row, way) for row, way in zip(x, how, strict=True)]
        assert found == expected, kind


def a_row_alone_is_as_in_a_crowd():
    x, how = rows("random"), draws(12)
    together = whole(x, how)
    for i, way in enumerate(how[:5] if QUICKLY else how):
        alone = whole(x[i : i + 1], [way])
        assert torch.equal(alone.packed[0], together.packed[i]), i


def poisoned_rows_fail_alone():
    count = 5 if QUICKLY else 12
    x = rows("random", count)
    poisons = (0, torch.nan), (V - 1, torch.inf), (4444, -torch.nan)
    for place, poison in poisons[-1:] if QUICKLY else poisons:
        y, how = x.clone(), draws(count)
        y[1::2, place] = poison
        if poison is not torch.inf:
            y[1::2].view(torch.int32)[:, place] |= -(2**31)  # a NaN with its sign set
        y[4] = -torch.inf
        found = whole(y, how)
        same_answers(found, reference(y, how), str(poison))
        assert found.tokens[~found.fit].eq(0).all()


def says_when_nothing_is_left():
    x = torch.zeros(4, 6)
    every = tuple(range(6))
    how = [Draw(t, 1, 1, forbidden=every, top_k=k) for t in (0.0, 1.0) for k in (-1, 3)]
    assert whole(x, how).tokens.tolist() == [-1] * 4


def scores_given_tokens():
    x = rows("holes")
    tokens = [i * 701 % V for i in range(12)]
    found = row_draws.score_tokens(x, tokens, Shard(0, V))
    same_answers(found, answers(*prepare(x), torch.tensor(tokens)), "scores")


def every_cut_of_the_vocabulary_answers_alike():
    cuts = {
        "random": ((1, 9001), (2, 4512), (8, 1136)),
        "tied": ((4, 2256),),
        "holes": ((4, 3072),),  # the last rank holds padding alone
    }
    for first, (kind, sizes) in enumerate(cuts.items()):
        if QUICKLY and kind != "tied":
            continue
        x, how = rows(kind, 6), draws(6, 4 * first)
        expected = whole(x, how)
        tokens = [i * 701 % V for i in range(6)]
        scored = row_draws.score_tokens(x, tokens, Shard(0, V))
        top = row_draws.top_of_rows(x, [1, 4], 20, Shard(0, V))
        for ranks, width in sizes:
            for found in over_shards(
                x, ranks, width,
                lambda piece, shard, how=how, tokens=tokens: (
                    row_draws.draw_rows(piece, how, shard),
                    row_draws.score_tokens(piece, tokens, shard),
                    row_draws.top_of_rows(piece, [1, 4], 20, shard),
                ),
            ):  # fmt: skip
                assert torch.equal(found[0].packed, expected.packed), (kind, ranks)
                assert torch.equal(found[1].packed, scored.packed), (kind, ranks)
                assert torch.equal(found[2][0], top[0]) and torch.equal(found[2][1], top[1])


def top_of_rows_is_as_before():
    for kind in ("random", "tied", "zeros"):
        x = rows(kind)
        found, expected = row_draws.top_of_rows(x, [0, 3], 20, Shard(0, V)), tops(x, [0, 3], 20)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), kind


def bounds_are_the_old_ones_by_each_way():
    left_over = {}
    for kind in KINDS:
        x = rows(kind, 1)
        for way in ({"top_k": 1}, {"top_k": 40}, {"top_k": 4000}, {"top_p": 0.9}, {"top_p": 1e-9},
                    {"top_k": 40, "top_p": 0.5}, {"top_k": 6000, "top_p": 0.5}, {"top_p": 0.9999},
                    {"top_k": V - 1}):  # fmt: skip
            how = [Draw(1.0, 1, 1, **way)]
            old = torch.empty(1, dtype=torch.int64)
            parameters = sampling._parameters(how, V, x.amax(-1))
            sampling.find_bounds[1,](x + 0.0, x.amax(-1), parameters, old, V, 8, 2048)
            table = torch.tensor(row_draws._row_table(how, [], [0], V))
            peaks, groups = peaks_of(x, table)
            given = x, x, table, peaks, torch.zeros(1, dtype=torch.int64)
            for ways in WAYS_TO_BOUNDS:
                by = bounds_by(ways, given, groups)
                left_over[ways] = left_over.get(ways, 0) + (by == 2**62)
                all_but_rows = ways == ("list", "window")
                assert by != 2**62 or not all_but_rows or kind not in QUICK, (kind, way)
                assert by in (int(old), 2**62), (kind, way, ways, by, int(old))
    tried = 9 * len(KINDS)
    assert 0 < left_over[("list",)] < tried, left_over  # each way has rows to answer for
    assert left_over[("window",)] < tried / 4, left_over
    assert left_over[("rows",)] == 0, left_over
    assert left_over[("list", "window")] < tried / 6, left_over


def long_runs_of_ties_need_no_search():
    """Values with more ids than a window lists, under shares that end in each of their runs."""
    vocabulary, ended = 30_000, set()
    x = torch.randint(0, 3, (1, vocabulary), generator=torch.Generator().manual_seed(3)) * 0.7
    x[0, ::4000] = 1.9
    masses = torch.exp(x[0].double())
    for share in (0.2, 0.5, 0.5555, 0.7, 0.95):
        keys = torch.sort(x[0], descending=True, stable=True)
        upto = torch.cumsum(masses[keys.indices], 0) / masses.sum()
        last = int((upto < share).sum())
        found = int(bound_of(x, {"top_p": share}, ("list", "window")))
        assert 4194303 - (found & 4194303) == int(keys.indices[last]), (share, found)
        ended.add(float(x[0, keys.indices[last]]))
    assert len(ended) == 3, ended
    for k in (9000, 15_000, 29_000):
        found = int(bound_of(x, {"top_k": k}, ("list", "window")))
        assert 4194303 - (found & 4194303) == int(keys.indices[k - 1]), k


def a_few_heavy_ids_do_not_mislead_the_window():
    """A third of the mass on one id, which counts four times or not when a quarter of them are."""
    vocabulary = 151_936  # of which a window is a small part
    x = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(4)) * 3
    x[0, 5] = float(x.logsumexp(1)) - 0.85
    masses = fixed_point_mass(x[0], x[0].amax())
    keys = torch.sort(x[0], descending=True, stable=True)
    last = int((torch.cumsum(masses[keys.indices], 0) < 0.95 * masses.sum()).sum())
    found = int(bound_of(x, {"top_p": 0.95}, ("list", "window")))
    assert last > 6144 and 4194303 - (found & 4194303) == int(keys.indices[last])


def values_in_one_bucket_are_found_by_digits():
    """Ten thousand values near each other, which neither lists nor runs can tell apart."""
    vocabulary = 12_000
    x = torch.rand(1, vocabulary, generator=torch.Generator().manual_seed(5)) * 1e-3
    x[0, 77] = 7.0
    keys = torch.sort(x[0], descending=True, stable=True)
    for way, k in (
        ({"top_p": 0.9}, None),
        ({"top_k": 9000}, 9000),
        ({"top_k": 9000, "top_p": 0.5}, None),
    ):
        assert int(bound_of(x, way, ("list", "window"))) == 2**62, way
        found = int(bound_of(x, way, ("rows",)))
        masses = fixed_point_mass(x[0], x[0].amax())[keys.indices][: way.get("top_k")]
        if k is None:
            k = int((torch.cumsum(masses, 0) < way["top_p"] * masses.sum()).sum()) + 1
        assert 4194303 - (found & 4194303) == int(keys.indices[k - 1]), way


def bound_of(x, way, names):
    vocabulary = x.shape[1]
    table = torch.tensor(row_draws._row_table([Draw(1.0, 1, 1, **way)], [], [0], vocabulary))
    peaks, groups = peaks_of(x, table)
    given = x, x, table, peaks, torch.zeros(1, dtype=torch.int64)
    return bounds_by(names, given, groups, vocabulary)


def peaks_of(x, table):
    arrivals, vocabulary = torch.empty(1, dtype=torch.int32), x.shape[1]
    shard = Shard(0, vocabulary)
    return row_draws._peaks(x, x, table, arrivals, 1, vocabulary, shard, True)


QUICK = ("random", "tied", "zeros")  # none of their rows may need the slow way
WAYS_TO_BOUNDS = ("list",), ("window",), ("rows",), ("list", "window")


def bounds_by(names, given, groups, vocabulary=V):
    """The bound of one row in the ways that are named; 2^62 where they found none."""
    bounds, _ = filter_rows.find_bounds(*given, groups, vocabulary, False, names)
    return int(bounds[0, 0])


def near_ties_of_rough_scores_are_settled_by_exact_ones():
    """Two ids of one lane whose exact scores differ by one rounding: the better one wins."""
    noise = cpu_noise(torch.arange(4096), seed=3, position=5, choice=0)
    for delta in (0.0, 1e-6, -1e-6):
        x = torch.full((1, 4096), -5.0)
        x[0, 100], x[0, 1124] = 20.0 - noise[100], 20.0 - noise[1124] + delta
        scores = x[0] + noise
        found = int(whole(x, [Draw(1.0, 3, 5)]).tokens)
        assert found == int(torch.argmax(scores)), delta


CASES = (
    a_step_by_shares_launches_no_more_than_this,
    memory_that_nobody_wrote_is_never_read,
    answers_every_way_as_the_row_by_row_kernels_do,
    greedy_and_plain_draws_are_the_cpus,
    a_row_alone_is_as_in_a_crowd,
    poisoned_rows_fail_alone,
    says_when_nothing_is_left,
    scores_given_tokens,
    every_cut_of_the_vocabulary_answers_alike,
    top_of_rows_is_as_before,
    bounds_are_the_old_ones_by_each_way,
    long_runs_of_ties_need_no_search,
    a_few_heavy_ids_do_not_mislead_the_window,
    values_in_one_bucket_are_found_by_digits,
    rough_noise_is_near_the_noise,
    philox_words_are_the_cpus,
    masses_are_rounded_conversions,
    near_ties_of_rough_scores_are_settled_by_exact_ones,
)


def main():
    np.seterr(all="ignore")
    results = {}
    named = [word for word in sys.argv[1:] if word != "few"]
    for case in CASES:
        if named and named[0] not in case.__name__:
            continue
        try:
            case()
            results[case.__name__] = "passed"
        except Exception:
            results[case.__name__] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
