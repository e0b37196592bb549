"""What clients get: the openai client unchanged, streams, log-probabilities, batches."""

import asyncio
import json

import numpy
import openai
import pytest

from tests.lib.server.harness import MODEL, refused


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_ready_json_names_the_server_and_its_ranks(server):
    assert server.ready["tp"] == 1 and server.ready["vocab_size"] == 512
    assert server.ready["system_fingerprint"] == "fp_fake"
    assert server.ready["ranks"][0]["pid"] == server.process.pid
    assert server.ready["ranks"][0].keys() == {"rank", "pid", "host", "device"}


def test_the_openai_client_completes(client):
    found = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=5, temperature=0, seed=3, logprobs=2, user="u"
    )
    choice = found.choices[0]
    assert len(choice.text) == 5 and choice.finish_reason == "length"
    assert found.usage.prompt_tokens == 5 and found.usage.completion_tokens == 5
    assert found.system_fingerprint == "fp_fake" and found.model_extra["tpdet"]["seed"] == 3
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 5


def test_the_openai_client_chats_and_streams(client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_completion_tokens=6,
        seed=1,
        n=3,
        logprobs=True,
        top_logprobs=2,
    )
    texts = [""] * 3
    logprobs = [[], [], []]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=6,
        seed=1,
        n=3,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    for chunk in stream:
        assert chunk.system_fingerprint == "fp_fake"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content
            logprobs[choice.index] += choice.logprobs.content
    assert texts == [choice.message.content for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices]
    assert usage == whole.usage
    for token in whole.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 2  # the chosen one stands beside them


def test_the_async_client_gets_what_the_sync_one_gets_under_load(server, client):
    alone = client.completions.create(model=MODEL, prompt="x", max_tokens=8, seed=5).choices[0].text

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="n") as many_client:
            calls = [
                many_client.completions.create(model=MODEL, prompt="x", max_tokens=8, seed=5)
                for _ in range(32)
            ]
            return [found.choices[0].text for found in await asyncio.gather(*calls)]

    assert asyncio.run(many()) == [alone] * 32


def test_choice_0_of_4_is_the_answer_of_1(server):
    one = server.complete(seed=9).json()["choices"]
    four = server.complete(seed=9, n=4).json()["choices"]
    assert [choice["index"] for choice in four] == [0, 1, 2, 3]
    assert four[0] == one[0] and four[1]["text"] != four[0]["text"]


def test_an_absent_seed_is_drawn_and_replays_every_prompt_of_the_batch(server):
    prompts = ["a", "b", [99, 100]][:2]
    drawn = server.complete(prompt=prompts, n=2).json()
    again = server.complete(prompt=prompts, n=2, seed=drawn["tpdet"]["seed"]).json()
    assert again["choices"] == drawn["choices"]
    assert [choice["index"] for choice in drawn["choices"]] == [0, 1, 2, 3]


def test_a_replay_digest_is_the_answers_and_in_a_streams_last_chunk(server):
    fields = {"prompt": ["a", "b"], "n": 2, "seed": 6, "stop": "q", "max_tokens": 20}
    shown = server.complete(**fields).json()["tpdet"]
    request, digest = shown["request_digest"], shown["replay_digest"]
    assert len(digest) == len(request) == 64 and digest != request
    for more in ({}, {"stream_options": {"include_usage": True}}, {"logprobs": 3}):
        events = server.complete(stream=True, user="u", **fields, **more).text.split("\n\n")
        chunks = [json.loads(event[6:])["tpdet"] for event in events[:-2]]
        replay = {"replay_digest": digest, "replay_version": 2, "logprobs_mode": "raw_logprobs"}
        assert chunks[-1] == {"seed": 6, "request_digest": request, **replay}
        assert all(chunk == {"seed": 6} for chunk in chunks[:-1])
    assert server.complete(**fields, logprobs=1).json()["tpdet"]["replay_digest"] == digest
    other = server.complete(**fields | {"seed": 7}).json()["tpdet"]
    assert other["replay_digest"] != digest and other["request_digest"] != request


