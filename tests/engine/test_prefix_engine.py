"""The prefix cache in the whole engine: what is read from it has the bits of what is computed."""

import itertools
import random

import pytest
import torch

from tests.engine.test_engine import poison
from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, run
from tests.lib.some_slow import some_slow

pytestmark = pytest.mark.long

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "logprobs": 2}
_random = random.Random(3)
at_both_ends = pytest.mark.parametrize(("tp", "ahead"), [(1, False), (2, True)])
"""Each size and each way to step; `make test-long` has what reads the cache at all four."""
BASE, OTHER = ([_random.randrange(1024) for _ in range(700)] for _ in range(2))


@pytest.fixture(scope="module")
def cold(tiny_model):
    """A request's run by itself, without a prefix cache, at TP 1; by what was asked."""
    made = {}

    def get(request):
        key = request.prompt_token_ids, str(request.params)
        if key not in made:
            model = tiny_model("qwen3", kv_heads=2)
            made[key] = run(model, [request], enable_prefix_caching=False)
        return made[key]

    return get


def assert_as_cold(found, request, cold, choices=1):
    """The request's answers and every logit it looked at are those of its cold run."""
    alone, name = cold(request), request.request_id
    (other,) = alone.outputs
    for choice in range(choices):
        assert found.answer(name, choice) == alone.answer(other, choice), name
    keys = [key for key in found.logits if key[0] == name]
    assert keys
    for key in keys:
        assert_same_bits(found.logits[key], alone.logits[other, *key[1:]], str(key))


@pytest.mark.parametrize(
    ("tp", "ahead"), some_slow({(1, False), (2, True)}, itertools.product((1, 2), (False, True)))
)
def test_hit_partial_hit_and_refilled_have_the_bits_of_cold(tiny_model, cold, tp, ahead):
    waves = [
        [ask("cold", BASE[:600]), ask("short", BASE[:40], **SAMPLED)],
        [ask("hit", BASE[:600]), ask("sampled", BASE[:600], **SAMPLED)],
        [ask("partial", [*BASE[:400], *OTHER[:150]]), ask("longer", BASE)],
        [ask("one", BASE[:513])],
        [ask(f"flood{i}", OTHER[i : i + 650]) for i in range(4)],
        [ask("refilled", BASE[:600])],
        [ask("again", BASE[:600])],
    ]
    found = run(
        tiny_model("qwen3", kv_heads=2),
        waves[0],
        tp=tp,
        ahead=ahead,
        waves=waves[1:],
        kv_pages=7,
        max_num_batched_tokens=300,
    )
    cached = {r.request_id: found.cached(r.request_id) for wave in waves for r in wave}
    assert (cached["cold"], cached["hit"], cached["sampled"]) == (0, 512, 512)
    assert (cached["partial"], cached["longer"], cached["one"]) == (256, 512, 512)
    assert (cached["refilled"], cached["again"]) == (0, 512)
    for request in (request for wave in waves for request in wave):
        assert_as_cold(found, request, cold)


@pytest.mark.parametrize("dtype", some_slow({"bfloat16"}, ("float32", "bfloat16", "float16")))
def test_a_hit_at_another_size_of_chunk_and_dtype_is_equal(tiny_model, dtype):
    model = tiny_model("qwen3", kv_heads=2)
    alone = run(model, [ask("a", BASE)], dtype=dtype, enable_prefix_caching=False)
    found = run(
        model,
        [ask("first", BASE[:600])],
        waves=[[ask("a", BASE)]],
        dtype=dtype,
        max_num_batched_tokens=37,
    )
    assert found.hits == [0, 512]
    assert found.answer("a") == alone.answer("a")
    for key in (key for key in found.logits if key[0] == "a"):
        assert_same_bits(found.logits[key], alone.logits[key], str(key))


