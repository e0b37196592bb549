"""The whole engine: no circumstance reaches a bit, and no request reaches another."""

import itertools
import random

import pytest
import torch

from tests.conftest import FAMILIES
from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, leave_out_freely, run
from tests.lib.some_slow import some_slow
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.models import micro_batches

pytestmark = pytest.mark.long

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "logprobs": 2}


def prompts(count, lengths=(5, 300), seed=1):
    draw = random.Random(seed)
    return [[draw.randrange(1024) for _ in range(draw.randint(*lengths))] for _ in range(count)]


def probes():
    long, short, middle = prompts(3, (20, 300), seed=2)
    long = (long * 20)[:290]
    return [
        ask("long", long, prompt_logprobs=1),
        ask("short", short[:7], **SAMPLED),
        ask("middle", middle[:40], temperature=1.1, top_k=30, repetition_penalty=1.2, seed=9),
    ]


def assert_same_run(left, right, names=("long", "short", "middle")):
    for key in sorted(key for key in left.logits if key[0] in names):
        assert_same_bits(right.logits[key], left.logits[key], str(key))
    for name in names:
        assert right.answer(name) == left.answer(name), name


@pytest.fixture(scope="module")
def alone(tiny_model):
    """Each probe alone, at TP 1, by family and dtype."""
    made = {}

    def get(family, dtype="float32", order=DEFAULT_FOLD_ORDER):
        key = family, dtype, order
        if key not in made:
            model = tiny_model(family, kv_heads=2)
            runs = [run(model, [p], dtype=dtype, fold_order=order) for p in probes()]
            whole = runs[0]
            for other in runs[1:]:
                whole.logits |= other.logits
                whole.outputs |= other.outputs
            made[key] = whole
        return made[key]

    return get


DTYPES = ("float32", "bfloat16", "float16")
ORDERS = ("sequential", "pairs")
CROWDS = {(1, "float32"), (2, "float16"), (8, "bfloat16")}


@pytest.mark.parametrize(
    ("tp", "dtype"), some_slow(CROWDS, itertools.product((1, 2, 4, 8), DTYPES))
)
def test_a_crowd_at_any_size_gives_the_bits_of_one_alone(tiny_model, alone, tp, dtype):
    crowd = [ask(f"n{i}", p, **SAMPLED) for i, p in enumerate(prompts(5, (2, 60)))]
    mixed = [crowd[0], *probes(), *crowd[1:]]
    found = run(tiny_model("qwen3", kv_heads=2), mixed, tp=tp, dtype=dtype)
    assert_same_run(alone("qwen3", dtype), found)


@pytest.mark.parametrize("tp", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_equal_at_many_ranks(tiny_model, alone, family, tp):
    found = run(tiny_model(family, kv_heads=2), probes(), tp=tp, max_num_batched_tokens=64)
    assert_same_run(alone(family), found)


@pytest.mark.parametrize(
    ("tp", "order"),
    some_slow([(2, "sequential"), (4, "pairs")], itertools.product((2, 4), ORDERS)),
)
def test_every_fold_order_is_equal_over_sizes(tiny_model, alone, order, tp):
    found = run(tiny_model("qwen3", kv_heads=2), probes(), tp=tp, fold_order=order)
    assert_same_run(alone("qwen3", order=order), found)
    differing = [
        key
        for key in found.logits
        if not torch.equal(found.logits[key], alone("qwen3").logits[key])
    ]
    assert differing, "two fold orders are two contracts"


@pytest.mark.parametrize("order", ["pairs", "tree"])
def test_ranks_on_two_nodes_give_the_bits_and_the_contract_of_one_alone(tiny_model, alone, order):
    """Two nodes of two ranks, with a prompt of so many rows that the nodes slice them."""
    found = run(tiny_model("qwen3", kv_heads=2), probes(), tp=4, local_size=2, fold_order=order)
    assert_same_run(alone("qwen3", order=order), found)
    assert found.fingerprint == alone("qwen3", order=order).fingerprint


@pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.slow), 7, 100])
def test_chunks_of_any_size_give_the_bits_of_the_whole(tiny_model, alone, budget):
    found = run(tiny_model("qwen3", kv_heads=2), probes(), max_num_batched_tokens=budget)
    assert_same_run(alone("qwen3"), found)


@pytest.mark.parametrize(
    ("tp", "caching"), some_slow({(1, True), (2, False)}, itertools.product((1, 2), (False, True)))
)
def test_preempted_requests_give_the_bits_of_undisturbed_ones(tiny_model, alone, tp, caching):
    found = run(
        tiny_model("qwen3", kv_heads=2),
        probes(),
        tp=tp,
        preempt_every=2,
        enable_prefix_caching=caching,
    )
    assert found.preemptions > 5
    assert_same_run(alone("qwen3"), found)


