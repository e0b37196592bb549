"""A tape of twenty answers, recorded at TP 1, is checked at TP 2; what is planted is named."""

import shutil
import sys

import pytest
import torch

from tests.lib.server.served import Served
from tests.lib.tree import ROOT
from tests.tools.tape.test_tape import with_changed
from tpdet import LLM
from tpdet.cli import main
from tpdet.tools.check.by_model import ModelCheck
from tpdet.tools.tape.check import check_tape
from tpdet.tools.tape.tape_file import read_tape

pytestmark = pytest.mark.slow

SMALL = ("--device", "cpu", "--kv-pages", "96")
WORDS = [f"{'Result' if n == 5 else 'Word'} {n}" for n in range(17)]


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("qwen3", kv_heads=4)


@pytest.fixture(scope="module")
def tape(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tape")
    served = Served(model, folder, 1, "--device", "cpu")
    path, url = folder / "run.tape", served.url.removesuffix("/v1")
    agent = ("env", "TAPE_MODEL=tiny", sys.executable, str(ROOT / "tests/tools/tape/agent.py"))
    try:
        run = ["tape", "record", "--url", url, "-o", str(path), "--", *agent, *WORDS]
        assert main(run) == 0
        assert main(["tape", "check", "--url", url, str(path)]) == 0
    finally:
        served.end()
    return path


def checked(path, model, *more):
    return main(["tape", "check", str(path), "--model", str(model), *SMALL, *more])


def test_it_holds_at_another_size_and_names_a_token_and_a_tools_result(tape, model, capfd):
    assert len(read_tape(str(tape)).turns) == 21
    assert checked(tape, model, "--tp", "2") == 0
    assert "21 turns, 20 answers, 126 tokens: 20 equal" in capfd.readouterr().out

    def token(lines):
        lines["ids", 9]["body"]["choices"][0]["token_ids"][3] ^= 1

    assert checked(with_changed(tape, token), model, "--tp", "2") == 1
    first, *_ = capfd.readouterr().out.splitlines()
    assert first.startswith("turn 9 (POST /v1/chat/completions), choice 0, token 3: recorded id ")

    def result(lines):
        lines["turn", 12]["request"] = lines["turn", 12]["request"].replace("Result 5", "Result 6")

    assert checked(with_changed(tape, result), model, "--tp", "2") == 78
    first, *_ = capfd.readouterr().out.splitlines()
    assert first.startswith("turn 12 (POST /v1/chat/completions) cannot be compared: ")


def test_a_bit_of_a_weight_is_named_in_memory_and_in_the_file(tape, model, capfd, tmp_path):
    with LLM(model, device="cpu", kv_pages=96) as llm:
        # Behind the model's digest, as a faulty memory does it.
        llm.engine.runner.model.layers[0].norms[0].weight.view(torch.int32)[7] ^= 1 << 12
        compare = ModelCheck(llm).compare_all
        found = check_tape(read_tape(str(tape)), lambda lines: compare(lines, use_tqdm=False)[0])
    assert len(found.different) == 20 and not found.incomparable
    first = next(found.lines())
    assert first.startswith("turn 1 (POST /v1/chat/completions), choice 0, token 0: recorded id ")
    assert "log-probability" in first
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    (file,) = copy.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert checked(tape, copy) == 78
    said = capfd.readouterr()
    assert said.out.startswith("turn 1 (POST /v1/chat/completions) cannot be compared: it was")
    assert "model digest" in said.out and "20 answers cannot be compared" in said.err
