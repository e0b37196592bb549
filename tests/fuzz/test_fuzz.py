"""The fuzzer draws the same from a seed, finds what differs and what is planted, and finds no more.

The whole run, of 2,000 answers, is `python -m tests.fuzz`; docs/results/fuzz.cpu.json has it.
"""

import copy

import pytest

from tests.fuzz.__main__ import crowds_of, main
from tests.fuzz.answers import difference
from tests.fuzz.crowds import CONFIGURATIONS, Fuzzer
from tests.fuzz.draws import WAYS, asked_in, crowd_of, ways_of
from tests.fuzz.models import FAMILIES


def drawn(seed, family, number):
    bodies = crowd_of(seed, family, number)
    return bodies, *asked_in(seed, family, number, "six pages 0", bodies)


def test_a_seed_always_draws_the_same_and_another_one_something_else():
    assert drawn(7, "qwen3", 3) == drawn(7, "qwen3", 3)
    others = drawn(8, "qwen3", 3), drawn(7, "gpt_oss", 3), drawn(7, "qwen3", 2)
    assert all(other != drawn(7, "qwen3", 3) for other in others)
    bodies = crowd_of(7, "qwen3", 3)
    assert asked_in(7, "qwen3", 3, "a", bodies) != asked_in(7, "qwen3", 3, "b", bodies)


def test_everything_that_can_be_asked_is_drawn():
    crowds = [crowd_of(1, family, n) for family in FAMILIES for n in range(20)]
    assert all(6 <= len(crowd) <= 12 for crowd in crowds)
    bodies = [body for crowd in crowds for body in crowd]
    fields = {name for body in bodies for name in body}
    assert fields >= {
        *("temperature", "top_k", "top_p", "min_p", "n", "repetition_penalty", "stop", "echo"),
        *("frequency_penalty", "presence_penalty", "logit_bias", "stop_token_ids", "min_tokens"),
        *("response_format", "logprobs", "prompt_logprobs", "ignore_eos", "seed", "max_tokens"),
    }
    assert {0.0} < {body["temperature"] for body in bodies}
    assert {way for body in bodies for way in ways_of(body)} == set(WAYS)
    assert len(crowds_of(1, "qwen3", 80)) * 6 <= 80 + 12


ANSWER = {
    "choices": [
        {"index": 0, "text": "ab", "token_ids": [1, 2], "logprob_bits": ["bf", "be"],
         "finish_reason": "length", "stop_reason": None, "logprobs": {"tokens": ["a", "b"]},
         "prompt_logprobs": [None]},
    ],
    "tpdet": {"seed": 1, "replay_digest": "0"}, "fingerprint": "f",
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("choices", 0, "text"), "ac", "answer.choices[0].text is 'ac', the reference has 'ab'"),
        (("choices", 0, "token_ids", 1), 3, "answer.choices[0].token_ids[1] is 3"),
        (("choices", 0, "logprob_bits", 0), "be", "logprob_bits[0] is 'be'"),
        (("choices", 0, "finish_reason"), "stop", "finish_reason is 'stop'"),
        (("choices", 0, "stop_reason"), "x", "stop_reason is 'x'"),
        (("choices", 0, "logprobs", "tokens"), ["a"], "logprobs.tokens is ['a']"),
        (("tpdet", "replay_digest"), "1", "replay_digest is '1'"),
        (("usage", "prompt_tokens"), 4, "prompt_tokens is 4"),
        (("choices",), [], "answer.choices is []"),
    ],
)
def test_every_field_of_an_answer_is_compared(place, value, said):
    found = copy.deepcopy(ANSWER)
    assert difference(ANSWER, found, "whole") is None
    inner = found
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    assert said in difference(ANSWER, found, "whole")
    refused = {"refused": (400, "no")}
    assert difference(refused, dict(refused), "stream") is None
    assert difference(ANSWER, refused, "whole") and difference(refused, ANSWER, "whole")


def test_a_stream_has_no_scores_of_the_prompt():
    streamed = copy.deepcopy(ANSWER)
    del streamed["choices"][0]["prompt_logprobs"]
    assert difference(ANSWER, streamed, "stream") is None
    assert difference(ANSWER, streamed, "whole") is not None


def test_a_seed_that_nobody_gave_is_not_compared():
    other = ANSWER | {"tpdet": ANSWER["tpdet"] | {"seed": 2}}
    assert difference(ANSWER, other, "whole", seeded=False) is None
    assert "tpdet.seed is 2" in difference(ANSWER, other, "whole")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_requests_have_one_answer_in_any_company(tmp_path, family):
    found = Fuzzer(1, family, tmp_path, print).run([0, 1])
    assert [line for one in found.values() for line in one.differences] == []
    assert list(found) == ["alone", *CONFIGURATIONS]
    assert all(one.compared > 10 for one in found.values())
    six = [one for name, one in found.items() if name.startswith("six pages")]
    assert [one.tp for one in six] == [1, 2]
    assert all(one.counted["preemptions"] > 0 and one.given_up > 0 for one in six)
    cached = found["prefix cache"].counted
    assert cached["cached_tokens"] > 0 and cached["accepted_tokens"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("fault", "where"),
    [("blind-acceptance", "prefix cache"), ("noise-after-preemption", "six pages")],
)
def test_a_planted_fault_is_found_and_told_with_its_crowd(capsys, fault, where):
    arguments = ["1", "1", "qwen3", "--crowd", "1", "--only", where, "--planted", fault]
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert "DIFFERENT: qwen3, crowd 1, request" in said and where in said
    assert "qwen3, alone" in said and "none different" not in said
