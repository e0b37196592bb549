"""Times of `LLM.generate`: decode steps by batch, prompts by number and length, the ids' digest."""

import hashlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

from tpdet import LLM, SamplingParams
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.tools.bench.load import prompt

INPUT, TOKENS = 128, 65


def started(
    model: str, batches: Sequence[int], context: int, **settings: Any
) -> tuple[LLM, dict[str, object]]:
    """An engine of random weights with drafts off, and the seconds that its start took, as a row.

    settings: further keywords of `LLM`.
    """
    begin = time.perf_counter()
    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=max(batches),
        max_model_len=context,
        drafts="off",
        **settings,
    )
    return llm, {"start s": round(time.perf_counter() - begin, 1)}


def generate_times(
    llm: LLM,
    batches: Sequence[int],
    prompts: Sequence[tuple[int, int]],
    turns: int = 5,
    prompt_tokens: int = INPUT,
) -> dict[str, object]:
    """Medians of turns: ms of a decode step at each batch, and of prompts (how many, how long).

    prompt_tokens: of the sequences that decode.
    `ids`: the digest of all ids, which other ways to compute the same have in common.
    """
    row: dict[str, object] = {}
    vocabulary, digest = llm.engine.model_config.vocab_size, hashlib.blake2b(digest_size=8)

    def seconds(asked: list[list[int]], tokens: int) -> float:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        before = time.perf_counter()
        outputs = llm.generate(asked, params, use_tqdm=False)
        taken = time.perf_counter() - before
        digest.update(repr([list(one.outputs[0].token_ids) for one in outputs]).encode())
        return taken

    turn = 0
    for batch in batches:
        steps = []
        for _ in range(turns):
            turn += 1
            asked = [list(prompt(prompt_tokens, vocabulary, f"{turn}-{i}")) for i in range(batch)]
            if prompt_tokens >= PAGE_TOKENS:
                seconds(asked, 1)  # so that both calls find the same pages
            first = seconds(asked, 1)
            steps.append((seconds(asked, TOKENS) - first) / (TOKENS - 1))
        row[f"ms at {batch}"] = round(1e3 * statistics.median(steps), 3)
    for count, length in prompts:
        taken = []
        for _ in range(turns):
            turn += 1
            asked = [list(prompt(length, vocabulary, f"{turn}-{i}")) for i in range(count)]
            taken.append(seconds(asked, 1))
        row[f"ms of {count} x {length}"] = round(1e3 * statistics.median(taken), 2)
    return row | {"ids": digest.hexdigest()}
