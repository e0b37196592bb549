"""`tpdet bench serve`: load on a running OpenAI-compatible server, as its clients see it.

The JSON keys are those of `vllm bench serve`; `http_load` says what the times mean.
"""

import argparse
from pathlib import Path
from typing import Any

from tpdet.arguments.command_line import check_counts
from tpdet.client.address import Address
from tpdet.errors import TpdetError, UsageError
from tpdet.tools.bench.client import get_json, run_load
from tpdet.tools.bench.http_load import (
    Target,
    accepted_drafts,
    added,
    load_of,
    metrics,
    our_headers,
    send,
    tell_of_drafts,
)
from tpdet.tools.measurement.rows import BenchRow, keep, print_line
from tpdet.tools.worlds.machine import machine


def serve_command(options: argparse.Namespace) -> int:
    """Send the requests, print the metrics; 1 when some request failed."""
    check_counts(options, "requests", "generate", "vocabulary", "concurrency")
    if options.rate is not None and options.rate <= 0:
        raise UsageError(f"--rate {options.rate}: use more than 0")
    model, figures = run_load(_load(options))
    if not figures["completed"]:
        raise TpdetError(f"no request was answered; the first error: {figures['errors'][0]}")
    load = {"model_id": model, "num_prompts": options.requests, "request_rate": options.rate,
            "max_concurrency": options.concurrency}  # fmt: skip
    return _report(options, model, load | figures)


def _report(options: argparse.Namespace, model: str, figures: dict[str, Any]) -> int:
    mode = f"rate {options.rate:g}" if options.rate else "all at once"
    if options.concurrency:
        mode += f", {options.concurrency} in flight"
    row = BenchRow(
        case="serve",
        model=Path(model).name,
        mode=mode,
        tp=options.tp,
        batch=options.requests,
        value=figures["output_throughput"],
        unit="tokens/s",
        metrics=figures,
    )
    print_figures(figures)
    tell_of_drafts(model, figures)
    record = keep("serve", machine("auto", options.tp or 1), [row], options.output)
    environment = {key: value for key, value in record.items() if key != "rows"}
    print_line(figures | {"environment": environment}, options.json)
    return 1 if figures["failed"] else 0


async def _load(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The served model's name, and the figures of all answers."""
    address, headers = Address.parse(options.base_url), our_headers(options.api_key_file)
    model = options.model
    if model is None:
        model = (get_json(address, "/v1/models", headers))["data"][0]["id"]
    names = ("requests", "concurrency", "rate", "temperature")
    load = load_of(options, **{name: getattr(options, name) for name in names})
    target = Target(model, address, headers, model)
    before = accepted_drafts(target)
    answers, seconds = await send(target, load)
    return model, metrics(answers, seconds, added(0, before, accepted_drafts(target)))


def print_figures(figures: dict[str, Any]) -> None:
    """Print the figures under the labels of `vllm bench serve`, a line each."""
    width = 50
    lines = [
        " Serving Benchmark Result ".center(width, "="),
        *(_labelled(label, figures[key]) for label, key in _TOTALS),
    ]
    for title, name in _TIMES:
        lines.append(f" {title} ".center(width, "-"))
        for kind, label in (("mean", "Mean"), ("median", "Median"), ("p99", "P99")):
            lines.append(_labelled(f"{label} {name.upper()} (ms)", figures[f"{kind}_{name}_ms"]))
    if figures["accepted_draft_tokens"] is not None:
        lines.append(_labelled("Tokens from drafts", figures["accepted_draft_tokens"]))
    lines += [_labelled("Failed requests", figures["failed"])] if figures["failed"] else []
    lines += [f"  {error}" for error in figures["errors"][:5]]
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
    ("End-to-end Latency", "e2el"),
)


def _labelled(label: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label}:".ljust(40) + shown
