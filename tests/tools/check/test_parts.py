"""`tpdet check` reports every field of a record that was changed, but for those named here."""

import json

import msgspec
import pytest

from tests.tools.recorded_lines import (
    CHATS,
    COMPLETIONS,
    batch_line,
    changed,
    leaves,
    offline_line,
    thinking_model,
    with_changed,
)
from tpdet import LLM, SamplingParams
from tpdet.audit.recorded import RecordedAnswer, digest_of
from tpdet.errors import TpdetError
from tpdet.tools.check.answers import read_lines
from tpdet.tools.check.by_model import ModelCheck

TALK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}

OFFLINE = {"request_id", "params.output_kind"}
"""The name of an answer, and in which pieces it was handed over."""
NAMES = {"id", "custom_id", "response.body.created"}
"""Of answers over HTTP, no function of the request."""
NO_NOISE = {"response.body.tpdet.seed"}
"""Where the request has no seed and nothing is drawn."""
QUESTION = {"request.body.user", "request.body.cache_salt", "request.body.prediction.content"}
"""What a request may say without a change of what the model reads."""
LOAD = {
    f"response.body.usage.completion_tokens_details.{name}_prediction_tokens"
    for name in ("accepted", "rejected")
} | {"response.body.usage.prompt_tokens_details.cached_tokens"}

LINES = {
    "generate, sampled": (
        lambda llm: offline_line(llm, "The", SamplingParams(n=2, max_tokens=3, seed=4, top_p=0.9)),
        OFFLINE,
    ),
    "generate, greedy": (
        lambda llm: offline_line(llm, "A", SamplingParams(temperature=0, max_tokens=2)),
        OFFLINE | {"seed"},
    ),
    "generate, with scores": (
        lambda llm: offline_line(
            llm, [5, 6], SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1)
        ),
        OFFLINE,
    ),
    "a completion": (
        lambda llm: batch_line(
            llm,
            COMPLETIONS,
            {"prompt": ["one", "two"], "max_tokens": 2, "echo": True, "logprobs": 1, "user": "u"},
        ),
        NAMES | QUESTION,
    ),
    "a completion with guesses": (
        lambda llm: batch_line(
            llm,
            COMPLETIONS,
            {"prompt": "x", "temperature": 0, "max_tokens": 5, "stop": ["e", "a"],
             "prediction": {"type": "content", "content": "yes"}, "cache_salt": "s"},
        ),
        NAMES | NO_NOISE | QUESTION | LOAD,
    ),
    "a chat": (
        lambda llm: batch_line(
            llm,
            CHATS,
            TALK | {"logprobs": True, "top_logprobs": 1, "prompt_logprobs": 1, "seed": 3,
                    "stop": "e"},
        ),
        NAMES | LOAD,
    ),
    "a chat of two parts": (
        lambda llm: batch_line(
            llm,
            CHATS,
            TALK | {"logit_bias": {"1101": 8.0}, "max_tokens": 6},
            split=True,
        ),
        NAMES | LOAD,
    ),
}  # fmt: skip


def record_of(line, **changes):
    """What `LLM.record` made of a line's answer."""
    found = msgspec.convert(line, RecordedAnswer, str_keys=True)
    return msgspec.structs.replace(found, **changes)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = thinking_model(tmp_path_factory.mktemp("thinking") / "model")
    with LLM(model, device="cpu", kv_pages=32) as made:
        yield made


def check_all(llm, lines, folder):
    """For each line the paths that differ, or why it is refused."""
    check, found, again = ModelCheck(llm), {}, []
    for number, line in enumerate(lines):
        file = folder / "line"
        file.write_text("\n" * number + json.dumps(line))
        try:
            again.append((number, check.read(read_lines(str(file))[0])))
        except TpdetError as error:
            assert f"line {number + 1}" in str(error) or "other choices" in str(error), error
            found[number] = str(error)
    outputs = iter(llm.recompute([a for _, one in again for a in one.assemblers], use_tqdm=False))
    for number, one in again:
        compared = check.compare(one, [next(outputs) for _ in one.assemblers])
        parts = [str(difference) for difference in compared.differences]
        found[number] = "\n".join([*parts, *(other.part for other in compared.elsewhere)])
    return [found[number] for number in range(len(lines))]


FAST = ("generate, sampled", "a completion", "a chat of two parts")
NAMED = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LINES]


