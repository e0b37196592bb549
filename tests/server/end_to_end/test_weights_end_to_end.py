"""Weights into a running server: reloaded, over HTTP of a folder, of a trainer, of one that dies.

After each it answers with the bytes of a process that started on the new ones.
"""

import shutil

import httpx
import pytest

from tests.lib.forked import run_forked
from tests.lib.gloo_trainer import GROUP_NAME, start_trainer
from tests.lib.ports import free_port
from tests.lib.server.served import Served
from tests.lib.weight_sender import info_of, tensors_of
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
    found = run_forked("tpdet", "reload", served.run, "--model", model)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_new_weights_answer_as_in_a_fresh_process_and_back(tiny_model, tmp_path, tp):
    """Reloaded; then a trainer updates them, and dies in the next update."""
    old, new = (tiny_model("qwen3", kv_heads=2, layers=1, seed=seed) for seed in (0, 1))
    wide = tiny_model("qwen3", kv_heads=2, layers=1, seed=1, intermediate=512)
    expected = {model: fresh(model) for model in (old, new)}
    assert expected[old][0] != expected[new][0] and expected[old][1] != expected[new][1]
    root = tmp_path / "weights"
    shutil.copytree(old, root / "first")
    flags = "--admin-listen", "127.0.0.1:0", "--weights-root", str(root)
    served = Served(old, tmp_path, tp, *flags, "--weights-peers", "127.0.0.1")
    admin = httpx.Client(base_url=served.ready["admin_url"], timeout=120)

    def tell(path, **body):
        answer = admin.post(path, json=body)
        return answer.status_code, answer.json()

    def update(model, die_after=-1):
        """TRL's calls, over gloo; their statuses. A trainer sends `finish` whatever happened."""
        tensors, port = tensors_of(model), free_port()
        names = sorted(tensors)
        path = model / "model.safetensors"
        trainer = start_trainer(path, port, tp + 1, names, die_after=die_after)
        group = {"backend": "gloo", "group_name": GROUP_NAME, "master_address": "127.0.0.1"}
        where = {"master_port": port, "rank_offset": 1, "world_size": tp + 1}
        info = info_of(tensors, names)
        told = {"names": info.names, "dtype_names": info.dtype_names, "shapes": info.shapes}
        answers = [
            tell("/init_weight_transfer_engine", init_info={**group, **where}),
            tell("/start_weight_update"),
            tell("/update_weights", update_info=told),
            tell("/finish_weight_update"),
        ]
        trainer.join()
        assert tell("/reset_prefix_cache")[0] == 200
        return [status for status, _ in answers], answers[-1][1]

    config = admin.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "nccl"}, "trainers look at it"
    assert ask(served) == expected[old]
    code, text = reload(served, new)
    assert code == 0 and expected[new][1] in text
    assert ask(served) == expected[new]
    code, text = reload(served, wide)
    assert code == 65 and "intermediate_size is 512, the model that serves has 384" in text
    assert ask(served) == expected[new]
    assert reload(served, old)[0] == 0
    assert ask(served) == expected[old]
    pids = {process.pid for process in served.everyone}
    statuses, answer = update(new)
    assert statuses == [200] * 4, answer
    assert answer["weight_version"] == "3"  # reloads count, too
    assert ask(served) == expected[new]
    statuses, answer = update(old, die_after=5)
    assert statuses == [200, 200, 502, 409], answer
    assert sorted(tensors_of(old))[5] in answer["error"]["message"]
    refused = httpx.post(served.url + "/completions", json={"model": "tiny", "prompt": [1, 2]})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "weights_incomplete"
    assert "retry-after" in refused.headers
    assert admin.get("/health").status_code == 200
    info = admin.get("/weight_info").json()
    assert info["state"] == "torn"
    assert {process.pid for process in served.everyone if process.is_running()} == pids
    assert tell("/update_weights", weight_dir="first")[0] == 200
    assert ask(served) == expected[old]
    assert admin.get("/weight_info").json()["state"] == "whole"
    assert served.end() == 0