def test_a_greedy_request_without_a_seed_has_one_digest(server):
    def receipts(**fields):
        return [server.complete(**fields).json()["tpdet"] for _ in range(2)]

    shown, again = receipts(temperature=0, n=2, prompt=["a", "b"])
    assert shown["seed"] != again["seed"]  # what was drawn is still said
    assert shown["replay_digest"] == again["replay_digest"]
    given = server.complete(temperature=0, n=2, prompt=["a", "b"], seed=5).json()["tpdet"]
    assert given == {**shown, "seed": 5}
    scored = receipts(max_tokens=0, echo=True, logprobs=1)
    assert len({one["replay_digest"] for one in scored}) == 1
    sampled = receipts(temperature=0.001)
    assert len({one["replay_digest"] for one in sampled}) == 2


def test_streamed_text_is_the_finished_text_with_stop_strings(server):
    fields = {"max_tokens": 40, "seed": 11, "ignore_eos": True}
    text = server.complete(**fields).json()["choices"][0]["text"]
    stop = text[7:10]
    for shown in (False, True):
        more = fields | {"stop": ["never", stop], "include_stop_str_in_output": shown}
        whole = server.complete(**more).json()["choices"][0]
        assert whole["text"] == text[: text.index(stop) + 3 * shown]
        assert whole["finish_reason"] == "stop" and whole["stop_reason"] == stop
        events = server.complete(stream=True, **more).text.split("\n\n")
        chunks = [json.loads(event[6:]) for event in events[:-2]]
        assert events[-2] == "data: [DONE]"
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["text"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_continuous_usage_counts_up_to_the_usage_at_the_end(server):
    fields = {"max_tokens": 5, "seed": 2, "n": 2, "ignore_eos": True, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.complete(**fields, stream_options=options).text.split("\n\n")
    chunks = [json.loads(event[6:]) for event in events[:-2]]
    prompt = chunks[-1]["usage"]["prompt_tokens"]
    assert [chunk["usage"] for chunk in chunks] == [
        {"prompt_tokens": prompt, "completion_tokens": i, "total_tokens": prompt + i}
        for i in [*range(1, 11), 10]
    ]
    options["continuous_usage_stats"] = False
    events = server.complete(**fields, stream_options=options).text.split("\n\n")
    assert {json.dumps(json.loads(event[6:])["usage"]) for event in events[:-3]} == {"null"}


def test_a_stop_token_is_in_the_arrays_and_not_in_the_text(server):
    found = server.complete(
        logit_bias={"258": 100}, return_token_ids=True, logprobs=0, max_tokens=9
    ).json()["choices"][0]
    assert found["finish_reason"] == "stop" and found["text"] == ""
    assert found["token_ids"] == [258] and len(found["logprob_bits"]) == 1
    assert len(found["logprobs"]["token_logprobs"]) == 1
    kept = server.complete(logit_bias={"258": 100}, ignore_eos=True, max_tokens=9).json()
    assert kept["choices"][0]["finish_reason"] == "length"


def test_lm_eval_reads_the_prompts_logprobs_and_the_generated_one(server):
    found = server.complete(
        prompt=[[104, 101, 108], [108, 111]], echo=True, logprobs=1, max_tokens=1, temperature=0
    ).json()["choices"]
    logprobs = found[0]["logprobs"]
    assert logprobs["token_logprobs"][:3] == [None, -0.25, -0.5]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 4
    assert logprobs["top_logprobs"][0] is None
    for token, value, top in zip(
        logprobs["tokens"][1:],
        logprobs["token_logprobs"][1:],
        logprobs["top_logprobs"][1:],
        strict=True,
    ):
        assert top[token] == value
    assert found[0]["text"].startswith("hel") and found[1]["text"].startswith("lo")


def test_lm_eval_chats_with_a_type_beside_each_messages_content(server):
    messages = [{"role": "user", "content": "hi", "type": "text"}]
    body = {
        "messages": messages, "model": MODEL, "max_tokens": 4, "temperature": 0, "stop": [],
        "seed": 1234,
    }  # fmt: skip
    found = server.http.post("/v1/chat/completions", json=body)
    plain = body | {"messages": [{"role": "user", "content": "hi"}]}
    assert found.status_code == 200, found.text
    same = server.http.post("/v1/chat/completions", json=plain)
    assert found.json()["choices"] == same.json()["choices"]
    wrong = body | {"messages": [messages[0] | {"type": "image_url"}]}
    assert server.http.post("/v1/chat/completions", json=wrong).status_code == 400


def test_scoring_a_prompt_generates_nothing(server):
    found = server.complete(echo=True, logprobs=0, max_tokens=0, stream=False).json()
    assert found["choices"][0]["text"] == "hello"
    assert found["choices"][0]["logprobs"]["tokens"] == list("hello")
    assert found["usage"]["completion_tokens"] == 0
    streamed = server.complete(echo=True, logprobs=0, max_tokens=0, stream=True).text
    chunk = json.loads(streamed.split("\n\n")[0][6:])
    assert chunk["choices"][0]["logprobs"] == found["choices"][0]["logprobs"]


def test_float32_is_written_shortest_and_bits_are_its_own(server):
    raw = server.complete(return_token_ids=True, logprobs=1, max_tokens=6, seed=2)
    choice = raw.json()["choices"][0]
    for value, bits in zip(
        choice["logprobs"]["token_logprobs"], choice["logprob_bits"], strict=True
    ):
        assert numpy.float32(value).tobytes()[::-1].hex() == bits
        assert value == float(str(numpy.float32(value)))
    assert choice["prompt_token_ids"] == list(b"hello")


def test_null_means_absent_and_what_benchmarks_send_is_taken(server):
    body = {
        "model": MODEL, "prompt": "p", "max_tokens": 3, "temperature": 0.0, "logprobs": None,
        "repetition_penalty": 1.0, "ignore_eos": True, "stream": True, "tools": None,
        "stream_options": {"include_usage": True}, "best_of": None, "stop": None, "seed": None,
    }  # fmt: skip
    found = server.http.post("/v1/completions", json=body)
    assert found.status_code == 200 and found.text.endswith("data: [DONE]\n\n")
    assert '"completion_tokens":3' in found.text


def test_token_names_and_prompt_logprobs_by_id(server):
    found = server.complete(
        prompt_logprobs=1, return_tokens_as_token_ids=True, logprobs=1, max_tokens=1
    ).json()["choices"][0]
    assert found["logprobs"]["tokens"][0].startswith("token_id:")
    assert found["prompt_logprobs"][0] is None
    assert found["prompt_logprobs"][1]["101"]["logprob"] == -0.25
    # The engine of these tests ranks the second token 130th, the third 131st.
    ranks = [[one["rank"] for one in entry.values()] for entry in found["prompt_logprobs"][1:]]
    assert ranks[0] == [1, 130] and ranks[1] == [1, 131]


def test_truncation_keeps_the_last_tokens(server):
    found = server.complete(
        prompt="abcdef", truncate_prompt_tokens=2, return_token_ids=True, max_tokens=1
    ).json()
    assert found["choices"][0]["prompt_token_ids"] == [101, 102]


def test_models_and_the_tokenizer_endpoints(server, client):
    (model,) = client.models.list().data
    assert model.id == MODEL and model.model_extra["max_model_len"] == 256
    assert client.models.retrieve(MODEL).id == MODEL
    text = "hello <|im_end|> wörld"
    ids = server.http.post("/tokenize", json={"model": MODEL, "prompt": text}).json()
    assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] == 256
    back = server.http.post("/detokenize", json={"model": MODEL, "tokens": ids["tokens"]}).json()
    assert back["prompt"] == text
    chat = server.http.post(
        "/tokenize", json={"messages": [{"role": "user", "content": "x"}], "model": MODEL}
    ).json()
    assert chat["count"] > 1
    assert server.http.get("/tokenizer_info").json()["eos_token"]
    assert server.http.get("/server_info").json()["limits"]["n"] == [1, 128]
    assert server.http.get("/version").json()["version"]


def test_metrics_count_without_saying_what(server):
    before = server.metric("tpdet_generation_tokens_total")
    server.complete(prompt="secretprompt", max_tokens=5, ignore_eos=True)
    text = server.http.get("/metrics").text
    assert server.metric("tpdet_generation_tokens_total") == before + 5
    assert "vllm:num_requests_running" in text and "tpdet_kv_pages" in text
    assert "secretprompt" not in text


def test_the_published_schema_names_every_route_and_no_422(server):
    document = server.http.get("/openapi.json").json()
    assert "/v1/completions" in document["paths"] and "422" not in json.dumps(document)
    fields = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "echo", "logit_bias", "return_token_ids"} <= fields.keys()
    assert document["components"]["schemas"]["CompletionBody"]["additionalProperties"] is False


