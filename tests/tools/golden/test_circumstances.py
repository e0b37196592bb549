"""Goldens that one target recorded pass by every other of the same model, in any circumstance."""

import random

import pytest

from tests.lib.server.served import Served
from tests.tools.recorded_lines import CHATS, COMPLETIONS
from tpdet import LLM
from tpdet.tools.check.answers import Question
from tpdet.tools.check.targets import ModelTarget, ServerTarget
from tpdet.tools.golden.golden_file import stored_form
from tpdet.tools.golden.verdicts import verdicts

pytestmark = pytest.mark.slow

KINDS = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "n": 2},
    {"temperature": 1, "seed": 3, "stop": ["e"], "presence_penalty": 0.5},
    {"temperature": 0, "response_format": {"type": "json_object"}, "logit_bias": {"9": 1}},
)


def questions(count=40):
    rng = random.Random(4)
    asked = []
    for index in range(count):
        text, body = f"Number {rng.randrange(1000)} is", {**KINDS[index % 4], "max_tokens": 12}
        if index % 8 < 4:
            asked.append(Question(str(index), COMPLETIONS, {"prompt": text, **body}))
        else:
            talk = [{"role": "user", "content": text}]
            asked.append(Question(str(index), CHATS, {"messages": talk, **body}))
    return asked


def record(target):
    asked = questions()
    lines = target.record(asked)
    return {one.name: stored_form(line) for one, line in zip(asked, lines, strict=True)}


def all_pass(target, goldens, order):
    names = [*goldens]
    random.Random(order).shuffle(names)
    judged = verdicts(target, {name: goldens[name] for name in names}, "golden.json")
    judged += verdicts(target, {name: goldens[name] for name in names[:5]}, "golden.json")
    return all(verdict.equal for verdict in judged), [v.text for v in judged if not v.equal][:1]


def test_goldens_pass_by_every_target_of_the_model(tiny_model, tmp_path):
    model = tiny_model("qwen3", kv_heads=4)
    with LLM(model, device="cpu", kv_pages=96) as llm:
        goldens = record(ModelTarget(llm))
        assert all_pass(ModelTarget(llm), goldens, 1) == (True, [])
    for settings in (
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4, "enable_prefix_caching": False},
        {"max_num_seqs": 2, "max_num_batched_tokens": 32},
    ):
        with LLM(model, device="cpu", kv_pages=96, **settings) as llm:
            assert all_pass(ModelTarget(llm), goldens, 2) == (True, []), settings
    served = Served(model, tmp_path, 2, "--device", "cpu")
    try:
        target = ServerTarget.of(served.url.removesuffix("/v1"))
        assert all_pass(target, goldens, 3) == (True, [])
        by_server = record(target)
    finally:
        served.end()
    for golden in (*goldens.values(), *by_server.values()):
        golden["response"]["body"]["model"] = "named by its target"
    assert by_server == goldens
    with LLM(tiny_model("qwen3", kv_heads=4, seed=1), device="cpu", kv_pages=96) as other:
        judged = verdicts(ModelTarget(other), goldens, "golden.json")
    assert not any(verdict.equal or verdict.comparable for verdict in judged)
    assert "cannot be compared: " in judged[0].text and "model digest" in judged[0].text
