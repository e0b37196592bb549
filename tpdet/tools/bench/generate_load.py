"""The load of `tpdet bench generate`: decode, prompts and a mixed load through a `generate` call.

It knows no engine, so that another engine's `LLM.generate` is timed by the very same requests
(`scripts/vllm_generate.py`). Only the standard library is imported.
"""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

Generate = Callable[[list[list[int]], int], float]
"""Answers prompts of ids by exactly that number of tokens each; the seconds of the call."""

_LOW_ID = 1000  # below lie bytes and special tokens of many vocabularies
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Sizes:
    """How much is asked for; the defaults are those of the published figures.

    A decode step's time is the difference of two calls over the tokens between them, so that
    prompts and the call itself do not count. `mixed_prompt` are the least and the most ids of a
    prompt of the mixed load. vocabulary: ids are below it.
    """

    batches: tuple[int, ...] = (1, 16, 64, 256)
    prompt: int = 128
    few: int = 32
    many: int = 160
    prefill_prompts: int = 16
    prefill_tokens: int = 4096
    mixed_requests: int = 256
    mixed_prompt: tuple[int, int] = (64, 1023)
    mixed_tokens: int = 128
    vocabulary: int = 150_000
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(
            self.prompt + self.many,
            self.prefill_tokens + 1,
            self.mixed_prompt[1] + self.mixed_tokens,
        )


@dataclass(frozen=True)
class GenerateFigure:
    """One measurement. `context` are the ids of a prompt, at most."""

    case: str
    batch: int
    context: int
    value: float
    unit: str

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def time_generate(generate: Generate, sizes: Sizes) -> list[GenerateFigure]:
    """Every figure, each after a warm-up; no prompt is sent twice."""
    chosen = random.Random(sizes.seed)
    low = min(_LOW_ID, sizes.vocabulary // 2)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [
            [chosen.randrange(low, sizes.vocabulary) for _ in range(length)] for _ in range(count)
        ]

    figures = []
    for batch in sizes.batches:
        generate(prompts(batch, sizes.prompt), _WARM_UP_TOKENS)
        short = generate(prompts(batch, sizes.prompt), sizes.few)
        long = generate(prompts(batch, sizes.prompt), sizes.many)
        step = 1e3 * (long - short) / (sizes.many - sizes.few)
        figures.append(GenerateFigure("LLM decode", batch, sizes.prompt, step, "ms"))
    count, length = sizes.prefill_prompts, sizes.prefill_tokens
    generate(prompts(-(-count // 2), length), 1)
    speed = count * length / generate(prompts(count, length), 1)
    figures.append(GenerateFigure("LLM prefill", count, length, speed, "tokens/s"))
    least, most = sizes.mixed_prompt
    lengths = [chosen.randint(least, most) for _ in range(sizes.mixed_requests)]
    mixed = [prompts(1, length)[0] for length in lengths]
    seconds = generate(mixed, sizes.mixed_tokens)
    figures.append(GenerateFigure("LLM mixed", len(mixed), most + 1, seconds, "s"))
    return figures
