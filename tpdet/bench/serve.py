"""`tpdet bench serve`: load on a running OpenAI-compatible server, as its clients see it.

The JSON keys are those of `vllm bench serve`. A token's time is when its event arrived; TTFT is
from the request's sending to its first token, TPOT the mean time a later token of a request, ITL
each gap between two events.
"""

import argparse
import asyncio
import random
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from tpdet.bench.client import Address, Answer, get_json, stream
from tpdet.bench.load import lengths, prompt
from tpdet.bench.report.record import BenchRow, print_line
from tpdet.bench.run import parse_range
from tpdet.client.connection import client_key
from tpdet.errors import TpdetError, UsageError
from tpdet.verify.machine import machine
from tpdet.verify.report import append_record, run_record


def serve_command(options: argparse.Namespace) -> int:
    """Send the requests, print the metrics; 1 when some request failed."""
    for name in ("requests", "generate", "vocabulary"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)}: use 1 or more")
    if options.concurrency is not None and options.concurrency < 1:
        raise UsageError(f"--concurrency {options.concurrency}: use 1 or more")
    if options.rate is not None and options.rate <= 0:
        raise UsageError(f"--rate {options.rate}: use more than 0")
    model, answers, duration = asyncio.run(_load(options))
    found = metrics(answers, duration)
    if not found["completed"]:
        raise TpdetError(f"no request was answered; the first error: {found['errors'][0]}")
    load = {"model_id": model, "num_prompts": options.requests, "request_rate": options.rate,
            "max_concurrency": options.concurrency}  # fmt: skip
    return _report(options, model, load | found)


def _report(options: argparse.Namespace, model: str, found: dict[str, Any]) -> int:
    mode = f"rate {options.rate:g}" if options.rate else "all at once"
    if options.concurrency:
        mode += f", {options.concurrency} in flight"
    row = BenchRow(
        case="serve",
        model=Path(model).name,
        mode=mode,
        tp=options.tp,
        batch=options.requests,
        value=found["output_throughput"],
        unit="tokens/s",
        metrics=found,
    )
    print_figures(found)
    command = shlex.join(["tpdet", *sys.argv[1:]])
    record = run_record(
        "serve", machine("auto", options.tp or 1), command, [msgspec.to_builtins(row)]
    )
    if options.output is not None:
        append_record(options.output, "serve", record)
    environment = {key: value for key, value in record.items() if key != "rows"}
    print_line(found | {"environment": environment}, options.json)
    return 1 if found["failed"] else 0


async def _load(options: argparse.Namespace) -> tuple[str, list[Answer], float]:
    """The served model's name, every answer, and seconds from the first request to the last end."""
    address, headers = Address.parse(options.base_url), _headers(options.api_key_file)
    model = options.model
    if model is None:
        model = (await get_json(address, "/v1/models", headers))["data"][0]["id"]
    counts = lengths(options.requests, *parse_range(options.input), options.seed)
    limit = asyncio.Semaphore(options.concurrency or options.requests)

    async def one(index: int, count: int) -> Answer:
        body = {
            "model": model, "prompt": prompt(count, options.vocabulary, options.seed + index),
            "max_tokens": options.generate, "temperature": options.temperature,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with limit:
            try:
                return await asyncio.wait_for(
                    stream(address, "/v1/completions", headers, body), options.timeout
                )
            except TimeoutError:
                return Answer(error=f"no end within {options.timeout:g} s")

    generator, begin, tasks = random.Random(options.seed), time.perf_counter(), []
    due = begin
    for index, count in enumerate(counts):
        if options.rate is not None:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += generator.expovariate(options.rate)
        tasks.append(asyncio.create_task(one(index, count)))
    answers = await asyncio.gather(*tasks)
    return model, answers, time.perf_counter() - begin


def metrics(answers: Sequence[Answer], duration: float) -> dict[str, Any]:
    """vLLM's figures; a request that failed counts only in `failed` and `errors`."""
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
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": into,
        "total_output_tokens": out,
        "request_throughput": len(good) / duration,
        "output_throughput": out / duration,
        "total_token_throughput": (into + out) / duration,
        "errors": errors,
    }
    for name, seconds in (("ttft", first), ("tpot", later), ("itl", between)):
        times = [1e3 * second for second in seconds]
        found[f"mean_{name}_ms"] = statistics.fmean(times) if times else 0.0
        found[f"median_{name}_ms"] = statistics.median(times) if times else 0.0
        found[f"p99_{name}_ms"] = percentile(times, 99)
    return found


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between neighbours, as numpy has it; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def print_figures(found: dict[str, Any]) -> None:
    """Print the figures under the labels of `vllm bench serve`, a line each."""
    width = 50
    lines = [
        " Serving Benchmark Result ".center(width, "="),
        *(_labelled(label, found[key]) for label, key in _TOTALS),
    ]
    for title, name in _TIMES:
        lines.append(f" {title} ".center(width, "-"))
        for kind, label in (("mean", "Mean"), ("median", "Median"), ("p99", "P99")):
            lines.append(_labelled(f"{label} {name.upper()} (ms)", found[f"{kind}_{name}_ms"]))
    lines += [_labelled("Failed requests", found["failed"])] if found["failed"] else []
    lines += [f"  {error}" for error in found["errors"][:5]]
    print("\n".join([*lines, "=" * width]), flush=True)


_TOTALS = (
    ("Successful requests", "completed"),
    ("Benchmark duration (s)", "duration"),
    ("Total input tokens", "total_input_tokens"),
    ("Total generated tokens", "total_output_tokens"),
    ("Request throughput (req/s)", "request_throughput"),
    ("Output token throughput (tok/s)", "output_throughput"),
    ("Total token throughput (tok/s)", "total_token_throughput"),
)
_TIMES = (
    ("Time to First Token", "ttft"),
    ("Time per Output Token (excl. 1st token)", "tpot"),
    ("Inter-token Latency", "itl"),
)


def _labelled(label: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label}:".ljust(40) + shown


def _headers(key_file: Path | None) -> dict[str, str]:
    key = client_key(key_file)
    return {} if key is None else {"Authorization": f"Bearer {key}"}
