"""The replay digest: its vector, what it covers, and what may not reach it."""

import json
import re
import struct

import blake3
import msgspec
import pytest
import rfc8785

from tests.lib.tree import ROOT
from tpdet.audit.replay import (
    COVERED,
    LEFT_OUT,
    SHAPING,
    WHERE_SET,
    DigestOrigin,
    answer_digests,
    replay_digest,
    request_digest,
    request_seed,
)
from tpdet.control.row_messages import SampledToken
from tpdet.errors import UsageError
from tpdet.requests.request import Request, SamplingParams, with_seed

PAGE = (ROOT / "docs" / "replay.md").read_text()
CONTRACT, MODEL = "11" * 32, "22" * 32
PARAMS = SamplingParams(
    n=2,
    temperature=0.7,
    top_p=1e-7,
    top_k=-1,
    seed=2**63 - 1,
    max_tokens=3,
    stop=("é\n",),
    stop_token_ids=(7, 5, 7),
    repetition_penalty=1.1,
    logit_bias={9: 100.0, 10: -1.5},
)
REQUEST = Request(request_id="any", prompt_token_ids=(1, 2, 3), params=PARAMS, eos_token_ids=(2,))
CHOICES = (
    (SampledToken(4, -0.5), SampledToken(5, -0.0)),
    (SampledToken(2, -1.25),),
)


INDENTED = re.findall(r"^    (\S.*)$", PAGE, re.MULTILINE)
SEED = 2**63 - 1


def digest(request=REQUEST, choices=CHOICES, seed=SEED, contract=CONTRACT, model=MODEL, version=2):
    return replay_digest([request], [choices], DigestOrigin(seed, contract, model, version))


def name_of(request=REQUEST, seed=SEED, contract=CONTRACT, model=MODEL, mode="raw_logprobs"):
    """The request digest, which is also the one beside the replay digest."""
    alone = request_digest([request], DigestOrigin(seed, contract, model, logprobs_mode=mode))
    for version in (1, 2):
        of = [request], [CHOICES], DigestOrigin(seed, contract, model, version, mode)
        assert answer_digests(*of) == (alone, replay_digest(*of))
    return alone


def changed(**fields) -> Request:
    return msgspec.structs.replace(REQUEST, params=msgspec.structs.replace(PARAMS, **fields))


def test_the_vectors_on_the_page_are_what_the_code_gives():
    _, first, second, greedy, two, named, named_greedy = INDENTED
    assert digest(version=1) == first
    assert digest() == second
    assert digest(changed(temperature=0.0)) == greedy
    assert name_of() == named
    assert name_of(changed(temperature=0.0)) == named_greedy
    of = [CHOICES, CHOICES], DigestOrigin(SEED, CONTRACT, MODEL)
    pair = msgspec.structs.replace(REQUEST, prompt_token_ids=(4,))
    assert replay_digest([REQUEST, with_seed(pair, 5)], *of) == two
    assert replay_digest([REQUEST, pair], *of) != two
    assert str(request_seed(REQUEST)) in PAGE
    assert len({*INDENTED}) == 7


@pytest.mark.parametrize(("vector", "version"), [(1, 1), (2, 2), (3, 2)])
def test_the_page_alone_is_enough_to_compute_them(vector, version):
    """A second implementation, from the list on the page."""
    request, seed = INDENTED[0], SEED
    if vector == 3:
        request, seed = request.replace('"temperature":0.7', '"temperature":0'), 0
    data = f"tpdet-replay-{version}\n".encode() + b"\x11" * 32 + b"\x22" * 32
    data += seed.to_bytes(8, "little")
    data += len(request.encode()).to_bytes(8, "little") + request.encode()
    before = data.replace(f"tpdet-replay-{version}".encode(), b"tpdet-request-1")
    data += bytes.fromhex("02000000 04000000 05000000 000000bf 00000080")
    data += bytes.fromhex("01000000 02000000 0000a0bf")
    assert blake3.blake3(data).hexdigest() == INDENTED[vector]
    assert blake3.blake3(before).hexdigest() == INDENTED[6 if vector == 3 else 5]


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"temperature": 0.0}, False),
        ({"temperature": 0.0, "top_k": 5, "presence_penalty": 1.0}, False),
        ({"max_tokens": 0}, False),
        ({"temperature": 0.001}, True),
        ({"temperature": 1.0, "top_k": 1}, True),
        ({"temperature": 2.0, "logit_bias": {9: 100.0}}, True),
    ],
)
def test_a_seed_counts_where_noise_is_drawn(fields, counts):
    request = changed(**fields)
    found = {digest(with_seed(request, seed), seed=seed) for seed in (0, 7, SEED)}
    assert len(found) == (3 if counts else 1)
    assert len({name_of(request, seed) for seed in (0, 7, SEED)}) == len(found)
    first = {digest(request, seed=seed, version=1) for seed in (0, 7, SEED)}
    assert len(first) == 3  # as every digest of that version did


