"""`tpdet reload` on real models: the bytes that a process started on them answers with."""

import subprocess
import sys

import pytest

from tests.lib.server.served import Served
from tpdet.llm import LLM
from tpdet.requests.request import SamplingParams

pytestmark = pytest.mark.long

PROMPTS = (list(range(40, 90)), list(range(300, 580)), list(range(300, 580)))  # the last one hot
FIELDS = {"temperature": 0.8, "seed": 3, "max_tokens": 6}


def ask(served):
    """Ids, bits and digest of each answer, and the one fingerprint of all."""
    found, names = [], set()
    for prompt in PROMPTS:
        answer = served.client.completions.create(
            model="tiny", prompt=prompt, extra_body={"return_token_ids": True}, **FIELDS
        )
        choice = answer.choices[0]
        digest = answer.model_extra["tpdet"]["replay_digest"]
        found.append((list(choice.token_ids), list(choice.logprob_bits), digest))
        names.add(answer.system_fingerprint)
    (name,) = names
    return found, name


def fresh(model):
    """The same of a process that starts on `model`."""
    llm = LLM(str(model), kv_pages=16)
    outputs = llm.generate([*map(list, PROMPTS)], SamplingParams(**FIELDS))
    found = [
        (list(o.outputs[0].token_ids), list(o.outputs[0].logprob_bits), o.replay_digest)
        for o in outputs
    ]
    name = llm.system_fingerprint
    llm.close()
    return found, name


def reload(served, model):
    command = [sys.executable, "-m", "tpdet", "reload", str(served.run), "--model", str(model)]
    found = subprocess.run(command, capture_output=True, timeout=120, text=True)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_reloaded_server_answers_as_a_fresh_process_and_back(tiny_model, tmp_path, tp):
    old, new = (tiny_model("qwen3", kv_heads=2, seed=seed) for seed in (0, 1))
    wide = tiny_model("qwen3", kv_heads=2, seed=1, intermediate=512)
    expected = {model: fresh(model) for model in (old, new)}
    assert expected[old][0] != expected[new][0] and expected[old][1] != expected[new][1]
    served = Served(old, tmp_path, tp)
    assert ask(served) == expected[old]
    code, text = reload(served, new)
    assert code == 0 and expected[new][1] in text
    assert ask(served) == expected[new]
    code, text = reload(served, wide)
    assert code == 65 and "intermediate_size is 512, the model that serves has 384" in text
    assert ask(served) == expected[new]
    assert reload(served, old)[0] == 0
    assert ask(served) == expected[old]
    assert served.end() == 0