@pytest.mark.parametrize("caching", [False, True])
def test_too_few_pages_preempt_and_change_nothing(tiny_model, alone, caching):
    crowd = [ask(f"n{i}", p, max_tokens=40) for i, p in enumerate(prompts(4, (230, 250)))]
    found = run(
        tiny_model("qwen3", kv_heads=2),
        [*crowd, *probes()],
        kv_pages=5,
        enable_prefix_caching=caching,
    )
    assert found.preemptions > 0
    assert_same_run(alone("qwen3"), found)


def test_prefill_gives_the_bits_of_decode(tiny_model):
    model = tiny_model("qwen3", kv_heads=2)
    prompt = prompts(1, (250, 250))[0]
    decoded = run(model, [ask("a", prompt, max_tokens=20)])
    whole = [*prompt, *decoded.tokens("a")]
    scored = run(model, [ask("a", whole, max_tokens=0, prompt_logprobs=0)])
    for position in range(249, 269):
        key = ("a", 0, position)
        assert_same_bits(scored.logits[key], decoded.logits[key], str(position))
    logprobs = [o.logprob for o in decoded.outputs["a"]]
    assert list(scored.prompt("a").logprobs[250:]) == logprobs


def test_a_vocabulary_and_heads_that_do_not_divide_are_padded_and_shared(tiny_model):
    model = tiny_model("llama", vocab=1037, kv_heads=1)
    requests = [ask("a", range(30)), ask("b", range(900, 1037), **SAMPLED)]
    whole = run(model, requests)
    assert all(len(logits) == 1037 for logits in whole.logits.values())
    for tp in (2, 8):
        assert_same_run(whole, run(model, requests, tp=tp), ("a", "b"))


def test_a_sliding_window_is_equal_over_sizes_and_chunks(tiny_model):
    model = tiny_model("mistral", sliding_window=100)
    requests = [ask("a", prompts(1, (400, 400))[0], prompt_logprobs=0)]
    whole = run(model, requests)
    assert_same_run(whole, run(model, requests, tp=4, max_num_batched_tokens=33), ("a",))


@pytest.mark.parametrize(("like", "tp"), [("gpt_oss", 1), ("gemma3_text", 2)])
def test_windows_on_pages_far_apart_are_equal_alone_and_in_one_step(tiny_model, like, tp):
    """Pages behind the window of the long one and past the end of the short one: nobody's."""
    model = tiny_model(like, kv_heads=2, hidden=128, intermediate=256)
    long, short = prompts(1, (600, 600))[0], prompts(1, (40, 40), seed=2)[0]
    requests = [ask("long", long), ask("short", short, **SAMPLED)]
    whole = run(model, requests[:1])
    whole.logits |= (other := run(model, requests[1:])).logits
    whole.outputs |= other.outputs
    for budget in (2048, 64):  # decoded together; and chunks beside the other's tokens
        found = run(model, requests, tp=tp, max_num_batched_tokens=budget)
        assert_same_run(whole, found, ("long", "short"))


def test_choice_zero_of_four_is_the_answer_of_one(tiny_model):
    model = tiny_model("qwen3", kv_heads=2)
    one = run(model, [ask("a", range(40), **SAMPLED)])
    four = run(model, [ask("a", range(40), n=4, **SAMPLED)], tp=2)
    assert four.answer("a", 0) == one.answer("a", 0)
    answers = [four.tokens("a", choice) for choice in range(4)]
    assert all(left != right for left, right in itertools.combinations(answers, 2))


def test_generated_seeds_depend_on_the_servers_seed_alone(tiny_model):
    model = tiny_model("qwen3", kv_heads=2)
    unseeded = [ask(f"r{i}", range(5), temperature=1.0, max_tokens=4) for i in range(3)]
    runs = [run(model, unseeded, seed=seed) for seed in (1, 1, 2)]
    assert runs[0].seeds == runs[1].seeds
    assert runs[0].outputs == runs[1].outputs
    seeds = [*runs[0].seeds.values(), *runs[2].seeds.values()]
    assert len(dict.fromkeys(seeds)) == 6
    replay = ask("r1", range(5), temperature=1.0, max_tokens=4, seed=runs[0].seeds["r1"])
    assert run(model, [replay]).answer("r1") == runs[0].answer("r1")


def poison(token):
    """Make the embedding of one token NaN, wherever it lives."""

    def change(engine):
        table = engine.runner.model.embedding
        share = table.table_VH.shape[0]
        first = engine.world.rank * share
        if first <= token < first + share:
            table.table_VH[token - first] = torch.nan

    return change