def test_a_call_of_several_seeds_is_computed_with_each(llm, tmp_path):
    seeds = "response.body.tpdet.seeds"
    body = {"prompt": ["one", "one"], "max_tokens": 3, "tpdet": {"seeds": [4, 2**62]}}
    asked = batch_line(llm, COMPLETIONS, body)
    told = asked["response"]["body"]["tpdet"]
    assert (told["seed"], told["seeds"]) == (None, [4, 2**62])
    left_open = with_changed(asked, "request.body.tpdet", None)
    wrong = [
        with_changed(left_open, seeds, [4, 5]),
        with_changed(asked, "request.body.tpdet.seeds", [4, 5]),
        with_changed(asked, "request.body.tpdet.seeds", [4, 4]),
        with_changed(asked, seeds, [4, 2**62, 5]),
        with_changed(asked, seeds, [4]),
        with_changed(asked, "response.body.tpdet.seed", 4),
    ]
    right, also_right, drawn, other, clones, more, *refused = check_all(
        llm, [asked, left_open, *wrong], tmp_path
    )
    assert (right, also_right) == ("", "")
    assert "choice 1, position 0" in drawn and "tpdet.replay_digest" in drawn
    assert other.startswith(f"{seeds}[1]: recorded {2**62}, computed 5")
    assert clones.startswith("response.body.tpdet.seed: recorded null, computed 4")
    assert "3 seeds for 2 prompts" in more
    assert all("one seed is for all prompts, or seeds are for each" in text for text in refused)


@pytest.mark.parametrize("name", NAMED)
def test_every_field_that_was_changed_is_reported(llm, tmp_path, name):
    make, open_fields = LINES[name]
    line = make(llm)
    paths = dict(leaves(line))
    others = [with_changed(line, path, changed(value)) for path, value in paths.items()]
    true, *found = check_all(llm, [line, *others], tmp_path)
    assert true == ""
    silent = {path for path, said in zip(paths, found, strict=True) if not said}
    assert silent == {path for path in paths if path in open_fields}


def test_it_is_named_where_the_record_was_changed(llm, tmp_path):
    """The text of a true answer, its end, its digest and its environment; and by which path."""
    line = LINES["a chat of two parts"][0](llm)
    body = "response.body."
    fingerprint = line["response"]["body"]["system_fingerprint"]
    cases = {
        f"{body}choices[0].message.content": "Berlin",
        f"{body}choices[0].message.reasoning": "I am told so",
        f"{body}choices[0].finish_reason": "stop",
        f"{body}tpdet.replay_digest": "0" * 64,
        f"{body}usage.completion_tokens": 1,
        f"{body}system_fingerprint": f"tpdet-{'0' * 12}{fingerprint[18:]}",
    }
    elsewhere = with_changed(line, f"{body}system_fingerprint", fingerprint[:-8] + "0" * 8)
    unknown = with_changed(line, f"{body}verified_by", "the bank")
    lines = [*(with_changed(line, path, new) for path, new in cases.items()), elsewhere, unknown]
    *found, other, more = check_all(llm, lines, tmp_path)
    for path, said in zip(cases, found, strict=True):
        assert said.startswith(f"{path}: recorded ") and "\n" not in said
    assert other == f"{body}system_fingerprint"
    assert more == f'{body}verified_by: recorded "the bank", computed nothing'


def test_a_digest_is_computed_in_the_version_that_the_record_names(llm, tmp_path):
    line = offline_line(llm, "The", SamplingParams(temperature=0, max_tokens=2))
    first = digest_of(record_of(line, replay_version=1), ModelCheck(llm).eos_token_ids)
    old = {name: value for name, value in line.items() if name != "replay_version"}
    lines = [
        old | {"replay_digest": first},
        line | {"replay_digest": first},
        old,
        old | {"replay_digest": first, "seed": line["seed"] ^ 1},
        line | {"replay_version": 3},
        line | {"replay_version": True},
    ]
    right, wrong, unnamed, seeded, newer, strange = check_all(llm, lines, tmp_path)
    assert right == "" and first != line["replay_digest"]
    assert all(said.startswith("replay_digest: recorded ") for said in (wrong, unnamed, seeded))
    assert "replay_version 3, none of 1, 2: check it with a newer tpdet" in newer
    assert "replay_version" in strange
