"""The load of `tpdet bench generate`: decode, prompts and a mixed load through a `generate` call.

It knows no engine, so that another engine's `LLM.generate` and `LLM.embed` are timed by the very
same requests (`scripts/vllm_generate.py`). Only the standard library is imported.
"""

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

Generate = Callable[[list[list[int]], int], float]
"""Answers prompts of ids by exactly that number of tokens each; the seconds of the call."""

Embed = Callable[[list[list[int]]], float]
"""Answers prompts of ids by a vector each; the seconds of the call."""

_LOW_ID = 1000  # below lie bytes and special tokens of many vocabularies
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Sizes:
    """How much is asked for; the defaults are those of the published figures.

    A decode step's time is the difference of two calls over the tokens between them, so that
    prompts and the call itself do not count. `mixed_prompt` are the least and the most ids of a
    prompt of the mixed load. contexts: lengths of single prompts; at the longest of them 1 and 8
    sequences decode. repeats: measurements of each case. vocabulary: ids are below it.
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
    contexts: tuple[int, ...] = ()
    repeats: int = 5
    vocabulary: int = 150_000
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(
            max(self.contexts, default=0) + self.many,
            self.prompt + self.many,
            self.prefill_tokens + 1,
            self.mixed_prompt[1] + self.mixed_tokens,
        )


@dataclass(frozen=True)
class GenerateFigure:
    """The median, least and most of a case's measurements; context: ids of a prompt, at most."""

    case: str
    batch: int
    context: int
    value: float
    unit: str
    least: float
    most: float

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def time_generate(generate: Generate, sizes: Sizes) -> Iterator[GenerateFigure]:
    """Every figure as soon as it is known, each after a warm-up; no prompt is sent twice."""
    load = _Calls(generate, sizes)
    for batch in sizes.batches:
        yield load.decode("LLM decode", batch, sizes.prompt)
    count = sizes.prefill_prompts
    yield load.prefill("LLM prefill", count, sizes.prefill_tokens, -(-count // 2))
    yield load.mixed()
    for context in sizes.contexts:
        yield load.prefill(f"LLM prefill of {context:,}", 1, context, 1)
    if sizes.contexts:
        longest = max(sizes.contexts)
        for batch in (1, 8):
            yield load.decode(f"LLM decode at {longest:,}", batch, longest)


def time_embed(embed: Embed, count: int, length: int, sizes: Sizes) -> GenerateFigure:
    """Prompt tokens a second of `count` prompts of a length, behind a warm-up of as many."""
    load = _Calls(lambda prompts, _: embed(prompts), sizes)
    return load.prefill("LLM embed", count, length, count)


class _Calls:
    """The calls of each case."""

    def __init__(self, generate: Generate, sizes: Sizes) -> None:
        self._generate, self._sizes = generate, sizes
        self._chosen = random.Random(sizes.seed)

    def decode(self, case: str, batch: int, length: int) -> GenerateFigure:
        """Milliseconds a step of sequences behind prompts of a length."""
        sizes = self._sizes
        self._answer(batch, length, _WARM_UP_TOKENS)
        steps = []
        for _ in range(sizes.repeats):
            short, long = (self._answer(batch, length, n) for n in (sizes.few, sizes.many))
            steps.append(1e3 * (long - short) / (sizes.many - sizes.few))
        return _figure(case, batch, length, steps, "ms")

    def prefill(self, case: str, count: int, length: int, warm_up: int) -> GenerateFigure:
        """Prompt tokens a second of `count` prompts of a length, behind `warm_up` others."""
        self._answer(warm_up, length, 1)
        seconds = (self._answer(count, length, 1) for _ in range(self._sizes.repeats))
        speeds = [count * length / second for second in seconds]
        return _figure(case, count, length, speeds, "tokens/s")

    def mixed(self) -> GenerateFigure:
        """Seconds of requests of random lengths."""
        (least, most), count = self._sizes.mixed_prompt, self._sizes.mixed_requests
        lengths = [self._chosen.randint(least, most) for _ in range(count)]
        seconds = []
        for _ in range(self._sizes.repeats):
            prompts = [next(self._prompts(1, length)) for length in lengths]
            seconds.append(self._generate(prompts, self._sizes.mixed_tokens))
        return _figure("LLM mixed", count, most + 1, seconds, "s")

    def _answer(self, count: int, length: int, tokens: int) -> float:
        return self._generate(list(self._prompts(count, length)), tokens)

    def _prompts(self, count: int, length: int) -> Iterator[list[int]]:
        low = min(_LOW_ID, self._sizes.vocabulary // 2)
        for _ in range(count):
            yield [self._chosen.randrange(low, self._sizes.vocabulary) for _ in range(length)]


def _figure(case: str, batch: int, context: int, values: list[float], unit: str) -> GenerateFigure:
    median = statistics.median(values)
    return GenerateFigure(case, batch, context, median, unit, min(values), max(values))