def test_nan_in_one_request_fails_it_alone(server):
    canary = server.canary()
    found = server.complete(cache_salt="nan=1")
    assert found.status_code == 500
    assert found.json()["error"]["type"] == "numerical_error"
    streamed = server.complete(cache_salt="nan=2", stream=True)
    assert streamed.status_code == 200
    assert '"numerical_error"' in streamed.text.split("\n\n")[-2]
    assert "[DONE]" not in streamed.text
    assert server.canary() == canary


def test_drafts_are_taken_and_wrong_ones_are_refused_by_name(server):
    asked = {"seed": 3, "max_tokens": 5, "return_token_ids": True}
    plain = server.complete(**asked).json()["choices"]
    drafts = {"drafts": [plain[0]["token_ids"]]}
    assert server.complete(**asked, tpdet=drafts).json()["choices"] == plain
    for fields, said in (
        ({"tpdet": {"drafts": [[1], [2]]}}, "2 drafts for 1 choices"),
        ({"tpdet": {"drafts": [[512]]}}, "drafts"),
        ({"tpdet": {"drafts": [[1] * 4096]}}, "shorten the drafts"),
        ({"tpdet": {"drafts": [[1]]}, "echo": True}, "a prompt that is echoed"),
        ({"tpdet": {"drafts": [[1]]}, "prompt": ["a", "b"]}, "2 prompts"),
        ({"tpdet": {"drafts": [["x"]]}}, "tpdet.drafts"),
        ({"tpdet": {"draft": [[1]]}}, "tpdet.draft"),
    ):
        assert said in refused(server.complete(**fields), 400)["message"]


