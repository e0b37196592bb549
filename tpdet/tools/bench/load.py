"""Requests that benchmarks send: random prompts, greedy, to the last token; how fast they go."""

import random
import time
from collections.abc import Sequence

from tpdet.engine import Engine
from tpdet.engine.engine import EngineOutput
from tpdet.requests.request import Request, SamplingParams, TokenOutput

_LEAST = 8  # that tell a rate


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


def run_all(engine: Engine) -> tuple[float, int]:
    """Step until every request is answered: the seconds, and the tokens that came."""
    tokens, begin = 0, time.perf_counter()
    while engine.has_work:
        tokens += sum(isinstance(output, TokenOutput) for output in engine.step())
    return time.perf_counter() - begin, tokens


class StepEnds:
    """When the engine's steps end, and how many sequences got how many tokens.

    Its rate is that of steady steps: those in which all sequences of a batch decode.
    """

    def __init__(self, engine: Engine) -> None:
        self._ends: list[tuple[float, int, int]] = []
        step = engine.step

        def timed() -> list[EngineOutput]:
            outputs = step()
            sequences = {(it.request_id, it.choice) for it in outputs if type(it) is TokenOutput}
            self._ends.append((time.perf_counter(), len(sequences), len(outputs)))
            return outputs

        self._methods = vars(engine)
        self._methods["step"] = timed

    def clear(self) -> None:
        """Forget the steps so far."""
        self._ends.clear()

    def steady(self, batch: int) -> float | None:
        """Tokens a second from the third step in which `batch` sequences got tokens to the last."""
        whole = [(end, tokens) for end, count, tokens in self._ends if count == batch][2:]
        if len(whole) < _LEAST:
            return None
        return sum(tokens for _, tokens in whole[1:]) / (whole[-1][0] - whole[0][0])

    def close(self) -> None:
        """Look no longer."""
        del self._methods["step"]