@pytest.mark.parametrize("tp", [1, 2])
def test_nan_fails_its_own_request_and_nobody_elses(tiny_model, alone, tp):
    model = tiny_model("qwen3", kv_heads=2)
    bad = 1099
    assert not any(bad in p.prompt_token_ids for p in probes())
    mixed = [ask("bad", [1, 2, bad, 3]), *probes(), ask("worse", [bad] * 300, prompt_logprobs=0)]
    found = run(model, mixed, tp=tp, change=poison(bad))
    for name in ("bad", "worse"):
        assert found.failure(name).code == "numerical_error"
        assert not found.tokens(name)
    assert_same_run(alone("qwen3"), found)


def test_an_aborted_neighbour_changes_nothing(tiny_model, alone):
    mixed = [ask("gone", range(200), max_tokens=50), *probes()]

    def each_step(engine, step):
        if step == 4:
            engine.abort("gone")

    found = run(tiny_model("qwen3", kv_heads=2), mixed, each_step=each_step)
    assert 0 < len(found.tokens("gone")) < 50
    assert_same_run(alone("qwen3"), found)


@pytest.mark.parametrize(
    ("tp", "preempt_every"), some_slow({(1, 3), (2, 0)}, itertools.product((1, 2), (0, 3)))
)
def test_steps_that_overlap_change_no_bit(tiny_model, alone, tp, preempt_every):
    crowd = [
        ask(f"n{i}", range(3 + i), temperature=1.0, seed=i, max_tokens=3 + i) for i in range(4)
    ]
    found = run(
        tiny_model("qwen3", kv_heads=2),
        [*crowd, *probes()],
        tp=tp,
        ahead=True,
        preempt_every=preempt_every,
        max_num_batched_tokens=100,
        change=leave_out_freely,
    )
    assert_same_run(alone("qwen3"), found)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_step_that_awaits_results_is_launched_before_readers_are_served(tiny_model, ahead):
    launches, seen = [], []

    def count(engine):
        launch = engine.runner.launch
        vars(engine.runner)["launch"] = lambda *step: launches.append(step) or launch(*step)

    request = ask("a", range(9), max_tokens=5, presence_penalty=1.5)
    found = run(
        tiny_model("qwen3", kv_heads=2),
        [request],
        ahead=ahead,
        change=count,
        each_step=lambda engine, step: seen.append(len(launches)),
    )
    assert len(found.tokens("a")) == 5
    assert seen == ([2, 3, 4, 5, 5] if ahead else [1, 2, 3, 4, 5])


@pytest.mark.parametrize("tp", some_slow({2}, (1, 2, 4)))
def test_ranks_that_sample_from_their_own_part_of_the_vocabulary_agree(tiny_model, tp):
    model = tiny_model("qwen3", kv_heads=2)
    requests = [ask(f"r{i}", p, max_tokens=9) for i, p in enumerate(prompts(5, (3, 60)))]
    whole = run(model, requests)
    shards = run(model, requests, tp=tp, ahead=True, look=False)
    for request in requests:
        assert shards.answer(request.request_id) == whole.answer(request.request_id)
    assert shards.steps <= whole.steps + 1


@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_in_two_micro_batches_has_the_bits_of_one(tiny_model, alone, tp, monkeypatch):
    monkeypatch.setattr(GatherExchange, "overlap_programs", 1)
    monkeypatch.setattr(micro_batches, "MICRO_BATCH_ROWS", 20)
    cuts = []
    real = micro_batches.cut_in_two
    monkeypatch.setattr(micro_batches, "cut_in_two", lambda s: cuts.append(real(s)) or cuts[-1])
    found = run(tiny_model("qwen3", kv_heads=2), probes(), tp=tp, max_num_batched_tokens=170)
    assert_same_run(alone("qwen3"), found)
    assert any(len(cut) == 2 for cut in cuts)


def test_a_neighbour_that_stops_while_the_next_step_runs_changes_nothing(tiny_model, alone):
    model = tiny_model("qwen3", kv_heads=2)
    free = run(model, [ask("a", range(9), max_tokens=6)]).tokens("a")
    stops = ask("a", range(9), max_tokens=6, stop_token_ids=(free[2],))
    found = run(model, [stops, *probes()], ahead=True)
    assert found.tokens("a") == free[: free.index(free[2]) + 1]
    assert_same_run(alone("qwen3"), found)


def test_end_tokens_and_lengths_end_a_request(tiny_model):
    model = tiny_model("qwen3", kv_heads=2)
    free = run(model, [ask("a", range(9), max_tokens=6)]).tokens("a")
    stopped = run(model, [ask("a", range(9), max_tokens=6, stop_token_ids=(free[2],))])
    first = free.index(free[2])
    assert stopped.tokens("a") == free[: first + 1]
    assert stopped.answer("a")[-1][3:] == ("stop", free[2])
    later = run(model, [ask("a", range(9), max_tokens=6, min_tokens=5, stop_token_ids=(free[2],))])
    assert len(later.tokens("a")) >= 5 and free[2] not in later.tokens("a")[:5]