def test_a_prediction_is_taken_and_what_is_none_is_refused_by_name(server, client):
    asked = {"seed": 3, "max_tokens": 5}
    plain = server.complete(**asked).json()
    assert "completion_tokens_details" not in plain["usage"]
    prediction = {"type": "content", "content": [{"type": "text", "text": "a"}]}
    found = server.complete(**asked, prediction=prediction).json()
    assert found["choices"] == plain["choices"]
    assert found["tpdet"] == plain["tpdet"]
    details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert found["usage"] == plain["usage"] | {"completion_tokens_details": details}
    messages = [{"role": "user", "content": "hi"}]
    text = {"type": "content", "content": "hello"}
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=3, prediction=text
    )
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
    for fields, said in (
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "text", "content": "a"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content is missing"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction.content"),
        ({"prediction": text | {"words": 1}}, "prediction.words"),
        ({"prediction": text | {"content": [{"type": "image_url"}]}}, "prediction.content[0]"),
        ({"prediction": text | {"content": "a" * 300}}, "a prediction of 300 tokens"),
        ({"prediction": text, "echo": True}, "a prompt that is echoed"),
        ({"prediction": text, "prompt": ["a", "b"]}, "2 prompts"),
    ):
        assert said in refused(server.complete(**fields), 400)["message"], fields
