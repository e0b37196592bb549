"""The routes that answer with numbers, of a real server and of a model in this process."""

import asyncio
import itertools
import json
import re
import struct
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import blake3
import httpx
import msgspec
import openai
import pytest
import torch
from fastapi import FastAPI

from tests.lib.models.pooled_models import classifier, sentence_folder
from tests.lib.server.served import Served
from tpdet import LLM
from tpdet.checkpoint.model_config.pooling import load_for_task
from tpdet.kernels.exact.pooling import similarity
from tpdet.requests.answer.json_pieces import to_json
from tpdet.requests.body.pooling.pooled_answers import ANSWERS, AnswerShape
from tpdet.requests.body.pooling.pooling_body import pooled_call
from tpdet.requests.body.prepare import Preparer
from tpdet.requests.body.problems import ApiError, from_code
from tpdet.requests.body.work import prepare_call
from tpdet.requests.engine_facts import EngineFacts
from tpdet.requests.request import PooledOutput, TokenOutput
from tpdet.requests.routes import POOLED
from tpdet.server.body.job import Job, Reply
from tpdet.server.body.worker import work
from tpdet.server.front.app import ProblemResponse
from tpdet.server.front.door import Door as KeyDoor
from tpdet.server.front.middleware import RequestMiddleware
from tpdet.server.front.response_handle import ResponseHandle
from tpdet.server.pooling.routes import add_pooling_routes
from tpdet.server.settings.keys import KeyRing
from tpdet.text.pooled_prompts import PooledPrompts
from tpdet.text.tokenizer import Tokenizer

SMALL = {"layers": 1, "hidden": 128, "intermediate": 256}
TEXTS = ["The for statement", "A list is a sequence of values", "def f(x): return x"]


@pytest.mark.slow
def test_openais_client_gets_the_vectors_of_llm_whatever_the_batch(tiny_model, tmp_path):
    folder = sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model", prompts={"q": "Q: "})
    with LLM(str(folder), kv_pages=24, device="cpu") as llm:
        expected = llm.embed(TEXTS)
        (named,) = llm.embed(TEXTS[0], prompt_name="q")
        scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS)]
    server = Served(folder, tmp_path, 1, "--device", "cpu", "--canary-interval", "0.2")
    try:
        create = server.client.embeddings.create
        together = create(model="tiny", input=TEXTS)
        for index, one in enumerate(expected):
            vector = one.outputs.embedding
            assert together.data[index].embedding == vector
            assert together.model_extra["tpdet"]["digests"][index] == one.digest
            alone = create(model="tiny", input=TEXTS[index], encoding_format="float")
            assert alone.data[0].embedding == vector
            ids = create(model="tiny", input=list(one.prompt_token_ids))
            assert ids.data[0].embedding == vector
            assert ids.usage.prompt_tokens == ids.usage.total_tokens == len(one.prompt_token_ids)
        many = create(model="tiny", input=[TEXTS[index % 3] for index in range(300)])
        for index, found in enumerate(many.data):
            assert found.index == index
            assert found.embedding == expected[index % 3].outputs.embedding
        assert len(create(model="tiny", input=TEXTS[0], dimensions=7).data[0].embedding) == 7
        other = create(model="tiny", input=TEXTS[0], extra_body={"prompt_name": "q"})
        assert other.data[0].embedding == named.outputs.embedding
        with pytest.raises(openai.BadRequestError, match="--task generate"):
            server.client.completions.create(model="tiny", prompt="a")
        refused = httpx.post(server.url.removesuffix("/v1") + "/classify", json={"input": "a"})
        assert refused.status_code == 400 and "answers /v1/embeddings" in refused.text
        asked = {"query": TEXTS[0], "documents": TEXTS}
        ranked = server.client.post("/rerank", cast_to=object, body=asked)["results"]
        assert {one["index"]: one["relevance_score"] for one in ranked} == dict(enumerate(scores))
    finally:
        server.end()


