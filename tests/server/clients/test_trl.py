"""TRL's client: its requests are answered as it reads them; it and a trainer run unmodified.

`TPDET_TEST_TRL` names a directory with trl and accelerate where these are not installed:
`pip install --no-deps --target DIRECTORY trl==1.16.0 accelerate==1.10.1`.
"""

import importlib.util
import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from tests.lib.engine_harness import small_config
from tests.lib.server.harness import MODEL
from tests.lib.server.served import Served
from tpdet.comm.world.world import SoloWorld
from tpdet.engine import Engine
from tpdet.launch.host.interpreter import python_command

CLIENT = "883b515137be274c336554be29a838b2589110e5e563687c17168b74dee6cd20"
"""SHA-256 of trl/generation/vllm_client.py of TRL 1.16.0."""
TRAINER = "1c3dc2253fb3653269c11dfce4f946f74201a4cb63e0887a37e8e3bb4a3f5503"
"""SHA-256 of trl/trainer/grpo_trainer.py of TRL 1.16.0."""
FOLDER = os.environ.get("TPDET_TEST_TRL")
GENERATE = {
    "model": MODEL, "return_token_ids": True, "return_tokens_as_token_ids": True, "n": 2,
    "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "max_tokens": 4, "logprobs": 0,
}  # fmt: skip
"""What `VLLMClient.generate` of TRL 1.16.0 sends, but for the prompts."""
SCORE = {"model": MODEL, "max_tokens": 1, "temperature": 1.0}
"""What `VLLMClient.get_sequence_logprobs` sends, but for prompts and `prompt_logprobs`."""
STUB = {
    "vllm/__init__.py": "LLM = RequestOutput = SamplingParams = None\n",
    "vllm/sampling_params.py": "StructuredOutputsParams = None\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/network_utils.py": "get_ip = None\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/nccl_engine.py": (
        "NCCLTrainerSendWeightsArgs = NCCLWeightTransferEngine = None\n"
    ),
    "vllm-0.27.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.27.0\n",
    "vllm-0.27.0.dist-info/top_level.txt": "vllm\n",
}


def test_a_batch_of_hundreds_is_answered_prompt_by_prompt(server):
    prompts = [[1 + i % 250, 2, 3 + i % 7] for i in range(300)]
    found = server.http.post("/v1/completions", json=GENERATE | {"prompt": prompts})
    choices = found.json()["choices"]
    assert len(choices) == 2 * len(prompts)
    for index, choice in enumerate(choices):
        assert choice["prompt_token_ids"] == prompts[index // 2]
        assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]
        names, values = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
        tops = [{name: value} for name, value in zip(names, values, strict=True)]
        assert choice["logprobs"]["top_logprobs"] == tops


@pytest.mark.parametrize("count", [1, 100])
def test_every_entry_of_a_scored_prompt_has_its_rank(server, count):
    body = SCORE | {"prompt": [[*range(20, 60)], [9, 8, 7]], "prompt_logprobs": count}
    for choice in server.http.post("/v1/completions", json=body).json()["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None and rest
        for position in rest:
            ranks = sorted(entry["rank"] for entry in position.values())
            assert ranks[:count] == [*range(1, count + 1)] and len(ranks) in (count, count + 1)


def test_the_server_says_what_the_client_asks(server):
    config = server.http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["weight_transfer_config"] is None and config["lora_config"] is None
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["parallel_config"]["data_parallel_size"] == 1
    for query in ("", "?include_dp=false", "?include_dp=true"):
        assert server.http.get(f"/get_world_size{query}").json() == {"world_size": 1}


needs_trl = pytest.mark.skipif(
    FOLDER is None and importlib.util.find_spec("trl") is None, reason="TRL is not installed"
)


def run(program, folder, *arguments):
    """What a program with TRL, and with a `vllm` of empty names, prints last."""
    for name, text in STUB.items():
        path = folder / "stub" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = [str(folder / "stub"), *([FOLDER] if FOLDER else [])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*python_command(str(Path(__file__).with_name(program))), *map(str, arguments)],
        env=os.environ | environment | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_trl
def test_its_own_file_runs_unmodified(tiny_model, tmp_path):
    server = Served(tiny_model("qwen3"), tmp_path, 1)
    try:
        check(run("trl_run.py", tmp_path, server.ready["url"]))
    finally:
        server.end()


def train(model, folder, steps, *options):
    """A run of `GRPOTrainer` against a server of its own."""
    root = folder / "weights"
    root.mkdir(parents=True)
    flags = "--admin-listen", "127.0.0.1:0", "--weights-root", str(root)
    server = Served(model, folder, 1, *flags, "--logprobs-mode", "processed_logprobs")
    try:
        return run("trl_grpo.py", folder, server.ready["admin_url"], model, root, steps, *options)
    finally:
        server.end()


@needs_trl
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_trainer_gets_bits_that_are_computed_again(tiny_model, tmp_path):
    """Twenty steps, twice; docs/results/trl.cpu.json has the figures of one such run."""
    model, last = tiny_model("qwen3"), tmp_path / "0" / "weights" / "step-20"
    seen, again = (train(model, tmp_path / name, 20) for name in "01")
    print(json.dumps(seen))
    assert seen == again and seen["file"] == TRAINER and len(seen["steps"]) == 20
    assert seen["weights"] == Engine(small_config(last), SoloWorld()).weights.digest
    for step in seen["steps"]:
        assert step["recomputed"] == step["tokens"] == 96
        assert step["trl"] < 96  # the stock model's kernels have other bits
    # Negative control: weights that were not sent are seen.
    stale = train(model, tmp_path / "stale", 3, "--skip-sync", 2)["steps"]
    print(json.dumps(stale))
    assert [step["recomputed"] == step["tokens"] for step in stale] == [True, True, False]


def check(seen: dict) -> None:
    """What the client read, held against itself: sampled and scored are the same numbers."""
    assert seen["file"] == CLIENT
    assert [len(ids) for ids in seen["many"]["completion_ids"]] == [3] * 100
    assert seen["sampled"] == seen["again"] and len(seen["sampled"]["completion_ids"]) == 4
    assert seen["world_size"] == 1 and seen["info"]["weight_transfer_config"] is None
    assert seen["chat"]["prompt_ids"][0] and len(seen["chat"]["completion_ids"][0]) == 4
    for top, scored in seen["scored"].items():
        for index, ids in enumerate(seen["sampled"]["completion_ids"][::2]):
            sampled = [values[0] for values in seen["sampled"]["logprobs"][2 * index]]
            actual = [values[0] for values in scored["actual_logprobs"][index]]
            assert actual == sampled and len(actual) == len(ids)  # the same bits
            assert [ids for (ids,) in scored["actual_token_ids"][index]] == ids
            for values in scored["logprobs"][index]:
                assert len(values) == int(top) and values == sorted(values, reverse=True)
    # Negative control: another last token has another log-probability.
    for index in range(2):
        last = seen["scored"]["1"]["actual_logprobs"][index][-1][0]
        assert last != seen["other"]["actual_logprobs"][index][-1][0] > -math.inf