@pytest.mark.parametrize("ahead", [False, True])
def test_generated_tokens_are_cached_too(tiny_model, cold, ahead):
    model = tiny_model("qwen3", kv_heads=2)
    first = ask("first", BASE[:500], max_tokens=30)
    said = cold(first).tokens("first")
    more = ask("turn", [*BASE[:500], *said, *OTHER[:9]])
    found = run(model, [first], waves=[[more]], ahead=ahead)
    assert found.cached("turn") == 512
    assert_as_cold(found, more, cold)


@at_both_ends
def test_choices_share_their_prompt(tiny_model, cold, tp, ahead):
    request = ask("many", BASE[:520], n=4, **SAMPLED)
    found = run(tiny_model("qwen3", kv_heads=2), [request], tp=tp, ahead=ahead)
    assert [found.cached("many", choice) for choice in range(4)] == [0, 512, 512, 512]
    assert_as_cold(found, request, cold, choices=4)


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_page(tiny_model, cold):
    request = ask("hit", BASE[:512])
    found = run(tiny_model("qwen3", kv_heads=2), [ask("a", BASE[:512])], waves=[[request]])
    assert found.cached("hit") == 256
    assert_as_cold(found, request, cold)


def test_scores_of_a_prompt_are_computed_and_fill_the_cache(tiny_model, cold):
    scored = ask("scored", BASE[:600], prompt_logprobs=1)
    again = ask("again", BASE[:600], prompt_logprobs=1)
    plain = ask("plain", BASE[:600])
    found = run(tiny_model("qwen3", kv_heads=2), [scored], waves=[[again], [plain]])
    assert found.hits == [0, 0, 512]
    assert found.prompt("again").logprobs == cold(scored).prompt("scored").logprobs
    for request in (scored, again, plain):
        assert_as_cold(found, request, cold)


@pytest.mark.parametrize(
    ("last", "hit"),
    some_slow([(50, 512), (400, 0)], [(50, 512), (100, 256), (400, 0), (9999, 0)]),
)
def test_scores_of_the_last_tokens_are_those_of_all_and_read_the_cache(tiny_model, cold, last, hit):
    whole = ask("whole", BASE[:600], prompt_logprobs=2)
    some = ask("some", BASE[:600], prompt_logprobs=2, prompt_logprobs_last_n=last)
    other = ask("other", [1, *BASE[1:600]], prompt_logprobs=2, prompt_logprobs_last_n=last)
    model = tiny_model("qwen3", kv_heads=2)
    found = run(model, [ask("plain", BASE[:600])], waves=[[some, other]], preempt_every=5)
    assert found.cached("some") == hit and found.cached("other") == 0
    scored, everything = found.prompt("some"), cold(whole).prompt("whole")
    before = max(1, 600 - last)
    assert scored.logprobs[:before] == (None,) * before
    assert_same_bits(
        torch.tensor(scored.logprobs[before:]), torch.tensor(everything.logprobs[before:])
    )
    assert scored.top[before:] == everything.top[before:]
    assert scored.ranks[before:] == everything.ranks[before:]
    assert_as_cold(found, some, cold)
    # Negative control: another first token, and no score behind it is the same.
    assert found.prompt("other").logprobs[before:] != scored.logprobs[before:]


@pytest.mark.parametrize("tp", [1, 2])
def test_named_ids_have_the_bits_that_they_have_among_the_likeliest(tiny_model, cold, tp):
    many = SAMPLED | {"logprobs": 100, "prompt_logprobs": 100, "max_tokens": 3}
    likeliest = cold(ask("many", BASE[:300], **many))
    ids = tuple(candidate.token_id for candidate in likeliest.answer("many")[0][2][5:90:20])
    few = SAMPLED | {"logprobs": None, "prompt_logprobs": 0, "max_tokens": 3}
    named = ask("named", BASE[:300], logprob_token_ids=ids, **few)
    others = [ask(f"other{i}", OTHER[: 50 + i], **SAMPLED) for i in range(3)]
    found = run(tiny_model("qwen3", kv_heads=2), [named, *others], tp=tp, ahead=True)
    assert found.tokens("named") == likeliest.tokens("many")
    answers = zip(found.answer("named"), likeliest.answer("many"), strict=True)
    tops = [(ours[2], theirs[2]) for ours, theirs in answers]
    tops += zip(found.prompt("named").top[1:], likeliest.prompt("many").top[1:], strict=True)
    compared = 0
    for top, among in tops:
        assert tuple(candidate.token_id for candidate in top) == ids
        values = {candidate.token_id: candidate.logprob for candidate in among}
        same = [c.logprob == values[c.token_id] for c in top if c.token_id in values]
        compared += len(same)
        assert all(same)
    assert compared > 50
    for request in others:
        assert_as_cold(found, request, cold)


