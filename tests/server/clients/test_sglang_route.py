"""`/generate`: the answers of completions, in SGLang's form, and what its clients ask beside it."""

import json

import pytest

from tests.lib.server.harness import MODEL, refused

PATH = "/generate"
IDS = [5, 6, 7]
SLIME = {
    "sampling_params": {
        "max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": None,
        "stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True,
        "spaces_between_special_tokens": False, "sampling_seed": 7,
    },
    "return_logprob": True,
    "stream": False,
}  # fmt: skip
"""What slime's rollout sends, but for the prompt."""


def ask(server, **fields):
    return server.http.post(PATH, json={"input_ids": IDS} | fields)


def test_an_answer_is_that_of_a_completion(server):
    found = ask(server, **SLIME).json()
    same = {"seed": 7, "skip_special_tokens": False, "include_stop_str_in_output": True}
    other = server.complete(prompt=IDS, logprobs=0, return_token_ids=True, **same).json()
    (choice,) = other["choices"]
    assert (found["text"], found["output_ids"]) == (choice["text"], choice["token_ids"])
    meta = found["meta_info"]
    own = meta.pop("tpdet")
    assert own["replay_digest"] == other["tpdet"]["replay_digest"] and own["seed"] == 7
    assert own["system_fingerprint"] == other["system_fingerprint"]
    scored = zip(choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True)
    assert meta.pop("output_token_logprobs") == [[value, token, None] for value, token in scored]
    assert len(meta.pop("id")) == 32
    (span,) = meta.pop("weight_versions")
    assert (span["version"], span["start"], span["end"]) == ("default", 0, 4)
    assert meta == {
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 3,
        "weight_version": "default",
        "input_token_logprobs": [],
        "output_token_logprobs_length": 4,
        "reasoning_tokens": 0,
        "completion_tokens": 4,
        "cached_tokens": 0,
    }
    changed = SLIME | {"sampling_params": SLIME["sampling_params"] | {"sampling_seed": 8}}
    assert ask(server, **changed).json()["output_ids"] != found["output_ids"]


def test_prompts_and_alternatives_have_their_log_probabilities(server):
    asked = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    sampling = {"max_new_tokens": 2, "sampling_seed": 1}
    prompt = {"prompt": IDS, "seed": 1, "max_tokens": 2, "prompt_logprobs": 2, "logprobs": 2}
    completion = server.complete(**prompt, return_token_ids=True).json()["choices"][0]
    for start in range(3):
        meta = ask(server, logprob_start_len=start, sampling_params=sampling, **asked).json()
        meta = meta["meta_info"]
        inputs = meta["input_token_logprobs"]
        assert [entry[1] for entry in inputs] == IDS[start:]
        assert inputs[0][0] is None and meta["input_top_logprobs"][0] is None
        scored = completion["prompt_logprobs"][start + 1 :]
        values = [p[str(i)]["logprob"] for p, i in zip(scored, IDS[start + 1 :], strict=True)]
        assert [entry[0] for entry in inputs[1:]] == values
        for top, position in zip(meta["input_top_logprobs"][1:], scored, strict=True):
            best = {int(i): e["logprob"] for i, e in position.items() if e["rank"] <= 2}
            assert {entry[1]: entry[0] for entry in top} == best
        assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2]
        texts = [entry[2] for entry in meta["output_token_logprobs"]]
        assert "".join(texts) == completion["text"]


def test_several_prompts_or_choices_are_a_list(server):
    sampling = {"max_new_tokens": 3, "sampling_seed": 2}
    one = ask(server, sampling_params=sampling).json()
    many = server.http.post(
        PATH,
        json={
            "text": ["ab", "cd"],
            "sampling_params": [sampling, sampling],
            "rid": ["x", "y"],
            "return_logprob": [False, False],
        },
    ).json()
    assert [answer["meta_info"]["id"] for answer in many] == ["x", "y"]
    alone = server.http.post(PATH, json={"text": "cd", "sampling_params": sampling}).json()
    assert (many[1]["text"], many[1]["output_ids"]) == (alone["text"], alone["output_ids"])
    both = ask(server, sampling_params=sampling | {"n": 2}, rid="z").json()
    assert [answer["meta_info"]["id"] for answer in both] == ["z_0_0", "z_0_1"]
    assert both[0]["output_ids"] == one["output_ids"] != both[1]["output_ids"]
    assert isinstance(one, dict) and isinstance(ask(server, input_ids=[IDS]).json(), list)


