"""Weights over HTTP into a running server: of a directory, of a trainer, of one that dies."""

import shutil

import httpx
import pytest

from tests.lib.gloo_trainer import GROUP_NAME, start_trainer
from tests.lib.ports import free_port
from tests.lib.server.served import Served
from tests.lib.weight_sender import info_of, tensors_of
from tests.server.end_to_end.test_reload_end_to_end import ask, fresh

pytestmark = pytest.mark.long


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_trainer_updates_a_running_server_and_dies_in_the_next_update(tiny_model, tmp_path, tp):
    old, new = (tiny_model("qwen3", kv_heads=2, seed=seed) for seed in (0, 1))
    expected = {model: fresh(model) for model in (old, new)}
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
    pids = {process.pid for process in served.everyone}
    statuses, answer = update(new)
    assert statuses == [200] * 4, answer
    assert answer["weight_version"] == "1"
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