@pytest.mark.parametrize("tp", [1, 2])
def test_preemption_resumes_from_cached_pages_with_equal_bits(tiny_model, cold, tp):
    crowd = [ask(f"r{i}", [*BASE[:530], *OTHER[: 9 * i]], max_tokens=12) for i in range(3)]
    found = run(
        tiny_model("qwen3", kv_heads=2),
        crowd,
        tp=tp,
        preempt_every=2,
        ahead=True,
        kv_pages=6,
        max_num_batched_tokens=200,
    )
    assert found.preemptions > 3 and found.hits[0] > 3 * 512
    for request in crowd:
        assert_as_cold(found, request, cold)


def test_other_salts_share_nothing_and_give_the_same_bits(tiny_model, cold):
    waves = [
        [ask("a", BASE[:600], tenant="t1")],
        [ask("b", BASE[:600], tenant="t2"), ask("c", BASE[:600], tenant="t1", salt="s")],
        [ask("d", BASE[:600]), ask("e", BASE[:600], salt="t1")],
        [ask("f", BASE[:600], tenant="t1")],
    ]
    found = run(tiny_model("qwen3", kv_heads=2), waves[0], waves=waves[1:])
    assert found.hits == [0, 0, 0, 512]
    for request in (request for wave in waves for request in wave):
        assert_as_cold(found, request, cold)


@at_both_ends
def test_pages_of_a_request_that_failed_with_nan_are_never_read(tiny_model, cold, tp, ahead):
    bad = 1099
    waves = [
        [ask("good", BASE[:600]), ask("bad", [*BASE[:300], bad, *BASE[300:600]])],
        [ask("after", [*BASE[:300], bad, *BASE[300:600]]), ask("other", BASE[:600])],
    ]
    found = run(
        tiny_model("qwen3", kv_heads=2),
        waves[0],
        tp=tp,
        ahead=ahead,
        waves=waves[1:],
        change=poison(bad),
        max_num_batched_tokens=150,
    )
    assert [found.failure(name).code for name in ("bad", "after")] == ["numerical_error"] * 2
    for name in ("good", "other"):
        assert_as_cold(found, next(r for wave in waves for r in wave if r.request_id == name), cold)


def test_the_cache_can_be_emptied_and_switched_off(tiny_model, cold):
    model = tiny_model("qwen3", kv_heads=2)
    waves = [lambda engine: engine.scheduler.forget_prefixes(), [ask("b", BASE[:600])],
             lambda engine: engine.scheduler.reload(b"other weights"), [ask("c", BASE[:600])],
             [ask("d", BASE[:600])]]  # fmt: skip
    found = run(model, [ask("a", BASE[:600])], tp=2, waves=waves)
    assert found.hits == [0, 0, 0, 512]
    off = run(
        model, [ask("a", BASE[:600])], waves=[[ask("b", BASE[:600])]], enable_prefix_caching=False
    )
    assert off.hits == [0, 0]


def test_a_page_that_was_changed_would_show(tiny_model):
    """Negative control: one value of a cached page changed, and the logits of a hit differ."""

    def change(engine):
        engine.runner.pages.layers[0].values[0, 0, 5, 0] += 1.0

    waves = [change, [ask("hit", BASE[:600])]]
    found = run(tiny_model("qwen3", kv_heads=2), [ask("a", BASE[:600])], waves=waves)
    assert found.hits == [0, 512]
    assert not torch.equal(found.logits["hit", 0, 599], found.logits["a", 0, 599])