@pytest.mark.parametrize("version", [1, 2])
def test_a_mode_of_log_probabilities_that_is_not_raw_is_named(version):
    """By the page alone: one more key of the canonical request, so equal bits have two digests."""
    origin = DigestOrigin(SEED, CONTRACT, MODEL, version)
    assert replay_digest([REQUEST], [CHOICES], origin) == INDENTED[version]
    request = (
        INDENTED[0].replace('"params":', '"logprobs_mode":"processed_logprobs","params":').encode()
    )
    assert request == rfc8785.dumps(json.loads(request))
    data = f"tpdet-replay-{version}\n".encode() + b"\x11" * 32 + b"\x22" * 32
    data += struct.pack("<QQ", SEED, len(request)) + request
    data += bytes.fromhex("02000000 04000000 05000000 000000bf 00000080")
    data += bytes.fromhex("01000000 02000000 0000a0bf")
    other = origin._replace(logprobs_mode="processed_logprobs")
    assert replay_digest([REQUEST], [CHOICES], other) == blake3.blake3(data).hexdigest()
    assert "| `logprobs_mode` | `processed_logprobs`, only where" in PAGE


def test_a_seed_of_a_prompts_own_is_a_function_of_what_its_tokens_depend_on():
    """By the page alone; then what counts and what does not."""
    shaping = json.loads(INDENTED[0])["params"]
    named = re.search(r"which\s+tokens\s+are\s+drawn\s+from: (.*?)\. `n`", PAGE, re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", named)) == {*SHAPING}
    shaping = {name: value for name, value in shaping.items() if name in SHAPING}
    data = b"tpdet-seed-1\n" + rfc8785.dumps({"params": shaping, "prompt": [1, 2, 3]})
    seed = request_seed(REQUEST)
    assert seed == int.from_bytes(blake3.blake3(data).digest()[:8], "little") >> 1

    fewer = {"n": 1, "max_tokens": 9, "min_tokens": 1, "stop": (), "stop_token_ids": (2,)}
    shown = {"logprobs": 3, "prompt_logprobs": 2, "skip_special_tokens": False, "ignore_eos": True}
    for fields in (fewer, shown, {"seed": 4}, {"include_stop_str_in_output": True}, {"top_k": 0}):
        assert request_seed(changed(**fields)) == seed
    salted = {"cache_salt": "c", "tenant_salt": "t", "request_id": "x", "prediction": (1,)}
    assert request_seed(msgspec.structs.replace(REQUEST, eos_token_ids=(), **salted)) == seed
    others = [
        {"temperature": 0.8}, {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.1},
        {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"repetition_penalty": 1.2},
        {"logit_bias": {9: 99.0}}, {"regex": "a"}, {"json_schema": "{}"}, {"tool_calls": "{}"},
        {"json_schema": "{}", "json_schema_after": (5,)},
    ]  # fmt: skip
    seeds = [request_seed(changed(**fields)) for fields in others]
    assert len({seed, *seeds}) == 1 + len(seeds) and {*SHAPING} == {k for f in others for k in f}
    long = request_seed(msgspec.structs.replace(REQUEST, prompt_token_ids=(1,) * 9000))
    assert long not in (seed, *seeds) and min(long, seed, *seeds) >= 0


def test_seeds_of_prompts_count_where_noise_is_drawn():
    def name(*seeds, **fields):
        one = changed(**fields) if fields else REQUEST
        return request_digest(
            [with_seed(one, seed) for seed in seeds], DigestOrigin(seeds[0], CONTRACT, MODEL)
        )

    sampled = [name(5, 5), name(5, 6), name(5, 7), name(6, 5), name(5, 6, 6), name(5, 6, 5)]
    assert len({*sampled}) == len(sampled)
    assert name(5, 6, temperature=0.0) == name(7, 7, temperature=0.0)


def test_an_unknown_version_is_refused():
    with pytest.raises(UsageError, match="replay_version 3 is none of 1, 2"):
        digest(version=3)


def test_every_parameter_is_covered_or_known_to_be_left_out():
    named = {*COVERED, *LEFT_OUT, *WHERE_SET, "seed", "ignore_eos"}
    assert named == set(SamplingParams.__struct_fields__)
    assert {"json_schema", "regex", "json_schema_after", "tool_calls"} == {*WHERE_SET}
    assert all(f"`{name}`" in PAGE for name in named - {"seed"})


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3}, {"temperature": 0.8}, {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.1},
        {"max_tokens": 4}, {"min_tokens": 1}, {"stop": ("e",)}, {"stop_token_ids": (5,)},
        {"include_stop_str_in_output": True}, {"skip_special_tokens": False},
        {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"repetition_penalty": 1.2},
        {"logit_bias": {9: 99.0, 10: -1.5}}, {"ignore_eos": True},
        {"json_schema": '{"type":"object"}'},
        {"json_schema": '{"type":"object"}', "json_schema_after": (5,)},
        {"regex": '{"type":"object"}'},
        {"regex": '{"type":"object"}', "json_schema_after": (5,)}, {"tool_calls": "{}"},
    ],
)  # fmt: skip
def test_what_changes_an_answer_changes_it(fields):
    assert digest(changed(**fields)) != digest()
    assert name_of(changed(**fields)) != name_of()


