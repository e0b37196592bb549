"""The sampler's kernels on a GPU: bits against the CPU's path."""

from contextlib import contextmanager
from functools import partial

import torch
import triton
import triton.language as tl

from tests.gpu.lib.checks import same
from tests.gpu.lib.suite import Check
from tests.lib.kernels.masses import masses_are_rounded_conversions
from tests.lib.kernels.sampling_oracle import (
    answers,
    masses_by,
    masses_of,
    over_shards,
    prepare,
    reference,
    same_answers,
    tops,
)
from tpdet.kernels.cpu.sampling import launch as cpu_launch
from tpdet.kernels.cuda.sampling import launch, noise
from tpdet.kernels.inputs.row_params import PlainParams, RowParams
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.kernels.token_ranks import token_ranks
from tpdet.sampling.sampler import prompt_logprobs, sample

VOCABULARIES = (151_936, 151_937, 32_003, 777)
KINDS = ("random", "peaked", "heavy", "flat", "tied", "zeros", "holes", "poisoned")
WAYS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.6, "min_p": 0.2, "repetition_penalty": 1.3, "prompt_ids": (1, 2, 3, 700),
     "output_ids": (5, 5, 7), "frequency_penalty": 0.5, "presence_penalty": 0.1},
    {"temperature": 0.0, "bias": {7: 90.0, 8: 90.0}, "forbidden": (7,)},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 2.0, "top_k": 5000, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 1, "bias": {600: 40.0}},
    {"temperature": 1e-3, "top_k": 10**6, "top_p": 0.5},
    {"temperature": 50.0, "top_k": 700},
    {"temperature": 1.0, "top_p": 0.999, "min_p": 0.3},
    {"temperature": 7.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 3000, "top_p": 0.3, "min_p": 1e-4},
)  # fmt: skip
USUAL = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "k50 p.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "p.9": {"temperature": 1.0, "top_p": 0.9},
}
"""What requests ask for, by name."""


