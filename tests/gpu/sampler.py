"""The sampler's kernels on a GPU: bits against the row-by-row way, then times.

    python -m tests.gpu.sampler [bits|times]

Times are microseconds in a CUDA graph that begins with the table on the device (`graph`), and as
`draw` launches it, from the host's call to the last kernel (`call`); the floor reads the logits
twice (greedy) or three times (random) from HBM at 4.5 TB/s.
"""

import sys
import time
from functools import partial

import torch
import triton
import triton.language as tl

from tests.draw_reference import answers, over_shards, prepare, reference, same_answers, tops
from tests.gpu.checks import attempt, failures, same
from tests.gpu.times import interleaved_medians
from tests.interpreted_draws import masses_are_rounded_conversions
from tpdet.kernels.cuda import filter_rows, gumbel_scores, row_draws
from tpdet.kernels.draw import Draw
from tpdet.kernels.shard import Shard

VOCABULARIES = (151_936, 151_937, 32_003, 777)
KINDS = ("random", "peaked", "flat", "tied", "zeros", "holes", "poisoned")
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
)  # fmt: skip
TIMED = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "k50 p.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "p.9": {"temperature": 1.0, "top_p": 0.9},
}


def rows(kind, count, vocabulary, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count, vocabulary, generator=generator, device="cuda")
    if kind in ("random", "poisoned"):
        x = x * 3
    if kind == "peaked":
        x = x * 2 + torch.where(torch.arange(vocabulary, device="cuda") % 701 == 5, 24.0, 0.0)
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


def draws(count, ways=WAYS):
    return [
        Draw(seed=i * 0x9E3779B97F4A7C15 % 2**64, position=40 + i, choice=i % 3,
             **ways[i % len(ways)])
        for i in range(count)
    ]  # fmt: skip


def check_bits(kind):
    for vocabulary in VOCABULARIES:
        x, how = rows(kind, 36, vocabulary), draws(36)
        found, expected = row_draws.draw_rows(x, how, Shard(0, vocabulary)), reference(x, how)
        same_answers(found, expected, f"{kind} {vocabulary}")
        given = [i * 701 % vocabulary for i in range(36)]
        scored = answers(*prepare(x), torch.tensor(given).cuda())
        same_answers(row_draws.score_tokens(x, given, Shard(0, vocabulary)), scored, "scores")
        if kind != "poisoned":
            top, old = (
                row_draws.top_of_rows(x, [0, 5], 20, Shard(0, vocabulary)),
                tops(x, [0, 5], 20),
            )
            assert torch.equal(top[0], old[0]) and torch.equal(top[1], old[1]), "top"
        for i in (0, 1, 2, 3, 4):
            alone = row_draws.draw_rows(x[i : i + 1], how[i : i + 1], Shard(0, vocabulary))
            if found.fit[i]:
                same(alone.packed.float(), found.packed[i : i + 1].float(), f"row {i} alone")


