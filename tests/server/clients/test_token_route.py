"""`/inference/v1/generate`: the answers of completions, in vLLM's form of token ids."""

import io
import json
from base64 import b64decode
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.lib.server.harness import MODEL, refused
from tpdet.control.row_messages import SampledToken
from tpdet.requests.answer.token_choices import TokenChoiceWriter
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.prepare import Preparer
from tpdet.requests.body.token_bodies import TokensBody
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import Candidate
from tpdet.text.outputs import ChoiceAnswer

PATH = "/inference/v1/generate"
IDS = [5, 6, 7]
SAMPLING = {"max_tokens": 4, "seed": 3, "n": 2, "logprobs": 2, "temperature": 0.7, "top_k": 9}


def ask(server, sampling=SAMPLING, **fields):
    body = {"model": MODEL, "token_ids": IDS, "sampling_params": sampling} | fields
    return server.http.post(PATH, json=body)


def test_an_answer_is_that_of_a_completion(server):
    found = ask(server, return_token_ids=True).json()
    other = server.complete(prompt=IDS, return_token_ids=True, **SAMPLING).json()
    assert found["request_id"].startswith("generate-tokens-") and found["output_mode"] == "tokens"
    assert found["prompt_token_ids"] == IDS and found["prompt_logprobs"] is None
    assert found["usage"] == other["usage"]
    names = ("seed", "replay_digest")
    assert [found["tpdet"][name] for name in names] == [other["tpdet"][name] for name in names]
    for choice, completion in zip(found["choices"], other["choices"], strict=True):
        same = ("index", "token_ids", "logprob_bits", "finish_reason", "stop_reason")
        assert {name: choice[name] for name in same} == {name: completion[name] for name in same}
        assert choice["routed_experts"] is None
        entries = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in entries] == choice["token_ids"]
        assert [entry["token"] for entry in entries] == [
            f"token_id:{t}" for t in choice["token_ids"]
        ]
        assert [e["logprob"] for e in entries] == completion["logprobs"]["token_logprobs"]
        assert {entry["rank"] for entry in entries} == {7}  # of the engine of these tests
        for entry in entries:
            first, *others = entry["top_logprobs"]
            assert first == {name: entry[name] for name in first}
            assert [one["rank"] for one in others] == [1, 2]
    assert ask(server, {**SAMPLING, "seed": 4}).json()["choices"] != found["choices"]


def test_only_what_is_asked_for_stands_in_an_answer(server):
    choice = ask(server, {"max_tokens": 2}).json()["choices"][0]
    assert choice["logprobs"] is None and "logprob_bits" not in choice and "text" not in choice
    none = ask(server, {"max_tokens": 2, "logprobs": 0}, request_id="mine").json()
    assert none["request_id"] == "generate-tokens-mine" and none["prompt_token_ids"] is None
    assert [len(e["top_logprobs"]) for e in none["choices"][0]["logprobs"]["content"]] == [1, 1]


def test_without_max_tokens_an_answer_goes_on_to_the_end_of_the_context(server):
    context = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    found = ask(server, {"temperature": 0}).json()["choices"][0]
    assert (len(found["token_ids"]), found["finish_reason"]) == (context - len(IDS), "length")


def test_prompts_are_scored_beside_the_choices(server):
    sampling = {"max_tokens": 1, "prompt_logprobs": 1, "n": 2}
    found = ask(server, sampling).json()["prompt_logprobs"]
    other = server.complete(prompt=IDS, **sampling).json()["choices"][0]["prompt_logprobs"]
    assert found[0] is None and [{*p} for p in found[1:]] == [{*p} for p in other[1:]]
    assert [[e["rank"] for e in p.values()] for p in found[1:]] == [[1, 130], [1, 131]]