class Door:
    """A model's routes, whose engine gives the numbers that a test says."""

    elsewhere = 0

    def __init__(self, model, task="auto"):
        model_config, pooling = load_for_task(model, "auto", task)
        self.facts = EngineFacts(
            *("fp", "c0" * 32, "d1" * 32, 512, model_config.vocab_size, (), 1, "fp2", "float32"),
            pooling=pooling,
        )
        self.preparer = Preparer(self.facts, "tiny", Tokenizer.load(model), "salt")

    def ask(self, route, values, **fields):
        call, found = self.call(route, fields), {}
        for request, value in zip(call.requests, values, strict=True):
            assert request.tenant_salt == "salt"
            row = value if isinstance(value, tuple) else (value,)
            output = PooledOutput(request.request_id, struct.pack(f"<{len(row)}f", *row))
            found[request.request_id] = output
        return call.answer(found, lambda number: self.facts)

    def call(self, route, fields):
        """The call of a body, as this process makes it and as a worker for large ones does."""
        here = pooled_call(route, self.preparer, fields, "id")
        job = Job(route, "id", "tiny", "salt", self.facts)
        assert asyncio.run(self.worked_elsewhere(job, to_json(fields))) == here
        return here

    async def worked_elsewhere(self, job, body, gone=None):
        """What a worker for large bodies makes of one."""
        self.elsewhere += 1
        job = msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=Job)
        reply = work(job, body, self.preparer.prompts.tokenizer)
        return await msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=Reply).outcome()


class Client:
    """Has an engine that gives each prompt the number of its tokens, at the loop's next turn."""

    max_queue = 1024

    def __init__(self, facts):
        self.facts, self.parts, self.outcomes = facts, [], []
        self.versions = itertools.repeat(0)
        self.ends, self.refusals, self.given_up = set(), {}, []
        tally = SimpleNamespace(add=lambda name, count: None)
        self.metrics = SimpleNamespace(outcome=self.outcomes.append, tally=tally)

    def facts_of(self, number):
        return self.facts

    def check_open(self):
        pass

    def close(self, handle):
        assert self.ends or not handle.open_requests

    def give_up(self, call_id):
        self.given_up.append(call_id)

    def submit(self, requests, group_id, reader, part):
        if self.refusals.pop(len(self.parts), None):
            raise from_code("engine_overloaded", "no room")
        handle = ResponseHandle(self, group_id, requests, reader, Mock())
        self.parts.append(len(requests))
        asyncio.get_running_loop().call_soon(self.answer, handle, requests)
        return handle

    def answer(self, handle, requests):
        handle.accepted.set_result(0)
        for request in requests:
            version = next(self.versions)
            value = struct.pack("<f", len(request.prompt_token_ids) + 100 * version)
            if len(request.prompt_token_ids) in self.ends:
                ended = TokenOutput(request.request_id, 0, -1, 0.0, finish_reason="abort")
                handle.put(ended, 0.0)
            else:
                handle.put(PooledOutput(request.request_id, value, weights=version), 0.0)
        handle.flush()


def post(door, path, *bodies, **settings):
    """The answers to bodies of a route of an app, and what stands for its engine."""
    client, app = Client(door.facts), FastAPI()
    vars(client).update(settings)
    services = SimpleNamespace(client=client, preparer=door.preparer, served_name="tiny")
    services.large_bodies = SimpleNamespace(work=door.worked_elsewhere)
    add_pooling_routes(app, services)

    @app.exception_handler(ApiError)
    async def problem(request, error):
        return ProblemResponse(error)

    everyone = KeyDoor(KeyRing(()))
    middleware = RequestMiddleware(app, app.routes, everyone, 30.0, lambda code: None)
    transport = httpx.ASGITransport(middleware)

    async def asked():
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as http:
            return [await http.post(path, json=body) for body in bodies]

    return asyncio.run(asked()), client


