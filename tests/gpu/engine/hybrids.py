"""Hybrids on a GPU: one digest of an answer over sizes, batches, chunks, preemption, hits, drafts.

The circumstances are those of the CPU's tests (`tests/engine/test_hybrid_digest.py`), with graphs
and without. Two ranks run as threads of this process on the one GPU, without graphs.
"""

from tests.gpu.lib.checks import Differences
from tests.gpu.lib.suite import Check
from tests.lib.engine_harness import ask, run
from tests.lib.hybrid_answers import (
    BEHIND,
    CUTS,
    LONG,
    SHORT,
    asked,
    crowd,
    digest,
    drafted,
    left_behind,
)
from tpdet.kernels.order import CHUNK_TOKENS
from tpdet.tools.synthetic.make_model import make_model

SIZES = {"hidden": 256, "layers": 4, "intermediate": 384, "kv_heads": 2, "vocab": 1100}
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
ROOM = {"device": "cuda", "max_num_seqs": 16, "max_model_len": 1024}
DRAFTS = ((200, 4), (0, 4), (2, 5), (200, 16), (200, 64))
"""How many of a run's drafts are right at most, and how long it is."""


def alike(found, expected, name="a", first=0):
    """Raise unless an answer has the digest of another."""
    wanted = digest(expected, first=first)
    if digest(found, name) != wanted:
        answers = found.tokens(name), expected.tokens("a")
        raise AssertionError(f"another digest: {answers[0]} for {answers[1]}")


def same_answer(found, expected):
    """Raise unless a request's tokens and the bits of their log-probabilities are another's."""
    if found.answer("a") != expected.answer("a"):
        raise AssertionError(f"{found.tokens('a')} for {expected.tokens('a')}")


def cut(model, expected, budget, how):
    """The answer, its prompt in chunks of so many tokens."""
    alike(run(model, [asked()], max_num_batched_tokens=budget, **how), expected)


def crowded(model, expected, preempt_every, how):
    """The answer in a crowd of 16, which is preempted, if asked for."""
    found = crowd(model, max_num_batched_tokens=200, preempt_every=preempt_every, **how)
    if (found.preemptions > 2) is not bool(preempt_every):
        raise AssertionError(f"{found.preemptions} preemptions")
    alike(found, expected)


def hits(model, expected, how):
    """Prompts that end at a cached page, share one, and go on with an answer."""
    told = LONG[:300] + expected.tokens("a")
    waves = [[asked(LONG[:256] + LONG[:20], "other")], [asked(told, "on")], [asked(name="b")]]
    found = run(model, [asked()], waves=waves, **how, **SHORT)
    if min(found.hits[1:]) < 256:
        raise AssertionError(f"hits of {found.hits} tokens")
    alike(found, expected, "b", first=found.cached("b") - 1)
    alone = run(model, [asked(told, "a")], **how, **SHORT)
    alike(found, alone, "on", first=found.cached("on") - 1)


def left(model, how):
    """Prompts that begin at snapshots which a step left behind."""
    found = left_behind(model, **how, **SHORT)
    alike(found, run(model, [asked(BEHIND)], **how, **SHORT), "hits")
    alike(found, found, "again")


def with_drafts(model, expected, right, length, how):
    """The answer with drafts in runs of `length`, of which the first `right` are right."""
    same_answer(drafted(model, expected.tokens("a"), right, length, **how, **SHORT), expected)


def across(model, how):
    """Runs of drafts from a prompt's end before a chunk's; right and wrong on either side of it."""
    prompt, tokens = LONG[: 3 * CHUNK_TOKENS - 6], 2 * CHUNK_TOKENS + 12
    request = ask("a", prompt, max_tokens=tokens, logprobs=0)
    expected = run(model, [request], look=False, **how, **SHORT)
    for length in (4, 16, 64):
        for right in (0, 5, 6, 7, 70, 1000):
            found = drafted(
                model, expected.tokens("a"), right, length, prompt, tokens, **how, **SHORT
            )
            same_answer(found, expected)


def check_one_digest(model, dtype, eager):
    """One rank, with graphs or without, in every circumstance."""
    wrong, how = Differences(), {**ROOM, "dtype": dtype, "enforce_eager": eager, "runners": []}
    expected = run(model, [asked()], **how, **SHORT)
    for budget in CUTS:
        wrong.keep(cut, model, expected, budget, how)
    for preempt_every in (0, 4):
        wrong.keep(crowded, model, expected, preempt_every, how)
    wrong.keep(hits, model, expected, how)
    wrong.keep(left, model, how)
    for right, length in DRAFTS:
        wrong.keep(with_drafts, model, expected, right, length, how)
    wrong.keep(across, model, how)
    return {"compared": wrong.finish(), "digest": digest(expected)}


def check_ways(model, dtype):
    """Without graphs and at two ranks an answer has the bits of one rank with graphs."""
    how = {**ROOM, "dtype": dtype}
    expected, wrong = run(model, [asked()], **how, **SHORT), Differences()
    eager = how | {"enforce_eager": True}
    wrong.keep(cut, model, expected, 1000, eager)
    wrong.keep(cut, model, expected, 1000, eager | {"tp": 2})
    wrong.keep(crowded, model, expected, 4, eager | {"tp": 2})
    return wrong.finish()


def make_hybrids(folder):
    """The models of `hybrid_checks`: toys, one whose heads have the size of real ones, a deep one.

    The graphs of the deep one are captured by layers that are alike.
    """
    for family in HYBRIDS:
        make_model(folder / family, like=family, **SIZES)
    wide = {"like": HYBRIDS[0], "heads": 4, "head_dim": 256}
    make_model(folder / "wide", **(SIZES | wide))
    make_model(folder / "deep", like=HYBRIDS[1], **(SIZES | {"layers": 17}))


def hybrid_checks(folder):
    """Every check; their models are in `folder`."""
    ways = [
        Check(f"{name} {dtype}, sizes", check_ways, (folder / name, dtype))
        for name, dtype in (
            (HYBRIDS[0], "bfloat16"),
            (HYBRIDS[1], "bfloat16"),
            ("wide", "float16"),
            ("deep", "bfloat16"),
        )
    ]
    return ways + [
        Check(
            f"{name} {dtype}, {'eager' if eager else 'graphs'}",
            check_one_digest,
            (folder / name, dtype, eager),
        )
        for name in (*HYBRIDS, "wide")
        for dtype in ("bfloat16", "float32")
        for eager in (False, True)
    ]