def rows(kind, count, vocabulary, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count, vocabulary, generator=generator, device="cuda")
    if kind in ("random", "poisoned"):
        x = x * 3
    if kind == "peaked":
        x = x * 2 + torch.where(torch.arange(vocabulary, device="cuda") % 701 == 5, 24.0, 0.0)
    if kind == "heavy":
        x = 2 * x / torch.rand(x.shape, generator=generator, device="cuda").clamp(min=1e-6).sqrt()
    if kind == "flat":
        x = x * 0.3
    if kind == "tied":
        x = torch.round(x * 2)
    if kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    if kind == "holes":
        x[:, ::3] = -torch.inf
    if kind == "poisoned":
        x[1::4, vocabulary // 2] = torch.nan
        x[2::4, vocabulary - 1] = torch.inf
        x[3::8] = -torch.inf
    return x


def params(count, ways=WAYS):
    return [
        RowParams(
            seed=i * 0x9E3779B97F4A7C15 % 2**64,
            position=40 + i,
            choice=i % 3,
            **ways[i % len(ways)],
        )
        for i in range(count)
    ]


def check_bits(kind):
    for vocabulary in VOCABULARIES:
        x, how = rows(kind, 36, vocabulary), params(36)
        found, expected = launch.sample_rows(x, how, Shard(0, vocabulary)), reference(x, how)
        same_answers(found, expected, f"{kind} {vocabulary}")
        given = [i * 701 % vocabulary for i in range(36)]
        scored = answers(*prepare(x), torch.tensor(given).cuda())
        same_answers(launch.score_tokens(x, given, Shard(0, vocabulary)), scored, "scores")
        if kind != "poisoned":
            top, old = (
                launch.top_of_rows(x, [0, 5], 20, Shard(0, vocabulary)),
                tops(x, [0, 5], 20),
            )
            assert torch.equal(top[0], old[0]) and torch.equal(top[1], old[1]), "top"
        for i in (0, 1, 2, 3, 4):
            alone = launch.sample_rows(x[i : i + 1], how[i : i + 1], Shard(0, vocabulary))
            if found.fit[i]:
                same(alone.packed.float(), found.packed[i : i + 1].float(), f"row {i} alone")


def check_shards():
    for vocabulary in (151_936, 32_003):
        x, how = rows("random", 24, vocabulary), params(24)
        expected = launch.sample_rows(x, how, Shard(0, vocabulary)).packed
        for ranks in (1, 2, 4, 8):
            width = -(-vocabulary // (16 * ranks)) * 16 + 16 * (ranks > 1)
            work = partial(sample_shard, how)
            for found in over_shards(x, ranks, width, work):
                assert torch.equal(found.packed, expected), (vocabulary, ranks)


def check_processed(kind):
    """Processed rows and what is said of them are the CPU's, also over shards, and raw at T = 1."""
    for vocabulary in VOCABULARIES:
        x, how = rows(kind, 36, vocabulary), params(36)
        found, left = launch.sample_processed(x, how, Shard(0, vocabulary))
        with masses_by(x.device):
            expected, drawn = cpu_launch.sample_processed(x.cpu(), how, Shard(0, vocabulary))
        fit = expected.answers[0] != 0.0
        chosen = fit & (expected.answers[1] >= 0)
        same(left.cpu()[chosen], drawn[chosen], f"{kind} {vocabulary}: rows")
        assert torch.equal(found.answers[0].cpu(), expected.answers[0]), "fit"
        assert torch.equal(found.answers[1].cpu()[fit], expected.answers[1][fit]), "tokens"
        shares = masses_of(left[chosen], left[chosen].amax(-1)).sum(-1).double() * 2.0**-40
        assert torch.equal(found.answers[3][chosen], torch.log(shares)), "masses"
        raw = launch.sample_answers(x, how, Shard(0, vocabulary))
        plain = [row for row, way in enumerate(how) if _is_plain(way) and chosen[row]]
        assert plain or kind == "poisoned"
        assert torch.equal(found.answers[:, plain], raw.answers[:, plain]), "plain rows"
        changed = [row for row, way in enumerate(how) if not _is_plain(way) and chosen[row]]
        assert not torch.equal(found.answers[3][changed], raw.answers[3][changed]), "control"
        if vocabulary == 32_003:
            for ranks in (2, 4, 8):
                width = -(-vocabulary // (16 * ranks)) * 16 + 16
                for answers_, _ in over_shards(x, ranks, width, partial(process_shard, how)):
                    assert torch.equal(answers_.answers[:, chosen], found.answers[:, chosen]), ranks


def _is_plain(way):
    """Whether a row is sampled from as it is."""
    return not way.changes_logits and not PlainParams.of(way).changes_row


def process_shard(how, piece, shard):
    return launch.sample_processed(piece, how, shard)


def check_ranks(kind):
    """Ranks are places in the row sorted, also over shards, and nothing waits for them."""
    for vocabulary in VOCABULARIES:
        x = rows(kind, 24, vocabulary)
        ids = torch.arange(24, device="cuda") * 701 % vocabulary
        order = torch.sort(x + 0.0, dim=-1, descending=True, stable=True).indices
        expected = (order == ids[:, None]).int().argmax(-1) + 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = token_ranks(x, ids, Shard(0, vocabulary))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found, expected), vocabulary
        for ranks in (2, 8):
            width = -(-vocabulary // (16 * ranks)) * 16 + 16
            for found in over_shards(x, ranks, width, partial(rank_shard, ids)):
                assert torch.equal(found, expected), (vocabulary, ranks)


def rank_shard(ids, piece, shard):
    return token_ranks(piece, ids, shard)


def sample_shard(how, piece, shard):
    return launch.sample_rows(piece, how, shard)


@triton.jit
def noise_error(errors, BLOCK: tl.constexpr):
    word = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    rough = noise.rough_noise(word).to(tl.float64)
    error = tl.abs(rough - noise.gumbel_noise(word).to(tl.float64))
    tl.store(errors + tl.program_id(0), tl.max(error, axis=0))


def check_rough_noise():
    """The rough noise of every 32-bit word is within 2^-7 of the exact one."""
    errors = torch.empty(1 << 20, dtype=torch.float64, device="cuda")
    noise_error[1 << 20,](errors, 4096, enable_fp_fusion=False)
    worst = errors.max().item()
    assert worst < 2.0**-7, worst
    return f"within {worst:.1e}"


@contextmanager
def only(methods):
    """Samples with bounds found by some of the methods."""
    find = launch.find_bounds
    launch.find_bounds = partial(find, methods=methods)
    try:
        yield
    finally:
        launch.find_bounds = find


def check_methods(kind):
    """Each of the three methods to find a bound gives the samples that all of them give."""
    for vocabulary in VOCABULARIES:
        x, how = rows(kind, 28, vocabulary), params(28)
        together = launch.sample_rows(x, how, Shard(0, vocabulary)).packed
        for methods in (("window", "digits"), ("digits",)):  # through the list alone some rows fall
            with only(methods):
                found = launch.sample_rows(x, how, Shard(0, vocabulary)).packed
            assert torch.equal(found.nan_to_num(), together.nan_to_num()), (vocabulary, methods)


def check_no_wait():
    """Sampling waits for nothing: the device is kept busy, and the call is back before it ends."""
    from tests.gpu.engine.parts import VOCABULARY

    x, how = rows("random", 36, VOCABULARY), params(36)
    launch.sample_rows(x, how, Shard(0, VOCABULARY))
    launch.sample_processed(x, how, Shard(0, VOCABULARY))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch.sample_rows(x, how, Shard(0, VOCABULARY))
        launch.sample_processed(x, how, Shard(0, VOCABULARY))
        launch.top_of_rows(x, [0, 5], 20, Shard(0, VOCABULARY))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_named_ids(kind):
    """Ids that are named, and a hundred of the likeliest, have the bits of scored tokens."""
    for vocabulary in (151_937, 777):
        logits = rows(kind, 5, vocabulary)
        ids = (vocabulary - 1, 0, 17, 5)
        beside = [ids, 100, None, ids[:2], 100]
        tokens = sample(logits, params(5, [{"temperature": 1.0}]), beside)
        for row in (0, 1, 3, 4):
            top = tokens[row].top
            names = [candidate.token_id for candidate in top]
            assert len(names) == 100 if beside[row] == 100 else names == [*beside[row]]
            scored = prompt_logprobs(logits[row].expand(len(names), -1), names, 0)
            ours = [candidate.logprob for candidate in top]
            assert ours == [token.logprob for token in scored], (kind, vocabulary, row)
        prompt = prompt_logprobs(logits[:1], [3], ids)
        assert prompt[0].top == tokens[0].top, (kind, vocabulary)


def sampler_checks():
    """Every kind of data against the CPU's path, and by every method for a bound."""
    found = [
        Check("rough noise", check_rough_noise),
        Check("masses", masses_are_rounded_conversions, ("cuda", 1 << 24)),
        Check("shards", check_shards),
        Check("no wait", check_no_wait),
    ]
    for kind in KINDS:
        found.append(Check(f"bits, {kind}", check_bits, (kind,)))
        if kind != "poisoned":
            found.append(Check(f"every way to a bound, {kind}", check_methods, (kind,)))
            found.append(Check(f"ranks, {kind}", check_ranks, (kind,)))
            found.append(Check(f"named ids, {kind}", check_named_ids, (kind,)))
        found.append(Check(f"processed, {kind}", check_processed, (kind,)))
    return found
