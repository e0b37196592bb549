"""Sampling parameters as users write them: what is taken, what is refused."""

import copy
import inspect
import math

import msgspec
import numpy
import pytest

from tpdet import SamplingParams
from tpdet.errors import RequestError
from tpdet.requests.body.schema import CompletionBody
from tpdet.requests.sampling_params import RANGES


def test_its_signature_names_every_parameter_with_its_default():
    for shown in (inspect.signature(SamplingParams), inspect.signature(SamplingParams.__init__)):
        named = {n: p.default for n, p in shown.parameters.items() if n != "self"}
        assert tuple(named) == SamplingParams.__struct_fields__
        assert (named["temperature"], named["max_tokens"], named["stop"]) == (1.0, 16, ())


def test_what_editors_read_is_what_there_is():
    """Editors read the source: the declaration there lists the same names and defaults."""
    import ast

    tree = ast.parse(inspect.getsource(SamplingParams))
    (declared,) = [
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__"
    ]
    defaults = {
        a.arg: ast.literal_eval(d)
        for a, d in zip(declared.args.kwonlyargs, declared.args.kw_defaults, strict=True)
    }
    assert tuple(defaults) == SamplingParams.__struct_fields__
    assert SamplingParams(**defaults) == SamplingParams()
    text = inspect.getdoc(SamplingParams)
    assert all(f"\n{name}: " in text for name in defaults)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "\n\n"}, {"stop": ("\n\n",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": None, "stop_token_ids": None, "logit_bias": None}, {}),
        ({"stop_token_ids": numpy.array([3, 4])}, {"stop_token_ids": (3, 4)}),
        ({"max_tokens": numpy.int64(5)}, {"max_tokens": 5}),
        ({"temperature": numpy.float32(0.5)}, {"temperature": 0.5}),
        ({"temperature": 0, "top_p": 0}, {"temperature": 0}),
        ({"bad_words": [], "allowed_token_ids": None, "best_of": 1, "length_penalty": 1.0}, {}),
        ({"spaces_between_special_tokens": True, "logits_processors": None}, {}),
    ],
)
def test_what_users_of_vllm_write_is_taken(given, kept):
    assert SamplingParams(**given) == SamplingParams(**kept)


def test_all_that_is_left_of_the_context_may_be_asked_for():
    assert SamplingParams(max_tokens=None, min_tokens=40).max_tokens is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_token": 3}, "no parameter 'max_token': did you mean 'max_tokens'"),
        ({"surprise": 3}, "no parameter 'surprise': see help"),
        ({"seed": -1}, r"seed -1 is out of range \[0, 9223372036854775807\]: leave it out"),
        ({"logprobs": -1}, "logprobs -1 .*: the limit is 100"),
        ({"prompt_logprobs": -1}, "prompt_logprobs -1 .*: the limit is "),
        ({"bad_words": ["x"]}, "bad_words .* is not supported: give logit_bias"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids .* not supported: give structured_outputs"),
        ({"use_beam_search": True}, "there is no beam search"),
        ({"top_p": 0}, "top_p 0 keeps nothing"),
        ({"ignore_eos": "yes"}, "ignore_eos must be True or False, not 'yes'"),
        ({"stop": 5}, "stop must be text or a list of texts, not 5"),
        ({"stop": ["a", "\ud800"]}, r"the stop string '\\ud800' holds a lone surrogate"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, not 5"),
        ({"logit_bias": [1]}, "logit_bias must be a dict"),
        ({"json_schema": {}}, "must be JSON text, not dict: give json.dumps"),
        ({"stop": "x", "detokenize": False}, "stop needs the text"),
    ],
)  # fmt: skip
def test_the_rest_is_refused_by_name(given, message):
    with pytest.raises(RequestError, match=message) as refused:
        SamplingParams(**given)
    assert refused.value.__cause__ is None
    assert refused.value.param


def test_a_temperature_below_the_smallest_is_greedy_and_the_log_says_so_once(caplog):
    for temperature in (1e-5, 0.00099, 5e-324, numpy.float32(1e-4)):
        params = SamplingParams(temperature=temperature, top_p=0)
        assert params == SamplingParams(temperature=0) and params.temperature == 0.0
    assert SamplingParams(temperature=0.001).temperature == 0.001
    params.temperature = 1e-5
    assert params.temperature == 0.0
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == 4
    assert notes[0].startswith("temperature 1e-05 is below 0.001 and counts as 0: the likeliest")
    for wrong in (-1e-5, math.nan, -math.inf):
        with pytest.raises(RequestError, match=r"temperature .* is out of range"):
            SamplingParams(temperature=wrong)


