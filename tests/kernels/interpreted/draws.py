"""The kernels that draw many rows at once, in Triton's interpreter, beside the CPU's path.

    TRITON_INTERPRET=1 python -m tests.kernels.interpreted.draws [few] [case]

prints one JSON line with the result of each case; `few`: on one kind of data, and on few
rows, where a case takes many.
"""

import sys

import numpy as np
import torch

from tests.kernels.interpreted.bounds import (
    a_few_heavy_ids_do_not_mislead_the_window,
    bounds_are_the_cpus_by_each_way,
    long_runs_of_ties_need_no_search,
    values_in_one_bucket_are_found_by_digits,
)
from tests.kernels.interpreted.launches import (
    a_step_by_shares_launches_no_more_than_this,
    memory_that_nobody_wrote_is_never_read,
)
from tests.kernels.interpreted.noise import (
    masses_are_rounded_conversions,
    philox_words_are_the_cpus,
    rough_noise_is_near_the_noise,
)
from tests.kernels.interpreted.rows import KINDS, QUICKLY, V, draws, rows
from tests.kernels.interpreted.sampling_oracle import (
    answers,
    over_shards,
    prepare,
    reference,
    same_answers,
    tops,
)
from tests.lib.case_runner import run_cases
from tpdet.kernels.cpu.sampling import sampling as cpu_sampling
from tpdet.kernels.cpu.sampling.gumbel import gumbel_noise as cpu_noise
from tpdet.kernels.cuda.sampling import sample_rows as row_draws
from tpdet.kernels.inputs.sampling import Draw
from tpdet.kernels.inputs.vocabulary_shard import Shard


def whole(x, how):
    return row_draws.draw_rows(x, how, Shard(0, x.shape[1]))


def answers_every_way_as_the_cpu_does():
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
                x,
                ranks,
                width,
                lambda piece, shard, how=how, tokens=tokens: (
                    row_draws.draw_rows(piece, how, shard),
                    row_draws.score_tokens(piece, tokens, shard),
                    row_draws.top_of_rows(piece, [1, 4], 20, shard),
                ),
            ):
                assert torch.equal(found[0].packed, expected.packed), (kind, ranks)
                assert torch.equal(found[1].packed, scored.packed), (kind, ranks)
                assert torch.equal(found[2][0], top[0]) and torch.equal(found[2][1], top[1])


def top_of_rows_is_the_cpus():
    for kind in ("random", "tied", "zeros"):
        x = rows(kind)
        found, expected = row_draws.top_of_rows(x, [0, 3], 20, Shard(0, V)), tops(x, [0, 3], 20)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), kind


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
    answers_every_way_as_the_cpu_does,
    greedy_and_plain_draws_are_the_cpus,
    a_row_alone_is_as_in_a_crowd,
    poisoned_rows_fail_alone,
    says_when_nothing_is_left,
    scores_given_tokens,
    every_cut_of_the_vocabulary_answers_alike,
    top_of_rows_is_the_cpus,
    bounds_are_the_cpus_by_each_way,
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
    named = [word for word in sys.argv[1:] if word != "few"]
    run_cases(case for case in CASES if not named or named[0] in case.__name__)


if __name__ == "__main__":
    main()