def test_many_texts_are_answered_in_parts_in_their_order(tiny_model, tmp_path):
    door = Door(sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model"))
    ids = [[1] * (1 + index % 7) for index in range(300)]
    (whole, refused), client = post(door, "/v1/embeddings", {"input": ids}, {"input": ["a", 1]})
    assert door.elsewhere == 0, "small bodies are worked on here"
    assert (
        whole.json()["tpdet"]["embedding_bits"][1]
        == blake3.blake3(struct.pack("<f", 2)).hexdigest()
    )
    assert [one["embedding"] for one in whole.json()["data"]] == [[len(one)] for one in ids]
    assert whole.json()["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert client.parts == [256, 44] and client.outcomes == ["completed"]
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
    for fields, words in (
        ({"input": ""}, "a text is empty"),
        ({"input": []}, "input is []"),
        ({"input": ["a", 1]}, "input[1] is 1"),
        ({"input": TEXTS[0], "dimensions": 129}, "over the vector's width of 128"),
        ({"input": TEXTS[0], "temperature": 0.5}, "temperature"),
        ({"input": ["a"] * 2049}, "input has 2049 entries"),
        ({"input": "a b, c. " * 300}, "over the model's context of 512"),
    ):
        with pytest.raises(ApiError) as error:
            door.ask("embeddings", [], **fields)
        assert error.value.status == 400 and words in error.value.message


def test_vectors_of_one_call_are_of_the_same_weights(tiny_model, tmp_path):
    door = Door(sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model"))
    changing = itertools.chain([0] * 260, [1] * 50, itertools.repeat(2))
    body = {"input": [[1] * (1 + index % 7) for index in range(300)]}
    (answer,), client = post(door, "/v1/embeddings", body, versions=changing)
    found = [one["embedding"] for one in answer.json()["data"]]
    assert found == [[200 + len(one)] for one in body["input"]]
    assert client.parts == [256, 44, 256, 4, 50], "only answers of older weights are asked again"


def test_a_call_that_a_control_call_ends_is_told_so(tiny_model, tmp_path):
    door = Door(sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model"))
    body = {"input": [[1], [1, 1], [1, 1, 1]]}
    (answer, plain), client = post(door, "/v1/embeddings", body, {"input": [[1]]}, ends={2})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "aborted"
    assert answer.headers["retry-after"] == "1"
    assert plain.status_code == 200 and client.outcomes == ["failed", "completed"]
    assert len(client.given_up) == 1


def test_a_call_is_larger_than_the_queue_and_waits_for_room_once_it_has_begun(tiny_model, tmp_path):
    door = Door(sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model"))
    body = {"input": [[1]] * 100}
    settings = {"max_queue": 40, "refusals": {1: True}}
    (answer,), client = post(door, "/v1/embeddings", body, **settings)
    assert len(answer.json()["data"]) == 100 and client.parts == [40, 40, 20]
    (answer,), client = post(door, "/v1/embeddings", body, refusals={0: True})
    assert answer.status_code == 503, "a call that has not begun is refused"


def test_refusals_of_texts_say_which_one_and_what_to_do(tiny_model, tmp_path):
    door = Door(
        sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model", prompts={"q": ""})
    )
    long = "a b, c. " * 300
    for route, words, fields in (
        ("embeddings", "at index 1: a text is empty", {"input": ["a", ""]}),
        ("embeddings", "^a text is empty", {"input": ""}),
        ("embeddings", "prompt_name 'q' is of texts", {"input": [1], "prompt_name": "q"}),
        ("embeddings", "has 513 tokens, over the model's context of 512", {"input": [1] * 513}),
        ("embed", "send truncate$", {"inputs": long}),
    ):
        with pytest.raises(ApiError) as error:
            door.call(route, fields)
        assert re.search(words, error.value.message)
    for where in ({"truncate": True}, {"parameters": {"truncate": True}}):
        asked = {"inputs": {"source_sentence": "a", "sentences": [long]}}
        call = door.call("similarity", asked | where)
        assert [len(one.prompt_token_ids) for one in call.requests][1] == 512
    reranker = Door(tiny_model("qwen3", **SMALL), "score")
    for words, fields in (
        ("at index 1: a document is empty", {"documents": ["a", ""]}),
        (
            "no room for one in 20: .* or raise trunc",
            {"documents": ["a"], "truncate_prompt_tokens": 20},
        ),
    ):
        with pytest.raises(ApiError, match=words):
            reranker.call("rerank", {"query": "a"} | fields)


def test_what_is_much_to_encode_is_worked_on_in_another_process(tiny_model, tmp_path):
    door = Door(classifier(tiny_model("qwen3", **SMALL), tmp_path / "one", 1))
    documents = {"documents": ["a"] * 100, "top_n": 1}
    bodies = {"query": "b c " * 700}, {"query": "b c " * 7}, {"query": "b", "user": "u" * 300_000}
    (many, few, large), _ = post(door, "/rerank", *[documents | body for body in bodies])
    assert few.status_code == 200 and door.elsewhere == 2
    assert "the query has" in many.json()["error"]["message"]
    assert large.json()["error"]["param"] == "user"


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(tiny_model, tmp_path, monkeypatch):
    encoded = []
    for name in ("encode", "encode_pair"):
        known = getattr(Tokenizer, name)

        def counted(self, *texts, known=known, **named):
            ids = known(self, *texts, **named)
            encoded.append(len(ids))
            return ids

        monkeypatch.setattr(Tokenizer, name, counted)
    for door in (
        Door(classifier(tiny_model("qwen3", **SMALL), tmp_path / "one", 1)),
        Door(tiny_model("qwen3", **SMALL), "score"),
    ):
        with pytest.raises(ApiError, match=r"document has at least [\d,]+ tokens.*512") as refused:
            door.call("rerank", {"query": "a", "documents": ["b" * 1_000_000]})
        assert refused.value.param == "document" and 0 < sum(encoded) < 400


def test_scores_ranks_and_labels_have_the_forms_of_vllm_and_cohere(tiny_model, tmp_path):
    plain = tiny_model("qwen3", **SMALL)
    door = Door(classifier(plain, tmp_path / "one", 1))
    scored = door.ask("score", [0.25, 0.5], text_1="q", text_2=["a", "b"])
    assert [one["score"] for one in scored["data"]] == [0.25, 0.5]
    for texts, words in (
        (["a"] * 2049, "text_2 has 2,049 texts: give 1 to 2,048"),
        ([], "text_2 has 0 texts"),
        (["a", 5], r"text_2\[1\] is 5: give text"),
        (None, "text_2"),
        ({"a": 1}, "text_2 is .*: give a text or a list"),
    ):
        with pytest.raises(ApiError, match=words) as refused:
            door.ask("score", [], text_1="q", text_2=texts)
        assert refused.value.status == 400 and refused.value.param == "text_2"
    ranked = door.ask(
        "rerank", [0.25, 0.5, 0.5], query="q", documents=["a", {"text": "b"}, "c"], top_n=2
    )
    assert ranked["results"] == [
        {"index": 1, "relevance_score": 0.5, "document": {"text": "b"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
    ]
    bare = door.ask("rerank", [0.5], query="q", documents=["a"], return_documents=False)
    assert bare["results"] == [{"index": 0, "relevance_score": 0.5}]
    three = Door(classifier(plain, tmp_path / "three", 3))
    (row,) = three.ask("classify", [(0.25, 0.5, 0.25)], input="a")["data"]
    assert row == {"index": 0, "label": "l1", "probs": [0.25, 0.5, 0.25], "num_classes": 3}
    (pooled,) = three.ask("pooling", [(0.25, 0.5, 0.25)], input=[5, 6])["data"]
    assert pooled["data"] == [0.25, 0.5, 0.25]
    three.ask("pooling", [(0.25, 0.5, 0.25)], input=[5] * 600, truncate_prompt_tokens=-1)
    for route, fields, words in (
        ("score", {"text_1": "a", "text_2": "b"}, "a head of one label, this model has 3"),
        ("score", {"text_1": "a", "text_2": ["b"] * 2049}, "a head of one label"),
        ("classify", {"input": "a", "dimensions": 2}, "dimensions are of vectors"),
        ("classify", {"input": "a", "encoding_format": "base64"}, "base64 is of /pooling"),
        ("classify", {"input": [5], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens 0 must"),
        ("pooling", {"input": [5], "truncate_prompt_tokens": 513}, "must be -1, or from 1 to"),
        ("embeddings", {"input": "a"}, "answers /classify"),
    ):
        with pytest.raises(ApiError) as refused:
            three.ask(route, [], **fields)
        assert refused.value.status == 400 and words in refused.value.message


def test_teis_bodies_have_its_answers(tiny_model, tmp_path):
    plain = tiny_model("qwen3", **SMALL)
    door = Door(classifier(plain, tmp_path / "one", 1))
    asked = {"query": "q", "texts": ["a", "b", "c"]}
    ranked = [{"index": 1, "score": 0.5}, {"index": 2, "score": 0.5}, {"index": 0, "score": 0.25}]
    assert door.ask("rerank", [0.25, 0.5, 0.5], **asked) == ranked
    shown = door.ask("inputs", [0.25, 0.5, 0.5], **asked, return_text=True, raw_scores=True)
    assert [one["text"] for one in shown] == ["b", "c", "a"]
    (raw, *_) = door.call("rerank", asked | {"raw_scores": True, "truncate": True}).requests
    assert raw.pooling.use_activation is False
    three = Door(classifier(plain, tmp_path / "three", 3))
    row, labels = (0.25, 0.5, 0.125), [("l1", 0.5), ("l0", 0.25), ("l2", 0.125)]
    labels = [{"label": name, "score": score} for name, score in labels]
    assert three.ask("predict", [row], inputs="a") == labels
    assert three.ask("predict", [row], inputs=["a", "b"]) == labels
    assert three.ask("predict", [row, row], inputs=[["a"], ["a", "b"]]) == [labels, labels]
    assert three.ask("inputs", [row], inputs="a", parameters={"top_k": 2}) == [labels[:2]]
    alone, pair = three.call("predict", {"inputs": [["a"], ["a", "b"]]}).requests
    assert pair.prompt_token_ids[: len(alone.prompt_token_ids)] == alone.prompt_token_ids
    vectors = Door(sentence_folder(plain, tmp_path / "model", prompts={"q": "Q: "}))
    assert vectors.ask("embed", [(1.0, 2.0)], inputs="a") == [[1.0, 2.0]]
    call = vectors.call(
        "embed", {"inputs": [TEXTS[0], [5, 6]], "normalize": False, "dimensions": 7}
    )
    params = call.requests[0].pooling
    assert params.use_activation is False and params.dimensions == 7
    sentences = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    call = vectors.call("inputs", {"inputs": sentences, "parameters": {"prompt_name": "q"}})
    assert call.form == "similarity" and len(call.requests) == 4
    assert call.requests[0] != vectors.call("embed", {"inputs": TEXTS[0]}).requests[0]
    for of, route, fields, words in (
        (door, "rerank", asked | {"top_n": 1}, "unknown field 'top_n'"),
        (door, "embed", {"inputs": "a"}, "answers /classify"),
        (door, "rerank", {"query": "q", "texts": []}, "texts"),
        (three, "predict", {"inputs": ["a", "b", "c"]}, "inputs[0] is ['a', 'b', 'c']"),
        (three, "predict", {"inputs": [["a"], "b"]}, "inputs[1] is 'b'"),
        (three, "predict", {"inputs": {}}, "inputs is {}"),
        (
            three,
            "inputs",
            {"inputs": "a", "parameters": {"function_to_apply": "sigmoid"}},
            "this model's is softmax",
        ),
        (vectors, "embed", {"inputs": ["a"] * 2049}, "inputs has 2049 entries"),
        (vectors, "embed", {"inputs": "a", "truncation_direction": "left"}, "at their end"),
        (vectors, "embed", {"inputs": "a b, c. " * 300}, "over the model's context of 512"),
        (vectors, "similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "is empty"),
        (vectors, "similarity", {"inputs": "a"}, "inputs"),
        (vectors, "rerank", {"query": "q", "texts": ["a"]}, "/rerank (of documents)"),
        (vectors, "inputs", asked, "answers /v1/embeddings"),
    ):
        with pytest.raises(ApiError) as refused:
            of.ask(route, [], **fields)
        assert words in refused.value.message, refused.value.message
        assert json.loads(refused.value.tei_body()).keys() == {"error", "error_type"}
        assert refused.value.tei and refused.value.status == 400
    (found, refused), _ = post(vectors, "/embed", {"inputs": ["a", "b"]}, {"inputs": []})
    assert found.headers["x-compute-tokens"] == "4" and found.json() == [[2.0], [2.0]]
    assert refused.json() == {"error": ANY, "error_type": "validation"}
    (refused,), _ = post(door, "/rerank", {"query": "", "texts": ["a"]})
    assert refused.json() == {"error": ANY, "error_type": "validation"}
    (refused,), _ = post(door, "/rerank", {"query": "", "documents": ["a"]})
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_cosines_have_the_bits_of_those_of_llm():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 300, generator=generator) * 0.1
    rows[1], rows[2, ::2], rows[3], rows[4] = 0.0, 0.0, rows[0], -rows[0]
    values = [row.numpy().tobytes() for row in rows]
    first = AnswerShape(pairs=tuple((0, other) for other in range(1, 40)))
    found = ANSWERS["similarity"](first, values)
    assert found == [float(similarity(rows[0], row)) for row in rows[1:]]
    pairs = tuple((one, 39 - one) for one in range(40))
    (scored,) = ANSWERS["score"](AnswerShape(pairs=pairs), values).values()
    assert [one["score"] for one in scored] == [
        float(similarity(rows[a], rows[b])) for a, b in pairs
    ]


@pytest.mark.parametrize(("route", "field"), [("embeddings", "input"), ("embed", "inputs")])
def test_ids_that_are_none_are_named_by_their_field(tiny_model, tmp_path, route, field):
    door = Door(sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model"))
    for ids, words in ([[]], "empty"), ([5, 10**6], "outside the vocabulary"):
        with pytest.raises(ApiError, match=words) as refused:
            door.ask(route, [], **{field: ids})
        assert (refused.value.status, refused.value.param) == (400, field)


def test_a_model_of_vectors_scores_and_ranks_by_cosines(tiny_model, tmp_path):
    """As vLLM answers; each text is read once."""
    door = Door(sentence_folder(tiny_model("qwen3", **SMALL), tmp_path / "model"))
    east, north, between = (1.0, 0.0), (0.0, 1.0), (0.75, 0.5)
    scored = door.ask("score", [east, north, between], text_1="e", text_2=["n", "b", "e", "n"])
    assert [one["score"] for one in scored["data"]] == [0.0, 0.75, 1.0, 0.0]
    assert len(scored["tpdet"]["digests"]) == 3 == scored["usage"]["prompt_tokens"] / 2
    paired = door.ask("score", [east, north, between], text_1=["e", "b"], text_2=["n", "e"])
    assert [one["score"] for one in paired["data"]] == [0.0, 0.75]
    documents = ["n", {"text": "b"}, "e"]
    ranked = door.ask("rerank", [east, north, between], query="e", documents=documents, top_n=2)
    assert ranked["results"] == [
        {"index": 2, "relevance_score": 1.0, "document": {"text": "e"}},
        {"index": 1, "relevance_score": 0.75, "document": {"text": "b"}},
    ]
    call = door.call("rerank", {"query": "e", "documents": ["n"]})
    alone = door.call("embeddings", {"input": "n"}).requests[0]
    assert call.requests[1].prompt_token_ids == alone.prompt_token_ids
    assert all(request.pooling.use_activation for request in call.requests)
    for field, value in ("instruction", "find"), ("use_activation", False):
        with pytest.raises(ApiError, match=f"cosines .* leave {field} out") as refused:
            door.call("rerank", {"query": "e", "documents": ["n"], field: value})
        assert (refused.value.status, refused.value.param) == (400, field)
    with pytest.raises(ApiError, match="2,049 texts are asked for: give up to 2,048"):
        door.call("score", {"text_1": "e", "text_2": list(map(str, range(2048)))})


def test_a_reranker_and_a_server_that_generates(tiny_model, monkeypatch):
    monkeypatch.setattr(PooledPrompts, "answering_tokens", lambda self: (17, 900))
    plain = tiny_model("qwen3", **SMALL)
    door = Door(plain, "score")
    assert door.ask("rerank", [0.1], query="q", documents=["a"])["results"][0]["index"] == 0
    with pytest.raises(ApiError, match="generates no text"):
        prepare_call("completion", door.preparer, {"prompt": "a"}, "id")
    generates = Preparer(SimpleNamespace(pooling=None), "tiny", None)
    for route in POOLED:
        with pytest.raises(ApiError, match="--task embed") as refused:
            pooled_call(route, generates, {}, "id")
        assert refused.value.status == 400
