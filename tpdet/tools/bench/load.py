"""Requests that benchmarks send: random prompts, greedy, to the last token."""

import random
from collections.abc import Sequence

from tpdet.engine import Engine
from tpdet.requests.request import Request, SamplingParams


def prompt(length: int, vocabulary: int, seed: int | str) -> tuple[int, ...]:
    """`length` token ids, the same for the same seed."""
    generator = random.Random(seed)
    return tuple(generator.randrange(vocabulary) for _ in range(length))


def lengths(count: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Random prompt lengths, even from `shortest` to `longest`, both included."""
    generator = random.Random(seed)
    return [generator.randint(shortest, longest) for _ in range(count)]


def submit(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    name: str,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> None:
    """Queue requests, greedy by default, for exactly `tokens` tokens each."""
    params = SamplingParams(
        temperature=temperature, top_p=top_p, max_tokens=tokens, ignore_eos=True
    )
    for index, ids in enumerate(prompts):
        engine.submit(Request(request_id=f"{name}-{index}", prompt_token_ids=ids, params=params))