@pytest.mark.parametrize("prompts", [IDS, [IDS, [8, 9]]])
def test_the_last_event_of_a_stream_is_the_whole_answer(server, prompts):
    fields = SLIME | {"input_ids": prompts, "rid": "same"}
    whole = ask(server, **fields).json()
    answer = ask(server, **fields | {"stream": True})
    *events, end = answer.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    seen = {}
    for event in (json.loads(event.removeprefix("data: ")) for event in events):
        before = seen.get(event.get("index"), {"output_ids": []})
        assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        seen[event.get("index")] = event
    for index, last in enumerate(seen[key] for key in sorted(seen, key=str)):
        expected = whole if isinstance(whole, dict) else whole[index]
        for content in (last, expected):
            content["meta_info"].pop("tpdet")
        last.pop("index", None)
        assert last == expected


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"stop_token_ids": [*range(97, 123)]}, {"type": "stop", "matched": "ID"}),
        ({"stop": [chr(code) for code in range(97, 111)], "max_new_tokens": 60}, None),
        ({"max_new_tokens": 3}, {"type": "length", "length": 3}),
    ],
)
def test_the_reason_of_an_end_is_an_object(server, sampling, reason):
    found = ask(server, sampling_params={"temperature": 0} | sampling).json()
    end = found["meta_info"]["finish_reason"]
    if reason is None:
        assert end["type"] == "stop" and end["matched"] in sampling["stop"]
        assert end["matched"] not in found["text"]
    elif reason["type"] == "stop":
        assert end == {"type": "stop", "matched": found["output_ids"][-1]}
    else:
        assert end == reason


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"text": "x"}, "input_ids", "either text or input_ids"),
        ({"input_ids": None}, "text", "either text or input_ids"),
        ({"input_ids": []}, "input_ids", "ids"),
        ({"input_ids": [600]}, "input_ids", "outside the vocabulary"),
        ({"input_ids": None, "text": 3}, "text", "must be text"),
        ({"sampling_params": {"max_new_tokens": 999}}, "max_new_tokens", "lower max_new_tokens"),
        ({"sampling_params": {"sampling_seed": -1}}, "sampling_params", "sampling_seed"),
        ({"sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens", "max_new_tokens"),
        ({"sampling_params": {"ebnf": "x"}}, "sampling_params", "use json_schema or regex"),
        ({"sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params", "requests of their own"),
        ({"logprob_start_len": -2}, "logprob_start_len", "greater"),
        ({"top_logprobs_num": 101}, "top_logprobs_num", "100"),
        ({"rid": ["a", "b"]}, "rid", "2 names in rid for 1 prompts"),
        ({"return_routed_experts": True}, "return_routed_experts", "no experts"),
        ({"image_data": ["x"]}, "image_data", "text is the only kind"),
        ({"max_new_tokens": 3}, "max_new_tokens", "unknown field"),
        ({"stream": True, "return_logprob": True, "logprob_start_len": 0}, "stream", "streamed"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_its_name(server, unharmed, fields, param, says):
    assert says in refused(ask(server, **fields), 400, param)["message"]


def test_what_slime_asks_beside_it(server):
    assert server.http.get("/health_generate").status_code == 200
    for path in ("/server_info", "/get_server_info"):
        info = server.http.get(path).json()
        names = ("tp_size", "pp_size", "num_gpus", "disaggregation_mode")
        assert [info[name] for name in names] == [1, 1, 1, "null"]
    for path in ("/model_info", "/get_model_info"):
        info = server.http.get(path).json()
        assert (info["model_path"], info["is_generation"]) == (MODEL, True)
        assert info["weight_version"] == "default"