def test_only_the_last_tokens_of_a_prompt_are_scored_where_they_alone_are_asked_for(server):
    sampling = {"max_tokens": 1, "prompt_logprobs": 1}
    everything = ask(server, sampling).json()["prompt_logprobs"]
    last = ask(server, sampling | {"prompt_logprobs_last_n": 1}).json()["prompt_logprobs"]
    assert last == [None, None, everything[2]]
    error = refused(ask(server, {"prompt_logprobs_last_n": 1}), 400, "prompt_logprobs_last_n")
    assert "give prompt_logprobs" in error["message"]
    shown = {"echo": True, "logprobs": 0, "prompt_logprobs_last_n": 1, "prompt_logprobs": 0}
    assert "echo" in refused(server.complete(**shown), 400, "prompt_logprobs_last_n")["message"]


def test_named_ids_stand_beside_each_token_without_ranks(server):
    sampling = {"max_tokens": 2, "seed": 3, "prompt_logprobs": 0, "logprob_token_ids": [9, 300, 4]}
    found = ask(server, sampling).json()
    for entry in found["choices"][0]["logprobs"]["content"]:
        first, *others = entry["top_logprobs"]
        assert first["token_id"] == entry["token_id"] and first["rank"] == 7
        assert [one["token_id"] for one in others] == [9, 300, 4]
        assert {one["rank"] for one in others} == {None}
    for token_id, position in zip(IDS[1:], found["prompt_logprobs"][1:], strict=True):
        assert {*position} == {"9", "300", "4", str(token_id)}
        assert position["9"]["rank"] is None and position[str(token_id)]["rank"] >= 130
    body = {"input_ids": IDS, "return_logprob": True, "token_ids_logprob": [9, 300, 4]}
    body |= {"sampling_params": {"max_new_tokens": 2, "sampling_seed": 3}, "logprob_start_len": 0}
    meta = server.http.post("/generate", json=body).json()["meta_info"]
    rows = [[(e[1], e[0]) for e in row] for row in meta["output_token_ids_logprobs"]]
    entries = found["choices"][0]["logprobs"]["content"]
    assert rows == [[(t["token_id"], t["logprob"]) for t in e["top_logprobs"][1:]] for e in entries]
    assert meta["input_token_ids_logprobs"][0] is None and "output_top_logprobs" not in meta
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True}
    chat |= {"logprob_token_ids": [97, 98], "return_tokens_as_token_ids": True}
    entry = server.http.post("/v1/chat/completions", json=chat).json()["choices"][0]
    tops = entry["logprobs"]["content"][0]["top_logprobs"]
    assert [top["token"] for top in tops] == ["token_id:97", "token_id:98"]


@pytest.mark.parametrize(
    ("sampling", "param", "says"),
    [
        ({"logprob_token_ids": [5, 5]}, "logprob_token_ids", "each once"),
        ({"logprob_token_ids": [600]}, "logprob_token_ids", "outside the vocabulary"),
        ({"logprob_token_ids": [*range(101)]}, "sampling_params", "at most 100"),
        ({"logprob_token_ids": [5, 6], "logprobs": 3}, "logprobs", "leave logprobs at 0"),
    ],
)
def test_ids_that_cannot_be_shown_are_refused(server, sampling, param, says):
    assert says in refused(ask(server, {"max_tokens": 1} | sampling), 400, param)["message"]


