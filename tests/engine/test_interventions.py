"""Requests that are frozen, ended early or computed again: every token is a function of the ids
before it, the weights and the seed, whatever was done in between.
"""

from functools import cache

import msgspec
import pytest

from tests.lib.engine_harness import ask, leave_out_freely, small_config
from tests.lib.some_slow import some_slow
from tpdet.comm.world.world import SoloWorld
from tpdet.control.weight_orders import LoadModel
from tpdet.engine import Engine
from tpdet.errors import IntegrityError, ReloadError
from tpdet.requests.request import PromptOutput, TokenOutput
from tpdet.requests.weight_versions import WeightVersions

VOCABULARY = 1100
PROMPT = [(7 * i + i * i) % VOCABULARY for i in range(600)]
SAMPLED = {"temperature": 1.0, "seed": 7}
REQUESTS = [
    ask("greedy", PROMPT[:300], max_tokens=12, logprobs=2),
    ask("sampled", PROMPT[:33], max_tokens=14, logprobs=1, top_p=0.9, **SAMPLED),
    ask("choices", PROMPT[:280], max_tokens=9, n=2, logprobs=0, **SAMPLED),
    ask(
        "penalties",
        PROMPT[:200:9],
        max_tokens=14,
        repetition_penalty=1.3,
        frequency_penalty=0.7,
        min_tokens=3,
        stop_token_ids=tuple(range(0, VOCABULARY, 50)),
        **SAMPLED,
    ),
    ask("scored", PROMPT[:290], max_tokens=6, prompt_logprobs=1, logprobs=0),
]


class Driver:
    """An engine, what its readers heard, and how to intervene between two of its steps."""

    def __init__(self, model, requests, ahead=False, **settings):
        config = small_config(model, max_num_seqs=8, **settings)
        self.engine = Engine(config, SoloWorld(), run_ahead=ahead)
        if ahead:
            leave_out_freely(self.engine)
        self.heard = {}
        for request in requests:
            self.engine.submit(request)

    def hear(self, outputs):
        for output in outputs:
            choice = output.choice if isinstance(output, TokenOutput) else -1
            self.heard.setdefault((output.request_id, choice), []).append(output)

    def step(self, count):
        for _ in range(count):
            self.hear(self.engine.step())

    def finish(self):
        while self.engine.has_work:
            self.step(1)
        self.engine.heartbeat()
        self.engine.check_integrity()
        return self.heard

    def settle(self):
        self.hear(self.engine.interventions.settle())

    def recompute(self):
        self.settle()
        self.engine.interventions.recompute()

    def turn_to(self, model):
        """Other weights while requests run, as an update does it."""
        self.settle()
        self.engine.runner.obey(LoadModel(str(model)), lambda: None)
        self.engine.versions.advance(self.engine.runner.model_digest)
        self.engine.interventions.recompute(other_weights=True)

    def tokens(self, name, choice=0):
        found = self.heard.get((name, choice), ())
        return [o for o in found if o.token_id >= 0]


def bits(outputs):
    """What an answer says, as bytes: without what says how it was computed."""
    plain = {"cached_tokens": 0, "draft_tokens": 0, "accepted_draft_tokens": 0, "weights": 0}
    kinds = {TokenOutput: plain, PromptOutput: {"weights": 0}}
    return [
        msgspec.msgpack.encode(msgspec.structs.replace(output, **kinds[type(output)]))
        for output in outputs
    ]


def all_bits(heard):
    return {key: bits(outputs) for key, outputs in heard.items()}


def disturbed_bits(driver, rounds):
    """The bits of all answers, computed again behind each of these numbers of steps."""
    for steps in rounds:
        driver.step(steps)
        driver.recompute()
        driver.engine.check_integrity()
    return all_bits(driver.finish())


def spans_of(driver, requests):
    """Request, choice, number of the weights, tokens before and its own, of every span."""
    for request in requests:
        for choice in range(request.params.n):
            tokens = driver.tokens(request.request_id, choice)
            numbers = [token.weights for token in tokens]
            assert numbers == sorted(numbers)
            for number in sorted({*numbers}):
                begin = numbers.index(number)
                own = [token for token in tokens if token.weights == number]
                yield request, choice, number, tokens[:begin], own


def compared_spans(driver, requests, fresh):
    """Compute every span again from the ids before it; how many tokens and spans were compared.

    fresh: by number of weights, an engine that has had these from its start.
    """
    tokens = spans = 0
    for request, choice, number, before, own in spans_of(driver, requests):
        again = continuation(fresh[number], request, choice, before, len(own))
        assert bits(again) == bits(map(plain, own)), (request.request_id, choice, number)
        tokens, spans = tokens + len(own), spans + 1
    return tokens, spans


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", kv_heads=2)


@pytest.fixture(scope="module")
def other(tiny_model):
    """Another model of the same shapes."""
    return tiny_model("qwen3", kv_heads=2, seed=99)


@pytest.fixture(scope="module")
def undisturbed(model):
    return all_bits(Driver(model, REQUESTS).finish())


