"""The recipes of docs/golden.md, by the real packages where they are: one certificate each."""

import json
import os
import random
import shutil
import subprocess

import pytest

from tests.lib.server.harness import MODEL, Server
from tests.lib.server.served import Served
from tpdet.errors import UsageError

CONTEXTS = [f"Question {number}: what is" for number in range(6)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("s"))
    yield server
    assert server.stop() == 0


def lm_eval_answers(url, tokenizer, file, order, concurrency, model=MODEL):
    """What lm-eval's requests in some order leave in the file of answers."""
    from lm_eval.api.instance import Instance

    from tpdet.tools.certify.lm_eval_models import RecordingCompletions

    lm = RecordingCompletions(
        base_url=f"{url}/completions",
        model=model,
        tokenizer=str(tokenizer),
        tokenizer_backend="huggingface",
        max_length=512,
        batch_size=16,
        num_concurrent=concurrency,
        answers=str(file),
    )
    asked = {"generate_until": [], "loglikelihood": []}
    for document, context in enumerate(CONTEXTS):
        arguments = {
            "generate_until": [(context, {"until": ["zz"], "max_gen_toks": 5})],
            "loglikelihood": [(context, " yes"), (context, " no")],
        }
        for kind, pairs in arguments.items():
            for index, pair in enumerate(pairs):
                metadata = (f"task_{kind}", document, 1)
                asked[kind].append(Instance(kind, {}, pair, index, metadata=metadata))
    rng = random.Random(order)
    results = {}
    for kind, instances in asked.items():
        rng.shuffle(instances)
        answers = getattr(lm, kind)(instances)
        results |= {(kind, i.doc_id, i.idx): a for i, a in zip(instances, answers, strict=True)}
    return results


def certificate(tpdet, *files):
    code, output, said = tpdet("certify", *files, "--json")
    assert code == 0, said
    return json.loads(output)


def test_lm_eval_has_one_certificate_in_any_order_and_concurrency(server, tmp_path, tpdet):
    pytest.importorskip("lm_eval")
    found, results = [], []
    for order, concurrency in ((1, 1), (2, 4)):
        file = tmp_path / f"answers-{order}.jsonl"
        how = (server.url + "/v1", server.model, file, order, concurrency)
        results.append(lm_eval_answers(*how))
        found.append(certificate(tpdet, file))
    assert found[0] == found[1] and found[0]["answers"] == 18
    assert results[0] == results[1]
    (name,) = {json.loads(line)["custom_id"] for line in file.read_text().splitlines()[:1]}
    assert name.startswith("task_generate_until/")
    assert tpdet("check", file, "--url", server.url)[0] == 0
    with pytest.raises(UsageError, match="exists: name a new file, or delete it"):
        lm_eval_answers(*how)


@pytest.mark.slow
def test_lm_eval_has_one_certificate_at_every_size(tiny_model, tmp_path, tpdet):
    """5 shuffles, 1, 8 and 64 requests at a time, TP 1 and 2, each a server of its own."""
    pytest.importorskip("lm_eval")
    model = tiny_model("qwen3", kv_heads=2)
    found = set()
    for tp in (1, 2):
        (tmp_path / str(tp)).mkdir()
        served = Served(model, tmp_path / str(tp), tp, "--device", "cpu")
        try:
            for order in range(5):
                for concurrency in (1, 8, 64):
                    file = tmp_path / f"{tp}-{order}-{concurrency}.jsonl"
                    lm_eval_answers(served.url, model, file, order, concurrency, "tiny")
                    found.add(certificate(tpdet, file)["certificate"])
        finally:
            served.end()
    assert len(found) == 1


INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def small():
    dataset = [Sample(input=text, target="a") for text in ("Hi", "Why?", "And then?")]
    return Task(dataset=dataset, solver=generate(), scorer=includes(), version=3)
"""


@pytest.mark.slow
def test_inspect_ai_has_one_certificate(server, tmp_path, tpdet):
    if not shutil.which("inspect"):
        pytest.skip("inspect-ai is not installed")
    (tmp_path / "task.py").write_text(INSPECT_TASK)
    environment = os.environ | {"VLLM_BASE_URL": server.url + "/v1", "VLLM_API_KEY": "none"}
    found = []
    for folder, connections in (("one", "1"), ("many", "8")):
        command = ["inspect", "eval", "task.py", "--model", f"vllm/{MODEL}", "--seed", "5"]
        command += ["--max-tokens", "6", "--log-dir", folder, "--display", "none"]
        command += ["--max-connections", connections]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=200)
        (log,) = (tmp_path / folder).iterdir()
        code, _, said = tpdet("certify", log)
        assert code == 65 and "inspect log convert" in said
        command = [
            "inspect",
            "log",
            "convert",
            log,
            "--to",
            "json",
            "--output-dir",
            folder + "-json",
        ]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=100)
        found.append(certificate(tpdet, *(tmp_path / f"{folder}-json").iterdir()))
    assert found[0] == found[1]
    assert (found[0]["answers"], found[0]["tasks"]) == (3, {"small": "3"})


PROMPTFOO = """
prompts: ["Tell {{x}}"]
providers:
  - id: http
    config:
      url: URL/v1/chat/completions
      method: POST
      headers: {Content-Type: application/json}
      body:
        model: demo
        messages: [{role: user, content: "{{prompt}}"}]
        max_tokens: 6
        seed: 5
      transformResponse: >-
        ({output: json.choices[0].message.content, metadata: {tpdet: json.tpdet}})
tests:
  - vars: {x: "one"}
  - vars: {x: "two"}
"""


@pytest.mark.slow
def test_promptfoo_has_one_certificate(server, tmp_path, tpdet):
    if not shutil.which("promptfoo"):
        pytest.skip("promptfoo is not installed")
    (tmp_path / "promptfooconfig.yaml").write_text(PROMPTFOO.replace("URL", server.url))
    environment = os.environ | {"PROMPTFOO_CONFIG_DIR": str(tmp_path / "home")}
    environment |= {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1"}
    found = []
    for output, width in (("out.json", "1"), ("out.jsonl", "4")):
        command = ["promptfoo", "eval", "--no-cache", "-j", width, "-o", output]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=200)
        found.append(certificate(tpdet, tmp_path / output))
    assert found[0] == found[1] and found[0]["answers"] == 2