def test_prompt_output_seed_and_model_change_it():
    others = [
        digest(msgspec.structs.replace(REQUEST, prompt_token_ids=(1, 2, 4))),
        digest(choices=(CHOICES[0], (SampledToken(3, -1.25),))),
        digest(choices=((SampledToken(4, -0.5), SampledToken(5, 0.0)), CHOICES[1])),
        digest(choices=CHOICES[::-1]),
        digest(choices=((*CHOICES[0], *CHOICES[1]), ())),
        digest(seed=0),
        digest(contract=MODEL),
        digest(model=CONTRACT),
    ]
    assert len({digest(), *others}) == 1 + len(others)
    names = [name_of(), name_of(seed=0), name_of(contract=MODEL), name_of(model=CONTRACT)]
    names += [name_of(mode="processed_logprobs")]
    assert len({*names}) == len(names)


def test_ids_salts_shown_numbers_and_spellings_do_not_change_it():
    shown = changed(logprobs=5, prompt_logprobs=2, top_k=0, stop_token_ids=(5, 7), seed=None)
    same = [
        digest(msgspec.structs.replace(REQUEST, request_id="x", cache_salt="c", tenant_salt="t")),
        digest(shown),
        digest(with_seed(shown, 2**63 - 1)),
        digest(changed(logit_bias={10: -1.5, 9: 100})),
        digest(choices=[[SampledToken(t.token_id, t.logprob, ()) for t in c] for c in CHOICES]),
    ]
    assert same == [digest()] * len(same)
    assert name_of(shown) == name_of(changed(logit_bias={10: -1.5, 9: 100})) == name_of()
    quiet = msgspec.structs.replace(REQUEST, params=changed(ignore_eos=True).params)
    assert digest(quiet) == digest(msgspec.structs.replace(quiet, eos_token_ids=()))


def test_an_odd_value_has_a_digest_too():
    assert len(digest(changed(repetition_penalty=2**70))) == 64


@pytest.mark.parametrize(
    ("value", "text"),
    [
        # Numbers of RFC 8785, appendix B.
        (-0.0, "0"), (5e-324, "5e-324"), (1.7976931348623157e308, "1.7976931348623157e+308"),
        (9007199254740992.0, "9007199254740992"), (295147905179352830000.0,
        "295147905179352830000"), (9.999999999999997e22, "9.999999999999997e+22"),
        (1e23, "1e+23"), (1e21, "1e+21"), (999999999999999700000.0, "999999999999999700000"),
        (9.999999999999997e-7, "9.999999999999997e-7"), (0.000001, "0.000001"),
        (333333333.33333329, "333333333.3333333"), (-1e-7, "-1e-7"), (4.50, "4.5"),
        (2e-3, "0.002"), (1.0, "1"), (1, "1"), (True, "true"), (None, "null"),
        ({"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6},
         '{"\\r":2,"1":4,"\x80":6,"\u20ac":1,"\U0001f600":5,"\ufb33":3}'),
        ("\u20ac$\x0f\nA'B\"\\\\\"/\x7f", '"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/\x7f"'),
        ([(), {}], "[[],{}]"),
    ],
)  # fmt: skip
def test_canonical_json_is_rfc_8785s(value, text):
    assert rfc8785.dumps(value) == text.encode()


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 2**53, -(2**53), {1}, "\ud800", {1: 2}]
)
def test_what_has_no_canonical_json_is_refused(value):
    with pytest.raises(ValueError):
        rfc8785.dumps(value)