@pytest.mark.parametrize(
    ("ahead", "drafts", "tokens"),
    some_slow(
        {(True, "auto", 200)},
        [(False, "off", 200), (True, "off", 200), (True, "auto", 200), (False, "off", 100)],
    ),
)
def test_requests_that_are_computed_again_go_on_with_the_same_bits(
    model, undisturbed, ahead, drafts, tokens
):
    driver = Driver(model, REQUESTS, ahead, drafts=drafts, max_num_batched_tokens=tokens)
    assert disturbed_bits(driver, (2, 3, 4)) == undisturbed


def test_a_page_that_was_computed_before_is_never_read_again(model):
    driver = Driver(model, [ask("first", PROMPT[:300])])
    driver.finish()
    driver.engine.submit(ask("second", PROMPT[:300]))
    driver.finish()
    assert driver.heard["second", 0][0].cached_tokens == 256  # the control: it would be read
    driver.recompute()
    driver.engine.submit(ask("third", PROMPT[:300]))
    driver.finish()
    assert driver.heard["third", 0][0].cached_tokens == 0


def test_nothing_is_recomputed_under_a_step_that_runs(model):
    driver = Driver(model, [REQUESTS[0]], ahead=True)
    driver.step(2)
    with pytest.raises(IntegrityError, match="is pending"):
        driver.engine.interventions.recompute()


def test_a_frozen_engine_makes_no_step_takes_requests_and_goes_on(model, undisturbed):
    driver = Driver(model, REQUESTS[:-1], ahead=True)
    driver.step(3)
    driver.engine.interventions.freeze(True)
    driver.settle()
    steps, before = driver.engine.statistics().steps, all_bits(driver.heard)
    driver.engine.submit(REQUESTS[-1])
    assert driver.engine.has_work and not driver.engine.interventions.may_step
    driver.step(3)
    driver.engine.heartbeat()  # an idle rank hears that all is well
    driver.engine.check_integrity()
    assert driver.engine.statistics().steps == steps + 1 and all_bits(driver.heard) == before
    driver.engine.interventions.freeze(False)
    assert all_bits(driver.finish()) == undisturbed


@pytest.mark.parametrize("ahead", some_slow({True}, [False, True]))
def test_a_request_that_is_ended_has_its_tokens_and_says_so(model, undisturbed, ahead):
    driver = Driver(model, REQUESTS, ahead)
    driver.step(4)
    interventions = driver.engine.interventions
    assert interventions.request_ids() == [request.request_id for request in REQUESTS]
    ended = interventions.end("choices")
    assert [(o.choice, o.token_id, o.finish_reason) for o in ended] == [
        (0, -1, "abort"),
        (1, -1, "abort"),
    ]
    assert interventions.end("choices") == [] == interventions.end("nobody")
    driver.finish()
    for key, found in undisturbed.items():
        heard = bits(driver.heard[key])
        assert heard == found[: len(heard)]  # nobody else's bits changed, its own were right
        assert (len(heard) < len(found)) is (key[0] == "choices")


@pytest.mark.parametrize("ahead", some_slow({True}, [False, True]))
def test_tokens_after_other_weights_are_those_of_a_fresh_request_with_the_ids_so_far(
    model, other, ahead
):
    driver = Driver(model, REQUESTS[:3], ahead)
    driver.step(5)
    driver.turn_to(other)
    driver.step(3)
    driver.turn_to(model)  # and back: the first weights under another number
    driver.finish()
    fresh = [fresh_engine(weights) for weights in (model, other, model)]
    tokens, spans = compared_spans(driver, REQUESTS[:3], fresh)
    assert tokens == 12 + 14 + 2 * 9 and spans == 4 * 3


@cache
def fresh_engine(model):
    """One that has had a model's weights from its start."""
    return Driver(model, (), kv_pages=40)


def continuation(driver, request, choice, before, count):
    """A fresh engine's next tokens of one choice, whose prompt is what the ids were so far."""
    asked = continued_by(request, before, count, f"next {len(driver.heard)}")
    driver.engine.submit(asked)
    driver.finish()
    tokens = driver.tokens(asked.request_id, choice)
    return [plain(msgspec.structs.replace(t, request_id=request.request_id)) for t in tokens]


def continued_by(request, before, count, name):
    """The request whose prompt is what the ids were so far, for `count` more."""
    ids = request.prompt_token_ids + tuple(token.token_id for token in before)
    params = msgspec.structs.replace(request.params, max_tokens=count)
    return msgspec.structs.replace(request, request_id=name, prompt_token_ids=ids, params=params)


def plain(token):
    """Without what an end by length says."""
    return msgspec.structs.replace(token, finish_reason=None)


