"""Load on a running OpenAI-compatible server: random prompts as ids, and when their tokens came.

A token's time is when its event arrived; TTFT is from the request's sending to its first token,
TPOT the mean time of a later token of a request, ITL each gap between two events.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tpdet.client.address import Address
from tpdet.client.connection import client_key
from tpdet.tools.bench.client import Answer, get_text, stream
from tpdet.tools.bench.load import lengths, prompt
from tpdet.tools.worlds.lists import parse_range

_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Target:
    """A server's name in tables, its address, its API key's `headers` and its model's name."""

    name: str
    address: Address
    headers: Mapping[str, str]
    model: str


@dataclass(frozen=True)
class HttpLoad:
    """Requests of random prompts of `shortest` to `longest` ids, for exactly `generate` tokens.

    concurrency: requests at a time, at most; None for all. rate: requests a second, with random
    (Poisson) arrivals; None sends all at once. timeout: seconds for one request. chat: each prompt
    is a chat's message, its ids in decimals, so that its tokens are the server's to count.
    """

    requests: int
    shortest: int
    longest: int
    generate: int
    concurrency: int | None = None
    rate: float | None = None
    temperature: float = 0.0
    vocabulary: int = 1000
    seed: int = 0
    timeout: float = 600.0
    chat: bool = False

    @property
    def path(self) -> str:
        """Where requests go."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"


def load_of(options: argparse.Namespace, **others: Any) -> HttpLoad:
    """The load that flags ask for. Raises UsageError for what is no range of lengths."""
    shortest, longest = parse_range(options.input)
    fields = {
        name: getattr(options, name)
        for name in ("generate", "vocabulary", "seed", "timeout", "chat")
    }
    return HttpLoad(shortest=shortest, longest=longest, **fields, **others)


def request_body(model: str, ids: Sequence[int], load: HttpLoad) -> dict[str, Any]:
    """The body of a streamed answer that ends only after `load.generate` tokens."""
    message = {"role": "user", "content": " ".join(map(str, ids))}
    return {
        "model": model,
        **({"messages": [message]} if load.chat else {"prompt": ids}),
        "max_tokens": load.generate,
        "temperature": load.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def send(target: Target, load: HttpLoad) -> tuple[list[Answer], float]:
    """Every answer, and the seconds from the first request to the last end."""
    counts = lengths(load.requests, load.shortest, load.longest, load.seed)
    limit = asyncio.Semaphore(load.concurrency or load.requests)

    async def one(index: int, count: int) -> Answer:
        ids = prompt(count, load.vocabulary, load.seed + index)
        body = request_body(target.model, ids, load)
        async with limit:
            try:
                return await asyncio.wait_for(
                    stream(target.address, load.path, target.headers, body), load.timeout
                )
            except TimeoutError:
                return Answer(error=f"no end within {load.timeout:g} s")

    generator, begin, tasks = random.Random(load.seed), time.perf_counter(), []
    due = begin
    for index, count in enumerate(counts):
        if load.rate is not None:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += generator.expovariate(load.rate)
        tasks.append(asyncio.create_task(one(index, count)))
    answers = await asyncio.gather(*tasks)
    return answers, time.perf_counter() - begin


def metrics(
    answers: Sequence[Answer], duration: float, accepted: int | None = None
) -> dict[str, Any]:
    """vLLM's figures of what did not fail; accepted: tokens of drafts, None if not counted."""
    good = [answer for answer in answers if answer.error is None]
    errors = sorted({answer.error for answer in answers if answer.error is not None})
    into = sum(answer.input_tokens for answer in good)
    out = sum(answer.output_tokens for answer in good)
    first, later, between = [], [], []
    for answer in good:
        if not answer.pieces:
            continue
        first.append(answer.pieces[0] - answer.sent)
        if answer.output_tokens > 1:
            span = answer.pieces[-1] - answer.pieces[0]
            later.append(span / (answer.output_tokens - 1))
        between += [end - begin for begin, end in pairwise(answer.pieces)]
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": into,
        "total_output_tokens": out,
        "request_throughput": len(good) / duration,
        "output_throughput": out / duration,
        "total_token_throughput": (into + out) / duration,
        "accepted_draft_tokens": accepted,
        "errors": errors,
    }
    whole = [answer.ended - answer.sent for answer in good]
    for name, seconds in (("ttft", first), ("tpot", later), ("itl", between), ("e2el", whole)):
        times = [1e3 * second for second in seconds]
        figures[f"mean_{name}_ms"] = statistics.fmean(times) if times else 0.0
        figures[f"median_{name}_ms"] = percentile(times, 50)
        figures[f"p99_{name}_ms"] = percentile(times, 99)
    return figures


def accepted_drafts(target: Target) -> int | None:
    """Tokens of drafts that the server has found right so far, by its `/metrics`.

    None where it does not count them: it has none of vLLM's metrics. A counter with a label is
    there from its first token on.
    """
    text = get_text(target.address, "/metrics", target.headers) or ""
    if "\nvllm:" not in text:
        return None
    lines = (line for line in text.splitlines() if line.startswith(_ACCEPTED))
    return int(sum(float(line.split()[-1]) for line in lines))


def added(so_far: int | None, before: int | None, after: int | None) -> int | None:
    """A count with what came between two readings of `accepted_drafts`; None if one is."""
    if so_far is None or before is None or after is None:
        return None
    return so_far + after - before


def tell_of_drafts(name: str, figures: Mapping[str, Any]) -> None:
    """Say on standard error how many tokens came from drafts: they are no plain decoding."""
    accepted, tokens = figures["accepted_draft_tokens"], figures["total_output_tokens"]
    if accepted:
        print(
            f"{name}: {accepted:,} of {tokens:,} tokens came from drafts, which greedy answers to "
            "random prompts flatter: start it with --drafts off to time plain decoding",
            file=sys.stderr,
            flush=True,
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between neighbours; 0 of nothing."""
    return float(np.percentile(values, percent)) if values else 0.0


def bearer(key: str | None) -> dict[str, str]:
    """The header that holds a key; none without one."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def our_headers(key_file: Path | None) -> dict[str, str]:
    """The key of a file, else of the environment."""
    return bearer(client_key(key_file))