def test_a_stream_is_the_whole_answer_in_pieces(server):
    whole = ask(server, return_token_ids=True).json()
    options = {"include_usage": True}
    answer = ask(server, return_token_ids=True, stream=True, stream_options=options)
    *events, end = answer.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [chunk.get("prompt_token_ids") for chunk in chunks].count(IDS) == 1
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["tpdet"]["replay_digest"] == whole["tpdet"]["replay_digest"]
    for choice in whole["choices"]:
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [t for piece in pieces for t in piece["token_ids"]] == choice["token_ids"]
        assert [b for piece in pieces for b in piece["logprob_bits"]] == choice["logprob_bits"]
        content = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"token_ids": []}, "token_ids", "at least 1"),
        ({"token_ids": [600]}, "prompt", "outside the vocabulary"),
        ({"token_ids": "text"}, "token_ids", "list"),
        ({"sampling_params": None}, "sampling_params", "missing"),
        ({"sampling_params": {"temperature": 3}}, "sampling_params", "sampling_params.temperature"),
        ({"sampling_params": {"top_q": 1}}, "sampling_params.top_q", "top_p"),
        ({"sampling_params": {"prompt": [1]}}, "sampling_params.prompt", "unknown field"),
        ({"sampling_params": {"best_of": 2}}, "sampling_params", "raise n"),
        ({"sampling_params": {"max_tokens": 999}}, "max_tokens", "lower max_tokens"),
        ({"sampling_params": {"routed_experts_prompt_start": 3}}, "routed_experts_prompt_start",
         "the prompt has 3 tokens"),
        ({"priority": 1}, "priority", "in the order of their arrival"),
        ({"features": {}}, "features", "text is the only kind"),
        ({"output_mode": "text"}, "output_mode", "/v1/completions"),
        ({"prompt": [1]}, "prompt", "it is a field of /v1/completions"),
        ({"model": "other"}, "model", "is not served"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "stream", "cannot be"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(server, unharmed, fields, param, says):
    body = {"model": MODEL, "token_ids": IDS, "sampling_params": {"max_tokens": 1}} | fields
    answer = server.http.post(PATH, json=body)
    status = 404 if param == "model" else 400
    assert says in refused(answer, status, param)["message"]


def test_values_that_ask_for_nothing_are_taken(server):
    idle = {"output_kind": 2, "detokenize": False, "bad_words": [], "top_p": 0, "temperature": 0}
    found = ask(server, {"max_tokens": 1} | idle, priority=0, kv_transfer_params={}, features=None)
    assert found.status_code == 200, found.text


def test_a_greedy_token_that_is_the_likeliest_stands_once():
    facts = EngineFacts(
        "fp", "c0" * 32, "d1" * 32, 256, 512, (), 1, "", "float32", experts_shape=(2, 3)
    )
    sampling = {"max_tokens": 2, "logprobs": 2}

    def prepared(**more):
        body = parse_body(TokensBody, {"token_ids": IDS, "sampling_params": sampling | more})
        return Preparer(facts, MODEL, None).tokens(body, "id")

    top = (Candidate(9, -0.5), Candidate(4, -1.5))
    tokens = SampledToken(9, -0.5, top, 1), SampledToken(8, -3.0, top, 17)
    experts = np.arange(4 * 2 * 3, dtype=np.int16)
    answer = ChoiceAnswer(0, "", (9, 8), tokens, "length", None, routed_experts=experts.tobytes())
    found = TokenChoiceWriter(prepared(), None, 0).whole(answer, None)
    tops = [
        [(e["token_id"], e["rank"]) for e in entry["top_logprobs"]]
        for entry in found["logprobs"]["content"]
    ]
    assert tops == [[(9, 1), (4, 2)], [(8, 17), (9, 1), (4, 2)]]
    file = np.load(io.BytesIO(b64decode(found["routed_experts"])), allow_pickle=False)
    assert file.tobytes() == experts.tobytes() and file.shape == (4, 2, 3)
    # A later turn of a conversation wants those of the tokens that it has added.
    found = TokenChoiceWriter(prepared(routed_experts_prompt_start=2), None, 0).whole(answer, None)
    rows = np.load(io.BytesIO(b64decode(found["routed_experts"])), allow_pickle=False)
    assert rows.tobytes() == file[2:].tobytes() and rows.shape == (2, 2, 3)
    # prime-rl's client cuts the data out of the JSON by these very bytes.
    wants = {"routed_experts_format": "object", "routed_experts_prompt_start": 2}
    found = TokenChoiceWriter(prepared(**wants), None, 0).whole(answer, None)
    assert msgspec.json.encode(found).count(b'"routed_experts":{"data":"') == 1
    about = found["routed_experts"]
    assert (about["shape"], about["dtype"], about["start"]) == ([2, 2, 3], "uint8", 2)
    ids = np.frombuffer(b64decode(about["data"]), about["dtype"]).reshape(about["shape"])
    assert (ids == rows).all()
    wide = replace(answer, routed_experts=(experts + 250).tobytes())
    about = TokenChoiceWriter(prepared(**wants), None, 0).whole(wide, None)["routed_experts"]
    ids = np.frombuffer(b64decode(about["data"]), about["dtype"]).reshape(about["shape"])
    assert about["dtype"] == "uint16" and (ids == rows + 250).all()