def test_pages_of_other_weights_would_give_other_bits(model, other, monkeypatch):
    """Negative control: without the recompute the tokens are not those of a fresh request."""
    driver = Driver(model, REQUESTS[:1])
    driver.step(5)
    monkeypatch.setattr(type(driver.engine.scheduler), "recompute", lambda *arguments: None)
    driver.turn_to(other)
    monkeypatch.undo()
    driver.finish()
    tokens = driver.tokens("greedy")
    begin = [token.weights for token in tokens].index(1)
    fresh = continuation(fresh_engine(other), REQUESTS[0], 0, tokens[:begin], len(tokens) - begin)
    assert bits(fresh) != bits([plain(token) for token in tokens[begin:]])


def turned_with_old_keys(model, other, *more):
    """A request that had tokens when the weights changed, and kept its keys; `more` had none."""
    driver = Driver(model, REQUESTS[:1])
    driver.step(4)
    for request in more:
        driver.engine.submit(request)
    driver.engine.interventions.freeze(True, keep_keys=True)
    driver.turn_to(other)
    driver.engine.interventions.freeze(False)
    driver.engine.check_integrity()
    return driver


def test_old_keys_are_kept_on_request_and_every_token_over_them_says_so(model, other):
    """The tokens are no fresh request's, and nobody else reads a page of theirs."""
    young, new = ask("young", PROMPT[:530], max_tokens=4), ask("new", PROMPT[:300], max_tokens=12)
    driver = turned_with_old_keys(model, other, young)
    driver.engine.submit(new)
    driver.finish()
    tokens = driver.tokens("greedy")
    numbers = [token.weights for token in tokens]
    begin = numbers.index(-2)  # -1 - 1: weights 1 over older keys
    assert begin > 0 and {*numbers[:begin]} == {0} and {*numbers[begin:]} == {-2}
    fresh = continuation(fresh_engine(other), REQUESTS[0], 0, tokens[:begin], len(tokens) - begin)
    assert bits([plain(token) for token in tokens[begin:]]) != bits(fresh)
    assert driver.heard["young", 0][0].cached_tokens == 0  # it comes first, and finds nothing
    for request in (young, new):
        reference = Driver(other, [request])
        reference.finish()
        heard = driver.heard[request.request_id, 0]
        assert bits(heard) == bits(reference.heard[request.request_id, 0])
        assert {token.weights for token in heard} == {1}


def test_a_request_with_old_keys_that_is_computed_again_is_clean_from_then_on(model, other):
    driver = turned_with_old_keys(model, other)
    driver.step(2)
    driver.recompute()
    driver.finish()
    tokens = driver.tokens("greedy")
    numbers = [token.weights for token in tokens]
    begin = numbers.index(1)
    assert {*numbers[:begin]} == {0, -2} and {*numbers[begin:]} == {1}
    fresh = continuation(fresh_engine(other), REQUESTS[0], 0, tokens[:begin], len(tokens) - begin)
    assert bits([plain(token) for token in tokens[begin:]]) == bits(fresh)


@pytest.mark.parametrize("steps", some_slow({2, 4}, [1, 2, 4]))
def test_a_prompt_is_scored_by_one_version_of_the_weights(model, other, steps):
    scored = REQUESTS[-1]  # 290 tokens in chunks of 100: scored when two or three are done
    driver = Driver(model, [scored], max_num_batched_tokens=100)
    driver.step(steps)
    driver.turn_to(other)
    driver.finish()
    (found,) = driver.heard["scored", -1]
    assert found.weights == (0 if steps > 2 else 1)
    reference = Driver(other if found.weights else model, [scored])
    reference.finish()
    assert bits([found]) == bits(reference.heard["scored", -1])


def test_outputs_of_other_weights_are_no_drafts(model, other):
    request = ask("first", PROMPT[:40], max_tokens=12)
    driver = Driver(model, [request], drafts="earlier")
    driver.finish()
    earlier = driver.engine.scheduler.speculator._earlier
    assert earlier.of(request)
    driver.engine.submit(msgspec.structs.replace(request, request_id="second"))
    driver.step(4)
    driver.turn_to(other)
    driver.finish()
    assert not driver.engine.scheduler.speculator._earlier.of(request)
    driver.engine.submit(msgspec.structs.replace(request, request_id="third"))
    driver.finish()
    kept = driver.engine.scheduler.speculator._earlier.of(request)
    assert kept == tuple(token.token_id for token in driver.tokens("third"))


def test_a_label_names_one_digest_for_ever():
    versions = WeightVersions("a" * 64)
    assert (versions.number, versions.version, versions.digest) == (0, "default", "a" * 64)
    versions.advance("b" * 64, "step-1")
    versions.rename("first")
    assert (versions.number, versions.version) == (1, "first")
    with pytest.raises(ReloadError, match=r"'default' was the name of weights a{12}"):
        versions.rename("default")
    with pytest.raises(ReloadError, match=r"'step-1' was the name of weights b{12}"):
        versions.advance("c" * 64, "step-1")
    assert versions.number == 1
    versions.rename("3")
    versions.advance("c" * 64)
    assert versions.version == "2"
    versions.advance("a" * 64)  # "3" is taken by other weights
    assert versions.version == f"3-{'a' * 12}"
    versions.rename("default")  # the same digest again
    assert versions.named(1).version == "3" and versions.named(3).version == "default"