def check_shards():
    for vocabulary in (151_936, 32_003):
        x, how = rows("random", 24, vocabulary), draws(24)
        expected = row_draws.draw_rows(x, how, Shard(0, vocabulary)).packed
        for ranks in (1, 2, 4, 8):
            width = -(-vocabulary // (16 * ranks)) * 16 + 16 * (ranks > 1)
            work = partial(draw_shard, how)
            for found in over_shards(x, ranks, width, work):
                assert torch.equal(found.packed, expected), (vocabulary, ranks)


def draw_shard(how, piece, shard):
    return row_draws.draw_rows(piece, how, shard)


@triton.jit
def noise_error(errors, BLOCK: tl.constexpr):
    word = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    rough = gumbel_scores.rough_noise(word).to(tl.float64)
    error = tl.abs(rough - gumbel_scores.gumbel_noise(word).to(tl.float64))
    tl.store(errors + tl.program_id(0), tl.max(error, axis=0))


def check_rough_noise():
    """The rough noise of every 32-bit word is within 2^-7 of the exact one."""
    errors = torch.empty(1 << 20, dtype=torch.float64, device="cuda")
    noise_error[1 << 20,](errors, 4096, enable_fp_fusion=False)
    worst = errors.max().item()
    assert worst < 2.0**-7, worst
    return f"within {worst:.1e}"


def left_over(x, way):
    """How many rows of x the window leaves to `bound_rows`."""
    height, vocabulary = x.shape
    how, kept = [Draw(seed=i, position=1, **way) for i in range(height)], []

    class Watch:
        def __getitem__(self, grid):
            return lambda *arguments, **options: kept.append(int((arguments[5] == 2**62).sum()))

    slow, filter_rows.bound_rows = filter_rows.bound_rows, Watch()
    try:
        row_draws.draw_rows(x, how, Shard(0, vocabulary))
    finally:
        filter_rows.bound_rows = slow
    return kept[0]


def times():
    vocabulary = 151_936
    for name, way in TIMED.items():
        for count in (1, 16, 64, 256):
            for ranks in (1, 4):
                columns = vocabulary // ranks
                inputs = [rows("random", count, columns, seed) for seed in range(2)]
                how = draws(count, (way,))
                shard = Shard(0, vocabulary, None if ranks == 1 else Copies(ranks))
                graph = graph_time(inputs, how, shard)
                call = call_time(inputs[0], how, shard)
                passes = 2 if way["temperature"] == 0.0 else 3
                floor = passes * count * columns * 4 / 4.5e6
                print(f"  {name:8s} {count:4d} rows /{ranks} graph {graph:8.1f}  call {call:8.1f}  "
                      f"floor {floor:6.1f}  ratio {graph / floor:5.2f}", flush=True)  # fmt: skip
    for kind in KINDS[:4]:
        x = rows(kind, 64, vocabulary)
        found = [f"{left_over(x, TIMED[n])} by {n}" for n in ("k50 p.9", "p.9")]
        print(f"  left to whole rows, {kind}: {', '.join(found)}", flush=True)
    for kind in ("random", "tied"):
        x, how = rows(kind, 4, vocabulary), draws(4, (TIMED["p.9"],))
        old = call_time(x, how, None, partial(reference, x, how), 3)
        print(f"  p.9 4 rows {kind}: {call_time(x, how, Shard(0, vocabulary), repeats=3):.0f}, "
              f"row by row {old:.0f}", flush=True)  # fmt: skip


class Copies:
    """A gather that shows a rank its own tensor `ranks` times: the kernels of one rank."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __call__(self, x):
        return x.expand(self.ranks, *x.shape).contiguous()


def graph_time(inputs, how, shard):
    """Microseconds in a graph: what comes from the host is put there before."""
    kept, original = {}, row_draws.to_device

    def once(values, dtype, device):
        key = (tuple(values), dtype)
        if key not in kept:
            kept[key] = original(values, dtype, device)
        return kept[key]

    row_draws.to_device = once
    try:
        return interleaved_medians([lambda x: draw_shard(how, x, shard)], inputs, repeats=7)[0]
    finally:
        row_draws.to_device = original


def call_time(x, how, shard, work=None, repeats=10):
    work = work or (lambda: row_draws.draw_rows(x, how, shard))
    work()
    torch.cuda.synchronize()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2] * 1e6


def check_no_wait():
    """`draw` waits for nothing: the device is kept busy, and the call is back before it is done."""
    from tests.gpu.engine_parts import VOCABULARY

    x, how = rows("random", 36, VOCABULARY), draws(36)
    row_draws.draw_rows(x, how, Shard(0, VOCABULARY))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        row_draws.draw_rows(x, how, Shard(0, VOCABULARY))
        row_draws.top_of_rows(x, [0, 5], 20, Shard(0, VOCABULARY))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main():
    asked = sys.argv[1:] or ["bits", "times"]
    if "bits" in asked:
        attempt("rough noise", check_rough_noise)
        attempt("masses", masses_are_rounded_conversions, "cuda", 1 << 24)
        for kind in KINDS:
            attempt(f"bits, {kind}", check_bits, kind)
        attempt("shards", check_shards)
        attempt("no wait", check_no_wait)
    if "times" in asked:
        attempt("times", times)
    print("failures:", failures or "none")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
