"""Requests of slime and AReaL as these trainers build them, with answers as they read them.

`slime.json` and `areal.json` hold the bodies, each with the function that builds it; names that
begin with $ stand for what only a run knows. Control routes are those of the HTTP process, in
front of rank 0's control plane and a real engine, all in this process.
"""

import asyncio
import json
import shutil
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from tests.lib.engine_harness import small_config
from tests.lib.server.harness import MODEL
from tests.lib.weight_sender import LocalSender, info_of, tensors_of
from tests.server.leader.test_weight_verbs import Served
from tpdet.comm.world.world import SoloWorld
from tpdet.control.row_messages import SampledToken
from tpdet.engine import Engine
from tpdet.requests.answer.sglang_choices import SglangChoiceWriter
from tpdet.requests.body.parse import parse_body
from tpdet.requests.body.prepare import Preparer
from tpdet.requests.body.problems import ApiError
from tpdet.requests.body.sglang_body import SglangBody
from tpdet.requests.engine_facts import EngineFacts
from tpdet.server.about.operations import CONTROL_OPERATIONS
from tpdet.server.front.app import Services, make_app
from tpdet.server.front.door import AdminDoor
from tpdet.server.front.middleware import RequestMiddleware
from tpdet.server.settings.keys import KeyRing
from tpdet.server.wire.protocol import Control
from tpdet.text.outputs import ChoiceAnswer

CLIENTS = ("slime", "areal")
NAMES = {
    "max_new_tokens": "max_tokens", "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output", "spaces_between_special_tokens": None,
}  # fmt: skip
"""SGLang's sampling parameters whose names completions have not, or by another name."""


def calls_of(client):
    return json.loads(Path(__file__).with_name(f"{client}.json").read_text())["calls"]


def is_control(call):
    return call["path"].partition("?")[0] in CONTROL_OPERATIONS


GENERATIONS = [
    pytest.param(call["body"], id=f"{client}-{index}")
    for client in CLIENTS
    for index, call in enumerate(calls_of(client))
    if call["path"] == "/generate"
]