def test_a_parameter_may_be_set_later_and_is_checked_and_kept_alike():
    params = SamplingParams(logit_bias={3: 1.0})
    params.max_tokens, params.stop, params.bad_words = 12, ["a", "b"], []
    params.stop_token_ids = numpy.array([3, 4])
    assert params == SamplingParams(
        max_tokens=12, stop=("a", "b"), stop_token_ids=(3, 4), logit_bias={3: 1.0}
    )
    before = params.clone()
    for name, value, message in (
        ("temperature", -1, r"temperature -1 is out of range"),
        ("max_token", 3, "no parameter 'max_token': did you mean 'max_tokens'"),
        ("bad_words", ["x"], "bad_words .* is not supported"),
        ("stop", 5, "stop must be text"),
        ("n", True, "n must be an integer"),
    ):
        with pytest.raises(RequestError, match=message):
            setattr(params, name, value)
        assert params == before


def test_what_two_parameters_say_together_counts_once_both_are_set():
    params = SamplingParams()
    params.min_tokens = 20
    with pytest.raises(RequestError, match="min_tokens 20 is larger than max_tokens 16"):
        params.clone()
    params.max_tokens = 30
    assert params.clone() == SamplingParams(min_tokens=20, max_tokens=30)
    params.json_schema_after = [7]
    with pytest.raises(RequestError, match="json_schema_after is for answers with a schema"):
        params.clone()
    params.json_schema = "{}"
    params.clone()
    params.regex = "a+"
    with pytest.raises(RequestError, match="an answer has one form"):
        params.clone()
    params.structured_outputs = {"choice": ["a", "b"]}
    assert (params.clone().json_schema, params.regex) == (None, "a|b")
    params.structured_outputs = None
    params.json_schema_after = None
    params.stop, params.detokenize = "x", False
    with pytest.raises(RequestError, match="stop needs the text"):
        params.clone()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, SamplingParams.clone])
def test_a_copy_shares_nothing(copied):
    given = {3: 1.0}
    params = SamplingParams(logit_bias=given, stop="x")
    other = copied(params)
    assert other == params
    other.n = 2
    other.logit_bias[4] = given[5] = 2.0
    assert params == SamplingParams(logit_bias={3: 1.0}, stop="x")


def test_values_have_names():
    with pytest.raises(RequestError, match=r"keywords only, not 0\.8"):
        SamplingParams(0.8)


def test_it_travels_as_before():
    params = SamplingParams(stop="x", max_tokens=None, logit_bias={3: 1.0})
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params
    assert msgspec.structs.replace(params, n=2).n == 2


@pytest.mark.parametrize("name", sorted(RANGES))
def test_a_range_is_what_is_checked_and_what_is_published(name):
    allowed = RANGES[name]
    whole = isinstance(allowed.low, int)
    (published,) = [
        kind
        for kind in CompletionBody.model_json_schema()["properties"][name]["anyOf"]
        if kind["type"] != "null"
    ]
    assert published["type"] == ("integer" if whole else "number")
    assert published["exclusiveMinimum" if allowed.above_low else "minimum"] == allowed.low
    assert published.get("maximum", math.inf) == allowed.high
    step = 1 if whole else 0.5
    inside = [] if allowed.above_low else [allowed.low]
    inside += [allowed.high] if allowed.high < math.inf else [1e300]
    beside = {"max_tokens": None} if name == "min_tokens" else {}
    for value in inside:
        assert getattr(SamplingParams(**beside | {name: value}), name) == value
    outside = [allowed.low - step, allowed.high + step]
    outside += [allowed.low] if allowed.above_low and name != "top_p" else []
    for value in outside:
        with pytest.raises(RequestError) as refused:
            SamplingParams(**{"temperature": 1.0} | beside | {name: value})
        assert refused.value.param == name


def test_an_integer_that_no_float_holds_is_out_of_range():
    with pytest.raises(RequestError, match=r"repetition_penalty 1000.* is out of range"):
        SamplingParams(repetition_penalty=10**400)