def completion(server, body, **fields):
    """The answer of `/v1/completions` to the same question."""
    sampling = {NAMES.get(name, name): value for name, value in body["sampling_params"].items()}
    sampling.pop(None, None)
    asked = {"prompt": body["input_ids"], "logprobs": 0, "return_token_ids": True}
    answer = server.complete(**asked | sampling | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("body", GENERATIONS)
def test_a_question_gets_the_answer_that_its_sender_reads(server, body):
    answer = server.http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    meta = answer.json()["meta_info"]
    scored = "logprob_start_len" in body
    fields = {"seed": meta["tpdet"]["seed"]} | ({"prompt_logprobs": 0} if scored else {})
    same = completion(server, body, **fields)
    (choice,) = same["choices"]
    assert answer.json()["text"] == choice["text"]
    # Both read the tokens, and their log-probabilities, from here.
    pairs = meta["output_token_logprobs"]
    assert [pair[1] for pair in pairs] == choice["token_ids"] == answer.json()["output_ids"]
    assert [pair[0] for pair in pairs] == choice["logprobs"]["token_logprobs"]
    assert meta["finish_reason"]["type"] == choice["finish_reason"]
    assert meta["prompt_tokens"] == len(body["input_ids"])
    assert meta["completion_tokens"] == len(pairs)
    if scored:  # a teacher's: the numbers behind the first entry, which is null as SGLang's is
        first, *entries = meta["input_token_logprobs"]
        ids = body["input_ids"][body["logprob_start_len"] :]
        assert first == [None, ids[0], None] and [entry[1] for entry in entries] == ids[1:]
        scores = choice["prompt_logprobs"][-len(entries) :]
        expected = [score[str(i)]["logprob"] for score, i in zip(scores, ids[1:], strict=True)]
        assert [entry[0] for entry in entries] == expected


@pytest.mark.parametrize("client", CLIENTS)
def test_what_they_ask_of_the_server(server, client):
    for call in calls_of(client):
        if is_control(call) or call["path"] == "/generate":
            continue
        body = {"json": call["body"]} if "body" in call else {}  # AReaL's GET has one
        answer = server.http.request(call["method"], call["path"], **body)
        assert answer.status_code == 200, answer.text
        if call["path"] == "/server_info":
            info = answer.json()
            sizes = [info[name] for name in ("tp_size", "pp_size", "num_gpus")]
            assert sizes == [1, 1, 1] and info["disaggregation_mode"] == "null"
            # What slime compares with its own flags: each must be equal.
            flags = {"enable_memory_saver": False, "enable_return_routed_experts": False}
            assert {name: info[name] for name in flags} == flags
        elif call["path"].startswith("/v1/loads"):
            (load,) = answer.json()["loads"]
            assert load["dp_rank"] == 0 and load["num_total_reqs"] == 0


class Client:
    """An engine behind HTTP routes, whose calls are answered in this process."""

    def __init__(self, served):
        self.served, self.metrics = served, SimpleNamespace(rejected=lambda code: None)

    async def control(self, verb, body):
        self.served.calls.append((self.served.link, Control(1, verb, body)))
        self.served.turn()
        return self.served.answers.pop()


@pytest.fixture(scope="module")
def root(tiny_model, tmp_path_factory):
    """A root of weights: those that serve, and two other ones."""
    root = tmp_path_factory.mktemp("root")
    for seed in range(3):
        shutil.copytree(tiny_model("qwen3", kv_heads=2, seed=seed), root / f"step-{seed}")
    return root


@pytest.mark.parametrize("client", CLIENTS)
def test_updates_of_weights_as_they_order_them(root, client):
    served = Served(Engine(small_config(root / "step-0"), SoloWorld()), str(root), ("10.0.0.9",))
    services = Services(Client(served), None, None, None, MODEL, 1.0, 0, True)
    app = make_app(services, True)
    door = AdminDoor(KeyRing(()), "127.0.0.1")
    guarded = RequestMiddleware(app, app.routes, door, 1.0, lambda code: None)
    tensors = tensors_of(root / "step-2")
    info = info_of(tensors)
    values = {
        "$directory": str(root / "step-1"), "$address": "10.0.0.9",
        "$names": info.names, "$dtypes": info.dtype_names, "$shapes": info.shapes,
    }  # fmt: skip

    async def send():
        transport = httpx.ASGITransport(app=guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as http:
            for call in filter(is_control, calls_of(client)):
                body = {k: values.get(str(v), v) for k, v in call.get("body", {}).items()}
                if call["path"] == "/update_weights_from_distributed":
                    LocalSender(tensors).joined(served.engine)
                options = {"json": body} if call["method"] == "POST" else {}
                answer = await http.request(call["method"], call["path"], **options)
                yield call["path"], answer, served.control.pause.mode

    async def collect():
        return [step async for step in send()]

    digests = [Engine(small_config(root / f"step-{n}"), SoloWorld()).weights.digest for n in (1, 2)]
    seen = {"updates": [], "versions": []}
    for path, answer, pause in asyncio.run(collect()):
        if path == "/init_weights_update_group":  # taken as it is, but there is no GPU here
            assert answer.status_code == 400
            assert "nccl needs a GPU" in answer.json()["error"]["message"]
            continue
        assert answer.status_code == 200, (path, answer.text)
        if path.startswith("/update_weights"):
            assert answer.json()["success"] is True and pause is not None
            seen["updates"].append(path)
        elif path == "/get_weight_version":
            seen["versions"].append(answer.json()["weight_version"])
        elif path == "/continue_generation":
            assert pause is None
    assert len(seen["updates"]) == 2 and served.engine.weights.digest == digests[1]
    assert [number for number, _ in served.announced] == [1, 2]
    assert seen["versions"] == (["1", "2"] if client == "slime" else [])
    assert served.state == "accepting"


def experts_of(**fields):
    """The experts of an answer of two tokens behind four, a row for each token but the last."""
    facts = EngineFacts(
        "fp", "c0" * 32, "d1" * 32, 64, 99, (), 1, "", "float32", experts_shape=(3, 2)
    )
    fields |= {"input_ids": [2, 3, 4, 5], "return_routed_experts": True}
    body = parse_body(SglangBody, fields | {"sampling_params": {"max_new_tokens": 2}})
    call = Preparer(facts, MODEL, None).sglang(body, "id")
    experts = np.arange(5 * 3 * 2, dtype=np.int16).tobytes()
    tokens = SampledToken(9, -0.5, (), 1), SampledToken(8, -3.0, (), 17)
    answer = ChoiceAnswer(0, "", (9, 8), tokens, "length", None, routed_experts=experts)
    meta = SglangChoiceWriter(call, None, 0).whole(answer, None)["meta_info"]
    return np.frombuffer(b64decode(meta["routed_experts"]), np.int32).reshape(-1, 6).tolist()


def test_experts_begin_where_a_rollout_goes_on():
    """As slime asks for those that it has not, when it goes on with a part of an answer."""
    every = experts_of()
    assert len(every) == 5 and experts_of(routed_experts_start_len=3) == every[3:]
    with pytest.raises(ApiError, match="routed_experts_start_len 4: the prompt has 4 tokens"):
        experts_of(routed_experts_start_len=4)
